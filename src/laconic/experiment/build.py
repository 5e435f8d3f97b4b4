"""Recipe -> everything a run needs: decoder, tokenizer, method, rows, validation, and how the model part is saved."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from laconic.config.recipe import Recipe
from laconic.evaluation.validation import build_validation
from laconic.experiment import build_model, build_nested
from laconic.experiment.build_data import ProgressCallback, load_training_rows
from laconic.experiment.build_model import ModelParts
from laconic.experiment.load_run import load_initial_decoder, recipe_fingerprint
from laconic.experiment.methods import build_method
from laconic.experiment.model_checkpoint import ModelCheckpoint
from laconic.interfaces import TrainingData
from laconic.training.ranks import Ranks

Validate = Callable[[int], Mapping[str, float]]


@dataclass(frozen=True)
class Experiment:
    """A run before its first step. `bound` are the hashes that every step of it belongs to."""

    recipe: Recipe
    parts: ModelParts
    method: nn.Module
    training_data: TrainingData
    validate: Validate | None
    checkpoint: ModelCheckpoint
    fingerprints: Mapping[str, str]
    notes: tuple[str, ...] = ()


def build_experiment(
    recipe: Recipe, device: torch.device, ranks: Ranks | None = None, show: ProgressCallback | None = None
) -> Experiment:
    """Everything of a run. Raises `Usage` (2) for what does not go together, `BadInput` (66) for rows that are bad."""
    decoder, tokenizer = load_initial_decoder(recipe, device)
    rows = load_training_rows(recipe, tokenizer, decoder.config.max_position_embeddings, show)
    source = rows.source
    build_nested.check_levels_trainable(recipe, source.max_length)
    parts = build_model.build_parts(recipe, decoder.to(device), tokenizer, decoder.fingerprint)
    method = build_method(parts, recipe, recipe.train.updates_per_epoch(len(source)), source.max_length).to(device)
    bound = {
        "recipe": recipe_fingerprint(recipe),
        "data": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "base": parts.base,
    }
    check = build_validation(recipe, parts, method, device, ranks)
    model = ModelCheckpoint(parts, recipe.method, recipe.train.trainable)
    return Experiment(recipe, parts, method, source, check, model, bound, rows.notes)
