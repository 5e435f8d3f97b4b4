"""Choose the number of summary vectors at inference: by a rule on the stop head, fixed, by classifier, or soft.

Each row stops on its own; positions after a row's stop are not valid. B rows, T columns of text, K summary positions.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors
from laconic.compression.segment import CompressionOutput
from laconic.compression.segment_model import SegmentModel
from laconic.errors import UsageError
from laconic.halting.stop_distribution import (
    draw_uniforms,
    first_stop,
    log_survival_gate,
    mask_disallowed_stops,
    stop_by_quantile,
    stop_by_sampling,
    stop_by_threshold,
)

STOP_HEAD_RULES = ("quantile", "threshold", "sample")
RuleName = Literal["quantile", "threshold", "sample", "fixed", "classifier", "soft"]


class StopRule(NamedTuple):
    """Decides how many vectors a compression keeps.

    "quantile", "threshold" and "sample" apply a rule to the stop head; "fixed" keeps `num_vectors`; "classifier" asks
    the classifier; "soft" keeps all vectors, gated by their survival.
    """

    name: RuleName
    quantile: float = 0.5  # stop where the cumulative stop probability reaches this
    threshold: float = 0.5  # stop at the first stop probability this large
    num_vectors: int | None = None  # of "fixed", and a limit for the other rules; None for the configured number
    uniforms: Tensor | None = None  # random numbers in [0, 1) for "sample", [B, K]


def add_uniforms(rule: StopRule, seed: int, row_index: Int[Tensor, " B"], segment: int, K: int) -> StopRule:
    """Return a rule that samples with random numbers for one segment, keyed by `row_index`; other rules unchanged."""
    if rule.name != "sample":
        return rule
    return rule._replace(uniforms=draw_uniforms("length", seed, 0, row_index, segment, K))


def default_rule(model: SegmentModel) -> StopRule:
    head, length_policy = model.summaries.stop_head_config, model.config.length_policy
    if length_policy == "stop_head" and head is not None:
        return StopRule(head.stop_rule, head.stop_quantile, head.stop_threshold)
    if length_policy == "classifier":
        return StopRule("classifier")
    return StopRule("fixed", num_vectors=model.config.fixed_length)


def check_rule(model: SegmentModel, rule: StopRule) -> int:
    """Return the largest number of vectors that a rule keeps of a segment."""
    length_policy, K = model.config.length_policy, model.config.fixed_length
    needs = {"classifier": "classifier", "fixed": length_policy}.get(rule.name, "stop_head")
    if length_policy != needs:
        name = "a total number of vectors" if rule.name == "soft" else f'stop rule "{rule.name}"'
        raise UsageError(f'{name} needs a model of length_policy = "{needs}", but this one has "{length_policy}"')
    n = rule.num_vectors
    most = model.config.possible_lengths[-1]
    if rule.name == "fixed" and n is not None and n > most:
        raise UsageError(f"{n} vectors: this model writes at most {most} per segment; give {most} or fewer")
    if rule.name == "fixed" and length_policy == "fixed" and n is not None and n < K:
        raise UsageError(f"{n} vectors: this model always writes {K} per segment; give {K}")
    for name, value in (("quantile", rule.quantile), ("threshold", rule.threshold)):
        if not 0 < value < 1:
            raise UsageError(f"{name} {value}: give a probability strictly between 0 and 1")
    return K if n is None else fixed_length(n, model.config.possible_lengths)


def fixed_length(n: int, allowed_lengths: tuple[int, ...]) -> int:
    """Eq. VL17: N = min(n, K)."""
    length = min(n, allowed_lengths[-1])
    if length not in allowed_lengths:
        raise UsageError(f"{n} vectors: allowed lengths are {', '.join(map(str, allowed_lengths))}; choose one of them")
    return length


def compress_into_memory(
    model: SegmentModel,
    memory: SummaryMemory,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"],
    rule: StopRule,
) -> SummaryMemory:
    """Compress one segment into a memory; rows without tokens keep their memory and take part in no pass."""
    n = check_rule(model, rule)
    if rule.name == "sample" and rule.uniforms is None:
        raise UsageError('stop rule "sample" needs `uniforms`, random numbers of shape [B, K]')
    model.check_fits(memory, input_ids.shape[1])
    rows = attention_mask.any(1)
    before = memory
    if not bool(rows.all()) and bool(rows.any()):
        before = replace(memory, metadata=None).select_rows(rows.nonzero()[:, 0])
        input_ids, attention_mask = input_ids[rows], attention_mask[rows]
        rule = rule._replace(uniforms=None if rule.uniforms is None else rule.uniforms[rows])
    should_stop = None
    if rule.name in STOP_HEAD_RULES:
        should_stop = partial(all_rows_stopped, model, attention_mask.any(1), rule)
    compressed = model.compress_segment(before.compact(), input_ids, attention_mask, n, should_stop=should_stop)
    vectors = select_vectors(model, compressed, attention_mask, rule, n)
    num_tokens = torch.zeros_like(rows, dtype=torch.long).masked_scatter(rows, attention_mask.sum(1))
    if len(attention_mask) < len(rows):
        log_s = None if vectors.log_s is None else scatter_rows(vectors.log_s, rows)
        vectors = SegmentVectors(scatter_rows(vectors.vectors, rows), scatter_rows(vectors.valid, rows), log_s)
    return model.update_memory(memory, vectors, num_tokens)


def scatter_rows(x: Shaped[Tensor, "R *rest"], rows: Bool[Tensor, " B"]) -> Shaped[Tensor, "B *rest"]:
    """Place values of the marked rows into a batch that is 0 elsewhere."""
    return x.new_zeros(len(rows), *x.shape[1:]).index_copy(0, rows.nonzero()[:, 0], x)


def select_vectors(
    model: SegmentModel,
    compressed: CompressionOutput,
    attention_mask: Bool[Tensor, "B T"],
    rule: StopRule,
    num_vectors: int,
) -> SegmentVectors:
    if rule.name == "fixed":
        lengths = torch.full_like(attention_mask[:, 0], num_vectors, dtype=torch.long)
        return model.select_vectors(compressed, attention_mask, lengths)
    if rule.name == "classifier":
        choices = torch.tensor(model.config.possible_lengths, device=attention_mask.device)
        best = model.summaries.length_logits(compressed.first_state).argmax(1)
        return model.select_vectors(compressed, attention_mask, choices[best])
    stop_position = model.summaries.stop_position
    a = inference_stop_logits(model, compressed.summary_states)
    if rule.name == "soft":
        valid = torch.ones_like(a, dtype=torch.bool) & attention_mask.any(1, keepdim=True)
        vectors = model.summaries.map_to_vectors(compressed.summary_states, compressed.last_embeds)
        return SegmentVectors(vectors, valid, log_survival_gate(a, stop_position).float())
    return model.select_vectors(compressed, attention_mask, first_stop(apply_rule(a, rule), stop_position))


def inference_stop_logits(model: SegmentModel, z: Float[Tensor, "B t D"]) -> Float[Tensor, "B t"]:
    """Compute the stop logits at the first t summary positions, minus infinity where a stop is not allowed."""
    t = z.shape[1]
    a = model.summaries.stop_logits(model.decoder, z)
    padded = F.pad(a, (0, model.config.fixed_length - t))
    return mask_disallowed_stops(padded, model.config.possible_lengths, model.summaries.stop_position)[:, :t]


def apply_rule(a: Float[Tensor, "B t"], rule: StopRule) -> Bool[Tensor, "B t"]:
    if rule.uniforms is not None and rule.name == "sample":
        return stop_by_sampling(a, rule.uniforms[:, : a.shape[1]])
    return stop_by_quantile(a, rule.quantile) if rule.name == "quantile" else stop_by_threshold(a, rule.threshold)


def all_rows_stopped(model: SegmentModel, rows: Bool[Tensor, " B"], rule: StopRule, z: Float[Tensor, "B t D"]) -> bool:
    """Test whether all marked rows have stopped, so that no more summary positions are needed."""
    return bool((apply_rule(inference_stop_logits(model, z), rule).any(1) | ~rows).all())
