"""Ways to learn classes without tuning weights: a state that is carried, text in the context, means of hidden states.

The nearest class mean is Rebuffi et al. 2017's (arXiv:1611.07725) classifier on a frozen model; with one covariance for
all classes it is that of linear discriminant analysis (Hayes and Kanan 2020, arXiv:1909.01520).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from laconic.evaluation.class_incremental.label_scoring import (
    PROMPT_BATCH,
    get_device,
    has_no_attention,
    pad_right,
    read_ids,
    repeat_state,
    split_into_batches,
)
from laconic.evaluation.class_incremental.protocol import ClassScores, score_after
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance, TokenIds
from laconic.interfaces import StatefulLM
from laconic.nested import nan_check
from laconic.nested import state as values
from laconic.nested.state import FastWeightState, LayerState

SHRINKAGE = 0.1  # of the shared covariance towards its mean variance


class FrozenModel:
    """The model as it is."""

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream) -> None:
        self.model, self.stream = model, stream

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """Nothing."""

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """What the model says of itself."""
        return score_after(self.model, self.stream, self.model.initial_state(1), items, seen_classes)


class InContextLearner:
    """The stream as text before each question, the oldest lines dropped where positions end."""

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream, max_positions: int) -> None:
        self.model, self.stream = model, stream
        longest = max(len(item.input_ids) for task in stream.test for item in task) + max(map(len, stream.label_ids))
        self.max_context_tokens = max_positions - longest - len(stream.start_ids)
        self.lines: list[TokenIds] = []

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """The newest lines that there is room for."""
        self.lines += [self.stream.training_ids(item) for item in items]
        kept, held = 0, 0
        while kept < len(self.lines) and held + len(self.lines[-1 - kept]) <= self.max_context_tokens:
            held += len(self.lines[-1 - kept])
            kept += 1
        self.lines = self.lines[len(self.lines) - kept :]

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """What the model says with the lines before it."""
        text = tuple(i for line in self.lines for i in line)
        return score_after(self.model, self.stream, self.model.initial_state(1), items, seen_classes, text)


class StatefulLearner:
    """A model that learns while it reads: the stream goes into its state, the weights stay as they are.

    Each line is read from a start without context, as the questions are, so that what is known of a class is in fast
    weights alone. With `predicted` "label" only the label and the line end teach, and what levels learn of the task
    reaches back to the utterance, as in tuning; levels with an error of their own then learn where the label is read.
    With "line" all of it teaches.
    """

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream, loss_on: str = "line") -> None:
        self.model, self.stream, self.loss_on = model, stream, loss_on
        self.state: FastWeightState = model.initial_state(1)

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """A task, line after line."""
        with torch.no_grad():
            for item in items:
                self.state = (
                    self.read_line(item) if has_no_attention(self.state) else self.read_line_without_context(item)
                )

    def read_line(self, item: LabelledUtterance) -> FastWeightState:
        """A line of a model that has no context but its state."""
        return self.advance(
            self.stream.start_ids + self.stream.training_ids(item), self.state, target_mask=self.build_target_mask(item)
        )

    def read_line_without_context(self, item: LabelledUtterance) -> FastWeightState:
        """A line read on an empty cache, which is emptied again behind it."""
        state, taught, (before, after) = self.state, self.build_target_mask(item), self.split_line(item)
        if before:
            state = self.advance(before, state, update_weights=False)
        state = self.advance(after, state, target_mask=None if taught is None else taught[: len(after)])
        # The line end is the last word's target, and closes what is open, before the context goes.
        return clear_caches(self.advance(self.stream.line_end_ids, state, update_weights=False))

    def advance(
        self,
        ids: TokenIds,
        state: FastWeightState,
        *,
        update_weights: bool = True,
        target_mask: Sequence[bool] | None = None,
    ) -> FastWeightState:
        """Ids of one row."""
        device = get_device(self.model)
        row, asked = torch.tensor([ids], device=device), None
        if target_mask is not None:
            asked = torch.tensor([target_mask], device=device)
        return cast(
            FastWeightState,
            cast(
                Any,
                nan_check.read_tokens_checked(
                    self.model, row, state, update_weights=update_weights, target_mask=asked
                ).cache,
            ),
        )

    def build_target_mask(self, item: LabelledUtterance) -> list[bool] | None:
        """Which ids of a line teach; None where all do, and where no level learns of ids."""
        if self.loss_on != "label" or self.state.open_chunk is None:
            return None
        read = self.stream.start_ids + item.input_ids
        return [False] * len(read) + [True] * (len(self.stream.training_ids(item)) - len(item.input_ids))

    def split_line(self, item: LabelledUtterance) -> tuple[TokenIds, TokenIds]:
        """What of a line is only read, and what is learned of; of its end nothing."""
        read, told = self.stream.start_ids + item.input_ids, self.stream.label_ids[item.label]
        own = self.loss_on == "label" and self.state.open_chunk is None
        return (read[:-1], read[-1:] + told) if own else ((), read + told)

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """What the state says; every item is read on a fork."""
        return score_after(self.model, self.stream, self.state, items, seen_classes)

    @property
    def notes(self) -> dict[str, Any]:
        """How often each level has been updated, those that were as often being one, and the bytes of the state."""
        counts = {int(x.max()) for name, x in values.named_tensors(self.state.layers) if name.endswith(".updates")}
        return {"updates": sorted(counts, reverse=True), "state_bytes": values.num_bytes(self.state)}


def clear_caches(state: FastWeightState) -> FastWeightState:
    """The state with nothing in its caches, whose slots are gone, and its positions from 0 on."""
    layers = tuple(clear_layer_cache(layer) for layer in state.layers)
    if all(layer.cache is None for layer in layers):
        return state
    opened = state.open_chunk and replace(
        state.open_chunk, layers_at_start=tuple(clear_layer_cache(layer) for layer in state.open_chunk.layers_at_start)
    )
    return FastWeightState(layers, torch.zeros_like(state.position), opened)


def clear_layer_cache(layer: LayerState) -> LayerState:
    """A layer without the slots of its cache."""
    return layer if layer.cache is None else replace(layer, cache=layer.cache.crop(0))


class NearestClassMean:
    """The class whose mean hidden state at the end of the utterance is nearest to the item's, the model frozen.

    `shared`: nearest by the covariance within classes, the same for all, a share of it made equal in every direction.
    """

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream, *, shared_covariance: bool = False) -> None:
        self.model, self.stream, self.shared_covariance = model, stream, shared_covariance
        self.sums: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.scatter: np.ndarray | float = 0.0

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """Means and scatter, one example after another (Welford)."""
        for x, item in zip(last_hidden_states(self.model, self.stream, items), items, strict=True):
            n, total = self.counts.get(item.label, 0), self.sums.setdefault(item.label, np.zeros_like(x))
            if n:
                apart = x - total / n
                self.scatter = self.scatter + np.outer(apart, apart) * n / (n + 1)
            self.counts[item.label], self.sums[item.label] = n + 1, total + x

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """Minus the squared distance; of a class that was never met, minus infinity."""
        X = last_hidden_states(self.model, self.stream, items)
        means = {label: total / self.counts[label] for label, total in self.sums.items()}
        scores = np.full((len(X), len(self.stream.label_ids)), -np.inf)
        inverse = np.linalg.inv(self.covariance(X.shape[1])) if self.shared_covariance else np.eye(X.shape[1])
        for label, mean in means.items():
            apart = X - mean
            scores[:, label] = -np.einsum("nd,de,ne->n", apart, inverse, apart)
        return ClassScores(scores)

    def covariance(self, D: int) -> np.ndarray:
        """Within classes, shrunk."""
        S = self.scatter / max(1, sum(self.counts.values()) - len(self.counts)) + np.zeros((D, D))
        return (1 - SHRINKAGE) * S + (SHRINKAGE * np.trace(S) / D + 1e-12) * np.eye(D)


def last_hidden_states(
    model: StatefulLM, stream: ClassIncrementalStream, items: Sequence[LabelledUtterance]
) -> np.ndarray:
    """[N, D] float64: the hidden state at the last token of every utterance, each read by itself."""
    found: dict[int, np.ndarray] = {}
    with torch.no_grad():
        for at in split_into_batches(sorted(range(len(items)), key=lambda i: len(items[i].input_ids)), PROMPT_BATCH):
            ids, live = pad_right([stream.start_ids + items[i].input_ids for i in at], get_device(model))
            seen = read_ids(model, ids, repeat_state(model.initial_state(1), len(at)), live)
            last = seen.hidden_states[torch.arange(len(at)), live.sum(1) - 1].double().cpu().numpy()
            found |= dict(zip(at, last, strict=True))
    return np.stack([found[i] for i in range(len(items))])
