"""Recall with a variable number of facts (E2): what is right, and how many vectors are kept, by the number of facts.

Symbols: F facts of a document, N vectors of it, E[N] the mean of the law that stops it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation.scored import Row

GAP = ("soft", "compressed")


class ByFacts(NamedTuple):
    """Documents of one number of facts in one way: `hard` is the mean of N, `expected` that of E[N], of a document."""

    facts: int
    documents: int
    accuracy: float
    nats: float
    hard: float
    expected: float | None


def by_facts(rows: Sequence[Row], way: str) -> list[ByFacts]:
    """A way by the number of facts; rows of several seeds stand together."""
    found: list[ByFacts] = []
    for facts in sorted({row.facts for row in rows if row.facts is not None}):
        some = [row for row in rows if row.facts == facts]
        said = [row.ways[way] for row in some]
        tokens = sum(sum(row.scored) for row in some)
        right, nats = sum(each.right for each in said) / tokens, sum(sum(each.nats) for each in said) / tokens
        expected = [sum(each.expected) for each in said if each.expected]
        hard = float(np.mean([sum(each.written) for each in said]))
        found.append(ByFacts(facts, len(some), right, nats, hard, float(np.mean(expected)) if expected else None))
    return found


def correlation(rows: Sequence[Row], way: str) -> float | None:
    """Pearson's, of hard N with F over documents; None where either never changes."""
    facts = np.array([row.facts for row in rows], dtype=np.float64)
    hard = np.array([sum(row.ways[way].written) for row in rows], dtype=np.float64)
    if facts.std() == 0 or hard.std() == 0:
        return None
    return float(np.corrcoef(facts, hard)[0, 1])


class Gap(NamedTuple):
    """Soft reading less hard: nats per scored token, accuracy, and E[N] less the mean of hard N.

    `expected` against `sampled`, the mean of lengths drawn from the law, says whether it is what it claims to be.
    """

    nats: float
    accuracy: float
    vectors: float
    expected: float
    sampled: float
    sampled_se: float


def gap(rows: Sequence[Row]) -> Gap | None:
    """The soft-hard gap and the calibration; None where no length is learned."""
    if not all({"soft", "compressed", "sampled"} <= row.ways.keys() for row in rows):
        return None
    tokens = np.array([sum(row.scored) for row in rows])
    nats = {way: np.array([sum(row.ways[way].nats) for row in rows]).sum() / tokens.sum() for way in GAP}
    right = {way: np.array([row.ways[way].right for row in rows]).sum() / tokens.sum() for way in GAP}
    expected = np.array([sum(row.ways["soft"].expected) for row in rows])
    hard, drawn = (np.array([sum(row.ways[way].written) for row in rows]) for way in ("compressed", "sampled"))
    return Gap(
        float(nats["soft"] - nats["compressed"]),
        float(right["soft"] - right["compressed"]),
        float(expected.mean() - hard.mean()),
        float(expected.mean()),
        float(drawn.mean()),
        float(drawn.std(ddof=1) / np.sqrt(len(drawn))) if len(drawn) > 1 else float("nan"),
    )


def histogram(rows: Sequence[Row], way: str) -> dict[int, int]:
    """How many segments became how many vectors."""
    counts: dict[int, int] = {}
    for n in sorted(n for row in rows for n in row.ways[way].written):
        counts[n] = counts.get(n, 0) + 1
    return counts


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """All that recall adds to the table of ways, as JSON holds it."""
    ways = [name for name, said in rows[0].ways.items() if said.written]
    found = gap(rows)
    return {
        "by_facts": {way: [each._asdict() for each in by_facts(rows, way)] for way in ways},
        "correlation": {way: correlation(rows, way) for way in ways},
        "gap": None if found is None else found._asdict(),
    }
