"""Class-incremental learning: which class an utterance belongs to, among all that were met, after every task.

A label's score is the mean log-probability of its words, given the utterance and what was learned; no one says which
task an utterance is of. Every item is read on a fork of the state, which itself is never changed.

Symbols: N items, K classes, n tasks; A[i, j] accuracy on task j after task i.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from laconic import rng
from laconic.evaluation.class_incremental.label_scoring import ScoreArray, get_device, read_ids, score_labels
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance, TokenIds
from laconic.interfaces import StatefulLM
from laconic.nested.state import FastWeightState


class ClassScores(NamedTuple):
    """Scores of N items for all K classes, and of the labels after the arrow alone; None where there is no such."""

    scores: ScoreArray
    prior: ScoreArray | None = None


class ClassIncrementalLearner(Protocol):
    """A way to learn a stream and to say which class an item belongs to."""

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """A task's examples, each once, in order."""
        ...

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """The scores of all classes; with `seen` only the best of those, and of all, count. Changes nothing."""
        ...


def score_after(
    model: StatefulLM,
    stream: ClassIncrementalStream,
    state: FastWeightState,
    items: Sequence[LabelledUtterance],
    seen_classes: Sequence[int] | None = None,
    context_ids: TokenIds = (),
) -> ClassScores:
    """The scores of items after a document's beginning and `text`, read on a fork of a state of one row.

    With `seen` only the best of those classes, and the best of all, are told from the others, and there is no prior.
    """
    with torch.no_grad():
        begun = torch.tensor([stream.start_ids + context_ids], device=get_device(model))
        ready = read_ids(model, begun, state).state
    prompts = [item.input_ids for item in items]
    if seen_classes is not None:
        return ClassScores(score_labels(model, ready, prompts, stream.label_ids, seen_classes))
    found = score_labels(model, ready, [stream.arrow_ids, *prompts], stream.label_ids)
    return ClassScores(found[1:], found[0])


def predict_class(scores: ScoreArray, candidates: Sequence[int]) -> NDArray[np.int64]:
    """The class of the highest score among some, ascending; ties go to the first."""
    classes = np.asarray(sorted(candidates))
    return classes[scores[:, classes].argmax(1)]


def compute_correct(
    scored: ClassScores, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]
) -> dict[str, NDArray[np.bool_]]:
    """Which items are told right, by way: among the classes seen or all of the set, the prior taken off or not."""
    labels = np.array([item.label for item in items])
    every = range(scored.scores.shape[1])
    ways = {
        "seen": predict_class(scored.scores, seen_classes) == labels,
        "all": predict_class(scored.scores, every) == labels,
    }
    if scored.prior is not None:
        rest = scored.scores - scored.prior
        ways |= {
            "seen-prior": predict_class(rest, seen_classes) == labels,
            "all-prior": predict_class(rest, every) == labels,
        }
    return ways


AccuracyMatrix = list[list[float | None]]


class StreamResult(NamedTuple):
    """What an approach made of a stream: A by way, rows after each task, None where nothing was asked."""

    seed: int
    matrices: dict[str, AccuracyMatrix]
    notes: dict[str, Any]


def run_stream(
    learner: ClassIncrementalLearner, stream: ClassIncrementalStream, log: Callable[[str], None] | None = None
) -> StreamResult:
    """Every task learned in turn, and after each all items of the tasks so far told apart; the prior off at the end."""
    made: dict[str, AccuracyMatrix] = {}
    for i in range(stream.num_tasks):
        learner.learn(stream.train[i])
        rows = evaluate_tasks(learner, stream, i)
        for way, row in rows.items():
            made.setdefault(way, empty_rows(i, stream.num_tasks)).append(row)
        log_progress(log, stream, i, rows)
    return StreamResult(stream.seed, made, collect_notes(learner))


def run_joint(
    learner: ClassIncrementalLearner, stream: ClassIncrementalStream, log: Callable[[str], None] | None = None
) -> StreamResult:
    """All tasks learned at once, mixed, and asked once: only the last row of A."""
    items = [item for task in stream.train for item in task]
    learner.learn([items[i] for i in rng.permuted_index(stream.seed, 0, np.arange(len(items)), len(items)).tolist()])
    rows = evaluate_tasks(learner, stream, stream.num_tasks - 1)
    log_progress(log, stream, stream.num_tasks - 1, rows)
    return StreamResult(
        stream.seed,
        {way: [*empty_rows(stream.num_tasks - 1, stream.num_tasks), row] for way, row in rows.items()},
        collect_notes(learner),
    )


def empty_rows(i: int, n: int) -> AccuracyMatrix:
    """Rows of A after `i` tasks of which nothing was asked."""
    return [[None] * n for _ in range(i)]


def log_progress(
    log: Callable[[str], None] | None,
    stream: ClassIncrementalStream,
    i: int,
    rows: Mapping[str, Sequence[float | None]],
) -> None:
    """How far it is."""
    if log is not None:
        held = [x for x in rows["seen"] if x is not None]
        log(
            f"order {stream.seed}: task {i + 1} of {stream.num_tasks}, {100 * sum(held) / len(held):.1f} % right so far"
        )


def evaluate_tasks(
    learner: ClassIncrementalLearner, stream: ClassIncrementalStream, i: int
) -> dict[str, list[float | None]]:
    """Row i of A, by way; the prior is taken off in the last row only, since all labels have to be read for it."""
    items = [item for task in stream.test[: i + 1] for item in task]
    found = compute_correct(
        learner.score(items, None if i == stream.num_tasks - 1 else stream.seen_classes(i)),
        items,
        stream.seen_classes(i),
    )
    ends = np.cumsum([len(task) for task in stream.test[: i + 1]])[:-1]
    rest = [None] * (stream.num_tasks - i - 1)
    return {way: [float(x.mean()) for x in np.split(told, ends)] + rest for way, told in found.items()}


def collect_notes(learner: Any) -> dict[str, Any]:
    """What an approach says of itself at the end: updates of its levels, bytes of its state."""
    said: Mapping[str, Any] = getattr(learner, "notes", {})
    return dict(said)
