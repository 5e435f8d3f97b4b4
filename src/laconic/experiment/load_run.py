"""Load a run at a committed step or as `laconic export` wrote it, or the decoder that a run starts with."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe import MEASURE_KEYS, Recipe
from laconic.config.recipe_keys import explicit_values, flatten
from laconic.data.tokenizer import Tokenizer, load_tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.from_recipe.custom_method import check_code_allowed
from laconic.experiment.from_recipe.methods import build_method, set_stage
from laconic.experiment.lora import lora
from laconic.experiment.lora.adapter_config import ADAPTER_CONFIG_FILE
from laconic.experiment.model_checkpoint import ModelCheckpoint
from laconic.models.checkpoints import weights
from laconic.models.checkpoints.checkpoint_files import resolve_tensors
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.parameters import get_parameter_version
from laconic.storage import manifest
from laconic.storage.export_record import EXPORT_FOLDER, read_export_record
from laconic.storage.run_dir import STEP_PATTERN, RunDirectory, StepFolder
from laconic.training import checkpoint

RECIPE_FILE = "recipe.toml"
NO_CHECKPOINT = "has no checkpoint yet; laconic train writes one"


@dataclass(frozen=True)
class LoadedRun:
    """A run at one of its steps, with the method in evaluation mode; `epoch` is that of a method with stages."""

    folder: Path
    recipe: Recipe
    step: int
    parts: ModelParts
    method: nn.Module
    epoch: int | None = None

    @property
    def has_switched_adapter(self) -> bool:
        """Whether the method disables the adapter at times (`compression.adapter_scope = "write"`)."""
        compression = self.recipe.compression
        return self.parts.adapter is not None and compression is not None and compression.adapter_scope == "write"

    def merged_decoder(self) -> Decoder:
        """Return the decoder, with the adapter merged into its weights and removed."""
        return lora.merge_adapter(self.parts.adapter) if self.parts.adapter is not None else self.parts.decoder

    def merge_for_answers(self) -> "LoadedRun":
        """Return the run with an adapter that is always on merged into the weights, in place: answering is faster.

        Memories and caches fit both forms of the decoder: the fingerprint stays.
        """
        if self.parts.adapter is None or self.has_switched_adapter:
            return self
        fingerprint = self.parts.decoder.fingerprint
        decoder = self.merged_decoder()
        decoder._cached_fingerprint = (fingerprint, get_parameter_version(decoder))  # pyright: ignore[reportPrivateUsage]
        return replace(self, parts=replace(self.parts, decoder=decoder, adapter=None))


def is_run_dir(path: str | Path) -> bool:
    return (Path(path) / RECIPE_FILE).is_file()


def is_export(path: str | Path) -> bool:
    record = read_export_record(Path(path))
    return record is not None and record.is_run


def read_run_method(path: str | Path) -> str | None:
    """Return the method of a run directory, a step of one, or an exported run; None for another path."""
    recipe = read_run_recipe(path)
    return None if recipe is None else recipe.method


def read_run_recipe(path: str | Path) -> Recipe | None:
    """Return the recipe of a run directory, a step of one, or an exported run; None for another path."""
    run = find_run(path)
    if run is None:
        return None
    folder = run.folder / EXPORT_FOLDER if is_export(run.folder) else run.folder
    return load_recipe(folder / RECIPE_FILE)[0]


def is_nested(path: str | Path) -> bool:
    """Return whether a folder holds a run of method hope, or a saved nested model."""
    folder = Path(path)
    method = read_run_method(path)
    if method is not None:
        return method == "hope"
    return (folder / "config.json").is_file() and build_nested.read_saved_config(folder) is not None


class RunStep(NamedTuple):
    """A run directory and the number of one of its steps; None for the latest."""

    folder: Path
    step: int | None


def find_run(path: str | Path, step: int | None = None) -> RunStep | None:
    """Return the run that a path names, which may be exported or a step, existing or not; None for another path."""
    folder = Path(os.path.expanduser(path))
    if is_run_dir(folder) or is_export(folder):
        return RunStep(folder, step)
    check_not_empty_run(folder)
    match = STEP_PATTERN.fullmatch(folder.name)
    run = folder.parent.parent
    if match is None or not is_run_dir(run):
        return None
    if step not in (None, int(match[1])):
        raise UsageError(f"step {step}: {path} is the checkpoint of step {int(match[1])}; remove step, or load {run}")
    return RunStep(run, int(match[1]))


def check_not_empty_run(folder: Path) -> None:
    """Raise `InputError` for the directory of a run that laconic train prepares: it has neither recipe nor step yet."""
    steps = folder / "steps"
    is_model = (folder / RECIPE_FILE).is_file() or (folder / "config.json").is_file()
    if steps.is_dir() and not is_model and not any(steps.glob("step-*")):
        raise InputError(f"{folder} {NO_CHECKPOINT}")


def load_run(path: str | Path, device: torch.device, step: int | None = None, *, allow_code: bool = False) -> LoadedRun:
    """Load a run at its latest valid checkpoint or another, or an exported run, which has only one.

    With `allow_code`, or the variable LACONIC_ALLOW_CODE=1, a method outside laconic may be imported; else UsageError.
    Raises InputError if there is no such run or step, CorruptArtifactError for a step of another recipe, tokenizer or
    base model.
    """
    folder = Path(path)
    if is_export(folder):
        return load_export(folder, device, step, allow_code=allow_code)
    if not is_run_dir(folder):
        check_not_empty_run(folder)
        raise InputError(f"{folder} has no {RECIPE_FILE}; give a run directory")
    recipe, _ = load_recipe(folder / RECIPE_FILE)
    check_code_allowed(recipe, folder, allow_code)
    committed = latest_step(folder) if step is None else RunDirectory(folder).get_step(step)
    check_fingerprint(committed, "recipe", recipe_fingerprint(recipe))
    tokenizer = load_tokenizer(committed.path)
    check_fingerprint(committed, "tokenizer", tokenizer.fingerprint)
    shards = (committed.path / checkpoint.SHARDS_FOLDER).is_dir()
    parts = restore_parts(recipe, committed, tokenizer, device, shards)
    method = build_method(parts, recipe, 1).to(device)
    files = ModelCheckpoint(parts, recipe.method, recipe.train.trainable)
    if shards:
        checkpoint.load_model(committed.path, files, method)
    else:
        for name, module in parts.extra_modules.items():
            module.load(committed.path / name, files.fingerprints)
    epoch = None
    if recipe.method == "coconut":
        progress = checkpoint.read_settings(committed.path, checkpoint.PROGRESS_FILE, checkpoint.Progress)
        epoch = progress.epoch - (progress.row_offset == 0)
        set_stage(method, epoch)
    return LoadedRun(folder, recipe, committed.step, parts, method.eval(), epoch)


def load_export(folder: Path, device: torch.device, step: int | None, *, allow_code: bool = False) -> LoadedRun:
    """Load what `export_run` wrote; arguments and errors are those of `load_run`."""
    extras = folder / EXPORT_FOLDER
    record = read_export_record(folder)
    assert record is not None
    record.check_files(lambda name: name.startswith(f"{EXPORT_FOLDER}/"))
    recipe, _ = load_recipe(extras / RECIPE_FILE)
    check_code_allowed(recipe, folder, allow_code)
    metadata = record.metadata
    if step not in (None, metadata["step"]):
        raise UsageError(f"step {step}: {folder} was exported at step {metadata['step']}; remove step")
    tokenizer = load_tokenizer(folder)
    decoder = build_nested.load_decoder(folder, getattr(torch, recipe.model.dtype), device)
    base = decoder.fingerprint
    if "vocab_size" in metadata:
        decoder = crop_vocabulary(decoder, metadata["vocab_size"])
    latents = build_model.build_latents(decoder, tokenizer, recipe)
    summaries = build_model.build_summary_parameters(decoder, tokenizer, recipe)
    has_adapter = (extras / ADAPTER_CONFIG_FILE).is_file()
    adapter = lora.load_adapter(decoder, extras) if has_adapter else None
    parts = ModelParts(decoder, tokenizer, latents, adapter, base, summaries)
    method = build_method(parts, recipe, 1).to(device)
    fingerprints = {"method": recipe.method, "base": base, "tokenizer": tokenizer.fingerprint}
    for name, module in parts.extra_modules.items():
        module.load(extras / name, fingerprints)
    if metadata["epoch"] is not None:
        set_stage(method, metadata["epoch"])
    return LoadedRun(folder, recipe, metadata["step"], parts, method.eval(), metadata["epoch"])


def crop_vocabulary(decoder: Decoder, vocab_size: int) -> Decoder:
    """Return a decoder with the first embeddings only: without those that an export for a server added."""
    if vocab_size >= decoder.config.vocab_size:
        return decoder
    with torch.device("meta"):
        cropped = Decoder(replace(decoder.config, vocab_size=vocab_size), seed=None)
    sizes = {name: len(tensor) for name, tensor in cropped.state_dict().items()}
    cropped.load_state_dict({name: x[: sizes[name]] for name, x in decoder.state_dict().items()}, assign=True)
    cropped.source_folder, cropped.name_or_path = decoder.source_folder, decoder.name_or_path
    return cropped.eval()


def latest_step(folder: Path) -> StepFolder:
    step = RunDirectory(folder).latest_valid_step()
    if step is None:
        raise InputError(f"{folder} {NO_CHECKPOINT}")
    return step


def check_fingerprint(step: StepFolder, name: str, expected: str) -> None:
    """Raise CorruptArtifactError unless the step was written for this recipe, tokenizer or base."""
    if not step.has_fingerprint(name, expected):
        theirs = step.manifest.fingerprints.get(name)
        raise CorruptArtifactError(
            f"{step.path} belongs to {name} {theirs}, not {expected}; use the one it was trained with"
        )


def restore_parts(
    recipe: Recipe, step: StepFolder, tokenizer: Tokenizer, device: torch.device, shards: bool
) -> ModelParts:
    """Return decoder, adapter and trainable extras; weights of the extras and of `shards` are still to be read.

    Trained parameters require gradients as in training, because torch uses other kernels otherwise.
    """
    dtype = getattr(torch, recipe.model.dtype)
    is_full = recipe.train.trainable == "full"
    if not is_full:
        decoder = load_initial_model(recipe, device)[0]
        check_fingerprint(step, "base", decoder.fingerprint)
    elif not shards:
        decoder = build_nested.load_decoder(step.path, dtype, device)
    elif nested := build_nested.read_saved_config(step.path):
        decoder = build_nested.model_class(nested)(nested, seed=None).to(device, dtype)
    else:
        decoder = build_model.build_random_decoder(DecoderConfig.from_folder(step.path), device).to(dtype)
    base = "" if shards and is_full else decoder.fingerprint
    return build_model.build_parts(recipe, decoder, tokenizer, base, None if shards else step.path)


def load_config_and_tokenizer(recipe: Recipe) -> tuple[DecoderConfig, Tokenizer]:
    """Return the sizes and the tokenizer that a run starts with.

    No weight is read, except a head that may differ from a tied embedding, if the folder has weights.
    """
    model = recipe.model
    if model.init_from_run is not None:
        run = Path(model.init_from_run)
        if is_export(run):
            return build_nested.read_decoder_config(run), load_tokenizer(run)
        if not is_run_dir(run):
            return load_config_and_tokenizer(load_recipe(read_planned_recipe(run))[0])
        before, _ = load_recipe(run / RECIPE_FILE)
        if before.train.trainable != "full":
            return load_config_and_tokenizer(before)
        folder = latest_step(run).path
        return build_nested.read_decoder_config(folder), load_tokenizer(folder)
    folder, config, tokenizer = find_initial_checkpoint(recipe, with_weights=False)
    if folder is not None and any(folder.glob("*.safetensors")) and build_nested.read_saved_config(folder) is None:
        config, _ = resolve_tensors(folder, config)
    return config, tokenizer


def read_planned_recipe(run: Path) -> str:
    """Return the shipped recipe of a run that does not exist yet, by its name."""
    if not (SHIPPED_RECIPES / f"{run.name}.toml").is_file():
        raise InputError(
            f"model.init_from_run {run}: no run, and no recipe of its name; train it first, or set model.name"
        )
    return run.name


def find_initial_checkpoint(recipe: Recipe, with_weights: bool) -> tuple[Path | None, DecoderConfig, Tokenizer]:
    """Return the folder of a recipe's checkpoint, None for a new decoder, with its sizes and its tokenizer."""
    model = recipe.model
    folder = None
    if model.name is not None and is_run_dir(model.name):
        raise InputError(
            f"model.name: {model.name} is a run of laconic train; to train it further, set model.init_from_run"
        )
    tokenizer = build_model.load_model_tokenizer(model)
    if model.name is not None:
        folder = weights.find_checkpoint(model.name, model.revision, with_weights=with_weights)
        config = build_nested.read_decoder_config(folder)
    else:
        config = build_model.build_config(model, tokenizer.vocab_size)
        config = build_nested.adapt_config(recipe, config) if recipe.method == "hope" else config
    build_model.check_vocabulary(tokenizer, config)
    return folder, config, tokenizer


def load_initial_model(recipe: Recipe, device: torch.device) -> tuple[Decoder, Tokenizer, SummaryParameters | None]:
    """Return the decoder and tokenizer to start with, and any summary parameters of `model.init_from_run`."""
    model = recipe.model
    dtype = getattr(torch, model.dtype)
    if model.init_from_run is not None:
        folder = Path(model.init_from_run)
        if not (is_export(folder) or is_run_dir(folder)):
            name = read_planned_recipe(folder)
            remedy = f"first laconic train {name} --out {folder}, or set model.init_from_run to your run"
            raise InputError(f"model.init_from_run {folder}: no such run; {remedy}")
        run = load_run(folder, device)
        build_model.check_context_length(recipe, run.parts.decoder.config)
        decoder = build_nested.prepare_decoder(recipe, run.merged_decoder())
        return decoder, run.parts.tokenizer, run.parts.summary_parameters
    folder, config, tokenizer = find_initial_checkpoint(recipe, with_weights=True)
    build_model.check_context_length(recipe, config)
    if folder is None:
        return build_model.build_decoder(recipe, config).to(device, dtype), tokenizer, None
    decoder = build_nested.prepare_decoder(recipe, build_nested.load_decoder(folder, dtype, device))
    decoder.name_or_path = str(model.name)
    return decoder, tokenizer, None


def held_out_fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of the keys that decide what a validation measures, a file counting by its content."""
    values = flatten(recipe.model_dump(mode="json"))
    measured = {key: values.get(key) for key in MEASURE_KEYS}
    path = Path(recipe.data.valid or "")
    if path.is_file():
        measured["data.valid"] = manifest.hash_file(path)[1]
    return manifest.hash_json(measured)


def recipe_fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of everything in a recipe that can change what is learned."""
    return manifest.hash_json(explicit_values(recipe))
