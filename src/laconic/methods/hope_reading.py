"""Vectors through the layers of a Hope: a memory or attention, then the levels of a continuum memory.

Nested Learning arXiv:2512.24695, 94 to 97; norms and residuals are the decoder's. A pass takes the state of every layer
and gives the new one; what the levels learn of the task is not here but in `hope_task.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core import places
from laconic.core.block import Block, Frame
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.state import Layer
from laconic.methods import cms_reading
from laconic.methods.cms_layer import CMS
from laconic.methods.cms_levels import Notes, Way
from laconic.methods.hope_layer import SelfTitans
from laconic.methods.titans_layer import Titans

Vectors = Float[Tensor, "B T D"]
Part = Callable[[Tensor, Layer], tuple[Tensor, Layer]]


@dataclass(frozen=True)
class Pass:
    """What all layers of one reading share; `notes` of each layer where errors are to be taken of it."""

    live: Bool[Tensor, "B T"] | None
    learn: bool
    way: Way
    frame: Frame | None = None
    places: tuple[Tensor, Tensor] | None = None
    notes: tuple[Notes, ...] | None = None


class Found(NamedTuple):
    """What a reading gives: vectors after the last layer, the layers, and per layer what each level read."""

    x: Tensor
    layers: tuple[Layer, ...]
    inputs: list[list[Tensor]]
    between: list[Tensor]


def block(x: Vectors, layer: Layer, mix: Part, feed: Part) -> tuple[Vectors, Layer]:
    """Eq. 97: r = x + SelfTitans(norm x), then r + CMS(norm r); in Hope-Attention the first is attention."""
    y, layer = mix(x, layer)
    r = x + y
    y, layer = feed(r, layer)
    return r + y, layer


def through(blocks: list[Block], x: Vectors, layers: tuple[Layer, ...], how: Pass) -> Found:
    """Every layer in order."""
    made: list[Layer] = []
    inputs: list[list[Tensor]] = []
    between: list[Tensor] = []
    for n, (part, layer) in enumerate(zip(blocks, layers, strict=True)):
        between.append(x)
        notes = None if how.notes is None else how.notes[n]
        x, layer = block(x, layer, partial(mixed, part, how), partial(fed, part, how, notes, inputs))
        made.append(layer)
    return Found(x, tuple(made), inputs, between)


def mixed(part: Block, how: Pass, x: Vectors, layer: Layer) -> tuple[Vectors, Layer]:
    """The first half of a block, before its residual."""
    y = part.part("norm1")(x)
    memory = dict(part.named_children()).get("memory")
    if isinstance(memory, SelfTitans | Titans):
        y, layer = memory(y, layer, live=how.live, learn=how.learn, gradient=how.way.gradient, horizon=how.way.horizon)
    else:
        y, layer = attended(part, how, y, layer)
    return dropped(part, y), layer


def attended(part: Block, how: Pass, y: Vectors, layer: Layer) -> tuple[Vectors, Layer]:
    """Attention on the layer's own cache."""
    held = layer.cache
    assert held is not None
    assert how.frame is not None
    assert how.places is not None
    past = (held.keys[0], held.values[0]) if held.S else None
    out, k, v = part.attention(y, past, how.frame)
    return out, replace(layer, cache=Cache((k,), (v,), *how.places))


def fed(
    part: Block, how: Pass, notes: Notes | None, inputs: list[list[Tensor]], r: Vectors, layer: Layer
) -> tuple[Vectors, Layer]:
    """The second half of a block, before its residual: the levels as they stand, or learning what is their own."""
    levels = part.get_submodule("mlp")
    assert isinstance(levels, CMS)
    y = part.part("norm2")(r)
    params = levels.params
    if how.learn and params.shape.options.inner == "associative" and not params.shape.still:
        y, layer = cms_reading.advance(
            params, layer, y, live=how.live, gradient=how.way.gradient, horizon=how.way.horizon
        )
    else:
        y, read = cms_reading.answer(params, cms_reading.levels_of(layer), y, notes)
        inputs.append(read)
    return dropped(part, y), layer


def dropped(part: Block, y: Vectors) -> Vectors:
    """What dropout leaves in training."""
    share = part.config.dropout.residual if part.training else 0.0
    return F.dropout(y, share) if share else y


def read(
    model: Decoder,
    vectors: Vectors,
    layers: tuple[Layer, ...],
    *,
    live: Bool[Tensor, "B T"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
    bias: Float[Tensor, "#B #T #P"] | None = None,
    learn: bool = True,
    way: Way | None = None,
    notes: tuple[Notes, ...] | None = None,
    twice: bool = False,
) -> tuple[Vectors, Found]:
    """One pass over a model whose blocks are those of a Hope: the vectors after the final norm, and what was found.

    `twice` says that the gradients of this pass are to have gradients, which fused attention has not.
    """
    blocks = [part for part in model.blocks if isinstance(part, Block)]
    how = Pass(live, learn, way or Way(), notes=notes)
    if layers[0].cache is not None:
        held = layers[0].cache
        whole = live is None and held.S == 0
        alive = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device) if live is None else live
        shared = whole and positions is None
        if positions is None:
            positions = places.default_positions(alive, held.positions, held.live)
        at = torch.cat([held.positions, positions], 1), torch.cat([held.live, alive], 1)
        whole = whole or bool(at[1].all())
        frame = model.frame(*at, held.S, bias, vectors.dtype, whole=whole, eager=twice, shared=shared)
        frame = frame._replace(backend="eager") if twice else frame
        how = replace(how, frame=frame, places=at)
        vectors = model.placed(vectors, positions)
    found = through(blocks, vectors, layers, how)
    return model.final_norm(found.x), found


def kept(want: tuple[str, ...], vectors: Tensor, found: Found, hidden: Tensor) -> dict[str, Tensor]:
    """The stages asked for. Raises `Usage` (2) for one that is not kept here."""
    have = {"embed": vectors, "final_norm": hidden, f"hidden.{len(found.between)}": hidden}
    have |= {f"hidden.{n}": x for n, x in enumerate(found.between)}
    odd = next((name for name in want if name not in have), None)
    if odd is not None:
        raise Usage(
            f"hope: stage {odd} is not kept; there are embed, hidden.0 to hidden.{len(found.between)}, final_norm"
        )
    return {name: have[name] for name in want}
