"""Progress without a terminal: a line after some seconds, then at intervals."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from laconic import console


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(console, "log_message", logged.append)
    monkeypatch.setattr(console, "is_interactive", lambda: False)
    return logged


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "FIRST_LINE_AFTER", 2.0)
    return now


@pytest.mark.medium
def test_call_every_second_calls_while_the_block_runs() -> None:
    called = threading.Semaphore(0)
    with console.call_every_second(called.release):
        assert all(called.acquire(timeout=60) for _ in range(2))
    assert not called.acquire(blocking=False)


def test_status_names_what_takes_long(lines: list[str], now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def call_for_a_minute(function: Callable[[], None]) -> AbstractContextManager[None]:
        for second in range(1, 70):
            now[0] = 100.0 + second
            function()
        return nullcontext()

    monkeypatch.setattr(console, "call_every_second", call_for_a_minute)
    with console.status("loading a model"):
        pass
    assert lines == ["loading a model …", "loading a model, 32 s …", "loading a model, 62 s …"]


def test_progress_log_estimates_the_time_left(lines: list[str], now: list[float]) -> None:
    log = console.ProgressLog("run")
    for done, seconds in ((0, 2), (1, 3), (2, 2), (3, 1)):
        now[0] += seconds
        log.update("part", done, 4)
    assert lines == ["run part: 0 of 4", "run part: 2 of 4, 5 s left"]
    resumed = console.ProgressLog("run")
    for done in (21, 22):
        now[0] += 5
        resumed.update("part", done, 24)
    assert lines[2:] == ["run part: 21 of 24", "run part: 22 of 24, 10 s left"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (7199, "120 min"), (9000, "2.5 h"), (864000, "10 days")],
)
def test_format_duration_chooses_the_unit(seconds: float, expected: str) -> None:
    assert console.format_duration(seconds) == expected


def test_progress_log_estimates_a_phase_from_its_own_start(lines: list[str], now: list[float]) -> None:
    log = console.ProgressLog("run")
    for name, done, total in (("slow", 1, 2), ("fast", 0, 10), ("fast", 5, 10)):
        now[0] += 50 if name == "slow" else 10
        log.update(name, done, total)
    assert lines == ["run slow: 1 of 2", "run fast: 0 of 10", "run fast: 5 of 10, 10 s left"]


def test_progress_log_repeats_an_unchanged_line_rarely(lines: list[str], now: list[float]) -> None:
    log = console.ProgressLog("run")
    for _ in range(11):
        now[0] += 6
        log.update("part", 1, 4)
    for _ in range(2):
        now[0] += 3
        log.update("part", 2, 4)
    assert [line.partition(",")[0] for line in lines] == ["run part: 1 of 4"] * 3 + ["run part: 2 of 4"]


def test_log_message_without_a_reader_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stderr", os.fdopen(writer, "w"))
    for _ in range(2):
        console.log_message("a note")


@pytest.mark.parametrize("log", [console.log_message, console.log_note])
def test_log_escapes_what_would_control_the_terminal(
    log: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    log("a\x1b]0;x\x07\x9b2J\u202eb\rc\tnaïve 日本 👩‍🔬\n\u2066")
    expected = r"a\u001b]0;x\u0007\u009b2J\u202eb\u000dc" + "\tnaïve 日本 👩‍🔬\n" + r"\u2066" + "\n"
    assert capsys.readouterr().err == expected
