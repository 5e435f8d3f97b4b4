"""Recall of a variable number of facts: accuracy and vectors used, by the number of facts.

Symbols: F facts of a document, N its number of vectors, E[N] the mean under the stop distribution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.evaluation.results_store import EvalItem


class RecallByFacts(NamedTuple):
    """Documents with the same number of facts in one condition; `mean_vectors` is the mean N of a document."""

    num_facts: int
    num_documents: int
    accuracy: float
    mean_vectors: float


def recall_by_facts(items: Sequence[EvalItem], condition: str) -> list[RecallByFacts]:
    """Group a condition by the number of facts; documents of several seeds are pooled."""
    groups: list[RecallByFacts] = []
    for num_facts in sorted({item.shared["num_facts"] for item in items}):
        same = [item for item in items if item.shared["num_facts"] == num_facts]
        accuracy, vectors = score_per_token(same, condition)[0], float(num_vectors(same, condition).mean())
        groups.append(RecallByFacts(num_facts, len(same), accuracy, vectors))
    return groups


def score_per_token(items: Sequence[EvalItem], condition: str) -> tuple[float, float]:
    """Return accuracy and nats per scored token of a condition, over all documents."""
    metrics = [item.conditions[condition] for item in items]
    tokens = sum(sum(m["scored_tokens"]) for m in metrics)
    return sum(m["num_correct"] for m in metrics) / tokens, sum(sum(m["nll"]) for m in metrics) / tokens


def length_fact_correlation(items: Sequence[EvalItem], condition: str) -> float | None:
    """Compute Pearson's correlation of N with F over documents; None if either is constant."""
    facts = np.array([item.shared["num_facts"] for item in items], dtype=np.float64)
    lengths = num_vectors(items, condition)
    if facts.std() == 0 or lengths.std() == 0:
        return None
    return float(np.corrcoef(facts, lengths)[0, 1])


def num_vectors(items: Sequence[EvalItem], condition: str) -> NDArray[np.float64]:
    return np.array([sum(item.conditions[condition]["vectors_per_segment"]) for item in items], dtype=np.float64)


class SoftHardGap(NamedTuple):
    """Soft reading minus hard reading, per scored token, and the calibration of the stop distribution.

    `num_vectors` is E[N] minus the mean of hard N. E[N] should match the mean of lengths sampled from the distribution.
    """

    nll: float
    accuracy: float
    num_vectors: float
    expected_length: float
    sampled_length: float
    sampled_se: float


def soft_hard_gap(items: Sequence[EvalItem]) -> SoftHardGap | None:
    """Compute the gap between soft and hard reading; None if lengths are not learned."""
    if not all({"soft", "compressed", "sampled"} <= item.conditions.keys() for item in items):
        return None
    (soft_accuracy, soft_nll), (hard_accuracy, hard_nll) = (score_per_token(items, c) for c in ("soft", "compressed"))
    expected = np.array([sum(item.conditions["soft"]["expected_lengths"]) for item in items])
    hard, sampled = num_vectors(items, "compressed"), num_vectors(items, "sampled")
    lengths = float(expected.mean() - hard.mean()), float(expected.mean()), float(sampled.mean())
    se = float(sampled.std(ddof=1) / np.sqrt(len(sampled))) if len(sampled) > 1 else float("nan")
    return SoftHardGap(soft_nll - hard_nll, soft_accuracy - hard_accuracy, *lengths, se)
