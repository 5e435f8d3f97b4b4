"""Signals during training; what they do to a run is tested in tests/trust and tests/cli."""

import os
import signal
import time

import pytest

from laconic.training.signals import SignalInterruptError, handle_signals

MESSAGE = "laconic: stopping after this step; a second Ctrl-C ends at once, without saving"


def wait_for_error_output(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what a thread writes to standard error, for at most ten seconds."""
    text = ""
    for _ in range(100):
        text += capfd.readouterr().err
        if "\n" in text:
            break
        time.sleep(0.1)
    return text


def test_handle_signals_says_that_the_step_is_finished_first(capfd: pytest.CaptureFixture[str]) -> None:
    with handle_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_for_error_output(capfd) == f"{MESSAGE}\n"
        assert stop.signal_name == "SIGINT"


def test_handle_signals_is_silent_where_work_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with handle_signals() as stop:
        stop.is_interruptible = True
        with pytest.raises(SignalInterruptError):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        assert capfd.readouterr().err == ""
