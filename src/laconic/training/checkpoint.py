"""What a step of a run holds beside the model: optimizer, random numbers, carried state, and how far it was."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from laconic.core import artifact
from laconic.core.cache import Cache
from laconic.core.errors import Damaged
from laconic.core.manifest import Files
from laconic.core.strict import check_header, read_json

Tensors = dict[str, Tensor]


class Model(Protocol):
    """How the model part of a step is written, and read back into the live modules, bit for bit."""

    def save(self, files: Files) -> None: ...
    def load(self, folder: Path) -> None: ...


class Plain:
    """All tensors of a module under its own names in model.safetensors."""

    def __init__(self, method: nn.Module) -> None:
        self.method = method

    def save(self, files: Files) -> None:
        """Writes them."""
        files.tensors("model.safetensors", self.method.state_dict())

    def load(self, folder: Path) -> None:
        """Copies them in; every name must be there and no other."""
        self.method.load_state_dict(opened(folder / "model.safetensors"))


@dataclass
class Progress:
    """How far a run is: `step` updates were tried; `best` holds (metric, step), the best first.

    `micro` is the micro-batch in use, `restart` an optimizer's restart that is still due, `validated` the last step
    that was, `bytes` the part of metrics.jsonl that belongs to the step.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    micro: int = 0
    skips: list[int] = field(default_factory=list)
    overflows: int = 0
    restart: bool = False
    best: list[tuple[float, int]] = field(default_factory=list)
    validated: int = -1
    bytes: int = 0


def save(
    files: Files,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    states: list[Cache],
    progress: Progress,
    rank: int = 0,
) -> None:
    """Everything of a step but its model."""
    held = optimizer.state_dict()
    moments = {f"{i}.{name}": t for i, kept in held["state"].items() for name, t in kept.items()}
    files.tensors("optimizer.safetensors", moments)
    files.json("optimizer.json", {"groups": held["param_groups"], "scaler": scaler.state_dict()})
    files.tensors(f"rng-{rank:05d}.safetensors", random_state())
    if states:
        named = {f"{i}.{name}": t for i, state in enumerate(states) for name, t in state.tensors().items()}
        files.tensors("state.safetensors", named)
    files.json("progress.json", asdict(progress))


def load(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    rank: int = 0,
) -> tuple[Progress, list[Cache]]:
    """Puts a step's optimizer and random numbers back; gives its progress and the states carried."""
    held = optimizer.state_dict()
    state: dict[int, Tensors] = {}
    for name, tensor in opened(folder / "optimizer.safetensors").items():
        place, _, what = name.partition(".")
        state.setdefault(int(place), {})[what] = tensor
    about = read_json(folder / "optimizer.json")
    there, here = ([len(group["params"]) for group in groups] for groups in (about["groups"], held["param_groups"]))
    if there != here:
        raise Damaged(f"{folder}: an optimizer of groups of {there} tensors, this run trains {here}; take its recipe")
    optimizer.load_state_dict({"state": state, "param_groups": held["param_groups"]})
    if about["scaler"]:
        scaler.load_state_dict(about["scaler"])
    set_random_state(opened(folder / f"rng-{rank:05d}.safetensors"))
    progress = Progress(**read_json(folder / "progress.json"))
    progress.best = [(value, step) for value, step in progress.best]
    path = folder / "state.safetensors"
    return progress, _caches(opened(path)) if path.exists() else []


def opened(path: Path) -> Tensors:
    """Every tensor of a file of ours, in memory of its own."""
    return {name: t.clone() for name, t in artifact.open_tensors(path, check_header(path).tensors).items()}


def _caches(tensors: Tensors) -> list[Cache]:
    caches: list[Cache] = []
    while mine := {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{len(caches)}.")}:
        layers = range(sum(name.startswith("keys.") for name in mine))
        keys, values = (tuple(mine[f"{kind}.{l}"] for l in layers) for kind in ("keys", "values"))
        caches.append(Cache(keys, values, mine["positions"], mine["live"]))
    return caches


def random_state() -> Tensors:
    """The streams of torch, each of its devices, numpy and Python, as whole numbers."""
    _, words, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, second = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        **{f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all() if _cuda() else [])},
        "numpy": torch.tensor([*map(int, words), int(place), int(has_gauss)]),
        "numpy.gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor([version, *numbers]),
        "python.gauss": torch.tensor([] if second is None else [second], dtype=torch.float64),
    }


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Puts the streams where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    for name, there in state.items():
        if name.startswith("cuda.") and _cuda():
            torch.cuda.set_rng_state(there, int(name.partition(".")[2]))
    words: list[int] = state["numpy"].tolist()
    legacy: Any = ("MT19937", np.array(words[:-2], dtype=np.uint32), *words[-2:], state["numpy.gauss"].item())
    np.random.set_state(legacy)
    version, *numbers = state["python"].tolist()
    random.setstate((version, tuple(numbers), next(iter(state["python.gauss"].tolist()), None)))


def _cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
