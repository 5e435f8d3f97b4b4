"""Check and write the files that commands are given, and print tables and JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from laconic.console import log_message, print_rich
from laconic.errors import BusyError, DiskError, InputError, LaconicError, UsageError, translate_os_errors
from laconic.storage.file_names import check_hub_name
from laconic.storage.temporary import follow_link, is_device_or_pipe

STANDARD_INPUT = "-"  # as the path of an input


def name_source(path: Path) -> str:
    return "standard input" if str(path) == STANDARD_INPUT else path.name


def check_file(path: Path, expected: str) -> None:
    """Raise `InputError` (66) if a path is neither a file nor a pipe; `expected` says in the message what to give."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give {expected}")
    if not (path.is_file() or path.is_fifo()):
        raise InputError(f"no file {path}; give {expected}")


def check_model(name: str) -> None:
    """Raise `InputError` (66), before torch is imported, for the path of a model that does not exist."""
    path = Path(name).expanduser()
    if path.suffix.lower() in (".gguf", ".safetensors") and not path.is_dir():
        check_file(path, "an existing file, or the folder or name of a model")
    elif not path.exists() and path.parent.name != "steps":  # the steps of a run are named in an error of their own
        check_hub_name(name)


def check_memories(paths: Iterable[Path], system: str | None = None) -> None:
    """Raise `InputError` (66) for a missing memory, `UsageError` (2) for a system message before one with `--chat`."""
    for path in paths:
        if not path.exists():
            raise InputError(f"no file {path}; give one that laconic compress wrote")
    if system is None:
        return
    from laconic.compression.kv.memory_file import FILE_KIND  # imports torch
    from laconic.storage.atomic import read_artifact_header

    for path in paths:
        metadata = read_artifact_header(path)[1] if path.is_file() else {}
        if metadata.get("kind") == FILE_KIND and metadata.get("chat"):
            raise UsageError(
                f"--system: the text of {path} begins the conversation, before any system message; remove --system, "
                "or compress the text without --chat"
            )


def check_output_path(flag: str, path: Path) -> None:
    """Raise `UsageError` (2) or `DiskError` (74) if the file of a flag cannot be written, before the work for it."""
    if str(path) == "-":
        raise UsageError(f"{flag} -: give a file; /dev/stdout is standard output")
    if is_device_or_pipe(path):
        return
    path = follow_link(path)
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: folder {path.parent} does not exist; create it first")
    try:
        with TemporaryFile(dir=path.absolute().parent):  # os.access does not know of file systems such as /proc
            pass
    except OSError as error:
        raise DiskError(f"{path.parent}: not writable ({error.strerror}); choose another folder") from None


def check_new_file(flag: str, path: Path) -> None:
    """Raise `BusyError` (73) if a flag names an existing file, and as `check_output_path`; devices are written into."""
    check_output_path(flag, path)
    if path.exists() and not is_device_or_pipe(path):
        raise BusyError(f"{flag} {path} exists; delete it or choose another file")


def check_text_format(path: Path) -> None:
    """Raise `InputError` (66) for a PDF, which is no text; note that JSON and the tags of HTML are text too."""
    if not path.is_file():  # a pipe is read once
        return
    with translate_os_errors(path), path.open("rb") as file:
        start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"%pdf-"):
        raise InputError(f"{path} is a PDF; convert it to text first, for example with pdftotext")
    if start.startswith((b"<!doctype html", b"<html")) or (start.startswith(b"<?xml") and b"<html" in start):
        log_message(f"{path} looks like HTML: its tags are compressed too; convert it to text")
    if path.suffix.lower() in (".json", ".ndjson") and start.startswith((b"[", b"{")):
        log_message(
            f'{path} is compressed as it is, brackets and all; for its texts give a .jsonl of {{"text": "…"}} rows'
        )


def check_replaceable(flag: str, path: Path) -> None:
    """Raise `BusyError` (73) if a flag names an existing file that is no memory, and as `check_output_path`."""
    if path.exists() and (path.is_dir() or path.stat().st_size) and not holds_memory(path):
        raise BusyError(f"{flag} {path} exists and is not a memory; delete it or choose another file")
    check_output_path(flag, path)


def holds_memory(path: Path) -> bool:
    """Return whether a file is a memory or state, by its header."""
    if not path.is_file():
        return False
    with translate_os_errors(path), path.open("rb") as file:
        if file.read(9)[8:] != b"{":  # where a safetensors header begins
            return False
    from laconic.storage.atomic import KIND_LABELS, read_artifact_kind  # imports torch

    with suppress(LaconicError):
        kind = read_artifact_kind(path)
        return kind in KIND_LABELS and not kind.endswith("-job")
    return False


def check_page_path(flag: str, path: Path) -> None:
    """Raise `BusyError` (73) if a flag names an existing file that is no HTML, and as `check_output_path`."""
    check_output_path(flag, path)
    if path.is_file():
        with translate_os_errors(path), path.open("rb") as file:
            start = file.read(64).lstrip().lower()
        if start and not start.startswith(b"<!doctype html"):
            raise BusyError(f"{flag} {path} exists and is not an HTML page; delete it or choose another file")


def print_json(data: Mapping[str, Any]) -> None:
    print(json.dumps(data, ensure_ascii=False, allow_nan=False), flush=True)


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*header, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    print_rich(table)


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically and log its path."""
    from laconic.storage.atomic import write_named_file  # imports torch

    write_named_file(path, lambda new: new.write_text(text, encoding="utf-8"))
    log_message(f"wrote {path}")
