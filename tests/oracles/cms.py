"""Oracles of Nested Learning 70 to 74, 97 and 7.3a as loops in float64, token by token, and misreadings."""

import cmath
import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.titans import outer, silu, slope, times, turned, unit, zeros

EPS = 1e-6


def mlp(z: Tensor, U: Tensor, V: Tensor) -> Tensor:
    return times(V, silu(times(U, z)))


def normed(z: Tensor, gain: Tensor) -> Tensor:
    size = math.sqrt(sum(a * a for a in z.tolist()) / len(z) + EPS)
    return torch.stack([g * a / size for g, a in zip(gain, z, strict=True)])


def chain_of(x: Tensor, weights: Any, gains: Tensor, link: str, inputs: Any = None, **variant: Any) -> Tensor:
    """Run one token through the levels, with residuals or in the plain composition of the paper."""
    order = range(len(weights))
    y = zeros(len(x))
    z = x
    for n, l in enumerate(reversed(order) if variant.get("slow_first") else order):
        if link == "plain":
            z = z if n == 0 and not variant.get("always") else normed(z, gains[l])
        else:
            z = x + y if n or variant.get("always") else x
            z = normed(z, gains[l]) if (n or variant.get("always")) and not variant.get("unnormed") else z
            z = x if variant.get("parallel") else z
        if inputs is not None:
            inputs[l] = z
        out = mlp(z, *weights[l])
        if link == "plain":
            y = z = out
        else:
            y = y + out
    return x + y if variant.get("stream") else y


def chain(x: Tensor, U: Tensor, V: Tensor, gains: Tensor, link: str, **variant: Any) -> Tensor:
    """Return y of every token [B, T, D]; U [K, F, D], V [K, D, F]."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            out[b, t] = chain_of(x[b, t], list(zip(U, V, strict=True)), gains, link, **variant)
    return out


def aggregate(x: Tensor, U: Tensor, V: Tensor, a: Tensor, **variant: Any) -> Tensor:
    """Return Σ_l a_l MLP_l(x)."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            y, z = zeros(x.shape[2]), x[b, t]
            for l in range(len(a)):
                built = mlp(z, U[l], V[l])
                y = y + (1 / len(a) if variant.get("mean") else 1.0 if variant.get("sum") else float(a[l])) * built
                z = built if variant.get("chain") else z
            out[b, t] = y
    return out


def gradients(U: Tensor, V: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ½ Σ (V σ(U κ) - ν)² by U and V."""
    a = times(U, key)
    h = silu(a)
    e = times(V, h) - value
    return outer(turned(V, e) * slope(a), key), outer(e, h)


def softplus(a: float) -> float:
    return math.log1p(math.exp(a))


def run(x: Tensor, w: Any, chunks: Any, nested: bool = False, full: bool = False, **variant: Any) -> tuple[Tensor, ...]:
    """Read a stream with levels that learn; return the outputs and the final weights of each row.

    `w`: U [K, F, D], V [K, D, F], gains, keys and values [K, D, D], and of steps rows [K, D] and biases [K].
    """
    U, V, gains, keys, values, rows, biases = w
    B, T, _ = x.shape
    K = len(chunks)
    chunks = chunks[::-1] if variant.get("inverted") else chunks
    out = torch.empty_like(x)
    ends: list[Any] = []
    theta: list[Any] = []
    for b in range(B):
        theta = theta if variant.get("one_state") and b else [(U[l].clone(), V[l].clone()) for l in range(K)]
        starts = [(U[l].clone(), V[l].clone()) for l in range(K)]
        terms: list[Any] = [[] for _ in range(K)]
        slow: list[Any] = [[] for _ in range(K)]
        stored_tokens: list[Any] = [[] for _ in range(K)]
        blended: Any = None
        for t in range(T):
            inputs: dict[int, Tensor] = {}
            y = chain_of(x[b, t], theta, gains, "residual", inputs)
            if variant.get("blend"):
                blended = y if blended is None else 0.9 * blended + 0.1 * y
                y = blended
            out[b, t] = y
            steps = [softplus(float(sum(rows[l] * inputs[l])) + float(biases[l])) for l in range(K)]
            for l in range(K):
                z = x[b, t] if variant.get("block") else inputs[l]
                e = gradients(theta[l][0], theta[l][1], unit(times(keys[l], z)), times(values[l], z))
                terms[l].append((steps[l], e))
                if l + 1 < K:
                    slow[l].append((steps[l + 1], e))
                    stored_tokens[l].append((steps[l], steps[l + 1], unit(times(keys[l], z)), times(values[l], z)))
            i = t + 1
            for l, C in enumerate(chunks):
                if variant.get("at_once"):
                    theta[l] = updated(theta[l], terms[l][-1:], 1)
                elif variant.get("calls"):
                    pass
                elif i % C == 0:
                    n = C + 1 if variant.get("more") else C
                    theta[l] = updated(
                        theta[l], terms[l][-n:], 1 / C if variant.get("mean") else 1, variant.get("outside")
                    )
                elif variant.get("nil"):
                    theta[l] = tuple(torch.zeros_like(W) for W in theta[l])
            for l in range(K - 1 if nested else 0):
                if full and i % chunks[l + 1] == 0:
                    starts[l] = descended(starts[l], stored_tokens[l][-chunks[l + 1] :], chunks[l])
                    theta[l] = starts[l]
                elif i % (chunks[l] if variant.get("own_chunk") else chunks[l + 1]) == 0 and not variant.get("never"):
                    starts[l] = updated(starts[l], slow[l][-chunks[l + 1] :], 0 if variant.get("fixed") else 1)
                    theta[l] = starts[l]
        ends.append(theta)
    return (out, *(torch.stack([end[l][n] for end in ends]) for l in range(K) for n in range(2)))


def nested(*arguments: Any) -> tuple[Tensor, ...]:
    """Run nested levels, which restart from a start that the slower level's steps move."""
    return run(*arguments, nested=True)


def whole(*arguments: Any) -> tuple[Tensor, ...]:
    """Run nested levels whose start descends through every update made from it."""
    return run(*arguments, nested=True, full=True)


def slower_loss(U: Any, V: Any, stored_tokens: Any, C: int) -> complex:
    """Return Σ s^(l+1)_t ½‖V_t σ(U_t κ) - ν‖² over a slower chunk; complex weights allowed, changing after C tokens."""
    total, terms = 0j, []
    for t, (own_step, slower, key, value) in enumerate(stored_tokens):
        k, v = key.tolist(), value.tolist()
        a = [sum(u * x for u, x in zip(row, k, strict=True)) for row in U]
        s = [1 / (1 + cmath.exp(-x)) for x in a]
        h = [x * p for x, p in zip(a, s, strict=True)]
        e = [sum(w * x for w, x in zip(row, h, strict=True)) - y for row, y in zip(V, v, strict=True)]
        total += slower * sum(x * x for x in e) / 2
        d = [sum(V[o][f] * e[o] for o in range(len(e))) * (s[f] + a[f] * s[f] * (1 - s[f])) for f in range(len(a))]
        terms.append((own_step, d, k, e, h))
        if (t + 1) % C == 0:
            for own_step, d, k, e, h in terms:
                U = [[u - own_step * p * x for u, x in zip(row, k, strict=True)] for row, p in zip(U, d, strict=True)]
                V = [[w - own_step * p * x for w, x in zip(row, h, strict=True)] for row, p in zip(V, e, strict=True)]
            terms = []
    return total


def descended(start: Any, stored_tokens: Any, C: int) -> Any:
    """Subtract the gradient of that loss from the start, by a complex step for every entry."""
    tiny, plain = 1e-30, [W.tolist() for W in start]
    results = [W.clone() for W in start]
    for n, W in enumerate(start):
        for i in range(W.shape[0]):
            for j in range(W.shape[1]):
                bent = [[list(row) for row in M] for M in plain]
                bent[n][i][j] += tiny * 1j
                results[n][i, j] -= slower_loss(bent[0], bent[1], stored_tokens, C).imag / tiny
    return tuple(results)


def updated(weights: Any, terms: Any, share: float, outside: Any = None) -> Any:
    """Return θ - Σ step_t e_t; with `outside`, the last token's step multiplies the sum."""
    results = []
    for n, W in enumerate(weights):
        total = zeros(*W.shape)
        for step, e in terms:
            total = total + (terms[-1][0] if outside else step) * e[n]
        results.append(W - share * total)
    return tuple(results)


def stack(layers: int, chunks: Any, place: str, **variant: Any) -> tuple[float, ...]:
    """Return for each layer the chunk sizes of its levels and their donor layers, -1 for zeros."""
    K, results = len(chunks), []
    for n in range(layers):
        if variant.get("deep_fast"):
            results += [chunks[K - 1 - int(n * K / layers)], n] if place == "depth" else [n, *chunks]
        elif place == "depth":
            results += [next(C for l, C in enumerate(chunks) if l <= n * K / layers < l + 1), n]
        elif place == "grow":
            results += [*chunks, n, *([n] * (K - 1) if variant.get("copies") else [-1] * (K - 1))]
        else:
            results += [*chunks, *(n if variant.get("own") else round(l * (layers - 1) / (K - 1)) for l in range(K))]
    return tuple(float(n) for n in results)


def block(x: Tensor, A: Tensor, B: Tensor, **variant: Any) -> Tensor:
    """Return r + B r with r = x + A x, for two linear maps in place of memory and MLP."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            r = times(A, x[b, t]) + (0 if variant.get("bare") else x[b, t])
            fed = x[b, t] if variant.get("parallel") else r
            out[b, t] = times(B, fed) + (0 if variant.get("last_bare") else r)
    return out


ORACLE = {
    "70": chain,
    "71": run,
    "72": nested,
    "72 full": whole,
    "74": aggregate,
    "7.3a": stack,
    "97": block,
}

MISREAD = {
    "70": {
        "the slowest first": lambda *a: chain(*a, slow_first=True),
        "a norm before the first": lambda *a: chain(*a, always=True),
        "with the block's residual": lambda *a: chain(*a, stream=True),
    },
    "70 residual": {
        "no norm between": lambda *a: chain(*a, unnormed=True),
        "all levels fed the input": lambda *a: chain(*a, parallel=True),
    },
    "71": {
        "C + 1 terms": lambda *a: run(*a, more=True),
        "mean for sum": lambda *a: run(*a, mean=True),
        "0 read as no weights": lambda *a: run(*a, nil=True),
        "cadence in calls": lambda *a: run(*a, calls=True),
        "the step outside of the sum": lambda *a: run(*a, outside=True),
        "activations blended": lambda *a: run(*a, blend=True),
        "levels regressed on the block's input": lambda *a: run(*a, block=True),
        "seen inside its own chunk": lambda *a: run(*a, at_once=True),
        "one state for the batch": lambda *a: run(*a, one_state=True),
        "level 0 the slowest": lambda *a: run(*a, inverted=True),
    },
    "72": {
        "no restart": lambda *a: run(*a, nested=True, never=True),
        "restart by its own chunk": lambda *a: run(*a, nested=True, own_chunk=True),
        "a start that never moves": lambda *a: run(*a, nested=True, fixed=True),
    },
    "72 full": {
        "the first order": lambda *a: run(*a, nested=True),
        "no restart": lambda *a: run(*a, nested=True, never=True),
    },
    "74": {
        "fed the chain": lambda *a: aggregate(*a, chain=True),
        "the mean": lambda *a: aggregate(*a, mean=True),
        "the sum": lambda *a: aggregate(*a, sum=True),
    },
    "7.3a": {"the deep ones fast": lambda *a: stack(*a, deep_fast=True)},
    "97": {
        "side by side": lambda *a: block(*a, parallel=True),
        "no residual at the memory": lambda *a: block(*a, bare=True),
        "no residual at the levels": lambda *a: block(*a, last_bare=True),
    },
}
