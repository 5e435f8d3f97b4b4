"""Recall with a variable number of facts (E2): what is right, and how many vectors are kept, by the number of facts.

Symbols: F facts of a document, N vectors of it, E[N] the mean of the law that stops it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation.compression.evaluate import DocumentResult

GAP_CONDITIONS = ("soft", "compressed")


class RecallByFacts(NamedTuple):
    """Documents of one number of facts in one way: `hard` is the mean of N, `expected` that of E[N], of a document."""

    num_facts: int
    num_documents: int
    accuracy: float
    nll: float
    mean_vectors: float
    expected_vectors: float | None


def recall_by_facts(rows: Sequence[DocumentResult], condition: str) -> list[RecallByFacts]:
    """A way by the number of facts; rows of several seeds stand together."""
    found: list[RecallByFacts] = []
    for facts in sorted({row.num_facts for row in rows if row.num_facts is not None}):
        some = [row for row in rows if row.num_facts == facts]
        said = [row.conditions[condition] for row in some]
        tokens = sum(sum(row.scored_tokens) for row in some)
        right, nats = sum(each.num_correct for each in said) / tokens, sum(sum(each.nll) for each in said) / tokens
        expected = [sum(each.expected_lengths) for each in said if each.expected_lengths]
        hard = float(np.mean([sum(each.vectors_per_segment) for each in said]))
        found.append(RecallByFacts(facts, len(some), right, nats, hard, float(np.mean(expected)) if expected else None))
    return found


def length_fact_correlation(rows: Sequence[DocumentResult], condition: str) -> float | None:
    """Pearson's, of hard N with F over documents; None where either never changes."""
    facts = np.array([row.num_facts for row in rows], dtype=np.float64)
    hard = np.array([sum(row.conditions[condition].vectors_per_segment) for row in rows], dtype=np.float64)
    if facts.std() == 0 or hard.std() == 0:
        return None
    return float(np.corrcoef(facts, hard)[0, 1])


class SoftHardGap(NamedTuple):
    """Soft reading less hard: nats per scored token, accuracy, and E[N] less the mean of hard N.

    `expected` against `sampled`, the mean of lengths drawn from the law, says whether it is what it claims to be.
    """

    nll: float
    accuracy: float
    num_vectors: float
    expected_length: float
    sampled_length: float
    sampled_se: float


def soft_hard_gap(rows: Sequence[DocumentResult]) -> SoftHardGap | None:
    """The soft-hard gap and the calibration; None where no length is learned."""
    if not all({"soft", "compressed", "sampled"} <= row.conditions.keys() for row in rows):
        return None
    tokens = np.array([sum(row.scored_tokens) for row in rows])
    nats = {
        way: np.array([sum(row.conditions[way].nll) for row in rows]).sum() / tokens.sum() for way in GAP_CONDITIONS
    }
    right = {
        way: np.array([row.conditions[way].num_correct for row in rows]).sum() / tokens.sum() for way in GAP_CONDITIONS
    }
    expected = np.array([sum(row.conditions["soft"].expected_lengths) for row in rows])
    hard, drawn = (
        np.array([sum(row.conditions[way].vectors_per_segment) for row in rows]) for way in ("compressed", "sampled")
    )
    return SoftHardGap(
        float(nats["soft"] - nats["compressed"]),
        float(right["soft"] - right["compressed"]),
        float(expected.mean() - hard.mean()),
        float(expected.mean()),
        float(drawn.mean()),
        float(drawn.std(ddof=1) / np.sqrt(len(drawn))) if len(drawn) > 1 else float("nan"),
    )


def length_histogram(rows: Sequence[DocumentResult], condition: str) -> dict[int, int]:
    """How many segments became how many vectors."""
    counts: dict[int, int] = {}
    for n in sorted(n for row in rows for n in row.conditions[condition].vectors_per_segment):
        counts[n] = counts.get(n, 0) + 1
    return counts


def recall_summary(rows: Sequence[DocumentResult]) -> dict[str, Any]:
    """All that recall adds to the table of ways, as JSON holds it."""
    ways = [name for name, said in rows[0].conditions.items() if said.vectors_per_segment]
    found = soft_hard_gap(rows)
    return {
        "by_facts": {way: [each._asdict() for each in recall_by_facts(rows, way)] for way in ways},
        "correlation": {way: length_fact_correlation(rows, way) for way in ways},
        "gap": None if found is None else found._asdict(),
    }
