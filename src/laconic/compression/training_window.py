"""Forward pass over one training window: read its segments in order, compress them, and compute their losses.

The memory enters and leaves the window as an immutable value. With learned lengths and soft gates, some rows read a
window "hard": with a sampled number of vectors, as in inference, instead of all vectors gated by their survival.

Symbols: B rows, w segments, K summary positions, A possible lengths; a stop logits, N numbers of vectors, z states at
the summary positions, s survival.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors
from laconic.compression.segment import CompressionOutput
from laconic.compression.segment_model import SegmentModel, mask_trigger_targets
from laconic.halting.estimators import expected_memory_size, first_slots_mask, mean_field_gate, sample_column
from laconic.halting.stop_distribution import (
    RandomStream,
    draw_uniforms,
    length_by_quantile,
    length_by_threshold,
    length_probs,
    length_support,
    mask_disallowed_stops,
    uniform_length,
)

TrainingPhase = Literal["decoder", "joint", "head_only"]


class WindowRun:
    """One pass over a window.

    In phase "decoder", lengths are fixed or uniformly random, and the decoder is trained; in "joint", decoder and stop
    head are trained; in "head_only", only the head or the ratio classifier is. Lists have an entry for each segment.
    """

    def __init__(
        self, model: SegmentModel, batch: DocumentBatch, memory: SummaryMemory, phase: TrainingPhase, seed: int
    ) -> None:
        self.model, self.batch, self.memory, self.phase = model, batch, memory, phase
        self.seed, self.config = seed, model.config
        self.stop_head_config = model.summaries.stop_head_config
        self.w = len(batch.segment_ends)
        self.carried_memory = None if batch.carried_segments is None else memory  # with which the next window begins
        self.num_tokens = torch.stack([batch.attention_mask[:, s].sum(1) for s in batch.segment_slices], 1)
        zero = torch.zeros(batch.B, self.w, device=batch.attention_mask.device)
        self.hard_lengths = zero.long()  # number of vectors by the inference rule
        self.memory_sizes = zero.clone()  # expected number of vectors that each segment reads
        self.segment_losses: list[Tensor] = []  # summed loss in nats [B]
        self.segment_kls: list[Tensor] = []  # summed KL divergence from the teacher in nats [B]
        self.teacher_states: Float[Tensor, "B T D"] | None = None
        self.num_correct: list[Tensor] = []  # correctly predicted targets [B]
        self.a: list[Tensor | None] = [None] * self.w  # stop logits [B, K]; None without a compression
        self.first_states: list[Tensor | None] = [None] * self.w  # input of the ratio classifier [B, D]
        self.trial_losses: list[Tensor | None] = [None] * self.w  # of the next segment, by possible length [B, A]
        self.is_read_hard = self.sample_hard_rows()
        self.pending_trial: tuple[SummaryMemory, CompressionOutput, Tensor] | None = None
        self.targets = build_window_targets(model, batch)
        has_targets = [(self.targets[:, s] != IGNORE_INDEX).any(1) for s in batch.segment_slices]
        self.has_targets = torch.stack(has_targets, 1)

    def run(self) -> "WindowRun":
        batch = self.batch
        if self.config.distillation_weight and self.phase != "head_only":
            self.teacher_states = self.model.read_as_teacher(batch.input_ids, batch.attention_mask)
        with torch.set_grad_enabled(self.phase != "head_only" and torch.is_grad_enabled()):
            for i, s in enumerate(batch.segment_slices):
                self.run_segment(i, batch.input_ids[:, s], batch.attention_mask[:, s], self.targets[:, s])
        return self

    def run_segment(
        self, i: int, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], targets: Int[Tensor, "B T"]
    ) -> None:
        """Read segment `i` after the current memory, and compress it if its vectors are needed."""
        model = self.model
        is_read = i < self.w - 1
        compresses = self.should_compress(i)
        N = self.predetermined_lengths(i)
        model.check_fits(self.memory, input_ids.shape[1], compresses=compresses)
        n = self.num_summary_positions(N) if compresses else 0
        teacher_states = None
        if self.teacher_states is not None:
            teacher_states = self.teacher_states[:, self.batch.segment_slices[i]]
        known_states = teacher_states if model.is_read_like_teacher(self.memory) else None
        hidden_states, compressed = model.run_segment(
            self.memory, input_ids, attention_mask, n, is_read or self.prices_all_segments, text_states=known_states
        )
        loss = model.segment_loss(hidden_states, targets, teacher_states if i > 0 else None)
        self.segment_losses.append(loss.nll)
        self.segment_kls.append(loss.kl)
        self.num_correct.append(loss.num_correct)
        if self.pending_trial is not None:
            self.trial_losses[i - 1] = self.compute_trial_losses(
                *self.pending_trial, input_ids, attention_mask, targets
            )
        if compressed is None:
            return
        self.memory_sizes[:, i] = expected_memory_size(self.memory.valid, self.memory.log_s)
        self.first_states[i] = compressed.first_state
        self.pending_trial = (self.memory, compressed, attention_mask) if self.needs_trials(i) else None
        if N is None:
            vectors = self.sample_vectors(i, compressed, attention_mask)
        else:
            vectors = model.select_vectors(compressed, attention_mask, N)
            self.hard_lengths[:, i] = vectors.valid.sum(1)
        memory = model.update_memory(self.memory, vectors, self.num_tokens[:, i])
        self.memory = memory if is_read else memory.detach()
        if self.batch.carried_segments == i + 1:
            self.carried_memory = self.memory

    @property
    def prices_all_segments(self) -> bool:
        """Whether vectors have a price even if no segment of the window reads them."""
        return self.stop_head_config is not None and self.stop_head_config.cost_on == "all"

    def should_compress(self, i: int) -> bool:
        """Return whether the vectors of segment `i` are read, carried to the next window, or priced."""
        carried = self.batch.carried_segments
        is_carried = carried is not None and i < carried
        return i < self.w - 1 or is_carried or (self.prices_all_segments and self.phase != "decoder")

    def draw_uniforms(self, stream: RandomStream, i: int, n: int) -> Float[Tensor, "B n"]:
        batch = self.batch
        return draw_uniforms(stream, self.seed, batch.epoch, batch.row_index, batch.first_segment + i, n)

    @property
    def losses(self) -> Float[Tensor, "B w"]:
        return torch.stack(self.segment_losses, 1)

    @property
    def kls(self) -> Float[Tensor, "B w"]:
        return torch.stack(self.segment_kls, 1)

    def map_stop_logits(self, function: Callable[..., Tensor]) -> Float[Tensor, "B w"]:
        """Apply `function` to the stop logits of each compression; 0 for segments that are not compressed."""
        none = torch.zeros_like(self.memory_sizes[:, 0])
        return torch.stack([none if a is None else function(a) for a in self.a], 1)

    def predetermined_lengths(self, i: int) -> Int[Tensor, " B"] | None:
        """Return lengths that do not depend on the text: fixed, or uniformly random; None if the stop head decides."""
        row_index, config = self.batch.row_index, self.config
        if config.length_policy == "fixed":
            return torch.full_like(row_index, config.fixed_length)
        if config.length_policy == "stop_head" and self.phase != "decoder":
            return None
        return uniform_length(self.draw_uniforms("nested", i, 1)[:, 0], config.possible_lengths)

    def num_summary_positions(self, N: Int[Tensor, " B"] | None) -> int:
        """Return the number of summary positions to compute: those that are kept, or all if a head needs them."""
        has_positions = self.config.summary in ("parallel", "autoregressive")
        if N is not None and has_positions and self.phase == "decoder":
            return int(N.max())
        return self.config.fixed_length

    def needs_trials(self, i: int) -> bool:
        """Return whether the next segment is read with every possible length of segment `i`."""
        if self.stop_head_config is None or self.phase == "decoder" or i >= self.w - 1:
            return False
        return self.config.length_policy == "classifier" or self.stop_head_config.estimator == "ponder"

    @property
    def candidate_lengths(self) -> tuple[int, ...]:
        """Possible lengths, including 0 where the stop head can stop before the first vector."""
        if self.config.length_policy == "classifier":
            return self.config.possible_lengths
        return length_support(self.config.possible_lengths, self.model.summaries.stop_position)

    @torch.no_grad()
    def compute_trial_losses(
        self,
        memory: SummaryMemory,
        compressed: CompressionOutput,
        previous_mask: Bool[Tensor, "B Ts"],
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B A"]:
        """Compute the loss of a segment in nats for each possible length of the previous one."""
        losses: list[Tensor] = []
        for n in self.candidate_lengths:
            lengths = torch.full_like(self.batch.row_index, n)
            vectors = self.model.select_vectors(compressed, previous_mask, lengths)
            after = self.model.update_memory(memory, vectors, previous_mask.sum(1))
            hidden_states = self.model.read_segment(after, input_ids, attention_mask)
            losses.append(self.model.segment_loss(hidden_states, targets).nll)
        return torch.stack(losses, 1)

    def sample_vectors(
        self, i: int, compressed: CompressionOutput, attention_mask: Bool[Tensor, "B T"]
    ) -> SegmentVectors:
        """Return as many vectors as the stop head samples; with "soft", all in rows that do not read hard, gated by
        their survival (Eq. VL19).
        """
        model, config = self.model, self.stop_head_config
        assert config is not None
        z, stop_position = compressed.summary_states, config.stop_position
        has_text = attention_mask.any(1)
        with torch.enable_grad():  # the head is trained in the phase "head_only" too
            logits = model.summaries.stop_logits(model.decoder, z, head_only=self.phase == "head_only")
            a = mask_disallowed_stops(logits, self.config.possible_lengths, stop_position)
        self.a[i] = a
        p = length_probs(a.detach(), stop_position)
        column = sample_column(p, self.draw_uniforms("length", i, 1)[:, 0])
        N = column + (a.shape[1] + 1 - p.shape[1])  # the first column is length 0 or 1, the last is K
        self.hard_lengths[:, i] = self.inference_lengths(a.detach(), N).masked_fill(~has_text, 0)
        vectors = model.summaries.map_to_vectors(z, compressed.last_embeds)
        sampled = first_slots_mask(N, a.shape[1]) & has_text[:, None]
        if config.estimator != "soft":
            return SegmentVectors(vectors, sampled)
        is_hard = self.is_read_hard[:, None]
        valid = torch.where(is_hard, sampled, has_text[:, None])
        return SegmentVectors(vectors, valid, mean_field_gate(a, stop_position).masked_fill(is_hard, 0.0).float())

    def inference_lengths(self, a: Float[Tensor, "B K"], N: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Return the lengths by the inference rule, for logging; N itself if that rule samples."""
        config = self.stop_head_config
        assert config is not None
        if config.stop_rule == "sample":
            return N
        if config.stop_rule == "quantile":
            return length_by_quantile(a, config.stop_quantile, config.stop_position)
        return length_by_threshold(a, config.stop_threshold, config.stop_position)

    def sample_hard_rows(self) -> Bool[Tensor, " B"]:
        """Choose the rows that read this window hard although the estimator is soft."""
        config = self.stop_head_config
        if config is None or config.estimator != "soft" or self.phase != "joint":
            return torch.zeros_like(self.batch.row_index, dtype=torch.bool)
        return self.draw_uniforms("harden", 0, 1)[:, 0] < config.hard_window_fraction


def build_window_targets(model: SegmentModel, batch: DocumentBatch) -> Int[Tensor, "B T"]:
    """Return the target of each token of a window; IGNORE_INDEX where it is not scored."""
    targets = batch.targets
    if model.config.trigger_placement == "replace":
        segments = [mask_trigger_targets(targets[:, s], batch.attention_mask[:, s]) for s in batch.segment_slices]
        return torch.cat(segments, 1)
    return targets
