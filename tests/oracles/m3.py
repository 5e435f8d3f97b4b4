"""Oracles of memories of gradients (nested 30 to 52, 75) as loops in float64, and misreadings of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Run = tuple[Tensor, ...]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B, entry by entry."""
    out = zeros(A.shape[0], B.shape[1])
    for a in range(A.shape[0]):
        for b in range(B.shape[1]):
            out[a, b] = sum(A[a, k] * B[k, b] for k in range(A.shape[1]))
    return out


def elementwise(function: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """A function of the entries of tensors of one shape."""
    out = zeros(*tensors[0].shape)
    flat = out.view(-1)
    for k, values in enumerate(zip(*(t.flatten().tolist() for t in tensors), strict=True)):
        flat[k] = function(*values)
    return out


def norm(x: Tensor) -> float:
    return math.sqrt(sum(v * v for v in x.flatten().tolist()))


def descent(W: Tensor, X: Tensor, D: Tensor, step: float, mean: bool = False, sign: float = -1.0) -> Tensor:
    new = W.clone()
    for n in range(len(X)):
        for o in range(W.shape[0]):
            for i in range(W.shape[1]):
                new[o, i] += sign * step * D[n, o] * X[n, i] / (len(X) if mean else 1)
    return new


def dot_proximal(W: Tensor, X: Tensor, D: Tensor, step: float, half: float = 0.5) -> Tensor:
    """The normal equations of <W x, delta> + |W - W_t|^2 / (2 step), over all entries of W at once."""
    size = W.numel()
    left, right = zeros(size, size), zeros(size)
    for o in range(W.shape[0]):
        for i in range(W.shape[1]):
            k = o * W.shape[1] + i
            left[k, k] = 2 * half / step
            right[k] = W[o, i] * 2 * half / step - sum(D[n, o] * X[n, i] for n in range(len(X)))
    return torch.linalg.solve(left, right).view_as(W)


def momentum(W: Tensor, m: Tensor, g: Tensor, beta: float, step: float, nesterov: bool = False) -> Run:
    new = elementwise(lambda a, b: beta * a - step * b, m, g)
    if nesterov:
        return elementwise(lambda w, a, b: w + beta * a - step * b, W, new, g), new
    return elementwise(lambda w, a: w + a, W, new), new


def newton_schulz(
    m: Tensor, steps: int = 5, abc: Sequence[float] = (3.4445, -4.7750, 2.0315), scale: Any = norm
) -> Tensor:
    X = elementwise(lambda v: v / (scale(m) + 1e-7), m)
    for _ in range(steps):
        S = product(X, X.T)
        SX = product(S, X)
        X = elementwise(lambda x, y, z: abc[0] * x + abc[1] * y + abc[2] * z, X, SX, product(S, SX))
    return X


def printed_step(m: Tensor) -> Tensor:
    """One term O - g too many."""
    g = elementwise(lambda v: v / (norm(m) + 1e-7), m)
    X = g
    for _ in range(5):
        X = elementwise(lambda x, y, v: x - 0.25 * (x - v + 2 * (y - x)), X, product(product(X, X.T), X), g)
    return X


def muon(W: Tensor, m: Tensor, g: Tensor, beta: float, step: float, NS: Any = newton_schulz) -> Run:
    _, new = momentum(W, m, g, beta, step)
    return elementwise(lambda w, a: w + a, W, NS(new)), new


def of_gradient(W: Tensor, m: Tensor, g: Tensor, beta: float, step: float) -> Run:
    """Apply NS to the gradient instead of the memory."""
    return momentum(W, m, newton_schulz(g), beta, step)


def stepped_after(W: Tensor, m: Tensor, g: Tensor, beta: float, step: float) -> Run:
    _, new = momentum(W, m, g, beta, step)
    return elementwise(lambda w, a: w + step * a, W, newton_schulz(new)), new


def preconditioned(m: Tensor, g: Tensor, beta: float, step: float, P: Tensor) -> Tensor:
    return elementwise(lambda a, b: beta * a - step * b, m, product(P, g))


def delta_momentum(
    m: Tensor, g: Tensor, beta: float, step: float, P: Tensor, unit: bool = True, erase: float = 1.0
) -> Tensor:
    h = elementwise(lambda v: v / (norm(g) + 1e-8), g) if unit else g
    inner, erased = product(h.T, h), zeros(*m.shape)
    for o in range(m.shape[0]):
        for i in range(m.shape[1]):
            for k in range(m.shape[1]):
                erased[o, i] += m[o, k] * ((beta if k == i else 0.0) - erase * inner[k, i])
    return elementwise(lambda a, b: a - step * b, erased, product(P, g))


def from_the_left(m: Tensor, g: Tensor, beta: float, step: float, P: Tensor) -> Tensor:
    h = elementwise(lambda v: v / (norm(g) + 1e-8), g)
    left = -product(h, h.T)
    for k in range(len(left)):
        left[k, k] += beta
    return elementwise(lambda a, b: a - step * b, product(left, m), product(P, g))


def proximal(m: Tensor, g: Tensor, beta: float, step: float, P: Tensor) -> Tensor:
    """Solve the normal equations of 1/2 |m' g' + P|^2 + |m' - share m|^2 / (2 step), row by row."""
    left = product(g.T, g)
    for k in range(len(left)):
        left[k, k] += 1 / step
    right = elementwise(lambda a, b: beta * a / step - b, m, product(P, g))
    return torch.stack([torch.linalg.solve(left.T, row) for row in right])


def deep_momentum(
    W: Tensor, A1: Tensor, A2: Tensor, g: Tensor, beta: float, step: float, lr: float, loss: str = "align",
    row_rms: bool = False, squashed: bool = True, sign: float = -1.0,
) -> Run:  # fmt: skip
    """Take the gradient of L2 by autograd of its definition."""

    def rms(x: Tensor) -> Tensor:
        size = (x * x).mean(1, keepdim=True) if row_rms else (x * x).mean()
        return torch.sqrt(size) + 1e-8

    u = g / rms(g)
    A1, A2 = A1.clone().requires_grad_(), A2.clone().requires_grad_()

    def read(A1: Tensor, A2: Tensor) -> Tensor:
        rows = [A1 @ (torch.tanh(A2 @ row) if squashed else A2 @ row) for row in u]
        return torch.stack(rows)

    answers = read(A1, A2)
    value = (answers * u).sum() / len(u) if loss == "align" else answers.sum()
    d1, d2 = torch.autograd.grad(value, (A1, A2))
    A1, A2 = (beta * A1 + sign * step * d1).detach(), (beta * A2 + sign * step * d2).detach()
    out = read(A1, A2)
    return W + lr * out / rms(out), A1, A2


def feature_momentum(m: Tensor, g: Tensor, beta: float, step: float, power: Any = lambda v: v * abs(v)) -> Tensor:
    return elementwise(lambda a, b: beta * a - step * power(b), m, g)


def mapped_momentum(W: Tensor, m: Tensor, NS: Any = newton_schulz) -> Tensor:
    return elementwise(lambda w, a: w + a, W, NS(m))


def literal(
    W: Tensor, gradients: Tensor, lr: float, betas: Sequence[float], alpha: float, f: int,
    slow: float = 1.0, extra: int = 0, current: bool = False, averaged: bool = False, of: str = "M",
) -> Run:  # fmt: skip
    """Return every W; the slow term is recomputed from all gradients when a period ends."""
    M1, V, O2, results = zeros(*W.shape), zeros(*W.shape), zeros(*W.shape), []
    for n, g in enumerate(gradients, 1):
        a, b = (betas[0], 1 - betas[0]) if averaged else (1.0, betas[0])
        M1 = elementwise(lambda m, v, a=a, b=b: a * m + b * v, M1, g)
        V = elementwise(lambda s, v: s + betas[1] * v * v, V, g)
        periods = n // f
        slow_now = slow_memory(gradients, betas[2], f, periods, extra) if n % f == 0 else None
        if current and slow_now is not None:
            O2 = newton_schulz(slow_now)
        O1 = newton_schulz(M1 if of == "M" else g)
        W = elementwise(lambda w, x, y, s: w - lr * (x + slow * alpha * y) / (math.sqrt(s) + 1e-8), W, O1, O2, V)
        if slow_now is not None:
            O2 = newton_schulz(slow_now)
        results.append(W)
    return tuple(results)


def slow_memory(gradients: Tensor, b3: float, f: int, periods: int, extra: int) -> Tensor:
    """Return b3 times the gradients of all periods, each of length f, or longer by `extra` at its start."""
    total = zeros(*gradients.shape[1:])
    for k in range(periods):
        for n in range(max(0, k * f - extra), (k + 1) * f):
            total += b3 * gradients[n]
    return total


def ema(
    W: Tensor, gradients: Tensor, lr: float, betas: Sequence[float], alpha: float, f: int, decay: float,
    current: bool = False, shared: bool = True, scale: Any = lambda o, i: 0.2 * math.sqrt(max(o, i)),
    coupled: bool = False, summed: bool = False,
) -> Run:  # fmt: skip
    """Return every W; running means are weighted sums of all gradients."""
    O2, results = zeros(*W.shape), []
    for n in range(1, len(gradients) + 1):
        M1 = weighted(list(gradients[:n]), betas[0])
        ended = n % f == 0
        periods = [gradients[k * f : (k + 1) * f].sum(0) / f for k in range(n // f)]
        if ended and summed:
            periods = periods[-1:]
        if ended and current:
            O2 = newton_schulz(weighted(periods, betas[2]))
        O1 = newton_schulz(M1)
        O = elementwise(lambda x, y: (x + alpha * y) / ((1 + alpha) if shared else 1), O1, O2)
        by = scale(*W.shape)
        if coupled:
            O = elementwise(lambda x, w: x + decay * w, O, W)
        left = 1.0 if coupled else 1 - lr * decay
        W = elementwise(lambda w, x, left=left, by=by: left * w - lr * by * x, W, O)
        if ended:
            O2 = newton_schulz(weighted(periods, betas[2]))
        results.append(W)
    return tuple(results)


def weighted(values: list[Tensor], beta: float) -> Tensor:
    """Return the running mean with its bias corrected: the sum of (1 - beta) beta^age x, over 1 - beta^n."""
    n = len(values)
    return sum(((1 - beta) * beta ** (n - 1 - k) * x for k, x in enumerate(values)), zeros(*values[0].shape)) / (
        1 - beta**n
    )


ORACLE = {
    "30,54": descent,
    "31,55": dot_proximal,
    "33": momentum,
    "42": muon,
    "44": newton_schulz,
    "47": preconditioned,
    "49": delta_momentum,
    "50": deep_momentum,
    "51": feature_momentum,
    "52": mapped_momentum,
    "75": literal,
    "75e": ema,
}

MISREAD = {
    "30,54": {
        "+step": lambda *a: descent(*a, sign=1.0),
        "a mean over positions": lambda *a: descent(*a, mean=True),
        "input and error exchanged": lambda W, X, D, step: descent(W.T, D, X, step),
    },
    "31,55": {
        "without the half": lambda *a: dot_proximal(*a, half=1.0),
        "ascent": lambda W, X, D, step: dot_proximal(W, X, -D, step),
    },
    "33": {
        "an average of gradients": lambda W, m, g, beta, step: momentum(W, m, g, beta, step * (1 - beta)),
        "Nesterov's": lambda *a: momentum(*a, nesterov=True),
        "+step": lambda W, m, g, beta, step: momentum(W, m, g, beta, -step),
    },
    "42": {
        "NS of g instead of m": of_gradient,
        "the step twice": stepped_after,
        "m not mapped": momentum,
    },
    "44": {
        "a term O - g, as printed": printed_step,
        "the cubic polynomial": lambda m: newton_schulz(m, abc=(1.5, -0.5, 0.0)),
        "four steps": lambda m: newton_schulz(m, steps=4),
        "divided by the largest entry": lambda m: newton_schulz(m, scale=lambda x: float(x.abs().max())),
        "not normalised": lambda m: newton_schulz(m, scale=lambda x: 1.0),
    },
    "47": {
        "P from the right": lambda m, g, beta, step, P: preconditioned(m.T, g.T, beta, step, P),
        "no P": lambda m, g, beta, step, P: preconditioned(m, g, beta, step, torch.eye(len(P)).double()),
        "P on the memory": lambda m, g, beta, step, P: elementwise(lambda a, b: beta * a - step * b, product(P, m), g),
    },
    "49": {
        "(momentum I - g'g) from the left": from_the_left,
        "g not normalised": lambda *a: delta_momentum(*a, unit=False),
        "the erasing scaled by step": lambda m, g, beta, step, P: delta_momentum(m, g, beta, step, P, erase=step),
        "no erasing": lambda *a: delta_momentum(*a, erase=0.0),
    },
    "50": {
        "ascent": lambda *a: deep_momentum(*a, sign=1.0),
        "rms of each row": lambda *a: deep_momentum(*a, row_rms=True),
        "a linear memory": lambda *a: deep_momentum(*a, squashed=False),
        "the gradient in place of u": lambda W, A1, A2, g, beta, step, lr, loss: (
            W + lr * g / g.square().mean().sqrt(),
            *deep_momentum(W, A1, A2, g, beta, step, lr, loss)[1:],
        ),
    },
    "51": {
        "a square without its sign": lambda *a: feature_momentum(*a, power=lambda v: v * v),
        "no feature": lambda *a: feature_momentum(*a, power=lambda v: v),
        "features of the memory": lambda m, g, beta, step: feature_momentum(m, g.abs().sqrt() * g.sign(), beta, step),
    },
    "52": {
        "not mapped": lambda W, m: W + m,
        "-m": lambda W, m: mapped_momentum(W, -m),
        "mapped with W": lambda W, m: newton_schulz(W + m),
    },
    "75": {
        "minus on the slow term": lambda *a: literal(*a, slow=-1.0),
        "f + 1 gradients": lambda *a: literal(*a, extra=1),
        "O2 from the current period": lambda *a: literal(*a, current=True),
        "NS of g instead of M": lambda *a: literal(*a, of="g"),
        "running means for sums": lambda *a: literal(*a, averaged=True),
    },
    "75e": {
        "O2 from the current period": lambda *a: ema(*a, current=True),
        "not divided by 1 + alpha": lambda *a: ema(*a, shared=False),
        "scaled by sqrt(max(1, o/i))": lambda *a: ema(*a, scale=lambda o, i: math.sqrt(max(1.0, o / i))),
        "decay in the gradient": lambda *a: ema(*a, coupled=True),
        "the last period only": lambda *a: ema(*a, summed=True),
    },
}
