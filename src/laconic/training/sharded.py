"""Tensors of a step in shards, one file a rank: written and read by torch's distributed checkpoints as safetensors.

The default back end of these pickles its metadata, and runs what such a file says (pytorch#189308); it is never used.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError, translate_os_errors
from laconic.storage.manifest import ManifestWriter
from laconic.storage.strict_json import read_safetensors_header

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException


def write_shards(writer: ManifestWriter, name: str, tensors: Mapping[str, Tensor], rank: int) -> None:
    """The folder `name` with a file of every rank's shards, of which this rank enters its own; all ranks call it.

    Raises `ValueError` for a value that is no tensor: the writer would put a pickle into a file called safetensors.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import, as all of the package
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    odd = next((key for key, value in tensors.items() if not isinstance(cast(Any, value), Tensor)), None)
    if odd is not None:
        raise ValueError(f"{name}: {odd} is a {type(tensors[odd]).__name__}, no tensor; it goes into a JSON file")
    folder = writer.folder / name
    held = {key: tensor.detach() for key, tensor in tensors.items()}
    with translate_os_errors(folder, sum(tensor.nbytes for tensor in held.values())):
        try:
            save(held, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:
            error = first_failure(error)
            raise error from None
        writer.add_existing(
            path.relative_to(writer.folder).as_posix() for path in folder.glob(f"shard-{rank + 1:05d}-*")
        )


def first_failure(error: "CheckpointException") -> BaseException:
    """What the first rank that failed failed with."""
    return next((raised for raised, _ in error.failures.values()), error)


def read_shards(folder: Path, allocate: Callable[[str, tuple[int, ...]], Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors in a folder of shards, however many ranks wrote them; `like` gives where one goes, by name and shape.

    Where that is in shards, all ranks call it and each reads its own.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.tensor import DTensor

    for path in folder.glob("*.safetensors"):
        read_safetensors_header(path)
    reader = HuggingFaceStorageReader(str(folder))
    promised = reader.read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {}
    for name, about in cast(dict[str, Any], promised).items():
        shape = tuple(about.size)
        found[name] = allocate(name, shape) if allocate else torch.empty(shape, dtype=about.properties.dtype)
        if tuple(found[name].shape) != shape:
            raise CorruptArtifactError(
                f"{folder}: {name} is {list(shape)}, the run has {list(found[name].shape)}; take its recipe"
            )
    apart = any(isinstance(tensor, DTensor) for tensor in found.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process may read, too
        try:
            load(cast(dict[str, Any], found), storage_reader=reader, no_dist=not apart)
        except CheckpointException as error:
            error = first_failure(error)
            raise error from None
    return found


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, laid out as the parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
