"""A model that learns while it reads, heard: nats of every target, on a fork of a state; and what is kept of an item.

B items, T columns. A plain decoder is heard as well, its cache for a state.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.evaluation.streams.metrics import MetricSums
from laconic.interfaces import StatefulLM
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.nested import nan_check
from laconic.nested import state as values
from laconic.nested.state import FastWeightState, LayerState
from laconic.storage.strict_json import to_canonical_json

READ_CHUNK = 1024  # columns read in one call
MAX_LOGITS = 1 << 22  # logits computed at once


class CacheAsState:
    """A decoder as a learner: what it has read is its cache, and nothing in it learns."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def config(self) -> DecoderConfig:
        """The decoder's."""
        return self.decoder.config

    def initial_state(self, batch_size: int) -> FastWeightState:
        """Nothing read."""
        words = cast(Tensor, self.decoder.token_embedding.weight)
        cache = KVCache.empty(self.config, batch_size, words.dtype, words.device)
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
        """Reads ids behind the cache; `learn` and `taught` mean nothing."""
        before: FastWeightState = self.initial_state(len(input_ids)) if state is None else state
        seen = self.decoder(self.decoder.embed(input_ids), before.layers[0].cache, attention_mask=attention_mask)
        added = (
            torch.full_like(before.position, input_ids.shape[1])
            if attention_mask is None
            else attention_mask.sum(1).cpu()
        )
        return DecoderOutput(
            seen.hidden_states, cast(Any, FastWeightState((LayerState(cache=seen.cache),), before.position + added)), {}
        )

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The decoder's."""
        return self.decoder.logits(hidden_states)


@dataclass(frozen=True)
class StreamCondition:
    """How items are read: whether fast weights move, and whether a stretch goes on where the one before it ended."""

    name: str
    update_weights: bool
    carry_state: bool = False


class StreamItemResult(NamedTuple):
    """An item in one way: its cells; how often each level fired, the mean over layers; bytes of the state."""

    sums: MetricSums
    level_updates: tuple[float, ...]
    state_bytes: int


class StreamRecord(NamedTuple):
    """An item in every way."""

    id: str
    conditions: Mapping[str, StreamItemResult]

    def to_json_line(self) -> str:
        """The row as one line of JSON."""
        return (
            to_canonical_json({"id": self.id, "ways": {way: said._asdict() for way, said in self.conditions.items()}})
            + "\n"
        )


def parse_stream_record(line: str) -> StreamRecord:
    """The row that `line` wrote."""
    found, ways = json.loads(line), dict[str, StreamItemResult]()
    for way, x in found["ways"].items():
        cells = {cell: (total, n) for cell, (total, n) in x["cells"].items()}
        ways[way] = StreamItemResult(cells, tuple(x["updates"]), x["bytes"])
    return StreamRecord(found["id"], ways)


class TokenScores(NamedTuple):
    """What reading gave: nats of each target and whether it was the likeliest, 0 where there is none; the state."""

    nll: Float[Tensor, "B T"]
    correct: Bool[Tensor, "B T"]
    state: FastWeightState


def score_tokens(
    model: StatefulLM,
    batch: DocumentBatch,
    state: FastWeightState,
    update_weights: bool,
    freeze_last_segment: bool = False,
) -> TokenScores:
    """Documents read on a state. An `answer`, the last segment, teaches nothing where a cache lets it be seen."""
    targets, T = batch.targets, batch.input_ids.shape[1]
    last = batch.segment_slices[-1].start if freeze_last_segment else T
    nats, right = torch.zeros(batch.input_ids.shape, dtype=torch.float64), torch.zeros_like(batch.attention_mask)
    for a, b in read_spans(last, T):
        teaches = update_weights and (a < last or all(layer.cache is None for layer in state.layers))
        text, live = batch.input_ids[:, a:b], batch.attention_mask[:, a:b]
        seen = nan_check.read_tokens_checked(
            model, text, state, attention_mask=live, update_weights=teaches, row_names=batch.document_ids
        )
        state = cast(FastWeightState, cast(Any, seen.cache))
        nats[:, a:b], right[:, a:b] = score_targets(model, seen.hidden_states, targets[:, a:b])
    return TokenScores(nats, right, state)


def read_spans(last_start: int, T: int) -> Iterator[tuple[int, int]]:
    """Columns read at once, cut before the last segment."""
    for begin, end in ((0, last_start), (last_start, T)):
        for a in range(begin, end, READ_CHUNK):
            yield a, min(a + READ_CHUNK, end)


def score_targets(
    model: StatefulLM, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Nats of each target, and whether it was the likeliest word."""
    at = targets != IGNORE_INDEX
    states, asked = hidden[at], targets[at]
    nats, right = torch.zeros(len(asked), dtype=torch.float64), torch.zeros_like(asked, dtype=torch.bool)
    step = max(MAX_LOGITS // model.config.vocab_size, 1)
    for i in range(0, len(asked), step):
        rows, here = model.logits(states[i : i + step]).float(), asked[i : i + step]
        nats[i : i + step] = F.cross_entropy(rows, here, reduction="none")
        right[i : i + step] = rows.argmax(-1) == here
    wide, hit = torch.zeros(targets.shape, dtype=torch.float64), torch.zeros_like(at)
    wide[at.cpu()], hit[at] = nats, right
    return wide, hit


def fork_state(model: StatefulLM, prefix_state: FastWeightState | None, B: int) -> FastWeightState:
    """What B items are read on: a fork of one row for each, or nothing read."""
    return model.initial_state(B) if prefix_state is None else values.repeat_rows(prefix_state, B)


def count_level_updates(state: FastWeightState) -> list[tuple[float, ...]]:
    """Of each row, how often each level has fired, the mean over the layers that have one."""
    levels: list[list[Tensor]] = []
    for layer in state.layers:
        for l, level in enumerate(layer.cms.levels if layer.cms else ()):
            levels += [[]] if l == len(levels) else []
            levels[l].append(level.num_updates.double())
    means = [torch.stack(each).mean(0).tolist() for each in levels]
    return [tuple(mean[b] for mean in means) for b in range(len(state.position))]
