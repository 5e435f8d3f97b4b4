"""Arguments that several commands share, and checks of their values."""

import shlex
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from laconic.errors import UsageError
from laconic.training.trackers import TrackerName

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
OutputFormat = Annotated[Literal["human", "json"], arg(help="json: print one JSON object to standard output")]
Device = Annotated[str, arg(help="auto (the first GPU, else the CPU), cpu, cuda, cuda:1, …")]
# Options that default to None: the help shows neither None nor a second default after the one in the text.
OptionalInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
OptionalFloat = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
OptionalStr = Annotated[str | None, arg(metavar="STR", help_behavior_hint="")]
OptionalTracker = Annotated[TrackerName | None, arg(metavar="{trackio,wandb,tensorboard}", help_behavior_hint="")]
OptionalPath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
OptionalDtype = Annotated[DtypeName | None, arg(metavar="{float32,float64,bfloat16,float16}", help_behavior_hint="")]
OptionalProtocol = Annotated[
    Literal["codi", "pccot", "coconut", "icot", "decimal", "text"] | None,
    arg(metavar="{codi,pccot,coconut,icot,decimal,text}", help_behavior_hint=""),
]
OptionalQuantization = Annotated[Literal["int8"] | None, arg(metavar="{int8}", help_behavior_hint="")]


def parse_dtype(name: DtypeName | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def command_line() -> str:
    return shlex.join(["laconic", *sys.argv[1:]])


def check_utf8(text: str) -> str:
    """Return an argument or a line of input; raise `UsageError` (2) if it has bytes that are not UTF-8."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{text!r} is not UTF-8")
    return text


def split_commas(text: str) -> tuple[str, ...]:
    """Split a comma-separated list, dropping duplicates and empty items."""
    return tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))


def parse_ints(flag: str, text: str | None) -> tuple[int, ...]:
    """Parse comma-separated non-negative integers; none for no text. Raises `UsageError` (2) for anything else."""
    items = split_commas(text or "")
    if text is not None and not (items and all(item.isdecimal() for item in items)):
        raise UsageError(f"{flag} {text}: expected comma-separated integers, for example 1,2")
    return tuple(dict.fromkeys(map(int, items)))


def check_minimum(minimum: int, **flags: int | None) -> None:
    """Raise `UsageError` (2) if one of `flags` (field name to value) is below a minimum."""
    for name, value in flags.items():
        if value is not None and value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least {minimum}")


NEEDED_FLAG = ("needs --", "requires --", "only with --")  # beginnings of reasons that name a flag to add


def refuse_flags(command: Any, names: Iterable[str], reason: str) -> None:
    """Raise `UsageError` (2) with `reason` if a flag of a command is set; `names` are those of its fields."""
    defaults = {field.name: field.default for field in fields(command)}
    for name in names:
        if getattr(command, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            remedy = "add it, or remove" if reason.startswith(NEEDED_FLAG) else "remove"
            raise UsageError(f"{flag}: {reason}; {remedy} {flag}")
