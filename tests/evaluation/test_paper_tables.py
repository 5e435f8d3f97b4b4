"""Tables of papers: complete, and judged by the intervals of runs."""

import math
from dataclasses import replace

import pytest

from laconic.evaluation.compression.report import measure_paper_columns as measure_compression
from laconic.evaluation.report.paper_tables import (
    FIGURE_ONLY,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    TOO_WIDE,
    Measurement,
    judge_figure,
    judge_row,
    load_paper_tables,
    worst_verdict,
)
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.streams.evaluate import build_metrics
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.report import measure_paper_columns as measure_streams
from laconic.evaluation.suite import RunResult
from tests.evaluation.compression.results import make_condition, make_result

PERPLEXITY = load_paper_tables()[0]
(LANGUAGES,) = (table for table in load_paper_tables() if table.measured_columns)
HOPE = [row[0] for row in LANGUAGES.rows].index("Hope")


def test_paper_tables_are_complete() -> None:
    tables = load_paper_tables()
    assert {table.topic for table in tables} == {"tails", "labels", "retrieval", "ablations", "nested"}
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
        assert len(table.measured) <= len(table.rows)
        assert set(table.measured_columns) <= set(table.columns)
        assert table.comparison in ("equal", "at least")
        assert "arXiv:" in table.source or table.source.startswith(("NL ", "Ti "))
    nested = [table for table in tables if table.topic == "nested"]
    verdicts = [judge_row(table, i, []) for table in nested for i in range(len(table.rows))]
    assert [verdict for verdict in verdicts if verdict != NOT_RUN] == [FIGURE_ONLY] * 3


@pytest.mark.parametrize(
    ("text", "low", "high", "comparison", "verdict"),
    [
        ("50", 40, 49, "at least", NOT_REPRODUCED),
        ("50", 46, 54, "at least", TOO_WIDE),
        ("50", 48, 52, "at least", REPRODUCED),
        ("50", 60, 90, "at least", REPRODUCED),
        ("50", 51, 52, "equal", NOT_REPRODUCED),
        ("50", 46, 54, "equal", TOO_WIDE),
        ("50", 48, 52, "equal", REPRODUCED),
        ("50", 50.4, 50.6, "equal", REPRODUCED),
    ],
)
def test_judge_figure(text: str, low: float, high: float, comparison: str, verdict: str) -> None:
    assert judge_figure(text, low, high, comparison) == verdict


def test_worst_verdict() -> None:
    assert worst_verdict([]) == NOT_RUN
    assert worst_verdict([REPRODUCED, TOO_WIDE]) == TOO_WIDE
    assert worst_verdict([REPRODUCED, TOO_WIDE, NOT_REPRODUCED]) == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([], NOT_RUN),
        ([("opt-2.7b 6k", "compressed", "512", 6.0, 6.1)], REPRODUCED),
        ([("opt-2.7b 6k", "compressed", "512", 6.044, 6.1)], REPRODUCED),  # 6.04 is rounded
        ([("opt-2.7b 6k", "compressed", "512", 6.06, 6.1)], NOT_REPRODUCED),
        ([("opt-2.7b 6k", "compressed", "512", 5.0, 7.0)], TOO_WIDE),
        ([("opt-2.7b 6k", "truncated", "512", 6.0, 6.1), ("other", "compressed", "512", 6.0, 6.1)], NOT_RUN),
        ([("opt-2.7b 6k", "compressed", n, x, x) for n, x in (("512", 6.04), ("2048", 7.0))], NOT_REPRODUCED),
    ],
)
def test_judge_row_needs_every_figure_in_the_interval(
    measured: list[tuple[str, str, str, float, float]], verdict: str
) -> None:
    assert judge_row(PERPLEXITY, 0, [Measurement(*m) for m in measured]) == verdict
    assert judge_row(PERPLEXITY, 4, [Measurement(*m) for m in measured]) == NOT_RUN


def test_measure_paper_columns_of_documents_uses_the_recipes_row() -> None:
    ways = [{"none": make_condition(math.log(6.31), 0, ()), "compressed": make_condition(math.log(6.04), 0, (4,))}] * 3
    run = replace(make_result("run", ways), task="test-512", info={"table_row": "opt-2.7b 6k"})
    measurements = measure_compression([run, replace(run, task="test-excerpt-512")], [])
    assert [judge_row(PERPLEXITY, i, measurements) for i in range(5)] == [REPRODUCED, *[NOT_RUN] * 4]
    other = measure_compression([replace(run, info={"table_row": None})], [])
    assert {judge_row(PERPLEXITY, i, other) for i in range(5)} == {NOT_RUN}


@pytest.mark.parametrize(
    ("table_row", "share", "items", "verdict"),
    [
        ("hope languages", 1.0, 2000, REPRODUCED),
        ("hope languages", 1.0, 10, TOO_WIDE),  # the interval of ten strings begins far below
        ("hope languages", 0.5, 400, NOT_REPRODUCED),
        (None, 1.0, 400, NOT_RUN),
    ],
)
def test_measure_paper_columns_of_streams(table_row: str | None, share: float, items: int, verdict: str) -> None:
    rows = [
        EvalItem(str(i), {"learn": build_metrics({OVERALL: (float(i < share * items), 1)}, (), 0)})
        for i in range(items)
    ]
    variant = {"stream": "formal_languages"}
    result = RunResult("run", "test-bin-0", (0,), [rows], {"table_row": table_row}, variant)
    measurements = measure_streams([result])
    assert judge_row(LANGUAGES, HOPE, measurements) == verdict
    assert {judge_row(LANGUAGES, i, measurements) for i in range(len(LANGUAGES.rows)) if i != HOPE} == {NOT_RUN}
