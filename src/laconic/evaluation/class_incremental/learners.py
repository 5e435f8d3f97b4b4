"""Learn classes without tuning weights: a carried state, in-context learning, class means of hidden states.

The nearest class mean is the classifier of Rebuffi et al. 2017 (arXiv:1611.07725) on a frozen model; with one
covariance for all classes it is linear discriminant analysis (Hayes and Kanan 2020, arXiv:1909.01520).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from laconic.evaluation.class_incremental.label_scoring import ScoreArray, get_device, read_prompts
from laconic.evaluation.class_incremental.protocol import score_after
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance, TokenIds
from laconic.evaluation.streams.texts import empty_caches
from laconic.interfaces import StatefulLM
from laconic.nested import state as state_tree
from laconic.nested.nan_check import read_tokens_checked
from laconic.nested.state import FastWeightState

SHRINKAGE = 0.1  # of the shared covariance towards its mean variance


class InContextLearner:
    """In-context learning: the stream as text before each item; the oldest lines are dropped when positions run out.

    With no positions it is the frozen model: zero-shot classification.
    """

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream, max_positions: int) -> None:
        self.model, self.stream = model, stream
        longest = max(len(item.input_ids) for task in stream.test for item in task) + max(map(len, stream.label_ids))
        self.max_context_tokens = max_positions - longest - len(stream.start_ids)
        self.lines: list[TokenIds] = []

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        self.lines += [self.stream.training_ids(item) for item in items]
        num_tokens = sum(map(len, self.lines))
        while self.lines and num_tokens > self.max_context_tokens:
            num_tokens -= len(self.lines.pop(0))

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]) -> ScoreArray:
        context = tuple(i for line in self.lines for i in line)
        return score_after(self.model, self.stream, self.model.initial_state(1), items, seen_classes, context)


class StatefulLearner:
    """A model that learns while it reads: the stream goes into its fast weights, and its slow weights stay unchanged.

    Each line is read without context, as the test items are, so that knowledge of a class is in the fast weights alone.
    Only the label and the line end are targets. Levels that learn from the next-token loss backpropagate it to the
    utterance, as in fine-tuning; levels with an associative loss learn while the label is read.
    """

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream) -> None:
        self.model, self.stream = model, stream
        self.state: FastWeightState = model.initial_state(1)

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        with torch.no_grad():
            for item in items:
                self.state = self.read_line(item)

    def read_line(self, item: LabelledUtterance) -> FastWeightState:
        """Read a line; with attention, on an empty KV cache, which is emptied again."""
        state, line_end = self.state, self.stream.line_end_ids
        prompt = self.stream.start_ids + item.input_ids
        label = self.stream.label_ids[item.label]
        # The first id that is a target; None if no level learns from the next-token loss.
        first_target = None if state.open_chunk is None else len(prompt)
        if state.attention_cache is None:
            return self.advance(prompt + label + line_end, state, first_target=first_target)
        if first_target is None:
            state = self.advance(prompt[:-1], state, update_weights=False)
            prompt = prompt[-1:]
        state = self.advance(prompt + label, state, first_target=first_target)
        # The line end is the target of the last token, and completes open chunks before the context is cleared.
        return clear_caches(self.advance(line_end, state, update_weights=False))

    def advance(
        self, ids: TokenIds, state: FastWeightState, *, update_weights: bool = True, first_target: int | None = None
    ) -> FastWeightState:
        row = torch.tensor([ids], device=get_device(self.model))
        mask = None if first_target is None else torch.arange(len(ids), device=row.device)[None] >= first_target
        return read_tokens_checked(self.model, row, state, update_weights=update_weights, target_mask=mask).state

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]) -> ScoreArray:
        return score_after(self.model, self.stream, self.state, items, seen_classes)

    @property
    def notes(self) -> dict[str, Any]:
        """The different numbers of updates of the levels, and the bytes of the state."""
        tensors = state_tree.named_tensors(self.state.layers)
        updates = {int(x.max()) for name, x in tensors if name.endswith(".num_updates")}
        return {"updates": sorted(updates, reverse=True), "state_bytes": state_tree.num_bytes(self.state)}


def clear_caches(state: FastWeightState) -> FastWeightState:
    """Return a state with empty KV caches, and positions from 0 on."""
    if state.attention_cache is None:
        return state
    chunk = state.open_chunk
    if chunk is not None:
        chunk = replace(chunk, layers_at_start=empty_caches(chunk.layers_at_start))
    return FastWeightState(empty_caches(state.layers), torch.zeros_like(state.position), chunk)


class NearestClassMean:
    """Nearest class mean: hidden states at the end of the utterance, with a frozen model.

    The distance is Euclidean, or with `shared_covariance` Mahalanobis', with the shrunk within-class covariance.
    """

    def __init__(self, model: StatefulLM, stream: ClassIncrementalStream, *, shared_covariance: bool = False) -> None:
        self.model, self.stream, self.shared_covariance = model, stream, shared_covariance
        self.sums: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.scatter: np.ndarray | float = 0.0

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """Update means and scatter, one example after another (Welford)."""
        for x, item in zip(last_hidden_states(self.model, self.stream, items), items, strict=True):
            n = self.counts.get(item.label, 0)
            total = self.sums.setdefault(item.label, np.zeros_like(x))
            if n:
                deviation = x - total / n
                self.scatter = self.scatter + np.outer(deviation, deviation) * n / (n + 1)
            self.counts[item.label] = n + 1
            self.sums[item.label] = total + x

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]) -> ScoreArray:
        """Return minus the squared distances; minus infinity for classes without examples."""
        X = last_hidden_states(self.model, self.stream, items)
        scores = np.full((len(X), len(self.stream.label_ids)), -np.inf)
        inverse = np.linalg.inv(self.covariance(X.shape[1])) if self.shared_covariance else np.eye(X.shape[1])
        for label, total in self.sums.items():
            deviation = X - total / self.counts[label]
            scores[:, label] = -np.einsum("nd,de,ne->n", deviation, inverse, deviation)
        return scores

    def covariance(self, D: int) -> np.ndarray:
        """Return the shrunk within-class covariance, [D, D]."""
        S = self.scatter / max(1, sum(self.counts.values()) - len(self.counts)) + np.zeros((D, D))
        return (1 - SHRINKAGE) * S + (SHRINKAGE * np.trace(S) / D + 1e-12) * np.eye(D)


def last_hidden_states(
    model: StatefulLM, stream: ClassIncrementalStream, items: Sequence[LabelledUtterance]
) -> np.ndarray:
    """Return the hidden state at the last token of every utterance, each read alone; [N, D] float64."""
    states: dict[int, np.ndarray] = {}
    with torch.no_grad():
        prompts = [stream.start_ids + item.input_ids for item in items]
        for batch, last, _ in read_prompts(model, model.initial_state(1), prompts):
            states |= dict(zip(batch, last.double().cpu().numpy(), strict=True))
    return np.stack([states[i] for i in range(len(items))])
