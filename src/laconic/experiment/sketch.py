"""A recipe's model as sizes alone, for a plan: no weight is read, and LoRA stands there without peft.

Importing peft takes longer than a whole plan may; a test holds these maps to peft's.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.config.recipe import LoraConfig, Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment import build_model, build_nested
from laconic.experiment.build_model import ModelParts
from laconic.experiment.methods import build_method
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.language_model import NestedLanguageModel


class Adapted(nn.Module):
    """A map with LoRA on it, in the types that peft takes: the base as it is held, A and B in float32."""

    def __init__(self, base: nn.Linear, how: LoraConfig) -> None:
        super().__init__()
        self.base, self.dropout, self.scale = base, how.dropout, how.alpha / how.rank
        wide = {"dtype": torch.float32, "device": base.weight.device}
        self.A = nn.Parameter(torch.empty(how.rank, base.in_features, **wide))
        self.B = nn.Parameter(torch.empty(base.out_features, how.rank, **wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        x = F.dropout(x.to(self.A.dtype), self.dropout, self.training)
        return (y + F.linear(F.linear(x, self.A), self.B) * self.scale).to(y.dtype)


def sketched(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, per_epoch: int) -> nn.Module:
    """The method on a decoder of these sizes, all on meta; only what is trained asks for gradients."""
    with torch.device("meta"):
        decoder = build_nested.build_meta_model(recipe, config).to(getattr(torch, recipe.model.dtype))
    decoder.activation_checkpointing = recipe.train.activation_checkpointing
    simple = plainly(recipe)
    thoughts = build_model.build_latents(decoder, tokenizer, simple)
    summaries = build_model.build_summary_parameters(decoder, tokenizer, simple)
    decoder.requires_grad_(recipe.train.trainable == "full")
    if recipe.train.trainable == "lora" and recipe.lora:
        adapt(decoder, recipe.lora)
    parts = ModelParts(decoder, tokenizer, thoughts, None, "", summaries)
    return build_method(parts, recipe, per_epoch).to("meta").train()


def plainly(recipe: Recipe) -> Recipe:
    """The recipe with thoughts and summaries that start without a look at the weights."""
    if recipe.compression is not None:
        recipe = recipe.model_copy(
            update={"compression": recipe.compression.model_copy(update={"summary_init": "normal"})}
        )
    if recipe.latents is None:
        return recipe
    return recipe.model_copy(update={"latents": recipe.latents.model_copy(update={"projection_init_scale": "unit"})})


def adapt(decoder: Decoder, how: LoraConfig) -> None:
    """LoRA on the maps of the blocks that the recipe names."""
    chosen = build_model.attention_projection_names(decoder) if how.target_modules == "attention" else None
    ends = [""] if chosen is None else [f".{name}" for name in chosen]
    for name, module in list(decoder.layers.named_modules()):
        home, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear) and any(f".{name}".endswith(end) for end in ends):
            setattr(decoder.layers.get_submodule(home), last, Adapted(module, how))


def shallow(recipe: Recipe, config: DecoderConfig, depth: int) -> tuple[Recipe, DecoderConfig]:
    """The same with fewer layers."""
    few = replace(
        config,
        num_hidden_layers=depth,
        sliding_windows=config.sliding_windows[:depth],
        attention_scales=config.attention_scales[:depth],
    )
    layers = recipe.kv_distillation.layers if recipe.kv_distillation else None
    if layers is None or recipe.kv_distillation is None:
        return recipe, few
    kept = tuple(layer for layer in layers if layer < depth) or (0,)
    return recipe.model_copy(
        update={"kv_distillation": recipe.kv_distillation.model_copy(update={"layers": kept})}
    ), few


def filled(method: nn.Module, device: torch.device) -> nn.Module:
    """The same on a device, with numbers that mean nothing; those that gate what is learned are as at the start."""
    if isinstance(method, NestedLanguageModel):
        shape = method.decoder.hope_config
        return NestedLanguageModel(build_nested.model_class(shape)(shape), method.config).to(device)
    method.to_empty(device=device)
    for p in method.parameters():
        nn.init.normal_(p.data, 0.0 if p.ndim == 2 else 1.0, 0.02)
    for b in method.buffers():
        b.fill_(1.0)
    return method
