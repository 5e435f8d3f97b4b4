"""Read texts of any length into fast weights in parallel, with save and resume."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.batches import next_token_targets
from laconic.batches.padding import PaddedIds
from laconic.errors import UsageError
from laconic.experiment.from_recipe.untrained_levels import read_writer_metadata
from laconic.experiment.resumable_stream import ResumableReading
from laconic.losses import count_scored, masked_cross_entropy
from laconic.nested import nan_check, state_file
from laconic.nested import state as values
from laconic.nested.hope.model import Hope
from laconic.nested.nan_check import ReadOutput
from laconic.nested.state import FastWeightState, LayerState

MIN_HARMFUL_INCREASE = 0.1  # nats per token above the loss without learning that are worth a warning


class ReadDocument(NamedTuple):
    """A text that a row of a state has read: name, SHA-256 of its UTF-8 bytes, and number of tokens."""

    name: str
    sha256: str
    tokens: int


def spread_documents(documents: Sequence[Sequence[ReadDocument]], n: int) -> list[list[ReadDocument]]:
    """Return what each of n rows has read: the state's documents, or those of its only row for all; else none."""
    rows = documents if len(documents) == n else [*documents] * n or [()] * n
    return [list(row) for row in rows]


def load_read_documents(path: str | Path) -> list[list[ReadDocument]]:
    rows = read_writer_metadata(path).get("documents") or ()
    return [[ReadDocument(*(document[name] for name in ReadDocument._fields)) for document in row] for row in rows]


def repeat_state(state: FastWeightState | None, n: int) -> FastWeightState | None:
    """Return a state of one row for each of n prompts; another state as it is."""
    return state if state is None or n == 1 or len(state.position) != 1 else values.select_rows(state, [0] * n)


class ReadingLoss:
    """Mean loss of the tokens read so far; the first token of each segment is not scored.

    The 1st, 2nd, 4th, 8th … segment is read once more on the same KV cache by a model that has learned nothing. A loss
    above its loss means that learning does harm.
    """

    def __init__(self, model: Hope, window: int) -> None:
        self.model, self.window = model, window
        self.nats, self.num_scored, self.num_segments, self.has_warned = 0.0, 0.0, 0, False

    @property
    def mean(self) -> float:
        """Nats per token; 0 before anything is scored."""
        return self.nats / max(self.num_scored, 1.0)

    def add(self, piece: PaddedIds, hidden_states: Tensor, state: FastWeightState) -> None:
        """Score a segment, from the hidden states with which the model read it on `state`."""
        targets = next_token_targets(piece.input_ids, piece.attention_mask, piece.attention_mask)
        scored = count_scored(targets)
        if not scored:
            return
        loss = float(masked_cross_entropy(self.model.logits, hidden_states, targets).loss)
        self.nats += scored * loss
        self.num_scored += scored
        self.num_segments += 1
        if self.num_segments & (self.num_segments - 1) == 0 and not self.has_warned:
            self.compare_without_learning(piece, targets, loss, state)

    def compare_without_learning(self, piece: PaddedIds, targets: Tensor, loss: float, state: FastWeightState) -> None:
        """Warn if the model would predict a segment better without anything that it has learned."""
        output = read_piece(self.model, forget(self.model, state), piece, self.window, update_weights=False)
        baseline = float(masked_cross_entropy(self.model.logits, output.hidden_states, targets).loss)
        if not loss <= baseline + MIN_HARMFUL_INCREASE:  # also for NaN
            self.has_warned = True
            warnings.warn(
                f"learning does harm: {loss:.2f} nats per token in segment {self.num_segments:,}, {baseline:.2f} "
                "without learning; use a lower learning rate (--inner-lr of a checkpoint, inner_lr of a recipe)",
                stacklevel=2,
            )


class StateReadingJob(ResumableReading[FastWeightState]):
    """Job that reads texts into fast weights; `run` raises NonFiniteError if one is not finite.

    When a row has as many tokens as attention sees (`window`), its cache is emptied and its fast weights stay, however
    the text is cut into segments. Texts continue `initial_state`, which has one row for all of them or one for each.
    """

    kind = "state-reading-job"
    counters = (*ResumableReading.counters, "loss_sums")

    def __init__(self, model: Hope, window: int, initial_state: FastWeightState | None = None) -> None:
        super().__init__(model.device)
        check_chunk_fits(model)
        self.model, self.window, self.initial_state = model, window, initial_state
        self.loss = ReadingLoss(model, window)

    @property
    def loss_sums(self) -> tuple[float, float, int]:
        """Summed loss, scored tokens and segments so far, for a partial file."""
        return self.loss.nats, self.loss.num_scored, self.loss.num_segments

    @loss_sums.setter
    def loss_sums(self, sums: tuple[float, float, int]) -> None:
        self.loss.nats, self.loss.num_scored, self.loss.num_segments = sums

    @property
    def note(self) -> str:
        return f"{self.loss.mean:.2f} nats per token" if self.loss.num_scored else ""

    @property
    def documents(self) -> list[tuple[ReadDocument, ...]]:
        return [(ReadDocument(x.name, x.digest.hexdigest(), sum(x.segments)),) for x in self.texts]

    @torch.no_grad()
    def advance(self, piece: PaddedIds) -> FastWeightState:
        before, self.current = self.current, None
        if before is None:
            B = len(piece.input_ids)
            before = self.model.initial_state(B) if self.initial_state is None else self.initial_state
            first = len(self.texts)
            rows = [0] * B if len(before.position) == 1 else list(range(first, first + B))
            before = before if rows == list(range(len(before.position))) else values.select_rows(before, rows)
        donated = [before]
        before = drop_weights(before)  # now nothing else refers to the weights
        output = read_piece(self.model, donated.pop(), piece, self.window, row_names=self.names)
        self.loss.add(piece, output.hidden_states, before)
        self.tokens += int(piece.attention_mask.sum())
        return output.state

    def append_rows(self, before: FastWeightState | None, done: FastWeightState) -> FastWeightState:
        return done if before is None else values.concat_rows(before, done)

    def to_tensors(self, value: FastWeightState, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        return state_file.flatten_state(value, prefix)

    def from_tensors(self, spec: Any, tensors: Mapping[str, Tensor], prefix: str) -> FastWeightState:
        return values.to(state_file.unflatten_state(spec, tensors, set(tensors)), self.device)


def read_piece(
    model: Hope,
    state: FastWeightState,
    piece: PaddedIds,
    window: int,
    *,
    update_weights: bool = True,
    row_names: Sequence[str] = (),
) -> ReadOutput:
    """Read the next segment of each row, and empty the attention cache of a row whenever it has `window` tokens.

    Reading therefore stops where the first row is full. Raises `NonFiniteError` for a state that is not finite.
    """
    lengths = piece.attention_mask.sum(1).cpu()
    hidden_states = list[Tensor]()
    start = 0
    T = piece.input_ids.shape[1]
    while start < T:
        is_reading = lengths > start
        state = replace(clear_attention_if_full(model, state, is_reading.long(), window), is_donated=True)
        cache = state.attention_cache
        room = T if cache is None else window - int(cache.valid.sum(1).cpu()[is_reading].max())
        part = slice(start, min(T, start + room))
        mask = piece.attention_mask[:, part]
        output = nan_check.read_tokens_checked(
            model,
            piece.input_ids[:, part],
            state,
            attention_mask=None if bool(mask.all()) else mask,
            update_weights=update_weights,
            row_names=row_names,
        )
        hidden_states.append(output.hidden_states)
        state, start = output.state, part.stop
        del output
    return ReadOutput(torch.cat(hidden_states, 1), replace(state, is_donated=False))


def clear_attention_if_full(
    model: Hope, state: FastWeightState, num_new_tokens: int | Int[Tensor, " B"], window: int
) -> FastWeightState:
    """Empty the attention cache of the rows whose new tokens do not fit into the window; fast weights stay.

    `num_new_tokens` is the number of all rows, or of each; a row without any stays as it is.
    """
    cache, chunk = state.attention_cache, state.open_chunk
    if cache is None:
        return state
    num_new_tokens = torch.as_tensor(num_new_tokens)
    is_full = (num_new_tokens > 0) & (cache.valid.sum(1).cpu() + num_new_tokens > window)
    if not bool(is_full.any()):
        return state
    start = None if chunk is None else next(layer.cache for layer in chunk.layers_at_start if layer.cache is not None)
    if chunk is not None and start is not None:  # its tokens are read again from there, which must fit too
        exceeds = is_full & (start.valid.sum(1).cpu() + shortest_chunk(model) > window)
        chunk = replace(chunk, layers_at_start=clear_attention(chunk.layers_at_start, exceeds))
    return replace(state, layers=clear_attention(state.layers, is_full), open_chunk=chunk)


def make_room(
    model: Hope, state: FastWeightState, lengths: Sequence[int], max_tokens: int, window: int, is_learning: bool
) -> FastWeightState:
    """Empty the attention cache of the rows whose prompt and answer do not fit after it.

    A prompt that is learned and does not fit with its answer, or has none, is read as a text, which needs no room.
    """
    num_new_tokens = torch.tensor(lengths) + max_tokens
    if is_learning:
        num_new_tokens[(num_new_tokens > window) | (max_tokens == 0)] = 0
    return clear_attention_if_full(model, state, num_new_tokens, window)


def clear_attention(layers: tuple[LayerState, ...], rows: Bool[Tensor, " B"]) -> tuple[LayerState, ...]:
    """Empty the attention caches of some rows, and drop the slots that no row uses any more."""
    if not bool(rows.any()):
        return layers
    new_layers: list[LayerState] = []
    for layer in layers:
        cache = layer.cache
        if cache is not None:
            valid = cache.valid & ~rows.to(cache.valid.device)[:, None]
            slots = torch.sort((~valid).to(torch.uint8), stable=True, dim=1).indices[:, : int(valid.sum(1).max())]
            cache = cache.with_valid(valid).gather_slots(slots)
        new_layers.append(replace(layer, cache=cache))
    return tuple(new_layers)


def drop_weights(state: FastWeightState) -> FastWeightState:
    """Return what `forget` needs of a state, which is small: attention caches, convolution inputs and positions."""
    layers = tuple(replace(layer, cms=None, memory={}) for layer in state.layers)
    return replace(state, layers=layers, open_chunk=None)


def forget(model: Hope, state: FastWeightState) -> FastWeightState:
    """Return a state that has learned nothing, with the attention caches and convolution inputs of `state`."""
    new = model.initial_state(len(state.position))
    pairs = zip(new.layers, state.layers, strict=True)
    layers = tuple(replace(layer, cache=old.cache, conv_tails=old.conv_tails) for layer, old in pairs)
    return replace(new, layers=layers, position=state.position)


def shortest_chunk(model: Hope) -> int:
    """Return the largest number of tokens that wait for an update, the chunk size of the fastest level."""
    return min(C for sizes in model.hope_config.chunk_sizes for C in sizes)


def check_chunk_fits(model: Hope) -> None:
    """Raise `UsageError` if the chunks of levels that learn from the next token exceed a table of positions."""
    C = shortest_chunk(model)
    limit = model.config.max_position_embeddings
    if model.has_task_objective and model.config.position_encoding == "table" and limit < C:
        raise UsageError(f"chunk_sizes: a chunk of {C:,} tokens exceeds the model's {limit:,} positions; set {limit}")
