"""A recipe's model as sizes alone, for a plan: no weight is read, and LoRA stands there without peft.

Importing peft takes longer than a whole plan may; a test holds these maps to peft's.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig
from laconic.data.tokens import Tokenizer
from laconic.methods.learner import Learner
from laconic.recipe import learners, models
from laconic.recipe.methods import method_of
from laconic.recipe.models import Parts
from laconic.recipe.schema import Adapter, Recipe


class Adapted(nn.Module):
    """A map with LoRA on it, in the types that peft takes: the base as it is held, A and B in float32."""

    def __init__(self, base: nn.Linear, how: Adapter) -> None:
        super().__init__()
        self.base, self.dropout, self.scale = base, how.dropout, how.alpha / how.r
        wide = {"dtype": torch.float32, "device": base.weight.device}
        self.A = nn.Parameter(torch.empty(how.r, base.in_features, **wide))
        self.B = nn.Parameter(torch.empty(base.out_features, how.r, **wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        x = F.dropout(x.to(self.A.dtype), self.dropout, self.training)
        return (y + F.linear(F.linear(x, self.A), self.B) * self.scale).to(y.dtype)


def sketched(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, per_epoch: int) -> nn.Module:
    """The method on a decoder of these sizes, all on meta; only what is trained asks for gradients."""
    with torch.device("meta"):
        decoder = learners.sketched(recipe, config).to(getattr(torch, recipe.model.dtype))
    decoder.recompute = recipe.train.recompute
    simple = plainly(recipe)
    thoughts = models.new_thoughts(decoder, tokenizer, simple)
    summaries = models.new_summaries(decoder, tokenizer, simple)
    decoder.requires_grad_(recipe.train.what == "full")
    if recipe.train.what == "lora" and recipe.lora:
        adapt(decoder, recipe.lora)
    parts = Parts(decoder, tokenizer, thoughts, None, "", summaries)
    return method_of(parts, recipe, per_epoch).to("meta").train()


def plainly(recipe: Recipe) -> Recipe:
    """The recipe with thoughts and summaries that start without a look at the weights."""
    if recipe.reading is not None:
        recipe = recipe.model_copy(update={"reading": recipe.reading.model_copy(update={"summary_init": "normal"})})
    if recipe.thinking is None:
        return recipe
    return recipe.model_copy(update={"thinking": recipe.thinking.model_copy(update={"project_scale": "unit"})})


def adapt(decoder: Decoder, how: Adapter) -> None:
    """LoRA on the maps of the blocks that the recipe names."""
    chosen = models.attention_maps(decoder) if how.modules == "attention" else None
    ends = [""] if chosen is None else [f".{name}" for name in chosen]
    for name, module in list(decoder.blocks.named_modules()):
        home, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear) and any(f".{name}".endswith(end) for end in ends):
            setattr(decoder.blocks.get_submodule(home), last, Adapted(module, how))


def shallow(recipe: Recipe, config: DecoderConfig, depth: int) -> tuple[Recipe, DecoderConfig]:
    """The same with fewer layers."""
    few = replace(
        config, num_hidden_layers=depth, windows=config.windows[:depth], score_scale=config.score_scale[:depth]
    )
    layers = recipe.matching.kv_layers if recipe.matching else None
    if layers is None or recipe.matching is None:
        return recipe, few
    kept = tuple(layer for layer in layers if layer < depth) or (0,)
    return recipe.model_copy(update={"matching": recipe.matching.model_copy(update={"kv_layers": kept})}), few


def filled(method: nn.Module, device: torch.device) -> nn.Module:
    """The same on a device, with numbers that mean nothing; those that gate what is learned are as at the start."""
    if isinstance(method, Learner):
        shape = method.decoder.shape
        return Learner(learners.kind(shape)(shape), method.learning).to(device)
    method.to_empty(device=device)
    for p in method.parameters():
        nn.init.normal_(p.data, 0.0 if p.ndim == 2 else 1.0, 0.02)
    for b in method.buffers():
        b.fill_(1.0)
    return method
