"""Oracles of Nested Learning 70 to 74, 97, 7.1a and 7.3a as loops in float64, token by token, and misreadings."""

import cmath
import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.titans import outer, silu, slope, times, turned, unit, zeros

EPS = 1e-6


def chunk_sizes(frequencies: Any, slowest: int, **how: Any) -> tuple[float, ...]:
    """A level of frequency f is updated f times while the slowest is updated once."""
    if how.get("tens"):
        return tuple(float(10**n) for n in range(len(frequencies)))
    if how.get("inverted"):
        return tuple(float(slowest // f) for f in reversed(frequencies))
    if how.get("product"):
        return tuple(float(slowest * f) for f in frequencies)
    return tuple(float(n) for f in frequencies for n in range(1, slowest + 1) if n * f == slowest)


def mlp(z: Tensor, U: Tensor, V: Tensor) -> Tensor:
    return times(V, silu(times(U, z)))


def normed(z: Tensor, gain: Tensor) -> Tensor:
    size = math.sqrt(sum(a * a for a in z.tolist()) / len(z) + EPS)
    return torch.stack([g * a / size for g, a in zip(gain, z, strict=True)])


def chain_of(x: Tensor, weights: Any, gains: Tensor, link: str, inputs: Any = None, **how: Any) -> Tensor:
    """One token: level after level, each with the link past it, or the print's plain composition."""
    order = range(len(weights))
    y = zeros(len(x))
    z = x
    for n, l in enumerate(reversed(order) if how.get("slow_first") else order):
        if link == "plain":
            z = z if n == 0 and not how.get("always") else normed(z, gains[l])
        else:
            z = x + y if n or how.get("always") else x
            z = normed(z, gains[l]) if (n or how.get("always")) and not how.get("unnormed") else z
            z = x if how.get("parallel") else z
        if inputs is not None:
            inputs[l] = z
        out = mlp(z, *weights[l])
        if link == "plain":
            y = z = out
        else:
            y = y + out
    return x + y if how.get("stream") else y


def chain(x: Tensor, U: Tensor, V: Tensor, gains: Tensor, link: str, **how: Any) -> Tensor:
    """y of every token [B, T, D]; U [K, F, D], V [K, D, F]."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            out[b, t] = chain_of(x[b, t], list(zip(U, V, strict=True)), gains, link, **how)
    return out


def aggregate(x: Tensor, U: Tensor, V: Tensor, a: Tensor, **how: Any) -> Tensor:
    """Σ_l a_l MLP_l(x)."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            y, z = zeros(x.shape[2]), x[b, t]
            for l in range(len(a)):
                made = mlp(z, U[l], V[l])
                y = y + (1 / len(a) if how.get("mean") else 1.0 if how.get("sum") else float(a[l])) * made
                z = made if how.get("chain") else z
            out[b, t] = y
    return out


def gradients(U: Tensor, V: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """By U and V, of ½ Σ (V σ(U κ) - ν)²."""
    a = times(U, key)
    h = silu(a)
    e = times(V, h) - value
    return outer(turned(V, e) * slope(a), key), outer(e, h)


def softplus(a: float) -> float:
    return math.log1p(math.exp(a))


def run(x: Tensor, w: Any, chunks: Any, nested: bool = False, full: bool = False, **how: Any) -> tuple[Tensor, ...]:
    """A stream read by levels that learn: outputs, and the weights at the end of each row.

    `w`: U [K, F, D], V [K, D, F], gains, keys and values [K, D, D], and of steps rows [K, D] and biases [K].
    """
    U, V, gains, keys, values, rows, biases = w
    B, T, _ = x.shape
    K = len(chunks)
    chunks = chunks[::-1] if how.get("inverted") else chunks
    out = torch.empty_like(x)
    ends: list[Any] = []
    theta: list[Any] = []
    for b in range(B):
        theta = theta if how.get("one_state") and b else [(U[l].clone(), V[l].clone()) for l in range(K)]
        starts = [(U[l].clone(), V[l].clone()) for l in range(K)]
        terms: list[Any] = [[] for _ in range(K)]
        slow: list[Any] = [[] for _ in range(K)]
        seen: list[Any] = [[] for _ in range(K)]
        blended: Any = None
        for t in range(T):
            inputs: dict[int, Tensor] = {}
            y = chain_of(x[b, t], theta, gains, "residual", inputs)
            if how.get("blend"):
                blended = y if blended is None else 0.9 * blended + 0.1 * y
                y = blended
            out[b, t] = y
            steps = [softplus(float(sum(rows[l] * inputs[l])) + float(biases[l])) for l in range(K)]
            for l in range(K):
                z = x[b, t] if how.get("block") else inputs[l]
                e = gradients(theta[l][0], theta[l][1], unit(times(keys[l], z)), times(values[l], z))
                terms[l].append((steps[l], e))
                if l + 1 < K:
                    slow[l].append((steps[l + 1], e))
                    seen[l].append((steps[l], steps[l + 1], unit(times(keys[l], z)), times(values[l], z)))
            i = t + 1
            for l, C in enumerate(chunks):
                if how.get("at_once"):
                    theta[l] = moved(theta[l], terms[l][-1:], 1)
                elif how.get("calls"):
                    pass
                elif i % C == 0:
                    n = C + 1 if how.get("more") else C
                    theta[l] = moved(theta[l], terms[l][-n:], 1 / C if how.get("mean") else 1, how.get("outside"))
                elif how.get("nil"):
                    theta[l] = tuple(torch.zeros_like(W) for W in theta[l])
            for l in range(K - 1 if nested else 0):
                if full and i % chunks[l + 1] == 0:
                    starts[l] = descended(starts[l], seen[l][-chunks[l + 1] :], chunks[l])
                    theta[l] = starts[l]
                elif i % (chunks[l] if how.get("own_chunk") else chunks[l + 1]) == 0 and not how.get("never"):
                    starts[l] = moved(starts[l], slow[l][-chunks[l + 1] :], 0 if how.get("fixed") else 1)
                    theta[l] = starts[l]
        ends.append(theta)
    return (out, *(torch.stack([end[l][n] for end in ends]) for l in range(K) for n in range(2)))


def nested(*given: Any) -> tuple[Tensor, ...]:
    """The same where each level begins again, from a start that the slower level's steps move."""
    return run(*given, nested=True)


def whole(*given: Any) -> tuple[Tensor, ...]:
    """The same where the start descends through every update that was made from it."""
    return run(*given, nested=True, full=True)


def slower_loss(U: Any, V: Any, seen: Any, C: int) -> complex:
    """Σ s^(l+1)_t ½‖V_t σ(U_t κ) - ν‖² over a slower chunk, of weights that may be complex and move after C tokens."""
    total, terms = 0j, []
    for t, (own, slower, key, value) in enumerate(seen):
        k, v = key.tolist(), value.tolist()
        a = [sum(u * x for u, x in zip(row, k, strict=True)) for row in U]
        s = [1 / (1 + cmath.exp(-x)) for x in a]
        h = [x * p for x, p in zip(a, s, strict=True)]
        e = [sum(w * x for w, x in zip(row, h, strict=True)) - y for row, y in zip(V, v, strict=True)]
        total += slower * sum(x * x for x in e) / 2
        d = [sum(V[o][f] * e[o] for o in range(len(e))) * (s[f] + a[f] * s[f] * (1 - s[f])) for f in range(len(a))]
        terms.append((own, d, k, e, h))
        if (t + 1) % C == 0:
            for own, d, k, e, h in terms:
                U = [[u - own * p * x for u, x in zip(row, k, strict=True)] for row, p in zip(U, d, strict=True)]
                V = [[w - own * p * x for w, x in zip(row, h, strict=True)] for row, p in zip(V, e, strict=True)]
            terms = []
    return total


def descended(start: Any, seen: Any, C: int) -> Any:
    """The start less the gradient of that loss by it, from a step into the imaginary for every entry."""
    tiny, plain = 1e-30, [W.tolist() for W in start]
    found = [W.clone() for W in start]
    for n, W in enumerate(start):
        for i in range(W.shape[0]):
            for j in range(W.shape[1]):
                bent = [[list(row) for row in M] for M in plain]
                bent[n][i][j] += tiny * 1j
                found[n][i, j] -= slower_loss(bent[0], bent[1], seen, C).imag / tiny
    return tuple(found)


def moved(weights: Any, terms: Any, share: float, outside: Any = None) -> Any:
    """θ - Σ step_t e_t; `outside` the sum stands the last token's step."""
    found = []
    for n, W in enumerate(weights):
        total = zeros(*W.shape)
        for step, e in terms:
            total = total + (terms[-1][0] if outside else step) * e[n]
        found.append(W - share * total)
    return tuple(found)


def stack(layers: int, chunks: Any, place: str, **how: Any) -> tuple[float, ...]:
    """For each layer the chunks of its levels, and whose MLP each is, -1 for zeros."""
    K, found = len(chunks), []
    for n in range(layers):
        if how.get("deep_fast"):
            found += [chunks[K - 1 - int(n * K / layers)], n] if place == "depth" else [n, *chunks]
        elif place == "depth":
            found += [next(C for l, C in enumerate(chunks) if l <= n * K / layers < l + 1), n]
        elif place == "grow":
            found += [*chunks, n, *([n] * (K - 1) if how.get("copies") else [-1] * (K - 1))]
        else:
            found += [*chunks, *(n if how.get("own") else round(l * (layers - 1) / (K - 1)) for l in range(K))]
    return tuple(float(n) for n in found)


def block(x: Tensor, A: Tensor, B: Tensor, **how: Any) -> Tensor:
    """r = x + A x, then r + B r, for two linear maps in the places of memory and MLP."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            r = times(A, x[b, t]) + (0 if how.get("bare") else x[b, t])
            fed = x[b, t] if how.get("parallel") else r
            out[b, t] = times(B, fed) + (0 if how.get("last_bare") else r)
    return out


ORACLE = {
    "7.1a": chunk_sizes,
    "70": chain,
    "71": run,
    "72": nested,
    "72 full": whole,
    "74": aggregate,
    "7.3a": stack,
    "97": block,
}

MISREAD = {
    "7.1a": {
        "level 0 the slowest": lambda *a: chunk_sizes(*a, inverted=True),
        "powers of ten": lambda *a: chunk_sizes(*a, tens=True),
        "chunks as frequencies": lambda *a: chunk_sizes(*a, product=True),
    },
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
