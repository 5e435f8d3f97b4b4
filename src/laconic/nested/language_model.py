"""Train a Hope model on documents: every token is scored before it is learned.

Nested Learning arXiv:2512.24695. Rows are documents of their own, or streams: row b of a batch continues row b of the
last batch, on the state that was returned there, until its document ends.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

from jaxtyping import Bool, Int
from torch import Tensor, nn

from laconic.batches import DocumentBatch
from laconic.config.nested import CMSConfig, InnerLoopConfig, find_untrained_level
from laconic.errors import UsageError
from laconic.interfaces import StepOutput
from laconic.losses import count_scored, masked_cross_entropy
from laconic.nested.hope.model import Hope
from laconic.nested.metrics import DeadLevelMonitor, level_chunk_sizes, reading_metrics
from laconic.nested.nan_check import find_nonfinite
from laconic.nested.state import FastWeightState, reset_rows
from laconic.nested.state_file import NODE_TYPES


class LMInputs(NamedTuple):
    """Tokens that are read of a batch, and the target of each."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"] | None
    targets: Int[Tensor, "B T"]


def prepare_inputs(batch: DocumentBatch) -> LMInputs:
    """Return the tokens to read.

    These are all columns. Of streams without labels the last column is left out: it is a target, and the first token
    of the next batch.
    """
    is_stream = batch.document_starts is not None and batch.labels is None
    n = batch.input_ids.shape[1] - is_stream
    mask = batch.attention_mask[:, :n]
    return LMInputs(batch.input_ids[:, :n], None if bool(mask.all()) else mask, batch.targets[:, :n])


class NestedLanguageModel(nn.Module):
    """A Hope model in training, a `Method`: cross-entropy of scored tokens while memories and levels learn.

    Args:
        decoder: the model.
        config: which gradients flow through inner updates; with `enabled` False only the slow weights learn.
    """

    state_types = NODE_TYPES

    def __init__(self, decoder: Hope, config: InnerLoopConfig | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = config or InnerLoopConfig()
        self.dead_level_monitor = DeadLevelMonitor(level_chunk_sizes(decoder))

    def loss_denominators(self, batch: DocumentBatch) -> dict[str, float]:
        """Return the number of scored tokens, and of rows, in all parts of a batch."""
        parts = batch.sequential_parts
        scored = sum(count_scored(prepare_inputs(part).targets) for part in parts)
        return {"scored": scored, "rows": float(sum(part.B for part in parts))}

    def forward(self, batch: DocumentBatch, state: FastWeightState | None = None) -> StepOutput:
        """Return the mean cross-entropy per scored token, metrics, and the new state.

        Metrics are "nats", "accuracy" (fraction of correct next tokens), and those of `reading_metrics`. The state of
        the last batch is used only in rows that continue a document.
        """
        inputs = prepare_inputs(batch)
        total = batch.loss_denominators or self.loss_denominators(batch)
        before = prepare_state(self.decoder, batch, state)
        output = self.decoder.read_tokens(
            inputs.input_ids,
            before,
            attention_mask=inputs.attention_mask,
            update_weights=self.config.enabled,
            outer_gradient=self.config.outer_gradient,
            truncate_after=self.config.truncate_after,
        )
        after = cast(FastWeightState, output.cache)
        loss, accuracy = masked_cross_entropy(
            self.decoder.logits, output.hidden_states, inputs.targets, denominator=total["scored"]
        )
        metrics = {"nats": loss.detach(), "accuracy": accuracy.detach()}
        row_tokens = batch.attention_mask[:, : inputs.input_ids.shape[1]].sum(1).float().mean()
        reading = reading_metrics(self.decoder, before, after, inputs.input_ids, row_tokens, batch.step)
        row_share = batch.B / total["rows"]  # micro-batches sum to the mean over all rows
        metrics |= {name: (row_share * x).to(loss) for name, x in reading.items()}
        return StepOutput(loss, metrics, carry_state(self.decoder, after))

    def locate_nonfinite(self, batch: DocumentBatch, state: FastWeightState | None) -> str:
        """Read a batch again and describe the first level or memory that is not finite, or return ""."""
        if not self.config.enabled:
            return ""
        inputs, before = prepare_inputs(batch), prepare_state(self.decoder, batch, state)
        output = self.decoder.read_tokens(inputs.input_ids, before, attention_mask=inputs.attention_mask)
        location = find_nonfinite(output.cache)
        return location.describe(batch.document_ids) if location else ""

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Warn once of each level that does not change."""
        if self.config.enabled and not self.decoder.hope_config.cms_shape(0).is_frozen:
            self.dead_level_monitor.observe(metrics)


def prepare_state(decoder: Hope, batch: DocumentBatch, state: FastWeightState | None) -> FastWeightState:
    """Return the state before a batch, reset in the rows that begin a document."""
    if state is None:
        return decoder.initial_state(batch.B)
    if batch.document_starts is None or not bool(batch.document_starts.any()):
        return state
    return reset_rows(state, batch.document_starts.nonzero()[:, 0].cpu())


def carry_state(decoder: Hope, state: FastWeightState) -> FastWeightState:
    """Return the state for the next batch: levels and memories continue, attention starts with an empty cache.

    Attention therefore reads one batch at a time. An open chunk keeps the cache that it was read with.
    """
    embedding = cast(Tensor, decoder.token_embedding.weight)
    layers = tuple(
        layer if layer.cache is None else replace(layer, cache=decoder.empty_cache(len(state.position), embedding))
        for layer in state.layers
    )
    return replace(state, layers=layers)


def check_levels(config: CMSConfig, row_tokens: int, inner_loop: InnerLoopConfig) -> None:
    """Raise `UsageError` for a level that no outer gradient reaches, with `row_tokens` between optimizer updates."""
    error = find_untrained_level(config, row_tokens, inner_loop)
    if error:
        raise UsageError(f"cms.chunk_sizes: {error}")
