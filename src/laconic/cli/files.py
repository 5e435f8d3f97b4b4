"""Write the text files that commands produce."""

from pathlib import Path

from laconic.console import log_message
from laconic.errors import UsageError


def check_parent(flag: str, path: Path) -> None:
    """Raise `UsageError` (2) if the folder of a file that a flag names does not exist, before the work for it."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: folder {path.parent} does not exist; create it first")


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically and log its path."""
    from laconic.storage.atomic import write_file_atomically  # imports torch

    write_file_atomically(path, lambda new: new.write_text(text, encoding="utf-8"))
    log_message(f"wrote {path}")
