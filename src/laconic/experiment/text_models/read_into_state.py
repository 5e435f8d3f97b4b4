"""Read texts of any length into fast weights in parallel, with save and resume."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.batches import next_token_targets
from laconic.batches.padding import PaddedIds
from laconic.experiment.resumable_stream import ResumableReading, pad_segments
from laconic.losses import count_scored, masked_cross_entropy
from laconic.nested import nan_check, state_file
from laconic.nested import state as values
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import carry_state
from laconic.nested.state import FastWeightState

HARM = 0.1  # nats per token above the loss without learning that are worth a warning


class ReadDocument(NamedTuple):
    """A text that a row of a state has read: name, SHA-256 of its UTF-8 bytes, and number of tokens."""

    name: str
    sha256: str
    tokens: int


class ReadingLoss:
    """Mean loss of the tokens read so far; the first token of each segment is not scored.

    The 1st, 2nd, 4th, 8th … segment is read once more by a model that has read and learned nothing. That model does not
    see the text before the segment, so a loss above its loss means that learning does harm.

    Attributes:
        nats: Summed loss of the scored tokens.
        num_scored: Their number.
        num_segments: Segments read.
        has_warned: Whether a warning was given.
    """

    def __init__(self, model: Hope) -> None:
        self.model = model
        self.nats, self.num_scored, self.num_segments, self.has_warned = 0.0, 0.0, 0, False

    @property
    def mean(self) -> float:
        """Nats per token; 0 before anything is scored."""
        return self.nats / max(self.num_scored, 1.0)

    def add(self, piece: PaddedIds, hidden_states: Tensor) -> None:
        """Score a segment, from the hidden states with which the model read it."""
        targets = next_token_targets(piece.input_ids, piece.attention_mask, piece.attention_mask)
        scored = count_scored(targets)
        if not scored:
            return
        loss = float(masked_cross_entropy(self.model.logits, hidden_states, targets).loss)
        self.nats, self.num_scored = self.nats + scored * loss, self.num_scored + scored
        self.num_segments += 1
        if self.num_segments & (self.num_segments - 1) == 0 and not self.has_warned:
            self.compare_without_learning(piece, targets, loss)

    def compare_without_learning(self, piece: PaddedIds, targets: Tensor, loss: float) -> None:
        """Warn if the model would predict a segment better without anything that it has learned."""
        output = self.model.read_tokens(piece.input_ids, attention_mask=piece.attention_mask, update_weights=False)
        baseline = float(masked_cross_entropy(self.model.logits, output.hidden_states, targets).loss)
        if not loss <= baseline + HARM:  # also for NaN
            self.has_warned = True
            warnings.warn(
                f"learning does harm: {loss:.2f} nats per token in segment {self.num_segments:,}, {baseline:.2f} "
                "without learning; use a lower learning rate (--inner-lr of a checkpoint, inner_lr of a recipe)",
                stacklevel=2,
            )


class StateReadingJob(ResumableReading[FastWeightState]):
    """Job that reads texts into fast weights; `run` raises NonFiniteError if one is not finite.

    Args:
        model: The model.
        window: Largest number of tokens that attention sees; when it is full, the cache is emptied and the fast weights
            stay.
        initial_state: State of one row that every text continues, or of one row per text.

    Attributes:
        loss: Loss of the tokens that this job has read.
    """

    kind = "state-reading-job"

    def __init__(self, model: Hope, window: int, initial_state: FastWeightState | None = None) -> None:
        super().__init__(model.token_embedding.weight.device)
        self.model, self.window, self.initial_state = model, window, initial_state
        self.loss = ReadingLoss(model)

    @property
    def note(self) -> str:
        return f"{self.loss.mean:.2f} nats per token" if self.loss.num_scored else ""

    @property
    def documents(self) -> list[tuple[ReadDocument, ...]]:
        """Texts of the finished rows."""
        return [(ReadDocument(x.name, x.digest.hexdigest(), sum(x.segments)),) for x in self.texts]

    @torch.no_grad()
    def advance(self, piece: PaddedIds) -> FastWeightState:
        state = self.current
        if state is None:
            B = len(piece.input_ids)
            state = self.model.initial_state(B) if self.initial_state is None else self.initial_state
            first = len(self.texts)
            rows = [0] * B if len(state.position) == 1 else list(range(first, first + B))
            state = state if rows == list(range(len(state.position))) else values.select_rows(state, rows)
        state = clear_attention_if_full(self.model, state, piece.input_ids.shape[1], self.window)
        mask = None if bool(piece.attention_mask.all()) else piece.attention_mask
        output = nan_check.read_tokens_checked(
            self.model, piece.input_ids, state, attention_mask=mask, row_names=self.names
        )
        self.loss.add(piece, output.hidden_states)
        self.tokens += int(piece.attention_mask.sum())
        return output.state

    def read_ids(self, rows: Sequence[Sequence[int]], segment_tokens: int) -> Iterator[int]:
        """Read ids, one row each, and yield how many of the longest row are read; the state is in `current`."""
        T = max(map(len, rows))
        for start in range(0, T, segment_tokens):
            piece = pad_segments([row[start : start + segment_tokens] for row in rows], self.device)
            self.current = self.advance(piece)
            yield min(T, start + segment_tokens)

    def append_rows(self, before: FastWeightState | None, done: FastWeightState) -> FastWeightState:
        return done if before is None else values.concat_rows(before, done)

    def to_tensors(self, value: FastWeightState, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        return state_file.flatten_state(value, prefix)

    def from_tensors(self, spec: Any, tensors: Mapping[str, Tensor], prefix: str) -> FastWeightState:
        return values.to(state_file.unflatten_state(spec, tensors, set(tensors)), self.device)


def clear_attention_if_full(model: Hope, state: FastWeightState, num_new_tokens: int, window: int) -> FastWeightState:
    """Empty the attention cache of a state if `num_new_tokens` do not fit into the window; fast weights stay."""
    cache = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    if cache is None or cache.S + num_new_tokens <= window:
        return state
    return carry_state(model, state)
