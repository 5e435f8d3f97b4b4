"""Save and load sharded tensors, one safetensors file per rank, with torch's distributed checkpoints.

The default backend of torch.distributed.checkpoint pickles its metadata and would run code from such a file
(pytorch#189308), so it is never used.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError, translate_os_errors
from laconic.storage.manifest import ManifestWriter
from laconic.storage.safetensors_header import read_safetensors_header

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; all ranks call it."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def write_shards(writer: ManifestWriter, name: str, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write a folder with one file per rank and record this rank's; all ranks call it."""
    from torch.distributed.checkpoint.api import CheckpointException  # slow imports
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # torch would pickle what is not a tensor into a file called safetensors
    bad = next((key for key, value in tensors.items() if not isinstance(cast(Any, value), Tensor)), None)
    if bad is not None:
        raise ValueError(f"{name}: {bad} is a {type(tensors[bad]).__name__}, not a tensor; store it in a JSON file")
    folder = writer.folder / name
    values = {key: tensor.detach() for key, tensor in tensors.items()}
    with translate_os_errors(folder, sum(tensor.nbytes for tensor in values.values())):
        try:
            save(values, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:
            error = first_failure(error)
            raise error from None
        shards = folder.glob(f"shard-{rank + 1:05d}-*")
        writer.add_existing(path.relative_to(writer.folder).as_posix() for path in shards)


def first_failure(error: "CheckpointException") -> BaseException:
    return next((raised for raised, _ in error.failures.values()), error)


def read_shards(folder: Path, allocate: Callable[[str, tuple[int, ...]], Tensor] | None = None) -> dict[str, Tensor]:
    """Load the tensors of a sharded folder, however many ranks wrote it.

    `allocate` returns the tensor to load into, by name and shape. If it is sharded itself, all ranks call this function
    and each loads its own shard.

    Raises:
        CorruptArtifactError: If a tensor has another shape than the one allocated.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.tensor import DTensor

    for path in folder.glob("*.safetensors"):
        read_safetensors_header(path)
    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, stored in cast(dict[str, Any], reader.read_metadata().state_dict_metadata).items():
        shape = tuple(stored.size)
        tensors[name] = allocate(name, shape) if allocate else torch.empty(shape, dtype=stored.properties.dtype)
        if tuple(tensors[name].shape) != shape:
            raise CorruptArtifactError(
                f"{folder}: {name} is {list(shape)}, this run has {list(tensors[name].shape)}; use the run's own recipe"
            )
    is_distributed = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process may load, too
        try:
            load(cast(dict[str, Any], tensors), storage_reader=reader, no_dist=not is_distributed)
        except CheckpointException as error:
            error = first_failure(error)
            raise error from None
    return tensors


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor, sharded like the parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
