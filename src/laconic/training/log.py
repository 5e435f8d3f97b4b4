"""metrics.jsonl: one object a line, the source of truth; a tracker's page is a copy."""

import importlib
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.core.errors import on_disk
from laconic.core.strict import canonical


class Metrics:
    """The lines of one run from byte `start` on; what lies behind it belongs to steps that are no more."""

    def __init__(self, path: Path, start: int = 0, track: str | None = None) -> None:
        self.path = path
        with on_disk(path):
            self.file = path.open("ab")
            there = self.file.tell()
            self.file.truncate(min(start, there))
        if there < start:
            warnings.warn(f"{path} has {there:,} bytes, the step was saved with {start:,}; lines are lost")
        self.tracker = _tracker(track, path.parent.name) if track else None

    def line(self, values: Mapping[str, object]) -> None:
        """Appends a line; a number that is not finite becomes null."""
        with on_disk(self.path):
            self.file.write((canonical(_finite(values)) + "\n").encode())
            self.file.flush()
        if self.tracker:
            self.tracker.log({name: value for name, value in values.items() if isinstance(value, int | float)})

    def sync(self) -> int:
        """The bytes that are on the disk for good, once they are."""
        with on_disk(self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()

    def close(self) -> None:
        """No line follows."""
        self.file.close()
        if self.tracker:
            self.tracker.finish()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tracker(project: str, name: str) -> Any:
    trackio = importlib.import_module("trackio")
    trackio.init(project=project, name=name)
    return trackio
