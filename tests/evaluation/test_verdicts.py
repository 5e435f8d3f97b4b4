"""The word on a row of a paper: an interval must reach its figures, and be narrow enough to say so."""

import pytest

from laconic.evaluation.report.verdicts import (
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    TOO_WIDE,
    judge_at_least,
    judge_equal,
    worst_verdict,
)
from laconic.evaluation.streams import paper_tables
from laconic.evaluation.streams.evaluate import StreamItem, StreamItemResult
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.table import StreamTaskResult


def test_judge_at_least_and_judge_equal() -> None:
    assert judge_at_least(50, 40, 49) == NOT_REPRODUCED
    assert judge_at_least(50, 46, 54) == TOO_WIDE
    assert judge_at_least(50, 48, 52) == judge_at_least(50, 60, 90) == REPRODUCED
    assert judge_equal(50, 51, 52) == NOT_REPRODUCED
    assert judge_equal(50, 46, 54) == TOO_WIDE
    assert judge_equal(50, 48, 52) == judge_equal(50, 50.4, 50.6, 0.5) == REPRODUCED


def test_worst_verdict() -> None:
    assert worst_verdict([]) == NOT_RUN
    assert worst_verdict([REPRODUCED, TOO_WIDE]) == TOO_WIDE
    assert worst_verdict([REPRODUCED, TOO_WIDE, NOT_REPRODUCED]) == NOT_REPRODUCED


@pytest.mark.parametrize(("items", "says"), [(2000, REPRODUCED), (10, TOO_WIDE), (0, NOT_RUN)])
def test_judge_row_holds_a_run_to_its_rows_figure(items: int, says: str) -> None:
    """All strings right of two thousand, and of ten, whose interval begins far below."""
    table = next(t for t in paper_tables.load_paper_tables() if "formal_languages" in str(t.column_metrics))
    row = next(row for row in table.rows if row[0] == "Hope")
    rows = [StreamItem(str(i), {"learn": StreamItemResult({OVERALL: (1.0, 1)}, (), 0)}) for i in range(items)]
    line = StreamTaskResult("test", "formal_languages", "run", (0,), [rows], {"table_row": "hope languages"})
    assert paper_tables.judge_row(table, row, [line] if items else []) == says
