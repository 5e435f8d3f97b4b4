"""The errors that a user sees as one line, each with the exit code of the command line; nothing here imports torch."""

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class LaconicError(Exception):
    """One line that says what was asked, what there was, what to do; `code` is the exit code of the command line."""

    exit_code: int = 70


class UsageError(LaconicError):
    """A setting, a flag or a recipe that cannot be meant."""

    exit_code = 2


class NonFiniteError(LaconicError):
    """NaN or infinity where numbers are asked."""

    exit_code = 65


class InputError(LaconicError):
    """An input that is missing or bad: data, model, tokenizer."""

    exit_code = 66


class OutOfMemoryError(LaconicError):
    """Memory does not suffice; the message has a plan that may fit."""

    exit_code = 71


class BusyError(LaconicError):
    """The directory is held by somebody else, or the target exists."""

    exit_code = 73


class DiskError(LaconicError):
    """The file system refused: full, failing, or not permitted."""

    exit_code = 74


class PreemptedError(LaconicError):
    """A signal asked for the end: what was under way is committed, the same command goes on."""

    exit_code = 75


class CorruptArtifactError(LaconicError):
    """An artifact of ours that fails its check, belongs to another model, or is too new."""

    exit_code = 76


class UnsafeFileError(LaconicError):
    """Refused for safety: a pickle, a path that leaves its folder."""

    exit_code = 77


@contextmanager
def translate_os_errors(path: Path, required_bytes: int = 0) -> Generator[None]:
    """Turns an error of the file system into `NoSpace` (74), with the bytes where it is full."""
    try:
        yield
    except OSError as error:
        blocked = error.errno in (errno.EEXIST, errno.ENOTDIR)
        file = next((p for p in path.parents if p.exists() and not p.is_dir()), None) if blocked else None
        if file:
            raise DiskError(f"{path}: {file} is a file, not a folder; choose another place") from error
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise BusyError(f"{path} exists and is not empty") from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        bytes_ = f"; {required_bytes:,} bytes to write, {free_bytes(path):,} free" if full else ""
        raise DiskError(f"{path}: {error.strerror or error}{bytes_}") from error


def free_bytes(path: Path) -> int:
    there = next(p for p in (path, *path.parents) if p.is_dir())
    return shutil.disk_usage(there).free
