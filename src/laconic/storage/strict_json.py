"""Reading what strangers wrote: names of files, JSON, headers of safetensors; refused before a byte is allocated."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, cast

import torch

from laconic.errors import InputError, UnsafeFileError, translate_os_errors

MAX_HEADER_BYTES = 100_000_000  # largest safetensors header and largest JSON file that is read
MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 500_000  # commas and brackets; about a second of reading, some 80,000 tensors in one file
MAX_JSON_INTEGER = 2**53
MAX_NAME_LENGTH = 1000  # characters of the longest name

DTYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def resolve_inside(root: Path, name: str) -> Path:
    """The file that `name`, found in a file of the folder `root`, means; a name or link that leads out is refused.

    The one link followed out of a folder is that of a hub snapshot into the blobs of its own repository.
    """
    for rule in (PurePosixPath(name), PureWindowsPath(name)):
        if not is_printable(name) or rule.drive or rule.root or ".." in rule.parts or not rule.parts:
            raise UnsafeFileError(f"{name[:80]!r} is no name of a file inside {root}; not opened")
    try:
        home, path = root.resolve(), (root / name).resolve()
        odd = path.exists() and not path.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long
        raise UnsafeFileError(f"{root / name} cannot be followed ({error}); not opened") from None
    if not path.is_relative_to(home) and path.parent != _hub_blobs_folder(home):
        raise UnsafeFileError(f"{root / name} leads out of its folder, to {path}; not opened. Put a copy there")
    if odd:
        raise UnsafeFileError(f"{root / name} is no regular file; not opened")
    return path


def is_printable(name: str) -> bool:
    """Whether a name can stand in a message: printable, so without NUL, line ends and turned text, and not too long."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _hub_blobs_folder(home: Path) -> Path | None:
    """Where a snapshot of the hub's cache, models--ORG--NAME/snapshots/COMMIT, keeps its files."""
    snapshot = next((p for p in (home, *home.parents) if p.parent.name == "snapshots"), None)
    if snapshot is None or not snapshot.parent.parent.name.startswith("models--"):
        return None
    return snapshot.parent.parent / "blobs"


def to_canonical_json(value: object) -> str:
    """JSON in one spelling: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_json(path: Path, max_parts: int = MAX_JSON_PARTS) -> dict[str, Any]:
    """The object in a JSON file, read strictly: see `parse_json`."""
    if not path.is_file():
        raise InputError(f"no {path.name} in {path.parent}")
    with translate_os_errors(path):
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise InputError(f"{path.name} has {path.stat().st_size:,} bytes, {MAX_HEADER_BYTES:,} are read")
        return parse_json(path.read_bytes(), path.name, max_parts)


def parse_json(data: bytes, label: str, max_parts: int = MAX_JSON_PARTS) -> dict[str, Any]:
    """The object in `data`: UTF-8, depth 64, no key twice, no NaN or infinity, integers to 2^53, no lone surrogate."""
    there = sum(map(data.count, (b",", b"[", b"{")))
    if there > max_parts:
        raise InputError(f"{label}: {there:,} parts, {max_parts:,} are read")
    try:
        value: object = json.loads(
            data.decode(),
            object_pairs_hook=_check_duplicate_keys,
            parse_constant=_reject_constant,
            parse_int=_parse_integer,
            parse_float=_parse_float,
        )
        _check_tree(value)
    except json.JSONDecodeError as error:
        raise InputError(f"{label}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise InputError(f"{label}: nested deeper than {MAX_JSON_DEPTH}") from None
    except ValueError as error:
        raise InputError(f"{label}: not strict JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{label}:1:1: a JSON object is asked for")
    return cast(dict[str, Any], value)


def _check_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:80]!r} stands twice")
    return found


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _parse_integer(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > MAX_JSON_INTEGER:
        raise ValueError(f"integer {text[:20]} is beyond 2^53")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is beyond the range of numbers")
    return value


def _check_tree(value: object) -> None:
    level: list[Any] = [value]
    for depth in range(MAX_JSON_DEPTH + 2):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str) and not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                raise ValueError("a lone surrogate stands in a string")
            if isinstance(item, dict | list) and depth >= MAX_JSON_DEPTH:
                raise ValueError(f"nested deeper than {MAX_JSON_DEPTH}")
            if isinstance(item, dict):
                below += cast(dict[str, Any], item).keys()
                below += cast(dict[str, Any], item).values()
            elif isinstance(item, list):
                below += cast(list[Any], item)
        level = below


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file, as its header promises it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """What the header of a safetensors file promises, checked against the length of the file."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """The header of a safetensors file: dense, no key twice, known types, bytes as shapes ask and as the file has.

    Nothing is allocated or mapped before all of it holds; otherwise `BadInput`.
    """
    if not path.is_file():
        raise InputError(f"no {path.name} in {path.parent}")
    with translate_os_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        n = int.from_bytes(start, "little")
        if n > min(size - 8, MAX_HEADER_BYTES):
            check_not_pickle(path.name, start)
            there = f"file has {size:,}" if n > size - 8 else f"at most {MAX_HEADER_BYTES:,} are read"
            raise InputError(f"{path.name}: {n:,} bytes of header promised, {there}; fetch it again")
        fields = parse_json(file.read(n), f"{path.name}: header")
    metadata = cast(dict[str, Any], fields.pop("__metadata__", {}))
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise InputError(f"{path.name}: header: __metadata__ is not a table of texts")
    tensors = {name: _parse_tensor_spec(path.name, name, field) for name, field in fields.items()}
    _check_dense(path.name, tensors, size - 8 - n)
    return SafetensorsHeader(tensors, metadata)


def check_not_pickle(name: str, start: bytes) -> None:
    """Raises `Unsafe` (77) for the first bytes of a pickle or zip."""
    if start.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise UnsafeFileError(
            f"{name} is a pickle or zip by its first bytes and can run code; not opened. "
            "Save it as safetensors with transformers' save_pretrained in an environment you trust"
        )


def _parse_tensor_spec(file: str, name: str, field: Any) -> TensorSpec:
    if not is_printable(name):
        raise InputError(f"{file}: header: {name[:80]!r} is no name of a tensor; fetch it again")
    try:
        dtype, (start, end) = DTYPES[field["dtype"]], field["data_offsets"]
        shape = cast(tuple[int, ...], tuple(field["shape"]))
        sound = len(field) == 3 and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        sound, dtype, shape, start, end = False, torch.uint8, (), 0, 0
    if not sound:
        raise InputError(f"{file}: header: {name}: no known type, shape and place: {str(field)[:80]}; fetch it again")
    if math.prod(shape) * dtype.itemsize != end - start:
        raise InputError(f"{file}: header: {name}: {end - start:,} bytes for {dtype} {list(shape)}; fetch it again")
    return TensorSpec(dtype, shape, start, end)


def _check_dense(file: str, tensors: Mapping[str, TensorSpec], size: int) -> None:
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            what = "gap before" if entry.start > end else "overlap at"
            raise InputError(f"{file}: header: {what} {name}, byte {min(entry.start, end):,}; fetch it again")
        end = entry.end
    if end != size:
        raise InputError(f"{file}: header promises {end:,} bytes of data, file has {size:,}; fetch it again")
