"""Arguments that several verbs take: text in UTF-8, numbers between commas, types and runs by name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from laconic.errors import UsageError

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]


def parse_dtype(name: DtypeName | None) -> Any:
    """The torch type of a name."""
    import torch

    return None if name is None else getattr(torch, name)


def to_utf8(text: str) -> str:
    """An argument as UTF-8, whatever the locale took it for."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{text!r} is not UTF-8") from None


def split_commas(text: str) -> tuple[str, ...]:
    """What stands between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_ints(flag: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers between commas, each once."""
    found = () if text is None else split_commas(text)
    if text is not None and not (found and all(word.isdecimal() for word in found)):
        raise UsageError(f"{flag} {text}: write whole numbers with commas between them, 1,2 say")
    return tuple(dict.fromkeys(map(int, found)))


def short_run_names(paths: Sequence[str | Path]) -> list[str]:
    """Short names of runs that differ: the last parts of their paths; seed-0 alone names none."""
    for n in (1, 2, 3):
        short = ["/".join(Path(path).resolve().parts[-n:]) for path in paths]
        if len(set(short)) == len(short) and not any(name.startswith("seed-") for name in short):
            return short
    return list(map(str, paths))


def seed_run_name(name: str, path: str | Path, folder: Path) -> str:
    """The name of a run in the folder of several seeds that is called `name`."""
    return name if folder == Path(path) else f"{name}/{folder.name}"
