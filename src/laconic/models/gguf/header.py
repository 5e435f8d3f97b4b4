"""Read and check the header of a GGUF file: its metadata, and the byte range of each tensor.

The gguf package supplies the constants of the format. Its own reader is not used: it trusts the counts in the file, and
needs seconds for the vocabulary of a small model.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from laconic.errors import InputError, translate_os_errors
from laconic.storage.file_names import check_is_file, is_printable
from laconic.storage.safetensors_header import check_not_pickle

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 200_000_000  # a vocabulary of 256 thousand tokens with its merges has 12 million
MAX_ENTRIES = 2_000_000  # metadata keys, tensors, or items of one array
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
NO_TOKEN = (-1, 0xFFFFFFFF)  # llama.cpp's id of a token that does not exist, signed and unsigned
# Type ids of metadata values.
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

Value = TypeVar("Value")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file: its quantisation, its shape with rows first, and its byte range."""

    name: str
    quantization: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors of a file, checked against its length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(self, key: str, kind: type[Value]) -> Value | None:
        """Return a metadata value of type int, float, bool, str or list, or None; an int is also a float."""
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None:
            return None
        if type(value) is not kind or (kind is float and not math.isfinite(cast(float, value))):
            raise InputError(f"{self.path.name}: {key}={str(value)[:60]} is not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[Value]) -> Value:
        """Return a metadata value as `get` does; raise InputError if the key is missing."""
        value = self.get(key, kind)
        if value is None:
            raise InputError(f"{self.path.name}: {key} is missing; convert the model again with llama.cpp")
        return value

    def get_token_id(self, role: str) -> int | None:
        """Return the id of a special token ("bos", "eos", "padding", …); None if it is missing or -1."""
        index = self.get(f"tokenizer.ggml.{role}_token_id", int)
        return None if index in NO_TOKEN else index

    def get_list(self, key: str, *kinds: type) -> list[Any]:
        """Return an array whose items are of these types; an empty list if the key is missing."""
        values: list[Any] = self.get(key, list) or []  # pyright: ignore[reportUnknownVariableType]
        if not all(type(value) in kinds for value in values):
            raise InputError(f"{self.path.name}: {key} is not an array of type {kinds[0].__name__}")
        return values


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a GGUF file; nothing is allocated before its size has been checked."""
    check_is_file(path)
    with translate_os_errors(path), path.open("rb") as file:
        start = file.read(8)
        check_not_pickle(path.name, start)
        if start[:4] != MAGIC:
            raise InputError(f"{path.name} is not a GGUF file; its first bytes are {start[:4]!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(HeaderReader(path, data))


def parse_header(reader: "HeaderReader") -> GGUFHeader:
    path = reader.path
    version = reader.read_number("<u4")
    if version not in VERSIONS:
        raise InputError(f"{path.name}: version {version}; expected a little-endian GGUF file of version 2 or 3")
    num_tensors, num_keys = reader.read_count(8), reader.read_count(8)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.read_name()
        if key in metadata:
            raise reader.damaged_error(f"{key} occurs twice")
        metadata[key] = reader.read_value(key)
    infos = [reader.read_tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.damaged_error(f"general.alignment={alignment} is not a power of two")
    data_start = -(-reader.offset // alignment) * alignment
    return GGUFHeader(path, metadata, locate_tensors(reader, infos, data_start, alignment))


TensorInfo = tuple[str, tuple[int, ...], int, int]  # name, dimensions, type and offset, unchecked


class HeaderReader:
    """Read values from the header of a file; lengths that exceed the rest of the header are errors."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = len(MAGIC)
        self.end = min(len(data), MAX_HEADER_BYTES)

    def damaged_error(self, reason: str) -> InputError:
        return InputError(f"{self.path.name}: damaged GGUF header: {reason}; download it again")

    def take(self, n: int) -> bytes:
        left = self.end - self.offset
        if n > left:
            raise self.damaged_error(f"{n:,} bytes expected at byte {self.offset:,}, where {left:,} are left")
        self.offset += n
        return self.data[self.offset - n : self.offset]

    def read_number(self, dtype: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def read_count(self, item_bytes: int) -> int:
        """Read the number of items that follow, each of at least `item_bytes`."""
        count = struct.unpack("<Q", self.take(8))[0]
        limit = min(MAX_ENTRIES, (self.end - self.offset) // item_bytes)
        if count > limit:
            raise self.damaged_error(f"{count:,} items at byte {self.offset:,}, where at most {limit:,} fit")
        return count

    def read_string(self) -> str:
        n = struct.unpack("<Q", self.take(8))[0]
        try:
            return str(self.take(n), "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged_error(f"byte {self.offset - n + error.start:,} is not UTF-8") from None

    def read_name(self) -> str:
        name = self.read_string()
        if not is_printable(name):
            raise self.damaged_error(f"{name[:40]!r} is not a name")
        return name

    def read_value(self, key: str) -> Any:
        kind = self.read_number("<u4")
        if kind == STRING:
            return self.read_string()
        if kind in SCALARS:
            return self.read_number(SCALARS[kind])
        if kind != ARRAY:
            raise self.damaged_error(f"{key} has the unknown type {kind}")
        item = self.read_number("<u4")
        if item == STRING:
            return [self.read_string() for _ in range(self.read_count(8))]
        if item not in SCALARS:
            raise self.damaged_error(f"{key} is an array of type {item}")
        dtype = np.dtype(SCALARS[item])
        return np.frombuffer(self.take(self.read_count(dtype.itemsize) * dtype.itemsize), dtype).tolist()

    def read_tensor_info(self) -> TensorInfo:
        name = self.read_name()
        rank = self.read_number("<u4")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self.damaged_error(f"{name} has {rank:,} dimensions")
        dimensions = struct.unpack(f"<{rank}Q", self.take(8 * rank))
        return name, dimensions, self.read_number("<u4"), self.read_number("<u8")


def locate_tensors(
    reader: HeaderReader, infos: list[TensorInfo], data_start: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Return the byte range of each tensor; ranges must lie in the file, be aligned and not overlap."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # optional, and slow to import

    size = reader.path.stat().st_size
    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    tensors: dict[str, GGUFTensor] = {}
    for name, dimensions, type_id, offset in infos:
        if name in tensors:
            raise reader.damaged_error(f"{name} occurs twice")
        if type_id not in names:
            raise InputError(f"{reader.path.name}: {name} has the unknown quantisation {type_id}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        numel = math.prod(dimensions)
        start = data_start + offset
        end = start + numel // block * block_bytes
        if numel == 0 or dimensions[0] % block or offset % alignment or end > size:
            place = f"{list(dimensions)} {names[type_id]} at byte {start:,} of {size:,}"
            raise InputError(f"{reader.path.name}: {name} ({place}) is not in the file; download it again")
        tensors[name] = GGUFTensor(name, names[type_id], dimensions[::-1], start, end)
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise reader.damaged_error(f"{tensor.name} overlaps another tensor")
        end = tensor.end
    return tensors
