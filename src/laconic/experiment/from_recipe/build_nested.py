"""Build the nested models of a recipe: new, from a pretrained donor, or as saved."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from laconic.config.nested import CMSConfig, CMSOptions, MixerConfig, OuterGradient
from laconic.config.recipe import ModelConfig, Recipe
from laconic.errors import UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.config import MODEL_TYPE, HopeConfig, attention_free_decoder
from laconic.nested.hope.init import place_levels
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.storage.strict_json import read_foreign_json


def nested_options(recipe: Recipe) -> tuple[MixerConfig, CMSConfig]:
    """Return mixer and CMS tables of a recipe, by default empty ones."""
    return recipe.mixer or MixerConfig(), recipe.cms or CMSConfig()


def read_saved_config(folder: Path | None) -> HopeConfig | None:
    """Return the configuration of a saved nested model, or None for another folder."""
    if folder is None or read_foreign_json(folder / "config.json").get("model_type") != MODEL_TYPE:
        return None
    return HopeConfig.from_folder(folder)


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Return the decoder configuration of a folder with a nested or plain model."""
    shape = read_saved_config(folder)
    return DecoderConfig.from_folder(folder) if shape is None else shape.decoder


def adapt_config(recipe: Recipe, config: DecoderConfig) -> DecoderConfig:
    """Return the sizes of a new model; without attention it has no heads and no limit of positions."""
    if nested_options(recipe)[0].kind == "attention":
        return config
    sizes = (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.intermediate_size)
    decoder = attention_free_decoder(config.family, *sizes)
    return replace(decoder, tie_word_embeddings=config.tie_word_embeddings)


def place_chunk_sizes(levels: CMSConfig, num_layers: int) -> tuple[tuple[int, ...], ...]:
    placements = place_levels(num_layers, levels.chunk_sizes, levels.donor_layout)
    return tuple(placement.chunk_sizes for placement in placements)


def model_class(shape: HopeConfig) -> type[Hope]:
    return HopeAttention if shape.memory is None else Hope


def create_decoder(recipe: Recipe, config: DecoderConfig, seed: int | None) -> Decoder:
    """Build the decoder or nested model of a recipe with random weights; seed None is for `torch.device("meta")`."""
    if recipe.method != "hope":
        return Decoder(config, seed=seed)
    memory, levels = nested_options(recipe)
    heads = (memory.num_heads, memory.head_dim, memory.chunk_size)
    L = config.num_hidden_layers
    if recipe.model.family is None:  # a donor
        shape = HopeConfig(config, place_chunk_sizes(levels, L), levels.options, memory.options, *heads)
    else:
        sizes = (levels.chunk_sizes,) * L
        shape = HopeConfig(config, sizes, levels.options, memory.options, *heads, levels.gated_mlp)
    return model_class(shape)(shape, seed)


@torch.no_grad()
def init_fan_in(decoder: Decoder, config: ModelConfig, seed: int) -> None:
    """Initialise matrices with std 1/sqrt(fan_in), divided by sqrt(2 L) at the end of a residual branch.

    Parameters of memories keep their own initialisation.
    """
    names = decoder.weight_names
    L = decoder.config.num_hidden_layers
    is_nested = isinstance(decoder, Hope)
    generator = torch.Generator().manual_seed(seed)
    maps = decoder.hope_config.mlp_projections if isinstance(decoder, Hope) else (last_part(names.down),)
    ends = (last_part(names.o), maps[-1])
    for name, p in decoder.named_parameters():
        module = name.removesuffix(".weight")
        last = last_part(module)
        is_inside = is_nested and (".memory." in name or (".mlp." in name and last not in maps))
        if p.ndim != 2 or (is_inside and last not in ends):
            continue
        std = p.shape[1] ** -0.5
        if module in (names.token_embedding, names.position_embedding):
            std = config.embedding_init_std
        elif module == names.head:
            std = config.head_init_std
        elif last in ends:
            std /= math.sqrt(2 * L)
        p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * std)


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def prepare_decoder(recipe: Recipe, decoder: Decoder) -> Decoder:
    """Return the decoder that a run starts with: a nested model, made from a donor if necessary, for method hope."""
    if recipe.method != "hope":
        if isinstance(decoder, Hope):
            raise UsageError(f"method {recipe.method}: the initial model is a nested model; use method hope")
        return decoder
    memory, levels = nested_options(recipe)
    if isinstance(decoder, Hope):
        grows = asks_for_growth(levels, decoder.hope_config)
        decoder = decoder.add_levels(levels.chunk_sizes) if grows else decoder
        check_same_options(recipe, decoder.hope_config)
        return decoder
    if memory.kind != "attention":
        raise UsageError(
            f'mixer.kind "{memory.kind}": a pretrained decoder keeps its attention; set mixer.kind = "attention", or '
            "model.family for a new model"
        )
    return HopeAttention.from_decoder(decoder, levels.chunk_sizes, levels.donor_layout, levels.options)


def asks_for_growth(levels: CMSConfig, shape: HopeConfig) -> bool:
    """Return whether a recipe has the levels of a model (equal in every layer) and slower ones after them."""
    base_chunk_sizes = shape.chunk_sizes[0]
    alike = set(shape.chunk_sizes) == {base_chunk_sizes}
    more = len(levels.chunk_sizes) > len(base_chunk_sizes)
    return levels != CMSConfig() and alike and more and levels.chunk_sizes[: len(base_chunk_sizes)] == base_chunk_sizes


def check_same_options(recipe: Recipe, shape: HopeConfig) -> None:
    """Raise UsageError if the recipe's tables differ from the options of the given model."""
    memory, levels = nested_options(recipe)
    L = shape.decoder.num_hidden_layers
    actual = (shape.memory, shape.num_heads, shape.head_dim, shape.memory_chunk_size)
    if memory != MixerConfig() and (memory.options, memory.num_heads, memory.head_dim, memory.chunk_size) != actual:
        raise UsageError("[mixer] differs from the given model; remove the table, or start from another model")
    has_same_sizes = shape.chunk_sizes in (place_chunk_sizes(levels, L), (levels.chunk_sizes,) * L)
    is_same = has_same_sizes and (levels.options, levels.gated_mlp) == (shape.cms, shape.gated_mlp)
    if levels != CMSConfig() and not is_same:
        raise UsageError("[cms] differs from the given model; remove the table, or start from another model")


def check_levels_trainable(recipe: Recipe, tokens: int | None) -> None:
    """Raise UsageError if parts of levels or memories would get no outer gradient in rows of `tokens`."""
    loop = recipe.inner_loop
    if recipe.method != "hope" or loop is None or loop.allow_untrained_level or not loop.enabled:
        return
    mixer, levels = nested_options(recipe)
    remedy = "or set inner_loop.allow_untrained_level = true"
    untrained = find_untrained_weights(mixer, levels, loop.outer_gradient)
    if untrained:
        raise UsageError(
            f"inner_loop.outer_gradient: {loop.outer_gradient!r} trains nothing of {' and '.join(untrained)}; use "
            f'"full", or "truncated" with truncate_after, {remedy}'
        )
    row_tokens = recipe.data.text.row_tokens if recipe.train.stateful else tokens
    slow = next((l for l, C in enumerate(levels.chunk_sizes) if tokens is not None and (row_tokens or 0) <= C), None)
    if slow is not None and levels.initial_inner_lr:
        raise UsageError(
            f"cms.chunk_sizes: level {slow} has chunk size {levels.chunk_sizes[slow]}, but a row has only {row_tokens} "
            f"tokens, so no gradient reaches its inner learning rate; use longer rows or smaller chunks, {remedy}"
        )


def find_untrained_weights(mixer: MixerConfig, cms: CMSOptions, gradient: OuterGradient) -> list[str]:
    """Return the weights of levels and memories that an outer gradient of this kind does not reach."""
    weights: list[str] = []
    if gradient in ("full", "truncated"):
        return weights
    if cms.initial_inner_lr and cms.inner_objective == "associative":
        weights.append("what levels with inner_objective 'associative' learn by")
    options = mixer.self_modifying
    if mixer.kind == "self_modifying" and options.adaptive_names and options.gate_groups == 2:
        weights.append("gates of the adaptive projections")
    return weights


def load_decoder(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load a nested or plain checkpoint; its fingerprint is that of the weights in `dtype`, not of those on disk."""
    shape = read_saved_config(folder)
    decoder_class = Decoder if shape is None else model_class(shape)
    decoder = decoder_class.from_pretrained(folder, dtype, device)
    decoder._cached_fingerprint = None  # pyright: ignore[reportPrivateUsage]
    return decoder
