"""How many vectors a segment becomes: a stop probability after each, the law it makes, the soft gate, hard stops.

The variable-length variant of AutoCompressors (jo100sun/AutoCompressors bb15bc1, whose own formulas are CP3 to CP5);
the law is that of ACT (arXiv:1603.08983) and PonderNet (2107.05407). Numbers of equations are the ledger's.

Symbols: K places of a segment, t from 1; z_t the state there; a_t stop logit, lam_t = sigmoid(a_t); s_t = P(N >= t);
N vectors kept. All of it is float32, float64 if given, whatever comes in, and survival is kept as log s.

`index` says what a stop at place t keeps. "after": z_1..z_t, at K at the latest, so N is 1..K. "before": z_t is not
kept and nothing is forced, N is 0..K. "split" keeps as "before", while gate and price go by s_t as in "after".
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype
from laconic.rng import uniform

StopPosition = Literal["after", "before", "mixture"]
RandomStream = Literal["nested", "length", "second", "harden"]
STREAM_KEYS: dict[RandomStream, int] = {"nested": 1, "length": 2, "second": 3, "harden": 4}
"""Streams of draws: lengths of `nested`; those a head draws, and their second; which windows are read hard."""


def upcast(x: Tensor) -> Tensor:
    """The same numbers in the type in which lengths are reckoned."""
    return x.to(accumulation_dtype(x.dtype))


def stop_logit(
    u: Float[Tensor, " D"],
    b: Float[Tensor, ""],
    z: Float[Tensor, "*B D"],
    initial_bias: float = 0.0,
    head_lr: float = 1.0,
) -> Float[Tensor, "*B"]:
    """Eq. VL3: a_t = u . z_t + b, with u and b held divided by `head_lr`, and b counted from `start`."""
    with torch.autocast(z.device.type, enabled=False):
        return head_lr * (upcast(z) @ upcast(u).to(accumulation_dtype(z.dtype)) + upcast(b)) + initial_bias


def vocabulary_stop_logit(logits: Float[Tensor, "*B V"], stop_id: int) -> Float[Tensor, "*B"]:
    """Eq. CP3: lam_t = softmax(logits)[stop], as a_t = logit lam_t: the stop's logit less logsumexp of the others."""
    logits = upcast(logits)
    others = torch.cat([logits[..., :stop_id], logits[..., stop_id + 1 :]], -1)
    return logits[..., stop_id] - others.logsumexp(-1)


def length_support(allowed_lengths: tuple[int, ...], stop_position: StopPosition = "after") -> tuple[int, ...]:
    """The lengths that N takes where those of a recipe are allowed: with "before" and "split" 0 too."""
    return allowed_lengths if stop_position == "after" else (0, *allowed_lengths)


def allowed_stop_positions(K: int, allowed_lengths: tuple[int, ...], stop_position: StopPosition) -> list[bool]:
    """Whether a stop at place t gives an allowed length."""
    if allowed_lengths[-1] != K:
        raise UsageError(
            f"lengths {', '.join(map(str, allowed_lengths))} at {K} places: the longest must be as many as there are"
        )
    found = length_support(allowed_lengths, stop_position)
    return [t - (stop_position != "after") in found for t in range(1, K + 1)]


def mask_disallowed_stops(
    a: Float[Tensor, "B K"], allowed_lengths: tuple[int, ...], stop_position: StopPosition = "after"
) -> Float[Tensor, "B K"]:
    """a_t where a stop gives an allowed length, else minus infinity. Raises `Usage` (2) if the last is not K."""
    places = torch.tensor(allowed_stop_positions(a.shape[1], allowed_lengths, stop_position), device=a.device)
    return upcast(a).masked_fill(~places, -math.inf)


def log_survival(a: Float[Tensor, "B K"]) -> Float[Tensor, "B K1"]:
    """Eq. VL4: log s_1 = 0, log s_{t+1} = log s_t + logsigmoid(-a_t), for t = 1..K+1."""
    return F.pad(F.logsigmoid(-upcast(a)).cumsum(1), (1, 0))


def length_log_probs(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B n"]:
    """Logarithms of `probabilities`; minus infinity where a length is not allowed."""
    log_s, log_lam = log_survival(a), F.logsigmoid(upcast(a))
    if stop_position == "after":
        return torch.cat([(log_s[:, :-1] + log_lam)[:, :-1], log_s[:, -2:-1]], 1)
    return torch.cat([log_s[:, :-1] + log_lam, log_s[:, -1:]], 1)


def length_probs(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B n"]:
    """Eq. VL5: P(N = t) = s_t lam_t for t < K, P(N = K) = s_K; else P(N = t - 1) = s_t lam_t, P(N = K) = s_{K+1}."""
    return length_log_probs(a, stop_position).exp()


def log_survival_gate(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B K"]:
    """Eq. CP4: log of what gate and price take for P(N >= t): s_t, with "before" s_{t+1}; "split" takes s_t and keeps
    by s_{t+1}."""
    log_s = log_survival(a)
    return log_s[:, 1:] if stop_position == "before" else log_s[:, :-1]


def expected_length(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, " B"]:
    """Eq. VL6: E[N] = sum over t of P(N >= t)."""
    return log_survival_gate(a, stop_position).exp().sum(1)


def solve_initial_bias(
    mean_fraction: float, allowed_lengths: tuple[int, ...], stop_position: StopPosition = "after"
) -> float:
    """Eq. VL13: the b = logit lam of a flat hazard with E[N] = `start` K, by bisection.

    Where all of 1..K are allowed, E[N] is (1 - (1 - lam)^K) / lam. One length alone has nothing to decide: 0.
    Raises `Usage` (2) for a mean that no hazard gives.
    """
    K = allowed_lengths[-1]
    places, least = (
        allowed_stop_positions(K, allowed_lengths, stop_position),
        length_support(allowed_lengths, stop_position)[0] if stop_position != "mixture" else allowed_lengths[0],
    )
    if least == K:
        return 0.0
    if not least < mean_fraction * K < K:
        raise UsageError(
            f"start {mean_fraction}: a mean of {mean_fraction * K:g} vectors; lengths are {least} to {K}, choose between them"
        )
    low, high = -60.0, 60.0
    for _ in range(100):
        b = (low + high) / 2
        low, high = (b, high) if constant_hazard_mean(b, places, stop_position) > mean_fraction * K else (low, b)
    return (low + high) / 2


def constant_hazard_mean(b: float, can_stop: list[bool], stop_position: StopPosition) -> float:
    """E[N] where every open place has the stop logit b."""
    s, total, on = 1.0, 0.0, 1 / (1 + math.exp(b))
    for opened in can_stop:
        after = s * on if opened else s
        total += after if stop_position == "before" else s
        s = after
    return total


def attention_gate_bias(
    log_s: Float[Tensor, "B M"],
    segment_ids: Int[Tensor, "B M"],
    prefix_length: int = 0,
    suffix_length: int = 0,
    num_cached: int = 0,
) -> Float[Tensor, "B T P"]:
    """Eq. VL7: logit += log s of a key in the memory, unless the query is of the same block; 0 for all other keys.

    Columns are `lead` others, the memory, `tail` others; queries are those from column `held` on, keys all.
    `block` is the number of the segment that wrote a slot, -1 where dead.
    """
    key, blocks = (
        F.pad(upcast(log_s), (prefix_length, suffix_length)),
        F.pad(segment_ids, (prefix_length, suffix_length), value=-1),
    )
    query = blocks[:, num_cached:, None]
    gated = (blocks[:, None] >= 0) & (blocks[:, None] != query)
    return key[:, None].expand(gated.shape).masked_fill(~gated, 0.0)


def scale_by_survival(vectors: Float[Tensor, "B M D"], log_s: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    """Eq. CP5: s_t sigma_t, which the first norm of a block undoes; for comparison with the gate."""
    return (upcast(vectors) * upcast(log_s).exp()[..., None]).to(vectors.dtype)


def first_stop(stops: Bool[Tensor, "B K"], stop_position: StopPosition = "after") -> Int[Tensor, " B"]:
    """N by the first place where a row stops, whatever comes after it; K where it never does."""
    K, kept = stops.shape[1], int(stop_position == "after")
    return torch.where(stops.any(1), stops.long().argmax(1) + kept, K)


def stop_by_threshold(a: Float[Tensor, "B t"], tau: float) -> Bool[Tensor, "B t"]:
    """lam_t >= tau."""
    return upcast(a).sigmoid() >= tau


def stop_by_quantile(a: Float[Tensor, "B t"], q: float) -> Bool[Tensor, "B t"]:
    """1 - s_{t+1} >= q, which needs no place after t."""
    return log_survival(a)[:, 1:] <= math.log1p(-q)


def stop_by_sampling(a: Float[Tensor, "B t"], u: Float[Tensor, "B t"]) -> Bool[Tensor, "B t"]:
    """u_t < lam_t."""
    return u < upcast(a).sigmoid()


def length_by_threshold(
    a: Float[Tensor, "B K"], tau: float, stop_position: StopPosition = "after"
) -> Int[Tensor, " B"]:
    """Eq. VL14: N = first t with lam_t >= tau, else K."""
    return first_stop(stop_by_threshold(a, tau), stop_position)


def length_by_quantile(a: Float[Tensor, "B K"], q: float, stop_position: StopPosition = "after") -> Int[Tensor, " B"]:
    """Eq. VL15: N = first t with 1 - s_{t+1} >= q, else K."""
    return first_stop(stop_by_quantile(a, q), stop_position)


def length_by_sampling(
    a: Float[Tensor, "B K"], u: Float[Tensor, "B K"], stop_position: StopPosition = "after"
) -> Int[Tensor, " B"]:
    """Eq. VL16: N = first t with u_t < lam_t, else K; u uniform in [0, 1)."""
    return first_stop(stop_by_sampling(a, u), stop_position)


def fixed_length(n: int, allowed_lengths: tuple[int, ...]) -> int:
    """Eq. VL17: N = min(n, K), of the lengths allowed. Raises `Usage` (2) for another."""
    found = min(n, allowed_lengths[-1])
    if found not in allowed_lengths:
        raise UsageError(f"n {n}: lengths {', '.join(map(str, allowed_lengths))} are allowed; choose one of them")
    return found


def uniform_length(u: Float[Tensor, " B"], allowed_lengths: tuple[int, ...]) -> Int[Tensor, " B"]:
    """Eq. VL23: N uniform over the lengths allowed, by one draw u in [0, 1) a row."""
    return torch.tensor(allowed_lengths, device=u.device)[(u * len(allowed_lengths)).long()]


def draw_uniforms(
    stream: RandomStream, seed: int, epoch: int, row_index: Int[Tensor, " B"], segment: int, num_draws: int
) -> Float[Tensor, "B n"]:
    """Numbers in [0, 1), float64, keyed by (seed, epoch, document, segment) and what they are for."""
    rows, places = row_index.cpu().numpy()[:, None], torch.arange(num_draws, device="cpu").numpy()
    return torch.tensor(uniform(seed, STREAM_KEYS[stream], epoch, rows, segment, places), device=row_index.device)
