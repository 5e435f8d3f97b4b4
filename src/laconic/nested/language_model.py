"""A language model that learns while it reads, trained on documents: what it reads is scored before it is learned.

Nested Learning arXiv:2512.24695. Rows are documents of their own, or lanes: row b of a batch goes on where row b of the
last one ended, on the state that it gave, until a document ends there.

Symbols: T tokens of a row; C_l the chunk of level l.
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
from laconic.nested import nan_check
from laconic.nested import state as values
from laconic.nested.hope.model import Hope
from laconic.nested.metrics import DeadLevelMonitor, level_chunk_sizes, reading_metrics
from laconic.nested.state import FastWeightState
from laconic.nested.state_file import NODE_TYPES


class LMInputs(NamedTuple):
    """What is read of a batch, and what it predicts."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"] | None
    targets: Int[Tensor, "B T"]


def prepare_inputs(batch: DocumentBatch) -> LMInputs:
    """All columns; of lanes without labels all but the last, which is a target and the next batch's first token."""
    n = batch.input_ids.shape[1] - (batch.document_starts is not None and batch.labels is None)
    live = batch.attention_mask[:, :n]
    return LMInputs(batch.input_ids[:, :n], None if bool(live.all()) else live, batch.targets[:, :n])


class NestedLanguageModel(nn.Module):
    """A Hope in training: nats of scored tokens, while memories and levels learn of all that is read.

    With `inner_loop.enabled` False nothing learns but the slow weights: the control. Nothing of a batch is read of the
    state before but where `fresh` says that rows go on.
    """

    state_types = NODE_TYPES

    def __init__(self, decoder: Hope, config: InnerLoopConfig | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = config or InnerLoopConfig()
        self.dead_level_monitor = DeadLevelMonitor(level_chunk_sizes(decoder))

    def loss_denominators(self, batch: DocumentBatch) -> dict[str, float]:
        """Scored tokens, and rows, of all pieces."""
        pieces = batch.sequential_parts
        return {
            "scored": sum(count_scored(prepare_inputs(p).targets) for p in pieces),
            "rows": float(sum(p.B for p in pieces)),
        }

    def forward(self, batch: DocumentBatch, state: FastWeightState | None = None) -> StepOutput:
        """Nats per scored token, the share of `right` ones, and what the reading did, as `telemetry.told` has it."""
        text, how = prepare_inputs(batch), self.config
        total = batch.loss_denominators or self.loss_denominators(batch)
        before = prepare_state(self.decoder, batch, state)
        seen = self.decoder.read_tokens(
            text.input_ids,
            before,
            attention_mask=text.attention_mask,
            update_weights=how.enabled,
            outer_gradient=how.outer_gradient,
            truncate_after=how.truncate_after,
        )
        after = cast(FastWeightState, seen.cache)
        said = masked_cross_entropy(self.decoder.logits, seen.hidden_states, text.targets, denominator=total["scored"])
        share, tokens = (
            batch.B / total["rows"],
            batch.attention_mask[:, : text.input_ids.shape[1]].sum(1).float().mean(),
        )
        parts = {"nats": said.loss.detach(), "right": said.accuracy.detach()}
        did = reading_metrics(self.decoder, before, after, text.input_ids, tokens, batch.step)
        parts |= {name: (share * x).to(said.loss) for name, x in did.items()}
        return StepOutput(said.loss, parts, carry_state(self.decoder, after))

    def locate_nonfinite(self, batch: DocumentBatch, state: FastWeightState | None) -> str:
        """The level or memory that is first not finite, its layer, row and token (contract.Locating)."""
        text, before = prepare_inputs(batch), prepare_state(self.decoder, batch, state)
        found = (
            nan_check.find_first_bad_token(self.decoder, text.input_ids, before, attention_mask=text.attention_mask)
            if self.config.enabled
            else None
        )
        return found.describe(batch.document_ids) if found else ""

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Warns once of each level that does not move (contract.Steered)."""
        if self.config.enabled and not self.decoder.hope_config.cms_shape(0).is_frozen:
            self.dead_level_monitor.observe(metrics)


def prepare_state(decoder: Hope, batch: DocumentBatch, state: FastWeightState | None) -> FastWeightState:
    """The state before a batch: a start for every row, or for the fresh ones of lanes."""
    if state is None:
        return decoder.initial_state(batch.B)
    if batch.document_starts is None or not bool(batch.document_starts.any()):
        return state
    return values.reset_rows(state, batch.document_starts.nonzero()[:, 0].cpu())


def carry_state(decoder: Hope, state: FastWeightState) -> FastWeightState:
    """What the next batch goes on from: attention has read nothing, levels and memories stay.

    So attention reads a batch at once, and its positions end with it; an open chunk keeps what it was read on.
    """
    words = cast(Tensor, decoder.token_embedding.weight)
    layers = tuple(
        layer if layer.cache is None else replace(layer, cache=decoder.empty_cache(len(state.position), words))
        for layer in state.layers
    )
    return replace(state, layers=layers)


def check_levels(config: CMSConfig, row_tokens: int, inner_loop: InnerLoopConfig) -> None:
    """Raises `Usage` (2) for a level that no outer gradient reaches, where rows have `tokens` between two updates."""
    fault = find_untrained_level(config, row_tokens, inner_loop)
    if fault:
        raise UsageError(f"cms.chunk_sizes: {fault}")
