"""Checks of what files may say and belong to; tests/trust/test_net.py repeats them with one safeguard removed."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.kv.memory import KVMemory
from laconic.config.load import load_recipe
from laconic.errors import CorruptArtifactError, InputError, UnsafeFileError, UsageError
from laconic.models.decoder import Decoder
from laconic.storage.manifest import ManifestWriter
from laconic.storage.safetensors_header import read_safetensors_header
from laconic.training import sharded
from tests.compression.test_kv_memory import IDS, make_decoder, make_metadata, read
from tests.config.test_load import KAVA
from tests.training.toy_runs import run_training, toy_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class LearningRate(float):
    """A number that has what the writer uses of a tensor."""

    nbytes = 8

    def detach(self) -> "LearningRate":
        return self


def check_shards_hold_tensors(path: Path) -> None:
    """S1: a number among sharded tensors, which torch would pickle, is refused before anything is written."""
    path.mkdir()
    values: Any = {"exp_avg": torch.ones(2), "lr": LearningRate(0.1)}
    with suppress(ValueError, CorruptArtifactError, InputError):
        sharded.write_shards(ManifestWriter(path), "optimizer", values, 0)
    for file in path.rglob("*.safetensors"):
        read_safetensors_header(file)


def check_memory_is_bound_to_its_tokenizer(path: Path) -> None:
    """R10: a memory is refused by a model with another tokenizer, and the message has both hashes."""
    path.mkdir()
    decoder = make_decoder()
    metadata = make_metadata(decoder)
    memory = replace(KVMemory.from_cache(read(decoder, IDS)), metadata=metadata)
    memory.save(path / WEIGHTS)
    KVMemory.load(path / WEIGHTS, metadata)
    with pytest.raises(CorruptArtifactError, match=r"tokenizer tttt…tt .*, this model has uuuu…uu"):
        KVMemory.load(path / WEIGHTS, replace(metadata, tokenizer="u" * 64))


def check_step_is_bound_to_its_tokenizer(path: Path) -> None:
    """R10: a run does not go on with another tokenizer."""
    settings = toy_config(steps=2)
    run_training(path / "run", settings, fingerprints={"tokenizer": "t" * 64})
    with pytest.raises(CorruptArtifactError, match=r"other ids of the tokenizer \(tttt.*, not uuuu"):
        run_training(path / "run", settings, fingerprints={"tokenizer": "u" * 64})


def check_loading_is_strict(path: Path) -> None:
    """R11: a checkpoint that lacks a tensor is refused."""
    make_decoder().save_pretrained(path)
    Decoder.from_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(InputError, match="missing"):
        Decoder.from_pretrained(path)


def check_unknown_keys_are_refused(path: Path) -> None:
    """R12: a recipe with an unknown key is refused."""
    path.mkdir()
    recipe = path / "kava.toml"
    recipe.write_text(KAVA)
    load_recipe(recipe)
    recipe.write_text("sede = 4\n" + KAVA)
    with pytest.raises(UsageError, match="sede: no such key; did you mean seed"):
        load_recipe(recipe)


def check_names_stay_inside(path: Path) -> None:
    """S3: an index that names a file outside its folder is refused."""
    make_decoder().save_pretrained(path / "model")
    shutil.move(path / "model" / WEIGHTS, path / "outside.safetensors")
    names = read_safetensors_header(path / "outside.safetensors").tensors
    (path / "model" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "../outside.safetensors")}))
    with pytest.raises(UnsafeFileError):
        Decoder.from_pretrained(path / "model")
