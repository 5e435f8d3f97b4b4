"""Every artifact on disk: written beside its name, synced, renamed; single files carry their own digest."""

import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from laconic.errors import (
    BusyError,
    CorruptArtifactError,
    DiskError,
    InputError,
    LaconicError,
    NonFiniteError,
    UnsafeFileError,
    UsageError,
    free_bytes,
    translate_os_errors,
)
from laconic.storage.strict_json import (
    SafetensorsHeader,
    TensorSpec,
    parse_json,
    read_json,
    read_safetensors_header,
    resolve_inside,
    to_canonical_json,
)

FREE_SPACE_FACTOR = 2.2  # free space asked for, in expected bytes
FORMAT_VERSION = 1  # of single-file artifacts; newer ones are refused
KIND_LABELS = {"memory": "memory (summary vectors)", "laconic.state": "state (fast weights)"}  # kinds a person gives

__all__ = [
    "LaconicError", "UsageError", "NonFiniteError", "InputError", "BusyError", "DiskError", "CorruptArtifactError", "UnsafeFileError",
    "TensorSpec", "SafetensorsHeader", "to_canonical_json", "read_safetensors_header", "resolve_inside", "parse_json", "read_json",
    "check_finite", "open_tensors", "save_tensors", "unshare_tensors", "check_free_space", "fsync_path",
    "write_folder_atomically", "write_file_atomically", "save_artifact", "load_artifact", "read_artifact_kind", "load_into_module",
]  # fmt: skip


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises `NonFinite` with the count and the first index if a floating tensor holds NaN or infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    values = tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()
    low, high = values.aminmax()  # NaN wins; allocates nothing
    if bool(low.isfinite() & high.isfinite()):
        return
    bad = (~values.isfinite()).nonzero()
    values_are = "value" if len(bad) == 1 else "values"
    raise NonFiniteError(f"{name}: {len(bad):,} {values_are} not finite, first at {list(map(int, bad[0]))}")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of finite tensors with the mode that any new file gets; call it inside a commit."""
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(unshare_tensors(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        n = int(number[1])
        raise OSError(n, f"{os.strerror(n)} while a tensor was written") from error
    path.chmod(mode)  # safetensors makes its files 0600


def open_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors named, mapped from a file whose header was checked; all of them hold one mapping of the file."""
    with cast(Any, safe_open)(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def unshare_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, contiguous, no two on the same bytes, which safetensors would refuse."""
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            found[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return found


def write_folder_atomically(target: Path, write: Callable[[Path], None], expected_bytes: int = 0) -> None:
    """A whole folder or none: `write` fills a hidden sibling, which is synced and then renamed to `target`.

    `target` may be an empty folder; anything else there is `Busy`. `expected` is the number of bytes to come.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise BusyError(f"{target} exists and is not empty")
    final = target.resolve()
    temporary = final.with_name(f".tmp-{uuid.uuid4().hex}")
    with translate_os_errors(target, expected_bytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(final.parent, expected_bytes)
        try:
            temporary.mkdir()
            write(temporary)
            for folder, _, files in os.walk(temporary, topdown=False):
                for path in (*(Path(folder, name) for name in files), Path(folder)):
                    fsync_path(path)
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_path(final.parent)


def write_file_atomically(path: Path, write: Callable[[Path], object], expected_bytes: int = 0) -> None:
    """The new file or the old one, nothing between: `write` fills a hidden sibling, which then takes the name."""
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    with translate_os_errors(path, expected_bytes):
        check_free_space(path.parent, expected_bytes)
        try:
            write(temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


def check_free_space(folder: Path, expected_bytes: int) -> None:
    """Raises `NoSpace` where `expected` bytes and their reserve do not fit."""
    if FREE_SPACE_FACTOR * expected_bytes > free_bytes(folder):
        asked = int(FREE_SPACE_FACTOR * expected_bytes)
        raise DiskError(
            f"{folder}: {asked:,} bytes are asked for to write {expected_bytes:,}, {free_bytes(folder):,} are free"
        )


def fsync_path(path: Path) -> None:
    """What was written to a file, or the names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_artifact(path: Path, tensors: Mapping[str, Tensor], kind: str, about: Mapping[str, object]) -> None:
    """One safetensors file that knows what it is: canonical JSON `laconic`, and a `digest` of JSON, names and bytes."""
    held = unshare_tensors(tensors)
    text = to_canonical_json({**about, "format": FORMAT_VERSION, "kind": kind})
    metadata = {"laconic": text, "digest": _hash_artifact(text, held)}
    write_file_atomically(path, lambda new: save_tensors(new, held, metadata), sum(t.nbytes for t in held.values()))


def load_artifact(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, mapped, and what `save_artifact` was told about them; `Damaged` before any tensor is handed out."""
    header, about = read_artifact_header(path)
    metadata = header.metadata
    if about.get("format") != FORMAT_VERSION or about.get("kind") != kind:
        there = f"{KIND_LABELS.get(str(about.get('kind')), about.get('kind'))} of format {about.get('format')}"
        asked = KIND_LABELS.get(kind, kind)
        raise CorruptArtifactError(
            f"{path} is a {there}, asked was a {asked} of format {FORMAT_VERSION}; open it with what made it"
        )
    with translate_os_errors(path):
        tensors = open_tensors(path, header.tensors)
    found = _hash_artifact(metadata["laconic"], tensors)
    if metadata != {"laconic": metadata["laconic"], "digest": found}:
        raise CorruptArtifactError(
            f"{path}: digest {metadata.get('digest')} promised, {found} found; take another copy"
        )
    return tensors, about


def read_artifact_kind(path: Path) -> str:
    """What a file of ours says it is; nothing else of it is looked at. Raises as `open_artifact` does."""
    return str(read_artifact_header(path)[1].get("kind"))


def read_artifact_header(path: Path) -> tuple[SafetensorsHeader, dict[str, Any]]:
    """The header of a file, and what it says of itself. Raises `BadInput` (66) for no file, `Damaged` (76)."""
    if not path.is_file():
        raise InputError(f"no {path.name} in {path.parent}")
    try:
        header = read_safetensors_header(path)
        return header, parse_json(header.metadata.get("laconic", "").encode(), f"{path.name}: metadata")
    except InputError as error:
        raise CorruptArtifactError(f"no artifact of laconic: {error}") from None


def load_into_module(module: nn.Module, path: Path, kind: str, about: Mapping[str, object]) -> None:
    """A saved artifact into a module. Raises `Damaged` (76) where a setting of `about` or a tensor does not fit."""
    tensors, found = load_artifact(path, kind)
    other = "; ".join(diff_settings({name: found.get(name) for name in about}, about))
    if other:
        raise CorruptArtifactError(f"{path} has {other}; take what it was made with")
    own = module.state_dict()
    for name in own.keys() & tensors.keys():
        if own[name].numel() == 1 == tensors[name].numel():  # what is one number now was a scalar once
            tensors[name] = tensors[name].reshape(own[name].shape)
    odd = min(own.keys() ^ tensors.keys(), default=None) or next(
        (name for name, t in own.items() if t.shape != tensors[name].shape), None
    )
    if odd:
        raise CorruptArtifactError(f"{path}: {odd} is missing, unexpected or of another shape; take another copy")
    module.load_state_dict(tensors)


def diff_settings(actual: object, expected: object, name: str = "") -> list[str]:
    """Each dotted name under which two values of JSON differ, with both; a table beside none is not opened."""
    leaf = f"{name} {_format_value(actual)}, asked was {_format_value(expected)}"
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        one, other = cast(Mapping[str, object], actual), cast(Mapping[str, object], expected)
        keys = [(key, f"{name}.{key}".lstrip(".")) for key in dict.fromkeys([*other, *one])]
        return [each for key, inner in keys for each in diff_settings(one.get(key), other.get(key), inner)]
    return [] if actual == expected else [leaf]


def _format_value(value: object) -> str:
    return "a table" if isinstance(value, Mapping) else value if isinstance(value, str) else to_canonical_json(value)


def _hash_artifact(metadata_json: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the text and, in the order of names, each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(metadata_json.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{to_canonical_json([name, str(tensor.dtype), list(tensor.shape)])}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
