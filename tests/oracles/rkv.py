"""Oracles of KaVa 1a to 3a, the selection of chain tokens, as loops in float64, and misreadings of them."""

import math
from typing import Any

import torch
from torch import Tensor


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def softmax(values: list[float]) -> list[float]:
    if not values:
        return []
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def over_live(values: list[float], live: list[bool]) -> list[float]:
    """Return the softmax over the unpadded entries, and 0 elsewhere."""
    weights = iter(softmax([value for value, alive in zip(values, live, strict=True) if alive]))
    return [next(weights) if alive else 0.0 for alive in live]


def dot(x: Tensor, y: Tensor) -> float:
    return sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))


def head_logits(q: Tensor, k: Tensor, scale: float, head: Any = None) -> Tensor:
    """[B, G, R, Na, Nc]; `head(g, r, G, R)` is the query head that is the r-th of group g."""
    (B, H, Na, _), (G, Nc) = q.shape, k.shape[1:3]
    R, out = H // G, torch.empty(B, G, H // G, Na, Nc, dtype=torch.float64)
    head = head or (lambda g, r, G, R: g * R + r)
    for b in range(B):
        for g in range(G):
            for r in range(R):
                for j in range(Na):
                    for i in range(Nc):
                        out[b, g, r, j, i] = scale * dot(q[b, head(g, r, G, R), j], k[b, g, i])
    return out


def answer_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return head_logits(q, k, scale).amax(2)


def importance_of(a: Tensor, live: Tensor, rows: Tensor, divide: bool = True) -> Tensor:
    """Return the importance from pooled logits."""
    B, G, _, Nc = a.shape
    out = torch.zeros(B, G, Nc, dtype=torch.float64)
    for b in range(B):
        counted = [j for j, row in enumerate(rows[b].tolist()) if row]
        for g in range(G):
            for j in counted:
                p = over_live(a[b, g, j].tolist(), live[b].tolist())
                out[b, g] += tensor(p) / (len(counted) if divide else 1)
    return out


def importance(q: Tensor, k: Tensor, scale: float, start: int, live: Tensor, rows: Tensor) -> Tensor:
    """`k` are keys of question (`start` columns), chain and answer."""
    return importance_of(answer_logits(q, chain(k, start, live), scale), live, rows)


def chain(k: Tensor, start: int, live: Tensor) -> Tensor:
    return k[:, :, start : start + live.shape[1]]


def whole_row(q: Tensor, k: Tensor, scale: float, start: int, live: Tensor, rows: Tensor) -> Tensor:
    """Take the softmax over all keys, without renormalising over the chain."""
    B, Nc, rest = len(q), live.shape[1], k.shape[2] - start - live.shape[1]
    seen = torch.cat([torch.ones(B, start).bool(), live, torch.ones(B, rest).bool()], 1)
    return importance_of(answer_logits(q, k, scale), seen, rows)[:, :, start : start + Nc]


def maximum_after(q: Tensor, k: Tensor, scale: float, start: int, live: Tensor, rows: Tensor) -> Tensor:
    heads = head_logits(q, chain(k, start, live), scale)
    return torch.stack([importance_of(heads[:, :, r], live, rows) for r in range(heads.shape[2])]).amax(0)


def shifted(by: int) -> Any:
    """Shift the first chain column by `by`."""
    return lambda q, k, scale, start, live, rows: importance(q, k, scale, start + by, live, rows)


def pooled_by_mean(q: Tensor, k: Tensor, scale: float, start: int, live: Tensor, rows: Tensor) -> Tensor:
    return importance_of(head_logits(q, chain(k, start, live), scale).mean(2), live, rows)


def over_rows(q: Tensor, k: Tensor, scale: float, start: int, live: Tensor, rows: Tensor) -> Tensor:
    """Take the softmax over answer rows instead of chain columns."""
    return answer_logits(q, chain(k, start, live), scale).softmax(2).mean(2) * live[:, None]


def similarity(k: Tensor, b: int, g: int, i: int, j: int, normed: bool = True) -> float:
    if not normed:
        return dot(k[b, g, i], k[b, g, j])
    x, y = (k[b, g, n] / (math.sqrt(dot(k[b, g, n], k[b, g, n])) + 1e-8) for n in (i, j))
    return dot(x, y)


def redundancy(
    k: Tensor, live: Tensor, v: Tensor, *, sign: float = -1.0, others: int = 0, normed: bool = True, pads: bool = False
) -> Tensor:
    """Return the redundancy; `v` is unused, and with `pads` the softmax includes padding."""
    B, G, Nc, _ = k.shape
    out = torch.zeros(B, G, Nc, dtype=torch.float64)
    for b in range(B):
        columns = [i for i in range(Nc) if live[b, i]]
        N = max(len(columns) - others, 1)
        for g in range(G):
            r = [0.0] * Nc
            for i in columns:
                r[i] = sign * sum(similarity(k, b, g, i, j, normed) for j in columns if j != i) / N
            R = softmax(r) if pads else over_live(r, live[b].tolist())
            out[b, g] = tensor(R) * live[b]
    return out


def even(k: Tensor, live: Tensor, v: Tensor) -> Tensor:
    """Use an inverted mask, so that all unpadded columns are equal."""
    return (live / live.sum(1, keepdim=True).clamp(min=1)).double()[:, None].expand(k.shape[:3])


def score(I: Tensor, R: Tensor, lam: float) -> Tensor:
    out = [lam * i + (1 - lam) * r for i, r in zip(I.flatten().tolist(), R.flatten().tolist(), strict=True)]
    return tensor(out).reshape(I.shape)


Selected = tuple[Tensor, Tensor]


def keep(
    S: Tensor, live: Tensor, M: int, *, by_time: bool = True, last: bool = False, pads: bool = False, fill: int = 0
) -> Selected:
    """`S` [L, B, G, Nc], each layer for itself; columns and which of the M slots hold one, slots without one at 0."""
    L, B, G, Nc = S.shape
    index, alive = torch.full((L, B, G, M), fill), torch.zeros(L, B, G, M).bool()
    for l in range(L):
        for b in range(B):
            for g in range(G):
                columns = [i for i in range(Nc) if live[b, i] or pads]
                order = sorted(columns, key=lambda i: (-float(S[l, b, g, i]), -i if last else i))[:M]
                for m, i in enumerate(sorted(order) if by_time else order):
                    index[l, b, g, m], alive[l, b, g, m] = i, True
    return index, alive


def exchanged(S: Tensor, live: Tensor, M: int) -> Selected:
    """Select the lowest scores."""
    return keep(-S, live, M)


ORACLE = {
    "1a": answer_logits,
    "1": importance,
    "2": redundancy,
    "3": score,
    "3a": keep,
}

MISREAD = {
    "1a": {
        "logits unscaled": lambda q, k, scale: answer_logits(q, k, 1.0),
        "mean for maximum": lambda q, k, scale: head_logits(q, k, scale).mean(2),
        "sum for maximum": lambda q, k, scale: head_logits(q, k, scale).sum(2),
        "maximum of magnitudes": lambda q, k, scale: head_logits(q, k, scale).abs().amax(2),
        "every G-th head a group": lambda q, k, scale: head_logits(q, k, scale, lambda g, r, G, R: r * G + g).amax(2),
        "first head of a group": lambda q, k, scale: head_logits(q, k, scale)[:, :, 0],
    },
    "1": {
        "softmax over the whole row": whole_row,
        "maximum over heads after the softmax": maximum_after,
        "mean for maximum": pooled_by_mean,
        "sum over answer rows": lambda q, k, scale, start, live, rows: importance_of(
            answer_logits(q, chain(k, start, live), scale), live, rows, divide=False
        ),
        "the last question column among the chain's": shifted(-1),
        "the first prompt column among the chain's": shifted(1),
        "logits unscaled": lambda q, k, scale, *rest: importance(q, k, 1.0, *rest),
        "dead answer rows counted": lambda q, k, scale, start, live, rows: importance(
            q, k, scale, start, live, torch.ones_like(rows)
        ),
        "softmax over pads, then zeroed": lambda q, k, scale, start, live, rows: (
            importance(q, k, scale, start, torch.ones_like(live), rows) * live[:, None]
        ),
        "softmax over answer rows": over_rows,
    },
    "2": {
        "padding mask inverted": even,
        "softmax over pads, then zeroed": lambda k, live, v: redundancy(k, live, v, pads=True),
        "divisor N - 1": lambda k, live, v: redundancy(k, live, v, others=1),
        "+ for -": lambda k, live, v: redundancy(k, live, v, sign=1.0),
        "keys not normalised": lambda k, live, v: redundancy(k, live, v, normed=False),
        "values for keys": lambda k, live, v: redundancy(v, live, v),
        "pads among the similar": lambda k, live, v: redundancy(k, torch.ones_like(live), v) * live[:, None],
        "no mean over the others": lambda k, live, v: redundancy(k, live, v, others=live.shape[1]),
    },
    "3": {
        "lambda on R": lambda I, R, lam: score(R, I, lam),
        "R-KV's subtractive score": lambda I, R, lam: lam * I - (1 - lam) * R,
        "no weight on R": lambda I, R, lam: lam * I + R,
        "product": lambda I, R, lam: I**lam * R ** (1 - lam),
    },
    "3a": {
        "order of score for time": lambda S, live, M: keep(S, live, M, by_time=False),
        "one layer chosen for all": lambda S, live, M: keep(S[-1:].expand_as(S), live, M),
        "one head chosen for all": lambda S, live, M: keep(S[:, :, :1].expand_as(S), live, M),
        "as many slots as the longest chain": lambda S, live, M: keep(S, live, min(M, S.shape[3])),
        "pads kept": lambda S, live, M: keep(S, live, M, pads=True),
        "ties to the later column": lambda S, live, M: keep(S, live, M, last=True),
        "the lowest scores": exchanged,
    },
}
