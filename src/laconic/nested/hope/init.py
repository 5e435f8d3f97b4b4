"""Initial layers of Hope: replaced sublayers, levels copied from donor MLPs, and levels added to a trained model.

Nested Learning arXiv:2512.24695, section 7.3. Symbols: K levels l; theta_0 the start of a level.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from laconic.config.nested import CMSOptions, DonorLayout, TitansOptions, find_chunk_error
from laconic.errors import UsageError
from laconic.generation.config import check_choices
from laconic.models.block import Block
from laconic.models.decoder import Decoder
from laconic.models.init import add_submodule
from laconic.nested.cms.init import init_weights
from laconic.nested.cms.layer import CMS
from laconic.nested.cms.level import CMSShape
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.titans.layer import Titans


class LayerPlacement(NamedTuple):
    """Levels of one layer: their chunk sizes, and the layer whose MLP each starts as, None for a level of zeros."""

    chunk_sizes: tuple[int, ...]
    donor_layers: tuple[int | None, ...]


def place_levels(
    num_layers: int, chunk_sizes: Sequence[int], donor_layout: DonorLayout = "depth"
) -> list[LayerPlacement]:
    """Eq. 7.3a: theta_0 of every level := a pretrained MLP, for each layer of a decoder.

    "depth" keeps each layer's MLP as its only level, fast in shallow layers and slow in deep ones. "grow" keeps it as
    level 0 and adds slower levels with a zero down-projection. "chain" follows the paper: the MLPs of as many layers as
    there are levels follow one another in every layer, so that the result is no longer the donor.
    """
    error = find_chunk_error(chunk_sizes)
    if error:
        raise UsageError(f"cms: {error}")
    check_choices(donor_layout=(donor_layout, DonorLayout))
    K = len(chunk_sizes)
    sizes = tuple(chunk_sizes)
    if donor_layout == "grow":
        return [LayerPlacement(sizes, (n, *[None] * (K - 1))) for n in range(num_layers)]
    if donor_layout == "depth":
        return [LayerPlacement((sizes[n * K // num_layers],), (n,)) for n in range(num_layers)]
    donors = tuple(round(l * (num_layers - 1) / max(K - 1, 1)) for l in range(K))
    return [LayerPlacement(sizes, donors) for _ in range(num_layers)]


def replace_sublayers(block: Block, config: HopeConfig, layer: int, seed: int) -> None:
    names = block.weight_names
    delete_children(block, names.gate, names.up, names.down)
    add_submodule(block, "mlp", CMS(**vars(config.cms_shape(layer)), seed=None))
    if config.memory is None:
        return
    delete_children(block, names.q, names.qkv)
    width = config.decoder.hidden_size
    with torch.device("cpu"):
        if isinstance(config.memory, TitansOptions):
            memory = Titans(width, config.num_heads, config.memory_chunk_size, config.memory, seed + layer)
        else:
            memory = SelfTitans(width, config.num_heads, config.head_dim, config.memory, seed + layer)
        add_submodule(block, "memory", memory)


def delete_children(block: Block, *paths: str | None) -> None:
    """Delete the children of a block that hold the given weights."""
    for path in paths:
        if path is not None and hasattr(block, path.split(".")[0]):
            delattr(block, path.split(".")[0])


def check_growth(options: CMSOptions) -> None:
    """Raise `UsageError` for a chain whose output added levels would erase."""
    if options.residual == "plain" and options.structure != "independent":
        raise UsageError("hope: a zero level erases the output of a chain without residuals; set residual='residual'")


def init_level_weights(config: HopeConfig, layer: int, like: Tensor) -> dict[str, Tensor]:
    """Return the weights of a layer's levels in a new model; independent levels have weight 1 each."""
    generator = torch.Generator().manual_seed(layer)
    weights = init_weights(config.cms_shape(layer), generator, config.decoder.initializer_range)
    weights = {name: w.to(like) for name, w in weights.items()}
    return weights | ({"a": torch.ones_like(weights["a"])} if "a" in weights else {})


def zero_level(weights: dict[str, Tensor], shape: CMSShape, l: int) -> None:
    """Set the last map of level `l` to zero, so that the level adds nothing."""
    for kind in ("weight", "bias") if shape.has_bias else ("weight",):
        name = f"levels.{l}.{shape.projections[-1]}.{kind}"
        weights[name] = torch.zeros_like(weights[name])


def copy_donor_weights(
    config: HopeConfig, layer: int, placement: LayerPlacement, decoder: Decoder
) -> dict[str, Tensor]:
    """Return the weights of a layer's levels: the donors' MLPs, and new values for what those do not have.

    The first level that starts as the layer's own MLP shares its tensors; all others are copies.
    """
    shape = config.cms_shape(layer)
    roles = ("gate", "up", "down") if config.decoder.gated_mlp else ("up", "down")
    weights = init_level_weights(config, layer, cast(Tensor, decoder.token_embedding.weight))
    for l, donor in enumerate(placement.donor_layers):
        if donor is None:
            zero_level(weights, shape, l)
            continue
        is_shared = donor == layer and donor not in placement.donor_layers[:l]
        block = decoder.layers[donor]
        assert isinstance(block, Block)
        for name, role in zip(shape.projections, roles, strict=True):
            for kind, p in block.submodule(role).named_parameters(recurse=False):
                weights[f"levels.{l}.{name}.{kind}"] = p if is_shared else p.detach().clone()
    return to_named_parameters(decoder, layer, weights)


def init_added_levels(config: HopeConfig, layer: int, model: Decoder, K: int) -> dict[str, Tensor]:
    """Return the weights of a layer's levels from K on, whose outputs are zero, and the weights of all outputs."""
    shape = config.cms_shape(layer)
    weights = init_level_weights(config, layer, cast(Tensor, model.token_embedding.weight))
    for l in range(K, len(shape.chunk_sizes)):
        zero_level(weights, shape, l)
    if "a" in weights:
        weights["a"] = torch.cat([model.layers[layer].get_parameter("mlp.a").detach(), weights["a"][K:]])
    added = {name: w for name, w in weights.items() if name == "a" or int(name.split(".")[1]) >= K}
    return to_named_parameters(model, layer, added)


def to_named_parameters(decoder: Decoder, layer: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a layer's levels as parameters, by their names in the model."""
    prefix = f"{decoder.weight_names.layers}.{layer}.mlp."
    return {prefix + name: w if isinstance(w, nn.Parameter) else nn.Parameter(w) for name, w in weights.items()}
