"""Exclusive folder lock; the operating system releases it if the process dies."""

import os
import platform
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from laconic.errors import BusyError, DiskError, LaconicError, translate_os_errors
from laconic.storage.atomic import write_text_atomically
from laconic.storage.strict_json import read_json, to_canonical_json

LOCK_TIMEOUT = 0.5  # seconds


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold the lock of a folder, and name this process in `lock.json`.

    With LACONIC_SOFT_LOCK=1 a marker file replaces the kernel's lock, for file systems that have none.

    Raises:
        BusyError: If another process holds the lock; the message names its pid, host and start time.
        DiskError: If the file system has no locks.
    """
    path, holder_path = folder / "lock", folder / "lock.json"
    if os.environ.get("LACONIC_SOFT_LOCK") == "1":
        lock = SoftFileLock(path, LOCK_TIMEOUT)
    else:
        lock = FileLock(path, LOCK_TIMEOUT, mode=0o666 & ~_get_umask())
    try:
        with translate_os_errors(path):
            try:
                lock.acquire()
            except Timeout:  # a subclass of OSError
                holder = _describe_holder(holder_path)
                raise BusyError(f"{folder} is locked by {holder}; wait for it or choose another folder") from None
    except NotImplementedError:
        raise DiskError(f"{folder}: this file system has no locks; move it or set LACONIC_SOFT_LOCK=1") from None
    try:
        start = datetime.now(UTC).isoformat(timespec="seconds")
        process = {"pid": os.getpid(), "host": platform.node(), "start": start, "command": shlex.join(sys.argv)}
        write_text_atomically(holder_path, to_canonical_json(process))
        yield
    finally:
        holder_path.unlink(missing_ok=True)
        lock.release()


def _get_umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _describe_holder(path: Path) -> str:
    """Return pid, host and start time of the process that holds the lock, as far as they are known."""
    try:
        holder = read_json(path)
    except (LaconicError, OSError):  # not written yet, or just deleted
        holder = {}
    return (
        f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')} since {holder.get('start', '?')}"
    )
