"""A carried state, a context whose oldest lines go, and nearest means, against loops."""

import numpy as np
import pytest
import torch

from laconic.evaluation.class_incremental.learners import (
    SHRINKAGE,
    InContextLearner,
    NearestClassMean,
    StatefulLearner,
    clear_caches,
    last_hidden_states,
)
from laconic.evaluation.class_incremental.protocol import score_after
from laconic.evaluation.streams.evaluate import CacheAsState
from laconic.nested import state as values
from tests import tolerances
from tests.evaluation import streamed
from tests.oracles import classes as oracle

pytestmark = pytest.mark.usefixtures("unchecked")  # tests/methods check the shapes of the same calls
TASKS = streamed.tasks(each=2)
ITEMS = [item for task in TASKS.test for item in task]


@pytest.mark.parametrize(("inner", "predicted"), [("task", "label"), ("task", "line"), ("associative", "label")])
def test_a_carried_state_learns_of_every_line(inner: str, predicted: str) -> None:
    model = streamed.attending(chunks=(4, 8), inner=inner)
    own = StatefulLearner(model, TASKS, predicted)
    own.learn(TASKS.train[0])
    words = sum(len(TASKS.label_ids[item.label]) for item in TASKS.train[0])
    read = sum(len(TASKS.start_ids + item.input_ids) for item in TASKS.train[0])
    learned = len(TASKS.train[0]) + words if inner == "associative" else read + words
    updates = own.notes["updates"]
    assert updates == [learned // 4, learned // 8]
    assert own.state.layers[0].cache is not None
    assert own.state.layers[0].cache.S == 0
    assert int(own.state.position) == 0
    assert (own.state.open_chunk is None) == (inner == "associative")
    assert (
        own.state.open_chunk is None or int(own.state.open_chunk.num_tokens) == 0
    )  # the line end has closed what was open
    assert own.notes["state_bytes"] == values.num_bytes(own.state)


def test_what_is_carried_is_what_tells() -> None:
    model = streamed.attending()
    own = StatefulLearner(model, TASKS)
    before = own.score(ITEMS, [0]).scores
    own.learn(TASKS.train[0])
    assert np.abs(own.score(ITEMS, [0]).scores - before).max() > 1e-3
    still = StatefulLearner(streamed.attending(eta=0.0), TASKS)
    still.learn(TASKS.train[0])
    np.testing.assert_allclose(still.score(ITEMS, [0]).scores, before, atol=1e-5)


def test_a_model_without_attention_reads_its_lines_into_its_memory() -> None:
    own = StatefulLearner(streamed.remembering(), TASKS)
    before = own.score(ITEMS, [0]).scores
    own.learn(TASKS.train[0])
    assert int(own.state.position) == sum(len(TASKS.start_ids + TASKS.training_ids(item)) for item in TASKS.train[0])
    assert clear_caches(own.state) is own.state
    assert np.abs(own.score(ITEMS, [0]).scores - before).max() > 1e-4
    blind = own.score(
        [ITEMS[0], ITEMS[0]._replace(input_ids=(*ITEMS[0].input_ids[:1], *ITEMS[0].input_ids))], [0]
    ).scores
    assert np.abs(blind[0] - blind[1]).max() > 1e-6  # a word more is seen


def test_the_oldest_lines_leave_the_context() -> None:
    model = CacheAsState(streamed.decoder())
    own = InContextLearner(model, TASKS, 40)
    for task in TASKS.train:
        own.learn(task)
    lines = [TASKS.training_ids(item) for task in TASKS.train for item in task]
    n = len(own.lines)
    assert own.lines == lines[-n:]
    longest = max(len(item.input_ids) for item in ITEMS) + max(map(len, TASKS.label_ids))
    held = len(TASKS.start_ids) + sum(map(len, own.lines))
    assert held + longest <= 40 < held + longest + len(lines[-n - 1])
    text = tuple(i for line in own.lines for i in line)
    asked = score_after(model, TASKS, model.initial_state(1), ITEMS[:2], context_ids=text).scores
    np.testing.assert_allclose(own.score(ITEMS[:2], [0]).scores, asked, atol=1e-12)
    assert np.abs(asked - score_after(model, TASKS, model.initial_state(1), ITEMS[:2]).scores).max() > 1e-3


@pytest.mark.parametrize("shared", [False, True])
def test_nearest_means_are_the_loops(shared: bool) -> None:
    model = CacheAsState(streamed.decoder())
    own = NearestClassMean(model, TASKS, shared_covariance=shared)
    for task in TASKS.train[:2]:
        own.learn(task)
    items = [item for task in TASKS.train[:2] for item in task]
    train = [(x.tolist(), item.label) for x, item in zip(last_hidden_states(model, TASKS, items), items, strict=True)]
    X = last_hidden_states(model, TASKS, ITEMS)
    scores = own.score(ITEMS, [0]).scores
    assert np.isneginf(scores[:, list(TASKS.task_classes[2])]).all()  # never met
    if not shared:
        for x, row in zip(X, scores, strict=True):
            assert row == pytest.approx(oracle.nearest_mean(train, x.tolist(), 6))
        return
    D = X.shape[1]
    S = np.array(oracle.token_range(train, 6, D))
    np.testing.assert_allclose(own.scatter / (len(train) - 4), S, atol=tolerances.ORACLE * 1e3)
    S = (1 - SHRINKAGE) * S + SHRINKAGE * np.trace(S) / D * np.eye(D)
    for k in (0, 4):
        mean = np.mean([x for x, label in train if label == k], axis=0)
        apart = X[0] - mean
        assert scores[0, k] == pytest.approx(-apart @ np.linalg.inv(S) @ apart, rel=1e-6)


def test_hidden_states_are_those_of_the_last_word() -> None:
    model = CacheAsState(streamed.decoder())
    found = last_hidden_states(model, TASKS, ITEMS)
    for x, item in zip(found, ITEMS, strict=True):
        row = torch.tensor([[*TASKS.start_ids, *item.input_ids]])
        alone = model.decoder(model.decoder.embed(row)).hidden[0, -1].double()
        assert tolerances.error(torch.from_numpy(x), alone) < tolerances.FLOAT32
