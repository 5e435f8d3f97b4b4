"""A failing file system: one numbered call of a commit raises, all others pass."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from laconic.storage import atomic

CALLS = (
    "os.open",
    "os.fsync",
    "os.rename",
    "os.replace",
    "atomic.save_file",
    "Path.open",
    "Path.mkdir",
    "Path.touch",
    "Path.chmod",
)
FAULTS = (errno.ENOSPC, errno.EIO, errno.EACCES)


class Shim:
    """Counts calls to the file system; call number `fails` raises `fault`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fails, self.fault = -1, 0
        for name in CALLS:
            module, _, attribute = name.rpartition(".")
            owner: Any = {"os": os, "atomic": atomic, "Path": Path}[module]
            monkeypatch.setattr(owner, attribute, self.wrap(name, getattr(owner, attribute)))

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **named: Any) -> Any:
            if not self.should_fail(name):
                return self.wrap_file(call(*args, **named)) if name == "Path.open" else call(*args, **named)
            text = f"{os.strerror(self.fault)} (os error {self.fault})"
            if name == "atomic.save_file":
                raise safetensors.SafetensorError(f"Error while serializing: I/O error: {text}")
            raise OSError(self.fault, os.strerror(self.fault))

        return guarded

    def should_fail(self, name: str) -> bool:
        """Count a call; return whether it must fail."""
        self.calls.append(name)
        return len(self.calls) - 1 == self.fails

    def wrap_file(self, file: Any) -> Any:
        """Return the file with counted writes."""
        return CountedFile(file, self) if file.writable() else file


class CountedFile:
    """An open file whose writes may fail."""

    def __init__(self, file: Any, shim: Shim) -> None:
        self.file, self.shim = file, shim

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "CountedFile":
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        if self.shim.should_fail("file.write"):
            raise OSError(self.shim.fault, os.strerror(self.shim.fault))
        return self.file.write(data)
