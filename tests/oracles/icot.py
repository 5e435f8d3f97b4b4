"""Oracle of iCoT 1: the number of removed tokens from cumulative probabilities, and misreadings of it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

MOST = 100


def chances(smoothing: float, rest: bool = True) -> list[float]:
    """Return P(0) … P(99), with the tail mass on the last."""
    p = [(1 - math.exp(-smoothing)) * math.exp(-smoothing * o) for o in range(MOST)]
    p[-1] += 1 - sum(p) if rest else 0.0
    return p


def offset(u: float, p: list[float]) -> int:
    total = 0.0
    for o, chance in enumerate(p):
        total += chance
        if u < total:
            return o
    return len(p) - 1


def removed(
    s: float,
    u: Tensor,
    count: Tensor,
    smoothing: float,
    *,
    extra: Callable[[float, float], float] = lambda u, smoothing: offset(u, chances(smoothing)),
    join: Callable[[float, float, int], float] = lambda s, o, n: min(s + o, n),
) -> Tensor:
    rows = [join(s, extra(x, smoothing), n) for x, n in zip(u.tolist(), count.tolist(), strict=True)]
    return torch.tensor([int(min(row, 10**6)) for row in rows])


def misread(**changes: Callable[..., float]) -> Callable[..., Tensor]:
    return lambda *inputs: removed(*inputs, **changes)


ORACLE = {"1": removed}

MISREAD = {
    "1": {
        "nothing drawn": misread(extra=lambda u, smoothing: 0),
        "one more always": misread(extra=lambda u, smoothing: 1 + offset(u, chances(smoothing))),
        "P(o) of 1/o": misread(extra=lambda u, smoothing: offset(u, [1 / (o * (o + 1)) for o in range(1, MOST)])),
        "smoothing taken for its inverse": misread(extra=lambda u, smoothing: offset(u, chances(1 / smoothing))),
        "a mean of the draw": misread(extra=lambda u, smoothing: round(u / smoothing * 4)),
        "what is left for what is removed": misread(join=lambda s, o, n: max(n - s - o, 0)),
        "the larger of both": misread(join=lambda s, o, n: min(max(s, o), n)),
        "more than there is": misread(join=lambda s, o, n: s + o),
    }
}
