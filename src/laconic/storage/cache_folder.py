"""The folder for what laconic can compute or download again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/laconic`, by default `~/.cache/laconic`; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"
