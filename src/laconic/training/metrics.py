"""Write metrics.jsonl, one JSON object per line; an experiment tracker only receives copies."""

import hashlib
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from laconic.errors import translate_os_errors
from laconic.storage.atomic import check_not_link
from laconic.storage.strict_json import to_canonical_json
from laconic.training.trackers import Tracker

# names that the training loop writes itself, which no method may use
LOOP_METRICS = frozenset(
    {"step", "epoch", "lr", "loss", "grad_norm", "state", "nonfinite", "overflow", "tokens", "seconds", "validation"}
)


def describe_value(value: object) -> str:
    """Describe the type of a value, for messages about a method's loss or metrics."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a {'' if value.requires_grad else 'detached '}tensor of shape {list(value.shape)}"


class MetricsWriter:
    """Appends to the metrics of a run.

    Args:
        path: The file.
        start: Bytes to keep; what follows belongs to steps that were not committed.
        expected_sha256: Hash of the bytes kept, or "" in a new run; for others a warning says so.
        tracker: Receives copies of the numbers.
    """

    def __init__(self, path: Path, start: int = 0, expected_sha256: str = "", tracker: Tracker | None = None) -> None:
        self.path, self.tracker = path, tracker
        check_not_link(path)
        with translate_os_errors(path):
            self.file = path.open("ab")
            length = self.file.tell()
            self.file.truncate(min(start, length))
            self.file.seek(0, os.SEEK_END)  # truncating does not move the position, which says where the file ends
            self.hash = hashlib.sha256(path.read_bytes())
        if length < start:
            warnings.warn(f"{path} has {length:,} bytes, the checkpoint was saved with {start:,}; some lines are lost")
        elif expected_sha256 not in ("", self.sha256):
            warnings.warn(f"{path} was changed after it was written; only the weights and new lines can be trusted")

    def write(self, values: Mapping[str, object]) -> None:
        """Append a line; NaN and infinity become null."""
        line = (to_canonical_json(replace_nonfinite(values)) + "\n").encode()
        with translate_os_errors(self.path):
            self.file.write(line)
            self.file.flush()
        self.hash.update(line)
        if self.tracker:
            self.tracker.log(flatten_numbers(values), int(cast(int, values["step"])))

    @property
    def sha256(self) -> str:
        """Hash of all lines so far."""
        return self.hash.hexdigest()

    def flush_to_disk(self) -> int:
        """Sync the file to disk and return its length."""
        with translate_os_errors(self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()

    def close(self) -> None:
        self.file.close()
        if self.tracker:
            self.tracker.finish()


def replace_nonfinite(value: Any) -> Any:
    """Return a value with None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: replace_nonfinite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers but the step; those of an inner table are named "TABLE/NAME"."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= flatten_numbers(cast(Mapping[str, Any], value), f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value) and prefix + name != "step":
            numbers[prefix + name] = value
    return numbers
