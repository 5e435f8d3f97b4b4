"""A compression at inference: how many vectors are kept, by a rule on the stop head, by number, or softly all.

Rows stop each for itself and are latched; places behind a row's stop are dead. B rows, T columns of text, K places.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from laconic.compression.halting.stop_distribution import (
    StopPosition,
    first_stop,
    fixed_length,
    log_survival_gate,
    mask_disallowed_stops,
    stop_by_quantile,
    stop_by_sampling,
    stop_by_threshold,
)
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors
from laconic.compression.segment import CompressionOutput
from laconic.compression.segment_model import SegmentModel
from laconic.errors import UsageError

STOP_HEAD_RULES = ("quantile", "threshold", "sample")
RuleName = Literal["quantile", "threshold", "sample", "fixed", "classifier", "soft"]


class StopRule(NamedTuple):
    """How many vectors a compression keeps: by a rule on the stop head, `n` for all, the classifier's, or softly all.

    `draws` [B, K] are uniform in [0, 1), for sample.
    """

    name: RuleName
    quantile: float = 0.5
    threshold: float = 0.5
    num_vectors: int | None = None
    uniforms: Tensor | None = None


def default_rule(model: SegmentModel) -> StopRule:
    """The lengths that a compression has where nothing else is asked for."""
    how, length = model.summaries.stop_head_config, model.config.length_policy
    if length == "stop_head" and how is not None:
        return StopRule(how.stop_rule, how.stop_quantile, how.stop_threshold)
    return (
        StopRule("classifier") if length == "classifier" else StopRule("fixed", num_vectors=model.config.fixed_length)
    )


def check_rule(model: SegmentModel, rule: StopRule) -> None:
    """Raises `Usage` (2) for a way to stop that a model has not learned, or numbers that cannot be meant."""
    length, K = model.config.length_policy, model.config.fixed_length
    if (rule.name in (*STOP_HEAD_RULES, "soft") and length != "stop_head") or (
        rule.name == "classifier" and length != "classifier"
    ):
        raise UsageError(
            f'stop "{rule.name}": lengths of this model are of kind "{length}"; ask for a number of vectors'
        )
    if rule.name == "fixed" and length == "fixed" and rule.num_vectors is not None and rule.num_vectors < K:
        raise UsageError(
            f"n {rule.num_vectors}: this model writes {K} vectors a segment; crop the memory, or take lengths nested"
        )
    if rule.name == "sample" and rule.uniforms is None:
        raise UsageError('stop "sample" without draws: give uniform numbers [B, K]')
    for name, value in (("q", rule.quantile), ("tau", rule.threshold)):
        if not 0 < value < 1:
            raise UsageError(f"{name} {value}: give a probability between 0 and 1, neither of them")


def compress_into_memory(
    model: SegmentModel,
    memory: SummaryMemory,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"],
    rule: StopRule,
) -> SummaryMemory:
    """One segment more in a memory; a row without live tokens keeps what it has, and takes part in no pass."""
    check_rule(model, rule)
    model.check_fits(memory, input_ids.shape[1])
    n = (
        model.config.fixed_length
        if rule.num_vectors is None
        else fixed_length(rule.num_vectors, model.config.possible_lengths)
    )
    rows, before = attention_mask.any(1), memory
    if not bool(rows.all()) and bool(rows.any()):
        before, input_ids, attention_mask = (
            replace(memory, metadata=None).select_rows(rows.nonzero()[:, 0]),
            input_ids[rows],
            attention_mask[rows],
        )
        rule = rule._replace(uniforms=None if rule.uniforms is None else rule.uniforms[rows])
    done = partial(all_rows_stopped, model, attention_mask.any(1), rule) if rule.name in STOP_HEAD_RULES else None
    found = select_vectors(
        model,
        model.compress_segment(before.compact(), input_ids, attention_mask, n, should_stop=done),
        attention_mask,
        rule,
        n,
    )
    tokens = torch.zeros_like(rows, dtype=torch.long).masked_scatter(rows, attention_mask.sum(1))
    return model.update_memory(
        memory, found if len(attention_mask) == len(rows) else scatter_vectors(found, rows), tokens
    )


def scatter_vectors(vectors: SegmentVectors, rows: Bool[Tensor, " B"]) -> SegmentVectors:
    """What some rows keep, among all rows, of which the others keep nothing."""
    log_s = None if vectors.log_s is None else scatter_rows(vectors.log_s, rows)
    return SegmentVectors(scatter_rows(vectors.vectors, rows), scatter_rows(vectors.valid, rows), log_s)


def scatter_rows(x: Shaped[Tensor, "R *rest"], rows: Bool[Tensor, " B"]) -> Shaped[Tensor, "B *rest"]:
    """What belongs to some rows, among all rows; 0 for the others."""
    return x.new_zeros(len(rows), *x.shape[1:]).index_copy(0, rows.nonzero()[:, 0], x)


def select_vectors(
    model: SegmentModel,
    compressed: CompressionOutput,
    attention_mask: Bool[Tensor, "B T"],
    rule: StopRule,
    num_vectors: int,
) -> SegmentVectors:
    """The vectors that a way to stop keeps."""
    if rule.name == "fixed":
        return model.select_vectors(
            compressed, attention_mask, torch.full_like(attention_mask[:, 0], num_vectors, dtype=torch.long)
        )
    if rule.name == "classifier":
        lengths = torch.tensor(model.config.possible_lengths, device=attention_mask.device)
        return model.select_vectors(
            compressed, attention_mask, lengths[model.summaries.length_logits(compressed.first_state).argmax(1)]
        )
    a = inference_stop_logits(model, compressed.summary_states)
    if rule.name == "soft":
        there = torch.ones_like(a, dtype=torch.bool) & attention_mask.any(1, keepdim=True)
        return SegmentVectors(
            model.summaries.map_to_vectors(compressed.summary_states),
            there,
            log_survival_gate(a, get_stop_position(model)).float(),
        )
    return model.select_vectors(compressed, attention_mask, first_stop(apply_rule(a, rule), get_stop_position(model)))


def get_stop_position(model: SegmentModel) -> StopPosition:
    """What a stop keeps."""
    return "after" if model.summaries.stop_head_config is None else model.summaries.stop_head_config.stop_position


def inference_stop_logits(model: SegmentModel, z: Float[Tensor, "B t D"]) -> Float[Tensor, "B t"]:
    """Stop logits at the first places of a compression, minus infinity where no stop is allowed."""
    a, t = model.summaries.stop_logits(model.decoder, z), z.shape[1]
    whole = F.pad(a, (0, model.config.fixed_length - t))
    return mask_disallowed_stops(whole, model.config.possible_lengths, get_stop_position(model))[:, :t]


def apply_rule(a: Float[Tensor, "B t"], rule: StopRule) -> Bool[Tensor, "B t"]:
    """Place by place, where a rule would stop."""
    if rule.uniforms is not None and rule.name == "sample":
        return stop_by_sampling(a, rule.uniforms[:, : a.shape[1]])
    return stop_by_quantile(a, rule.quantile) if rule.name == "quantile" else stop_by_threshold(a, rule.threshold)


def all_rows_stopped(model: SegmentModel, rows: Bool[Tensor, " B"], rule: StopRule, z: Float[Tensor, "B t D"]) -> bool:
    """Whether every one of the rows has stopped, so that no more places are needed."""
    return bool((apply_rule(inference_stop_logits(model, z), rule).any(1) | ~rows).all())
