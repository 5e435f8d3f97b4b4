"""R-KV as KaVa uses it: select M of a chain's tokens, for each layer and KV head, whose keys and values are distilled.

KaVa arXiv:2510.02312 (section 3.2, Listing 1), R-KV arXiv:2505.24133.

Symbols: q, k rotated queries of the answer and keys of the chain; a logits, j over answer positions, i over chain
columns; I importance, R redundancy, S score, lam the weight of I; N_C valid columns of a row, M selected ones. Sums are
at least float32, also under autocast. Only the attention between answer and chain is computed.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import KVSelectionConfig
from laconic.errors import UsageError
from laconic.latent.selection_controls import Scores, score_control
from laconic.models.attention import accumulation_dtype
from laconic.models.decoder import Decoder, DecoderOutput

KeySpace = Literal["post_rope", "pre_rope"]


@dataclass(frozen=True)
class SelectedColumns:
    """Chain column of each of M slots, for every KV head; slots beyond a short chain are not valid and hold 0."""

    index: Int[Tensor, "B G M"]
    valid: Bool[Tensor, "B G M"]


class LayerSelection(NamedTuple):
    """The teacher's keys and values on the chain in one layer, the selected columns, and the scores.

    Scores that the policy does not need are zero.
    """

    k_t: Float[Tensor, "B G Nc E"]
    v_t: Float[Tensor, "B G Nc E"]
    columns: SelectedColumns
    I: Scores
    R: Scores
    S: Scores


def answer_logits(
    q: Float[Tensor, "B H Na E"], k: Float[Tensor, "B G Nc E"], scale: float
) -> Float[Tensor, "B G Na Nc"]:
    """Eq. 1a: a[j, i] = max over the query heads of a group of scale q[j] . k[i]."""
    (B, H, Na, E), (G, Nc) = q.shape, k.shape[1:3]
    q, k = q.to(accumulation_dtype(q.dtype)), k.to(accumulation_dtype(k.dtype))
    with torch.autocast(q.device.type, enabled=False):
        a = q.reshape(B, G, -1, E) @ k.transpose(-1, -2)  # the H / G query heads of a group share a key head
    return (scale * a.view(B, G, H // G, Na, Nc)).amax(2)


def masked_softmax(a: Float[Tensor, "*rows N"], valid: Bool[Tensor, "*#rows N"]) -> Float[Tensor, "*rows N"]:
    """Return the softmax over valid columns and 0 elsewhere; all 0 if none is valid."""
    a = a.masked_fill(~valid, -math.inf).masked_fill(~valid.any(-1, keepdim=True), 0.0)  # only -inf would give NaN
    return a.softmax(-1).masked_fill(~valid, 0.0)


def importance(
    a: Float[Tensor, "B G Na Nc"], chain_mask: Bool[Tensor, "B Nc"], answer_mask: Bool[Tensor, "B Na"]
) -> Scores:
    """Eq. 1: I[i] = 1/N_A sum over answer positions j of softmax_i(a[j, i]), over valid chain columns."""
    p = masked_softmax(a, chain_mask[:, None, None])
    share = answer_mask.to(p.dtype) / answer_mask.sum(-1, keepdim=True).clamp(min=1)
    return (p * share[:, None, :, None]).sum(-2)


def redundancy(k: Float[Tensor, "B G Nc E"], chain_mask: Bool[Tensor, "B Nc"]) -> Scores:
    """Eq. 2: R = softmax_i(r_i), r_i = -1/N_C sum over j /= i of cos(k_i, k_j), over valid columns."""
    k = k.to(accumulation_dtype(k.dtype))
    unit = (k / (k.square().sum(-1, keepdim=True).sqrt() + 1e-8)) * chain_mask[:, None, :, None]
    # a sum of dot products is the dot product with the sum, so no N_C x N_C matrix is needed
    others = (unit * (unit.sum(2, keepdim=True) - unit)).sum(-1)
    N = chain_mask.sum(1).clamp(min=1)
    return masked_softmax(-others / N[:, None, None], chain_mask[:, None])


def score(I: Scores, R: Scores, lam: float) -> Scores:
    """Eq. 3: S = lam I + (1 - lam) R."""
    return lam * I + (1 - lam) * R


def select_top_m(S: Scores, chain_mask: Bool[Tensor, "B Nc"], M: int) -> SelectedColumns:
    """Eq. 3a: the min(M, N_C) valid columns of highest S, ties to the earlier, in ascending order of columns."""
    B, G, Nc = S.shape
    best = S.masked_fill(~chain_mask[:, None], -math.inf).sort(stable=True, dim=-1, descending=True).indices
    valid = torch.arange(M, device=S.device) < chain_mask.sum(1)[:, None, None]
    index = F.pad(best, (0, M - Nc)).where(valid, Nc).sort(-1).values  # empty slots sort last
    return SelectedColumns(index.where(valid, 0), valid.expand(B, G, M))


def gather_selected(x: Float[Tensor, "B G Nc E"], columns: SelectedColumns) -> Float[Tensor, "B G M E"]:
    """Return keys or values of the selected columns, zeros in slots without one."""
    x = x if x.shape[2] else F.pad(x, (0, 0, 0, 1))  # without a chain, empty slots still need a column to gather
    selected = x.gather(2, columns.index[..., None].expand(-1, -1, -1, x.shape[3]))
    return selected.masked_fill(~columns.valid[..., None], 0.0)


def find_selectable_columns(batch: ReasoningBatch, policy: str) -> Bool[Tensor, "B Nc"]:
    """Return the chain columns that a policy may select: with "results" the last number of each step, else all.

    Raises:
        UsageError: The policy is "results", and the batch does not say where the results are.
    """
    if policy != "results":
        return batch.chain_mask
    if batch.chain_result_mask is None:
        raise UsageError('kv_selection.policy "results": this data does not mark the results of its steps; use "rkv"')
    return batch.chain_result_mask


def get_needed_scores(config: KVSelectionConfig) -> tuple[bool, bool]:
    """Return whether the policy needs importance, and whether it needs redundancy."""
    lam = config.importance_weight
    needs_importance = config.policy == "attention" or (config.policy == "rkv" and lam > 0)
    needs_redundancy = config.policy == "cosine" or (config.policy == "rkv" and lam < 1)
    return needs_importance, needs_redundancy


def score_columns(policy: str, I: Scores, R: Scores, lam: float, batch: ReasoningBatch, M: int, seed: int) -> Scores:
    """Return the scores S by which a policy ranks the chain's columns; `seed` is that of the policy "random"."""
    return score(I, R, lam) if policy == "rkv" else score_control(policy, I, R, batch, M, seed)


@torch.no_grad()
def select_tokens(
    decoder: Decoder,
    batch: ReasoningBatch,
    teacher: DecoderOutput,
    layer: int,
    config: KVSelectionConfig,
    M: int,
    seed: int,
    key_space: KeySpace = "post_rope",
    all_scores: bool = False,
) -> LayerSelection:
    """Select the chain tokens of one layer, from the teacher's pass over chain and answer.

    It has captured the rotated queries if importance is needed, which always uses rotated keys, and the unrotated keys
    if these are compared and returned. `seed` is that of the policy "random"; `all_scores` computes I and R whatever
    the policy.
    """
    mask, Nc = batch.chain_mask, batch.chain_ids.shape[1]
    start = teacher.cache.S - Nc - batch.answer_ids.shape[1]  # the cache ends with chain and answer
    k_t, v_t = (x[layer][:, :, start : start + Nc].detach() for x in (teacher.cache.keys, teacher.cache.values))
    rotated = k_t
    if key_space == "pre_rope":
        k_t = teacher.activations[f"k.{layer}"][:, :, :Nc].detach()
    needs_importance, needs_redundancy = (True, True) if all_scores else get_needed_scores(config)
    zeros = torch.zeros(k_t.shape[:3], dtype=accumulation_dtype(k_t.dtype), device=k_t.device)
    I = zeros
    if needs_importance:
        a = answer_logits(teacher.activations[f"q_rot.{layer}"][:, :, Nc:], rotated, decoder.attention_scale(layer))
        I = importance(a, mask, batch.answer_mask)  # pyright: ignore[reportConstantRedefinition]
    R = redundancy(k_t, mask) if needs_redundancy else zeros
    S = score_columns(config.policy, I, R, config.importance_weight, batch, M, seed)
    columns = select_top_m(S, find_selectable_columns(batch, config.policy), M)
    return LayerSelection(k_t, v_t, columns, I, R, S)
