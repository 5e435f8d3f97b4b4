"""One writer a folder: the kernel's lock, freed by any death of its holder, and who that is for the others."""

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
from laconic.storage.atomic import write_file_atomically
from laconic.storage.strict_json import read_json, to_canonical_json

LOCK_TIMEOUT = 0.5  # seconds until a lock that is held is refused


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Holds `folder`/lock; raises `Busy` (73) naming pid, host and start where somebody else does.

    On a file system without locks `NoSpace` (74), unless LACONIC_SOFT_LOCK=1 asks for a file in their place: it is
    stale only if its host is ours and its process is gone.
    """
    path, about = folder / "lock", folder / "lock.json"
    soft = os.environ.get("LACONIC_SOFT_LOCK") == "1"
    lock = SoftFileLock(path, LOCK_TIMEOUT) if soft else FileLock(path, LOCK_TIMEOUT, mode=0o666 & ~_umask())
    try:
        with translate_os_errors(path):
            if soft and _is_holder_dead(about):
                path.unlink(missing_ok=True)
            try:
                lock.acquire()
            except Timeout:  # which is an OSError
                raise BusyError(
                    f"{folder} is held by {_format_holder(about)}; wait for it, or choose another folder"
                ) from None
    except NotImplementedError:
        raise DiskError(f"{folder}: no locks on this file system; move it, or set LACONIC_SOFT_LOCK=1") from None
    try:
        write_file_atomically(
            about, lambda new: new.write_text(to_canonical_json(_describe_this_process()), encoding="utf-8")
        )
        yield
    finally:
        about.unlink(missing_ok=True)
        lock.release()


def _umask() -> int:
    before = os.umask(0o077)
    os.umask(before)
    return before


def _describe_this_process() -> dict[str, object]:
    start = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": platform.node(), "start": start, "command": shlex.join(sys.argv)}


def _read_holder(holder_path: Path) -> dict[str, object]:
    try:
        return read_json(holder_path)
    except (LaconicError, OSError):
        return {}


def _format_holder(holder_path: Path) -> str:
    """Who `about` says the holder is; its first moments have no name."""
    there = _read_holder(holder_path)
    return f"process {there.get('pid', '?')} on {there.get('host', 'an unknown host')} since {there.get('start', '?')}"


def _is_holder_dead(holder_path: Path) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    there = _read_holder(holder_path)
    pid = there.get("pid")
    if there.get("host") != platform.node() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
