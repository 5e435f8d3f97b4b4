"""Learners without fine-tuning against loops: carried state, in-context learning, nearest class means."""

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
from tests.oracles import class_incremental as oracle

pytestmark = pytest.mark.usefixtures("unchecked")  # tests/methods check the shapes of the same calls
TASKS = streamed.tasks(train_per_class=2)
ITEMS = [item for task in TASKS.test for item in task]


@pytest.mark.parametrize("inner_objective", ["task", "associative"])
def test_stateful_learner_updates_on_every_line(inner_objective: str) -> None:
    model = streamed.attending(chunks=(4, 8), inner_objective=inner_objective)
    learner = StatefulLearner(model, TASKS)
    learner.learn(TASKS.train[0])
    words = sum(len(TASKS.label_ids[item.label]) for item in TASKS.train[0])
    read = sum(len(TASKS.start_ids + item.input_ids) for item in TASKS.train[0])
    learned = len(TASKS.train[0]) + words if inner_objective == "associative" else read + words
    updates = learner.notes["updates"]
    assert updates == [learned // 4, learned // 8]
    assert learner.state.layers[0].cache is not None
    assert learner.state.layers[0].cache.S == 0
    assert int(learner.state.position) == 0
    assert (learner.state.open_chunk is None) == (inner_objective == "associative")
    # the line end completes the open chunk
    assert learner.state.open_chunk is None or int(learner.state.open_chunk.num_tokens) == 0
    assert learner.notes["state_bytes"] == values.num_bytes(learner.state)


def test_stateful_learner_needs_weight_updates() -> None:
    model = streamed.attending()
    learner = StatefulLearner(model, TASKS)
    before = learner.score(ITEMS, [0])
    learner.learn(TASKS.train[0])
    assert np.abs(learner.score(ITEMS, [0]) - before).max() > 1e-3
    frozen = StatefulLearner(streamed.attending(eta=0.0), TASKS)
    frozen.learn(TASKS.train[0])
    np.testing.assert_allclose(frozen.score(ITEMS, [0]), before, atol=1e-5)


def test_stateful_learner_without_attention() -> None:
    learner = StatefulLearner(streamed.remembering(), TASKS)
    before = learner.score(ITEMS, [0])
    learner.learn(TASKS.train[0])
    assert int(learner.state.position) == sum(
        len(TASKS.start_ids + TASKS.training_ids(item)) for item in TASKS.train[0]
    )
    assert clear_caches(learner.state) is learner.state
    assert np.abs(learner.score(ITEMS, [0]) - before).max() > 1e-4
    scores = learner.score([ITEMS[0], ITEMS[0]._replace(input_ids=(*ITEMS[0].input_ids[:1], *ITEMS[0].input_ids))], [0])
    assert np.abs(scores[0] - scores[1]).max() > 1e-6  # the model notices an additional token


def test_in_context_learner_drops_oldest_lines() -> None:
    model = CacheAsState(streamed.decoder())
    learner = InContextLearner(model, TASKS, 40)
    for task in TASKS.train:
        learner.learn(task)
    lines = [TASKS.training_ids(item) for task in TASKS.train for item in task]
    n = len(learner.lines)
    assert learner.lines == lines[-n:]
    longest = max(len(item.input_ids) for item in ITEMS) + max(map(len, TASKS.label_ids))
    num_tokens = len(TASKS.start_ids) + sum(map(len, learner.lines))
    assert num_tokens + longest <= 40 < num_tokens + longest + len(lines[-n - 1])
    text = tuple(i for line in learner.lines for i in line)
    expected = score_after(model, TASKS, model.initial_state(1), ITEMS[:2], context_ids=text)
    np.testing.assert_allclose(learner.score(ITEMS[:2], [0])[:, 0], expected[:, 0], atol=1e-12)
    assert np.abs(expected - score_after(model, TASKS, model.initial_state(1), ITEMS[:2])).max() > 1e-3


@pytest.mark.parametrize("shared", [False, True])
def test_nearest_class_mean_matches_loop_oracle(shared: bool) -> None:
    model = CacheAsState(streamed.decoder())
    learner = NearestClassMean(model, TASKS, shared_covariance=shared)
    for task in TASKS.train[:2]:
        learner.learn(task)
    items = [item for task in TASKS.train[:2] for item in task]
    train = [(x.tolist(), item.label) for x, item in zip(last_hidden_states(model, TASKS, items), items, strict=True)]
    X = last_hidden_states(model, TASKS, ITEMS)
    scores = learner.score(ITEMS, [0])
    assert np.isneginf(scores[:, list(TASKS.task_classes[2])]).all()  # never seen
    if not shared:
        for x, row in zip(X, scores, strict=True):
            assert row == pytest.approx(oracle.nearest_mean(train, x.tolist(), 6))
        return
    D = X.shape[1]
    S = np.array(oracle.within_class_covariance(train, 6, D))
    np.testing.assert_allclose(learner.scatter / (len(train) - 4), S, atol=tolerances.ORACLE * 1e3)
    S = (1 - SHRINKAGE) * S + SHRINKAGE * np.trace(S) / D * np.eye(D)
    for k in (0, 4):
        mean = np.mean([x for x, label in train if label == k], axis=0)
        apart = X[0] - mean
        assert scores[0, k] == pytest.approx(-apart @ np.linalg.inv(S) @ apart, rel=1e-6)


def test_last_hidden_states_equal_single_rows() -> None:
    model = CacheAsState(streamed.decoder())
    states = last_hidden_states(model, TASKS, ITEMS)
    for x, item in zip(states, ITEMS, strict=True):
        row = torch.tensor([[*TASKS.start_ids, *item.input_ids]])
        alone = model.decoder(model.decoder.embed(row)).hidden_states[0, -1].double()
        assert tolerances.error(torch.from_numpy(x), alone) < tolerances.FLOAT32
