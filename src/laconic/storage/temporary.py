"""Resolve the path of a file to write, and create temporary folders beside it.

A temporary folder is locked while its writer lives; after a kill, the next writer deletes it.
"""

import glob
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from laconic.errors import BusyError

try:
    import fcntl
except ImportError:  # Windows: what killed writers leave stays
    fcntl = None

MAX_NAME_BYTES = 150  # of a target's name at the start of its temporary name, since file systems allow 255 in all


def is_device_or_pipe(path: Path) -> bool:
    """Return whether a path, or the target of a link, exists and is neither a regular file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def follow_link(path: Path) -> Path:
    """Return the target of a symbolic link; any other path, and a link to a device or pipe, is returned as it is."""
    return path.resolve() if path.is_symlink() and not is_device_or_pipe(path) else path


def check_new_or_empty(target: Path) -> None:
    """Raise `BusyError` (73) for what exists, other than an empty folder."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise BusyError(f"{target} exists and is not empty; choose another folder, or empty it")


@contextmanager
def create_temporary_folder(target: Path) -> Generator[Path]:
    """Create a locked folder beside a target; at the end it must be empty or renamed, after an error it is deleted."""
    remove_abandoned(target)
    folder, handle = _create_locked_folder(target)
    try:
        yield folder
        with suppress(OSError):
            folder.rmdir()  # empty, or renamed
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _create_locked_folder(target: Path) -> tuple[Path, int | None]:
    """Create a temporary folder and return it with the open file that holds its lock."""
    if fcntl is None:
        folder = make_temporary_path(target)
        folder.mkdir()
        return folder, None
    while True:
        folder = make_temporary_path(target)
        folder.mkdir()
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another writer took it for abandoned before it was locked
            continue
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_removed = not folder.exists()
        except OSError as error:  # the file system has no locks, or another writer removes the folder already
            is_removed = isinstance(error, BlockingIOError)
        if not is_removed:
            return folder, handle
        os.close(handle)


def remove_abandoned(target: Path) -> None:
    """Delete the temporary folders that killed writers of a target left beside it, that is, those without a lock.

    Where the system or the file system has no such locks, they stay.
    """
    if fcntl is None:
        return
    for folder in target.parent.glob(f"{glob.escape(_temporary_prefix(target))}*"):
        with suppress(OSError):  # its writer holds the lock, or another writer deletes it now
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def make_temporary_path(path: Path) -> Path:
    """Return a free name beside a path that contains its name, so that users can tell what a killed process left."""
    return path.with_name(_temporary_prefix(path) + uuid.uuid4().hex)


def _temporary_prefix(path: Path) -> str:
    name = path.name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    return f".tmp-{name}-"
