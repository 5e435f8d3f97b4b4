"""Exclusive folder lock; the operating system releases it if the process dies."""

import os
import platform
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from laconic.errors import BusyError, DiskError, LaconicError, translate_os_errors
from laconic.storage.atomic import write_text_atomically
from laconic.storage.strict_json import read_json, to_canonical_json

LOCK_TIMEOUT = 0.5  # seconds


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold the lock of a folder, and name this process in `lock.json`.

    With LACONIC_SOFT_LOCK=1 a marker file replaces the kernel's lock, for file systems that have none. Raises BusyError
    with pid, host and start time if another process holds the lock.
    """
    path, holder_path = folder / "lock", folder / "lock.json"
    if os.environ.get("LACONIC_SOFT_LOCK") == "1":
        lock = SoftFileLock(path, LOCK_TIMEOUT)
    else:
        umask = os.umask(0o077)  # which can only be read by setting it
        os.umask(umask)
        lock = FileLock(path, LOCK_TIMEOUT, mode=0o666 & ~umask)
    try:
        with translate_os_errors(path):
            try:
                lock.acquire()
            except Timeout:  # a subclass of OSError
                holder: dict[str, Any] = {}
                with suppress(LaconicError, OSError):  # not written yet, or just deleted
                    holder = read_json(holder_path)
                pid, host, start = (holder.get(key, "?") for key in ("pid", "host", "start"))
                process = f"process {pid} on {host} since {start}"
                raise BusyError(f"{folder} is locked by {process}; wait for it or choose another folder") from None
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
