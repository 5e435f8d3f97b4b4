"""What a step of a run holds beside the model: optimizer, random numbers, carried state, and how far it was."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from laconic.core import artifact
from laconic.core.contract import State
from laconic.core.errors import Damaged
from laconic.core.manifest import Files
from laconic.core.state_file import apart, built
from laconic.core.strict import check_header, read_json
from laconic.training import sharded
from laconic.training.ranks import Ranks

Tensors = dict[str, Tensor]
SHARDS = "model"  # folder of shards in place of the model's files
PROGRESS = "progress.json"


class Model(Protocol):
    """How the model part of a step is written, and read back into the live modules, bit for bit."""

    def save(self, files: Files) -> None: ...
    def save_rest(self, files: Files) -> None:
        """What `save` writes beside tensors, where these lie in shards: config.json, tokenizer.json."""
        ...

    def load(self, folder: Path) -> None: ...


def save_model(files: Files, model: Model, method: nn.Module, ranks: Ranks) -> None:
    """The model part of a step: as `model` writes it, or what is trained in shards, with the rest of that part."""
    if ranks.sharded:
        tensors = {name: p for name, p in method.named_parameters() if p.requires_grad}
        sharded.write(files, SHARDS, tensors, ranks.rank)
    if ranks.rank == 0:
        (model.save_rest if ranks.sharded else model.save)(files)


def load_model(folder: Path, model: Model, method: nn.Module) -> None:
    """The model part of a step, into a method that is whole on this rank."""
    if not (folder / SHARDS).is_dir():
        model.load(folder)
        return
    trained = {name: p.detach() for name, p in method.named_parameters() if p.requires_grad}
    found = sharded.read(folder / SHARDS, lambda name, shape: trained.get(name, torch.empty(shape)))
    odd = min(found.keys() ^ trained.keys(), default=None)
    if odd:
        raise Damaged(f"{folder}: {odd} is in its shards or among what is trained, not in both; take its recipe")


class Plain:
    """All tensors of a module under its own names in model.safetensors."""

    def __init__(self, method: nn.Module) -> None:
        self.method = method

    def save(self, files: Files) -> None:
        """Writes them."""
        files.tensors("model.safetensors", self.method.state_dict())

    def save_rest(self, files: Files) -> None:
        """There is no more."""

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
    states: Sequence[State],
    progress: Progress,
    ranks: Ranks,
) -> None:
    """Everything of a step but its model: of each rank its shards and random numbers, of the first the rest."""
    held = optimizer.state_dict()
    moments = {f"{i}.{name}": t for i, kept in held["state"].items() for name, t in kept.items()}
    if ranks.sharded:
        sharded.write(files, "optimizer", moments, ranks.rank)
    files.tensors(f"rng-{ranks.rank:05d}.safetensors", random_state())
    if ranks.rank > 0:
        return
    if not ranks.sharded:
        files.tensors("optimizer.safetensors", moments)
    files.json("optimizer.json", {"groups": held["param_groups"], "scaler": scaler.state_dict()})
    if states:
        parts = [apart(state, f"{i}.") for i, state in enumerate(states)]
        files.tensors("state.safetensors", {name: t for tensors, _ in parts for name, t in tensors.items()})
        files.json("state.json", {"states": [form for _, form in parts]})
    files.json(PROGRESS, asdict(progress))


def load(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    rank: int = 0,
) -> tuple[Progress, list[State]]:
    """Puts a step's optimizer and random numbers back; gives its progress and the states carried."""
    held = optimizer.state_dict()
    about = read_json(folder / "optimizer.json")
    there, here = ([len(group["params"]) for group in groups] for groups in (about["groups"], held["param_groups"]))
    if there != here:
        raise Damaged(f"{folder}: an optimizer of groups of {there} tensors, this run trains {here}; take its recipe")
    state: dict[int, Tensors] = {}
    for name, tensor in moments_of(folder, [p for group in optimizer.param_groups for p in group["params"]]).items():
        place, _, what = name.partition(".")
        state.setdefault(int(place), {})[what] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": held["param_groups"]})
    if about["scaler"]:
        scaler.load_state_dict(about["scaler"])
    random = folder / f"rng-{rank:05d}.safetensors"
    if random.exists():  # else there are more ranks than there were: this one goes on from its seed
        set_random_state(opened(random))
    progress = Progress(**read_json(folder / PROGRESS))
    progress.best = [(value, step) for value, step in progress.best]
    return progress, carried(folder)


def carried(folder: Path) -> list[State]:
    """The states that a step gave to the next, of each micro-batch one."""
    if not (folder / "state.safetensors").exists():
        return []
    tensors, forms = opened(folder / "state.safetensors"), read_json(folder / "state.json")
    return [built(form, tensors, set(tensors)) for form in forms["states"]]


def moments_of(folder: Path, parameters: list[Tensor]) -> Tensors:
    """The optimizer's tensors of a step by their names, each laid out as its parameter."""

    def parameter(name: str) -> Tensor:
        return parameters[int(name.partition(".")[0])].detach()

    def like(name: str, shape: tuple[int, ...]) -> Tensor:
        p = parameter(name)
        return torch.zeros_like(p) if p.shape == shape else torch.zeros(shape)

    if (folder / "optimizer").is_dir():
        return sharded.read(folder / "optimizer", like)
    found = opened(folder / "optimizer.safetensors")
    return {name: sharded.laid_out(tensor, parameter(name)) for name, tensor in found.items()}


def opened(path: Path) -> Tensors:
    """Every tensor of a file of ours, in memory of its own."""
    return {name: t.clone() for name, t in artifact.open_tensors(path, check_header(path).tensors).items()}


def random_state() -> Tensors:
    """The streams of torch and of each of its devices; Python's and numpy's are drawn from by nothing in laconic."""
    devices = torch.cuda.get_rng_state_all() if _cuda() else []
    return {"torch": torch.get_rng_state(), **{f"cuda.{i}": state for i, state in enumerate(devices)}}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Puts the streams where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    for name, there in state.items():
        if name.startswith("cuda.") and _cuda():
            torch.cuda.set_rng_state(there, int(name.partition(".")[2]))


def _cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
