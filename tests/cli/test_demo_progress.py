"""The progress of `laconic demo`: steps of its runs, scheduled two at a time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from laconic.cli.commands.demo import DemoEntry, DemoRun
from laconic.cli.demo_progress import DemoProgress, read_last_step, schedule

BASES = {"short": None, "chain": "short", "a": "chain", "b": "chain", "c": "chain"}


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ({"short": 1.0, "chain": 2.0, "a": 3.0, "b": 3.0, "c": 3.0}, 9.0),
        ({"a": 3.0, "b": 1.0, "c": 1.0}, 3.0),
        ({"chain": 1.0, "a": 4.0}, 5.0),
        ({}, 0.0),
    ],
)
def test_schedule_ends_with_the_last_run(work: dict[str, float], seconds: float) -> None:
    assert schedule(work, BASES, 2) == seconds


def test_read_last_step_of_a_half_written_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_last_step(file) == 0
    file.write_text('{"loss":1,"step":7}\n{"step":8,"validation":{"accuracy":1.0}}\n{"loss":1,"st')
    assert read_last_step(file) == 8


def test_progress_is_the_share_of_the_steps(tmp_path: Path) -> None:
    recipe = cast(Any, SimpleNamespace(train=SimpleNamespace(steps=10)))
    first, second = (
        DemoRun(DemoEntry(name, name, "", ""), 0, tmp_path / name, base, recipe, ())
        for name, base in (("first", None), ("second", "first of seed 0"))
    )
    lines: list[Any] = []
    progress = DemoProgress([first, second], lambda *values: lines.append(values), 2)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text('{"step":5}\n')
    for running, finished in (([first], {None}), ([second], {None, first.name})):
        progress.last = -1.0
        progress.update(running, finished)
    assert lines == [
        ("first of seed 0, 0 of 2 runs done, percent", 25, 100),
        ("second of seed 0, 1 of 2 runs done, percent", 50, 100),
    ]
