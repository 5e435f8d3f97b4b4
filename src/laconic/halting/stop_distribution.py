"""Distribution over the number of summary vectors, defined by a stop probability after each one.

Follows the variable-length AutoCompressor (jo100sun/AutoCompressors bb15bc1, whose own formulas are CP3 to CP5); the
distribution is that of ACT (arXiv:1603.08983) and PonderNet (arXiv:2107.05407). Equation numbers are the ledger's.

Symbols: K summary positions per segment, t counts from 1; z_t the state at position t; a_t its stop logit,
lam_t = sigmoid(a_t); s_t = P(N >= t) the survival; N the number of vectors kept. Everything is computed in float32
(float64 if the input is), and survival is stored as log s.

`stop_position` says what a stop at position t keeps:

- "after": z_1..z_t are kept and the last position always stops, so N is in 1..K.
- "before": z_t is dropped and no position is forced to stop, so N is in 0..K.
- "mixture": vectors are kept as in "before", while the gate and the price use s_t as in "after".
"""

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype
from laconic.rng import uniform

StopPosition = Literal["after", "before", "mixture"]
RandomStream = Literal["nested", "length", "harden"]
# Random streams: lengths of nested dropout; lengths sampled from the stop head; windows of `hard_window_fraction`.
STREAM_KEYS: dict[RandomStream, int] = {"nested": 1, "length": 2, "harden": 4}


def upcast(x: Tensor) -> Tensor:
    """Convert to the dtype in which lengths are computed: float32, or float64 if `x` is."""
    return x.to(accumulation_dtype(x.dtype))


def stop_logit(
    u: Float[Tensor, " D"],
    b: Float[Tensor, ""],
    z: Float[Tensor, "*B D"],
    initial_bias: float = 0.0,
    head_lr: float = 1.0,
) -> Float[Tensor, "*B"]:
    """Eq. VL3: a_t = u . z_t + b, where u and b are stored divided by `head_lr`, and b relative to `initial_bias`.

    `head_lr` is the learning rate of the head relative to all other parameters.
    """
    with torch.autocast(z.device.type, enabled=False):
        return head_lr * (upcast(z) @ u.to(accumulation_dtype(z.dtype)) + upcast(b)) + initial_bias


def vocabulary_stop_logit(logits: Float[Tensor, "*B V"], stop_id: int) -> Float[Tensor, "*B"]:
    """Eq. CP3: lam_t = softmax(logits)[stop_id], returned as a_t = logit(lam_t).

    That is the logit of `stop_id` minus the logsumexp of all others.
    """
    logits = upcast(logits)
    others = torch.cat([logits[..., :stop_id], logits[..., stop_id + 1 :]], -1)
    return logits[..., stop_id] - others.logsumexp(-1)


def length_support(allowed_lengths: tuple[int, ...], stop_position: StopPosition = "after") -> tuple[int, ...]:
    """Return the values of N with non-zero probability: the allowed lengths, and 0 unless stops are "after"."""
    return allowed_lengths if stop_position == "after" else (0, *allowed_lengths)


def allowed_stop_positions(K: int, allowed_lengths: tuple[int, ...], stop_position: StopPosition) -> list[bool]:
    """Return for each position t in 1..K whether a stop there gives an allowed length."""
    if allowed_lengths[-1] != K:
        raise UsageError(
            f"allowed lengths {', '.join(map(str, allowed_lengths))} with {K} summary positions: the largest allowed "
            f"length must be {K}"
        )
    support = length_support(allowed_lengths, stop_position)
    return [t - (stop_position != "after") in support for t in range(1, K + 1)]


def mask_disallowed_stops(
    a: Float[Tensor, "B K"], allowed_lengths: tuple[int, ...], stop_position: StopPosition = "after"
) -> Float[Tensor, "B K"]:
    """Set stop logits to minus infinity where a stop would give a length that is not allowed."""
    allowed = torch.tensor(allowed_stop_positions(a.shape[1], allowed_lengths, stop_position), device=a.device)
    return upcast(a).masked_fill(~allowed, -math.inf)


def log_survival(a: Float[Tensor, "B K"]) -> Float[Tensor, "B K1"]:
    """Eq. VL4: log s_1 = 0, log s_{t+1} = log s_t + logsigmoid(-a_t); columns are t = 1..K+1."""
    return F.pad(F.logsigmoid(-upcast(a)).cumsum(1), (1, 0))


def length_log_probs(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B n"]:
    """Return the logarithm of `length_probs`; minus infinity where a length is not allowed."""
    log_s = log_survival(a)
    log_stop = log_s[:, :-1] + F.logsigmoid(upcast(a))  # log(s_t lam_t)
    if stop_position == "after":
        return torch.cat([log_stop[:, :-1], log_s[:, -2:-1]], 1)
    return torch.cat([log_stop, log_s[:, -1:]], 1)


def length_probs(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B n"]:
    """Eq. VL5: the distribution P(N).

    With "after" P(N = t) = s_t lam_t for t < K and P(N = K) = s_K, so columns are N = 1..K. Otherwise
    P(N = t - 1) = s_t lam_t and P(N = K) = s_{K+1}, so columns are N = 0..K.
    """
    return length_log_probs(a, stop_position).exp()


def log_survival_gate(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B K"]:
    """Eq. CP4: the logarithm of what the gate and the price use for P(N >= t).

    This is s_t, or s_{t+1} with "before". "mixture" uses s_t here and keeps vectors by s_{t+1}.
    """
    log_s = log_survival(a)
    return log_s[:, 1:] if stop_position == "before" else log_s[:, :-1]


def expected_length(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, " B"]:
    """Eq. VL6: E[N] = sum over t of P(N >= t)."""
    return log_survival_gate(a, stop_position).exp().sum(1)


def solve_initial_bias(
    mean_fraction: float, allowed_lengths: tuple[int, ...], stop_position: StopPosition = "after"
) -> float:
    """Eq. VL13: the bias b = logit(lam) of a constant hazard with E[N] = `mean_fraction` * K, by bisection.

    If all of 1..K are allowed, E[N] is (1 - (1 - lam)^K) / lam, times 1 - lam with "before". With a single allowed
    length there is nothing to decide and the bias is 0. Raises `UsageError` if no constant hazard has this mean.
    """
    K = allowed_lengths[-1]
    can_stop = allowed_stop_positions(K, allowed_lengths, stop_position)
    shortest = allowed_lengths[0] if stop_position == "mixture" else length_support(allowed_lengths, stop_position)[0]
    if shortest == K:
        return 0.0
    mean = mean_fraction * K
    if not shortest < mean < K:
        raise UsageError(
            f"initial mean fraction {mean_fraction} is a mean of {mean:g} vectors; it must lie between the shortest "
            f"and the longest length, {shortest} and {K}"
        )
    low, high = -60.0, 60.0
    for _ in range(100):
        b = (low + high) / 2
        low, high = (b, high) if constant_hazard_mean(b, can_stop, stop_position) > mean else (low, b)
    return (low + high) / 2


def constant_hazard_mean(b: float, can_stop: list[bool], stop_position: StopPosition) -> float:
    """Compute E[N] if every position that can stop has the stop logit b."""
    s = 1.0
    mean = 0.0
    continue_prob = 1 / (1 + math.exp(b))
    for allowed in can_stop:
        next_s = s * continue_prob if allowed else s
        mean += next_s if stop_position == "before" else s
        s = next_s
    return mean


def attention_gate_bias(
    log_s: Float[Tensor, "B M"],
    segment_ids: Int[Tensor, "B M"],
    prefix_length: int = 0,
    suffix_length: int = 0,
    num_cached: int = 0,
) -> Float[Tensor, "B T P"]:
    """Eq. VL7: log s, to be added to the attention logit of a memory key unless the query is in the same segment.

    `segment_ids` name the segment that wrote each slot, -1 where it is not valid. The bias is 0 in the columns before
    and after the memory. The first `num_cached` columns are only keys; all others are queries too.
    """
    margins = (prefix_length, suffix_length)
    log_s = F.pad(upcast(log_s), margins)
    ids = F.pad(segment_ids, margins, value=-1)
    query_ids = ids[:, num_cached:, None]
    is_gated = (ids[:, None] >= 0) & (ids[:, None] != query_ids)
    return log_s[:, None].expand(is_gated.shape).masked_fill(~is_gated, 0.0)


def scale_by_survival(vectors: Float[Tensor, "B M D"], log_s: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    """Eq. CP5: s_t sigma_t. The first norm of a block undoes it; implemented for comparison with the gate."""
    return (upcast(vectors) * upcast(log_s).exp()[..., None]).to(vectors.dtype)


def first_stop(stops: Bool[Tensor, "B K"], stop_position: StopPosition = "after") -> Int[Tensor, " B"]:
    """Return N given the first position where each row stops; K if it never does."""
    K = stops.shape[1]
    includes_stop = int(stop_position == "after")
    return torch.where(stops.any(1), stops.long().argmax(1) + includes_stop, K)


def stop_by_threshold(a: Float[Tensor, "B t"], tau: float) -> Bool[Tensor, "B t"]:
    return upcast(a).sigmoid() >= tau


def stop_by_quantile(a: Float[Tensor, "B t"], q: float) -> Bool[Tensor, "B t"]:
    """Test 1 - s_{t+1} >= q at each position, which depends on no later position."""
    return log_survival(a)[:, 1:] <= math.log1p(-q)


def stop_by_sampling(a: Float[Tensor, "B t"], u: Float[Tensor, "B t"]) -> Bool[Tensor, "B t"]:
    """Eq. VL16: u_t < lam_t at each position; u uniform in [0, 1). N is the first such t, else K (`first_stop`)."""
    return u < upcast(a).sigmoid()


def length_by_threshold(
    a: Float[Tensor, "B K"], tau: float, stop_position: StopPosition = "after"
) -> Int[Tensor, " B"]:
    """Eq. VL14: N = first t with lam_t >= tau, else K."""
    return first_stop(stop_by_threshold(a, tau), stop_position)


def length_by_quantile(a: Float[Tensor, "B K"], q: float, stop_position: StopPosition = "after") -> Int[Tensor, " B"]:
    """Eq. VL15: N = first t with 1 - s_{t+1} >= q, else K."""
    return first_stop(stop_by_quantile(a, q), stop_position)


def uniform_length(u: Float[Tensor, " B"], allowed_lengths: tuple[int, ...]) -> Int[Tensor, " B"]:
    """Eq. VL23: N uniform over the allowed lengths, from one uniform number u in [0, 1) for each row."""
    return torch.tensor(allowed_lengths, device=u.device)[(u * len(allowed_lengths)).long()]


def draw_uniforms(
    stream: RandomStream, seed: int, epoch: int, row_index: Int[Tensor, " B"], segment: int, num_draws: int
) -> Float[Tensor, "B n"]:
    """Draw float64 numbers in [0, 1), keyed by stream, seed, epoch, document and segment.

    The same document gets the same numbers in any batch and on any rank.
    """
    rows = row_index.cpu().numpy()[:, None]
    u = uniform(seed, STREAM_KEYS[stream], epoch, rows, segment, np.arange(num_draws))
    return torch.tensor(u, device=row_index.device)
