"""Oracles of Nested Learning 76 to 96, self-modifying memories, as loops in float64, and misreadings."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.titans import error, outer, silu, times, turned, unit, zeros


def sigmoid(a: float) -> float:
    return (1 + math.tanh(a / 2)) / 2


def erased(M: Tensor, k: Tensor, share: float) -> Tensor:
    """Return share M k kᵀ."""
    return share * outer(times(M, k), k)


def static(
    x: Tensor, q: Tensor, Wk: Tensor, Wv: Tensor, M: Tensor, keep: Tensor, step: Tensor, **variant: Any
) -> Tensor:
    """Return y_t = M_{t-1} q_t with static keys and values; the gates [H] are equal for every token."""
    B, H, T, E = x.shape
    out = zeros(B, H, T, E)
    for b in range(B):
        for h in range(H):
            state, a, s = M[h], float(keep[h]), float(step[h])
            for t in range(T):
                k, v = times(Wk[h], x[b, h, t]), times(Wv[h], x[b, h, t])
                k = k if variant.get("long") else unit(k)
                v = times(M[h], v) if variant.get("own") else v
                out[b, h, t] = times(state, q[b, h, t])
                lost = s * outer(k, turned(state, k)) if variant.get("left") else erased(state, k, s)
                state = a * state - lost + variant.get("sign", 1) * s * outer(v, k)
    return out


def generated(
    x: Tensor, change: Tensor, now: Tensor, Mk: Tensor, Mv: Tensor, rows: Tensor, biases: Tensor, **variant: Any
) -> Any:
    """Return k, v, decay and step of every token; M_c = M_0 (I + change), `rows` and `biases` are of (keep, step)."""
    B, H, T, E = x.shape
    k, v, gates = zeros(B, H, T, E), zeros(B, H, T, E), [zeros(B, H, T), zeros(B, H, T)]
    for b in range(B):
        for h in range(H):
            moved = change[0 if variant.get("one_row") else b, 0 if variant.get("one_head") else h]
            for t in range(T):
                p = x[b, h, t] + times(moved, x[b, h, t])
                key = times(Mk[h], x[b, h, t] if variant.get("static") else p)
                k[b, h, t] = key if variant.get("long") else unit(key)
                v[b, h, t] = times(Mv[h], p)
                seen = x[b, h, t] + times(now[b, h], x[b, h, t]) if variant.get("running") else p
                for n in range(2):
                    a = sum(float(rows[n, h, j] * seen[j]) for j in range(E)) + float(biases[n, h])
                    gates[n][b, h, t] = sigmoid(a)
    return k, v, (1 - gates[0] if variant.get("forgets") else gates[0]), gates[1]


def self_generated_values(M: Tensor, v: Tensor, change: Tensor, **variant: Any) -> Tensor:
    """Return v̂ = M_0 (I + change) v."""
    B, H, T, E = v.shape
    out = zeros(B, H, T, E)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                moved = (
                    torch.zeros_like(change[b, h])
                    if variant.get("start")
                    else change[b, 0 if variant.get("one") else h]
                )
                value = v[b, h, t] + times(moved, v[b, h, t])
                out[b, h, t] = v[b, h, t] if variant.get("plain") else times(M[h], value)
    return out


def run(
    x: Tensor,
    q: Tensor,
    starts: Any,
    rows: Tensor,
    biases: Tensor,
    C: int,
    objective: str,
    to_start: bool,
    **variant: Any,
) -> Tensor:
    """Run every memory explicitly: k, v, keep, step and the one that is read, y_t = M_{t-1} q_t."""
    B, H, T, E = x.shape
    out = zeros(B, H, T, E)
    for b in range(B):
        for h in range(H):
            M0 = [starts[0][h], starts[1][h], rows[0, h][None], rows[1, h][None], starts[2][h]]
            Ms = first = M0
            pending: list[int] = []
            for t in range(T):
                first = Ms if t % C == 0 else first
                z, gated = x[b, h, t], Ms if variant.get("running") else first
                k = times(M0[0] if variant.get("static") else first[0], z)
                k, v = k if variant.get("long") else unit(k), times(first[1], z)
                a, s = (sigmoid(float(times(gated[n], z)[0]) + float(biases[n - 2, h])) for n in (2, 3))
                a = 0.5 if variant.get("half") else 1 - a if variant.get("forgets") else a
                out[b, h, t] = times(Ms[4], q[b, h, t])
                pending.append(t)
                Ms = [
                    next_one(M, c, m0, k, v, a, s, objective, to_start, variant)
                    for M, c, m0 in zip(Ms, first, M0, strict=True)
                ]
                if variant.get("end") and ((t + 1) % C == 0 or t + 1 == T):
                    for i in pending:
                        out[b, h, i] = times(Ms[4], q[b, h, i])
                    pending = []
    return out


def next_one(
    M: Tensor,
    first: Tensor,
    start: Tensor,
    k: Tensor,
    v: Tensor,
    a: float,
    s: float,
    objective: str,
    to_start: bool,
    variant: Any,
) -> Tensor:
    """Return M (decay I - step k kᵀ) - step ∇L(M_c; k, v̂), decaying to the start."""
    value = (v if M.shape[0] == len(v) else v[: M.shape[0]]) if variant.get("plain") else times(first, v)
    u = value if objective == "dot" else value - times(first, k)
    lost = erased(M, k, variant.get("erases", 1) * s)
    if variant.get("left") and M.shape[0] == len(k):
        lost = s * outer(k, turned(M, k))
    new = a * M - lost + variant.get("sign", 1) * s * outer(u, k)
    return new + (1 - a) * start if to_start else new


def mlp_memory(z: Tensor, W1: Tensor, W2: Tensor, **variant: Any) -> Tensor:
    """z + W1 σ(W2 z)."""
    out = torch.empty_like(z)
    for b in range(z.shape[0]):
        for h in range(z.shape[1]):
            for t in range(z.shape[2]):
                a = times(W2[h], z[b, h, t])
                y = (
                    silu(times(W1[h], a))
                    if variant.get("outside")
                    else times(W1[h], a if variant.get("linear") else silu(a))
                )
                out[b, h, t] = y if variant.get("bare") else z[b, h, t] + y
    return out


def dot_write(v: Tensor, k: Tensor, sign: float = 1.0) -> Tensor:
    """What descent on -⟨M k, v̂⟩ adds: the derivative of -Σ_i (Σ_j M_ij k_j) v̂_i by M_ij is -v̂_i k_j."""
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in (v, k)), strict=True)
    return torch.stack([sign * outer(a, b) for a, b in rows])


def l2_write(v: Tensor, at_key: Tensor, k: Tensor, factor: int, sign: float = -1.0) -> Tensor:
    """What descent on factor/2 Σ_i ((M k)_i - v̂_i)² adds."""
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in (v, at_key, k)), strict=True)
    return torch.stack([sign * factor * outer(m - a, b) for a, m, b in rows])


ORACLE = {
    "76-78": static,
    "83,86,94": generated,
    "84,87,95": self_generated_values,
    "85": error,
    "88,90,96": run,
    "89,91": mlp_memory,
    "92": dot_write,
    "93": l2_write,
}

MISREAD = {
    "76-78": {
        "keys not normalised": lambda *a: static(*a, long=True),
        "values through the memory": lambda *a: static(*a, own=True),
        "erase from the left": lambda *a: static(*a, left=True),
        "the write subtracted": lambda *a: static(*a, sign=-1),
    },
    "83,86,94": {
        "static keys": lambda *a: generated(*a, static=True),
        "keys not normalised": lambda *a: generated(*a, long=True),
        "gates from the running state": lambda *a: generated(*a, running=True),
        "keep read as Titans' forgetting": lambda *a: generated(*a, forgets=True),
        "one state for all heads": lambda *a: generated(*a, one_head=True),
        "one state for the batch": lambda *a: generated(*a, one_row=True),
    },
    "84,87,95": {
        "the value as it is": lambda *a: self_generated_values(*a, plain=True),
        "through the start": lambda *a: self_generated_values(*a, start=True),
        "one state for all heads": lambda *a: self_generated_values(*a, one=True),
    },
    "85": {
        "mean over the width": lambda y, v, factor: error(y, v, factor, 1 / y.shape[-1]),
        "the print's factor": lambda y, v, factor: error(y, v, 2 * factor),
        "v - M(k)": lambda y, v, factor: error(v, y, factor),
    },
    "88,90,96": {
        "the write subtracted": lambda *a: run(*a, sign=-1),
        "read at the end of the chunk": lambda *a: run(*a, end=True),
        "keep a half at first": lambda *a: run(*a, half=True),
        "the value as it is": lambda *a: run(*a, plain=True),
        "static keys": lambda *a: run(*a, static=True),
        "erase from the left": lambda *a: run(*a, left=True),
        "no erase": lambda *a: run(*a, erases=0),
        "three erases": lambda *a: run(*a, erases=3),
        "gates from the running state": lambda *a: run(*a, running=True),
        "keys not normalised": lambda *a: run(*a, long=True),
        "keep read as Titans' forgetting": lambda *a: run(*a, forgets=True),
        "decay to the other end": lambda *a: run(*a[:-1], not a[-1]),
    },
    "89,91": {
        "without what goes past": lambda *a: mlp_memory(*a, bare=True),
        "activation outside": lambda *a: mlp_memory(*a, outside=True),
        "no activation": lambda *a: mlp_memory(*a, linear=True),
    },
    "92": {"the print's minus": lambda v, k: dot_write(v, k, -1.0)},
    "93": {
        "towards what is there": lambda *a: l2_write(*a, 1.0),
        "the print's factor": lambda v, m, k, factor: l2_write(v, m, k, 2 * factor),
        "the value alone": lambda v, m, k, factor: l2_write(v, 0 * m, k, factor),
    },
}
