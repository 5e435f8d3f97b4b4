"""Tables of papers on context compression, and whether runs reproduce them."""

import math
from dataclasses import replace

import pytest

from laconic.evaluation.compression.paper_tables import (
    MeasuredInterval,
    compare_compression_tables,
    compare_paper_row,
    load_compression_tables,
)
from tests.evaluation.compression.results import make_condition, make_result


def test_paper_tables_have_sources_and_complete_rows() -> None:
    assert {table.topic for table in load_compression_tables()} == {"tails", "labels", "retrieval", "ablations"}
    for table in load_compression_tables():
        assert "arXiv:" in table.source
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert len(table.measured) <= len(table.rows)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ({}, "not run"),
        ({("opt-2.7b 6k", "compressed", "512"): MeasuredInterval(6.0, 6.1)}, "reproduced"),
        ({("opt-2.7b 6k", "compressed", "512"): MeasuredInterval(6.044, 6.1)}, "reproduced"),  # 6.04 is rounded
        ({("opt-2.7b 6k", "compressed", "512"): MeasuredInterval(6.06, 6.1)}, "not reproduced"),
        ({("opt-2.7b 6k", "compressed", "512"): MeasuredInterval(5.0, 7.0)}, "interval too wide to tell"),
        ({("opt-2.7b 6k", "truncated", "512"): MeasuredInterval(6.0, 6.1)}, "not run"),
        ({("other", "compressed", "512"): MeasuredInterval(6.0, 6.1)}, "not run"),
        (
            {("opt-2.7b 6k", "compressed", n): MeasuredInterval(x, x) for n, x in (("512", 6.04), ("2048", 7.0))},
            "not reproduced",
        ),
    ],
)
def test_compare_paper_row_needs_every_figure_in_the_interval(
    measured: dict[tuple[str, str, str], MeasuredInterval], verdict: str
) -> None:
    assert compare_paper_row(load_compression_tables()[0], 0, measured) == verdict
    assert compare_paper_row(load_compression_tables()[0], 4, measured) == "not run"


def test_compare_compression_tables_uses_the_recipes_row() -> None:
    ways = [{"none": make_condition(math.log(6.31), 0, ()), "compressed": make_condition(math.log(6.04), 0, (4,))}] * 3
    run = replace(make_result("run", ways), dataset="test-512", run_info={"table_row": "opt-2.7b 6k"})
    excerpt = replace(run, dataset="test-excerpt-512")
    ((table, rows), *_) = compare_compression_tables([run, excerpt], [])
    assert table.topic == "tails"
    assert [word for _, word in rows] == ["reproduced", "not run", "not run", "not run", "not run"]
    ((_, rows), *_) = compare_compression_tables([replace(run, run_info={"table_row": None})], [])
    assert {word for _, word in rows} == {"not run"}
