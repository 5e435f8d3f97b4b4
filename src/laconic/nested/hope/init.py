"""What the layers of a Hope begin with: blocks rebuilt, MLPs of donors, and levels added to those there are.

Nested Learning arXiv:2512.24695, section 7.3.
"""

from typing import cast

import torch
from torch import Tensor, nn

from laconic.config.nested import NewLevelInit
from laconic.errors import UsageError
from laconic.models.block import Block, add_submodule
from laconic.models.decoder import Decoder
from laconic.nested.cms import config as cms_config
from laconic.nested.cms import layer as cms_layer
from laconic.nested.cms.equations import LayerPlacement
from laconic.nested.cms.layer import CMS
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.titans import config as titans_config
from laconic.nested.titans.layer import Titans


def replace_sublayers(block: Block, config: HopeConfig, layer: int, seed: int) -> None:
    """A block with levels in the place of its MLP, and a memory in that of attention if the model has one."""
    names = block.weight_names
    for path in (names.gate, names.up, names.down):
        if path is not None and hasattr(block, path.split(".")[0]):
            delattr(block, path.split(".")[0])
    levels = config.cms_shape(layer)
    made = CMS(
        levels.width, levels.intermediate_size, levels.chunk_sizes, levels.options, None, act=levels.act, projections=levels.projections,
        has_bias=levels.has_bias, eps=levels.eps,
    )  # fmt: skip
    add_submodule(block, "mlp", made)
    if config.memory is None:
        return
    for path in (names.q, names.qkv):
        if path is not None and hasattr(block, path.split(".")[0]):
            delattr(block, path.split(".")[0])
    with torch.device("cpu"):
        if isinstance(config.memory, titans_config.Options):
            memory = Titans(levels.width, config.num_heads, config.memory_chunk_size, config.memory, seed + layer)
        else:
            memory = SelfTitans(levels.width, config.num_heads, config.head_dim, config.memory, seed + layer)
        add_submodule(block, "memory", memory)


def check_growth(options: cms_config.Options, new_level_init: NewLevelInit) -> None:
    """Raises `Usage` (2) for a chain in which added levels would not leave what the first one makes."""
    if options.level_order == "slow_first":
        raise UsageError("hope: grow keeps the donor's MLP first, and slow_first would run another before it")
    if options.residual == "plain" and options.structure != "independent" and new_level_init == "zero":
        raise UsageError("hope: a level of zeros in a plain chain wipes out what was before it; take link=residual")


def init_level_weights(config: HopeConfig, layer: int, like: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer's levels as a new memory has them, each weighed by 1 where they stand side by side."""
    found = cms_layer.init_weights(
        config.cms_shape(layer), torch.Generator().manual_seed(layer), config.decoder.initializer_range
    )
    found = {name: w.to(like) for name, w in found.items()}
    return found | ({"a": torch.ones_like(found["a"])} if "a" in found else {})


def zero_level(weights: dict[str, Tensor], shape: cms_config.CMSShape, l: int) -> None:
    """Level `l` adds nothing: its last map becomes zeros."""
    for which in ("weight", "bias") if shape.has_bias else ("weight",):
        name = f"levels.{l}.{shape.projections[-1]}.{which}"
        weights[name] = torch.zeros_like(weights[name])


def copy_donor_weights(
    config: HopeConfig, layer: int, placement: LayerPlacement, decoder: Decoder
) -> dict[str, Tensor]:
    """The tensors of a layer's levels: the donors' MLPs, and what those lack as a new memory has it.

    A layer's own MLP is shared by its first level; all else is copied.
    """
    own = config.cms_shape(layer)
    found = init_level_weights(config, layer, cast(Tensor, decoder.token_embedding.weight))
    for l, donor in enumerate(placement.donor_layers):
        if donor is None:
            zero_level(found, own, l)
            continue
        block, shared = decoder.layers[donor], donor == layer and donor not in placement.donor_layers[:l]
        assert isinstance(block, Block)
        for map, role in zip(
            own.projections, ("gate", "up", "down") if config.decoder.gated_mlp else ("up", "down"), strict=True
        ):
            for which, p in block.submodule(role).named_parameters(recurse=False):
                found[f"levels.{l}.{map}.{which}"] = p if shared else p.detach().clone()
    return to_named_parameters(decoder, layer, found)


def init_added_levels(
    config: HopeConfig, layer: int, model: Decoder, K: int, new_level_init: NewLevelInit
) -> dict[str, Tensor]:
    """The tensors of a layer's levels from number K on: zeros, or copies of the level before; and the shares of all."""
    own, held = config.cms_shape(layer), dict(model.layers[layer].named_parameters())
    found = init_level_weights(config, layer, cast(Tensor, model.token_embedding.weight))
    for l in range(K, len(own.chunk_sizes)):
        if new_level_init == "zero":
            zero_level(found, own, l)
            continue
        for name in found:
            if name.startswith(f"levels.{l}.") and name.split(".")[2] in own.projections:
                found[name] = held[name.replace(f"levels.{l}", f"mlp.levels.{K - 1}")].detach().clone()
    if "a" in found:
        found["a"] = torch.cat([held["mlp.a"].detach(), found["a"][K:]])
    new = {name: w for name, w in found.items() if name == "a" or int(name.split(".")[1]) >= K}
    return to_named_parameters(model, layer, new)


def to_named_parameters(decoder: Decoder, layer: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As parameters, by their names in the model."""
    at = f"{decoder.weight_names.layers}.{layer}.mlp."
    return {at + name: w if isinstance(w, nn.Parameter) else nn.Parameter(w) for name, w in weights.items()}
