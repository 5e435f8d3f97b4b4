"""A recipe's method on the meta device: its sizes without weights, and an early check that its parts fit together."""

import torch
from torch import nn

from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.methods import build_method
from laconic.models.config import DecoderConfig


def build_meta_method(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> nn.Module:
    """Build decoder, adapter and method on the meta device, with gradients only for what is trained.

    Initial values are not computed from the weights, and every segment becomes the largest number of vectors.
    """
    recipe = _without_data_dependence(recipe)
    with torch.device("meta"):
        decoder = build_nested.create_decoder(recipe, config, None).to(getattr(torch, recipe.model.dtype))
    decoder.activation_checkpointing = recipe.train.activation_checkpointing
    return build_method(build_model.build_parts(recipe, decoder, tokenizer, ""), recipe, 1).to("meta").train()


def _without_data_dependence(recipe: Recipe) -> Recipe:
    """Return the recipe with initial values and lengths that depend on no weight."""
    changes: dict[str, object] = {}
    if recipe.latents is not None:
        changes["latents"] = recipe.latents.model_copy(update={"projection_init_scale": "unit"})
    if recipe.compression is not None:
        fixed = {"length_policy": "fixed", "num_vectors": None}
        config = build_model.resolve_summary_init(recipe.compression, recipe.model)
        if config.summary_init == "eos":
            fixed["summary_init"] = "normal"
        changes["compression"] = config.model_copy(update=fixed)
    return recipe.model_copy(update=changes)
