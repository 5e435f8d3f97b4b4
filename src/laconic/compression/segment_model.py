"""Read and compress one segment; optionally recomputed in the backward pass as a whole.

AutoCompressors (arXiv:2305.14788); self-generated summaries are those of the variable-length AutoCompressor
(jo100sun/AutoCompressors bb15bc1).

Columns of a pass are [bos;] memory [M], text [T], summary positions [n], under a causal mask; invalid slots and padding
are attended by nothing. B rows, K the largest number of summary positions, D width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.batches import IGNORE_INDEX
from laconic.compression.distillation import distillation_loss
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors, check_fits, drop_oldest_segments, exceeds_budget
from laconic.compression.segment import (
    CompressionOutput,
    MemoryPrompt,
    SegmentOutput,
    StopCheck,
    mark_last_valid,
    masked_mean,
    replace_last_with_trigger,
    resolve_position_scheme,
)
from laconic.compression.summary_tokens import SummaryParameters, last_token_embeds, pool_spans, select_top_columns
from laconic.config.methods import CompressionConfig
from laconic.halting.stop_distribution import attention_gate_bias, scale_by_survival
from laconic.losses import score_rows, score_rows_in_chunks
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.next_token import last_valid

ReadAndCompressed = tuple[Tensor, CompressionOutput | None]


class SegmentLoss(NamedTuple):
    """Sums over the targets of each row: cross-entropy in nats, correct predictions, and nats from the teacher."""

    nll: Float[Tensor, " B"]
    num_correct: Float[Tensor, " B"]
    kl: Float[Tensor, " B"]


def mask_trigger_targets(targets: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Eq. CP1: where the trigger replaces the last token, that token is neither a target nor predicts one."""
    is_trigger = mark_last_valid(attention_mask)
    predicts_trigger = mark_last_valid(attention_mask & ~is_trigger)
    return targets.masked_fill(is_trigger | predicts_trigger, IGNORE_INDEX)


@dataclass(frozen=True)
class SegmentModel:
    """A decoder with the trainable parameters of compression; in `base_model_context`, its adapter is disabled."""

    decoder: Decoder
    summaries: SummaryParameters
    bos_token_id: int | None = None
    base_model_context: Callable[[], AbstractContextManager[object]] | None = None

    @property
    def config(self) -> CompressionConfig:
        return self.summaries.config

    def reading_context(self) -> AbstractContextManager[object]:
        """Return the context for reading; with adapter_scope "write" it disables the adapter."""
        return self.teacher_context() if self.config.adapter_scope == "write" else nullcontext()

    def empty_memory(self, B: int) -> SummaryMemory:
        return SummaryMemory.empty(B, self.decoder.config.hidden_size, self.decoder.dtype, self.decoder.device)

    @property
    def prefix_length(self) -> int:
        """1 if bos precedes every memory, else 0."""
        return int(self.bos_token_id is not None and self.config.bos == "sink")

    def check_fits(self, memory: SummaryMemory, segment_tokens: int, *, compresses: bool = True) -> None:
        check_fits(
            self.decoder.config, self.config, self.prefix_length, segment_tokens, memory.M, compresses=compresses
        )

    def apply_gate(self, memory: SummaryMemory) -> SummaryMemory:
        """Prepare a soft memory for reading by its configured gate.

        "attention_bias" adds its log survival to the attention logits, "scale_vectors" multiplies the vectors (Eq.
        CP5), and "none" reads them as if they were hard.
        """
        config = self.summaries.stop_head_config
        gate = config.soft_gate if config is not None and self.config.length_policy == "stop_head" else "attention_bias"
        if memory.log_s is None or gate == "attention_bias":
            return memory
        vectors = scale_by_survival(memory.vectors, memory.log_s) if gate == "scale_vectors" else memory.vectors
        return replace(memory, vectors=vectors, log_s=None)

    def build_prompt(
        self, memory: SummaryMemory, text_mask: Bool[Tensor, "B T"] | None = None, num_summaries: int = 0
    ) -> MemoryPrompt:
        """Build [bos; M_{i-1}]; mask and position ids include a text and summary positions after it, if any.

        With "zero" positions, memory and summaries have none (-1), and the text has those that it has alone.
        """
        embeds = memory.vectors.to(self.decoder.dtype)
        text_mask = memory.valid[:, :0] if text_mask is None else text_mask
        bos = embeds.new_full((memory.B, self.prefix_length), self.bos_token_id or 0, dtype=torch.long)
        if bos.shape[1]:
            embeds = torch.cat([self.decoder.embed(bos), embeds], 1)
        summary_mask = text_mask.new_ones(memory.B, num_summaries)
        mask = torch.cat([torch.ones_like(bos, dtype=torch.bool), memory.valid, text_mask, summary_mask], 1)
        position_ids = None
        if resolve_position_scheme(self.config, self.decoder.config) == "zero":
            text_ids = (bos.shape[1] + text_mask.cumsum(1) - 1) * text_mask
            memory_ids, summary_ids = (x.long().fill_(-1) for x in (memory.valid, summary_mask))
            position_ids = torch.cat([torch.zeros_like(bos), memory_ids, text_ids, summary_ids], 1)
        return MemoryPrompt(embeds, mask, position_ids)

    def forward_segment(
        self,
        memory: SummaryMemory,
        text_embeds: Float[Tensor, "B T D"],
        attention_mask: Bool[Tensor, "B T"],
        summary_embeds: Float[Tensor, "*#B n D"] | None = None,
    ) -> SegmentOutput:
        """Eq. AC2: one pass over [bos; M_{i-1}; text; e_1..e_n]; a soft memory is gated."""
        B, T = attention_mask.shape
        n = 0 if summary_embeds is None else summary_embeds.shape[-2]
        prompt = self.build_prompt(memory, attention_mask, n)
        P = prompt.inputs_embeds.shape[1]
        parts = [prompt.inputs_embeds.to(text_embeds.dtype), text_embeds]
        if summary_embeds is not None:
            parts.append(summary_embeds.to(text_embeds.dtype).expand(B, -1, -1))
        bias = None
        if memory.log_s is not None:
            bias = attention_gate_bias(memory.log_s, memory.segment_ids, self.prefix_length, T + n)
        output = self.decoder(
            torch.cat(parts, 1),
            attention_mask=None if bool(prompt.attention_mask.all()) else prompt.attention_mask,
            position_ids=prompt.position_ids,
            attention_bias=bias,
        )
        states = output.hidden_states
        return SegmentOutput(states[:, P : P + T], states[:, P + T :], output.cache)

    def generate_summaries(
        self,
        memory: SummaryMemory,
        z: Float[Tensor, "B 1 D"],
        cache: KVCache,
        num_vectors: int,
        should_stop: StopCheck | None = None,
    ) -> Float[Tensor, "B n D"]:
        """Eq. VL2: z_t = state of one more position that reads A(z_{t-1}) + step_t, for t = 1..num_vectors.

        `cache` is that of memory and segment; `should_stop` ends the loop if it returns True for the states so far.
        """
        position_ids = None
        if resolve_position_scheme(self.config, self.decoder.config) == "zero":
            position_ids = torch.full((len(z), 1), -1, device=z.device)
        states: list[Tensor] = []
        for t in range(1, num_vectors + 1):
            bias = None
            if memory.log_s is not None:
                suffix = cache.S + 1 - self.prefix_length - memory.M
                bias = attention_gate_bias(memory.log_s, memory.segment_ids, self.prefix_length, suffix, cache.S)
            inputs = self.summaries.loop_input(t, z)
            output = self.decoder(inputs, cache, position_ids=position_ids, attention_bias=bias)
            z, cache = output.hidden_states, output.cache
            states.append(z)
            if should_stop is not None and should_stop(torch.cat(states, 1)):
                break
        return torch.cat(states, 1)

    def read_segment(
        self, memory: SummaryMemory, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        before = self.apply_gate(memory)
        with self.reading_context():
            return self.forward_segment(before, self.decoder.embed(input_ids), attention_mask).text_states

    def prefill_memory(self, memory: SummaryMemory) -> KVCache | None:
        """Compute the KV cache of bos and memory; None if both are empty."""
        prompt = self.build_prompt(memory)
        if not prompt.inputs_embeds.shape[1]:
            return None
        with self.reading_context():
            output = self.decoder(
                prompt.inputs_embeds, attention_mask=prompt.attention_mask, position_ids=prompt.position_ids
            )
        return output.cache

    def compress_segment(
        self,
        memory: SummaryMemory,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        num_vectors: int,
        keep_graph: bool = True,
        should_stop: StopCheck | None = None,
    ) -> CompressionOutput:
        """Compute the states from which a text's vectors are made, by the configured kind of summary.

        There are `num_vectors` summary positions, none of pooled and selected summaries. Without `keep_graph`, the loop
        of self-generated summaries builds no autograd graph; the text's pass does.
        """
        config, summaries = self.config, self.summaries
        memory = self.apply_gate(memory)
        text_embeds = self.decoder.embed(input_ids)
        summary_embeds = last = None
        if config.summary == "parallel":
            if summaries.copies_last_tokens:
                last = last_token_embeds(text_embeds, attention_mask, summaries.K)[:, :num_vectors]
            summary_embeds = summaries.summary_inputs(num_vectors, last)
        elif config.trigger_placement == "replace":
            text_embeds = replace_last_with_trigger(summaries.trigger_vector, text_embeds, attention_mask)
        elif config.summary == "autoregressive":
            summary_embeds = summaries.trigger_vector[None]
        h, z, cache = self.forward_segment(memory, text_embeds, attention_mask, summary_embeds)
        if config.summary == "parallel":
            return CompressionOutput(h, z, z[:, 0], last)
        if config.summary in ("pool", "select"):
            return CompressionOutput(h, z, masked_mean(h, attention_mask))
        if config.trigger_placement == "replace":
            z = last_valid(h, attention_mask)[:, None]
        with torch.set_grad_enabled(keep_graph and torch.is_grad_enabled()):
            start = cache if keep_graph else cache.detach()
            states = self.generate_summaries(memory, z, start, num_vectors, should_stop)
        return CompressionOutput(h, states, z[:, 0])

    def read_and_compress(
        self,
        memory: SummaryMemory,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        num_vectors: int,
        keep_graph: bool = True,
        text_states: Float[Tensor, "B T D"] | None = None,
    ) -> ReadAndCompressed:
        """Return the states of the text as it is read, and the result of compressing it unless `num_vectors` is 0.

        One pass reads and compresses if the adapter is active in both. Otherwise the text is read in a second pass,
        unless `text_states` gives its result.
        """
        compressed = None
        if num_vectors:
            compressed = self.compress_segment(memory, input_ids, attention_mask, num_vectors, keep_graph)
            if self.config.adapter_scope == "both":
                return compressed.text_states, compressed
        if text_states is None:
            text_states = self.read_segment(memory, input_ids, attention_mask)
        return text_states, compressed

    @property
    def run_segment(self) -> Callable[..., ReadAndCompressed]:
        """`read_and_compress`, recomputed in the backward pass if segments are checkpointed."""
        if self.config.checkpoint_segments and self.summaries.training and torch.is_grad_enabled():
            return cast(Any, partial(checkpoint, self.read_and_compress, use_reentrant=False))
        return self.read_and_compress

    def segment_loss(
        self,
        hidden_states: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        teacher_states: Float[Tensor, "B T D"] | None = None,
    ) -> SegmentLoss:
        """Eq. AC5: -sum over j of log p(x_{j+1} | M_{i-1}, x_{<=j}) of each row; only scored tokens get logits.

        With the teacher's hidden states, also the distillation loss (Eq. VL30), else 0.
        """
        at = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
        rows, labels = hidden_states[at], targets[at]
        head = partial(self.summaries.logits, self.decoder)
        if teacher_states is None:
            nll, is_correct = score_rows_in_chunks(head, rows, labels)
            kl = zeros = nll.new_zeros(len(targets))
        else:
            logits = head(rows)
            logits = logits.to(accumulation_dtype(logits.dtype))
            nll, is_correct = score_rows(lambda _: logits, rows, labels)
            zeros = nll.new_zeros(len(targets))
            with torch.no_grad(), self.teacher_context():
                teacher_logits = self.decoder.logits(teacher_states[at])
            student_logits = logits[:, : teacher_logits.shape[1]]  # without control rows
            kl = zeros.index_add(
                0, at[0], distillation_loss(student_logits, teacher_logits, self.config.distillation_temperature)
            )
        right = zeros.index_add(0, at[0], is_correct.to(nll.dtype))
        return SegmentLoss(zeros.index_add(0, at[0], nll), right, kl)

    @torch.no_grad()
    def read_as_teacher(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """Compute the last hidden states of the teacher, the base model without a memory, over a text."""
        with self.teacher_context():
            memory = self.empty_memory(len(input_ids))
            return self.forward_segment(memory, self.decoder.embed(input_ids), attention_mask).text_states

    def is_read_like_teacher(self, memory: SummaryMemory) -> bool:
        """Return whether a text after this memory is read as the teacher reads it: without adapter, after nothing."""
        return memory.M == 0 and self.config.adapter_scope == "write"

    def teacher_context(self) -> AbstractContextManager[object]:
        """Return the context in which the decoder is the teacher: without its adapter, if it has one."""
        return nullcontext() if self.base_model_context is None else self.base_model_context()

    def select_vectors(
        self, compressed: CompressionOutput, attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"]
    ) -> SegmentVectors:
        """Return the first `lengths` vectors of a segment, pooled or selected where configured."""
        if self.config.summary == "pool":
            means, valid = pool_spans(compressed.text_states, attention_mask, lengths, self.config.fixed_length)
            return SegmentVectors(self.summaries.map_to_vectors(means), valid)
        if self.config.summary == "select":
            return self.select_tokens(compressed.text_states, attention_mask, lengths)
        z, last_embeds = compressed.summary_states, compressed.last_embeds
        if last_embeds is not None:
            lengths = lengths.minimum(attention_mask.sum(1))
        valid = (torch.arange(z.shape[1], device=z.device) < lengths[:, None]) & attention_mask.any(1, keepdim=True)
        return SegmentVectors(self.summaries.map_to_vectors(z, last_embeds), valid)

    def select_tokens(
        self, h: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"]
    ) -> SegmentVectors:
        """Return the states of the best-scored tokens; a bias of value 0 carries the gradient to their scores."""
        r = self.summaries.selection_scores(h)
        columns, valid = select_top_columns(r, attention_mask, lengths, self.config.fixed_length)
        selected = h.gather(1, columns[..., None].expand(-1, -1, h.shape[2]))
        r = r.gather(1, columns).float()
        log_s = r - r.detach() if torch.is_grad_enabled() else None
        return SegmentVectors(self.summaries.map_to_vectors(selected), valid, log_s)

    def update_memory(
        self, memory: SummaryMemory, segment_vectors: SegmentVectors, num_tokens: Int[Tensor, " B"]
    ) -> SummaryMemory:
        """Compute M_i from M_{i-1} and sigma^i by the configured policy."""
        policy, budget = self.config.memory_policy, self.config.max_memory_vectors
        vectors, valid, log_s = segment_vectors
        if policy == "replace":
            return memory.overwrite(vectors, valid, num_tokens, log_s).compact()
        if policy == "budgeted" and budget is not None:
            rows = exceeds_budget(memory, segment_vectors, budget)
            if bool(rows.any()):
                memory = self.recompress(memory, rows)
        grown = memory.append(vectors, valid, num_tokens, log_s).compact()
        return drop_oldest_segments(grown, budget) if policy == "fifo" and budget is not None else grown

    def recompress(self, memory: SummaryMemory, rows: Bool[Tensor, " B"]) -> SummaryMemory:
        """Eq. VL27: one pass over [M_{i-1}; summary tokens] without text; its K vectors replace M_{i-1} in `rows`."""
        no_text = memory.valid[:, :0]
        K = self.config.fixed_length
        compressed = self.compress_segment(memory, no_text.long(), no_text, K)
        valid = torch.ones(memory.B, K, dtype=torch.bool, device=rows.device)
        return memory.overwrite_rows(self.summaries.map_to_vectors(compressed.summary_states), valid, rows)
