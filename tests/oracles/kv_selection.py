"""Oracles of the scores of KV cache selection, as loops in float64, and misreadings of them."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.rkv import dot, softmax, tensor


def heads(q: Tensor, k: Tensor) -> list[tuple[int, int, int]]:
    """Return (row, KV head, query head) triples."""
    (B, H), G = q.shape[:2], k.shape[1]
    return [(b, h // (H // G), h) for b in range(B) for h in range(H)]


def attention(q: Tensor, k: Tensor, scale: float, b: int, g: int, h: int, t: int) -> list[float]:
    """Return the attention of query t, whose own key is the (N - T + t)-th, over all keys."""
    T, N = q.shape[2], k.shape[2]
    seen = N - T + t + 1
    return softmax([scale * dot(q[b, h, t], k[b, g, i]) for i in range(seen)]) + [0.0] * (N - seen)


def per_head(q: Tensor, k: Tensor, function: Any) -> Tensor:
    """Return the mean over the query heads of each KV head of a list of scores."""
    (B, H), (G, N) = q.shape[:2], k.shape[1:3]
    out = torch.zeros(B, G, N, dtype=torch.float64)
    for b, g, h in heads(q, k):
        out[b, g] += tensor(function(b, g, h)) / (H // G)
    return out


def snapkv(
    q: Tensor, k: Tensor, scale: float, *, width: int = 5, largest: bool = False, past_only: bool = False
) -> Tensor:
    """`largest`: max pool for the average; `past_only`: the softmax leaves out the keys of the queries."""
    T, N = q.shape[2], k.shape[2]
    past = N - T

    def score(b: int, g: int, h: int) -> list[float]:
        if past_only:
            rows = [softmax([scale * dot(q[b, h, t], k[b, g, i]) for i in range(past)]) for t in range(T)]
        else:
            rows = [attention(q, k, scale, b, g, h, t) for t in range(T)]
        mean = [sum(row[i] for row in rows) / T for i in range(past)]
        near = [[mean[j] for j in range(i - width // 2, i + width // 2 + 1) if 0 <= j < past] for i in range(past)]
        return [max(x) if largest else sum(x) / width for x in near] + [0.0] * T

    return per_head(q, k, score)


def cosine(k: Tensor, b: int, g: int, i: int, j: int) -> float:
    size = [math.sqrt(dot(k[b, g, n], k[b, g, n])) + 1e-8 for n in (i, j)]
    return dot(k[b, g, i], k[b, g, j]) / (size[0] * size[1])


def redundancy(k: Tensor, *, exempt: bool = True, diagonal: bool = False, oldest: bool = False) -> Tensor:
    B, G, N, _ = k.shape
    out = torch.zeros(B, G, N, dtype=torch.float64)
    for b in range(B):
        for g in range(G):
            for j in range(N):
                alike = [i for i in range(N) if i != j and cosine(k, b, g, i, j) > 0.5]
                newest = (min(alike) if oldest else max(alike)) if alike and exempt else -1
                for i in range(N):
                    if i != newest and (i != j or diagonal):
                        out[b, g, i] += cosine(k, b, g, i, j) / N
    return out


def rkv(q: Tensor, k: Tensor, scale: float, *, sign: float = -1.0, mean: bool = False, lam: float = 0.07) -> Tensor:
    (B, H, T, _), (G, N) = q.shape, k.shape[1:3]
    past, R = N - q.shape[2], H // G
    out = torch.zeros(B, G, N, dtype=torch.float64)
    for b in range(B):
        for g in range(G):
            importance = [0.0] * past
            for t in range(T):
                a = [[scale * dot(q[b, g * R + r, t], k[b, g, i]) for r in range(R)] for i in range(past)]
                for i, p in enumerate(softmax([sum(x) / R if mean else max(x) for x in a])):
                    importance[i] += p / T
            r = softmax(redundancy(k)[b, g].tolist())
            for i in range(past):
                pooled = max(importance[j] for j in range(max(0, i - 3), min(past, i + 4)))
                out[b, g, i] = lam * pooled + sign * (1 - lam) * r[i]
    return out


def observed(q: Tensor, k: Tensor, scale: float, *, divide: bool = True) -> Tensor:
    """Return the mean attention over the queries that see a key; `q` are all queries."""
    T = q.shape[2]

    def score(b: int, g: int, h: int) -> list[float]:
        rows = [attention(q, k, scale, b, g, h, t) for t in range(T)]
        return [sum(row[i] for row in rows) / (T - i if divide else 1) for i in range(T)]

    return per_head(q, k, score)


def rotate(x: list[float], cos: Tensor, sin: Tensor, t: int) -> list[float]:
    E = len(x)
    return [
        x[e] * float(cos[t, e]) + (-x[e + E // 2] if e < E // 2 else x[e - E // 2]) * float(sin[t, e]) for e in range(E)
    ]


def average_rotation(
    mean: Tensor, covariance: Tensor, cos: Tensor, sin: Tensor, *, right: bool = True
) -> tuple[Tensor, Tensor]:
    """Build R column by column; `right`: multiply the covariance by R^T too."""
    T, E = cos.shape
    basis = torch.eye(E, dtype=torch.float64).tolist()
    columns = [[sum(x) / T for x in zip(*(rotate(e, cos, sin, t) for t in range(T)), strict=True)] for e in basis]
    rotation = tensor(columns).t()
    mu, sigma = torch.zeros_like(mean), torch.zeros_like(covariance)
    for b in range(mean.shape[0]):
        for h in range(mean.shape[1]):
            mu[b, h] = tensor([dot(row, mean[b, h]) for row in rotation])
            sigma[b, h] = rotation @ covariance[b, h] @ (rotation.t() if right else torch.eye(E, dtype=torch.float64))
    return mu, sigma


def expected(
    mean: Tensor, covariance: Tensor, k: Tensor, v: Tensor, scale: float, *, half: float = 0.5, norm: bool = True
) -> Tensor:
    N, E = k.shape[2:]

    def score(b: int, g: int, h: int) -> list[float]:
        a = []
        for i in range(N):
            quadratic = sum(
                float(k[b, g, i, x] * covariance[b, h, x, y] * k[b, g, i, y]) for x in range(E) for y in range(E)
            )
            a.append(scale * dot(mean[b, h], k[b, g, i]) + half * scale**2 * quadratic)
        size = [math.sqrt(dot(v[b, g, i], v[b, g, i])) if norm else 1.0 for i in range(N)]
        return [p * n for p, n in zip(softmax(a), size, strict=True)]

    return per_head(mean, k, score)


def kvzip(
    q: Tensor, k_sinks: Tensor, k: Tensor, k_repeat: Tensor, scale: float, *, mean: bool = False, alone: bool = False
) -> Tensor:
    """`mean`: over queries instead of the largest; `alone`: a softmax over the piece alone."""
    keys = k if alone else torch.cat([k_sinks, k, k_repeat], 2)
    start, N, T = (0 if alone else k_sinks.shape[2]), k.shape[2], q.shape[2]
    out = torch.zeros(q.shape[0], *k.shape[1:3], dtype=torch.float64)
    for b, g, h in heads(q, k):
        for t in range(T):
            if alone:
                p = softmax([scale * dot(q[b, h, t], k[b, g, i]) for i in range(N)])
            else:
                p = attention(q, keys, scale, b, g, h, t)
            for i in range(N):
                best = float(out[b, g, i])
                out[b, g, i] = best + p[start + i] / T if mean else max(best, p[start + i])
    return out


def key_norm(k: Tensor) -> Tensor:
    return tensor([[[-math.sqrt(dot(x, x)) for x in head] for head in row] for row in k])


ORACLE: dict[str, Any] = {
    "SK1": snapkv,
    "2": redundancy,
    "1": rkv,
    "HH1": observed,
    "EA1": average_rotation,
    "EA2": expected,
    "KZ1": kvzip,
    "KN1": key_norm,
}

MISREAD: dict[str, dict[str, Any]] = {
    "SK1": {
        "maximum for average pool": lambda *a: snapkv(*a, largest=True),
        "pool of width 7": lambda *a: snapkv(*a, width=7),
        "softmax without the queries' own keys": lambda *a: snapkv(*a, past_only=True),
        "logits unscaled": lambda q, k, scale: snapkv(q, k, 1.0),
    },
    "2": {
        "the newest duplicate counted": lambda k: redundancy(k, exempt=False),
        "the key itself counted": lambda k: redundancy(k, diagonal=True),
        "the oldest duplicate exempt": lambda k: redundancy(k, oldest=True),
    },
    "1": {
        "+ for -": lambda *a: rkv(*a, sign=1.0),
        "mean for maximum over query heads": lambda *a: rkv(*a, mean=True),
        "lambda on redundancy": lambda *a: rkv(*a, lam=0.93),
    },
    "HH1": {"sum over queries": lambda *a: observed(*a, divide=False)},
    "EA1": {"covariance rotated on one side": lambda *a: average_rotation(*a, right=False)},
    "EA2": {
        "covariance not halved": lambda *a: expected(*a, half=1.0),
        "no covariance": lambda *a: expected(*a, half=0.0),
        "without the values' norm": lambda *a: expected(*a, norm=False),
    },
    "KZ1": {
        "mean for maximum over queries": lambda *a: kvzip(*a, mean=True),
        "softmax over the piece alone": lambda *a: kvzip(*a, alone=True),
    },
    "KN1": {"sign": lambda k: -key_norm(k)},
}
