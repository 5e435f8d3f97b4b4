"""The comparison of methods: its rows, what the figures do not show, and JSON."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laconic.batches import PassCounts
from laconic.evaluation.reasoning.evaluate import Latency
from laconic.evaluation.report import runs_table
from laconic.evaluation.report.runs_table import ComparisonReport, MethodResult
from laconic.evaluation.tables import format_count
from tests.evaluation.answers import row

N = 200


def right(share: float, seeds: int) -> np.ndarray:
    """Every seed right on the same share of questions, shifted by a few."""
    return np.stack([np.roll(np.arange(N) < share * N, 7 * seed) for seed in range(seeds)]).astype(float)


def built(seeds: int = 1) -> ComparisonReport:
    def line(name: str, title: str, share: float, passes: PassCounts, latency: Any = None, **more: Any) -> MethodResult:
        end = 50 + passes.answer
        answers = row("test", name, right(share, seeds), "", range(seeds), passes, end, latency=latency)
        return MethodResult(answers, title, **more)

    latents = PassCounts(0, 1, 2, 2)
    few, many = {0: [0.2] * seeds, 1: [0.3] * seeds}, {0: [0.2], 1: [0.9], 2: [0.95]}
    chain = line("chain", "Chain", 0.99, PassCounts(1, 0, 0, 20), Latency(12.34, 50))
    return ComparisonReport(
        results=[
            chain,
            line("pccot", "PCCoT", 0.30, latents, iteration_sweep=few),
            line("kava", "KaVa", 0.95, latents, iteration_sweep=many),
            line("random", "random", 0.95, latents, is_control=True),
        ],
        focus="kava",
        cot_baseline="chain",
        caveats=["A limit <of> mine."],
    )


def test_accuracy_has_a_spread_from_three_seeds() -> None:
    one, two, three = (runs_table.build_terminal_table(built(n)).rows[2][1] for n in (1, 2, 3))
    assert (one, two, three) == ("95.0 %", "95.0 %", "95.0 ± 0.0 %")
    assert any("Seeds: 2 runs of each" in text for text in runs_table.list_caveats(built(2)))
    assert not any("Seeds:" in text for text in runs_table.list_caveats(built(3)))


def test_build_terminal_table_separates_controls() -> None:
    rows = runs_table.build_terminal_table(built()).rows
    assert [bool(cells) for cells in rows] == [True, True, True, False, True]
    assert rows[0][3:] == ["21 = 1+0+0+20", "50 → 70", "12.3"]


def test_list_caveats_come_from_the_figures() -> None:
    caveats = runs_table.list_caveats(built(3))
    assert any(text.startswith("That KaVa is better than random: no difference shown") for text in caveats)
    assert not any("saves no passes" in text or "is not shorter" in text for text in caveats)
    page = built(3)
    for answer_passes, is_listed in ((5, False), (4, True)):
        chain = row("test", "chain", right(0.99, 3), seeds=(0, 1, 2), passes=PassCounts(1, 0, 0, answer_passes), end=51)
        caveats = runs_table.list_caveats(
            replace(page, results=[replace(page.results[0], row=chain), *page.results[1:]])
        )
        assert ("Costs: KaVa saves no passes: 5 per question, 5 with CoT." in caveats) is is_listed
        assert any(
            text.startswith("Costs: the cache of KaVa is not shorter: 52 positions, 51 with CoT") for text in caveats
        )


def test_compare_to_focus_uses_common_seeds() -> None:
    page = built(3)
    fewer = replace(page.results[1], row=row("test", "pccot", right(0.3, 2), seeds=(0, 1)))
    result = runs_table.compare_to_focus(replace(page, results=[page.results[0], fewer, *page.results[2:]]))
    assert [c.difference.num_seeds for _, c in result] == [3, 2, 3]


def test_report_to_json_and_footnotes() -> None:
    data = runs_table.report_to_json(built())
    assert [row["name"] for row in data["rows"]] == ["chain", "pccot", "kava", "random"]
    assert data["rows"][2]["iteration_sweep"] == {"0": [0.2], "1": [0.9], "2": [0.95]}
    assert data["majority_baseline"]["share"] == pytest.approx(0.2)
    text = runs_table.format_footnotes(built())
    for expected in (
        "majority baseline 20.0 %",
        "PCCoT: +65.0 points (1 seed,",
        "no difference shown (1 seed, interval",
    ):
        assert expected in text, expected
    assert "A limit <of> mine." in text


def test_format_count() -> None:
    assert [format_count(x) for x in (3.0, 3.004, 3.25)] == ["3", "3", "3.2"]
