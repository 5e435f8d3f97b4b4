"""Contents of a training step on disk: model, optimizer, random states, carried states and progress."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.interfaces import MethodState
from laconic.storage import atomic
from laconic.storage.manifest import ManifestWriter
from laconic.storage.safetensors_header import read_safetensors_header
from laconic.storage.strict_json import read_json, validate_json
from laconic.storage.tensor_tree import flatten_tree, unflatten_tree
from laconic.training import sharded
from laconic.training.random_state import get_random_state, set_random_state
from laconic.training.ranks import Ranks

Tensors = dict[str, Tensor]
Settings = TypeVar("Settings")
SHARDS_FOLDER = "model"  # in place of the model's file, if it is sharded
PROGRESS_FILE = "progress.json"


class ModelIO(Protocol):
    """Writes the model of a step, and loads it back into the live modules bit for bit."""

    def save(self, writer: ManifestWriter) -> None: ...
    def save_config_files(self, writer: ManifestWriter) -> None:
        """Write what accompanies the tensors of a sharded model: config.json, tokenizer.json."""
        ...

    def load(self, folder: Path) -> None: ...


class StateDictIO:
    """Stores all tensors of a module in model.safetensors."""

    def __init__(self, method: nn.Module) -> None:
        self.method = method

    def save(self, writer: ManifestWriter) -> None:
        writer.add_tensors("model.safetensors", self.method.state_dict())

    def save_config_files(self, writer: ManifestWriter) -> None: ...

    def load(self, folder: Path) -> None:
        self.method.load_state_dict(load_tensors(folder / "model.safetensors"))


def save_model(writer: ManifestWriter, model_io: ModelIO, method: nn.Module, ranks: Ranks) -> None:
    """Write the model, or this rank's shards of the trainable parameters."""
    if ranks.is_sharded:
        tensors = {name: p for name, p in method.named_parameters() if p.requires_grad}
        sharded.write_shards(writer, SHARDS_FOLDER, tensors, ranks.rank)
    if ranks.rank == 0:
        (model_io.save_config_files if ranks.is_sharded else model_io.save)(writer)


def load_model(folder: Path, model_io: ModelIO, method: nn.Module) -> None:
    """Load the model of a step into a method that is whole on this rank; CorruptArtifactError for other parameters."""
    if not (folder / SHARDS_FOLDER).is_dir():
        model_io.load(folder)
        return
    trained = {name: p.detach() for name, p in method.named_parameters() if p.requires_grad}
    stored = sharded.read_shards(folder / SHARDS_FOLDER, lambda name, shape: trained.get(name, torch.empty(shape)))
    bad = min(stored.keys() ^ trained.keys(), default=None)
    if bad:
        raise CorruptArtifactError(f"{folder}: {bad} is either stored or trainable, not both; use the run's own recipe")


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0  # updates tried
    epoch: int = 0  # of the next update
    row_offset: int = 0  # rows of that epoch already used
    micro_batch_size: int = 0
    skipped_steps: list[int] = field(default_factory=list)  # updates that were not finite
    reset_pending: bool = False  # the optimizer state is cleared before the next applied update
    metrics_bytes: int = 0  # length of metrics.jsonl that belongs to the step
    metrics_sha256: str = ""  # of that part; empty before the first save


@dataclass
class OptimizerGroup:
    """A group of an optimizer's state; the other settings of a group come from the recipe."""

    params: list[int]


@dataclass
class OptimizerSettings:
    """What optimizer.json has of an optimizer and of the loss scaler, whose state is empty if it is off."""

    groups: list[OptimizerGroup]
    scaler: dict[str, int | float]


@dataclass
class CarriedSettings:
    """The structure of the carried states of one rank, whose tensors are in a file beside it."""

    states: list[Any]
    num_ranks: int


def save_training_state(
    writer: ManifestWriter,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    states: Sequence[MethodState],
    progress: Progress,
    ranks: Ranks,
) -> None:
    """Write everything but the model: shards, random and carried states of every rank, the rest on rank 0."""
    stored = optimizer.state_dict()
    tensors = {f"{i}.{name}": t for i, entries in stored["state"].items() for name, t in entries.items()}
    if ranks.is_sharded:
        sharded.write_shards(writer, "optimizer", tensors, ranks.rank)
    writer.add_tensors(f"rng-{ranks.rank:05d}.safetensors", get_random_state())
    if states:
        name = carried_states_name(ranks.rank)
        trees = [flatten_tree(state, f"{i}.") for i, state in enumerate(states)]
        writer.add_tensors(f"{name}.safetensors", {key: t for parts, _ in trees for key, t in parts.items()})
        writer.add_json(f"{name}.json", {"states": [spec for _, spec in trees], "num_ranks": ranks.world_size})
    if ranks.rank > 0:
        return
    if not ranks.is_sharded:
        writer.add_tensors("optimizer.safetensors", tensors)
    writer.add_json("optimizer.json", {"groups": stored["param_groups"], "scaler": scaler.state_dict()})
    writer.add_json(PROGRESS_FILE, asdict(progress))


def load_training_state(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    state_types: Mapping[str, type],
    ranks: Ranks,
) -> tuple[Progress, list[MethodState]]:
    """Restore optimizer, loss scale and random state of a step; a rank without a random state keeps its seed.

    Returns:
        The progress, and the carried state of each micro-batch of this rank, of dataclasses in `state_types`.

    Raises:
        CorruptArtifactError: If the optimizer has other parameters, or a JSON file other keys or types.
        UsageError: If another number of ranks carried states.
    """
    current = optimizer.state_dict()
    settings = read_settings(folder, "optimizer.json", OptimizerSettings)
    progress = read_settings(folder, PROGRESS_FILE, Progress)
    theirs = [len(group.params) for group in settings.groups]
    ours = [len(group["params"]) for group in current["param_groups"]]
    if theirs != ours:
        raise CorruptArtifactError(
            f"{folder}: optimizer groups of {theirs} tensors, this run trains {ours}; use the run's own recipe"
        )
    state: dict[int, Tensors] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in load_optimizer_tensors(folder, parameters).items():
        position, _, key = name.partition(".")
        state.setdefault(int(position), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})
    if settings.scaler and settings.scaler.keys() != scaler.state_dict().keys():
        raise CorruptArtifactError(
            f"{folder}: optimizer.json: scaler has other keys; restore this checkpoint from a copy"
        )
    if settings.scaler:
        scaler.load_state_dict(settings.scaler)
    random_state = folder / f"rng-{ranks.rank:05d}.safetensors"
    if random_state.exists():
        set_random_state(load_tensors(random_state))
    return progress, load_carried_states(folder, state_types, ranks)


def read_settings(folder: Path, name: str, kind: type[Settings]) -> Settings:
    """Return the contents of a JSON file of a step. Raises `CorruptArtifactError` if they are of another type."""
    try:
        return validate_json(kind, read_json(folder / name), f"{folder}: {name}", "restore the checkpoint from a copy")
    except InputError as error:
        raise CorruptArtifactError(str(error)) from None


def carried_states_name(rank: int) -> str:
    """Return the name of a rank's files of carried states, without their suffixes."""
    return f"state-{rank:05d}" if rank else "state"


def load_carried_states(folder: Path, state_types: Mapping[str, type], ranks: Ranks) -> list[MethodState]:
    """Return the state that each micro-batch of this rank continues from; UsageError for another number of ranks."""
    if not (folder / f"{carried_states_name(0)}.json").exists():
        return []
    num_ranks = read_settings(folder, f"{carried_states_name(0)}.json", CarriedSettings).num_ranks
    if num_ranks != ranks.world_size:
        raise UsageError(
            f"{folder} has states that {num_ranks} processes carried, not {ranks.world_size}; "
            f"resume with {num_ranks}, because each continues its own rows"
        )
    name = carried_states_name(ranks.rank)
    specs = read_settings(folder, f"{name}.json", CarriedSettings).states
    tensors = load_tensors(folder / f"{name}.safetensors")
    return [unflatten_tree(spec, tensors, set(tensors), state_types) for spec in specs]


def load_optimizer_tensors(folder: Path, parameters: list[Tensor]) -> Tensors:
    """Return the optimizer's tensors of a step by name, each distributed like its parameter."""

    def parameter_of(name: str) -> Tensor:
        return parameters[int(name.partition(".")[0])].detach()

    def allocate(name: str, shape: tuple[int, ...]) -> Tensor:
        p = parameter_of(name)
        return torch.zeros_like(p) if p.shape == shape else torch.zeros(shape)

    if (folder / "optimizer").is_dir():
        return sharded.read_shards(folder / "optimizer", allocate)
    stored = load_tensors(folder / "optimizer.safetensors")
    return {name: sharded.distribute_like(tensor, parameter_of(name)) for name, tensor in stored.items()}


def load_tensors(path: Path) -> Tensors:
    """Return copies of all tensors of a safetensors file."""
    tensors = atomic.open_tensors(path, read_safetensors_header(path).tensors)
    return {name: tensor.clone() for name, tensor in tensors.items()}
