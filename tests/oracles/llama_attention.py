"""Oracles of C9 and C11 to C16: attention as loops over indices, and misreadings of it."""

import math
from typing import Any

import torch
from torch import Tensor


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def linear(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y W^T + b, one output at a time."""
    b = [0.0] * weight.shape[0] if bias is None else bias.tolist()
    rows = [
        [b[o] + sum(w[i] * row[i] for i in range(len(row))) for o, w in enumerate(weight.tolist())]
        for row in y.reshape(-1, y.shape[-1]).tolist()
    ]
    return tensor(rows).reshape(*y.shape[:-1], weight.shape[0])


def split_heads(x: Tensor, n: int) -> Tensor:
    B, T, width = x.shape
    E = width // n
    out = torch.empty(B, n, T, E, dtype=x.dtype)
    for b in range(B):
        for h in range(n):
            for t in range(T):
                for e in range(E):
                    out[b, h, t, e] = x[b, t, h * E + e]
    return out


def projections(y: Tensor, q: Any, k: Any, v: Any, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
    """Project to queries, keys and values; each of q, k, v is a pair of weight and bias."""
    return tuple(split_heads(linear(y, *pair), n) for pair, n in ((q, H), (k, G), (v, G)))  # type: ignore[return-value]


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    (B, H, T, E), (G, P) = q.shape, k.shape[1:3]
    Q, K = q.tolist(), k.tolist()
    return tensor(
        [
            [
                [
                    [scale * sum(Q[b][h][t][e] * K[b][h // (H // G)][j][e] for e in range(E)) for j in range(P)]
                    for t in range(T)
                ]
                for h in range(H)
            ]
            for b in range(B)
        ]
    )


def seen(live: Tensor, S: int, window: int | None) -> Tensor:
    B, P = live.shape
    out = torch.zeros(B, P - S, P, dtype=torch.bool)
    for b in range(B):
        for t in range(P - S):
            for j in range(S + t + 1):
                between = sum(bool(live[b, i]) for i in range(j + 1, S + t + 1))
                out[b, t, j] = bool(live[b, j]) and (window is None or between < window)
    return out


def biased(a: Tensor, seen: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.empty_like(a)
    for b in range(a.shape[0]):
        for h in range(a.shape[1]):
            for t in range(a.shape[2]):
                for j in range(a.shape[3]):
                    out[b, h, t, j] = a[b, h, t, j] + (0.0 if bias is None else bias[b, t, j])
                    if not seen[b, t, j]:
                        out[b, h, t, j] = -math.inf
    return out


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    if top == -math.inf:
        return [0.0] * len(row)
    e = [math.exp(x - top) for x in row]
    return [x / math.fsum(e) for x in e]


def probabilities(a: Tensor) -> Tensor:
    return tensor([softmax(row) for row in a.reshape(-1, a.shape[-1]).tolist()]).reshape(a.shape)


def context(p: Tensor, v: Tensor) -> Tensor:
    (B, H, T, P), (G, E) = p.shape, (v.shape[1], v.shape[3])
    weights, values = p.tolist(), v.tolist()
    out = torch.zeros(B, T, H * E, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                for e in range(E):
                    g = h // (H // G)
                    out[b, t, h * E + e] = sum(weights[b][h][t][j] * values[b][g][j][e] for j in range(P))
    return out


def repeated(x: Tensor, H: int) -> Tensor:
    return x.repeat_interleave(H // x.shape[1], 1)


def tiled(x: Tensor, H: int) -> Tensor:
    return x.repeat(1, H // x.shape[1], 1, 1)


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ repeated(k, q.shape[1]).mT


def gathered(p: Tensor, v: Tensor) -> Tensor:
    return p @ repeated(v, p.shape[1])


def ahead(n: int) -> Any:
    """Misread causality with the diagonal shifted by n."""

    def misread(live: Tensor, S: int, window: int | None) -> Tensor:
        t = torch.arange(live.shape[1] - S)[:, None]
        return seen(live, S, window) & (torch.arange(live.shape[1]) <= S + t + n) | (
            live[:, None] & (torch.arange(live.shape[1]) == S + t + n)
        )

    return misread


def upper_left(live: Tensor, S: int, window: int | None) -> Tensor:
    t = torch.arange(live.shape[1] - S)[:, None]
    return seen(live, S, window) & (torch.arange(live.shape[1]) <= t)


def by_slots(live: Tensor, S: int, window: int | None) -> Tensor:
    t = torch.arange(live.shape[1] - S)[:, None]
    return seen(live, S, None) & (S + t - torch.arange(live.shape[1]) < (window or 10**9))


def reordered(order: str) -> Any:
    """Misread q, k, v in another order."""

    def misread(y: Tensor, q: Any, k: Any, v: Any, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
        maps = {"q": q, "k": k, "v": v}
        return projections(y, *(maps[name] for name in order), H, G)

    return misread


def unbiased(y: Tensor, q: Any, k: Any, v: Any, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
    return projections(y, (q[0], None), (k[0], None), (v[0], None), H, G)


def untransposed(y: Tensor, q: Any, k: Any, v: Any, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
    """Misread heads as a view of [B, T, nE] as [B, n, T, E]."""
    maps = ((q, H), (k, G), (v, G))
    return tuple(linear(y, *pair).reshape(y.shape[0], n, y.shape[1], -1) for pair, n in maps)  # type: ignore[return-value]


def width_major(y: Tensor, q: Any, k: Any, v: Any, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
    maps = ((q, H), (k, G), (v, G))
    return tuple(linear(y, *pair).unflatten(-1, (-1, n)).permute(0, 3, 1, 2) for pair, n in maps)  # type: ignore[return-value]


ORACLE = {
    "C9": projections,
    "C11": scores,
    "C12": seen,
    "C13": biased,
    "C14": probabilities,
    "C15": context,
    "C16": linear,
}

MISREAD = {
    "C9": {
        "order k, q, v": reordered("kqv"),
        "order q, v, k": reordered("qvk"),
        "bias dropped": unbiased,
        "heads by a view": untransposed,
        "width before heads": width_major,
    },
    "C11": {
        "heads tiled": lambda q, k, scale: scale * (q @ tiled(k, q.shape[1]).mT),
        "scale D^-1/2": lambda q, k, scale: product(q, k) * (q.shape[1] * q.shape[3]) ** -0.5,
        "scale 1/E": lambda q, k, scale: product(q, k) / q.shape[3],
        "scaled twice": lambda q, k, scale: product(q, k) * scale**2,
        "not scaled": lambda q, k, scale: product(q, k),
        "first head for all": lambda q, k, scale: scale * (q @ k[:, :1].mT),
    },
    "C12": {
        "one ahead": ahead(1),
        "hides self": ahead(-1),
        "upper-left aligned": upper_left,
        "window W - 1": lambda live, S, window: seen(live, S, window and window - 1),
        "window W + 1": lambda live, S, window: seen(live, S, window and window + 1),
        "window over slots": by_slots,
        "no window": lambda live, S, window: seen(live, S, None),
        "dead slots seen": lambda live, S, window: seen(torch.ones_like(live), S, window),
        "inverted": lambda live, S, window: ~seen(live, S, window),
        "not causal": lambda live, S, window: live[:, None].expand(-1, live.shape[1] - S, -1),
    },
    "C13": {
        "bias sign": lambda a, seen, bias: biased(a, seen, -bias),
        "bias before the scale": lambda a, seen, bias: biased(a, seen, bias * 0.25),
        "bias as a factor": lambda a, seen, bias: biased(a * bias[:, None], seen, None),
        "bias left out": lambda a, seen, bias: biased(a, seen, None),
        "-10 for minus infinity": lambda a, seen, bias: torch.where(seen[:, None], a + bias[:, None], -10.0),
        "zero for minus infinity": lambda a, seen, bias: (a + bias[:, None]) * seen[:, None],
        "inverted": lambda a, seen, bias: biased(a, ~seen, bias),
    },
    "C14": {
        "over queries": lambda a: a.softmax(-2).nan_to_num(0.0),
        "over heads": lambda a: a.softmax(1).nan_to_num(0.0),
        "mean where nothing is seen": lambda a: a.clamp(min=torch.finfo(a.dtype).min).softmax(-1),
        "NaN where nothing is seen": lambda a: a.softmax(-1),
        "in bfloat16": lambda a: a.bfloat16().softmax(-1).nan_to_num(0.0).double(),
        "one more in the sum": lambda a: a.exp() / (1 + a.exp().sum(-1, keepdim=True)),
        "no exponential": lambda a: probabilities(a).sqrt(),
    },
    "C15": {
        "heads merged untransposed": lambda p, v: gathered(p, v).reshape(p.shape[0], p.shape[2], -1),
        "width before heads": lambda p, v: gathered(p, v).permute(0, 2, 3, 1).flatten(2),
        "heads tiled": lambda p, v: (p @ tiled(v, p.shape[1])).transpose(1, 2).flatten(2),
        "mean of values": lambda p, v: (gathered(p, v) / p.shape[3]).transpose(1, 2).flatten(2),
        "values of the past only": lambda p, v: gathered(p[..., :-1], v[:, :, :-1]).transpose(1, 2).flatten(2),
    },
    "C16": {
        "bias dropped": lambda c, weight, bias: c @ weight.mT,
        "not mapped": lambda c, weight, bias: c[..., : weight.shape[0]],
        "map transposed": lambda c, weight, bias: c @ weight.reshape(weight.shape[::-1]) + bias,
    },
}
