"""What a step of a run holds beside the model: optimizer, random numbers, carried state, and how far it was."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from laconic.errors import CorruptArtifactError
from laconic.interfaces import MethodState
from laconic.nested.state_file import flatten_tree, unflatten_tree
from laconic.storage import atomic
from laconic.storage.manifest import ManifestWriter
from laconic.storage.strict_json import read_json, read_safetensors_header
from laconic.training import sharded
from laconic.training.ranks import Ranks

Tensors = dict[str, Tensor]
SHARDS_FOLDER = "model"  # folder of shards in place of the model's files
PROGRESS_FILE = "progress.json"


class ModelIO(Protocol):
    """How the model part of a step is written, and read back into the live modules, bit for bit."""

    def save(self, writer: ManifestWriter) -> None: ...
    def save_config_files(self, writer: ManifestWriter) -> None:
        """What `save` writes beside tensors, where these lie in shards: config.json, tokenizer.json."""
        ...

    def load(self, folder: Path) -> None: ...


def save_model(writer: ManifestWriter, model_io: ModelIO, method: nn.Module, ranks: Ranks) -> None:
    """The model part of a step: as `model` writes it, or what is trained in shards, with the rest of that part."""
    if ranks.is_sharded:
        tensors = {name: p for name, p in method.named_parameters() if p.requires_grad}
        sharded.write_shards(writer, SHARDS_FOLDER, tensors, ranks.rank)
    if ranks.rank == 0:
        (model_io.save_config_files if ranks.is_sharded else model_io.save)(writer)


def load_model(folder: Path, model_io: ModelIO, method: nn.Module) -> None:
    """The model part of a step, into a method that is whole on this rank."""
    if not (folder / SHARDS_FOLDER).is_dir():
        model_io.load(folder)
        return
    trained = {name: p.detach() for name, p in method.named_parameters() if p.requires_grad}
    found = sharded.read_shards(folder / SHARDS_FOLDER, lambda name, shape: trained.get(name, torch.empty(shape)))
    odd = min(found.keys() ^ trained.keys(), default=None)
    if odd:
        raise CorruptArtifactError(
            f"{folder}: {odd} is in its shards or among what is trained, not in both; take its recipe"
        )


class StateDictIO:
    """All tensors of a module under its own names in model.safetensors."""

    def __init__(self, method: nn.Module) -> None:
        self.method = method

    def save(self, writer: ManifestWriter) -> None:
        """Writes them."""
        writer.add_tensors("model.safetensors", self.method.state_dict())

    def save_config_files(self, writer: ManifestWriter) -> None:
        """There is no more."""

    def load(self, folder: Path) -> None:
        """Copies them in; every name must be there and no other."""
        self.method.load_state_dict(load_tensors(folder / "model.safetensors"))


@dataclass
class Progress:
    """How far a run is: `step` updates were tried; `best` holds (metric, step), the best first.

    `micro` is the micro-batch in use, `restart` an optimizer's restart that is still due, `validated` the last step
    that was, `bytes` the part of metrics.jsonl that belongs to the step.
    """

    step: int = 0
    epoch: int = 0
    row_offset: int = 0
    micro_batch_size: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    num_overflows: int = 0
    reset_pending: bool = False
    best: list[tuple[float, int]] = field(default_factory=list)
    validated_step: int = -1
    metrics_bytes: int = 0


def save_training_state(
    writer: ManifestWriter,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    states: Sequence[MethodState],
    progress: Progress,
    ranks: Ranks,
) -> None:
    """Everything of a step but its model: of each rank its shards and random numbers, of the first the rest."""
    held = optimizer.state_dict()
    moments = {f"{i}.{name}": t for i, kept in held["state"].items() for name, t in kept.items()}
    if ranks.is_sharded:
        sharded.write_shards(writer, "optimizer", moments, ranks.rank)
    writer.add_tensors(f"rng-{ranks.rank:05d}.safetensors", get_random_state())
    if ranks.rank > 0:
        return
    if not ranks.is_sharded:
        writer.add_tensors("optimizer.safetensors", moments)
    writer.add_json("optimizer.json", {"groups": held["param_groups"], "scaler": scaler.state_dict()})
    if states:
        parts = [flatten_tree(state, f"{i}.") for i, state in enumerate(states)]
        writer.add_tensors("state.safetensors", {name: t for tensors, _ in parts for name, t in tensors.items()})
        writer.add_json("state.json", {"states": [form for _, form in parts]})
    writer.add_json(PROGRESS_FILE, asdict(progress))


def load_training_state(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    rank: int = 0,
) -> tuple[Progress, list[MethodState]]:
    """Puts a step's optimizer and random numbers back; gives its progress and the states carried."""
    held = optimizer.state_dict()
    about = read_json(folder / "optimizer.json")
    there, here = ([len(group["params"]) for group in groups] for groups in (about["groups"], held["param_groups"]))
    if there != here:
        raise CorruptArtifactError(
            f"{folder}: an optimizer of groups of {there} tensors, this run trains {here}; take its recipe"
        )
    state: dict[int, Tensors] = {}
    for name, tensor in load_optimizer_tensors(
        folder, [p for group in optimizer.param_groups for p in group["params"]]
    ).items():
        place, _, what = name.partition(".")
        state.setdefault(int(place), {})[what] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": held["param_groups"]})
    if about["scaler"]:
        scaler.load_state_dict(about["scaler"])
    random = folder / f"rng-{rank:05d}.safetensors"
    if random.exists():  # else there are more ranks than there were: this one goes on from its seed
        set_random_state(load_tensors(random))
    progress = Progress(**read_json(folder / PROGRESS_FILE))
    progress.best = [(value, step) for value, step in progress.best]
    return progress, load_carried_states(folder)


def load_carried_states(folder: Path) -> list[MethodState]:
    """The states that a step gave to the next, of each micro-batch one."""
    if not (folder / "state.safetensors").exists():
        return []
    tensors, forms = load_tensors(folder / "state.safetensors"), read_json(folder / "state.json")
    return [unflatten_tree(form, tensors, set(tensors)) for form in forms["states"]]


def load_optimizer_tensors(folder: Path, parameters: list[Tensor]) -> Tensors:
    """The optimizer's tensors of a step by their names, each laid out as its parameter."""

    def parameter(name: str) -> Tensor:
        return parameters[int(name.partition(".")[0])].detach()

    def like(name: str, shape: tuple[int, ...]) -> Tensor:
        p = parameter(name)
        return torch.zeros_like(p) if p.shape == shape else torch.zeros(shape)

    if (folder / "optimizer").is_dir():
        return sharded.read_shards(folder / "optimizer", like)
    found = load_tensors(folder / "optimizer.safetensors")
    return {name: sharded.distribute_like(tensor, parameter(name)) for name, tensor in found.items()}


def load_tensors(path: Path) -> Tensors:
    """Every tensor of a file of ours, in memory of its own."""
    return {name: t.clone() for name, t in atomic.open_tensors(path, read_safetensors_header(path).tensors).items()}


def get_random_state() -> Tensors:
    """The streams of torch and of each of its devices; Python's and numpy's are drawn from by nothing in laconic."""
    devices = torch.cuda.get_rng_state_all() if _is_cuda_initialized() else []
    return {"torch": torch.get_rng_state(), **{f"cuda.{i}": state for i, state in enumerate(devices)}}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Puts the streams where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    for name, there in state.items():
        if name.startswith("cuda.") and _is_cuda_initialized():
            torch.cuda.set_rng_state(there, int(name.partition(".")[2]))


def _is_cuda_initialized() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
