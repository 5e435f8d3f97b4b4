"""Write files and folders atomically, and save tensors with a digest.

Everything is first written under a temporary name in the same folder, synced to disk and then renamed, so that a
reader sees either the old version or the complete new one.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from laconic.config.config_model import drop_former_options
from laconic.errors import (
    CorruptArtifactError,
    DiskError,
    InputError,
    NonFiniteError,
    UnsafeFileError,
    free_bytes,
    translate_os_errors,
)
from laconic.storage.file_names import check_is_file
from laconic.storage.safetensors_header import NotSafetensorsError, SafetensorsHeader, read_safetensors_header
from laconic.storage.strict_json import parse_json, to_canonical_json
from laconic.storage.temporary import check_new_or_empty, create_temporary_folder, follow_link, is_device_or_pipe

FREE_SPACE_FACTOR = 2.2  # free space required before a write, as a multiple of the expected bytes
FORMAT_VERSION = 1  # format of single-file artifacts
KIND_LABELS = {
    "memory": "memory (summary vectors)",
    "kv-memory": "memory (keys and values)",
    "laconic.state": "state (fast weights)",
    "compression-job": "memory in progress",
    "state-reading-job": "state in progress",
}


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `NonFiniteError` with the count and the first index if a floating-point tensor holds NaN or infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    values = tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()
    low, high = values.aminmax()  # propagates NaN and allocates no mask
    if bool(low.isfinite() & high.isfinite()):
        return
    bad = (~values.isfinite()).nonzero()
    noun = "value" if len(bad) == 1 else "values"
    raise NonFiniteError(f"{name}: {len(bad):,} {noun} not finite, first at {list(map(int, bad[0]))}")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; call it inside an atomic write. Shared and non-contiguous tensors are copied.

    Raises NonFiniteError, before anything is written, if a tensor holds NaN or infinity.
    """
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(unshare_tensors(tensors), path, metadata=dict(metadata))
        if len(metadata) > 1:
            sort_metadata(path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        n = int(number[1])
        raise OSError(n, f"{os.strerror(n)} while writing a tensor") from error
    path.chmod(mode)  # safetensors creates its files with mode 0600


def sort_metadata(path: Path) -> None:
    """Sort the metadata in the header of a safetensors file, which the library writes in any order.

    Equal contents then have equal bytes.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size, "the tensors begin after the header"
        file.seek(8)
        file.write(text.ljust(size))


def open_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the named tensors, memory-mapped; check the header with `read_safetensors_header` first."""
    with cast(Any, safe_open)(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def unshare_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous and without shared memory, as safetensors requires."""
    result = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(result.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            result[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return result


def write_folder_atomically(target: Path, write: Callable[[Path], None], expected_bytes: int = 0) -> None:
    """Create a complete folder, which may exist only if it is empty, or none.

    `write` fills the temporary folder that it is given, which is then synced and renamed to `target`.
    """
    check_new_folder(target)
    final = target.resolve()
    with translate_os_errors(target, expected_bytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(final.parent, expected_bytes)
        with create_temporary_folder(final) as temporary:
            write(temporary)
            for folder, _, files in os.walk(temporary, topdown=False):
                for path in (*(Path(folder, name) for name in files), Path(folder)):
                    fsync_path(path)
            os.rename(temporary, final)
        fsync_path(final.parent)


def check_new_folder(target: Path, expected_bytes: int = 0) -> None:
    """Check a folder that is to be created, before the work that fills it: it must be new or empty, with free space."""
    check_new_or_empty(target)
    check_free_space(target, expected_bytes)


def write_file_atomically(path: Path, write: Callable[[Path], object], expected_bytes: int = 0) -> None:
    """Create or replace a file by what `write` writes to a temporary path; on any failure the old file stays."""
    with translate_os_errors(path, expected_bytes):
        check_free_space(path.parent, expected_bytes)
        with create_temporary_folder(path) as folder:
            temporary = folder / path.name
            write(temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
        fsync_path(path.parent)


def write_named_file(path: Path, write: Callable[[Path], object], expected_bytes: int = 0) -> None:
    """Write a file that a user names, as `write_file_atomically` does.

    Of a link, the file that it leads to is written. A device or a pipe, such as /dev/null, is not replaced: the
    complete file is written into it.
    """
    if not is_device_or_pipe(path):
        write_file_atomically(follow_link(path), write, expected_bytes)
        return
    with translate_os_errors(path), TemporaryDirectory() as folder:
        temporary = Path(folder, path.name)
        write(temporary)
        with temporary.open("rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


def write_text_atomically(path: Path, text: str) -> None:
    write_file_atomically(path, lambda new: new.write_text(text, encoding="utf-8"))


def check_not_link(path: Path) -> None:
    if path.is_symlink():
        raise UnsafeFileError(
            f"{path} is a link to {os.readlink(path)}; not written through. Put the target itself there, or link to "
            f"the whole of {path.parent.name}"
        )


def remove_temporary(folder: Path) -> None:
    """Delete the temporary files and folders that killed processes left in a folder; hold its lock."""
    with translate_os_errors(folder):
        for path in folder.glob(".tmp-*"):
            remove_path(path)


def remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_free_space(folder: Path, expected_bytes: int) -> None:
    """Raise `DiskError` if less than `FREE_SPACE_FACTOR` times the expected bytes are free."""
    available = free_bytes(folder)
    if FREE_SPACE_FACTOR * expected_bytes > available:
        required = int(FREE_SPACE_FACTOR * expected_bytes)
        raise DiskError(
            f"{folder}: {required:,} bytes required to write {expected_bytes:,}, {available:,} are free; "
            f"laconic asks for {FREE_SPACE_FACTOR} times what it writes; free some, or write elsewhere"
        )


def check_space_for_file(path: Path, expected_bytes: int) -> None:
    """Check, before the work, the room for a file that a user names; a device or a pipe needs none."""
    if not is_device_or_pipe(path):
        check_free_space(follow_link(path).parent, expected_bytes)


def fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_artifact(
    path: Path, tensors: Mapping[str, Tensor], kind: str, metadata: Mapping[str, object], is_named: bool = False
) -> None:
    """Write a self-describing safetensors file of finite tensors atomically.

    The metadata, any JSON values, are stored as canonical JSON under the header key `laconic`, with the `kind` that
    `load_artifact` asks for, beside a `digest` of that JSON and of all tensors. `is_named`: as in `write_named_file`.
    """
    copies = unshare_tensors(tensors)
    text = to_canonical_json({**metadata, "format": FORMAT_VERSION, "kind": kind})
    header = {"laconic": text, "digest": hash_artifact(text, copies)}
    size = sum(t.nbytes for t in copies.values())
    write = write_named_file if is_named else write_file_atomically
    write(path, lambda new: save_tensors(new, copies, header), size)


def load_artifact(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the memory-mapped tensors and the metadata of a file that `save_artifact` wrote.

    Raises CorruptArtifactError if it is of another kind or format, or was changed since it was written.
    """
    header, metadata = read_artifact_header(path)
    check_artifact_kind(path, metadata, kind)
    with translate_os_errors(path):
        tensors = open_tensors(path, header.tensors)
    digest = hash_artifact(header.metadata["laconic"], tensors)
    if header.metadata != {"laconic": header.metadata["laconic"], "digest": digest}:
        raise CorruptArtifactError(f"{path} is damaged, or was changed after it was written; use an intact copy")
    return tensors, metadata


def check_artifact_kind(path: Path, metadata: Mapping[str, object], kind: str) -> None:
    """Raise `CorruptArtifactError` if the metadata of a file is that of another kind or format."""
    actual, version = metadata.get("kind"), metadata.get("format")
    label = KIND_LABELS.get(str(actual), actual)
    expected = KIND_LABELS.get(kind, kind)
    if actual != kind:
        remedy = "continue it with --resume" if str(actual).endswith("-job") else "use it with what wrote it"
        raise CorruptArtifactError(f"{path} is a {label}, expected a {expected}; {remedy}")
    if version != FORMAT_VERSION:
        raise CorruptArtifactError(f"{path} is a {label} of format {version}, expected format {FORMAT_VERSION}")


def read_artifact_kind(path: Path) -> str:
    """Return the type of artifact that a file claims to be, without verifying it."""
    return str(read_artifact_header(path)[1].get("kind"))


def read_artifact_header(path: Path) -> tuple[SafetensorsHeader, dict[str, Any]]:
    """Return the safetensors header and the metadata of a file; CorruptArtifactError if `save_artifact` wrote none."""
    check_is_file(path)
    try:
        header = read_safetensors_header(path)
    except NotSafetensorsError as error:
        raise CorruptArtifactError(f"{error}; give a memory or state that laconic wrote") from None
    except InputError as error:
        reason = str(error).removesuffix("; download it again")
        raise CorruptArtifactError(f"{reason}; it is damaged, cut off or not safetensors; use an intact copy") from None
    if "laconic" not in header.metadata:
        raise CorruptArtifactError(f"{path.name}: has no metadata of laconic; give a memory or state that it wrote")
    try:
        return header, parse_json(header.metadata["laconic"].encode(), f"{path.name}: metadata of laconic")
    except InputError as error:
        raise CorruptArtifactError(str(error)) from None


def load_into_module(module: nn.Module, path: Path, kind: str, metadata: Mapping[str, object]) -> None:
    """Copy the tensors of an artifact into a module; raise CorruptArtifactError unless all match, and `metadata`."""
    tensors, stored = load_artifact(path, kind)
    stored = drop_former_options(stored)
    mismatch = "; ".join(diff_settings({name: stored.get(name) for name in metadata}, metadata))
    if mismatch:
        raise CorruptArtifactError(f"{path} does not match this model: {mismatch}; load it with its own settings")
    current = module.state_dict()
    for name in current.keys() & tensors.keys():
        if current[name].numel() == 1 == tensors[name].numel():  # scalars may be stored with shape [] or [1]
            tensors[name] = tensors[name].reshape(current[name].shape)
    bad = min(current.keys() ^ tensors.keys(), default=None) or next(
        (name for name, t in current.items() if t.shape != tensors[name].shape), None
    )
    if bad:
        raise CorruptArtifactError(f"{path}: {bad} is missing, unexpected or of another shape; use an intact copy")
    module.load_state_dict(tensors)


def diff_settings(actual: object, expected: object, name: str = "") -> list[str]:
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        left, right = cast(Mapping[str, object], actual), cast(Mapping[str, object], expected)
        keys = [(key, f"{name}.{key}".lstrip(".")) for key in dict.fromkeys([*right, *left])]
        return [line for key, inner in keys for line in diff_settings(left.get(key), right.get(key), inner)]
    if actual == expected:
        return []
    return [f"{name} is {str(cast(object, actual))[:80]}, expected {str(expected)[:80]}"]


def hash_artifact(metadata_json: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the metadata and, in order of names, each tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(metadata_json.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{to_canonical_json([name, str(tensor.dtype), list(tensor.shape)])}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
