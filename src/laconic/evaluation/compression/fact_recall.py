"""Recall of a variable number of facts: accuracy and vectors used, by the number of facts.

Symbols: F facts of a document, N its number of vectors, E[N] the mean under the stop distribution.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation.compression.evaluate import DocumentResult


class RecallByFacts(NamedTuple):
    """Documents with the same number of facts in one condition; `mean_vectors` is the mean N of a document."""

    num_facts: int
    num_documents: int
    accuracy: float
    nll: float
    mean_vectors: float
    expected_vectors: float | None


def recall_by_facts(documents: Sequence[DocumentResult], condition: str) -> list[RecallByFacts]:
    """Group a condition by the number of facts; documents of several seeds are pooled."""
    groups: list[RecallByFacts] = []
    for num_facts in sorted({document.num_facts for document in documents if document.num_facts is not None}):
        same = [document for document in documents if document.num_facts == num_facts]
        results = [document.conditions[condition] for document in same]
        tokens = sum(sum(document.scored_tokens) for document in same)
        expected = [sum(result.expected_lengths) for result in results if result.expected_lengths]
        groups.append(
            RecallByFacts(
                num_facts,
                len(same),
                sum(result.num_correct for result in results) / tokens,
                sum(sum(result.nll) for result in results) / tokens,
                float(np.mean([sum(result.vectors_per_segment) for result in results])),
                float(np.mean(expected)) if expected else None,
            )
        )
    return groups


def length_fact_correlation(documents: Sequence[DocumentResult], condition: str) -> float | None:
    """Compute Pearson's correlation of N with F over documents; None if either is constant."""
    facts = np.array([document.num_facts for document in documents], dtype=np.float64)
    lengths = np.array([sum(d.conditions[condition].vectors_per_segment) for d in documents], dtype=np.float64)
    if facts.std() == 0 or lengths.std() == 0:
        return None
    return float(np.corrcoef(facts, lengths)[0, 1])


class SoftHardGap(NamedTuple):
    """Soft reading minus hard reading, and the calibration of the stop distribution.

    Attributes:
        nll: Difference in nats per scored token.
        accuracy: Difference in accuracy.
        num_vectors: E[N] minus the mean of hard N.
        expected_length: E[N]; it should match `sampled_length`.
        sampled_length: Mean of lengths sampled from the stop distribution.
        sampled_se: Its standard error.
    """

    nll: float
    accuracy: float
    num_vectors: float
    expected_length: float
    sampled_length: float
    sampled_se: float


def soft_hard_gap(documents: Sequence[DocumentResult]) -> SoftHardGap | None:
    """Compute the gap between soft and hard reading; None if lengths are not learned."""
    if not all({"soft", "compressed", "sampled"} <= document.conditions.keys() for document in documents):
        return None
    tokens = sum(sum(document.scored_tokens) for document in documents)

    def per_token(condition: str) -> tuple[float, float]:
        results = [document.conditions[condition] for document in documents]
        return sum(sum(r.nll) for r in results) / tokens, sum(r.num_correct for r in results) / tokens

    def lengths(condition: str) -> np.ndarray:
        return np.array([sum(document.conditions[condition].vectors_per_segment) for document in documents])

    (soft_nll, soft_accuracy), (hard_nll, hard_accuracy) = per_token("soft"), per_token("compressed")
    expected = np.array([sum(document.conditions["soft"].expected_lengths) for document in documents])
    sampled = lengths("sampled")
    return SoftHardGap(
        float(soft_nll - hard_nll),
        float(soft_accuracy - hard_accuracy),
        float(expected.mean() - lengths("compressed").mean()),
        float(expected.mean()),
        float(sampled.mean()),
        float(sampled.std(ddof=1) / np.sqrt(len(sampled))) if len(sampled) > 1 else float("nan"),
    )


def length_histogram(documents: Sequence[DocumentResult], condition: str) -> dict[int, int]:
    """Count the segments by their number of vectors, in ascending order."""
    counts = Counter(n for document in documents for n in document.conditions[condition].vectors_per_segment)
    return dict(sorted(counts.items()))


def recall_summary(documents: Sequence[DocumentResult]) -> dict[str, Any]:
    """Return the figures that fact recall adds to a result, as a JSON object."""
    conditions = [name for name, result in documents[0].conditions.items() if result.vectors_per_segment]
    gap = soft_hard_gap(documents)
    return {
        "by_facts": {name: [group._asdict() for group in recall_by_facts(documents, name)] for name in conditions},
        "correlation": {name: length_fact_correlation(documents, name) for name in conditions},
        "gap": None if gap is None else gap._asdict(),
    }
