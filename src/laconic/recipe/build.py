"""Recipe -> everything a run needs: decoder, tokenizer, method, rows, validation, and how the model part is saved."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from laconic.core.contract import Source
from laconic.recipe import learners, models
from laconic.recipe.methods import method_of
from laconic.recipe.models import Parts
from laconic.recipe.opened import fingerprint, start
from laconic.recipe.rows import Show, training
from laconic.recipe.saving import ModelPart
from laconic.recipe.schema import Recipe
from laconic.recipe.validation import validation
from laconic.training.ranks import Ranks

Validate = Callable[[int], Mapping[str, float]]


@dataclass(frozen=True)
class Built:
    """A run before its first step. `bound` are the hashes that every step of it belongs to."""

    recipe: Recipe
    parts: Parts
    method: nn.Module
    source: Source
    validate: Validate | None
    model: ModelPart
    bound: Mapping[str, str]
    notes: tuple[str, ...] = ()


def build(recipe: Recipe, device: torch.device, ranks: Ranks | None = None, show: Show | None = None) -> Built:
    """Everything of a run. Raises `Usage` (2) for what does not go together, `BadInput` (66) for rows that are bad."""
    decoder, tokenizer = start(recipe, device)
    rows = training(recipe, tokenizer, decoder.config.max_position_embeddings, show)
    source = rows.source
    learners.check_reached(recipe, source.longest)
    parts = models.fresh(recipe, decoder.to(device), tokenizer, decoder.fingerprint)
    method = method_of(parts, recipe, recipe.train.per_epoch(len(source)), source.longest).to(device)
    bound = {
        "recipe": fingerprint(recipe),
        "data": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "base": parts.base,
    }
    check = validation(recipe, parts, method, device, ranks)
    model = ModelPart(parts, recipe.method, recipe.train.what)
    return Built(recipe, parts, method, source, check, model, bound, rows.notes)
