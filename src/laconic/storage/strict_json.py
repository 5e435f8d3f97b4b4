"""Validate untrusted file names, JSON and safetensors headers before anything large is allocated."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open

from laconic.errors import InputError, UnsafeFileError, translate_os_errors

MAX_HEADER_BYTES = 100_000_000  # largest safetensors header or JSON file
MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 500_000  # commas and brackets; about a second of parsing, or 80,000 tensors in one file
MAX_INTEGER_DIGITS = 100
MAX_NAME_LENGTH = 1000

DTYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def resolve_inside(root: Path, name: str) -> Path:
    """Return the path of a file name that was read from a file inside `root`.

    Links out of the folder are refused, except those of a Hugging Face hub snapshot to the blobs of its repository.

    Raises:
        UnsafeFileError: If the name or a link leads out of `root`, or to something that is not a regular file.
    """
    for rule in (PurePosixPath(name), PureWindowsPath(name)):
        if not is_printable(name) or rule.drive or rule.root or ".." in rule.parts or not rule.parts:
            raise UnsafeFileError(f"{name[:80]!r} is not the name of a file inside {root}; not opened")
    try:
        home, path = root.resolve(), (root / name).resolve()
        is_special = path.exists() and not path.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        raise UnsafeFileError(f"{root / name} cannot be resolved ({error}); not opened") from None
    if not path.is_relative_to(home) and path.parent != _hub_blobs_folder(home):
        raise UnsafeFileError(f"{root / name} leads out of its folder, to {path}; not opened. Copy the file there")
    if is_special:
        raise UnsafeFileError(f"{root / name} is not a regular file; not opened")
    return path


def is_printable(name: str) -> bool:
    """Return whether a name is short and free of control characters, line ends and changes of text direction."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _hub_blobs_folder(home: Path) -> Path | None:
    """Return the blobs folder of a hub snapshot, models--ORG--NAME/snapshots/COMMIT, or None."""
    snapshot = next((p for p in (home, *home.parents) if p.parent.name == "snapshots"), None)
    if snapshot is None or not snapshot.parent.parent.name.startswith("models--"):
        return None
    return snapshot.parent.parent / "blobs"


def to_canonical_json(value: object) -> str:
    """Return JSON with sorted keys and no spaces; raise `ValueError` for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_json(path: Path, max_parts: int = MAX_JSON_PARTS) -> dict[str, Any]:
    """Read the object in a JSON file of our own; see `parse_json`."""
    return parse_json(read_small_file(path), path.name, max_parts)


def read_foreign_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file that another program wrote, as Python's `json` does.

    NaN and infinity are numbers, and the last of several equal keys counts; the limits of `parse_json` hold.
    """
    return parse_json(read_small_file(path), path.name, is_strict=False)


def read_small_file(path: Path) -> bytes:
    """Return the bytes of a file; raise InputError if it is missing or larger than a JSON file may be."""
    if not path.is_file():
        raise InputError(f"no {path.name} in {path.parent}")
    with translate_os_errors(path):
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise InputError(f"{path.name} has {path.stat().st_size:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
        return path.read_bytes()


def parse_json(data: bytes, label: str, max_parts: int = MAX_JSON_PARTS, *, is_strict: bool = True) -> dict[str, Any]:
    """Parse a JSON object from an untrusted source.

    Args:
        data: UTF-8 text.
        label: Name of the source, for error messages.
        max_parts: Limit on the number of commas and brackets.
        is_strict: Whether to refuse repeated keys, NaN, infinity and numbers out of range.

    Raises:
        InputError: The JSON is invalid or not an object, nested too deeply, too long, or has unpaired surrogates or
            something that `is_strict` refuses.
    """
    parts = sum(map(data.count, (b",", b"[", b"{")))
    if parts > max_parts:
        raise InputError(f"{label}: {parts:,} values; the limit is {max_parts:,}")
    strict_options: dict[str, Any] = {
        "object_pairs_hook": _check_duplicate_keys,
        "parse_constant": _reject_constant,
        "parse_float": _parse_float,
    }
    try:
        value: object = json.loads(data.decode(), parse_int=_parse_integer, **(strict_options if is_strict else {}))
        _check_tree(value)
    except json.JSONDecodeError as error:
        raise InputError(f"{label}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise InputError(f"{label}: nested deeper than {MAX_JSON_DEPTH}") from None
    except ValueError as error:
        raise InputError(f"{label}: invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{label}:1:1: expected a JSON object")
    return cast(dict[str, Any], value)


def _check_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; raise `ValueError` for a repeated key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {duplicate[:80]!r}")
    return result


def _reject_constant(text: str) -> NoReturn:
    """Raise `ValueError` for NaN and infinity."""
    raise ValueError(f"{text} is not a JSON number")


def _parse_integer(text: str) -> int:
    """Return an integer of at most `MAX_INTEGER_DIGITS` digits."""
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"integer {text[:20]}… has {len(text):,} digits")
    return int(text)


def _parse_float(text: str) -> float:
    """Return a finite float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is out of range")
    return value


def _check_tree(value: object) -> None:
    """Raise `ValueError` for values nested too deeply and for strings with an unpaired surrogate."""
    level: list[Any] = [value]
    for depth in range(MAX_JSON_DEPTH + 2):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str) and not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                raise ValueError("a string holds an unpaired surrogate")
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
    """Type, shape and byte range of one tensor in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """Header of a safetensors file, checked against the length of the file."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read and validate the header of a safetensors file without loading a tensor.

    The safetensors library checks that byte ranges are dense and agree with types, shapes and the file's length. This
    function also refuses repeated keys, unprintable names, and more dimensions than torch supports.

    Raises:
        InputError: If the file is missing or invalid.
        UnsafeFileError: If it is a pickle or zip file.
    """
    if not path.is_file():
        raise InputError(f"no {path.name} in {path.parent}")
    with translate_os_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        n = int.from_bytes(start, "little")
        if n > min(size - 8, MAX_HEADER_BYTES):
            check_not_pickle(path.name, start)
            limit = f"the file has {size:,}" if n > size - 8 else f"the limit is {MAX_HEADER_BYTES:,}"
            raise InputError(f"{path.name}: header of {n:,} bytes, but {limit}; download it again")
        fields = parse_json(file.read(n), f"{path.name}: header")
        for name in fields:
            if not is_printable(name):
                raise InputError(f"{path.name}: header: {name[:80]!r} is not a valid tensor name; download it again")
        try:
            with cast(Any, safe_open)(path, framework="numpy"):  # does not map the file into a tensor
                pass
        except SafetensorError as error:
            raise InputError(f"{path.name}: {str(error)[:200]}; download it again") from None
    metadata = cast(dict[str, str], fields.pop("__metadata__", None) or {})
    return SafetensorsHeader(
        {name: _parse_tensor_spec(path.name, name, field) for name, field in fields.items()}, metadata
    )


def check_not_pickle(name: str, start: bytes) -> None:
    """Raise `UnsafeFileError` if these are the first bytes of a pickle or zip file."""
    if start.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise UnsafeFileError(
            f"{name} is a pickle or zip file, which can run code; not opened. "
            "Convert it with transformers' save_pretrained in an environment you trust"
        )


def _parse_tensor_spec(file: str, name: str, field: dict[str, Any]) -> TensorSpec:
    """Return a header entry that the safetensors library accepted, with torch's dtype."""
    dtype, shape = DTYPES.get(field["dtype"]), tuple(field["shape"])
    if dtype is None or len(shape) > 64:
        raise InputError(
            f"{file}: {name}: type {field['dtype']} with {len(shape)} dimensions is not supported by torch"
        )
    return TensorSpec(dtype, shape, *field["data_offsets"])
