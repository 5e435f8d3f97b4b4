"""The protocol of class-incremental learning: learn task by task, and after each classify among all classes so far.

A label's score is the mean log-probability of its tokens, given the utterance and what was learned; the task of an
utterance is not given. Every item is read on a fork of the state, which itself never changes.

Symbols: N items, K classes, n tasks; A[i, j] accuracy on task j after task i, i and j from 0 to n - 1, j <= i. Backward
transfer is that of Lopez-Paz and Ranzato 2017 (arXiv:1706.08840), forgetting that of Chaudhry et al. 2018
(arXiv:1801.10112).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from laconic import rng
from laconic.evaluation import statistics
from laconic.evaluation.class_incremental.label_scoring import ScoreArray, get_device, read_ids, score_labels
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance, TokenIds
from laconic.evaluation.statistics import Estimate
from laconic.interfaces import StatefulLM
from laconic.nested.state import FastWeightState

LogFunction = Callable[[str], None]


class ClassIncrementalLearner(Protocol):
    """A method that learns a stream and classifies items; its attribute `notes`, if any, is stored with the result.

    `learn` takes the examples of a task, each once, in order. `score` returns the scores of all classes, [N, K], and
    changes nothing; only the best of the classes seen so far needs its score, others may have an upper bound.
    """

    def learn(self, items: Sequence[LabelledUtterance]) -> None: ...
    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int]) -> ScoreArray: ...


def score_after(
    model: StatefulLM,
    stream: ClassIncrementalStream,
    state: FastWeightState,
    items: Sequence[LabelledUtterance],
    seen_classes: Sequence[int] | None = None,
    context_ids: TokenIds = (),
) -> ScoreArray:
    """Score items on a fork of the state of one row, after the beginning of a document and a context.

    With `seen_classes`, only the best of these is certain to have its score; the others may have upper bounds.
    """
    with torch.no_grad():
        prefix = torch.tensor([stream.start_ids + context_ids], device=get_device(model))
        prefix_state = read_ids(model, prefix, state).state
    return score_labels(model, prefix_state, [item.input_ids for item in items], stream.label_ids, seen_classes)


def predict_class(scores: ScoreArray, candidates: Sequence[int]) -> NDArray[np.int64]:
    """Return the candidate with the highest score; ties go to the lowest index."""
    classes = np.asarray(sorted(candidates))
    return classes[scores[:, classes].argmax(1)]


def run_stream(
    learner: ClassIncrementalLearner,
    stream: ClassIncrementalStream,
    log: LogFunction | None = None,
    *,
    is_joint: bool = False,
) -> list[list[float | None]]:
    """Learn the tasks one after another, evaluate all tasks so far after each, and return A, None for later tasks.

    Jointly, all are learned at once, mixed, and evaluated once: A has only its last row.
    """
    n, parts = stream.num_tasks, stream.train
    if is_joint:
        items = [item for task in stream.train for item in task]
        parts = (tuple(items[i] for i in rng.permutation(len(items), stream.seed)),)
    matrix: list[list[float | None]] = [[None] * n for _ in range(n - len(parts))]
    for i, part in enumerate(parts, len(matrix)):
        learner.learn(part)
        accuracies = evaluate_tasks(learner, stream, i)
        matrix.append([*accuracies, *[None] * (n - 1 - i)])
        if log is not None:
            mean = 100 * sum(accuracies) / len(accuracies)
            log(f"order {stream.seed}: task {i + 1} of {n}, accuracy {mean:.1f} % so far")
    return matrix


def evaluate_tasks(learner: ClassIncrementalLearner, stream: ClassIncrementalStream, i: int) -> list[float]:
    items = [item for task in stream.test[: i + 1] for item in task]
    seen_classes = stream.seen_classes(i)
    labels = np.array([item.label for item in items])
    correct = predict_class(learner.score(items, seen_classes), seen_classes) == labels
    borders = np.cumsum([len(task) for task in stream.test[: i + 1]])[:-1]
    return [float(x.mean()) for x in np.split(correct, borders)]


AccuracyRows = Sequence[Sequence[float | None]]
METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "lora", "ewc", "replay", "joint")


class ForgettingMetrics(NamedTuple):
    """Metrics of one class order; None if A has only its last row, or one task."""

    AA: float
    BWT: float | None
    forgetting: float | None
    plasticity: float | None


def compute_metrics(A: AccuracyRows) -> ForgettingMetrics:
    """Return the metrics of an accuracy matrix, whose last row is complete.

    AA = (1/n) sum over j of A[n-1, j]. BWT = 1/(n-1) sum over j < n-1 of A[n-1, j] - A[j, j]. Forgetting = 1/(n-1) sum
    over j < n-1 of the best A[i, j], j <= i < n-1, less A[n-1, j]; below 0 if tasks improved. Plasticity = (1/n) sum
    over j of A[j, j], the accuracy on each task right after it was learned.
    """
    n = len(A)
    matrix = np.array(A, dtype=np.float64)  # NaN for None
    last = matrix[-1]
    learned = matrix.diagonal()
    if n == 1 or A[0][0] is None:
        return ForgettingMetrics(float(last.mean()), None, None, None)
    best = np.nanmax(matrix[:-1, :-1], axis=0)
    values = last.mean(), (last - learned)[:-1].mean(), (best - last[:-1]).mean(), learned.mean()
    return ForgettingMetrics(*map(float, values))


def estimate_metrics(matrices: Sequence[AccuracyRows]) -> dict[str, Estimate]:
    """Return each metric over class orders with its 95 % interval, without those that the matrices do not give."""
    metrics = [compute_metrics(A) for A in matrices]
    columns = zip(ForgettingMetrics._fields, zip(*metrics, strict=True), strict=True)
    return {name: estimate_share(name, column) for name, column in columns if None not in column}


def estimate_share(name: str, values: Sequence[float]) -> Estimate:
    """Return the mean of a metric over class orders, with an interval inside the range of its values."""
    estimate = statistics.estimate_mean([[x] for x in values])
    lowest = 0.0 if name in ("AA", "plasticity") else -1.0
    return estimate._replace(low=max(estimate.low, lowest), high=min(estimate.high, 1.0))


def metrics_to_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Return estimates as JSON values, without `num_items`, which is always 1 per order."""
    return {
        name: {key: value for key, value in estimate._asdict().items() if key != "num_items"}
        for name, estimate in estimates.items()
    }
