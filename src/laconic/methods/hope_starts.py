"""What the layers of a Hope begin with: blocks rebuilt, MLPs of donors, and levels added to those there are.

Nested Learning arXiv:2512.24695, section 7.3.
"""

from typing import cast

import torch
from torch import Tensor, nn

from laconic.core.block import Block, plant
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.methods import cms_layer, cms_shape, titans_shape
from laconic.methods.cms import Placed
from laconic.methods.cms_layer import CMS
from laconic.methods.hope_config import HopeConfig
from laconic.methods.hope_layer import SelfTitans
from laconic.methods.learning_settings import Grow
from laconic.methods.titans_layer import Titans


def rebuilt(part: Block, shape: HopeConfig, n: int, seed: int) -> None:
    """A block with levels in the place of its MLP, and a memory in that of attention if the model has one."""
    names = part.names
    for path in (names.gate, names.up, names.down):
        if path is not None and hasattr(part, path.split(".")[0]):
            delattr(part, path.split(".")[0])
    levels = shape.levels(n)
    made = CMS(
        levels.width, levels.hidden, levels.chunks, levels.options, None, act=levels.act, maps=levels.maps,
        bias=levels.bias, eps=levels.eps,
    )  # fmt: skip
    plant(part, "mlp", made)
    if shape.memory is None:
        return
    for path in (names.q, names.qkv):
        if path is not None and hasattr(part, path.split(".")[0]):
            delattr(part, path.split(".")[0])
    with torch.device("cpu"):
        if isinstance(shape.memory, titans_shape.Options):
            memory = Titans(levels.width, shape.heads, shape.chunk, shape.memory, seed + n)
        else:
            memory = SelfTitans(levels.width, shape.heads, shape.head, shape.memory, seed + n)
        plant(part, "memory", memory)


def check_grown(options: cms_shape.Options, grow: Grow) -> None:
    """Raises `Usage` (2) for a chain in which added levels would not leave what the first one makes."""
    if options.order == "slow_first":
        raise Usage("hope: grow keeps the donor's MLP first, and slow_first would run another before it")
    if options.link == "plain" and options.structure != "independent" and grow == "zero":
        raise Usage("hope: a level of zeros in a plain chain wipes out what was before it; take link=residual")


def fresh_levels(shape: HopeConfig, n: int, like: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer's levels as a new memory has them, each weighed by 1 where they stand side by side."""
    found = cms_layer.weights(shape.levels(n), torch.Generator().manual_seed(n), shape.decoder.initializer_range)
    found = {name: w.to(like) for name, w in found.items()}
    return found | ({"a": torch.ones_like(found["a"])} if "a" in found else {})


def emptied(found: dict[str, Tensor], own: cms_shape.Shape, l: int) -> None:
    """Level `l` adds nothing: its last map becomes zeros."""
    for which in ("weight", "bias") if own.bias else ("weight",):
        name = f"levels.{l}.{own.maps[-1]}.{which}"
        found[name] = torch.zeros_like(found[name])


def donated(shape: HopeConfig, n: int, one: Placed, decoder: Decoder) -> dict[str, Tensor]:
    """The tensors of a layer's levels: the donors' MLPs, and what those lack as a new memory has it.

    A layer's own MLP is shared by its first level; all else is copied.
    """
    own = shape.levels(n)
    found = fresh_levels(shape, n, cast(Tensor, decoder.words.weight))
    for l, donor in enumerate(one.donors):
        if donor is None:
            emptied(found, own, l)
            continue
        block, shared = decoder.blocks[donor], donor == n and donor not in one.donors[:l]
        assert isinstance(block, Block)
        for map, role in zip(own.maps, ("gate", "up", "down") if shape.decoder.gated else ("up", "down"), strict=True):
            for which, p in block.part(role).named_parameters(recurse=False):
                found[f"levels.{l}.{map}.{which}"] = p if shared else p.detach().clone()
    return placed_at(decoder, n, found)


def added(shape: HopeConfig, n: int, model: Decoder, K: int, grow: Grow) -> dict[str, Tensor]:
    """The tensors of a layer's levels from number K on: zeros, or copies of the level before; and the shares of all."""
    own, held = shape.levels(n), dict(model.blocks[n].named_parameters())
    found = fresh_levels(shape, n, cast(Tensor, model.words.weight))
    for l in range(K, len(own.chunks)):
        if grow == "zero":
            emptied(found, own, l)
            continue
        for name in found:
            if name.startswith(f"levels.{l}.") and name.split(".")[2] in own.maps:
                found[name] = held[name.replace(f"levels.{l}", f"mlp.levels.{K - 1}")].detach().clone()
    if "a" in found:
        found["a"] = torch.cat([held["mlp.a"].detach(), found["a"][K:]])
    new = {name: w for name, w in found.items() if name == "a" or int(name.split(".")[1]) >= K}
    return placed_at(model, n, new)


def placed_at(decoder: Decoder, n: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """As parameters, by their names in the model."""
    at = f"{decoder.names.blocks}.{n}.mlp."
    return {at + name: w if isinstance(w, nn.Parameter) else nn.Parameter(w) for name, w in found.items()}
