"""metrics.jsonl: one object a line, the source of truth; a tracker's page is a copy."""

import importlib
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.errors import translate_os_errors
from laconic.storage.strict_json import to_canonical_json


class MetricsWriter:
    """The lines of one run from byte `start` on; what lies behind it belongs to steps that are no more."""

    def __init__(self, path: Path, start: int = 0, tracker_project: str | None = None) -> None:
        self.path = path
        with translate_os_errors(path):
            self.file = path.open("ab")
            there = self.file.tell()
            self.file.truncate(min(start, there))
        if there < start:
            warnings.warn(f"{path} has {there:,} bytes, the step was saved with {start:,}; lines are lost")
        self.tracker = _start_tracker(tracker_project, path.parent.name) if tracker_project else None

    def write(self, values: Mapping[str, object]) -> None:
        """Appends a line; a number that is not finite becomes null."""
        with translate_os_errors(self.path):
            self.file.write((to_canonical_json(_replace_nonfinite(values)) + "\n").encode())
            self.file.flush()
        if self.tracker:
            self.tracker.log({name: value for name, value in values.items() if isinstance(value, int | float)})

    def flush_to_disk(self) -> int:
        """The bytes that are on the disk for good, once they are."""
        with translate_os_errors(self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()

    def close(self) -> None:
        """No line follows."""
        self.file.close()
        if self.tracker:
            self.tracker.finish()


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _replace_nonfinite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_tracker(project: str, name: str) -> Any:
    trackio = importlib.import_module("trackio")
    trackio.init(project=project, name=name)
    return trackio
