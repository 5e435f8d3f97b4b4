"""Oracles of Titans 11 to 19, a memory trained while it reads, as loops in float64, and misreadings."""

import math
from typing import Any

import torch
from torch import Tensor


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def times(M: Tensor, x: Tensor) -> Tensor:
    """Return M x."""
    column = x.tolist()
    return tensor([sum(a * b for a, b in zip(row, column, strict=True)) for row in M.tolist()])


def turned(M: Tensor, x: Tensor) -> Tensor:
    """Return Mᵀ x."""
    rows, column = M.tolist(), x.tolist()
    return tensor([sum(rows[i][j] * column[i] for i in range(len(rows))) for j in range(len(rows[0]))])


def outer(u: Tensor, k: Tensor) -> Tensor:
    key = k.tolist()
    return tensor([[a * b for b in key] for a in u.tolist()])


def silu(x: Tensor) -> Tensor:
    return tensor([a / (1 + math.exp(-a)) for a in x.tolist()])


def slope(x: Tensor) -> Tensor:
    """Return the derivative of a σ(a)."""
    s = [1 / (1 + math.exp(-a)) for a in x.tolist()]
    return tensor([p + a * p * (1 - p) for p, a in zip(s, x.tolist(), strict=True)])


def unit(x: Tensor) -> Tensor:
    return x / math.sqrt(sum(a**2 for a in x.tolist()))


def projected(
    x: Tensor, W: Tensor, taps: Tensor, heads: int, normed: bool, *, ahead: int = 0, bent: bool = True
) -> Tensor:
    """Return [B, H, T, E]: tap j of W is W - 1 - j tokens back; `ahead` shifts the window into the future."""
    (B, T, D), (_, width) = x.shape, taps.shape
    E, out = D // heads, zeros(B, heads, T, D // heads)
    for b in range(B):
        y = [times(W, x[b, t]) for t in range(T)]
        for t in range(T):
            z = zeros(D)
            for j in range(width):
                s = t - (width - 1 - j) + ahead
                if 0 <= s < T:
                    z = z + taps[:, j] * y[s]
            z = silu(z) if bent else z
            for h in range(heads):
                part = z[h * E : (h + 1) * E]
                out[b, h, t] = unit(part) if normed else part
    return out


def projections(
    x: Tensor, Ws: Any, taps: Any, heads: int, normed: tuple[bool, ...] = (True, True, False), **variant: Any
) -> Any:
    """Return q, k and v."""
    return tuple(projected(x, W, c, heads, n, **variant) for W, c, n in zip(Ws, taps, normed, strict=True))


def error(y: Tensor, v: Tensor, factor: int, share: float | None = None) -> Tensor:
    """Return d/dy of factor/2 times the sum of (y_i - v_i)², or a share of it."""
    out = torch.empty_like(y)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in y.shape)):
        i = tuple(at.tolist())
        out[i] = factor / 2 * 2 * (y[i] - v[i]) * (1 if share is None else share)
    return out


def token(M: Tensor, S: Tensor, gradient: Tensor, keep: Tensor, step: Tensor, momentum: Tensor, **variant: Any) -> Any:
    """Compute one head after the other; `variant` selects a misreading."""
    new, moved = torch.empty_like(M), torch.empty_like(S)
    for b in range(M.shape[0]):
        for h in range(M.shape[1]):
            a, s, m = (float(x[b, h]) for x in (keep, step, momentum))
            if variant.get("swapped"):
                s, m = m, s
            if variant.get("forgets"):
                a = 1 - a
            moved[b, h] = m * S[b, h] + variant.get("sign", -1) * s * gradient[b, h]
            new[b, h] = a * (M[b, h] + moved[b, h]) if variant.get("late") else a * M[b, h] + moved[b, h]
    return new, moved


def recall(M: Tensor, change: Tensor, first: Tensor, q: Tensor, **variant: Any) -> Tensor:
    """Return (M_0 + change) q for every head and token."""
    out = zeros(*q.shape[:3], M.shape[1])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            moved = first if variant.get("boundary") else change
            whole = M[h] if variant.get("start") else M[h] + moved[b, h]
            for t in range(q.shape[2]):
                out[b, h, t] = (turned if variant.get("turned") else times)(whole, q[b, h, t])
    return out


def answer(Ms: list[Tensor], x: Tensor) -> Tensor:
    return times(Ms[0], x) if len(Ms) == 1 else x + times(Ms[0], silu(times(Ms[1], x)))


def gradients(Ms: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    e = answer(Ms, k) - v
    if len(Ms) == 1:
        return [outer(e, k)]
    a = times(Ms[1], k)
    return [outer(e, silu(a)), outer(turned(Ms[0], e) * slope(a), k)]


def faded(S: Tensor, step: float, k: Tensor) -> Tensor:
    """The write after the erase, where its key is k."""
    return S - step * outer(times(S, k), k) if S.shape[1] == len(k) else S


def chunk_form(
    starts: list[Tensor], k: Tensor, v: Tensor, q: Tensor, keep: Tensor, step: Tensor, momentum: Tensor, **variant: Any
) -> Any:
    """Y, then every M and S after the chunk; `starts` [H, O, I] are M_c, S_c is 0."""
    B, H, T, _ = k.shape
    Y = torch.empty_like(q)
    ends = [zeros(B, *M.shape) for M in starts]
    moments = [zeros(B, *M.shape) for M in starts]
    for b in range(B):
        for h in range(H):
            first = [M[h] for M in starts]
            Ms, Ss = first, [torch.zeros_like(M) for M in first]
            for t in range(T):
                a, s, m = (float(x[b, h, t]) for x in (keep, step, momentum))
                a = 1 / a if variant.get("inverted") else a
                at = Ms if variant.get("running") else first
                before, slopes = Ms, gradients(at, k[b, h, t], v[b, h, t])
                Ss = [m * S - s * g for S, g in zip(Ss, slopes, strict=True)]
                late = variant.get("late")
                Ms = [a * (M + S) if late else a * M + S for M, S in zip(Ms, Ss, strict=True)]
                if variant.get("erased"):
                    Ms = [a * M + faded(S, s, k[b, h, t]) for M, S in zip(before, Ss, strict=True)]
                Y[b, h, t] = answer(before if variant.get("before") else Ms, q[b, h, t])
            for n, (M, S) in enumerate(zip(Ms, Ss, strict=True)):
                ends[n][b, h], moments[n][b, h] = M, S
    return (Y, *ends, *moments)


def prepended(persistent: Tensor, x: Tensor, count: list[int], live: Tensor, **variant: Any) -> Any:
    """What each row reads: the learned vectors before its first live token if it has learned none, packed left."""
    B, T, D = x.shape
    N = len(persistent)
    out, lengths = zeros(B, T + N, D), zeros(B)
    for b in range(B):
        row = [x[b, t] for t in range(T) if live[b, t]]
        new = row and (count[b] == 0 or variant.get("always")) and not variant.get("never")
        if new or variant.get("empty"):
            row = row + list(persistent) if variant.get("last") else list(persistent) + row
        lengths[b] = len(row)
        for t, vector in enumerate(row):
            out[b, t] = vector
    return out, lengths


ORACLE = {
    "11": projections,
    "12": error,
    "13,14": token,
    "15": recall,
    "16-18": chunk_form,
    "19": prepended,
}

MISREAD = {
    "11": {
        "the window looks one token ahead": lambda *a: projections(*a, ahead=1),
        "no activation after the convolution": lambda *a: projections(*a, bent=False),
        "values normalised too": lambda *a: projections(*a, normed=(True, True, True)),
        "keys not normalised": lambda *a: projections(*a, normed=(True, False, False)),
        "heads convolved backwards": lambda x, Ws, taps, heads: projections(x, Ws, [c.flip(1) for c in taps], heads),
    },
    "12": {
        "mean over the width": lambda y, v, factor: error(y, v, factor, 1 / y.shape[-1]),
        "mean over rows and width": lambda y, v, factor: error(y, v, factor, 1 / (y.shape[0] * y.shape[-1])),
        "the print's factor": lambda y, v, factor: error(y, v, 2 * factor),
        "v - M(k)": lambda y, v, factor: error(v, y, factor),
    },
    "13,14": {
        "keep and forget swapped": lambda *a: token(*a, forgets=True),
        "momentum and step swapped": lambda *a: token(*a, swapped=True),
        "keep applied after the write": lambda *a: token(*a, late=True),
        "ascent": lambda *a: token(*a, sign=1),
    },
    "15": {
        "the memory at the boundary": lambda *a: recall(*a, boundary=True),
        "the start alone": lambda *a: recall(*a, start=True),
        "the transpose": lambda *a: recall(*a, turned=True),
    },
    "16-18": {
        "gradient at the running memory": lambda *a: chunk_form(*a, running=True),
        "the memory before the token is read": lambda *a: chunk_form(*a, before=True),
        "decay inverted": lambda *a: chunk_form(*a, inverted=True),
        "keep applied after the write": lambda *a: chunk_form(*a, late=True),
        "the new write erased": lambda *a: chunk_form(*a, erased=True),
    },
    "19": {
        "read before every call": lambda *a: prepended(*a, always=True),
        "after the text": lambda *a: prepended(*a, last=True),
        "never": lambda *a: prepended(*a, never=True),
        "rows without a token read them": lambda *a: prepended(*a, empty=True),
    },
}
