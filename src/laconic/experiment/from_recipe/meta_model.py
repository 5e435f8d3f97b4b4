"""A recipe's model on the meta device for `laconic train --plan`: sizes without weights."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.config.recipe import LoraConfig, Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.from_recipe.methods import build_method
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


class MetaAdapter:
    """LoRA on the linear layers of a decoder, with the one method of peft's model that methods call."""

    def __init__(self, decoder: Decoder, config: LoraConfig) -> None:
        self.is_enabled, names = True, None
        if config.target_modules == "attention":
            names = build_model.attention_projection_names(decoder)
        for name, module in list(decoder.layers.named_modules()):
            parent, _, end = name.rpartition(".")
            if isinstance(module, nn.Linear) and (names is None or any(name.endswith(f".{n}") for n in names)):
                decoder.layers.get_submodule(parent).add_module(end, MetaLora(module, config, self))

    @contextmanager
    def disable_adapter(self) -> Generator[None]:
        self.is_enabled = False
        try:
            yield
        finally:
            self.is_enabled = True


class MetaLora(nn.Module):
    """A linear layer with LoRA as peft applies it; importing peft takes longer than a whole plan may."""

    def __init__(self, base: nn.Linear, config: LoraConfig, adapter: MetaAdapter) -> None:
        super().__init__()
        self.base, self.dropout, self.adapter = base, config.dropout, adapter
        self.A = nn.Parameter(torch.empty(config.rank, base.in_features, device="meta"))
        self.B = nn.Parameter(torch.empty(base.out_features, config.rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        if not self.adapter.is_enabled:
            return self.base(x)
        update = F.linear(F.linear(F.dropout(x.to(self.A.dtype), self.dropout, self.training), self.A), self.B)
        return self.base(x) + update.to(x.dtype)


def build_meta_method(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> nn.Module:
    """Build decoder, adapter and method on the meta device, with gradients only for what is trained.

    Initial values are not computed from the weights, and every segment becomes the largest number of vectors.
    """
    recipe = _without_data_dependence(recipe)
    with torch.device("meta"):
        decoder = build_nested.create_decoder(recipe, config, None).to(getattr(torch, recipe.model.dtype))
    decoder.activation_checkpointing = recipe.train.activation_checkpointing
    latents = build_model.build_latents(decoder, tokenizer, recipe)
    summary_parameters = build_model.build_summary_parameters(decoder, tokenizer, recipe)
    decoder.requires_grad_(recipe.train.trainable == "full")
    adapter = MetaAdapter(decoder, recipe.lora) if recipe.train.trainable == "lora" and recipe.lora else None
    parts = ModelParts(decoder, tokenizer, latents, cast(Any, adapter), "", summary_parameters)
    return build_method(parts, recipe, 1).to("meta").train()


def with_num_layers(recipe: Recipe, config: DecoderConfig, num_layers: int) -> tuple[Recipe, DecoderConfig]:
    config = replace(
        config,
        num_hidden_layers=num_layers,
        sliding_windows=config.sliding_windows[:num_layers],
        attention_scales=config.attention_scales[:num_layers],
    )
    changes: dict[str, object] = {}
    matching = recipe.kv_distillation
    if matching is not None and matching.layers is not None:
        layers = tuple(layer for layer in matching.layers if layer < num_layers) or (0,)
        changes["kv_distillation"] = matching.model_copy(update={"layers": layers})
    return recipe.model_copy(update=changes), config


def without_checkpointing(recipe: Recipe) -> Recipe:
    off = {"activation_checkpointing": False}
    changes: dict[str, object] = {"train": recipe.train.model_copy(update={"activation_checkpointing": 0})}
    if recipe.compression is not None:
        changes["compression"] = recipe.compression.model_copy(update={"checkpoint_segments": False})
    if recipe.mixer is not None:
        options = {name: getattr(recipe.mixer, name).model_copy(update=off) for name in ("self_modifying", "titans")}
        changes["mixer"] = recipe.mixer.model_copy(update=options)
    return recipe.model_copy(update=changes)


def count_checkpointed_parts(recipe: Recipe, config: DecoderConfig, batch: Any) -> float | None:
    """Return into how many parts the recomputed activations of a batch are divided; None without recomputation."""
    if recipe.train.activation_checkpointing:
        return max(1.0, config.num_hidden_layers / recipe.train.activation_checkpointing)
    if recipe.method == "autocompressor" and recipe.compression and recipe.compression.checkpoint_segments:
        return max(len(part.segment_slices) for part in batch.sequential_parts)
    mixer = recipe.mixer
    if recipe.method == "hope" and mixer and mixer.options and mixer.options.activation_checkpointing:
        memory = mixer.self_modifying  # whose chunks end at the boundaries of either size
        chunk_sizes = (memory.memory_chunk_size, memory.projection_chunk_size)
        chunk_size = mixer.chunk_size if mixer.kind == "titans" else min(chunk_sizes)
        return max(1.0, batch.input_ids.shape[1] / chunk_size)
    return None


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
