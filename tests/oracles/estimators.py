"""Oracles of prices, priors and the stop head's estimators, as loops in float64, and misreadings of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.halting import by_row, gate, gates, laws, probabilities, sigmoid, survival, tensor


def omega(step: int, steps: int, start: float, rise: float) -> float:
    share = step / steps
    return 0.0 if share < start else 1.0 if share >= start + rise else (share - start) / rise


def penalty(
    lengths: Tensor, scored: Tensor, hard: Tensor, beta: float, when: tuple[int, int, float, float],
    *, unread: bool = False, hardened: bool = False, alone: bool = False, mean: bool = False, ramped: bool = True,
) -> Tensor:  # fmt: skip
    """omega beta times the sum of E[N_k] that a scored segment of the same window reads."""
    total, n = 0.0, 0
    for row, expected, tried in zip(lengths.tolist(), scored.tolist(), hard.tolist(), strict=True):
        for k in range(len(row)):
            if (unread or any(expected[k + (not alone) :])) and (hardened or not tried):
                total, n = total + row[k], n + 1
    return tensor((omega(*when) if ramped else 1.0) * beta * total / (n if mean else 1))


def ratio(
    lengths: Tensor, text: Tensor, memory: Tensor, log_s: Tensor, counted: Tensor, price: float, alpha: float,
    *, pads: bool = False, slots: bool = False, through: bool = False, summed: bool = False, inverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Value, and gradients to E[N] and the old memory's log s; `text` [B, w, T] and `memory` [B, w, M] are masks."""
    B, w = lengths.shape
    value, to_length, to_log_s = 0.0, torch.zeros(B, w).double(), torch.zeros(log_s.shape).double()
    n = 1 if summed else sum(map(sum, counted.tolist()))
    for b in range(B):
        for k in range(w):
            if not counted[b, k]:
                continue
            E = float(lengths[b, k])
            tokens = text.shape[2] if pads else sum(text[b, k].tolist())
            memory_mask = [m for m in range(memory.shape[2]) if slots or memory[b, k, m]]
            m_k = len(memory_mask) if slots else sum(math.exp(log_s[b, k, m]) for m in memory_mask)
            whole = tokens + alpha * m_k
            value += price * (whole / E if inverse else E / whole) / n
            to_length[b, k] = price / whole / n
            for m in memory_mask if through else []:
                to_log_s[b, k, m] = -price * E / whole**2 * alpha * math.exp(log_s[b, k, m]) / n
    return tensor(value), to_length, to_log_s


def published_ratio(
    lengths: Tensor, text: Tensor, memory: Tensor, log_s: Tensor, price: float, **variant: Any
) -> Tensor:
    """alpha = 1 over all segments with text; `counted` selects others."""
    all_, alpha = text.any(2), variant.pop("alpha", 1.0)
    return ratio(lengths, text, memory, log_s, variant.pop("counted", lambda x: x)(all_), price, alpha, **variant)[0]


def entropy(row: list[float], index: str = "after") -> float:
    return -sum(p * math.log(p) for p in probabilities(row, index) if p > 0)


def geometric(g: float, n: int) -> list[float]:
    return [g * (1 - g) ** t / (1 - (1 - g) ** n) for t in range(n)]


def divergence(P: Sequence[float], G: Sequence[float]) -> float:
    return sum(p * math.log(p / g) for p, g in zip(P, G, strict=True) if p > 0)


def kl_geometric(
    row: list[float], g: float, index: str,
    law: Callable[[float, int], list[float]] = geometric, swapped: bool = False,
) -> float:  # fmt: skip
    P = probabilities(row, index)
    G = law(g, len(P))
    return divergence(G, P) if swapped else divergence(P, G)


def target_price(
    beta: float, lengths: Sequence[float], target: float, eta: float, max_price: float,
    *, sign: int = 1, keep: float = 0.99, clipped: bool = True,
) -> Tensor:  # fmt: skip
    """beta after each step of a run whose E[N] was `lengths`; the mean starts at the first."""
    result, mean = [], lengths[0]
    for length in lengths:
        mean = keep * mean + (1 - keep) * length
        beta = beta + sign * eta * (mean - target)
        beta = min(max(beta, 0.0), max_price) if clipped else beta
        result.append(beta)
    return tensor(result)


def slots(a: Tensor, N: Tensor, index: str, *, value: bool = False, all_: bool = False, shift: int = 0) -> Any:
    """Straight-through: valid positions, their bias, and the gradient to a of the sum of t times the bias at t."""
    B, K = a.shape
    mask, bias, to = torch.zeros(B, K), torch.zeros(B, K).double(), torch.zeros(B, K).double()
    for b in range(B):
        for t in range(1, K + 1):
            selected = t <= N[b] or all_
            mask[b, t - 1] = t <= N[b]
            if not selected:
                continue
            before = t - 1 + (index == "before") + shift  # factors in s
            bias[b, t - 1] = gate(a[b].tolist(), index)[t - 1] if value else 0.0
            for j in range(min(before, K)):
                to[b, j] += t * -sigmoid(float(a[b, j]))
    return mask.double(), bias, to


def ponder(
    a: Tensor, nats: Tensor, lengths: tuple[int, ...], beta: float, index: str,
    *, column: Callable[[int, int], int] | None = None, law: Callable[..., Any] = probabilities, even: bool = False,
) -> Tensor:  # fmt: skip
    out = []
    for row, costs in zip(a.tolist(), nats.tolist(), strict=True):
        P = law(row, index)
        P = dict(enumerate(P, 1 if index == "after" else 0))
        total = 0.0
        for i, n in enumerate(lengths):
            p = 1 / len(lengths) if even else P.get(column(n, i) if column else n, 0.0)
            total += p * (costs[i] + beta * n)
        out.append(total)
    return tensor(out)


def ratio_label(nats: Tensor, lengths: tuple[int, ...], beta: float, *, key: Any = None) -> Tensor:
    key = key or (lambda cost, n, i: (cost + beta * n, n))
    return tensor([min((key(cost, n, i), i) for i, (cost, n) in enumerate(zip(row, lengths, strict=True)))[1]
                   for row in nats.tolist()])  # fmt: skip


def entropy_floor(row: list[float], weight: float, floor: float, index: str) -> float:
    return weight * max(0.0, floor - entropy(row, index))


divergences, floors = by_row(kl_geometric), by_row(entropy_floor)


ORACLE = {
    "VL8": penalty,
    "VL9": ratio,
    "VL10": divergences,
    "VL11": floors,
    "VL12": target_price,
    "VL19": gates,
    "VL21": slots,
    "VL22": ponder,
    "VL24": ratio_label,
    "CP6": published_ratio,
}

MISREAD: dict[str, dict[str, Any]] = {
    "VL8": {
        "a compression nobody reads in the window": lambda *x: penalty(*x, unread=True),
        "in hardened windows too": lambda *x: penalty(*x, hardened=True),
        "read by its own segment": lambda *x: penalty(*x, alone=True),
        "mean for sum": lambda *x: penalty(*x, mean=True),
        "from the first step on": lambda *x: penalty(*x, ramped=False),
    },
    "VL9": {
        "denominator with gradient": lambda *x: ratio(*x, through=True),
        "slots counted for live old memory": lambda *x: ratio(*x, slots=True),
        "padding counted as text": lambda *x: ratio(*x, pads=True),
        "sum over compressions": lambda *x: ratio(*x, summed=True),
        "text per vector": lambda *x: ratio(*x, inverse=True),
        "old memory left out": lambda *x: ratio(*x[:-1], 0.0),
    },
    "VL10": {
        "KL reversed": by_row(lambda *x: kl_geometric(*x, swapped=True)),
        "geometric not normalised": by_row(
            lambda *x: kl_geometric(*x, law=lambda g, n: [g * (1 - g) ** t for t in range(n)])
        ),
        "geometric from 0": by_row(
            lambda *x: kl_geometric(*x, law=lambda g, n: [(1 - g) * p for p in geometric(g, n)])
        ),
        "entropy left out": by_row(lambda row, g, index: kl_geometric(row, g, index) + entropy(row, index)),
        "the prior's complement": by_row(lambda row, g, index: kl_geometric(row, 1 - g, index)),
    },
    "VL11": {
        "a ceiling": by_row(lambda row, weight, floor, index: weight * max(0.0, entropy(row, index) - floor)),
        "bits": by_row(lambda row, weight, floor, index: weight * max(0.0, floor - entropy(row, index) / math.log(2))),
        "entropies of single stops": by_row(
            lambda row, weight, floor, index: (
                weight * max(0.0, floor - sum(-p * math.log(p) for p in (sigmoid(a) for a in row)))
            )
        ),
        "below 0 where above the floor": by_row(
            lambda row, weight, floor, index: weight * (floor - entropy(row, index))
        ),
    },
    "VL12": {
        "sign": lambda *x: target_price(*x, sign=-1),
        "not clipped": lambda *x: target_price(*x, clipped=False),
        "the last mean for the running one": lambda *x: target_price(*x, keep=0.0),
        "weights of the running mean exchanged": lambda *x: target_price(*x, keep=0.01),
    },
    "VL19": {
        "P(N = t)": lambda a, index: laws(a, "after").log(),
        "lam_t": lambda a, index: by_row(lambda row: [-math.log1p(math.exp(-x)) for x in row])(a),
        "s for log s": lambda a, index: gates(a, index).exp(),
        "s_{t+1} where E[N] has s_t, and the reverse": lambda a, index: gates(
            a, "after" if index == "before" else "before"
        ),
    },
    "VL21": {
        "log s without its value taken off": lambda *x: slots(*x, value=True),
        "gradient to what was cut": lambda *x: slots(*x, all_=True),
        "s_{t+1} for s_t": lambda *x: slots(*x, shift=1),
    },
    "VL22": {
        "s_n for P(n)": lambda *x: ponder(*x, law=lambda row, index: survival(row)[: len(row) + (index != "after")]),
        "no price": lambda a, nats, lengths, beta, index: ponder(a, nats, lengths, 0.0, index),
        "every length alike": lambda *x: ponder(*x, even=True),
        "P of the length's place in the list": lambda *x: ponder(*x, column=lambda n, i: i + 1),
        "P of one less": lambda *x: ponder(*x, column=lambda n, i: n - 1),
        "lam_n for P(n)": lambda *x: ponder(
            *x, law=lambda row, index: [*map(sigmoid, row), *([0.0] if index != "after" else [])]
        ),
    },
    "VL24": {
        "no price": lambda nats, lengths, beta: ratio_label(nats, lengths, 0.0),
        "price of the place for the length": lambda nats, lengths, beta: ratio_label(
            nats, lengths, beta, key=lambda cost, n, i: (cost + beta * i, n)
        ),
        "the dearest": lambda nats, lengths, beta: ratio_label(nats, lengths, beta, key=lambda c, n, i: -c - beta * n),
        "the longer of two alike": lambda nats, lengths, beta: ratio_label(
            nats, lengths, beta, key=lambda cost, n, i: (cost + beta * n, -n)
        ),
    },
    "CP6": {
        "old memory left out": lambda *x: published_ratio(*x, alpha=0.0),
        "the window's last left out": lambda *x: published_ratio(
            *x, counted=lambda all_: all_ & torch.tensor([*[True] * (all_.shape[1] - 1), False])
        ),
        "all K slots of old memory": lambda *x: published_ratio(*x, slots=True),
        "segments without text counted": lambda *x: published_ratio(*x, counted=torch.ones_like),
        "padding counted as text": lambda *x: published_ratio(*x, pads=True),
    },
}
