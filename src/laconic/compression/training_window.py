"""A window run once: its segments read in order and compressed, each length decided, the nats of each segment.

B rows, w segments, K places; memory enters and leaves the window as a value.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.compression.halting.estimators import (
    expected_memory_size,
    exploration_mixture,
    first_slots_mask,
    mean_field_slots,
    sample_column,
    straight_through_slots,
)
from laconic.compression.halting.stop_distribution import (
    RandomStream,
    draw_uniforms,
    length_by_quantile,
    length_by_threshold,
    length_log_probs,
    length_support,
    mask_disallowed_stops,
    uniform_length,
)
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors
from laconic.compression.segment import CompressionOutput
from laconic.compression.segment_model import SegmentModel, mask_trigger_targets

TrainingPhase = Literal["lengths", "both", "head"]


class WindowRun:
    """One run over a window. `phase`: lengths are known or drawn evenly; head and decoder learn; the head alone.

    After `run`: `nats` and `right` of each segment and row; `a`, the stop logits, `first`, what the ratio head reads,
    and `hard`, lengths, of each compression; `trials`, nats of the segment after it read with every length in turn;
    `log_p` and `weight` of the lengths drawn; `state`, the memory handed on.
    """

    def __init__(
        self,
        model: SegmentModel,
        batch: DocumentBatch,
        memory: SummaryMemory,
        phase: TrainingPhase,
        seed: int,
        stream: RandomStream,
    ) -> None:
        self.model, self.batch, self.memory, self.phase = model, batch, memory, phase
        self.seed, self.config, self.stop_head_config = seed, model.config, model.summaries.stop_head_config
        self.stream: RandomStream = stream
        self.w, self.carried_memory = len(batch.segment_ends), None if batch.carried_segments is None else memory
        self.num_tokens = torch.stack([batch.attention_mask[:, s].sum(1) for s in batch.segment_slices], 1)
        zero = torch.zeros(batch.B, self.w, device=batch.attention_mask.device)
        self.hard_lengths, self.memory_sizes = zero.long(), zero.clone()
        self.segment_losses: list[Tensor] = []
        self.num_correct: list[Tensor] = []
        self.a: list[Tensor | None] = [None] * self.w
        self.first_states: list[Tensor | None] = [None] * self.w
        self.trial_losses: list[Tensor | None] = [None] * self.w
        self.length_log_probs: list[Tensor] = [zero[:, 0]] * self.w
        self.importance_weights: list[Tensor] = [zero[:, 0] + 1] * self.w
        self.is_read_hard = self.sample_hard_rows()
        self.pending_trial: tuple[SummaryMemory, CompressionOutput, Tensor] | None = None
        self.targets = build_window_targets(model, batch)
        self.has_targets = torch.stack([(self.targets[:, s] != IGNORE_INDEX).any(1) for s in batch.segment_slices], 1)

    def run(self) -> "WindowRun":
        """The segments in order."""
        targets = self.targets
        with torch.set_grad_enabled(self.phase != "head" and torch.is_grad_enabled()):
            for i, columns in enumerate(self.batch.segment_slices):
                self.run_segment(
                    i, self.batch.input_ids[:, columns], self.batch.attention_mask[:, columns], targets[:, columns]
                )
        return self

    def run_segment(
        self, i: int, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], targets: Int[Tensor, "B T"]
    ) -> None:
        """Reads segment `i` after the memory so far, then compresses it if anybody needs that."""
        unit, handed = self.model, self.batch.carried_segments
        read_here, priced = i < self.w - 1, self.stop_head_config is not None and self.stop_head_config.cost_on == "all"
        writes = read_here or (handed is not None and i < handed) or (priced and self.phase != "lengths")
        N = self.predetermined_lengths(i)
        unit.check_fits(self.memory, input_ids.shape[1], compresses=writes)
        hidden, written = unit.run_segment(
            self.memory, input_ids, attention_mask, self.num_summary_positions(N) if writes else 0, read_here or priced
        )
        nats = unit.segment_loss(hidden, targets)
        self.segment_losses.append(nats.nll)
        self.num_correct.append(nats.num_correct)
        if self.pending_trial is not None:
            self.trial_losses[i - 1] = self.compute_trial_losses(
                *self.pending_trial, input_ids, attention_mask, targets
            )
        if written is None:
            return
        self.memory_sizes[:, i], self.first_states[i] = (
            expected_memory_size(self.memory.valid, self.memory.log_s),
            written.first_state,
        )
        self.pending_trial = (
            (self.memory, written, self.batch.attention_mask[:, self.batch.segment_slices[i]])
            if self.needs_trials(i)
            else None
        )
        kept = (
            self.sample_vectors(i, written, attention_mask)
            if N is None
            else unit.select_vectors(written, attention_mask, N)
        )
        if N is not None:
            self.hard_lengths[:, i] = kept.valid.sum(1)
        memory = unit.update_memory(self.memory, kept, self.num_tokens[:, i])
        self.memory = memory if read_here else memory.detach()
        if handed == i + 1:
            self.carried_memory = self.memory

    def draw_uniforms(self, stream: RandomStream, i: int, n: int) -> Float[Tensor, "B n"]:
        """Draws of segment `i`, in the stream of this run where the lengths are a head's."""
        return draw_uniforms(stream, self.seed, self.batch.epoch, self.batch.row_index, self.batch.first_segment + i, n)

    @property
    def losses(self) -> Float[Tensor, "B w"]:
        """Nats of each segment."""
        return torch.stack(self.segment_losses, 1)

    def map_stop_logits(self, function: Callable[..., Tensor]) -> Float[Tensor, "B w"]:
        """`function` of the stop logits of each compression; 0 where there was none."""
        none = torch.zeros_like(self.memory_sizes[:, 0])
        return torch.stack([none if a is None else function(a) for a in self.a], 1)

    def predetermined_lengths(self, i: int) -> Int[Tensor, " B"] | None:
        """Lengths that nobody has to decide: kappa, or drawn evenly while decoder or classifier learn."""
        index, reading = self.batch.row_index, self.config
        if reading.length_policy == "fixed":
            return torch.full_like(index, reading.fixed_length)
        if reading.length_policy == "stop_head" and self.phase != "lengths":
            return None
        return uniform_length(self.draw_uniforms("nested", i, 1)[:, 0], reading.possible_lengths)

    def num_summary_positions(self, N: Int[Tensor, " B"] | None) -> int:
        """Places of a compression: as many as are kept, all where a head or a trial looks at them."""
        loops = self.config.summary in ("parallel", "autoregressive")
        return int(N.max()) if N is not None and loops and self.phase == "lengths" else self.config.fixed_length

    def needs_trials(self, i: int) -> bool:
        """Whether the next segment is read with every length of this one."""
        learns = self.stop_head_config is not None and self.phase != "lengths" and i < self.w - 1
        return learns and (
            self.config.length_policy == "classifier"
            or (self.stop_head_config is not None and self.stop_head_config.estimator == "ponder")
        )

    @property
    def candidate_lengths(self) -> tuple[int, ...]:
        """Those that a length takes."""
        return length_support(
            self.config.possible_lengths,
            "after" if self.stop_head_config is None else self.stop_head_config.stop_position,
        )

    @torch.no_grad()
    def compute_trial_losses(
        self, memory: SummaryMemory, compressed: CompressionOutput, previous_mask: Bool[Tensor, "B Ts"], input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"], targets: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B A"]:  # fmt: skip
        """Nats of a segment read after each length of the one before it."""
        found: list[Tensor] = []
        for n in self.candidate_lengths:
            kept = self.model.select_vectors(compressed, previous_mask, torch.full_like(self.batch.row_index, n))
            after = self.model.update_memory(memory, kept, previous_mask.sum(1))
            found.append(
                self.model.segment_loss(self.model.read_segment(after, input_ids, attention_mask), targets).nll
            )
        return torch.stack(found, 1)

    def sample_vectors(
        self, i: int, compressed: CompressionOutput, attention_mask: Bool[Tensor, "B T"]
    ) -> SegmentVectors:
        """The vectors as they are read in training: soft, or as many as the head's law gives by a draw."""
        unit, how = self.model, self.stop_head_config
        assert how is not None
        z, tokens = compressed.summary_states, attention_mask.sum(1)
        with torch.enable_grad():  # the head learns where the decoder rests, too
            logits = unit.summaries.stop_logits(unit.decoder, z, head_only=self.phase == "head")
            a = mask_disallowed_stops(logits, self.config.possible_lengths, how.stop_position)
            log_p = length_log_probs(a, how.stop_position)
        self.a[i] = a
        p = exploration_mixture(
            a, how.exploration if how.joint_training else 0.0, self.candidate_lengths, how.stop_position
        ).detach()
        column = sample_column(p, self.draw_uniforms(self.stream, i, 1)[:, 0])
        N = column + (a.shape[1] + 1 - p.shape[1])
        with torch.enable_grad():
            self.length_log_probs[i] = log_p.gather(1, column[:, None])[:, 0]
        self.importance_weights[i] = self.length_log_probs[i].detach().exp() / p.gather(1, column[:, None])[:, 0]
        self.hard_lengths[:, i] = self.inference_lengths(a.detach(), N).masked_fill(tokens == 0, 0)
        vectors = unit.summaries.map_to_vectors(z)
        there = first_slots_mask(N, a.shape[1]) & (tokens > 0)[:, None]
        if how.estimator in ("ponder", "reinforce"):
            return SegmentVectors(vectors, there)
        if how.estimator == "straight_through":
            slots = straight_through_slots(a, N, how.stop_position)
            return SegmentVectors(vectors, there, None if slots.log_s is None else slots.log_s.float())
        return self.soft_vectors(vectors, a, there, tokens > 0)

    def soft_vectors(
        self, vectors: Float[Tensor, "B K D"], a: Float[Tensor, "B K"], sampled_mask: Bool[Tensor, "B K"],
        has_text: Bool[Tensor, " B"],
    ) -> SegmentVectors:  # fmt: skip
        """All places by their survival; in windows that are read hard, those drawn."""
        assert self.stop_head_config is not None
        slots, hard = mean_field_slots(a, self.stop_head_config.stop_position), self.is_read_hard[:, None]
        assert slots.log_s is not None
        log_s = slots.log_s.masked_fill(hard, 0.0)
        live = torch.where(hard, sampled_mask, slots.valid & has_text[:, None])
        return SegmentVectors(vectors, live, log_s.float())

    def inference_lengths(self, a: Float[Tensor, "B K"], N: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Lengths by the rule of inference, as they are logged; N itself where that draws."""
        assert self.stop_head_config is not None
        if self.stop_head_config.stop_rule == "sample":
            return N
        rule, at = (
            (length_by_quantile, self.stop_head_config.stop_quantile)
            if self.stop_head_config.stop_rule == "quantile"
            else (length_by_threshold, self.stop_head_config.stop_threshold)
        )
        return rule(a, at, self.stop_head_config.stop_position)

    def sample_hard_rows(self) -> Bool[Tensor, " B"]:
        """Rows that read this window hard although lengths are soft."""
        if self.stop_head_config is None or self.stop_head_config.estimator != "soft" or self.phase != "both":
            return torch.zeros_like(self.batch.row_index, dtype=torch.bool)
        return self.draw_uniforms("harden", 0, 1)[:, 0] < self.stop_head_config.hard_window_fraction


def build_window_targets(model: SegmentModel, batch: DocumentBatch) -> Int[Tensor, "B T"]:
    """What each token of a window predicts."""
    targets = batch.targets
    if model.config.trigger_placement == "replace":
        segments = [mask_trigger_targets(targets[:, s], batch.attention_mask[:, s]) for s in batch.segment_slices]
        return torch.cat(segments, 1)
    return targets
