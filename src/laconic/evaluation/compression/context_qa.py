"""Scores of context question answering and in-context classification, computed from stored records.

Symbols: C labels, R runs of one recipe, N questions. A condition says what preceded the question: no context, vectors
or text; its context size is the number of vectors or tokens of that.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.compression.perplexity import clustered_standard_error, nan_to_none
from laconic.evaluation.results_store import EvalMetadata, EvalRecord
from laconic.evaluation.statistics import Estimate

TaskKind = Literal["answers", "labels"]


class Item(NamedTuple):
    """A question, or a text to label.

    Attributes:
        id: Its id in the task.
        shared: Metrics that do not depend on the condition, such as the accepted answers.
        conditions: Metrics of each condition.
    """

    id: str
    shared: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]

    def to_records(self, metadata: EvalMetadata) -> list[EvalRecord]:
        """Return one record per condition."""
        return [
            metadata.new_record(self.id, name, {**self.shared, **metrics}) for name, metrics in self.conditions.items()
        ]


Items = Sequence[Item]


def group_items(records: Sequence[EvalRecord]) -> list[Item]:
    """Group records by item, in order."""
    items: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        items.setdefault(record.item, {})[record.condition] = record.metrics
    return [Item(id, next(iter(conditions.values())), conditions) for id, conditions in items.items()]


def normalize_words(text: str) -> list[str]:
    """Split text into lower-case words without articles and punctuation, as SQuAD does."""
    plain = re.sub(r"[^\w\s]", "", text.lower())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def answer_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalized words equal those of an answer, else 0."""
    return float(any(normalize_words(prediction) == normalize_words(answer) for answer in answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Return the largest word F1 with any answer."""
    return max(word_overlap_f1(normalize_words(prediction), normalize_words(answer)) for answer in answers)


def word_overlap_f1(a: Sequence[str], b: Sequence[str]) -> float:
    """Return the F1 of two lists of words; 1 if both are empty."""
    common = sum((Counter(a) & Counter(b)).values())
    return float(a == b) if not (a and b) else 2 * common / (len(a) + len(b))


def substring_match(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of answers that occur in the prediction, ignoring case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


METRICS = {"match": answer_match, "F1": f1_score, "substring match": substring_match}


class MetricResult(NamedTuple):
    """A metric of one condition and its gain over no context, paired by question.

    Standard errors are clustered by context, because questions about one context are alike.
    """

    mean: Estimate
    se: float
    gain: float
    gain_se: float


class ConditionScores(NamedTuple):
    """The metrics of one condition and its mean context size."""

    condition: str
    context_size: float
    metrics: Mapping[str, MetricResult]


class ICLScore(NamedTuple):
    """Accuracy of one condition of demonstrations.

    Attributes:
        condition: Name of the condition.
        context_size: Mean number of vectors or tokens of demonstrations.
        accuracy: Mean accuracy on test texts.
        std: Standard deviation over orders of demonstrations of all runs; None for a single order.
        accuracies: Accuracy of each order of each run.
        variants: The variant chosen on validation texts, for each run.
        validation_accuracy: Its mean accuracy there.
    """

    condition: str
    context_size: float
    accuracy: float
    std: float | None
    accuracies: tuple[float, ...]
    variants: tuple[str, ...]
    validation_accuracy: float


@dataclass(frozen=True)
class ContextTaskResult:
    """A run, of one seed or several, on a file of context questions or labelled texts.

    Attributes:
        run: Name of the run.
        file: Name of the file.
        kind: "answers" for context questions, "labels" for labelled texts.
        query_aware: Whether the question preceded the context in the compression.
        seeds: Seeds of the run.
        items_by_seed: Stored items of each seed, ordered by id.
        paper_row: Row of a paper's table that the run's recipe names.
    """

    run: str
    file: str
    kind: TaskKind
    query_aware: bool
    seeds: tuple[int, ...]
    items_by_seed: Sequence[Items]
    paper_row: str | None = None

    @cached_property
    def condition_scores(self) -> list[ConditionScores]:
        """Scores of each condition of context questions."""
        return [score_answers(self.items_by_seed, name) for name in common_conditions(self.items_by_seed)]

    @cached_property
    def icl_scores(self) -> list[ICLScore]:
        """Scores of each condition of in-context classification."""
        return [score_labels(self.items_by_seed, name) for name in common_conditions(self.items_by_seed)]

    @property
    def majority_accuracy(self) -> float:
        """Share of the most common label among the test texts."""
        test = select_items(self.items_by_seed[0], "test", False)
        return Counter(item.shared["label"] for item in test).most_common(1)[0][1] / len(test)

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self.items_by_seed[0][0].shared["label_tokens"])

    @property
    def num_contexts(self) -> int:
        """Number of contexts that questions are about."""
        return len({item.shared["context"] for item in self.items_by_seed[0]})

    @property
    def num_items(self) -> int:
        """Number of questions, or of test texts."""
        items = self.items_by_seed[0]
        return len(items) if self.kind == "answers" else sum(is_first_order(item) for item in items)

    def to_json(self) -> dict[str, Any]:
        """Return the scores as a JSON object."""
        data: dict[str, Any] = {
            "run": self.run,
            "file": self.file,
            "kind": self.kind,
            "query_aware": self.query_aware,
            "seeds": list(self.seeds),
            "items": self.num_items,
        }
        if self.kind == "labels":
            scores = [score._asdict() for score in self.icl_scores]
            return data | {
                "majority_accuracy": self.majority_accuracy,
                "num_labels": self.num_labels,
                "conditions": scores,
            }
        scores = [
            score._asdict()
            | {"metrics": {k: x._asdict() | {"mean": x.mean._asdict()} for k, x in score.metrics.items()}}
            for score in self.condition_scores
        ]
        return nan_to_none(data | {"contexts": self.num_contexts, "conditions": scores})


def is_first_order(item: Item) -> bool:
    """Test whether an item is a test text after the first order of demonstrations."""
    return (item.shared["split"], item.shared["order_seed"], item.shared["balanced"]) == ("test", 0, False)


def common_conditions(runs: Sequence[Items]) -> list[str]:
    """Return the conditions that every item of every run has, in order."""
    return [name for name in runs[0][0].conditions if all(name in item.conditions for items in runs for item in items)]


def mean_context_size(runs: Sequence[Items], condition: str) -> float:
    """Return the mean context size of a condition."""
    return float(np.mean([item.conditions[condition]["context_size"] for items in runs for item in items]))


def score_answers(runs: Sequence[Items], condition: str) -> ConditionScores:
    """Score a condition of context questions."""
    contexts = [str(item.shared["context"]) for item in runs[0]]
    results: dict[str, MetricResult] = {}
    for name, metric in METRICS.items():
        values, without = (
            np.array(
                [[metric(item.conditions[c]["output"], item.shared["answers"]) for item in items] for items in runs]
            )
            for c in (condition, "none")
        )
        gain = values - without
        results[name] = MetricResult(
            statistics.estimate_proportion(values),
            clustered_standard_error(values, contexts),
            float(gain.mean()),
            clustered_standard_error(gain, contexts),
        )
    return ConditionScores(condition, mean_context_size(runs, condition), results)


def choose_label(item: Item, condition: str, calibrated: bool) -> int:
    """Return the label of smallest mean NLL per token; `calibrated` subtracts the NLL without the text (Eq. AC11)."""
    scores = item.conditions[condition]
    tokens = np.array(item.shared["label_tokens"])
    nll = np.array(scores["label_nll"]) / tokens
    return int((nll - np.array(scores["null_nll"]) / tokens if calibrated else nll).argmin())


def label_accuracy(items: Items, condition: str, calibrated: bool) -> float:
    """Return the share of items whose chosen label is correct."""
    return float(np.mean([choose_label(item, condition, calibrated) == item.shared["label"] for item in items]))


def score_labels(runs: Sequence[Items], condition: str) -> ICLScore:
    """Choose the variant of a condition on validation texts, and compute its test accuracy for each order."""
    accuracies, variants, validation = list[float](), list[str](), list[float]()
    for items in runs:
        scores = {
            (balanced, calibrated): label_accuracy(select_items(items, "valid", balanced), condition, calibrated)
            for balanced in (False, True)
            for calibrated in (False, True)
        }
        balanced, calibrated = max(scores, key=lambda variant: scores[variant])
        test = select_items(items, "test", balanced)
        for seed in sorted({item.shared["order_seed"] for item in test}):
            same_order = [item for item in test if item.shared["order_seed"] == seed]
            accuracies.append(label_accuracy(same_order, condition, calibrated))
        names = [name for name, is_on in (("balanced", balanced), ("calibrated", calibrated)) if is_on]
        variants.append(" and ".join(names) or "neither")
        validation.append(scores[(balanced, calibrated)])
    return ICLScore(
        condition,
        mean_context_size(runs, condition),
        float(np.mean(accuracies)),
        float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None,
        tuple(accuracies),
        tuple(variants),
        float(np.mean(validation)),
    )


def select_items(items: Items, split: str, balanced: bool) -> list[Item]:
    """Return the items of a split with one kind of demonstrations."""
    return [item for item in items if (item.shared["split"], item.shared["balanced"]) == (split, balanced)]
