"""Context gains, fact recall and the HTML report, against figures computed by hand."""

import re

import numpy as np
import pytest

from laconic.evaluation.compression import report, scores
from laconic.evaluation.report.page import PageSection, render_page
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import RunResult
from tests.evaluation.compression.results import fixed_lengths, make_condition, make_result


def render(results: list[RunResult], file_sections: list[PageSection] | None = None) -> str:
    """A page of the report's sections."""
    return render_page("Context compression", report.build_sections(results, file_sections or []))


def book_result(seeds: int = 1) -> RunResult:
    """Six stretches of two books."""
    conditions = [
        fixed_lengths(d)
        | {
            "compressed": make_condition(2 + 0.1 * d + 0.01 * d, 12, (2,)),
            "untrained none": make_condition(5, 0, ()),
            "untrained": make_condition(4.5 + 0.1 * (d % 2), 0, (4,)),
        }
        for d in range(6)
    ]
    return make_result("stop", conditions, seeds=seeds)


def recall_result() -> RunResult:
    """Six documents of one or two facts; those with two have two vectors."""
    conditions = [
        {
            "none": make_condition(3, 2, ()),
            "compressed": make_condition(1, 30 - 10 * (d % 2), (1 + d % 2,)),
            "sampled": make_condition(1, 30, (1 + (d // 2) % 2,)),
            "soft": make_condition(0.9, 39, (4,), (1.5 + 0.1 * d,)),
        }
        for d in range(6)
    ]
    return make_result("recall", conditions, is_recall=True)


def to_text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_context_gains_are_paired_by_document() -> None:
    result = book_result()
    gains = {gain.condition: gain for gain in scores.context_gains(result)}
    saved = [1 - 0.01 * d for d in range(6)]
    mean = sum(saved) / 6
    se = (sum((x - mean) ** 2 for x in saved) / 5 / 6) ** 0.5
    gain = gains["compressed"]
    assert (gain.gain.mean, gain.se) == (pytest.approx(mean), pytest.approx(se))
    assert (gain.mean_vectors, gain.context_size) == (2, 2)
    assert gain.share_of_full == pytest.approx(mean / (3 + 0.25 - 1))
    assert gains["untrained"].gain.mean == pytest.approx(0.45)
    assert gains["untrained"].share_of_full is None
    assert gains["full"].share_of_full == pytest.approx(1)
    by_position = scores.nll_by_position(result, "compressed")
    assert by_position == pytest.approx([2 + 0.11 * 2.5] * 2)


def test_clustered_standard_error_with_enough_texts() -> None:
    differences = np.array([[1.0, 2.0, 4.0, 1.0, 0.0, 4.0]])
    sums = [1 + 2 - 4, 4 + 1 + 0 + 4 - 8]
    standard_error = scores.clustered_standard_error
    assert standard_error(differences, list("aabbbb")) == pytest.approx((2 * sum(x * x for x in sums)) ** 0.5 / 6)
    assert standard_error(differences) == standard_error(differences, list("abcdef"))
    assert standard_error(differences) == pytest.approx(differences.std(ddof=1) / 6**0.5)
    items = [EvalItem(f"user@{d // 2}@{d}", {}) for d in range(2 * scores.MIN_TEXT_GROUPS)]
    texts = [f"user@{d // 2}" for d in range(len(items))]
    assert scores.group_by_text(RunResult("run", "test", (0,), [items])) == texts
    assert scores.group_by_text(RunResult("run", "test", (0,), [items[:-2]])) is None


def test_share_of_full_is_none_if_the_whole_text_gains_nothing() -> None:
    conditions = [fixed_lengths(d) | {"full": make_condition(3 + 0.1 * d + (-1) ** d, 0, ())} for d in range(6)]
    result = make_result("stop", conditions)
    gains = scores.context_gains(result)
    assert {gain.share_of_full for gain in gains} == {None}


def test_fact_recall_by_facts_and_soft_hard_gap() -> None:
    result = recall_result()
    one, two = scores.recall_by_facts(result, "compressed")
    assert (one.num_facts, one.num_documents, one.accuracy, one.mean_vectors) == (1, 3, 30 / 39, 1)
    assert (two.num_facts, two.accuracy, two.mean_vectors) == (2, 20 / 39, 2)
    assert scores.length_fact_correlation(result, "compressed") == pytest.approx(1)
    assert scores.length_fact_correlation(result, "soft") is None
    gap = scores.soft_hard_gap(result)
    assert gap is not None
    assert gap.nll == pytest.approx(-0.1)
    assert gap.accuracy == pytest.approx(1 - 25 / 39)
    assert (gap.expected_length, gap.num_vectors, gap.sampled_length) == pytest.approx((1.75, 0.25, 4 / 3))
    assert scores.soft_hard_gap(book_result()) is None


@pytest.mark.medium
def test_report_page_contains_the_figures() -> None:
    html = render([book_result(2), recall_result()])
    text = to_text(html)
    for expected in (
        "test stop compressed 6 2.00 2.0 2.2750 9.73 30.8 % +0.9750 ± 0.0076 43.3 %",
        "untrained none",
        "AutoCompressor-2.7B",
        "F=2 51.3 % correct, N 2.00; correlation of N with F 1.000",
        "recall, soft minus hard: -0.1000 nats per token",
        "open question",
        "stop, compressed its own 2.00 2.2750 2.2500 -0.0250 ± 0.0076 below the line",
    ):
        assert expected in text, expected
    assert html.count("<picture") == 2
    assert not re.search(r"(?:src|href)=.?(?:https?:)?//", html)
    assert "-0.0000" not in text


def test_report_page_contains_published_tables_after_files() -> None:
    text = to_text(render([], [PageSection("In-context classification: file", ["a table"])]))
    titles = ("In-context classification: file", "Published results", "zero-shot 68.2 78.0")
    assert [text.index(expected) for expected in titles] == sorted(text.index(expected) for expected in titles)
    assert "REPLUG, passages of 512 tokens 6.65 10.87 11.59 11.81" in text


def test_gain_table_of_one_document_has_no_standard_error() -> None:
    table_of_one = report.build_gain_table([make_result("kava", [fixed_lengths(0)])])
    assert not any("±" in cell for row in table_of_one.rows for cell in row)
