"""Train a Hope model on documents: every token is scored before it is learned.

Nested Learning arXiv:2512.24695. Rows are documents of their own, or streams: row b of a batch continues row b of the
last batch, on the state that was returned there, until its document ends. In metrics, levels are numbered by their
chunk sizes, the fastest 0, over all layers.

Symbols: theta_0 a level's start, Δθ its change.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.batches import DocumentBatch
from laconic.config.nested import InnerLoopConfig
from laconic.interfaces import StepOutput
from laconic.losses import count_scored, masked_cross_entropy
from laconic.nested.cms.layer import require_levels
from laconic.nested.cms.level import CMSParams, add, frobenius_norm, scale, start_weight
from laconic.nested.dead_levels import DeadLevelMonitor
from laconic.nested.hope.model import Hope
from laconic.nested.hope.task_updates import cms_params_of
from laconic.nested.memory_metrics import memory_metrics
from laconic.nested.nan_check import find_nonfinite
from laconic.nested.state import CMSLevelState, FastWeightState, LowRankChange, num_bytes, reset_rows
from laconic.nested.state_file import NODE_TYPES

MEMORY_METRICS_EVERY = 10  # steps; metrics of memories take a fifth of a small step
Metrics = dict[str, Tensor]


class LMInputs(NamedTuple):
    """The tokens of a batch that are read, and the target of each."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"] | None
    targets: Int[Tensor, "B T"]


def prepare_inputs(batch: DocumentBatch) -> LMInputs:
    """Return the tokens to read and their targets.

    The last token of a stream without labels is only a target; the next batch reads it.
    """
    n = batch.input_ids.shape[1]
    if batch.document_starts is not None and batch.labels is None:
        n -= 1
    mask = batch.attention_mask[:, :n]
    return LMInputs(batch.input_ids[:, :n], None if bool(mask.all()) else mask, batch.targets[:, :n])


class NestedLanguageModel(nn.Module):
    """A Hope model in training, a `Method`: cross-entropy of scored tokens while memories and levels learn.

    Its `config` says which gradients flow through inner updates; with `enabled` False only the slow weights learn.
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
        after = output.cache
        loss, accuracy = masked_cross_entropy(
            self.decoder.logits, output.hidden_states, inputs.targets, total["scored"]
        )
        metrics = {"nats": loss.detach(), "accuracy": accuracy.detach()}
        row_tokens = batch.attention_mask[:, : inputs.input_ids.shape[1]].sum(1).float().mean()
        reading = reading_metrics(self.decoder, before, after, inputs, row_tokens, batch.step)
        row_share = batch.B / total["rows"]  # micro-batches sum to the mean over all rows
        metrics |= {name: (row_share * x).to(loss) for name, x in reading.items()}
        return StepOutput(loss, metrics, carry_state(self.decoder, after))

    def locate_nonfinite(self, batch: DocumentBatch, state: FastWeightState | None) -> str:
        """Read a batch again and describe the first level or memory that is not finite, or return ""."""
        if not self.config.enabled:
            return ""
        inputs = prepare_inputs(batch)
        before = prepare_state(self.decoder, batch, state)
        output = self.decoder.read_tokens(inputs.input_ids, before, attention_mask=inputs.attention_mask)
        return find_nonfinite(output.cache, batch.document_ids)

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Warn once about each level that does not change."""
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
    layers = tuple(
        layer if layer.cache is None else replace(layer, cache=decoder.empty_cache(len(state.position)))
        for layer in state.layers
    )
    return replace(state, layers=layers)


def level_chunk_sizes(model: Hope) -> tuple[int, ...]:
    """Return the distinct chunk sizes of a model's levels, fastest first."""
    return tuple(sorted({C for sizes in model.hope_config.chunk_sizes for C in sizes}))


@torch.no_grad()
def reading_metrics(
    model: Hope,
    before: FastWeightState,
    after: FastWeightState,
    inputs: LMInputs,
    row_tokens: Float[Tensor, ""],
    step: int = 0,
) -> Metrics:
    """Return the metrics of reading a batch, as means over rows and layers.

    Metrics of level N are `levelN_updates`, updates per row; `levelN_update_size`, ‖Δθ‖ / ‖theta_0‖ per update;
    `levelN_change`, the same since the start; and `levelN_rank`, the rank at which its change is stored.

    Metrics of a group of memories, in every tenth step, are `_half_life` in tokens and `_step` (mean, and quantiles
    `_low` and `_high`, of the last tokens of the longest row); `_capped`, the share of writes that the cap bounds;
    and `_norm`, ‖P‖ / √E.
    """
    metrics = {"row_tokens": row_tokens, "state_bytes": torch.tensor(num_bytes(after) / len(after.position))}
    for i, chunk_size in enumerate(level_chunk_sizes(model)):
        metrics |= {f"level{i}_{name}": x for name, x in level_metrics(model, before, after, chunk_size).items()}
    if step % MEMORY_METRICS_EVERY:
        return metrics
    return metrics | memory_metrics(model, after, inputs.input_ids, inputs.attention_mask)


def level_metrics(model: Hope, before: FastWeightState, after: FastWeightState, chunk_size: int) -> Metrics:
    """Return the metrics of the levels with this chunk size, averaged over layers."""
    values: dict[str, list[Tensor]] = {"updates": [], "update_size": [], "change": [], "rank": []}
    for params, old_layer, new_layer in zip(cms_params_of(model), before.layers, after.layers, strict=True):
        for l, C in enumerate(params.shape.chunk_sizes):
            if chunk_size != C:
                continue
            old = require_levels(old_layer)[l]
            new = require_levels(new_layer)[l]
            num_updates = (new.num_updates - old.num_updates).float()
            step_norm, total_norm = relative_change_norms(params, l, old, new)
            values["updates"].append(num_updates.mean())
            values["update_size"].append((step_norm.cpu() / num_updates.clamp(min=1)).mean())
            values["change"].append(total_norm.mean().cpu())
            values["rank"].append(torch.tensor(list(map(stored_rank, new.change.values()))).mean())
    return {name: torch.stack(xs).mean() for name, xs in values.items()}


def stored_rank(change: LowRankChange | Tensor) -> float:
    return float(change.right.shape[1] if isinstance(change, LowRankChange) else min(change.shape[-2:]))


def relative_change_norms(
    params: CMSParams, l: int, before: CMSLevelState, after: CMSLevelState
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return ‖Δθ‖ / ‖theta_0‖ of a level over all its maps, since `before` and since its start."""
    names = params.shape.projections
    start = torch.stack([start_weight(params, l, name).square().sum() for name in names]).sum().clamp(min=1e-30)
    steps = [frobenius_norm(add(after.change[name], scale(before.change[name], -1.0))).square() for name in names]
    totals = [frobenius_norm(after.change[name]).square() for name in names]
    return (torch.stack(steps).sum(0) / start).sqrt(), (torch.stack(totals).sum(0) / start).sqrt()
