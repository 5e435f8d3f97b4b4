"""Oracles of the learned number of vectors, as loops in float64 from the formulas, and misreadings of them.

Lengths are those of one compression a row: lists of stop logits a_1..a_K; `index` is "after", "before" or "mixture".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def by_row(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Apply a function of one row's logits to all rows."""
    return lambda a, *rest: tensor([function(row, *rest) for row in a.tolist()])


def sigmoid(a: float) -> float:
    return 1 / (1 + math.exp(-a)) if a > -700 else 0.0


def stop_logit(u: Tensor, b: Tensor, z: Tensor, start: float, head_lr: float, *, by: int = 1) -> Tensor:
    """u and b times `head_lr`, plus the initial bias."""
    out = torch.empty(z.shape[:2], dtype=torch.float64)
    for i, row in enumerate(z.tolist()):
        for t, state in enumerate(row):
            product = sum(head_lr * x * y for x, y in zip(u.tolist(), state, strict=True))
            out[i, t] = product + head_lr**by * float(b) + start
    return out


def survival(row: list[float]) -> list[float]:
    """s_1..s_{K+1} as products."""
    s = [1.0]
    for a in row:
        s.append(s[-1] * (1 - sigmoid(a)))
    return s


def log_survival(row: list[float]) -> list[float]:
    """log s_2..s_{K+1}; a sum of -log(1 + e^a)."""
    result = [0.0]
    for a in row:
        result.append(result[-1] - math.log1p(math.exp(a)))
    return result[1:]


def subtracted(a: Tensor, dtype: torch.dtype) -> Tensor:
    """log s by 1 - p in a low-precision dtype."""
    return (1 - a.to(dtype).sigmoid()).log().double().cumsum(1)


def probabilities(row: list[float], index: str) -> list[float]:
    s, lam = survival(row), [sigmoid(a) for a in row]
    stops = [s[t] * lam[t] for t in range(len(row))]
    return [*stops[:-1], s[-2]] if index == "after" else [*stops, s[-1]]


def expected(row: list[float], index: str) -> float:
    """The sum over n of n P(n); "mixture" counts like "after"."""
    shift = 0 if index == "before" else 1
    return sum((n + shift) * p for n, p in enumerate(probabilities(row, "before" if index == "before" else "after")))


def gate(row: list[float], index: str) -> list[float]:
    s = survival(row)
    return [math.log(x) for x in (s[1:] if index == "before" else s[:-1])]


def timing(a: Tensor, index: str, *, gated: str | None = None, selected: str | None = None) -> tuple[Tensor, Tensor]:
    """The gate, and P(N >= t) of the kept lengths."""
    lasting = by_row(lambda row: survival(row)[:-1] if (selected or index) == "after" else survival(row)[1:])
    return by_row(gate)(a, gated or index), lasting(a)


def bias_start(start: float, K: int, *, mean: Callable[[float, int], float] | None = None) -> float:
    """b of (1 - (1 - lam)^K) / lam = start K, by bisection over lam."""
    mean = mean or (lambda lam, K: (1 - (1 - lam) ** K) / lam)
    low, high = 1e-9, 1.0
    for _ in range(200):
        lam = (low + high) / 2
        low, high = (lam, high) if mean(lam, K) > start * K else (low, lam)
    return math.log(low / (1 - low))


def attention(
    scores: Tensor,
    log_s: Tensor,
    block: Tensor,
    mask: Tensor,
    lead: int,
    num_cached: int,
    hard: bool,
    *,
    alone: bool = False,
    after: bool = False,
    memory_too: bool = True,
    when_hard: bool = False,
    by_score: bool = False,
) -> Tensor:
    """Softmax of scores [B, T, P], a key's weight times s before it is normalised; causal from column `num_cached`."""
    B, T, P = scores.shape
    out, M = torch.zeros(B, T, P, dtype=torch.float64), log_s.shape[1]
    for b in range(B):
        of = {lead + m: (math.exp(log_s[b, m]), int(block[b, m])) for m in range(M) if block[b, m] >= 0}
        for t in range(T):
            query = of.get(num_cached + t, (1.0, -1))[1]
            weights = []
            for p in range(P):
                s, k = of.get(p, (1.0, -1))
                gated = (not hard or when_hard) and k >= 0 and (alone or k != query) and (memory_too or query < 0)
                s = s if gated else 1.0
                seen = bool(mask[b, p]) and p <= num_cached + t
                score = float(scores[b, t, p]) * (s if by_score else 1.0)
                weights.append(((1.0 if by_score or after else s) * math.exp(score) if seen else 0.0, s))
            total = sum(weight for weight, _ in weights) or 1.0
            out[b, t] = tensor([weight / total * (s if after else 1.0) for weight, s in weights])
    return out


def scaled(vectors: Tensor, log_s: Tensor) -> Tensor:
    return tensor([[[math.exp(log_s[b, m]) * x for x in vectors[b, m].tolist()] for m in range(vectors.shape[1])]
                   for b in range(vectors.shape[0])])  # fmt: skip


def first(stops: Sequence[bool], index: str, *, last: bool = False, none: int | None = None) -> int:
    """N by the first position that stops, K if none does."""
    K = len(stops)
    position_list = [t for t in range(1, K + 1) if stops[t - 1]]
    if not position_list:
        return K if none is None else none
    return (position_list[-1] if last else position_list[0]) - (index != "after")


def threshold(row: list[float], tau: float, index: str, **variant: Any) -> int:
    return first([sigmoid(a) >= tau for a in row], index, **variant)


def quantile(row: list[float], q: float, index: str, *, by: int = 1, **variant: Any) -> int:
    s = survival(row)
    return first([1 - s[t + by] >= q for t in range(len(row))], index, **variant)


def sample(a: Tensor, u: Tensor, index: str, *, above: bool = False, column: int | None = None) -> Tensor:
    """`column`: one random number for all positions."""
    rows = zip(a.tolist(), u.tolist(), strict=True)
    stops = [[(r >= sigmoid(x)) is above for x, r in zip(row, [draw[column]] * len(row) if column is not None else draw,
              strict=True)] for row, draw in rows]  # fmt: skip
    return tensor([first(stop, index) for stop in stops])


def budget(log_s: Tensor, block: Tensor, b: int, *, key: Callable[[float, int, int], tuple[float, ...]]) -> Tensor:
    """Return which valid slots are kept, the best by `key` of (s, rank in the segment, segment)."""
    out = torch.zeros(block.shape, dtype=torch.float64)
    for i, blocks in enumerate(block.tolist()):
        seen: dict[int, int] = {}
        slots = []
        for m, k in enumerate(blocks):
            if k >= 0:
                slots.append((key(math.exp(log_s[i, m]), seen.get(k, 0), k), m))
                seen[k] = seen.get(k, 0) + 1
        for _, m in sorted(slots)[:b]:
            out[i, m] = 1
    return out


def by_survival(s: float, t: int, k: int) -> tuple[float, ...]:
    return -s, t, k


def nested(u: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The i-th of n lengths where u lies in [i / n, (i + 1) / n)."""
    n = len(lengths)
    return tensor([next(lengths[i] for i in range(n) if i / n <= x < (i + 1) / n) for x in u.tolist()])


def vocabulary_logit(logits: Tensor, stop: int, *, out: int = 0, odds: bool = True) -> Tensor:
    """log p - log(1 - p) of the stop's probability; `out` leaves out that many of the last rows."""
    result = []
    for row in logits.tolist():
        top = max(row)
        powers = [math.exp(x - top) for x in row]
        others = [x for i, x in enumerate(powers) if i != stop and i < len(row) - out]
        result.append(math.log(powers[stop]) - math.log(sum(others) + (0.0 if odds else powers[stop])))
    return tensor(result)


def budgets(log_s: Tensor, block: Tensor, b: int) -> Tensor:
    return budget(log_s, block, b, key=by_survival)


def at_most(n: int, K: int) -> int:
    return min(n, K)


log_survivals, laws, means, gates = by_row(log_survival), by_row(probabilities), by_row(expected), by_row(gate)
thresholds, quantiles = by_row(threshold), by_row(quantile)


ORACLE = {
    "VL3": stop_logit,
    "VL4": log_survivals,
    "VL5": laws,
    "VL6": means,
    "VL7": attention,
    "VL13": bias_start,
    "VL14": thresholds,
    "VL15": quantiles,
    "VL16": sample,
    "VL17": at_most,
    "VL18": budgets,
    "VL23": nested,
    "CP3": vocabulary_logit,
    "CP4": timing,
    "CP5": scaled,
}

MISREAD: dict[str, dict[str, Any]] = {
    "VL3": {
        "the rate's factor on u alone": lambda *x: stop_logit(*x, by=0),
        "no bias": lambda u, b, z, start, head_lr: stop_logit(u, 0 * b, z, start, head_lr),
        "the start multiplied by the factor too": lambda u, b, z, start, head_lr: stop_logit(
            u, b, z, head_lr * start, head_lr
        ),
        "the state before": lambda u, b, z, start, head_lr: stop_logit(u, b, z.roll(1, 1), start, head_lr),
    },
    "VL4": {
        "1 - p by subtraction in float32": lambda a: subtracted(a, torch.float32),
        "1 - p in bfloat16": lambda a: subtracted(a, torch.bfloat16),
        "logsigmoid(a) for logsigmoid(-a)": lambda a: log_survivals(-a),
        "s_t for s_{t+1}": lambda a: torch.cat([torch.zeros(len(a), 1), log_survivals(a)[:, :-1]], 1),
        "sum of lam_t for -log s": lambda a: -(a.sigmoid().cumsum(1) ** 0.5),
    },
    "VL5": {
        "no forced stop at K": lambda a, index: (
            tensor([[*probabilities(row, "before")[: len(row) + (index != "after")]] for row in a.tolist()])
            * (torch.arange(a.shape[1] + (index != "after")) < a.shape[1])
        ),
        "lam_t for s_t lam_t": lambda a, index: torch.cat(
            [a.sigmoid(), torch.zeros(len(a), int(index != "after"))], 1
        ).double(),
        "stopped at place t has survived t too": by_row(
            lambda row, index: [
                *(s * sigmoid(a) for s, a in zip(survival(row)[1:], row, strict=True)),
                *([survival(row)[-1]] if index != "after" else []),
            ]
        ),
        "z_K dropped": by_row(
            lambda row, index: [*probabilities(row, index)[:-2], sum(probabilities(row, index)[-2:]), 0.0]
        ),
    },
    "VL6": {
        "sum of lam_t": by_row(lambda row, index: sum(sigmoid(a) for a in row)),
        "sum of t lam_t": by_row(lambda row, index: sum(t * sigmoid(a) for t, a in enumerate(row, 1))),
        "s_{t+1} where the gate has s_t, and the reverse": by_row(
            lambda row, index: expected(row, "after" if index == "before" else "before")
        ),
        "no forced stop at K": by_row(
            lambda row, index: sum(t * p for t, p in enumerate(probabilities(row, "before")[:-1], index != "before"))
        ),
        "z_K dropped": by_row(lambda row, index: expected(row, index) - survival(row)[-1 if index == "before" else -2]),
    },
    "VL7": {
        "s_t on the score": lambda *x: attention(*x, by_score=True),
        "rows of the same block gated": lambda *x: attention(*x, alone=True),
        "after the softmax": lambda *x: attention(*x, after=True),
        "later blocks read an ungated memory": lambda *x: attention(*x, memory_too=False),
        "by key in hard reading too": lambda *x: attention(*x, when_hard=True),
        "no gate": lambda *x: attention(*x[:-1], True),
    },
    "VL13": {
        "b = 0": lambda start, K: 0.0,
        "E[N] = 1 / lam": lambda start, K: bias_start(start, K, mean=lambda lam, K: 1 / lam),
        "the share kept at K": lambda start, K: bias_start(start, K, mean=lambda lam, K: K * (1 - lam) ** (K - 1)),
        "nothing written first": lambda start, K: bias_start(
            start, K, mean=lambda lam, K: (1 - lam) * (1 - (1 - lam) ** K) / lam
        ),
    },
    "VL14": {
        "last place": by_row(lambda *x: threshold(*x, last=True)),
        "1 where none is met": by_row(lambda *x: threshold(*x, none=1)),
        "the other index": by_row(
            lambda row, tau, index: threshold(row, tau, "before" if index == "after" else "after")
        ),
        "below the threshold": by_row(lambda row, tau, index: threshold([-a for a in row], 1 - tau, index)),
        "P(N = t) for lam_t": by_row(
            lambda row, tau, index: first(
                [s * sigmoid(a) >= tau for s, a in zip(survival(row), row, strict=False)], index
            )
        ),
    },
    "VL15": {
        "1 - s_t": by_row(lambda *x: quantile(*x, by=0)),
        "s_{t+1} >= q": by_row(lambda row, q, index: first([s >= q for s in survival(row)[1:]], index)),
        "sum of lam_t": by_row(
            lambda row, q, index: first([sum(map(sigmoid, row[: t + 1])) >= q for t in range(len(row))], index)
        ),
        "last place": by_row(lambda *x: quantile(*x, last=True)),
        "a threshold on lam_t": by_row(lambda row, q, index: threshold(row, q, index)),
    },
    "VL16": {
        "above lam_t": lambda *x: sample(*x, above=True),
        "one draw for all places": lambda *x: sample(*x, column=0),
        "threshold at half": lambda a, u, index: thresholds(a, 0.5, index),
    },
    "VL17": {
        "K always": lambda n, K: K,
        "n beyond K": lambda n, K: n,
        "max for min": lambda n, K: max(n, K),
    },
    "VL18": {
        "ties to the earlier block first": lambda *x: budget(*x, key=lambda s, t, k: (-s, k, t)),
        "ties to the later block": lambda *x: budget(*x, key=lambda s, t, k: (-s, t, -k)),
        "the same from every block": lambda *x: budget(*x, key=lambda s, t, k: (t, k)),
        "oldest blocks whole": lambda *x: budget(*x, key=lambda s, t, k: (k, t)),
        "the smallest": lambda *x: budget(*x, key=lambda s, t, k: (s, t, k)),
    },
    "VL23": {
        "1..K for allowed": lambda u, lengths: nested(u, tuple(range(1, lengths[-1] + 1))),
        "the place for the length": lambda u, lengths: nested(u, tuple(range(len(lengths)))),
        "rounded": lambda u, lengths: tensor(
            [lengths[min(round(x * len(lengths)), len(lengths) - 1)] for x in u.tolist()]
        ),
    },
    "CP3": {
        "log p for its logit": lambda logits, stop: vocabulary_logit(logits, stop, odds=False),
        "the logit as it is": lambda logits, stop: logits[:, stop],
        "the other control row left out": lambda logits, stop: vocabulary_logit(logits, stop, out=1),
        "another row": lambda logits, stop: vocabulary_logit(logits, stop - 1),
    },
    "CP4": {
        "kept as it is gated": lambda a, index: timing(a, index, selected="after"),
        "gated as it is kept": lambda a, index: timing(a, index, gated="before"),
        "exchanged": lambda a, index: timing(a, index, gated="before", selected="after"),
    },
    "CP5": {
        "log s for s": lambda vectors, log_s: vectors * log_s[..., None],
        "not scaled": lambda vectors, log_s: vectors,
        "by the slot before": lambda vectors, log_s: scaled(vectors, log_s.roll(1, 1)),
    },
}
