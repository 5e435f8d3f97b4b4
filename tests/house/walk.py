"""Trace which source files and functions a piece of code enters."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import laconic

SOURCE = Path(laconic.__file__).parent
AMD_FILE = "models/ops/linear.py"  # entered on AMD's processors only, in place of torch's linear layer


def trace_files(work: Callable[[], object]) -> dict[str, set[str]]:
    """Run `work` and return the functions it enters, by source file of laconic.

    Backward passes run in other threads, so these are traced too. What only some processors enter is left out.
    """
    entered: dict[str, set[str]] = defaultdict(set)
    prefix = f"{SOURCE}/"

    def record(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix) and frame.f_code.co_name != "<module>":
            entered[name[len(prefix) :]].add(frame.f_code.co_qualname)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    entered.pop(AMD_FILE, None)
    return dict(entered)


def count_lines(files: dict[str, set[str]]) -> int:
    """Return the number of lines of these files, counted whole."""
    return sum(len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files)
