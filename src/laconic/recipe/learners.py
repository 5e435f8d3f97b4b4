"""Decoders whose layers learn while they read, as a recipe says: new, on a donor's weights, or as they were made."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from laconic.core.artifact import read_json
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.families import DecoderConfig
from laconic.methods.cms import stack
from laconic.methods.hope_config import FAR, MODEL_TYPE, HopeConfig
from laconic.methods.hope_model import Hope, HopeAttention
from laconic.methods.learner import check_levels
from laconic.methods.learning_settings import Levels, Memory
from laconic.recipe.schema import Model, Recipe


def tables(recipe: Recipe) -> tuple[Memory, Levels]:
    """What a recipe of method hope says of memories and levels."""
    return recipe.memory or Memory(), recipe.levels or Levels()


def made_before(folder: Path | None) -> HopeConfig | None:
    """What a folder holds, where that learns while it reads."""
    if folder is None or read_json(folder / "config.json").get("model_type") != MODEL_TYPE:
        return None
    return HopeConfig.read(folder)


def config_of(folder: Path) -> DecoderConfig:
    """A decoder's sizes as a folder has them, of either kind."""
    shape = made_before(folder)
    return DecoderConfig.read(folder) if shape is None else shape.decoder


def sized(recipe: Recipe, config: DecoderConfig) -> DecoderConfig:
    """The sizes of a new model: without attention it has no heads and no bound on its positions."""
    memory, D = tables(recipe)[0], config.hidden_size
    if memory.mixer == "attention":
        return config
    one = DecoderConfig.small(
        config.family, hidden_size=D, num_attention_heads=1, num_key_value_heads=1, head_dim=D + D % 2,
        num_hidden_layers=config.num_hidden_layers, intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size, max_position_embeddings=FAR,
    )  # fmt: skip
    return replace(one, tie_word_embeddings=config.tie_word_embeddings)


def shaped(recipe: Recipe, config: DecoderConfig, *, donor: bool) -> HopeConfig:
    """What a recipe makes of a decoder's sizes: a donor's levels as `levels.place` says, else all in every layer."""
    memory, levels = tables(recipe)
    heads, L = (memory.heads, memory.head, memory.chunk), config.num_hidden_layers
    if not donor:
        return HopeConfig(config, (levels.chunks,) * L, levels.options, memory.options, *heads, levels.gated)
    placed = tuple(one.chunks for one in stack(L, levels.chunks, levels.place, levels.map))
    return HopeConfig(config, placed, levels.options, memory.options, *heads)


def kind(shape: HopeConfig) -> type[Hope]:
    """The class of a model: with attention or without."""
    return HopeAttention if shape.memory is None else Hope


def new(recipe: Recipe, config: DecoderConfig, seed: int) -> Hope:
    """A model of these sizes, drawn from the seed."""
    shape = shaped(recipe, config, donor=False)
    model = kind(shape)(shape, seed)
    if recipe.model.init == "fan_in":
        draw(model, recipe.model, seed)
    return model


@torch.no_grad()
def draw(model: Hope, how: Model, seed: int) -> None:
    """As `models.draw` has it; what a memory is made of stays as the memory draws it."""
    names, L = model.names, model.config.num_hidden_layers
    generator = torch.Generator().manual_seed(seed)
    maps, ends = model.shape.maps, (names.o.rpartition(".")[2], model.shape.maps[-1])
    for name, p in model.named_parameters():
        module, last = name.removesuffix(".weight"), name.removesuffix(".weight").rpartition(".")[2]
        inside = ".memory." in name or (".mlp." in name and last not in maps)
        if p.ndim != 2 or (inside and last not in ends):
            continue
        std = p.shape[1] ** -0.5
        if module == names.words:
            std = how.init_words
        elif module == names.head:
            std = how.init_head
        elif last in ends:
            std /= math.sqrt(2 * L)
        p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * std)


def learner(recipe: Recipe, decoder: Decoder) -> Decoder:
    """The decoder that a run begins with: of method hope one that learns, or a donor whose MLPs do so from now on.

    Raises `Usage` (2) where the recipe asks for another model than the one there is.
    """
    if recipe.method != "hope":
        if isinstance(decoder, Hope):
            raise Usage(f"method {recipe.method}: the model it begins with learns while it reads; take method hope")
        return decoder
    memory, levels = tables(recipe)
    if isinstance(decoder, Hope):
        grows = grown(levels, decoder.shape)
        decoder = decoder.grown(levels.chunks, levels.grow) if grows else decoder
        check_made(recipe, decoder.shape)
        return decoder
    if memory.mixer != "attention":
        raise Usage(
            f'memory.mixer "{memory.mixer}": a decoder that is given keeps its attention; set mixer = "attention", or '
            "model.family for a new model"
        )
    return HopeAttention.stack(decoder, levels.chunks, levels.place, levels.map, levels.options, levels.grow)


def grown(levels: Levels, shape: HopeConfig) -> bool:
    """Whether a recipe asks for the levels of a model, the same in every layer, and slower ones after them."""
    there = shape.chunks[0]
    alike, more = set(shape.chunks) == {there}, len(levels.chunks) > len(there)
    return levels != Levels() and alike and more and levels.chunks[: len(there)] == there


def check_made(recipe: Recipe, shape: HopeConfig) -> None:
    """Raises `Usage` (2) where tables say something, and something else than what a model was made with."""
    memory, levels = tables(recipe)
    L = shape.decoder.num_hidden_layers
    found = (shape.memory, shape.heads, shape.head, shape.chunk)
    if memory != Memory() and (memory.options, memory.heads, memory.head, memory.chunk) != found:
        raise Usage("[memory] differs from what the model was made with; leave the table out, or take a new model")
    placed = tuple(one.chunks for one in stack(L, levels.chunks, levels.place, levels.map))
    same = shape.chunks in (placed, (levels.chunks,) * L) and (levels.options, levels.gated) == (shape.cms, shape.gated)
    if levels != Levels() and not same:
        raise Usage("[levels] differs from what the model was made with; leave the table out, or take a new model")


def check_reached(recipe: Recipe, tokens: int | None) -> None:
    """Raises `Usage` (2) for a level whose step no outer gradient reaches in rows of so many tokens, lanes or not."""
    if recipe.method == "hope" and recipe.learning is not None and tokens is not None:
        check_levels(tables(recipe)[1], recipe.data.text.tokens if recipe.train.carry else tokens, recipe.learning)


def loaded(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of either kind, whose weights may be trained: memory of their own, not the file's."""
    shape = made_before(folder)
    made = Decoder if shape is None else kind(shape)
    decoder = made.from_pretrained(folder, dtype, device)
    for p in decoder.parameters():
        p.data = p.data.clone()
    return decoder


def sketched(recipe: Recipe, config: DecoderConfig) -> Decoder:
    """The model of a recipe without numbers: call it where tensors are made on meta."""
    if recipe.method != "hope":
        return Decoder(config, seed=None)
    shape = shaped(recipe, config, donor=recipe.model.family is None)
    return kind(shape)(shape, seed=None)
