"""The validations of a run, in validations.json of its directory: which step is best, and which need no repetition.

A step is committed before it is validated, so its folder cannot hold the result.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.config.training import TrainingConfig
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.storage.atomic import write_text_atomically
from laconic.storage.manifest import hash_json
from laconic.storage.strict_json import read_json, to_canonical_json
from laconic.training.metrics import replace_nonfinite

VALIDATIONS_FILE = "validations.json"


class ValidationLog:
    """The metrics of each validated step, NaN where they were not finite; without a path, in memory only.

    `fingerprint` is the SHA-256 of what they depend on besides the weights, such as the number of held-out rows.
    """

    def __init__(self, path: Path | None = None, fingerprint: str = "") -> None:
        self.path, self.fingerprint = path, fingerprint
        self.metrics: dict[int, Mapping[str, float]] = {}

    def write(self) -> None:
        """Replace the file, if there is one."""
        if self.path is None:
            return
        finite = {str(step): replace_nonfinite(metrics) for step, metrics in self.metrics.items()}
        content: dict[str, Any] = {"fingerprint": self.fingerprint, "validations": finite}
        write_text_atomically(self.path, to_canonical_json({**content, "sha256": hash_json(content)}))

    def list_best(self, config: TrainingConfig) -> list[tuple[float, int]]:
        """Return the `keep_best` best (value of `best_metric`, step), best first and earlier before later."""
        name = config.best_metric
        sign = -1 if config.best_mode == "max" else 1
        if name is None:
            return []
        values = [(metrics[name], step) for step, metrics in self.metrics.items() if name in metrics]
        values = [(value, step) for value, step in values if math.isfinite(value)]
        return sorted(values, key=lambda item: (sign * item[0], item[1]))[: config.keep_best]


def read_validations(run: Path) -> ValidationLog:
    """Return the log of a run directory, empty without a file. Raises `CorruptArtifactError` if it was changed."""
    path = run / VALIDATIONS_FILE
    log = ValidationLog(path)
    if not path.exists():
        return log
    try:
        content = read_json(path)
        digest = content.pop("sha256", None)
        if digest == hash_json(content):
            log.fingerprint = content["fingerprint"]
            for step, metrics in content["validations"].items():
                log.metrics[int(step)] = {name: math.nan if x is None else x for name, x in metrics.items()}
            return log
        problem = "was changed after it was written"
    except InputError as error:
        problem = str(error)
    raise CorruptArtifactError(f"{path}: {problem}; remove it, and the next validation writes another")


def get_metric(metrics: Mapping[str, float], name: str) -> float:
    """Return a metric of a validation. Raises `UsageError` if it has no such metric."""
    if name not in metrics:
        raise UsageError(f"{name} is not a metric of the validation; available: {', '.join(metrics) or 'none'}")
    return metrics[name]
