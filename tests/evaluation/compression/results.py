"""Hand-made results of compressors: a document's loss falls with its number of vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import RunResult

SCORED = [31, 8]


def make_condition(
    nll: float,
    num_correct: int,
    vectors: Sequence[int],
    expected: Sequence[float] = (),
    context_size: int | None = None,
) -> dict[str, Any]:
    """One condition of a document by its nats per token."""
    return {
        "num_facts": None,
        "scored_tokens": SCORED,
        "nll": [nll * 31, nll * 8],
        "num_correct": num_correct,
        "context_size": sum(vectors) if context_size is None else context_size,
        "vectors_per_segment": [*vectors],
        "expected_lengths": [*expected],
    }


def fixed_lengths(d: int) -> dict[str, dict[str, Any]]:
    """No context, the whole text, and the lengths 1, 2, 4 of document `d`."""
    conditions = {"none": make_condition(3 + 0.1 * d, 4, ()), "full": make_condition(1.0, 30, (), context_size=64)}
    for n in (1, 2, 4):
        conditions[f"n = {n}"] = make_condition(2.4 - 0.2 * n + 0.1 * d, 10 + n, (n,))
    return conditions


def make_result(
    run: str,
    conditions: Sequence[Mapping[str, Mapping[str, Any]]],
    *,
    seeds: int = 1,
    length_policy: str = "stop_head",
    is_recall: bool = False,
) -> RunResult:
    """A run on documents, with equal results for every seed."""
    items: list[EvalItem] = []
    for d, by_name in enumerate(conditions):
        facts = {"num_facts": 1 + d % 2 if is_recall else None}
        items.append(EvalItem(f"book {d % 2}@{d}", {name: {**metrics, **facts} for name, metrics in by_name.items()}))
    info = {"length_policy": length_policy, "max_vectors": 4}
    return RunResult(run, "test", tuple(range(seeds)), [items] * seeds, info)
