"""Shares of the full text's gain, and the Pareto front."""

from dataclasses import replace
from typing import Any, cast

import pytest

from laconic.evaluation.memories.report import build_comparison_table, compare_results, estimate_share
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import RunResult


def build_result(
    method: str, contexts: dict[str, tuple[float, float]], num_documents: int = 2, run: str = "model"
) -> RunResult:
    """Return a result from nats per token and bytes in use of each context, the same on every document."""

    def build_metrics(nats: float, size: float) -> dict[str, Any]:
        sizes = {"positions": size, "file_bytes": size, "used_bytes": size}
        return {**sizes, "needles": {"nats": nats, "right": 0.0}}

    items = [
        EvalItem(f"{i}", {name: build_metrics(*values) for name, values in contexts.items()})
        for i in range(num_documents)
    ]
    variant = {"method": method, "data": "books", "tokens": "1024", "keep": "0.125"}
    return RunResult(run, "memories", (0,), [items], variant=variant)


def test_estimate_share_is_the_ratio_of_mean_gains() -> None:
    share = estimate_share([4.0, 6.0], [3.0, 3.0], [2.0, 2.0])
    assert share is not None
    assert share.mean == pytest.approx(4 / 6)
    assert (share.low, share.high) == pytest.approx((1 / 2, 3 / 4))
    assert estimate_share([4.0], [5.0], [2.0]) == pytest.approx((-0.5, -0.5, -0.5))
    assert estimate_share([4.0], [5.0], [4.5]) is None, "the full text gains nothing"
    assert estimate_share([4.0, 4.0], [3.0, 3.0], [1.0, 5.0]) == pytest.approx((1.0, 1 / 3, 1.0)), "where it gains"


def test_compare_results_puts_methods_of_the_same_documents_on_one_front() -> None:
    (comparison,) = compare_results(
        [
            build_result("baselines", {"no context": (4.0, 0), "full text": (1.0, 64)}),
            build_result("a", {"a 0.125": (3.0, 8)}),
            build_result("b", {"b 0.125": (2.0, 8), "b 0.25": (2.0, 16)}),
            build_result("fit", {"fit 0.125": (1.0, 8)}, num_documents=1),
        ]
    )
    rows = build_comparison_table(comparison).rows
    assert {row[0] for row in rows if row[5].startswith("*")} == {"no context", "full text", "b 0.125"}
    assert (rows[-1][0], rows[-1][5]) == ("fit 0.125", "1.00 · 100 %"), "measured on one document only"
    assert comparison.list_tasks() == comparison.list_tasks(with_shares=True) == ["needles"]


def test_compare_results_resamples_documents_and_not_their_seeds() -> None:
    contexts = {"no context": (4.0, 0.0), "full text": (1.0, 64.0), "summary vectors": (2.0, 8.0)}
    one = build_result("baselines", contexts)
    cast(Any, one.items_by_seed[0][0].conditions["summary vectors"])["needles"]["nats"] = 3.0
    four = replace(one, seeds=(0, 1, 2, 3), items_by_seed=[*one.items_by_seed] * 4)
    (a,), (b,) = compare_results([one]), compare_results([four])
    assert [p.share("needles") for p in a.contexts] == [p.share("needles") for p in b.contexts]
    assert [row[1] for row in build_comparison_table(b).rows] == ["2", "2", "2"]


def test_build_comparison_table_rounds_small_losses_to_zero() -> None:
    contexts = {"no context": (4.0, 0.0), "full text": (1.0, 64.0), "window 0.5": (4.001, 32.0)}
    (comparison,) = compare_results([build_result("baselines", contexts)])
    assert [row[5] for row in build_comparison_table(comparison).rows][-1] == "4.00 · 0 %"


def test_build_comparison_table_beside_a_model_whose_full_text_gains_nothing() -> None:
    (comparison,) = compare_results(
        [
            build_result("baselines", {"no context": (4.0, 0), "full text": (1.0, 64)}),
            build_result("baselines", {"no context": (4.0, 0), "full text": (5.0, 64)}, run="weak"),
        ]
    )
    rows = build_comparison_table(comparison).rows
    assert [row[6] for row in rows] == ["*4.00 · 0 %", "*1.00 · 100 %", "4.00", "5.00"]
