"""The errors that a user sees as one line, each with the exit code of the command line; nothing here imports torch."""

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class LaconicError(Exception):
    """One line that says what was asked, what there was, what to do; `code` is the exit code of the command line."""

    code: int = 70


class Usage(LaconicError):
    """A setting, a flag or a recipe that cannot be meant."""

    code = 2


class NonFinite(LaconicError):
    """NaN or infinity where numbers are asked."""

    code = 65


class BadInput(LaconicError):
    """An input that is missing or bad: data, model, tokenizer."""

    code = 66


class OutOfMemory(LaconicError):
    """Memory does not suffice; the message has a plan that may fit."""

    code = 71


class Busy(LaconicError):
    """The directory is held by somebody else, or the target exists."""

    code = 73


class NoSpace(LaconicError):
    """The file system refused: full, failing, or not permitted."""

    code = 74


class Preempted(LaconicError):
    """A signal asked for the end: what was under way is committed, the same command goes on."""

    code = 75


class Damaged(LaconicError):
    """An artifact of ours that fails its check, belongs to another model, or is too new."""

    code = 76


class Unsafe(LaconicError):
    """Refused for safety: a pickle, a path that leaves its folder."""

    code = 77


@contextmanager
def on_disk(target: Path, expected: int = 0) -> Generator[None]:
    """Turns an error of the file system into `NoSpace` (74), with the bytes where it is full."""
    try:
        yield
    except OSError as error:
        blocked = error.errno in (errno.EEXIST, errno.ENOTDIR)
        file = next((p for p in target.parents if p.exists() and not p.is_dir()), None) if blocked else None
        if file:
            raise NoSpace(f"{target}: {file} is a file, not a folder; choose another place") from error
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise Busy(f"{target} exists and is not empty") from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        bytes_ = f"; {expected:,} bytes to write, {free(target):,} free" if full else ""
        raise NoSpace(f"{target}: {error.strerror or error}{bytes_}") from error


def free(path: Path) -> int:
    there = next(p for p in (path, *path.parents) if p.is_dir())
    return shutil.disk_usage(there).free
