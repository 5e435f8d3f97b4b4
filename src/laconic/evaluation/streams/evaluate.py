"""Score tokens with a stateful language model: the NLL of every target, read on a fork of a state.

A plain decoder is a stateful model too; its state is its KV cache. Shapes: B items, T columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.evaluation.streams.metrics import MetricSums
from laconic.evaluation.text_loss import score_grid
from laconic.interfaces import StatefulLM
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.nested.hope.model import Hope
from laconic.nested.nan_check import read_tokens_checked
from laconic.nested.state import FastWeightState, LayerState

READ_CHUNK = 1024  # columns per call


class CacheAsState:
    """A decoder as a stateful model: its state is its KV cache, and no weights are updated."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    def initial_state(self, batch_size: int) -> FastWeightState:
        cache = KVCache.empty(self.config, batch_size, self.decoder.dtype, self.decoder.device)
        return FastWeightState((LayerState(cache=cache),), torch.zeros(batch_size, dtype=torch.long))

    def read_tokens(
        self,
        input_ids: Tensor,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        update_weights: bool = True,
    ) -> DecoderOutput:
        """Read ids after the cache; `target_mask` and `update_weights` have no effect."""
        before: FastWeightState = self.initial_state(len(input_ids)) if state is None else state
        embeds = self.decoder.embed(input_ids)
        output = self.decoder(embeds, before.layers[0].cache, attention_mask=attention_mask)
        num_tokens = input_ids.shape[1] if attention_mask is None else attention_mask.sum(1).cpu()
        after = FastWeightState((LayerState(cache=output.cache),), before.position + num_tokens)
        return DecoderOutput(output.hidden_states, cast(Any, after), {})

    def logits(self, hidden_states: Tensor) -> Tensor:
        return self.decoder.logits(hidden_states)


def as_stateful(decoder: Decoder) -> StatefulLM:
    """Return a decoder as a stateful model; the state of a plain one is its KV cache."""
    return decoder if isinstance(decoder, Hope) else CacheAsState(decoder)


@dataclass(frozen=True)
class StreamCondition:
    """How items are read: by a model, with or without weight updates, the state carried between passages or not."""

    name: str
    model: StatefulLM
    update_weights: bool
    carry_state: bool = False


class TokenScores(NamedTuple):
    """NLL of each target and whether it was the most likely token, 0 where there is no target; the new state."""

    nll: Float[Tensor, "B T"]
    correct: Bool[Tensor, "B T"]
    state: FastWeightState


@torch.no_grad()
def score_tokens(
    model: StatefulLM,
    batch: DocumentBatch,
    state: FastWeightState,
    update_weights: bool,
    freeze_last_segment: bool = False,
) -> TokenScores:
    """Read documents on a fork of a state and score their targets.

    With `freeze_last_segment`, weights are not updated on the last segment, the answer, where attention sees it anyway.
    """
    targets = batch.targets
    T = batch.input_ids.shape[1]
    last_start = batch.segment_slices[-1].start if freeze_last_segment else T
    nll = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    correct = torch.zeros_like(batch.attention_mask)
    for a, b in pairwise([*range(0, last_start, READ_CHUNK), *range(last_start, T, READ_CHUNK), T]):
        output = read_tokens_checked(
            model,
            batch.input_ids[:, a:b],
            state,
            attention_mask=batch.attention_mask[:, a:b],
            update_weights=update_weights and (a < last_start or state.attention_cache is None),
            row_names=batch.document_ids,
        )
        state = output.state
        nll[:, a:b], correct[:, a:b] = score_grid(model.logits, output.hidden_states, targets[:, a:b])
    return TokenScores(nll, correct, state)


def count_level_updates(state: FastWeightState) -> list[tuple[float, ...]]:
    """Return for each row how often each level was updated, mean over the layers that have it."""
    per_layer = [[level.num_updates.double() for level in layer.cms.levels] for layer in state.layers if layer.cms]
    levels = ([counts for counts in level if counts is not None] for level in zip_longest(*per_layer))
    means = [torch.stack(counts).mean(0).tolist() for counts in levels]
    return [tuple(mean[b] for mean in means) for b in range(len(state.position))]


def build_metrics(sums: MetricSums, level_updates: Sequence[float], state_bytes: int) -> dict[str, Any]:
    return {"sums": sums, "level_updates": level_updates, "state_bytes": state_bytes}
