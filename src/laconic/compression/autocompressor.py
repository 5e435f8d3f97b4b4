"""AutoCompressors: read a long text segment by segment, and keep a few summary vectors of each to read back.

AutoCompressors arXiv:2305.14788 (code 80352a4) with a fixed number of vectors, and the variable-length AutoCompressor
(jo100sun/AutoCompressors bb15bc1) with a learned number, whose distribution and estimators are in
`compression.halting`. The training step written the obvious way is in `autocompressor_reference`.

Symbols: S_i segment i; M_i the memory after it; sigma^i its vectors, N_i of them; CE_i its loss in nats; beta the price
of a vector in nats, omega the share of that in effect. B rows, T columns of text, M slots, K summary positions, w
segments of a window, D width.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.batches import IGNORE_INDEX, DocumentBatch, next_token_targets
from laconic.compression.halting import inference
from laconic.compression.halting.inference import StopRule
from laconic.compression.halting.losses import length_loss, mark_priced_segments
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import max_memory_vectors, max_segment_tokens
from laconic.compression.segment import MemoryPrompt, resolve_position_scheme
from laconic.compression.segment_model import SegmentModel
from laconic.compression.summary_tokens import SummaryParameters
from laconic.compression.training_window import TrainingPhase, WindowRun
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.errors import UsageError
from laconic.generation.config import check_type
from laconic.halting.estimators import length_entropy, penalty_ramp
from laconic.halting.stop_distribution import expected_length
from laconic.interfaces import StepOutput
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad


class AutoCompressor(nn.Module):
    """A decoder trained to compress text into summary vectors and to read them.

    Args:
        decoder: Reads and compresses segments.
        summaries: The trainable parameters beside the decoder.
        config: Compression settings.
        stop_head_config: Settings of learned lengths, if lengths are learned.
        total_steps: Number of updates of the run; the schedules of price and head refer to it.
        seed: Seed of random lengths.
        bos_token_id: Id of bos; None if the tokenizer has none.
        base_model_context: Returns a context in which the decoder's adapter is disabled, for adapter_scope "write".

    Raises:
        UsageError: If the settings do not fit each other or the decoder.

    Examples:
        >>> import torch
        >>> from laconic import AutoCompressor, Decoder, DecoderConfig
        >>> from laconic.compression.summary_tokens import SummaryParameters
        >>> from laconic.config.methods import CompressionConfig
        >>> decoder = Decoder(DecoderConfig.tiny("llama"))
        >>> config = CompressionConfig(max_vectors=2)
        >>> method = AutoCompressor(decoder, SummaryParameters(decoder, config, eos_token_id=2), config, total_steps=1)
        >>> memory = method.compress(torch.tensor([[4, 5, 6, 7]]))
        >>> memory.num_vectors.tolist()
        [2]
    """

    def __init__(
        self,
        decoder: Decoder,
        summaries: SummaryParameters,
        config: CompressionConfig,
        stop_head_config: StopHeadConfig | None = None,
        *,
        total_steps: int,
        seed: int = 0,
        bos_token_id: int | None = None,
        base_model_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        super().__init__()
        check_settings(decoder, config, bos_token_id, base_model_context is not None)
        self.decoder, self.summaries = decoder, summaries
        self.config, self.stop_head_config = config, stop_head_config
        self.total_steps, self.seed = total_steps, seed
        if config.carry_between_windows and not (stop_head_config and stop_head_config.estimator == "soft"):
            raise UsageError('carry_between_windows = "soft" needs estimator = "soft"; remove carry_between_windows')
        self.segment_model = SegmentModel(decoder, summaries, bos_token_id, base_model_context)

    def training_phase(self, step: int) -> TrainingPhase:
        """Return what update `step` (from 0) trains: the decoder with predetermined lengths, the head, or both."""
        if self.stop_head_config is None or self.config.length_policy not in ("stop_head", "classifier"):
            return "decoder"
        if self.stop_head_config.estimator == "soft":
            return "joint"
        return "head_only" if step >= self.head_only_step else "decoder"

    @property
    def head_only_step(self) -> int:
        """The update from which only the head is trained, unless the estimator is soft."""
        fraction = 0.0 if self.stop_head_config is None else self.stop_head_config.head_only_after
        return math.ceil(fraction * self.total_steps)

    def resets_optimizer_state(self, batch: DocumentBatch) -> bool:
        """Test whether this update begins the phase that trains only the head."""
        return self.training_phase(batch.step) == "head_only" and batch.step == self.head_only_step

    def loss_denominators(self, batch: DocumentBatch) -> dict[str, float]:
        """Count scored tokens, in total and by segment of the window, and compressions with a price."""
        phase = self.training_phase(batch.step)
        counts: dict[str, float] = {"scored": 0.0, "compressions": 0.0}
        counts |= {f"scored.{i + 1}": 0.0 for i in range(batch.windows[0])}
        for part in batch.sequential_parts:
            empty = self.segment_model.empty_memory(batch.B)
            window = WindowRun(self.segment_model, part, empty, phase, self.seed)
            for i, columns in enumerate(part.segment_slices):
                n = float((window.targets[:, columns] != IGNORE_INDEX).sum())
                counts["scored"] += n
                counts[f"scored.{i + 1}"] += n
            counts["compressions"] += float(mark_priced_segments(window).sum())
        return counts

    def forward(self, batch: DocumentBatch, state: SummaryMemory | None = None) -> StepOutput:
        """Compute the loss of a window of each row of the `batch`; `state` is the memory that enters it, None if empty.

        Returns:
            The loss, the metrics of `compute_metrics`, and the memory for the next window.

        Raises:
            UsageError: If no segment of the window reads a summary, or if a segment does not fit the model.
        """
        self._check_window(batch)
        memory = self.segment_model.empty_memory(batch.B) if state is None else state
        phase = self.training_phase(batch.step)
        head = self.stop_head_config
        window = WindowRun(self.segment_model, batch, memory, phase, self.seed).run()
        denominators = batch.loss_denominators or self.loss_denominators(batch)
        weight = 1 / (denominators["scored"] or 1.0)  # of a nat
        loss = (self.row_nats(window) * weight).sum()
        if head is not None and phase != "decoder":
            omega = 1.0
            if phase == "joint":
                omega = penalty_ramp(batch.step, self.total_steps, head.cost_start, head.cost_ramp)
            loss = loss + length_loss(window, head, omega, weight, denominators) + self.summaries.zero_loss
        if torch.is_grad_enabled() and not loss.requires_grad:  # no segment reads a summary, and reading trains nothing
            loss = loss + sum(0 * parameter.sum() for parameter in self.parameters() if parameter.requires_grad)
        carried = window.carried_memory
        if carried is not None and not self.has_soft_lengths:
            carried = replace(carried, log_s=None)
        return StepOutput(loss, self._compute_metrics(window, denominators), carried)

    def _check_window(self, batch: DocumentBatch) -> None:
        """Raise `UsageError` for a window that trains nothing."""
        w, n = batch.windows[0], len(batch.segment_ends)
        if w < 2:
            raise UsageError(f"segments_per_window = {w}: no segment of a window reads a summary; use 2 or more")
        if n > w:
            raise UsageError(
                f"the batch has {n} segments, but a window has {w}; pass `batch.sequential_parts` one after another"
            )

    def row_nats(self, window: WindowRun) -> Float[Tensor, " B"]:
        """Eq. VL30: sum of the cross-entropies of the segments of `window`, and of the weighted KL divergences."""
        return window.losses.sum(1) + self.config.distillation_weight * window.kls.sum(1)

    def _compute_metrics(self, window: WindowRun, denominators: Mapping[str, float]) -> dict[str, Tensor]:
        """Compute nats and accuracy per scored token, nats by segment of the window, and statistics of lengths."""
        num_tokens = denominators["scored"] or 1.0
        num_compressions = denominators["compressions"] or 1.0
        nats = window.losses.detach()
        is_priced = mark_priced_segments(window)
        metrics = {"nats": nats.sum() / num_tokens, "accuracy": torch.stack(window.num_correct).sum() / num_tokens}
        if self.config.distillation_weight:
            metrics["kl"] = window.kls.detach().sum() / ((num_tokens - denominators["scored.1"]) or 1.0)
        for i in range(window.batch.windows[0]):
            total = nats[:, i].sum() if i < window.w else nats.new_zeros(())
            metrics[f"nats.{i + 1}"] = total / (denominators[f"scored.{i + 1}"] or 1.0)
        lengths = window.hard_lengths.masked_fill(~is_priced, 0)
        metrics["length"] = lengths.sum() / num_compressions
        is_learned = self.config.length_policy == "stop_head" and self.training_phase(window.batch.step) != "decoder"
        if self.stop_head_config is None or not is_learned:
            return metrics
        for name, function in (("expected", expected_length), ("entropy", length_entropy)):
            statistic = partial(function, stop_position=self.stop_head_config.stop_position)
            values = window.map_stop_logits(statistic).detach()
            metrics[name] = values.masked_fill(~is_priced, 0.0).sum() / num_compressions
        metrics["at_1"] = ((lengths == 1) & is_priced).sum() / num_compressions
        metrics["at_K"] = ((lengths == self.config.fixed_length) & is_priced).sum() / num_compressions
        metrics["price"] = self.stop_head_config.length_cost * is_priced.sum() / num_compressions
        return metrics

    @property
    def has_soft_lengths(self) -> bool:
        """Whether lengths are soft while they are learned."""
        head = self.stop_head_config
        return self.config.length_policy == "stop_head" and head is not None and head.estimator == "soft"

    def compress(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | None = None,
        memory: SummaryMemory | None = None,
        rule: StopRule | None = None,
    ) -> SummaryMemory:
        """Compress one segment into a memory, without gradients.

        Args:
            input_ids: The segment.
            attention_mask: True for real tokens; a row without any keeps its memory.
            memory: The memory of the earlier segments; None for an empty one.
            rule: How many vectors to keep; by default the rule of the settings. A rule that samples needs `uniforms`;
                see `laconic.compression.halting.inference.add_uniforms`.

        Returns:
            The memory with one more segment.

        Raises:
            UsageError: If the model was not trained for the rule, or if memory, segment and model do not fit.
        """
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        memory = self._memory_or_empty(memory, len(input_ids))
        with eval_no_grad(self):
            rule = rule or inference.default_rule(self.segment_model)
            return inference.compress_into_memory(self.segment_model, memory, input_ids, mask, rule)

    def read_text(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | None = None,
        memory: SummaryMemory | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Compute the last hidden states of a text that follows a memory; `decoder.logits` maps them to logits.

        Gradients flow to the model and to the memory.

        Args:
            input_ids: Token ids [B, T].
            attention_mask: True at real tokens [B, T].
            memory: Vectors that the text follows.

        Raises:
            UsageError: If memory, text and model do not fit.
        """
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        memory = self._memory_or_empty(memory, len(input_ids))
        self.segment_model.check_fits(memory, input_ids.shape[1], compresses=False)
        return self.segment_model.read_segment(memory, input_ids, mask)

    def _memory_or_empty(self, memory: SummaryMemory | None, rows: int) -> SummaryMemory:
        """Return a memory, or an empty one for None; raise UsageError if it has another number of rows."""
        if memory is not None and rows != memory.B:
            raise UsageError(f"memory of {memory.B} texts with {rows} rows of input_ids; give a memory of {rows} texts")
        return self.segment_model.empty_memory(rows) if memory is None else memory

    def nll(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        loss_mask: Bool[Tensor, "B T"],
        memory: SummaryMemory | None = None,
    ) -> Float[Tensor, " B"]:
        """Compute the summed loss in nats of the tokens in `loss_mask`, each predicted by the real token before it.

        `attention_mask` marks the real tokens of `input_ids`, which follow `memory`.
        """
        with eval_no_grad(self):
            targets = next_token_targets(input_ids, attention_mask, loss_mask)
            return self.segment_model.segment_loss(self.read_text(input_ids, attention_mask, memory), targets).nll

    def build_prompt(self, memory: SummaryMemory) -> MemoryPrompt:
        """Build [bos; memory], the prefix of a prompt, for a memory of one text per row."""
        return self.segment_model.build_prompt(memory)

    def max_segments(self, segment_tokens: int, num_vectors: int | None = None) -> int | None:
        """Return how many segments of `segment_tokens` fit, of `num_vectors` each; None if there is no limit."""
        config, n = self.config, self.config.fixed_length
        room = max_memory_vectors(self.decoder.config, config, self.segment_model.prefix_length, segment_tokens)
        budget = config.max_memory_vectors or n
        if config.length_policy == "fixed":
            budget -= budget % n  # all segments have n vectors, so the memory never has more
        if room is None or (config.memory_policy != "accumulate" and room >= budget):
            return None
        return room // (num_vectors or n) + 1 if room >= 0 else 0

    @property
    def max_segment_tokens(self) -> int:
        """How many tokens a segment can have that follows no memory."""
        return max_segment_tokens(self.decoder.config, self.config, self.segment_model.prefix_length)


def check_settings(decoder: Decoder, config: CompressionConfig, bos_token_id: int | None, has_base_model: bool) -> None:
    """Raise `UsageError` for settings that do not fit each other or the decoder."""
    check_type("decoder", decoder, Decoder, "a Decoder, such as model.decoder")
    check_type("config", config, CompressionConfig, "laconic.config.methods.CompressionConfig(…)")
    resolve_position_scheme(config, decoder.config)
    if config.adapter_scope == "write" and not has_base_model:
        raise UsageError('adapter_scope = "write" needs an adapter; set train.trainable = "lora"')
    if config.bos == "sink" and bos_token_id is None:
        raise UsageError('bos = "sink", but the tokenizer has no bos token; use "none"')
    policy, budget = config.memory_policy, config.max_memory_vectors
    if policy == "budgeted" and (config.summary in ("pool", "select") or config.trigger_placement == "replace"):
        key = "summary" if config.trigger_placement == "insert" else "trigger_placement"
        raise UsageError(f'memory_policy = "budgeted" recompresses without text, but this {key} needs text; use "fifo"')
    least = {"budgeted": 2 * config.fixed_length, "fifo": config.fixed_length}.get(policy, 0)
    if budget is not None and budget < least:
        raise UsageError(f'max_memory_vectors = {budget}: memory_policy = "{policy}" needs at least {least}')
