"""Tables of papers on reading with a memory: where they stand, and the word on whether runs at hand show the same."""

import math
from dataclasses import replace

import pytest

from laconic.evaluation.report import reported_reading
from laconic.evaluation.report.reported_reading import MeasuredInterval, compare_paper_row, load_compression_tables
from tests.evaluation.compression.results import line, said


def test_every_table_has_a_source_and_whole_rows() -> None:
    assert {table.description for table in load_compression_tables()} == {"tails", "labels", "retrieval", "ablations"}
    for table in load_compression_tables():
        assert "arXiv:" in table.source
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert len(table.measured) <= len(table.rows)


@pytest.mark.parametrize(
    ("shown", "word"),
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
def test_a_row_is_reproduced_where_all_its_figures_lie_in_the_interval_of_a_run(
    shown: dict[tuple[str, str, str], MeasuredInterval], word: str
) -> None:
    assert compare_paper_row(load_compression_tables()[0], 0, shown) == word
    assert compare_paper_row(load_compression_tables()[0], 4, shown) == "not run"


def test_runs_of_a_papers_recipe_are_measured_against_it() -> None:
    ways = [{"none": said(math.log(6.31), 0, ()), "compressed": said(math.log(6.04), 0, (4,))}] * 3
    run = replace(line("run", ways), dataset="test-512", description={"row": "opt-2.7b 6k"})
    excerpt = replace(run, dataset="test-excerpt-512")
    ((table, rows), *_) = reported_reading.compare_compression_tables([run, excerpt], [])
    assert table.description == "tails"
    assert [word for _, word in rows] == ["reproduced", "not run", "not run", "not run", "not run"]
    ((_, rows), *_) = reported_reading.compare_compression_tables([replace(run, description={"row": None})], [])
    assert {word for _, word in rows} == {"not run"}
