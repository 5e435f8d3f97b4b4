"""Runs that read, made by hand: a document is worth less the fewer vectors it has."""

from collections.abc import Mapping, Sequence

from laconic.evaluation.compression.evaluate import ConditionResult, DocumentResult
from laconic.evaluation.compression.table import CompressionResult

SCORED = (31, 8)


def said(nats: float, right: int, written: Sequence[int], expected: Sequence[float] = ()) -> ConditionResult:
    """A way of a document by its nats a token."""
    return ConditionResult((nats * 31, nats * 8), right, sum(written), tuple(written), tuple(expected))


def row(name: str, ways: Mapping[str, ConditionResult], facts: int | None = None) -> DocumentResult:
    """A document."""
    return DocumentResult(name, facts, SCORED, ways)


def fixed(d: int) -> dict[str, ConditionResult]:
    """No context, the whole text, and the lengths 1, 2, 4 of the document `d`."""
    found = {"none": said(3 + 0.1 * d, 4, ()), "full": ConditionResult((1.0 * 31, 1.0 * 8), 30, 64)}
    for n in (1, 2, 4):
        found[f"n = {n}"] = said(2.4 - 0.2 * n + 0.1 * d, 10 + n, (n,))
    return found


def line(
    run: str,
    ways: Sequence[Mapping[str, ConditionResult]],
    *,
    seeds: int = 1,
    length: str = "stop",
    facts: bool = False,
) -> CompressionResult:
    """A run on documents, alike for every seed."""
    rows = [row(f"book {d % 2}@{d}", each, 1 + d % 2 if facts else None) for d, each in enumerate(ways)]
    return CompressionResult("test", run, tuple(range(seeds)), [rows] * seeds, {"length": length, "cap": 4})
