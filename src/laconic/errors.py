"""Errors that a user sees as one line, each with an exit code. This module does not import torch."""

import errno
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

# What a RuntimeError of torch says if memory runs out: on a CPU, on a GPU, in oneDNN, and for a thread.
ALLOCATION_ERRORS = ("allocate memory", "Tried to allocate", "could not create a primitive", "can't start new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or on the CPU."""
    is_torch_error = isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATION_ERRORS)
    return is_torch_error or isinstance(error, MemoryError)


class LaconicError(Exception):
    """Base class of the errors in `laconic.errors`: one line with what was given, what is expected, and what to do.

    Examples:
        >>> import laconic
        >>> try:
        ...     laconic.DecoderConfig.tiny("bert")
        ... except laconic.LaconicError as error:
        ...     print(type(error).__name__, error.exit_code)
        InputError 66
    """

    exit_code: int = 70


class UsageError(LaconicError):
    """Invalid option, argument or configuration."""

    exit_code = 2


def check_known(name: str, value: object, known: Iterable[object]) -> None:
    """Raise `UsageError` with the names that an argument may have, unless its value is one of them."""
    names = list(known)
    if value not in names:
        raise UsageError(f"{name} {value!r} is unknown; use one of {', '.join(map(repr, names))}")


class NonFiniteError(LaconicError):
    """NaN or infinity in weights, logits, a loss or a state."""

    exit_code = 65


class InputError(LaconicError):
    """Missing or invalid input: data, model, tokenizer."""

    exit_code = 66


MEMORY_ADVICE = (
    'set activation_checkpointing = 1, precision = "bfloat16", trainable = "lora", a smaller micro_batch_size '
    "or shorter rows"
)


class OutOfMemoryError(LaconicError):
    """Not enough memory; the message suggests settings that may fit."""

    exit_code = 71


class BusyError(LaconicError):
    """Another process holds the directory, or the target exists."""

    exit_code = 73


class DiskError(LaconicError):
    """The file system is full, failing, or refuses permission."""

    exit_code = 74


class PreemptedError(LaconicError):
    """Stopped by a signal; everything up to here is saved and the same command resumes."""

    exit_code = 75


class CorruptArtifactError(LaconicError):
    """A file written by laconic that fails its check, belongs to another model, or has a newer format."""

    exit_code = 76


class UnsafeFileError(LaconicError):
    """Refused for safety: a pickle, or a path that leaves its folder."""

    exit_code = 77


@contextmanager
def translate_os_errors(path: Path, required_bytes: int = 0) -> Generator[None]:
    """Turn an OSError on reading or writing `path` into DiskError or BusyError; a full disk is reported with sizes."""
    try:
        yield
    except OSError as error:
        is_blocked = error.errno in (errno.EEXIST, errno.ENOTDIR)
        file = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None) if is_blocked else None
        if file:
            place = "" if file == path else f"{path}: "
            raise DiskError(f"{place}{file} is a file, not a directory; choose another path") from error
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise BusyError(f"{path} exists and is not empty; choose another folder, or empty it") from error
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        sizes = f"; {required_bytes:,} bytes to write, {free_bytes(path):,} free" if is_full else ""
        raise DiskError(f"{path}: {error.strerror or error}{sizes}") from error


@contextmanager
def name_folder_in_errors(folder: Path) -> Generator[None]:
    """Put the folder before errors about one of its files, which name the file alone."""
    try:
        yield
    except (InputError, UnsafeFileError) as error:
        names = (f" {folder}{end}" for end in ":/; ")  # not as a part of a word, such as a folder "b" in "vocab"
        if not any(name in f" {error} " for name in names):
            error.args = (f"{folder}: {error}",)
        raise


def free_bytes(path: Path) -> int:
    """Return the free space of the file system of `path`, which need not exist."""
    directory = next(p for p in (path, *path.parents) if p.is_dir())
    return shutil.disk_usage(directory).free
