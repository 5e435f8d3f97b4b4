"""Hand-made results of compressors: a document's loss falls with its number of vectors."""

from collections.abc import Mapping, Sequence

from laconic.evaluation.compression.evaluate import ConditionResult, DocumentResult
from laconic.evaluation.compression.table import CompressionResult

SCORED = (31, 8)


def make_condition(
    nll: float, num_correct: int, vectors: Sequence[int], expected: Sequence[float] = ()
) -> ConditionResult:
    """One condition of a document by its nats per token."""
    return ConditionResult((nll * 31, nll * 8), num_correct, sum(vectors), tuple(vectors), tuple(expected))


def make_document(name: str, conditions: Mapping[str, ConditionResult], num_facts: int | None = None) -> DocumentResult:
    return DocumentResult(name, num_facts, SCORED, conditions)


def fixed_lengths(d: int) -> dict[str, ConditionResult]:
    """No context, the whole text, and the lengths 1, 2, 4 of document `d`."""
    conditions = {"none": make_condition(3 + 0.1 * d, 4, ()), "full": ConditionResult((1.0 * 31, 1.0 * 8), 30, 64)}
    for n in (1, 2, 4):
        conditions[f"n = {n}"] = make_condition(2.4 - 0.2 * n + 0.1 * d, 10 + n, (n,))
    return conditions


def make_result(
    run: str,
    conditions: Sequence[Mapping[str, ConditionResult]],
    *,
    seeds: int = 1,
    length_policy: str = "stop_head",
    is_recall: bool = False,
) -> CompressionResult:
    """A run on documents, with equal results for every seed."""
    documents = [
        make_document(f"book {d % 2}@{d}", difference, 1 + d % 2 if is_recall else None)
        for d, difference in enumerate(conditions)
    ]
    info = {"length_policy": length_policy, "max_vectors": 4}
    return CompressionResult("test", run, tuple(range(seeds)), [documents] * seeds, info)
