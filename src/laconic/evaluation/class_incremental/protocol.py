"""The protocol of class-incremental learning: learn task by task, and after each classify among all classes so far.

A label's score is the mean log-probability of its tokens, given the utterance and what was learned; the task of an
utterance is not given. Every item is read on a fork of the state, which itself never changes.

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

AccuracyMatrix = list[list[float | None]]
LogFunction = Callable[[str], None]


class ClassScores(NamedTuple):
    """Scores of N items for all K classes, and, if computed, of the labels after the arrow alone."""

    scores: ScoreArray
    prior: ScoreArray | None = None


class ClassIncrementalLearner(Protocol):
    """A method that learns a stream and classifies items; its attribute `notes`, if any, is stored with the result."""

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """Learn the examples of a task, each once, in order."""
        ...

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """Return the scores of all classes, without changing the learner.

        With `seen_classes`, only the best of these and the best of all classes need their score; others may have an
        upper bound.
        """
        ...


class StreamResult(NamedTuple):
    """The result of a learner on a stream: the accuracy matrices by criterion, None where not evaluated, and notes."""

    order: int
    matrices: dict[str, AccuracyMatrix]
    notes: dict[str, Any]


def score_after(
    model: StatefulLM,
    stream: ClassIncrementalStream,
    state: FastWeightState,
    items: Sequence[LabelledUtterance],
    seen_classes: Sequence[int] | None = None,
    context_ids: TokenIds = (),
) -> ClassScores:
    """Score items on a fork of the state of one row, after the beginning of a document and a context.

    With `seen_classes`, only the best of these and the best of all are fully scored, and there is no prior.
    """
    with torch.no_grad():
        prefix = torch.tensor([stream.start_ids + context_ids], device=get_device(model))
        prefix_state = read_ids(model, prefix, state).state
    prompts = [item.input_ids for item in items]
    if seen_classes is not None:
        return ClassScores(score_labels(model, prefix_state, prompts, stream.label_ids, seen_classes))
    scores = score_labels(model, prefix_state, [stream.arrow_ids, *prompts], stream.label_ids)
    return ClassScores(scores[1:], scores[0])


def predict_class(scores: ScoreArray, candidates: Sequence[int]) -> NDArray[np.int64]:
    """Return the candidate with the highest score; ties go to the lowest number."""
    classes = np.asarray(sorted(candidates))
    return classes[scores[:, classes].argmax(1)]


def compute_correct(
    scored: ClassScores, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]
) -> dict[str, NDArray[np.bool_]]:
    """Return which items are classified correctly, by criterion.

    The criteria are the classes seen so far or all classes of the set ("seen", "all"), and, if the prior was computed,
    the same after subtracting it ("seen-prior", "all-prior").
    """
    labels = np.array([item.label for item in items])
    all_classes = range(scored.scores.shape[1])

    def compare(scores: ScoreArray, suffix: str) -> dict[str, NDArray[np.bool_]]:
        return {
            f"seen{suffix}": predict_class(scores, seen_classes) == labels,
            f"all{suffix}": predict_class(scores, all_classes) == labels,
        }

    correct = compare(scored.scores, "")
    return correct if scored.prior is None else correct | compare(scored.scores - scored.prior, "-prior")


def run_stream(
    learner: ClassIncrementalLearner, stream: ClassIncrementalStream, log: LogFunction | None = None
) -> StreamResult:
    """Learn the tasks one after another and evaluate all tasks so far after each."""
    matrices: dict[str, AccuracyMatrix] = {}
    for i in range(stream.num_tasks):
        learner.learn(stream.train[i])
        rows = evaluate_tasks(learner, stream, i)
        for criterion, row in rows.items():
            matrices.setdefault(criterion, empty_rows(i, stream.num_tasks)).append(row)
        log_progress(log, stream, i, rows)
    return StreamResult(stream.seed, matrices, dict(getattr(learner, "notes", {})))


def run_joint(
    learner: ClassIncrementalLearner, stream: ClassIncrementalStream, log: LogFunction | None = None
) -> StreamResult:
    """Learn all tasks at once, mixed, and evaluate once; A has only its last row."""
    items = [item for task in stream.train for item in task]
    order = rng.permuted_index(stream.seed, 0, np.arange(len(items)), len(items)).tolist()
    learner.learn([items[i] for i in order])
    last = stream.num_tasks - 1
    rows = evaluate_tasks(learner, stream, last)
    log_progress(log, stream, last, rows)
    matrices = {criterion: [*empty_rows(last, stream.num_tasks), row] for criterion, row in rows.items()}
    return StreamResult(stream.seed, matrices, dict(getattr(learner, "notes", {})))


def empty_rows(i: int, n: int) -> AccuracyMatrix:
    """Return i rows of A that were not evaluated."""
    return [[None] * n for _ in range(i)]


def log_progress(
    log: LogFunction | None, stream: ClassIncrementalStream, i: int, rows: Mapping[str, Sequence[float | None]]
) -> None:
    """Report the mean accuracy on the tasks so far."""
    if log is not None:
        accuracies = [x for x in rows["seen"] if x is not None]
        accuracy = 100 * sum(accuracies) / len(accuracies)
        log(f"order {stream.seed}: task {i + 1} of {stream.num_tasks}, accuracy {accuracy:.1f} % so far")


def evaluate_tasks(
    learner: ClassIncrementalLearner, stream: ClassIncrementalStream, i: int
) -> dict[str, list[float | None]]:
    """Return row i of A by criterion.

    The prior, for which all labels have to be read, is subtracted in the last row only.
    """
    items = [item for task in stream.test[: i + 1] for item in task]
    seen_classes = stream.seen_classes(i)
    scored = learner.score(items, None if i == stream.num_tasks - 1 else seen_classes)
    borders = np.cumsum([len(task) for task in stream.test[: i + 1]])[:-1]
    not_evaluated = [None] * (stream.num_tasks - i - 1)
    return {
        criterion: [float(x.mean()) for x in np.split(correct, borders)] + not_evaluated
        for criterion, correct in compute_correct(scored, items, seen_classes).items()
    }
