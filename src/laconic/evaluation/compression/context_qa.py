"""Scores of context question answering and in-context classification, computed from stored items.

Symbols: C labels, R runs of one recipe, N questions. A condition says what preceded the question: no context, vectors
or text; its context size is the number of vectors or tokens of that.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.compression.perplexity import clustered_standard_error
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import Estimate

Items = Sequence[EvalItem]


def normalize_words(text: str) -> list[str]:
    """Split text into lower-case words without articles and punctuation, as SQuAD does."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def answer_match(prediction: str, answers: Sequence[str]) -> float:
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

    The context size is the mean number of vectors or tokens of demonstrations. The standard deviation is over orders of
    demonstrations of all runs, None for a single order. `variants` are those chosen on validation texts for each run,
    with their mean accuracy there.
    """

    condition: str
    context_size: float
    accuracy: float
    std: float | None
    accuracies: tuple[float, ...]
    variants: tuple[str, ...]
    validation_accuracy: float


def majority_accuracy(items: Items) -> float:
    """Return the share of the most common label among the test texts."""
    test = select_items(items, "test", False)
    return Counter(item.shared["label"] for item in test).most_common(1)[0][1] / len(test)


def count_test_texts(items: Items) -> int:
    """Return the number of texts to label: those after the first order of demonstrations."""
    return sum(item.shared["order_seed"] == 0 for item in select_items(items, "test", False))


def mean_context_size(runs: Sequence[Items], condition: str) -> float:
    return float(np.mean([item.conditions[condition]["context_size"] for items in runs for item in items]))


def score_answers(runs: Sequence[Items], condition: str) -> ConditionScores:
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


def choose_label(item: EvalItem, condition: str, calibrated: bool) -> int:
    """Return the label of smallest mean NLL per token; `calibrated` subtracts the NLL without the text (Eq. AC11)."""
    scores = item.conditions[condition]
    tokens = np.array(item.shared["label_tokens"])
    nll = np.array(scores["label_nll"]) / tokens
    return int((nll - np.array(scores["null_nll"]) / tokens if calibrated else nll).argmin())


def label_accuracy(items: Items, condition: str, calibrated: bool) -> float:
    return float(np.mean([choose_label(item, condition, calibrated) == item.shared["label"] for item in items]))


def compute_icl_score(runs: Sequence[Items], condition: str) -> ICLScore:
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
    size, accuracy = mean_context_size(runs, condition), float(np.mean(accuracies))
    std = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None
    return ICLScore(condition, size, accuracy, std, tuple(accuracies), tuple(variants), float(np.mean(validation)))


def select_items(items: Items, split: str, balanced: bool) -> list[EvalItem]:
    """Return the items of a split with one kind of demonstrations."""
    return [item for item in items if (item.shared["split"], item.shared["balanced"]) == (split, balanced)]
