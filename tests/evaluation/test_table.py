"""The table of runs and sets: what stands in it, what may be said of differences, and its JSON."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from laconic.batches import PassCounts
from laconic.errors import InputError, UsageError
from laconic.evaluation.reasoning import table
from laconic.evaluation.reasoning.evaluate import AnswerRecord, ReasoningResult
from laconic.evaluation.reasoning.latency import Latency, Throughput
from laconic.evaluation.reasoning.table import (
    COT_CONDITION,
    ReasoningRow,
    ReasoningTable,
    changed_subset,
    compare_to_baseline,
    macro_averages,
)
from laconic.evaluation.report.paper_figures import PaperFigure

PASSES = PassCounts(0, 1, 3, 2)


def result(right: np.ndarray, passes: PassCounts = PASSES, end: int = 60, protocol: str = "codi") -> ReasoningResult:
    rows = [
        AnswerRecord(f"q{i}", f"hash {i}", str(i % 5), str(i % 5) if yes else "no", str(i % 5) if yes else None, bool(yes),
            passes, (50, end))
        for i, yes in enumerate(right)
    ]  # fmt: skip
    return ReasoningResult(tuple(rows), protocol, 2048)


def line(
    set: str, run: str, right: np.ndarray, way: str = "", seeds: tuple[int, ...] = (0,), **more: object
) -> ReasoningRow:
    rights = np.atleast_2d(right)
    return ReasoningRow(set, run, way, seeds, tuple(result(each) for each in rights), **more)  # pyright: ignore


A, B = np.arange(200) < 120, np.arange(200) < 90
THREE = np.stack([A, np.arange(200) < 124, np.arange(200) < 116])


def printed(found: ReasoningTable) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(table.build_table(found))
    return out.getvalue() + table.format_footnotes(found)


def test_a_mean_needs_three_seeds_and_fewer_are_named() -> None:
    few = ReasoningTable([line("svamp", "kava", A)])
    many = ReasoningTable([line("svamp", "kava", THREE, seeds=(0, 1, 2))])
    assert "60.0 % (n=1)" in printed(few)
    assert "n=1: the intervals are of these runs; another seed may fall outside them" in printed(few)
    assert "60.0 ± 2.0 %" in printed(many)
    assert "n=1" not in printed(many)
    assert "always “0”" in printed(few)
    assert "20.0 %" in printed(few)


def test_a_line_has_passes_cache_papers_and_time() -> None:
    took = Latency(12.34, 15.6, 50)
    known = line("gsm8k", "kava", A, paper=(PaperFigure(56.5, "P"),), latency=took, throughput=Throughput(81.25, 64))
    text = printed(ReasoningTable([known, line("svamp", "kava", A, paper=())]))
    assert re.search(
        r"60\.0 % \(n=1\) +53\.0 – 66\.5 +1 +3 +2 +6 +50 → 60 +120\.0 +56\.5 \[P\] +12\.3 +15\.6 +81\.2", text
    )
    assert "not known" in text
    assert "protocol codi" in text


def test_a_difference_is_one_only_after_holm_and_where_its_interval_leaves_0_out() -> None:
    found = compare_to_baseline(
        ReasoningTable([line("a", "x", A), line("a", "y", B), line("b", "x", B), line("b", "y", B)], "y")
    )
    assert [(each.dataset, each.run, each.baseline) for each in found] == [
        ("a", "x", "y"),
        ("b", "x", "y"),
        (table.MEAN_TITLE, "x", "y"),
    ]
    assert [each.is_significant for each in found] == [True, False, True]
    assert found[0].text.startswith("+15.0 points (n=1, interval +1")
    assert found[1].text == "no difference shown (n=1, interval +0.0 to +0.0)"
    assert [each.mcnemar_p for each in found] == [pytest.approx(2.0**-29), 1.0, None]
    assert found[2].difference.mean == pytest.approx(0.075)
    assert "a: x against y: +15.0 points" in printed(ReasoningTable([line("a", "x", A), line("a", "y", B)], "y"))


def test_runs_are_paired_by_seed_where_they_have_the_same() -> None:
    turned = line("a", "y", THREE[::-1], seeds=(2, 1, 0))
    (found,) = compare_to_baseline(ReasoningTable([line("a", "x", THREE, seeds=(0, 1, 2)), turned], "y"))
    assert (found.difference.mean, found.difference.num_seeds, found.mcnemar_p) == (0, 3, None)
    (other,) = compare_to_baseline(ReasoningTable([line("a", "x", A, seeds=(7,)), turned], "y"))
    assert other.difference.mean == pytest.approx((120 - 116) / 200)
    assert not compare_to_baseline(ReasoningTable([line("a", "x", A), line("b", "y", B)], "y"))


def test_the_mean_over_sets_leaves_parts_out() -> None:
    hard = line("gsm-hard", "x", A)
    part = changed_subset(hard, [i >= 50 for i in range(200)])
    assert part is not None
    assert (part.dataset, part.is_subset, part.accuracy.mean, part.accuracy.num_items) == (
        "gsm-hard, changed",
        True,
        70 / 150,
        150,
    )
    found = macro_averages(ReasoningTable([hard, part, line("svamp", "x", B), line("svamp", "x", A, COT_CONDITION)]))
    assert [(title, estimate.mean) for title, estimate in found] == [("x", pytest.approx(0.525))]
    assert changed_subset(hard, [True] * 200) is changed_subset(hard, [False] * 200) is None


def test_it_says_where_neither_cache_nor_passes_are_saved() -> None:
    chain = ReasoningRow("a", "x", COT_CONDITION, (0,), (result(A, PassCounts(1, 0, 0, 4), end=55),))
    text = printed(ReasoningTable([line("a", "x", A), chain]))
    assert "a: the cache of x is not shorter: 60 positions, 55 with the chain\n" in text
    assert "a: no passes are saved by x: 6 a question, 5 with the chain" in text
    longer = replace(chain, results=(result(A, PassCounts(1, 0, 0, 30), end=59),))
    assert "is not shorter: 60 positions, 59 with the chain; only passes are saved" in printed(
        ReasoningTable([line("a", "x", A), longer])
    )
    best = replace(chain, results=(result(A, PassCounts(1, 0, 0, 30), end=90),))
    assert not table.list_caveats(
        ReasoningTable([line("a", "x", THREE, seeds=(0, 1, 2)), replace(best, seeds=(0, 1, 2))])
    )[1:]


def test_two_protocols_or_other_questions_are_no_column() -> None:
    other = ReasoningRow("a", "y", "", (0,), (result(B, protocol="pccot"),))
    with pytest.raises(UsageError, match="figures of the protocols codi and pccot do not go into one column"):
        table.format_footnotes(ReasoningTable([line("a", "x", A), other]))
    with pytest.raises(InputError, match="a: x and y were asked other questions; name a set that is the same for all"):
        ReasoningTable([line("a", "x", A), line("a", "y", B[:100])])


def test_json_holds_what_the_table_does() -> None:
    lines = [line("a", "x", A, paper=()), line("a", "y", B), line("b", "x", B), line("b", "y", B)]
    found = json.loads(
        json.dumps(table.table_to_json(ReasoningTable(lines, "y", [("device", "cpu")], ["a note"])), allow_nan=False)
    )
    assert (found["schema"], found["protocol"], found["facts"], found["notes"]) == (
        1, "codi", {"device": "cpu"}, ["a note"]
    )  # fmt: skip
    first = found["sets"][0]
    assert (first["set"], first["questions"], first["floor"], first["part"]) == (
        "a", 200, {"answer": "0", "share": 0.2}, False
    )  # fmt: skip
    run = first["runs"][0]
    assert (run["run"], run["way"], run["seeds"], run["unanswered"], run["papers"]) == (
        "x", "as trained", [0], 80, "not known"
    )  # fmt: skip
    assert run["accuracy"]["mean"] == 0.6
    assert run["passes"] == {"read": 0, "place": 1, "think": 3, "answer": 2, "first": 1, "total": 6}
    assert run["held"] == {"begin": 50, "end": 60, "bytes": 60 * 2048}
    assert [each["set"] for each in found["differences"]] == ["a", "b", "mean of sets"]
    assert found["differences"][0]["claim"] is True
    assert [each["run"] for each in found["means"]] == ["x", "y"]
