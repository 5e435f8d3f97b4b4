"""A file system that refuses: the call of a commit that is numbered so raises, all others pass."""

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
    "artifact.save_file",
    "Path.open",
    "Path.mkdir",
    "Path.touch",
    "Path.chmod",
)
FAULTS = (errno.ENOSPC, errno.EIO, errno.EACCES)


class Shim:
    """Counts the calls of a commit that reach the file system; the one numbered `fails` raises `fault`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fails, self.fault = -1, 0
        for name in CALLS:
            where, _, what = name.rpartition(".")
            owner: Any = {"os": os, "artifact": atomic, "Path": Path}[where]
            monkeypatch.setattr(owner, what, self.around(name, getattr(owner, what)))

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **named: Any) -> Any:
            if not self.may(name):
                return self.writing(call(*args, **named)) if name == "Path.open" else call(*args, **named)
            text = f"{os.strerror(self.fault)} (os error {self.fault})"
            if name == "artifact.save_file":
                raise safetensors.SafetensorError(f"Error while serializing: I/O error: {text}")
            raise OSError(self.fault, os.strerror(self.fault))

        return guarded

    def may(self, name: str) -> bool:
        """Counts a call; whether it is the one to fail."""
        self.calls.append(name)
        return len(self.calls) - 1 == self.fails

    def writing(self, file: Any) -> Any:
        """The file, whose writes are calls too."""
        return Writing(file, self) if file.writable() else file


class Writing:
    """An open file that asks the shim before each write."""

    def __init__(self, file: Any, shim: Shim) -> None:
        self.file, self.shim = file, shim

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, *how: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        if self.shim.may("file.write"):
            raise OSError(self.shim.fault, os.strerror(self.shim.fault))
        return self.file.write(data)
