"""Levels on a plain checkpoint, whose MLPs learn without training while it reads, and the state files they write."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from laconic.config.config_model import drop_former_options
from laconic.config.nested import CMSConfig
from laconic.errors import CorruptArtifactError, UsageError
from laconic.nested import state_file
from laconic.nested.state_file import HASH_PREFIX
from laconic.storage import atomic

SOURCE_LABELS = {"checkpoint": "plain checkpoint", "weights_dtype": "weights in", "tokenizer": "tokenizer"}
UNTRAINED_INNER_LR = 0.1
UNTRAINED_CHUNK_SIZES = (64,)
UNTRAINED_UPDATE_RATIO = 1e-4  # pretrained weights tolerate no more: at 3e-4 SmolLM2 loses what it gains at 1e-4


class UntrainedLevels(NamedTuple):
    """Levels of a plain checkpoint, whose MLPs learn without training, and the checkpoint's fingerprint."""

    levels: CMSConfig
    checkpoint: str


def is_state_file(path: str | Path) -> bool:
    return Path(path).is_file() and atomic.read_artifact_kind(Path(path)) == state_file.ARTIFACT_KIND


def read_writer_metadata(path: str | Path) -> Mapping[str, Any]:
    """Return the metadata of a state file: checkpoint, tokenizer, dtype, levels, time and texts."""
    metadata = atomic.read_artifact_header(Path(path))[1]
    atomic.check_artifact_kind(Path(path), metadata, state_file.ARTIFACT_KIND)
    return metadata.get("source") or {}


def read_untrained_levels(path: str | Path) -> CMSConfig | None:
    """Return the levels that wrote a state on a plain checkpoint; None for the state of a trained model."""
    levels = read_writer_metadata(path).get("levels")
    if levels is None:
        return None
    try:
        return CMSConfig.model_validate_json(json.dumps(drop_former_options(levels)))
    except ValidationError as error:
        raise CorruptArtifactError(f"state: {path} has levels that this version does not know: {error}") from None


def check_writer(path: str | Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `CorruptArtifactError` for a state of a model with another checkpoint, tokenizer, dtype or other levels."""
    for name, label in SOURCE_LABELS.items():
        expected = ours.get(name)
        # a trained model has no checkpoint; files of older versions may lack the others
        actual = theirs.get(name, None if name == "checkpoint" else expected)
        if actual != expected:
            owner = f"{label} {str(actual)[:HASH_PREFIX]}" if actual else "a trained nested model"
            model = f"{label} {str(expected)[:HASH_PREFIX]}" if expected else "a trained nested model"
            remedy = "use that model"
            if name == "weights_dtype":
                remedy = f'load the model with dtype="{actual}" (on the command line --dtype {actual})'
            raise CorruptArtifactError(f"state: {path} belongs to {owner}, this is {model}; {remedy}")
    differences = atomic.diff_settings(ours.get("levels", {}), drop_former_options(theirs.get("levels", {})))
    if differences:
        raise CorruptArtifactError(f"state: {path} was read with other levels: {'; '.join(differences)}")


def parse_level_options(options: Mapping[str, object]) -> CMSConfig:
    """Return levels with some options. Raises `UsageError` naming an option that is out of range."""
    try:
        return CMSConfig.model_validate_json(json.dumps({"associative_target": "start", **options}, default=list))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = f"{first['loc'][0]}={str(first['input'])[:40]}: " if first["loc"] else ""  # none if options conflict
        raise UsageError(place + first["msg"].removeprefix("Input ").removeprefix("Value error, ")) from None
