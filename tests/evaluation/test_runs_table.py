"""The page: what it says, that it asks for nothing, that it is read without eyes and without script."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laconic.batches import PassCounts
from laconic.evaluation.reasoning.evaluate import Latency
from laconic.evaluation.report import runs_table
from laconic.evaluation.report.runs_table import ComparisonReport, MethodResult
from laconic.evaluation.tables import format_count
from tests.conftest import needs
from tests.evaluation.answers import row
from tests.evaluation.pages import check_page, leave_out_images

N = 200


def right(share: float, seeds: int) -> np.ndarray:
    """Every seed right on the same share of questions, shifted by a few."""
    return np.stack([np.roll(np.arange(N) < share * N, 7 * seed) for seed in range(seeds)]).astype(float)


def built(seeds: int = 1) -> ComparisonReport:
    def line(name: str, title: str, share: float, passes: PassCounts, latency: Any = None, **more: Any) -> MethodResult:
        end = 50 + passes.answer
        answers = row("test", name, right(share, seeds), "", range(seeds), passes, end, latency=latency)
        return MethodResult(answers, title, f"how {title}", **more)

    curve, latents = [[(10, 0.2), (20, 0.5), (30, 0.8)]] * seeds, PassCounts(0, 1, 2, 2)
    few, many = {0: [0.2] * seeds, 1: [0.3] * seeds}, {0: [0.2], 1: [0.9], 2: [0.95]}
    chain = line("chain", "Chain", 0.99, PassCounts(1, 0, 0, 20), Latency(12.34, 50), learning_curves=curve)
    return ComparisonReport(
        title="Thoughts & chains",
        lead="What is shown.",
        results=[
            chain,
            line("pccot", "PCCoT", 0.30, latents, learning_curves=curve, iteration_sweep=few),
            line("kava", "KaVa", 0.95, latents, learning_curves=curve, iteration_sweep=many),
            line("random", "random", 0.95, latents, is_control=True),
        ],
        focus="kava",
        cot_baseline="chain",
        caveats=["A limit <of> mine."],
        recipe_differences=[("chain", "all", "a quickstart")],
        facts=[("command", "laconic demo --num-seeds 1")],
    )


@pytest.mark.medium
def test_render_report_is_one_self_contained_file() -> None:
    needs("matplotlib")
    html = runs_table.render_report(built(3))
    page = check_page(html)
    assert "prefers-color-scheme: dark" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) >= 3
    assert all("KaVa" in str(attributes["alt"]) for attributes in images[:3])
    assert runs_table.render_report(built(3)) == html


@pytest.mark.medium
def test_render_report_shows_results_and_comparisons() -> None:
    text = check_page(runs_table.render_report(built())).words
    for text_part in (
        "Thoughts & chains",
        "95.0 %",
        "1 seed",
        "5 = 0+1+2+2",
        "50 → 52",
        "12.3",
        "majority baseline 20.0 %",
        "A limit <of> mine.",
        "laconic demo --num-seeds 1",
        "a quickstart",
        "over PCCoT",
        "+65.0 points (1 seed,",
        "no difference shown (1 seed, interval",
    ):
        assert text_part in text, text_part


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


def test_render_report_works_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = runs_table.render_report(built())
    assert "<img" not in html
    assert ".[report]" in html


def test_render_report_leaves_out_empty_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_images(monkeypatch)
    page = replace(built(), focus="chain", results=built().results[:1], recipe_differences=[], caveats=[])
    html = runs_table.render_report(page)
    assert "Differences" not in html


def test_format_count() -> None:
    assert [format_count(x) for x in (3.0, 3.004, 3.25)] == ["3", "3", "3.2"]
