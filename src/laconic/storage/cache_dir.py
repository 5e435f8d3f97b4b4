"""The folder for files that can be computed again: imported models, tokenized texts."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return `$LACONIC_CACHE`, by default `laconic` in `$XDG_CACHE_HOME` or `~/.cache`. It may not exist."""
    if named := os.environ.get("LACONIC_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"
