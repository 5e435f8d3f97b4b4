"""Copy the metrics of a run to an experiment tracker: trackio, Weights & Biases or TensorBoard."""

import contextlib
import hashlib
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from laconic.errors import UsageError

TrackerName = Literal["trackio", "wandb", "tensorboard"]
TENSORBOARD_FOLDER = "tensorboard"


class Tracker(Protocol):
    """Receives the metrics of `laconic.training.loop.train`; any object with these methods can take its place."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Receive the metrics of an update; those of a validation are named "validation/NAME"."""
        ...

    def finish(self) -> None:
        """Send the remaining metrics; called once, also when training fails or is interrupted."""
        ...


class TensorBoardTracker:
    """Writes the metrics as scalars into a folder."""

    def __init__(self, folder: Path) -> None:
        self.writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class ClientTracker:
    """Sends the metrics with the client of trackio or wandb, whose messages go to standard error."""

    def __init__(self, package: Any, options: Mapping[str, Any]) -> None:
        self.package = package
        with contextlib.redirect_stdout(sys.stderr):
            try:
                package.init(**options)
            except Exception as error:  # of many kinds, such as no login or no network
                reason = " ".join(str(error).split()).rstrip(".")
                raise UsageError(f"--track {package.__name__}: {reason}; or train without --track") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.package.log(dict(metrics), step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.package.finish()


def start_tracker(name: TrackerName, run: Path, project: str, config: Mapping[str, Any]) -> Tracker:
    """Start tracking a run under the name of its directory; a resumed run continues its old record.

    A tracker takes its account, server or mode from its own environment variables. TensorBoard's files and those of
    wandb are written inside the run. `project` and `config`, the recipe, are sent to trackio and wandb only. Raises
    ImportError without the package, UsageError if its client cannot start, for example without a login.
    """
    package = importlib.import_module(name)
    if name == "tensorboard":
        return TensorBoardTracker(run / TENSORBOARD_FOLDER)
    options: dict[str, Any] = {"project": project, "name": run.name, "config": dict(config), "resume": "allow"}
    if name == "wandb":
        path_hash = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
        options |= {"id": f"{run.name}-{path_hash}", "dir": str(run)}
    return ClientTracker(package, options)
