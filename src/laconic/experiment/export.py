"""Export a run: a Hugging Face folder of its decoder, and beside it everything else that the run needs to answer."""

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from laconic.config.load import to_toml
from laconic.config.recipe import PATH_KEYS
from laconic.data.tokenizer import Tokenizer
from laconic.data.tokenizer_files import TEMPLATES_FOLDER
from laconic.errors import InputError, UsageError
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, load_initial_model
from laconic.experiment.lora import lora
from laconic.experiment.model_checkpoint import write_then_move
from laconic.generation.config import check_type
from laconic.models.checkpoints import weights
from laconic.models.decoder import Decoder
from laconic.storage import atomic
from laconic.storage.export_record import EXPORT_FOLDER, write_export_record
from laconic.storage.strict_json import read_foreign_json

REPOSITORY_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
README_TEXT = """Files of laconic (method {method}, step {step}).

laconic.load(FOLDER) opens the folder above with these files; without them it is the model alone.
"""


@dataclass(frozen=True)
class ServerFiles:
    """Keys of config.json and files from which a server loads a folder; the run itself has `vocab_size` embeddings."""

    config_fields: Mapping[str, Any]
    files: Mapping[str, bytes]
    vocab_size: int


def export_run(
    run: LoadedRun, folder: str | Path, *, dtype: torch.dtype | None = None, server: ServerFiles | None = None
) -> Decoder:
    """Write a run as a folder, new or empty, that `laconic.load` opens anywhere, and transformers as a plain decoder.

    An adapter is merged into the weights, in place. If the method switches it on and off (`compression.adapter_scope =
    "write"`), it is stored beside the decoder instead. `dtype` converts the weights; `server` has what a server needs
    besides. Returns the decoder that was written. Raises BusyError if the folder is not empty, DiskError if the disk is
    full.
    """
    expected = 'the result of laconic.experiment.load_run.load_run("runs/NAME", torch.device("cpu"))'
    check_type("run", run, LoadedRun, expected)
    if run.has_switched_adapter:
        adapter = run.parts.adapter
        decoder = load_initial_model(run.recipe, torch.device("cpu"))[0]
    else:
        adapter = None
        decoder = run.merged_decoder()
    tensors = weights.checkpoint_tensors(decoder, decoder.config)
    fingerprints = {
        "method": run.recipe.method,
        "base": weights.weights_fingerprint((name, x.to(dtype or x.dtype)) for name, x in tensors),
        "tokenizer": run.parts.tokenizer.fingerprint,
    }
    recipe = tomllib.loads(to_toml(run.recipe))
    remove_folders(recipe)
    if dtype is not None:
        recipe["model"]["dtype"] = str(dtype).removeprefix("torch.")

    def write(new: Path) -> None:
        write_then_move(new, lambda inner: decoder.save_pretrained(inner, dtype=dtype))
        run.parts.tokenizer.save(new)
        fields: dict[str, Any] = {EXPORT_FOLDER: {"method": run.recipe.method, "step": run.step}}
        if server is not None:
            fields.update(server.config_fields)
            for name, data in server.files.items():
                (new / name).write_bytes(data)
            shutil.rmtree(new / TEMPLATES_FOLDER, ignore_errors=True)  # the base model's, without thoughts
        config_file = new / "config.json"
        config_file.write_text(json.dumps(read_foreign_json(config_file) | fields, indent=2) + "\n", encoding="utf-8")
        extras = new / EXPORT_FOLDER
        if adapter is not None:
            lora.save_adapter(adapter, extras)
        extras.mkdir(exist_ok=True)
        for file_name, module in run.parts.extra_modules.items():
            module.save(extras / file_name, fingerprints)
        (extras / RECIPE_FILE).write_text(tomli_w.dumps(recipe), encoding="utf-8")
        (extras / "README.txt").write_text(README_TEXT.format(method=run.recipe.method, step=run.step))
        facts = {"method": run.recipe.method, "step": run.step, "epoch": run.epoch}
        write_export_record(new, facts if server is None else {**facts, "vocab_size": server.vocab_size})

    atomic.write_folder_atomically(Path(folder), write, count_exported_bytes(decoder, dtype))
    return decoder


def export_model(
    decoder: Decoder, folder: str | Path, tokenizer: Tokenizer | None = None, *, dtype: torch.dtype | None = None
) -> None:
    """Write a decoder as a folder, new or empty, that `laconic.load` and transformers open.

    Without a `tokenizer`, it gets the files that lie where the decoder was loaded from.
    """

    def write(new: Path) -> None:
        write_then_move(new, lambda inner: decoder.save_pretrained(inner, dtype=dtype))
        if tokenizer is not None:
            tokenizer.save(new)
        write_export_record(new)

    atomic.write_folder_atomically(Path(folder), write, count_exported_bytes(decoder, dtype))


def count_exported_bytes(decoder: Decoder, dtype: torch.dtype | None) -> int:
    """Return the bytes of a decoder's weights in `dtype`; None: as they are."""
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in decoder.parameters())


def remove_folders(recipe: dict[str, Any]) -> None:
    """Replace absolute paths in a recipe, which name folders of this machine, by their last part."""
    for key in PATH_KEYS:
        table, name = key.split(".")
        value = recipe.get(table, {}).get(name)
        if isinstance(value, str) and Path(value).is_absolute():
            recipe[table][name] = Path(value).name
        elif isinstance(value, list):
            recipe[table][name] = [Path(entry).name if Path(entry).is_absolute() else entry for entry in value]


def check_repository_name(repo: str) -> None:
    if not REPOSITORY_NAME.fullmatch(repo):
        raise UsageError(f"repository {repo!r}: expected OWNER/NAME, such as me/kava-smollm2")


def upload_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Create a model repository unless it exists, upload a folder as one commit, and return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # the hub's client raises many kinds: HTTP, names, tokens, offline
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"{repo}: not uploaded: {reason}; {folder} is complete, upload it with: hf upload {repo} {folder}"
        ) from error
    return str(commit.repo_url)
