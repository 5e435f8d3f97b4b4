"""Oracles of the delta rule (Nested Learning 56 to 60) as loops in float64, and misreadings, most from real code."""

from typing import Any

import torch
from torch import Tensor


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def map_output(W: Tensor, x: Tensor) -> Tensor:
    """Return W x, entry by entry."""
    out = zeros(len(W))
    for o in range(W.shape[0]):
        for i in range(W.shape[1]):
            out[o] += W[o, i] * x[i]
    return out


def square(x: Tensor) -> float:
    return sum(float(v) ** 2 for v in x)


def objective(W: Tensor, W_t: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor, mean: bool = True) -> Tensor:
    total, N = 0.0, sum(valid.tolist()) if mean else 1
    for n in range(len(X)):
        if valid[n]:
            total += 0.5 * square(map_output(W, X[n]) + D[n]) / N
    return torch.tensor(total + square((W - W_t).flatten()) / (2 * eta), dtype=torch.float64)


def dgd(
    W: Tensor, x: Tensor, delta: Tensor, eta: float, form: str = "minimiser", sign: float = 1.0, write: float = 1.0
) -> Tensor:
    by = eta / (1 + eta * square(x)) if form == "minimiser" else eta / (1 + eta)
    y, new = map_output(W, x), W.clone()
    for o in range(W.shape[0]):
        for i in range(W.shape[1]):
            if form == "short":
                new[o, i] = W[o, i] - y[o] * x[i] - eta * delta[o] * x[i]
            else:
                new[o, i] = W[o, i] - by * (y[o] + sign * write * delta[o]) * x[i]
    return new


def decayed(W: Tensor, x: Tensor, delta: Tensor, eta: float, clipped: bool) -> Tensor:
    """Shrink every weight by |x|^2, as if the whole matrix lay along x."""
    left = 1 - square(x)
    new = dgd(zeros(*W.shape), x, delta, eta)
    return (max(left, 0.0) if clipped else left) * W + new


def from_outputs(W: Tensor, x: Tensor, delta: Tensor, eta: float) -> Tensor:
    by, new = eta / (1 + eta * square(x)), W.clone()
    for o in range(W.shape[0]):
        for i in range(W.shape[1]):
            new[o, i] -= by * (delta[o] * sum(delta[p] * W[p, i] for p in range(len(delta))) + delta[o] * x[i])
    return new


def normal(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor, N: float | None = None) -> Tensor:
    """Return the joint minimiser: the normal equations of 56 for each row of W, entry by entry."""
    rows = [n for n in range(len(X)) if valid[n]]
    N = float(len(rows)) if N is None else N
    i = X.shape[1]
    left, right = torch.eye(i, dtype=torch.float64) / eta, W.clone() / eta
    for n in rows:
        for a in range(i):
            for b in range(i):
                left[a, b] += X[n, a] * X[n, b] / N
            for o in range(W.shape[0]):
                right[o, a] -= D[n, o] * X[n, a] / N
    return torch.stack([torch.linalg.solve(left, row) for row in right])


def mean(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor) -> Tensor:
    rows = [n for n in range(len(X)) if valid[n]]
    total = zeros(*W.shape)
    for n in rows:
        total += dgd(W, X[n], D[n], eta) - W
    return W + total / len(rows)


def sequential(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor, order: int = 1, mean: bool = True) -> Tensor:
    N = sum(valid.tolist()) if mean else 1
    for n in range(len(X))[::order]:
        if valid[n]:
            W = dgd(W, X[n], D[n], eta / N)
    return W


def along_the_mean(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor) -> Tensor:
    rows = [n for n in range(len(X)) if valid[n]]
    x = sum(X[n] for n in rows) / len(rows)
    written = zeros(*W.shape)
    for n in rows:
        written += D[n][:, None] * X[n][None] / len(rows)
    by = eta / (1 + eta * square(x))
    return W - by * map_output(W, x)[:, None] * x[None] - by * written


def last_only(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor) -> Tensor:
    n = [n for n in range(len(X)) if valid[n]][-1]
    return dgd(W, X[n], D[n], eta)


def pads_erase(form: Any) -> Any:
    """Let padded rows erase, without writing."""
    return lambda W, X, D, eta, valid: form(W, X, D * valid[:, None], eta, torch.ones_like(valid))


def vectors(
    w: Tensor, x: Tensor, d: Tensor, g: Tensor, G: Tensor, count: Tensor, N: int, eta: float
) -> tuple[Tensor, ...]:
    """Update a row with error d[0], a gain as a diagonal matrix, and an embedding by its one-hot inputs."""
    row = dgd(w[None], x, d[:1], eta)[0]
    gain = torch.stack([dgd(g[j].reshape(1, 1), x[j : j + 1], d[j : j + 1], eta)[0, 0] for j in range(len(g))])
    table = torch.zeros_like(G)
    V = len(G)
    X = torch.cat([torch.eye(V, dtype=torch.float64)[j].expand(int(count[j]), V) for j in range(V)])
    e = G.flip(0)
    left = torch.eye(V, dtype=torch.float64) / eta + X.T @ X / N
    for k in range(G.shape[1]):
        table[:, k] = torch.linalg.solve(left, e[:, k] / eta - G[:, k])
    return row, gain, table


def whole_row(w: Tensor, x: Tensor, d: Tensor, g: Tensor, G: Tensor, count: Tensor, N: int, eta: float) -> Any:
    """Use w (1 - |x|^2), which is not a form of it."""
    _, gain, table = vectors(w, x, d, g, G, count, N, eta)
    return w * (1 - square(x)) - eta / (1 + eta * square(x)) * d[0] * x, gain, table


def one_length(w: Tensor, x: Tensor, d: Tensor, g: Tensor, G: Tensor, count: Tensor, N: int, eta: float) -> Any:
    """Shrink a gain by the length of the whole input."""
    row, _, table = vectors(w, x, d, g, G, count, N, eta)
    return row, g - eta / (1 + eta * square(x)) * (g * x + d) * x, table


def once(w: Tensor, x: Tensor, d: Tensor, g: Tensor, G: Tensor, count: Tensor, N: int, eta: float) -> Any:
    """Erase rows of an embedding once however often they are met."""
    return vectors(w, x, d, g, G, count.clamp(max=1), N, eta)


def ggd(W: Tensor, x: Tensor, delta: Tensor, eta: float, value: str, window: Tensor, weights: Tensor) -> Tensor:
    """Solve the normal equations of l2 with several proximal weights."""
    y = map_output(W, x)
    u = -delta if value == "minus_delta" else y - delta
    i = len(x)
    left, right = torch.eye(i, dtype=torch.float64) / eta, zeros(*W.shape)
    for a in range(i):
        for b in range(i):
            left[a, b] += x[a] * x[b]
        for o in range(W.shape[0]):
            right[o, a] = u[o] * x[a] + sum(weights[c] * window[c, o, a] for c in range(len(window))) / eta
    return torch.stack([torch.linalg.solve(left, row) for row in right])


ORACLE = {
    "56": objective,
    "57": dgd,
    "57b": normal,
    "57v": vectors,
    "59,60": ggd,
}

MISREAD = {
    "56": {
        "a sum over positions": lambda W, W_t, X, D, eta, valid: objective(W, W_t, X, D, eta, valid, mean=False),
        "+delta as the target": lambda W, W_t, X, D, eta, valid: objective(W, W_t, X, -D, eta, valid),
        "padded rows counted": lambda W, W_t, X, D, eta, valid: objective(W, W_t, X, D, eta, torch.ones_like(valid)),
        "eta for 1/eta": lambda W, W_t, X, D, eta, valid: objective(W, W_t, X, D, 1 / eta, valid),
    },
    "57": {
        "w(1 - |x|^2) for each weight": lambda W, x, d, eta: decayed(W, x, d, eta, clipped=False),
        "the same, clipped at 0": lambda W, x, d, eta: decayed(W, x, d, eta, clipped=True),
        "eta / (1 + eta) at |x| /= 1": lambda W, x, d, eta: dgd(W, x, d, eta, "printed"),
        "+eta' delta x', from the shorter version's 27": lambda W, x, d, eta: dgd(W, x, d, eta, sign=-1.0),
        "erasing without a step, the shorter version's 28": lambda W, x, d, eta: dgd(W, x, d, eta, "short"),
        "(I - delta delta')W": from_outputs,
        "erasing without the write": lambda W, x, d, eta: dgd(W, x, d, eta, write=0.0),
        "a plain step": lambda W, x, d, eta: W - eta * d[:, None] * x[None],
    },
    "57b": {
        "erasing along the mean input": along_the_mean,
        "the last sample only": last_only,
        "padded rows erase": pads_erase(normal),
        "the mean of single steps": mean,
        "one after another": sequential,
        "sums for means": lambda W, X, D, eta, valid: normal(W, X, D, eta, valid, N=1.0),
    },
    "57v": {
        "the whole row by 1 - |x|^2": whole_row,
        "a gain by the length of the whole input": one_length,
        "a row of a table erased once": once,
    },
    "59,60": {
        "the last weights only": lambda W, x, d, eta, value, window, weights: ggd(
            W, x, d, eta, value, window[:1], torch.ones(1, dtype=torch.float64)
        ),
        "weights not shared out": lambda W, x, d, eta, value, window, weights: ggd(
            W, x, d, eta, value, window, torch.ones_like(weights)
        ),
        "+delta as the value": lambda W, x, d, eta, value, window, weights: ggd(W, x, -d, eta, value, window, weights),
    },
}
