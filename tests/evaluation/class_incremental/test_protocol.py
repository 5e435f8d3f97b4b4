"""Protocol of class-incremental learning: scores against loops, candidates, ties, and that items leave no trace."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from laconic.evaluation.class_incremental.label_scoring import ScoreArray, fork_rows, score_labels
from laconic.evaluation.class_incremental.learners import InContextLearner, StatefulLearner
from laconic.evaluation.class_incremental.protocol import (
    predict_class,
    run_stream,
    score_after,
)
from laconic.evaluation.class_incremental.tasks import LabelledUtterance
from laconic.evaluation.streams.evaluate import CacheAsState
from laconic.interfaces import StatefulLM
from laconic.nested import state as values
from tests.evaluation import streamed
from tests.nested.helpers import states_equal
from tests.oracles import class_incremental as oracle

TASKS = streamed.tasks()
ITEMS = [item for task in TASKS.test for item in task]


def reading(model: StatefulLM, state: Any) -> oracle.Logits:
    """Return a function that gives the logits after every token of a text, read at once on a fork."""

    def logits(ids: Sequence[int]) -> list[list[float]]:
        with torch.no_grad():
            seen = model.read_tokens(torch.tensor([list(ids)]), state, update_weights=state.attention_cache is None)
            return model.logits(seen.hidden_states)[0].double().tolist()

    return logits


def build_model_and_state(name: str) -> tuple[StatefulLM, Any]:
    """Return a model, and a state in which it has learned a task."""
    if name == "plain":
        model = CacheAsState(streamed.decoder())
        return model, model.initial_state(1)
    learner = StatefulLearner(streamed.attending() if name == "attention" else streamed.remembering(), TASKS)
    learner.learn(TASKS.train[0])
    return learner.model, learner.state


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["plain", "attention", "memory"])
def test_score_after_matches_loop_oracle(name: str) -> None:
    model, state = build_model_and_state(name)
    items = ITEMS[:2]
    result = score_after(model, TASKS, state, items)
    logits = reading(model, state)
    for n, item in enumerate(items):
        for k, words in enumerate(TASKS.label_ids):
            expected = oracle.label_score(logits, [*TASKS.start_ids, *item.input_ids], words)
            assert result[n, k] == pytest.approx(expected, abs=2e-4)
    total = oracle.label_score(logits, [*TASKS.start_ids, *items[0].input_ids], TASKS.label_ids[3], mean=False)
    assert abs(total - result[0, 3]) > 1e-3  # MISREAD: the sum, which prefers short labels


def test_score_after_does_not_depend_on_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CacheAsState(streamed.decoder())
    whole = score_after(model, TASKS, model.initial_state(1), ITEMS)
    monkeypatch.setattr("laconic.evaluation.class_incremental.label_scoring.LABEL_BATCH", 8)
    monkeypatch.setattr("laconic.evaluation.class_incremental.label_scoring.PROMPT_BATCH", 5)
    parts = score_after(model, TASKS, model.initial_state(1), ITEMS)
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_predict_class_breaks_ties_by_number() -> None:
    scores = np.array([[0.5, 0.9, 0.9, 0.1], [0.9, 0.9, 0.9, 0.9]])
    assert predict_class(scores, [3, 2, 1]).tolist() == [1, 1]
    assert [oracle.best_class(row, [3, 2, 1]) for row in scores.tolist()] == [1, 1]


class RandomLearner:
    """A learner with random scores for each item, which change after each task."""

    def __init__(self, K: int) -> None:
        self.K, self.num_tasks = K, 0

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        self.num_tasks += 1

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]) -> ScoreArray:
        return np.array([self.row(item) for item in items])

    def row(self, item: LabelledUtterance) -> list[float]:
        g = torch.Generator().manual_seed(hash((self.num_tasks, item)) % 2**31)
        return torch.rand(self.K, generator=g).tolist()


def test_run_stream_matrix_matches_loop_oracle() -> None:
    stream = streamed.tasks(test_per_class=40)
    result = run_stream(RandomLearner(6), stream)
    other = dict.fromkeys(("current", "own"), 0.0)
    source = RandomLearner(6)
    for i in range(stream.num_tasks):
        source.num_tasks = i + 1
        for j in range(stream.num_tasks):
            accuracy = result[i][j]
            assert (accuracy is None) == (j > i)
            if accuracy is None:
                continue
            scores, labels = [source.row(item) for item in stream.test[j]], [item.label for item in stream.test[j]]
            assert accuracy == pytest.approx(oracle.accuracy(scores, labels, stream.task_classes, i, j, "seen"))
            for misread in other:  # candidates of the current task only; the task of each item given
                difference = oracle.accuracy(scores, labels, stream.task_classes, i, j, misread) - accuracy
                other[misread] = max(other[misread], abs(difference))
    assert min(other.values()) > 1e-3


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
def test_stateful_learner_score_changes_nothing() -> None:
    model = streamed.attending()
    learner = StatefulLearner(model, TASKS)
    learner.learn(TASKS.train[0])
    before = values.map_tensors(learner.state, torch.clone)
    once = learner.score(ITEMS, TASKS.seen_classes(0))
    backwards = learner.score(ITEMS[::-1], TASKS.seen_classes(0))[::-1]
    np.testing.assert_allclose(backwards, once, atol=1e-5)
    np.testing.assert_array_equal(learner.score(ITEMS[:1], TASKS.seen_classes(0)).shape, (1, 6))
    assert states_equal(learner.state, before)
    # MISREAD: the state is carried from item to item.
    state: Any = learner.state
    leaked: list[Any] = []
    for item in ITEMS[:4]:
        leaked.append(score_after(model, TASKS, state, [item])[0])
        state = model.read_tokens(torch.tensor([[*TASKS.start_ids, *TASKS.training_ids(item)]]), state).cache
    assert np.abs(np.array(leaked) - once[:4]).max() > 1e-3


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
def test_fork_rows_shares_expanded_rows() -> None:
    state = StatefulLearner(streamed.attending(), TASKS)
    state.learn(TASKS.train[0])
    many = fork_rows(state.state, torch.zeros(5, dtype=torch.long))
    for name, x in values.named_tensors(many.layers):
        assert len(x) == 5, name
        assert x.stride(0) == 0 or x.numel() == 0
    rows = torch.tensor([1, 0, 1])
    several = values.select_rows(state.state, [0, 0])
    for copies in (several, fork_rows(state.state, torch.tensor([0, 0]))):
        forks = values.map_tensors(fork_rows(copies, rows), torch.clone)
        assert states_equal(forks, values.select_rows(several, rows))


def test_run_stream_jointly_evaluates_only_at_the_end() -> None:
    messages: list[str] = []
    frozen = InContextLearner(CacheAsState(streamed.decoder()), TASKS, max_positions=0)
    A = run_stream(frozen, TASKS, messages.append, is_joint=True)
    assert frozen.lines == []
    assert A[0] == A[1] == [None] * 3
    assert len([x for x in A[2] if x is not None]) == 3
    assert len(messages) == 1
    assert messages[0].startswith("order 0: task 3 of 3, ")
    again = run_stream(frozen, TASKS, messages.append)
    assert again[2] == A[2]
    assert len(messages) == 4
    with torch.no_grad():
        assert score_labels(
            CacheAsState(streamed.decoder()), CacheAsState(streamed.decoder()).initial_state(1), [(3, 1)], [(4,)]
        ).shape == (1, 1)
