"""Base class of memories: their files, comparison, and checks of the arguments of operations."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, SupportsIndex, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from laconic.compression.memory_file import BaseMetadata, Metadata
from laconic.console import to_html_table
from laconic.errors import CorruptArtifactError, NonFiniteError, UsageError
from laconic.generation.config import check_type
from laconic.models.checkpoints.checkpoint_files import FLOAT_DTYPES
from laconic.models.checkpoints.weights import resolve_device
from laconic.storage.atomic import check_finite, load_artifact, save_artifact
from laconic.storage.strict_json import MAX_JSON_PARTS, to_canonical_json

Target = torch.device | str | int | torch.dtype
Memory = TypeVar("Memory", bound="SavedMemory[Any]")


class SavedMemory(ABC, Generic[Metadata]):
    """Base of memories, one row for each text, or for several texts that were joined."""

    FILE_KIND: ClassVar[str]
    METADATA_TYPE: ClassVar[type[BaseMetadata]]
    UNIT: ClassVar[str]  # of the second part of `sizes`, such as "slots per head"

    metadata: Metadata | None

    @property
    @abstractmethod
    def sizes(self) -> tuple[Int[Tensor, " B"], Shaped[Tensor, " B"]]:
        """Tokens of each row, and its size in `UNIT`."""

    @property
    @abstractmethod
    def shape_text(self) -> str:
        """Shape that memories must share to be concatenated, for messages."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls: type[Memory], tensors: Mapping[str, Tensor], metadata: Any) -> Memory:
        """Return the memory of the tensors of a file."""

    def _repr_html_(self) -> str:
        tokens, sizes = self.sizes
        documents = () if self.metadata is None else self.metadata.documents
        names = [", ".join(document.name for document in row) for row in documents] or map(str, range(len(tokens)))
        rows = [
            (name, f"{int(n):,}", f"{float(size):,.1f}".removesuffix(".0"))
            for name, n, size in zip(names, tokens, sizes, strict=True)
        ]
        return to_html_table(("text", "tokens", self.UNIT), rows)

    def is_equal(self, other: "SavedMemory[Metadata]") -> bool:
        """Test whether every tensor is equal bit for bit and in dtype, and the models, method and texts behind it.

        Time and version of writing, and what was measured then, are not compared.
        """
        mine, theirs = self.tensors(), other.tensors()
        origins = [None if memory.metadata is None else memory.metadata.origin for memory in (self, other)]
        return (
            origins[0] == origins[1]
            and mine.keys() == theirs.keys()
            and all(x.dtype == theirs[name].dtype for name, x in mine.items())
            and all(torch.equal(x, theirs[name].to(x.device)) for name, x in mine.items())
        )

    @classmethod
    def check_joinable(cls: type[Memory], operation: str, memories: Sequence[Memory], *, equal_rows: bool) -> Memory:
        """Return the first memory; raise if the memories cannot be concatenated."""
        if not memories:
            raise UsageError(f"{operation}: expected at least one memory")
        first = memories[0]
        for memory in memories:
            check_type(operation, memory, cls, f"{cls.__name__} objects one by one, or *memories")
            if memory.shape_text != first.shape_text:
                shapes = f"{first.shape_text} and {memory.shape_text}"
                raise UsageError(f"{operation}: {shapes}; use memories of one model and kind")
            if (memory.metadata is None) != (first.metadata is None):
                raise UsageError(f"{operation}: one memory has metadata and another has none")
            if memory.metadata is not None and first.metadata is not None:
                memory.metadata.check_joinable(operation, first.metadata)
            rows = [len(m.sizes[0]) for m in (first, memory)]
            if equal_rows and rows[0] != rows[1]:
                numbers = f"{rows[0]} and {rows[1]}"
                raise UsageError(f"memories of {numbers} texts cannot be joined; give some of equally many texts")
        return first

    def write(self, path: str | Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Write the tensors of a file, whose numbers have this dtype, and the metadata."""
        path = Path(path)
        if self.metadata is None:
            raise UsageError(f"{path}: this memory has no metadata that names its model; set `metadata` first")
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give the name of a file, such as {path / 'memory.safetensors'}")
        data = asdict(replace(self.metadata, dtype=str(dtype).removeprefix("torch.")))
        if sum(map(to_canonical_json(data).count, ",[{")) > MAX_JSON_PARTS // 2:
            raise UsageError(
                f"{path}: {len(self.sizes[0]):,} texts are too many for one memory file; write several files"
            )
        save_artifact(path, tensors, self.FILE_KIND, data, is_named=True)

    @classmethod
    def load(cls: type[Memory], path: str | Path, reader: BaseMetadata | None = None) -> Memory:
        """Load a memory that `save` wrote, on the CPU and in its stored dtype.

        `reader` is the metadata that the model at hand would write, which the file at `path` must fit; the method
        `load_memory` of a model passes it.

        Raises:
            CorruptArtifactError: If the file is damaged, is of a newer format, or was written for another model.
            UsageError: If `reader` is a model, or anything else but metadata.
        """
        file = Path(path).name
        tensors, data = load_artifact(Path(path), cls.FILE_KIND)
        metadata = cls.METADATA_TYPE.from_json(file, data)
        bad = metadata.first_invalid_tensor(tensors)
        if bad is not None:
            raise CorruptArtifactError(
                f"memory: {file}: {bad} is missing or inconsistent with the other tensors; use an intact copy"
            )
        try:
            for name, tensor in tensors.items():
                check_finite(name, tensor)
        except NonFiniteError as error:
            raise CorruptArtifactError(f"memory: {file}: {error}; compress again") from None
        if reader is not None:
            metadata.check_reader(file, reader)
        return cls.from_tensors(tensors, metadata)


def list_rows(rows: Sequence[int] | Shaped[Tensor, " R"], num_rows: int) -> list[int]:
    """Return the indices of rows as a list; a boolean mask of all rows gives those where it is True."""
    values: object = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows, dtype=object).tolist()
    indices = list(cast(Iterable[int], values)) if isinstance(values, Iterable) else []
    if len(indices) == num_rows and all(isinstance(value, bool) for value in indices):
        indices = [row for row, is_selected in enumerate(indices) if is_selected]
    if not indices or not all(map(is_integer, indices)):
        raise UsageError(f"select_rows: give a list of at least one row number, as in select_rows([0]), not {values!r}")
    outside = next((row for row in indices if not 0 <= row < num_rows), None)
    if outside is not None:
        raise UsageError(f"row {outside} is out of range; the memory has {num_rows} rows, counted from 0")
    return list(map(int, indices))


def check_size(num: int, unit: str, minimum: int) -> None:
    """Raise `UsageError` if the number of slots or vectors to keep is not an integer from `minimum` on."""
    if not is_integer(num) or num < minimum:
        raise UsageError(f"cannot keep {num!r} {unit}; give an integer, {minimum} or more")


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, and not True or False."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def resolve_target(device: Target | None, dtype: torch.dtype | None) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the arguments of `to`, where a dtype may come first, as in `torch.Tensor.to`."""
    if isinstance(device, torch.dtype) and dtype is None:
        device, dtype = None, device
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise UsageError(f"dtype {dtype}: a memory holds floating-point numbers, such as torch.float32")
    return None if device is None else resolve_device(cast(torch.device | str | int, device)), dtype
