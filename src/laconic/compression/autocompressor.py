"""AutoCompressors: a model reads a long text segment by segment, and keeps of each a few vectors that it reads back.

AutoCompressors arXiv:2305.14788 (code 80352a4), fixed numbers of vectors; with learned numbers its variable-length
variant (jo100sun/AutoCompressors bb15bc1), whose law and estimators stand in stop_head.py and estimators.py.

Symbols: S_i segment i; M_i memory after it; sigma^i its vectors, N_i of them; CE_i nats of segment i; beta nats a
vector costs, omega how much of that counts yet. B rows, T columns of text, M slots, K places, w segments of a window,
D width.
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
from laconic.compression.halting import inference as halting_inference
from laconic.compression.halting.estimators import PriceState, length_entropy, penalty_ramp, update_price
from laconic.compression.halting.inference import StopRule
from laconic.compression.halting.losses import length_loss, mark_priced_segments
from laconic.compression.halting.stop_distribution import RandomStream, expected_length
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import max_segments
from laconic.compression.segment import MemoryPrompt, build_memory_prompt, resolve_position_scheme
from laconic.compression.segment_model import SegmentModel
from laconic.compression.summary_tokens import NO_MEAN_LENGTH, SummaryParameters
from laconic.compression.training_window import TrainingPhase, WindowRun
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.errors import UsageError
from laconic.interfaces import StepOutput
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad

BIASED_ESTIMATORS = ("soft", "straight_through")


class AutoCompressor(nn.Module):
    """Reading with a memory, whole: what it is trained by, and compressing and reading a segment.

    `steps` are the updates of the run, by which price and head begin. `bos` is the id that prompts begin with where
    the settings ask for one; `base` a context in which the decoder reads without its adapter, for adapt write.
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
        check_settings(decoder, config, stop_head_config, bos_token_id, base_model_context is not None)
        self.decoder, self.summaries, self.config, self.stop_head_config = decoder, summaries, config, stop_head_config
        self.total_steps, self.seed = total_steps, seed
        self.segment_model = SegmentModel(decoder, summaries, bos_token_id, base_model_context)

    def training_phase(self, step: int) -> TrainingPhase:
        """What learns at an update: the decoder on given lengths, both, or the head alone."""
        if self.stop_head_config is None or self.config.length_policy not in ("stop_head", "classifier"):
            return "lengths"
        if self.stop_head_config.joint_training or self.stop_head_config.estimator in ("soft", "straight_through"):
            return "both"
        return "head" if step >= self.head_only_step else "lengths"

    @property
    def head_only_step(self) -> int:
        """The update from which the head learns alone, where it does not learn with the decoder."""
        return math.ceil(
            (0.0 if self.stop_head_config is None else self.stop_head_config.head_only_after) * self.total_steps
        )

    def resets_optimizer_state(self, batch: DocumentBatch) -> bool:
        """At the update where the head begins to learn alone."""
        return self.training_phase(batch.step) == "head" and batch.step == self.head_only_step

    def loss_denominators(self, batch: DocumentBatch) -> dict[str, float]:
        """Rows; scored tokens, in all and by the place of a segment in its window; compressions that are priced."""
        phase = self.training_phase(batch.step)
        found: dict[str, float] = {"rows": float(batch.B), "scored": 0.0, "compressions": 0.0}
        found |= {f"scored.{i + 1}": 0.0 for i in range(batch.windows[0])}
        for piece in batch.sequential_parts:
            course = WindowRun(
                self.segment_model, piece, self.segment_model.empty_memory(batch.B), phase, self.seed, "length"
            )
            for i, columns in enumerate(piece.segment_slices):
                n = float((course.targets[:, columns] != IGNORE_INDEX).sum())
                found["scored"] += n
                found[f"scored.{i + 1}"] += n
            found["compressions"] += float(mark_priced_segments(course).sum())
        return found

    def forward(self, batch: DocumentBatch, state: SummaryMemory | None = None) -> StepOutput:
        """Loss and parts of a window; `state` is the memory that enters it, the step's the one handed on.

        Raises `Usage` (2) for windows in which nothing reads a summary, and for segments that do not fit the model.
        """
        self.check_window(batch)
        memory = self.segment_model.empty_memory(batch.B) if state is None else state
        phase, how = self.training_phase(batch.step), self.stop_head_config
        twice = (
            how is not None
            and phase != "lengths"
            and how.estimator == "reinforce"
            and how.reinforce_baseline == "draws"
        )
        streams: tuple[RandomStream, ...] = (
            ("length", "second") if twice and self.config.length_policy == "stop_head" else ("length",)
        )
        courses = [WindowRun(self.segment_model, batch, memory, phase, self.seed, stream).run() for stream in streams]
        sums = batch.loss_denominators or self.loss_denominators(batch)
        weight = self.row_loss_weights(courses[0], sums).to(courses[0].losses.dtype)
        loss = torch.stack([(c.losses.sum(1) * weight).sum() for c in courses]).mean()
        if phase != "lengths" and how is not None:
            omega = (
                1.0 if phase == "head" else penalty_ramp(batch.step, self.total_steps, how.cost_start, how.cost_ramp)
            )
            extra = length_loss(courses, how, float(self.summaries.steered[0]), omega, weight, sums)
            loss = loss + extra + self.summaries.zero_loss
        return StepOutput(loss, self.compute_metrics(courses[0], sums), self.carry_memory(courses[0], memory))

    def check_window(self, batch: DocumentBatch) -> None:
        """Raises `Usage` (2) for a window of one segment, one that is several, and a kernel that has no gate."""
        w, n = batch.windows[0], len(batch.segment_ends)
        if w < 2:
            raise UsageError(
                f"window: {w} leaves no segment that reads a summary inside its own window, so nothing would learn to "
                "compress; use 2 or more"
            )
        if n > w:
            raise UsageError(
                f"window: {n} segments where windows are of {w}; give the pieces of a batch one after another"
            )
        gated = self.config.summary == "select" or (
            self.training_phase(batch.step) == "both"
            and self.stop_head_config is not None
            and self.stop_head_config.estimator in BIASED_ESTIMATORS
        )
        if gated and self.decoder.attn_implementation == "flex":
            raise UsageError(
                'attention "flex": this kernel has no gradient for a bias, so a gate cannot learn; take sdpa'
            )

    def row_loss_weights(self, window: WindowRun, denominators: Mapping[str, float]) -> Float[Tensor, " B"]:
        """What a nat of each row counts in the loss: by tokens of the step, or by windows and their tokens."""
        n = (window.targets != IGNORE_INDEX).sum(1)
        if self.config.loss_reduction == "token":
            return torch.full_like(n, 1 / (denominators["scored"] or 1.0), dtype=torch.float64)
        return (n > 0) / (n.clamp(min=1).double() * (denominators["rows"] or 1.0))

    def compute_metrics(self, window: WindowRun, denominators: Mapping[str, float]) -> dict[str, Tensor]:
        """Nats and right answers per scored token, nats by the place of a segment in its window, and lengths."""
        tokens, rows = denominators["scored"] or 1.0, denominators["compressions"] or 1.0
        nats, here = window.losses.detach(), mark_priced_segments(window)
        found = {"nats": nats.sum() / tokens, "right": torch.stack(window.num_correct).sum() / tokens}
        for i in range(window.batch.windows[0]):
            own = nats[:, i].sum() if i < window.w else nats.new_zeros(())
            found[f"nats.{i + 1}"] = own / (denominators[f"scored.{i + 1}"] or 1.0)
        hard = window.hard_lengths.masked_fill(~here, 0)
        found["length"] = hard.sum() / rows
        if (
            self.stop_head_config is None
            or self.config.length_policy != "stop_head"
            or self.training_phase(window.batch.step) == "lengths"
        ):
            return found
        index = self.stop_head_config.stop_position
        for name, function in (("expected", expected_length), ("entropy", length_entropy)):
            each = window.map_stop_logits(partial(function, stop_position=index)).detach()
            found[name] = each.masked_fill(~here, 0.0).sum() / rows
        found["at_1"] = ((hard == 1) & here).sum() / rows
        found["at_K"] = ((hard == self.config.fixed_length) & here).sum() / rows
        found["price"] = self.summaries.steered[0].float() * here.sum() / rows
        return found

    def carry_memory(self, window: WindowRun, before: SummaryMemory) -> SummaryMemory | None:
        """The memory for the next window: soft where lengths are, unless it is to be hard."""
        state = window.carried_memory
        if state is None or state.log_s is None:
            return state
        if not self.has_soft_lengths:
            return replace(state, log_s=None)
        if self.config.carry_between_windows != "hard":
            return state
        lengths = torch.cat(
            [before.vectors_per_segment, window.hard_lengths[:, : state.num_segments - before.num_segments]], 1
        )
        return state.truncate_to(lengths)

    @property
    def has_soft_lengths(self) -> bool:
        """Whether lengths are soft while they are learned."""
        return (
            self.config.length_policy == "stop_head"
            and self.stop_head_config is not None
            and self.stop_head_config.estimator == "soft"
        )

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """After an optimizer step with these numbers: the price is moved where the settings say so."""
        if (
            self.stop_head_config is None
            or self.stop_head_config.target_mean_length is None
            or "expected" not in metrics
        ):
            return
        beta, mean = float(self.summaries.steered[0]), float(self.summaries.steered[1])
        held = PriceState(beta, None if mean == NO_MEAN_LENGTH else mean)
        moved = update_price(
            held,
            metrics["expected"],
            self.stop_head_config.target_mean_length,
            self.stop_head_config.cost_step_size,
            self.stop_head_config.max_length_cost,
        )
        self.summaries.steered.copy_(torch.tensor([moved.beta, moved.mean_length], dtype=torch.float64))

    def compress(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | None = None,
        memory: SummaryMemory | None = None,
        rule: StopRule | None = None,
    ) -> SummaryMemory:
        """One segment more in a memory, without gradients; a row without live tokens keeps what it has.

        Raises `Usage` (2) for a way to stop that was not learned, a length not allowed, and what does not fit.
        """
        attention_mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        memory = self.segment_model.empty_memory(len(input_ids)) if memory is None else memory
        with eval_no_grad(self):
            return halting_inference.compress_into_memory(
                self.segment_model,
                memory,
                input_ids,
                attention_mask,
                rule or halting_inference.default_rule(self.segment_model),
            )

    def read_text(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | None = None,
        memory: SummaryMemory | None = None,
    ) -> Float[Tensor, "B T D"]:
        """States of a text that follows a memory, after the final norm; `decoder.logits` makes words of them."""
        attention_mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        memory = self.segment_model.empty_memory(len(input_ids)) if memory is None else memory
        self.segment_model.check_fits(memory, input_ids.shape[1], compresses=False)
        return self.segment_model.read_segment(memory, input_ids, attention_mask)

    def nll(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        loss_mask: Bool[Tensor, "B T"],
        memory: SummaryMemory | None = None,
    ) -> Float[Tensor, " B"]:
        """Summed cross-entropy of the scored tokens of each row, each predicted by the live token before it."""
        with eval_no_grad(self):
            return self.segment_model.segment_loss(
                self.read_text(input_ids, attention_mask, memory),
                next_token_targets(input_ids, attention_mask, loss_mask),
            ).nll

    def build_prompt(self, memory: SummaryMemory) -> MemoryPrompt:
        """What stands before a text that is generated: read it once, and fork its cache."""
        return build_memory_prompt(self.decoder, self.config, memory, self.segment_model.bos_token_id)

    def max_segments(self, segment_tokens: int) -> int | None:
        """How many segments of so many tokens can be compressed one after another; None: any number."""
        return max_segments(self.decoder.config, self.config, self.segment_model.prefix_length, segment_tokens)


def check_settings(
    decoder: Decoder,
    config: CompressionConfig,
    stop_head_config: StopHeadConfig | None,
    bos_token_id: int | None,
    has_base_model: bool,
) -> None:
    """Raises `Usage` (2) for settings that this decoder, or each other, cannot be meant with."""
    resolve_position_scheme(config, decoder.config)
    if config.adapter_scope == "write" and not has_base_model:
        raise UsageError('adapt "write": the decoder has no adapter that could write alone; train with lora')
    if config.bos in ("first", "sink") and bos_token_id is None:
        raise UsageError(f'bos "{config.bos}": the tokenizer has no such token; take none')
    if config.memory_policy == "budgeted" and config.summary in ("pool", "select"):
        raise UsageError(
            f'memory "budgeted" with generator "{config.summary}": a memory is compressed without text, and its '
            'vectors are made of text; take "fifo"'
        )
    need = {"budgeted": 2 * config.fixed_length, "fifo": config.fixed_length}.get(config.memory_policy, 0)
    if config.max_memory_vectors is not None and config.max_memory_vectors < need:
        raise UsageError(
            f'budget {config.max_memory_vectors}: memory "{config.memory_policy}" needs room for {need} vectors; raise it'
        )
    if config.carry_between_windows == "soft" and not (
        stop_head_config is not None and stop_head_config.estimator == "soft"
    ):
        raise UsageError('carry "soft": lengths are hard in training, and so is what is handed on; leave it out')
