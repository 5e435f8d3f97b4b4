"""R-KV in the form that KaVa gives it: which M of a chain's tokens are kept, for each layer and head of keys.

KaVa arXiv:2510.02312 (section 3.2, Listing 1), R-KV arXiv:2505.24133.

Symbols: q, k rotated queries of the answer and keys of the chain; a logits, j over answer rows, i over chain columns;
I importance, R redundancy, S score, lam the weight of I; N_C live columns of a row, M kept. Sums are taken in float32,
in float64 if given, under autocast too. Of the attention only the block of answer and chain is made.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import KVSelectionConfig
from laconic.models.attention import accumulation_dtype, visibility_mask
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.rng import uniform

Pool = Literal["max", "mean"]
Scores = Float[Tensor, "B G Nc"]


@dataclass(frozen=True)
class SelectedColumns:
    """The chain columns that M slots hold, for each head; slots beyond the chain are not live and point at column 0."""

    index: Int[Tensor, "B G M"]
    valid: Bool[Tensor, "B G M"]


class LayerSelection(NamedTuple):
    """One layer's choice: the teacher's keys and values on the chain, what is kept of them, and by which scores.

    What the selector does not ask for is zero.
    """

    k_t: Float[Tensor, "B G Nc E"]
    v_t: Float[Tensor, "B G Nc E"]
    columns: SelectedColumns
    I: Scores
    R: Scores
    S: Scores


def head_logits(
    q: Float[Tensor, "B H Na E"], k: Float[Tensor, "B G Nc E"], scale: float
) -> Float[Tensor, "B G HG Na Nc"]:
    """scale q . k of every query head with the keys of its group."""
    (B, H, Na, E), (G, Nc) = q.shape, k.shape[1:3]
    q, k = q.to(accumulation_dtype(q.dtype)), k.to(accumulation_dtype(k.dtype))
    with torch.autocast(q.device.type, enabled=False):
        a = q.reshape(B, G, -1, E) @ k.transpose(-1, -2)
    return scale * a.view(B, G, H // G, Na, Nc)


def pool_heads(x: Float[Tensor, "B G HG *rest"], pool: Pool) -> Float[Tensor, "B G *rest"]:
    """The query heads of a group as one."""
    return x.amax(2) if pool == "max" else x.mean(2)


def answer_logits(
    q: Float[Tensor, "B H Na E"], k: Float[Tensor, "B G Nc E"], scale: float, pool: Pool = "max"
) -> Float[Tensor, "B G Na Nc"]:
    """Eq. 1a: a[j, i] = max over the query heads of a group of scale q[j] . k[i]."""
    return pool_heads(head_logits(q, k, scale), pool)


def masked_softmax(a: Float[Tensor, "*rows N"], valid: Bool[Tensor, "*#rows N"]) -> Float[Tensor, "*rows N"]:
    """Over live columns only; zeros elsewhere, and everywhere if none is live."""
    a = a.masked_fill(~valid, -math.inf).masked_fill(~valid.any(-1, keepdim=True), 0.0)
    return a.softmax(-1).masked_fill(~valid, 0.0)


def masked_row_mean(p: Float[Tensor, "*B Na Nc"], rows: Bool[Tensor, "*#B Na"]) -> Float[Tensor, "*B Nc"]:
    """The mean over those rows; zero if there is none."""
    share = rows.to(p.dtype) / rows.sum(-1, keepdim=True).clamp(min=1)
    return (p * share[..., None]).sum(-2)


def importance(a: Float[Tensor, "B G Na Nc"], chain_mask: Bool[Tensor, "B Nc"], rows: Bool[Tensor, "B Na"]) -> Scores:
    """Eq. 1: I[i] = 1/N_rows sum over the answer's rows j of softmax_i(a[j, i]), over live chain columns only."""
    return masked_row_mean(masked_softmax(a, chain_mask[:, None, None]), rows[:, None])


def full_importance(
    q: Float[Tensor, "B H Na E"],
    k: Float[Tensor, "B G P E"],
    scale: float,
    visible: Bool[Tensor, "B Na P"],
    rows: Bool[Tensor, "B Na"],
    pool: Pool = "max",
) -> Float[Tensor, "B G P"]:
    """Importance read otherwise: softmax of each query head over all keys it sees, mean over rows, heads pooled."""
    return pool_heads(
        masked_row_mean(masked_softmax(head_logits(q, k, scale), visible[:, None, None]), rows[:, None, None]), pool
    )


def redundancy(
    k: Float[Tensor, "B G Nc E"], chain_mask: Bool[Tensor, "B Nc"], divisor: Literal["count", "others"] = "count"
) -> Scores:
    """Eq. 2: R = softmax_i(r_i), r_i = -1/N_C sum over j /= i of cos(k_i, k_j), over live columns only."""
    k = k.to(accumulation_dtype(k.dtype))
    unit = (k / (k.square().sum(-1, keepdim=True).sqrt() + 1e-8)) * chain_mask[:, None, :, None]
    others = (unit * (unit.sum(2, keepdim=True) - unit)).sum(-1)  # the sum of products is the product with the sum
    N = (chain_mask.sum(1) - int(divisor == "others")).clamp(min=1)
    return masked_softmax(-others / N[:, None, None], chain_mask[:, None])


def score(I: Scores, R: Scores, lam: float) -> Scores:
    """Eq. 3: S = lam I + (1 - lam) R."""
    return lam * I + (1 - lam) * R


def select_top_m(
    S: Scores, chain_mask: Bool[Tensor, "B Nc"], M: int, order: Literal["time", "score"] = "time"
) -> SelectedColumns:
    """Eq. 3a: the min(M, N_C) live columns of highest S, ties to the earlier, in ascending order of columns."""
    B, G, Nc = S.shape
    best = S.masked_fill(~chain_mask[:, None], -math.inf).sort(stable=True, dim=-1, descending=True).indices
    held = torch.arange(M, device=S.device) < chain_mask.sum(1)[:, None, None]
    index = F.pad(best, (0, M - Nc)).where(held, Nc)
    if order == "time":
        index = index.sort(-1).values
    return SelectedColumns(index.where(held, 0), held.expand(B, G, M))


def gather_selected(x: Float[Tensor, "B G Nc E"], columns: SelectedColumns) -> Float[Tensor, "B G M E"]:
    """Keys or values of the columns kept; zeros in slots that hold none."""
    x = x if x.shape[2] else F.pad(x, (0, 0, 0, 1))
    found = x.gather(2, columns.index[..., None].expand(-1, -1, -1, x.shape[3]))
    return found.masked_fill(~columns.valid[..., None], 0.0)


def compute_chain_positions(chain_mask: Bool[Tensor, "B Nc"]) -> Int[Tensor, "B Nc"]:
    """The place of each live column in its chain, from 0."""
    return chain_mask.cumsum(1) - 1


def mark_uniform_columns(chain_mask: Bool[Tensor, "B Nc"], M: int) -> Bool[Tensor, "B Nc"]:
    """Columns at the places round(linspace(0, N_C - 1, M))."""
    last = (chain_mask.sum(1, keepdim=True) - 1).clamp(min=0)
    places = (torch.arange(M, device=chain_mask.device, dtype=torch.float64) * last / max(M - 1, 1)).round().long()
    return (compute_chain_positions(chain_mask)[:, :, None] == places[:, None]).any(-1) & chain_mask


def force_endpoints(S: Scores, chain_mask: Bool[Tensor, "B Nc"], M: int) -> Scores:
    """The first and the last live column forced in, if M has room for both."""
    ends = (compute_chain_positions(chain_mask) == 0) | (
        compute_chain_positions(chain_mask) == chain_mask.sum(1, keepdim=True) - 1
    )
    return S.masked_fill((ends & chain_mask)[:, None], math.inf) if M > 1 else S


SELECTORS: dict[str, Callable[[Scores, Scores, Tensor, float, int, Scores], Scores]] = {
    "rkv": lambda I, R, live, lam, M, draws: score(I, R, lam),
    "cosine": lambda I, R, live, lam, M, draws: R,
    "attention": lambda I, R, live, lam, M, draws: I,
    "crop": lambda I, R, live, lam, M, draws: -compute_chain_positions(live)[:, None].expand_as(I).to(I.dtype),
    "uniform": lambda I, R, live, lam, M, draws: mark_uniform_columns(live, M)[:, None].expand_as(I).to(I.dtype),
    "random": lambda I, R, live, lam, M, draws: draws,
    "boundary": lambda I, R, live, lam, M, draws: force_endpoints(score(I, R, lam), live, M),
}
"""S of every selector, from (I, R, live, lam, M, draws); `keep` does the rest. What `asks` denies comes as zeros."""


def get_needed_scores(config: KVSelectionConfig) -> tuple[bool, bool]:
    """Whether importance and redundancy are asked for; neither is computed unless it is."""
    both = config.policy in ("rkv", "boundary")
    return config.policy == "attention" or (both and config.importance_weight > 0), config.policy == "cosine" or (
        both and config.importance_weight < 1
    )


def draw_random_scores(batch: ReasoningBatch, seed: int, layer: int, heads: int, shared: bool) -> Scores:
    """Numbers in [0, 1) keyed by (seed, epoch, index, layer, head) and the place in the chain; shared: by row alone."""
    row = batch.row_index.cpu().numpy()[:, None, None]
    head = torch.arange(heads).numpy()[:, None] * (not shared)
    found = uniform(
        seed,
        batch.epoch,
        row,
        0 if shared else layer,
        head,
        compute_chain_positions(batch.chain_mask).cpu().numpy()[:, None],
    )
    return torch.tensor(found, device=batch.chain_ids.device)


def select_answer_rows(batch: ReasoningBatch, which: Literal["answer", "number", "predict"]) -> Bool[Tensor, "B Na"]:
    """The answer's tokens whose queries count: all; number and eos; or those that predict number and eos."""
    if which == "answer":
        return batch.answer_mask
    number = (batch.answer_number_mask.cumsum(1) > 0) & batch.answer_mask
    return number if which == "number" else F.pad(number[:, 1:], (0, 1))


def get_chain_offset(batch: ReasoningBatch, teacher: DecoderOutput) -> int:
    """The slot where the chain begins in the cache that the teacher's pass left."""
    return teacher.cache.S - batch.chain_ids.shape[1] - batch.answer_ids.shape[1]


def compute_layer_importance(
    decoder: Decoder, batch: ReasoningBatch, teacher: DecoderOutput, layer: int, config: KVSelectionConfig
) -> Float[Tensor, "B G Nc"]:
    """I of one layer, in the reading that the recipe names; the teacher's pass has kept its rotated queries."""
    start, Nc, scale = get_chain_offset(batch, teacher), batch.chain_ids.shape[1], decoder.attention_scale(layer)
    q, k = teacher.activations[f"q_rot.{layer}"][:, :, Nc:], teacher.cache.keys[layer]
    rows = select_answer_rows(batch, config.importance_queries)
    if config.importance_norm == "chain":
        a = answer_logits(q, k[:, :, start : start + Nc], scale, config.head_pooling)
        return importance(a, batch.chain_mask, rows)
    visible = visibility_mask(teacher.cache.valid, start + Nc, decoder.config.sliding_windows[layer])
    I = full_importance(q, k, scale, visible, rows, config.head_pooling)[:, :, start : start + Nc]
    return I if config.importance_norm == "full" else I / I.sum(-1, keepdim=True).clamp(min=torch.finfo(I.dtype).tiny)


@torch.no_grad()
def select_tokens(
    decoder: Decoder,
    batch: ReasoningBatch,
    teacher: DecoderOutput,
    layer: int,
    config: KVSelectionConfig,
    M: int,
    seed: int,
    key_space: Literal["post_rope", "pre_rope"] = "post_rope",
    all_scores: bool = False,
) -> LayerSelection:
    """What one layer keeps of the chain in the teacher's pass; `everything` computes I and R whoever asks."""
    start, live = get_chain_offset(batch, teacher), batch.chain_mask
    columns = slice(start, start + live.shape[1])
    k_t, v_t = (x[layer][:, :, columns].detach() for x in (teacher.cache.keys, teacher.cache.values))
    if key_space == "pre_rope":
        k_t = teacher.activations[f"k.{layer}"][:, :, : live.shape[1]].detach()
    needs_i, needs_r = (True, True) if all_scores else get_needed_scores(config)
    zero = torch.zeros(k_t.shape[:3], dtype=accumulation_dtype(k_t.dtype), device=k_t.device)
    I = compute_layer_importance(decoder, batch, teacher, layer, config) if needs_i else zero
    R = redundancy(k_t, live, config.redundancy_divisor) if needs_r else zero
    drawn = (
        draw_random_scores(batch, seed, layer, k_t.shape[1], config.share_random_draw)
        if config.policy == "random"
        else zero
    )
    S = SELECTORS[config.policy](I, R, live, config.importance_weight, M, drawn)
    return LayerSelection(k_t, v_t, select_top_m(S, live, M, config.slot_order), I, R, S)
