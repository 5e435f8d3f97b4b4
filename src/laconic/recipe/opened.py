"""A committed run as a decoder with its method, for answers; and the decoder that a run begins with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from laconic.core import manifest, weights
from laconic.core.artifact import read_json
from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput, Damaged
from laconic.core.families import DecoderConfig
from laconic.core.runs import Committed, RunFolder
from laconic.data.tokens import Tokenizer, load_tokenizer
from laconic.recipe import adapters, learners, models
from laconic.recipe.methods import method_of, staged
from laconic.recipe.models import Parts
from laconic.recipe.read import SHIPPED, read
from laconic.recipe.saving import ModelPart
from laconic.recipe.schema import Recipe, said
from laconic.training import checkpoint

RECIPE = "recipe.toml"


@dataclass(frozen=True)
class Opened:
    """A run at one of its steps."""

    folder: Path
    recipe: Recipe
    step: int
    parts: Parts
    method: nn.Module

    def plain(self) -> Decoder:
        """The decoder by itself: an adapter is added to its weights, and is gone afterwards."""
        return adapters.merged(self.parts.adapter) if self.parts.adapter is not None else self.parts.decoder


def is_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run."""
    return (Path(path) / RECIPE).is_file()


def opened(path: str | Path, device: torch.device, step: int | None = None) -> Opened:
    """The newest good step of a run, or the one asked for.

    Raises `BadInput` (66) where there is none, `Damaged` (76) with both hashes where the step belongs to another
    recipe, tokenizer or base than the run says.
    """
    folder = Path(path)
    if not is_run(folder):
        raise BadInput(f"{folder} has no {RECIPE}; give the folder of a run")
    recipe, _ = read(folder / RECIPE)
    found = newest(folder) if step is None else RunFolder(folder).asked(step)
    check(found, "recipe", fingerprint(recipe))
    tokenizer = load_tokenizer(found.folder)
    check(found, "tokenizer", tokenizer.fingerprint)
    shards = (found.folder / checkpoint.SHARDS).is_dir()
    parts = (begun if shards else restored)(recipe, found, tokenizer, device)
    method = method_of(parts, recipe, 1).to(device)
    if shards:
        checkpoint.load_model(found.folder, ModelPart(parts, recipe.method, recipe.train.what), method)
    if recipe.staging is not None:
        progress = read_json(found.folder / checkpoint.PROGRESS)
        staged(method, progress["epoch"] - (progress["index"] == 0))
    return Opened(folder, recipe, found.number, parts, method.eval())


def newest(folder: Path) -> Committed:
    """The newest good step of a run."""
    found = RunFolder(folder).newest()
    if found is None:
        raise BadInput(f"{folder} has no step yet; let laconic train commit one")
    return found


def check(step: Committed, name: str, ours: str) -> None:
    """Raises `Damaged` unless the step is bound to what is at hand."""
    theirs = step.manifest.bound.get(name)
    if theirs != ours:
        raise Damaged(
            f"{step.folder} belongs to the {name} {theirs}, this one is {ours}; take the one that it was made with"
        )


def restored(recipe: Recipe, step: Committed, tokenizer: Tokenizer, device: torch.device) -> Parts:
    """Decoder, adapter and what is learned beside it as the step has them.

    What was trained asks for gradients as it did, since torch takes other kernels for what does not.
    """
    if recipe.train.what == "full":
        decoder = learners.loaded(step.folder, getattr(torch, recipe.model.dtype), device)
        base = decoder.fingerprint
    else:
        decoder, _ = start(recipe, device)
        base = decoder.fingerprint
        check(step, "base", base)
    thoughts = models.new_thoughts(decoder, tokenizer, recipe)
    summaries = models.new_summaries(decoder, tokenizer, recipe)
    decoder.requires_grad_(recipe.train.what == "full")
    adapter = adapters.load_adapter(decoder, step.folder, trainable=True) if recipe.train.what == "lora" else None
    parts = Parts(decoder, tokenizer, thoughts, adapter, base, summaries)
    for name, module in parts.beside.items():
        module.load(step.folder / name, ModelPart(parts, recipe.method, recipe.train.what).about)
    return parts


def begun(recipe: Recipe, step: Committed, tokenizer: Tokenizer, device: torch.device) -> Parts:
    """Decoder, adapter and all beside, with all that is trained still to be filled from the step's shards."""
    if recipe.train.what == "full":
        decoder = models.drawn(DecoderConfig.read(step.folder), device).to(getattr(torch, recipe.model.dtype))
        return models.fresh(recipe, decoder, tokenizer, "")
    decoder, _ = start(recipe, device)
    base = decoder.fingerprint
    check(step, "base", base)
    return models.fresh(recipe, decoder, tokenizer, base)


def described(recipe: Recipe) -> tuple[DecoderConfig, Tokenizer]:
    """The sizes and the tokenizer that a run begins with; no weight is read."""
    model = recipe.model
    if model.start is not None:
        if not is_run(model.start):
            return described(read(planned(model.start))[0])
        before, _ = read(Path(model.start) / RECIPE)
        folder = newest(Path(model.start)).folder
        if before.train.what != "full":
            return described(before)
        return learners.config_of(folder), load_tokenizer(folder)
    if model.name is not None and not Path(model.name).is_dir():
        model = model.model_copy(update={"name": str(models.small_files(model.name, model.revision))})
    tokenizer = models.tokenizer_of(model)
    config = models.configured(recipe, tokenizer, Path(model.name) if model.name else None)
    models.check_words(tokenizer, config)
    return config, tokenizer


def planned(start: str) -> str:
    """The recipe of a run that is still to be made: it bears its name. Raises `BadInput` (66) where there is none."""
    name = Path(start).name
    if not (SHIPPED / f"{name}.toml").is_file():
        raise BadInput(f"model.start {start}: no run, and no recipe of its name; train it first, or give model.name")
    return name


def start(recipe: Recipe, device: torch.device) -> tuple[Decoder, Tokenizer]:
    """The decoder that training begins with, and its tokenizer."""
    model, dtype = recipe.model, getattr(torch, recipe.model.dtype)
    if model.start is not None:
        found = opened(model.start, device)
        models.check_context(recipe, found.parts.decoder.config)
        return learners.learner(recipe, found.plain()), found.parts.tokenizer
    tokenizer = models.tokenizer_of(model)
    folder = weights.find(model.name, model.revision) if model.name is not None else None
    config = models.configured(recipe, tokenizer, folder)
    models.check_words(tokenizer, config)
    models.check_context(recipe, config)
    if folder is None:
        return models.new_decoder(recipe, config).to(device, dtype), tokenizer
    decoder = learners.learner(recipe, learners.loaded(folder, dtype, device))
    decoder.name_or_path = str(model.name)
    return decoder, tokenizer


def fingerprint(recipe: Recipe) -> str:
    """SHA-256 of all in a recipe that can change what is learned."""
    return manifest.fingerprint(said(recipe))
