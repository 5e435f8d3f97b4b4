"""The table of runs and sets: what stands in it, what may be said of differences, and its JSON."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from laconic.batches import PassCounts
from laconic.errors import InputError
from laconic.evaluation.reasoning import table
from laconic.evaluation.reasoning.evaluate import Latency
from laconic.evaluation.reasoning.suite import ReasoningSuite
from laconic.evaluation.reasoning.table import (
    COT_CONDITION,
    ReasoningTable,
    compare_to_baseline,
)
from laconic.evaluation.report.papers import PaperFigure
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import to_rich
from tests.evaluation.answers import answers, row

A, B = np.arange(200) < 120, np.arange(200) < 90
THREE = np.stack([A, np.arange(200) < 124, np.arange(200) < 116])


def stored_result(
    run: str, right: np.ndarray, task: str = "test", condition: str = "", unchanged: Sequence[str] = ()
) -> RunResult:
    info = {"paper_table": None, "table_row": None, "allow_contamination": False, "differences": []}
    variant = {"protocol": "codi"} | ({"condition": condition} if condition else {})
    items, figures = answers(right), ({"protocol": "codi", "bytes_per_position": 2048, "unchanged": unchanged},)
    return RunResult(run, task, (0,), (items,), info, variant, None if len(right) == 200 else len(right), (), figures)


def printed(outcome: ReasoningTable) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(to_rich(table.build_terminal_table(outcome)))
    return out.getvalue() + table.format_footnotes(outcome)


def test_reasoning_table_gives_a_spread_from_three_seeds() -> None:
    few = ReasoningTable([row("svamp", "kava", A)])
    many = ReasoningTable([row("svamp", "kava", THREE, seeds=(0, 1, 2))])
    assert "60.0 % (1 seed)" in printed(few)
    assert "1 seed: the intervals are about these weights" in printed(few)
    assert "60.0 ± 2.0 %" in printed(many)
    assert "seed" not in printed(many)
    assert "always “0”" in printed(few)
    assert "20.0 %" in printed(few)


def test_reasoning_table_shows_passes_cache_papers_and_timings() -> None:
    known = row("gsm8k", "kava", A, paper_figures=(PaperFigure(56.5, "P"),), latency=Latency(12.34, 50))
    text = printed(ReasoningTable([known, row("svamp", "kava", A, paper_figures=())]))
    assert re.search(r"60\.0 % \(1 seed\) +53\.0 – 66\.5 +1 +3 +2 +6 +50 → 60 +120\.0 +56\.5 \[P\] +12\.3", text)
    assert "not known" in text
    assert "protocol codi" in text


def test_compare_to_baseline_needs_holm_and_an_interval_without_0() -> None:
    outcome = compare_to_baseline(
        ReasoningTable([row("a", "x", A), row("a", "y", B), row("b", "x", B), row("b", "y", B)], "y")
    )
    assert [(item.row.dataset, item.row.run, item.other.run) for item in outcome] == [
        ("a", "x", "y"),
        ("b", "x", "y"),
    ]
    assert [item.is_significant for item in outcome] == [True, False]
    assert outcome[0].text == "+15.0 points (1 seed, interval +9.8 to +19.9)"
    assert outcome[1].text == "no difference shown (1 seed, interval -1.4 to +1.4)"
    assert [item.difference.p for item in outcome] == [pytest.approx(2.0**-29), 1.0]
    assert "a: x against y: +15.0 points" in printed(ReasoningTable([row("a", "x", A), row("a", "y", B)], "y"))


def test_compare_to_baseline_claims_what_its_p_value_shows() -> None:
    """Five gains of 100 have p = 1/16; a bootstrap gave .014, and the table called that significant."""
    a, b = np.arange(100) < 55, np.arange(100) < 50
    (outcome,) = compare_to_baseline(ReasoningTable([row("a", "x", a), row("a", "y", b)], "y"))
    assert outcome.difference.p == pytest.approx(2 / 2**5)
    assert (outcome.is_significant, outcome.text[:19]) == (False, "no difference shown")
    text = printed(ReasoningTable([row("a", "x", a), row("a", "y", b)], "y"))
    assert "differences: 95 % interval; p: McNemar's binomial test, Holm's correction over all" in text
    several = ReasoningTable([row("a", "x", THREE, seeds=range(3)), row("a", "y", THREE[::-1], seeds=range(3))], "y")
    assert "p: bootstrap over seeds and questions, Holm's" in printed(several)


def test_compare_to_baseline_pairs_equal_seeds() -> None:
    turned = row("a", "y", THREE[::-1], seeds=(2, 1, 0))
    (outcome,) = compare_to_baseline(ReasoningTable([row("a", "x", THREE, seeds=(0, 1, 2)), turned], "y"))
    assert (outcome.difference.mean, outcome.difference.num_seeds) == (0, 3)
    (other,) = compare_to_baseline(ReasoningTable([row("a", "x", A, seeds=(7,)), turned], "y"))
    assert other.difference.mean == pytest.approx((120 - 116) / 200)
    assert not compare_to_baseline(ReasoningTable([row("a", "x", A), row("b", "y", B)], "y"))


@pytest.mark.parametrize(("num_unchanged", "sizes"), [(0, [200]), (50, [200, 150]), (200, [200])])
def test_build_rows_of_a_stored_result_has_the_changed_questions_apart(num_unchanged: int, sizes: list[int]) -> None:
    unchanged = [f"q{i}" for i in range(num_unchanged)]
    rows = table.build_rows(stored_result("x", A, "gsm-hard", unchanged=unchanged))
    assert [row.accuracy.num_items for row in rows] == sizes
    if len(rows) > 1:
        assert (rows[1].dataset, rows[1].is_subset, rows[1].accuracy.mean) == ("gsm-hard, changed", True, 70 / 150)


def test_list_caveats_says_where_neither_cache_nor_passes_are_saved() -> None:
    chain = row("a", "x", A, COT_CONDITION, passes=PassCounts(1, 0, 0, 4), end=55)
    text = printed(ReasoningTable([row("a", "x", A), chain]))
    assert "a: the cache of x is not shorter: 60 positions, 55 with CoT\n" in text
    assert "a: x saves no passes: 6 per question, 5 with CoT" in text
    longer = row("a", "x", A, COT_CONDITION, passes=PassCounts(1, 0, 0, 30), end=59)
    assert "is not shorter: 60 positions, 59 with CoT; only passes are saved" in printed(
        ReasoningTable([row("a", "x", A), longer])
    )
    best = row("a", "x", THREE, COT_CONDITION, range(3), PassCounts(1, 0, 0, 30), 90)
    assert not table.list_caveats(ReasoningTable([row("a", "x", THREE, seeds=(0, 1, 2)), best]))[1:]


def test_reasoning_table_shows_the_first_questions_with_every_answer() -> None:
    outcome = ReasoningTable([row("svamp", "kava", A), row("svamp", "codi", ~A), row("gsm8k", "kava", ~A)])
    lines = printed(outcome).splitlines()
    start = lines.index("svamp, example: How many are 1?")
    assert lines[start : start + 4] == [
        "svamp, example: How many are 1?",
        "  expected: 1",
        "  kava, correct: 1",
        "  codi, wrong: no",
    ]
    data = table.table_to_json(outcome)["examples"]
    assert [example["dataset"] for example in data] == ["svamp"] * 3 + ["gsm8k"] * 3
    assert data[0]["answers"][1] == {"title": "codi", "text": "no", "is_correct": False}


def test_reasoning_table_refuses_other_questions() -> None:
    with pytest.raises(InputError, match="x and y answered different questions"):
        ReasoningTable([row("a", "x", A), row("a", "y", B[:100])])


def test_build_sections_separates_results_on_the_first_questions_of_a_set() -> None:
    cut = [stored_result(run, A[:50], condition=condition) for run, condition in (("x", "0 iterations"), ("z", ""))]
    cut[1] = replace(cut[1], notes=("the context ends",), info={**cut[1].info, "differences": ["train.steps"]})
    results = [cut[0], stored_result("x", A), stored_result("y", A), cut[1]]
    sections = ReasoningSuite().build_sections({"reasoning": results}, ["x", "y", "z"])
    assert [section.title for section in sections if "test" in section.title] == [
        "test: 200 questions (codi)",
        "test: 50 questions (codi)",
    ]
    full, part = (str(section.blocks[0]) for section in sections if "test" in section.title)
    names = ("x", "x, 0 iterations", "y", "z")
    assert [name for name in names if f"'{name}'" in full] == ["x", "y"]
    assert [name for name in names if f"'{name}'" in part] == ["x, 0 iterations", "z"]
    notes = str(sections[-1].blocks[-1])
    assert "the context ends" in notes
    assert "z differs from None, None, in train.steps" in notes


def test_table_to_json_holds_what_the_table_does() -> None:
    lines = [row("a", "x", A, paper_figures=()), row("a", "y", B), row("b", "x", B), row("b", "y", B)]
    outcome = json.loads(
        json.dumps(table.table_to_json(ReasoningTable(lines, "y", [("device", "cpu")], ["a note"])), allow_nan=False)
    )
    assert (outcome["schema"], outcome["protocol"], outcome["facts"], outcome["notes"]) == (
        2, "codi", {"device": "cpu"}, ["a note"]
    )  # fmt: skip
    first = outcome["datasets"][0]
    assert (first["dataset"], first["questions"], first["majority_baseline"], first["is_subset"]) == (
        "a", 200, {"answer": "0", "share": 0.2}, False
    )  # fmt: skip
    run = first["runs"][0]
    assert (run["run"], run["condition"], run["seeds"], run["unanswered"], run["papers"]) == (
        "x", "as trained", [0], 80, "not known"
    )  # fmt: skip
    assert run["accuracy"]["mean"] == 0.6
    assert run["passes"] == {"prompt": 0, "latent_setup": 1, "latent": 3, "answer": 2, "total": 6}
    assert run["cache_positions"] == {"begin": 50, "end": 60, "bytes": 60 * 2048}
    assert [item["dataset"] for item in outcome["comparisons"]] == ["a", "b"]
    assert outcome["comparisons"][0]["is_significant"] is True
