"""The unit of one segment: read with the memory before it and compressed, recomputed backward as a whole if asked.

Eq. AC5 stands here as the nats of a segment. B rows, T columns of text, K places, D width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.batches import IGNORE_INDEX
from laconic.compression.halting.stop_distribution import scale_by_survival
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors, check_fits, exceeds_budget, update_memory
from laconic.compression.segment import (
    CompressionOutput,
    StopCheck,
    compress_segment,
    mark_last_valid,
    read_segment,
    resolve_position_scheme,
)
from laconic.compression.summary_tokens import SummaryParameters, pool_spans, select_top_columns
from laconic.config.methods import CompressionConfig
from laconic.models.attention import accumulation_dtype
from laconic.models.decoder import Decoder

ReadAndCompressed = tuple[Tensor, CompressionOutput | None]
run_checkpointed: Callable[..., ReadAndCompressed] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


class SegmentLoss(NamedTuple):
    """Summed cross-entropy of each row in nats, and how many of its likeliest ids were right."""

    nll: Float[Tensor, " B"]
    num_correct: Float[Tensor, " B"]


def mask_trigger_targets(targets: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Eq. CP1: targets of a segment whose last token the trigger replaces: that token is none and predicts none."""
    gone = mark_last_valid(attention_mask)
    before = mark_last_valid(attention_mask & ~gone)
    return targets.masked_fill(gone | before, IGNORE_INDEX)


@dataclass(frozen=True)
class SegmentModel:
    """A decoder with what is learned beside it; `base` is a context in which the decoder reads without its adapter."""

    decoder: Decoder
    summaries: SummaryParameters
    bos_token_id: int | None = None
    base_model_context: Callable[[], AbstractContextManager[object]] | None = None

    @property
    def config(self) -> CompressionConfig:
        """The settings."""
        return self.summaries.config

    def reading_context(self) -> AbstractContextManager[object]:
        """The decoder as it reads: with `adapt` write the base model."""
        return (
            self.base_model_context()
            if self.config.adapter_scope == "write" and self.base_model_context is not None
            else nullcontext()
        )

    def empty_memory(self, B: int) -> SummaryMemory:
        """No memory, of the decoder's type and device."""
        table = self.decoder.token_embedding.weight
        return SummaryMemory.empty(B, table.shape[1], table.dtype, table.device)

    @property
    def prefix_length(self) -> int:
        """Columns that stand before the memory."""
        return int(self.bos_token_id is not None and self.config.bos in ("sink", "first"))

    def check_fits(self, memory: SummaryMemory, segment_tokens: int, *, compresses: bool = True) -> None:
        """Raises `Usage` (2) where a memory and a segment of so many tokens, compressed or read, do not fit."""
        reserved = resolve_position_scheme(self.config, self.decoder.config) == "reserved"
        slots = int((memory.vectors_per_segment > 0).sum(1).amax()) * self.config.fixed_length if reserved else memory.M
        check_fits(self.decoder.config, self.config, self.prefix_length, segment_tokens, slots, compresses=compresses)

    def apply_gate(self, memory: SummaryMemory) -> SummaryMemory:
        """A memory as it is read: what is soft has its bias, or scaled vectors (CP5), or is read as if it were hard."""
        how = self.summaries.stop_head_config
        gate = how.soft_gate if how is not None and self.config.length_policy == "stop_head" else "attention_bias"
        if memory.log_s is None or gate == "attention_bias":
            return memory
        vectors = scale_by_survival(memory.vectors, memory.log_s) if gate == "scale_vectors" else memory.vectors
        return replace(memory, vectors=vectors, log_s=None)

    def read_segment(
        self, memory: SummaryMemory, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """States of a text that follows a memory."""
        before = self.apply_gate(memory)
        with self.reading_context():
            return read_segment(
                self.decoder,
                self.config,
                before,
                self.decoder.embed(input_ids),
                attention_mask,
                None,
                self.bos_token_id,
            ).text_states

    def compress_segment(
        self,
        memory: SummaryMemory,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        num_vectors: int,
        keep_graph: bool = True,
        should_stop: StopCheck | None = None,
    ) -> CompressionOutput:
        """States from which a text's vectors are made; the older memory stands before it only where it is recurrent."""
        before = (
            self.apply_gate(memory)
            if self.config.reread_memory
            else memory.mask_slots(torch.zeros_like(memory.valid)).compact()
        )
        words = self.decoder.embed(input_ids)
        return compress_segment(
            self.decoder,
            self.summaries,
            before,
            words,
            attention_mask,
            num_vectors,
            self.bos_token_id,
            keep_graph=keep_graph,
            should_stop=should_stop,
        )

    def read_and_compress(
        self,
        memory: SummaryMemory,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        num_vectors: int,
        keep_graph: bool = True,
    ) -> ReadAndCompressed:
        """States of the text as it is read, and for n > 0 what compressing it gives: in one pass where both agree."""
        if num_vectors == 0:
            return self.read_segment(memory, input_ids, attention_mask), None
        written = self.compress_segment(memory, input_ids, attention_mask, num_vectors, keep_graph)
        together = self.config.reread_memory and self.config.adapter_scope == "both"
        return (written.text_states if together else self.read_segment(memory, input_ids, attention_mask)), written

    def run_segment(
        self,
        memory: SummaryMemory,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        num_vectors: int,
        keep_graph: bool = True,
    ) -> ReadAndCompressed:
        """The same, computed again backward where segments are checkpointed."""
        if self.config.checkpoint_segments and self.summaries.training and torch.is_grad_enabled():
            return run_checkpointed(self.read_and_compress, memory, input_ids, attention_mask, num_vectors, keep_graph)
        return self.read_and_compress(memory, input_ids, attention_mask, num_vectors, keep_graph)

    def segment_loss(self, hidden_states: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> SegmentLoss:
        """Eq. AC5: -sum over j of log p(x_{j+1} | M_{i-1}, x_{<=j}) of each row; logits of scored tokens alone."""
        at = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
        rows = self.summaries.logits(self.decoder, hidden_states[at])
        asked, rows = targets[at], rows.to(accumulation_dtype(rows.dtype))
        each = F.cross_entropy(rows, asked, reduction="none")
        hit = (rows.detach().argmax(-1) == asked).to(each.dtype)
        nothing = each.new_zeros(len(targets))
        return SegmentLoss(nothing.index_add(0, at[0], each), nothing.index_add(0, at[0], hit))

    def select_vectors(
        self, compressed: CompressionOutput, attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"]
    ) -> SegmentVectors:
        """The vectors of a segment whose length is decided: hard."""
        K = (
            compressed.summary_states.shape[1]
            if self.config.summary in ("parallel", "autoregressive")
            else self.config.fixed_length
        )
        if self.config.summary == "pool":
            means, there = pool_spans(compressed.text_states, attention_mask, lengths, K)
            return SegmentVectors(self.summaries.map_to_vectors(means), there)
        if self.config.summary == "select":
            r = self.summaries.selection_scores(compressed.text_states)
            columns, there = select_top_columns(r, attention_mask, lengths, K)
            h = compressed.text_states.gather(1, columns[..., None].expand(-1, -1, compressed.text_states.shape[2]))
            r = r.gather(1, columns).float()
            bias = r - r.detach() if torch.is_grad_enabled() else None
            return SegmentVectors(self.summaries.map_to_vectors(h), there, bias)
        there = (torch.arange(K, device=lengths.device) < lengths[:, None]) & attention_mask.any(1, keepdim=True)
        return SegmentVectors(self.summaries.map_to_vectors(compressed.summary_states), there)

    def update_memory(
        self, memory: SummaryMemory, segment_vectors: SegmentVectors, num_tokens: Int[Tensor, " B"]
    ) -> SummaryMemory:
        """M_i of M_{i-1} and sigma^i; a memory that would pass its budget is compressed first."""
        reading = self.config
        if reading.memory_policy == "budgeted" and reading.max_memory_vectors is not None:
            rows = exceeds_budget(memory, segment_vectors, reading.max_memory_vectors)
            if bool(rows.any()):
                memory = self.recompress(memory, rows)
        return update_memory(memory, segment_vectors, num_tokens, reading)

    def recompress(self, memory: SummaryMemory, rows: Bool[Tensor, " B"]) -> SummaryMemory:
        """Eq. VL27: one pass over [M_{i-1}; summary tokens] without text, whose K vectors replace M_{i-1} in `rows`."""
        nothing = memory.valid[:, :0]
        text, K = nothing.long(), self.config.fixed_length
        written = self.compress_segment(memory, text, nothing, K)
        there = torch.ones(memory.B, K, dtype=torch.bool, device=rows.device)
        return memory.overwrite_rows(self.summaries.map_to_vectors(written.summary_states), there, rows)
