"""Write the text files that commands produce."""

from pathlib import Path

from laconic.console import log_message


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically and log its path."""
    from laconic.storage.atomic import write_file_atomically  # imports torch

    write_file_atomically(path, lambda new: new.write_text(text, encoding="utf-8"))
    log_message(f"wrote {path}")
