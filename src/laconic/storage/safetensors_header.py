"""Read and validate headers of safetensors files before a tensor is loaded."""

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from laconic.errors import InputError, UnsafeFileError, translate_os_errors
from laconic.storage.file_names import check_is_file, is_printable
from laconic.storage.strict_json import MAX_HEADER_BYTES, parse_json

DTYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


class NotSafetensorsError(InputError):
    """A text file in place of a safetensors file."""


class TensorSpec(NamedTuple):
    """Type, shape and byte range of one tensor in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsHeader(NamedTuple):
    """Header of a safetensors file, checked against the length of the file."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read and validate the header of a safetensors file without loading a tensor.

    The safetensors library checks that byte ranges are dense and agree with types, shapes and the file's length. This
    function also refuses repeated keys, unprintable names, more dimensions than torch supports, pickles and zip files.
    """
    check_is_file(path)
    with translate_os_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        n = int.from_bytes(start, "little")
        if n > min(size - 8, MAX_HEADER_BYTES):
            check_not_pickle(path.name, start)
            text = start.decode(errors="ignore")  # the last character may be cut off
            if len(text.encode()) >= 5 and all(char.isprintable() or char in "\t\r\n" for char in text):
                raise NotSafetensorsError(f"{path.name}: begins with the text {text!r}, not with a safetensors header")
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
    tensors: dict[str, TensorSpec] = {}
    for name, field in fields.items():
        dtype = DTYPES.get(field["dtype"])
        shape = tuple(field["shape"])
        if dtype is None:
            hint = "use a checkpoint in bfloat16 or float32"
            raise InputError(f"{path.name}: {name} has type {field['dtype']}, which laconic does not read; {hint}")
        if len(shape) > 64:
            raise InputError(f"{path.name}: {name} has {len(shape)} dimensions; torch supports 64")
        tensors[name] = TensorSpec(dtype, shape, *field["data_offsets"])
    return SafetensorsHeader(tensors, metadata)


def check_not_pickle(name: str, start: bytes) -> None:
    """Raise `UnsafeFileError` if these are the first bytes of a pickle or zip file."""
    if start.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise UnsafeFileError(
            f"{name} is a pickle or zip file, which can run code; not opened. "
            "Convert it with transformers' save_pretrained in an environment you trust"
        )
