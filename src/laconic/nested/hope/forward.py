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

from laconic.errors import UsageError
from laconic.models import positions as models_positions
from laconic.models.block import Block, ForwardContext
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.nested.cms import forward as cms_forward
from laconic.nested.cms.layer import CMS
from laconic.nested.cms.level import GradientMode, LinearRecords
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.state import LayerState
from laconic.nested.titans.layer import Titans

Vectors = Float[Tensor, "B T D"]
Sublayer = Callable[[Tensor, LayerState], tuple[Tensor, LayerState]]


@dataclass(frozen=True)
class ForwardOptions:
    """What all layers of one reading share; `notes` of each layer where errors are to be taken of it."""

    attention_mask: Bool[Tensor, "B T"] | None
    update_weights: bool
    gradient_mode: GradientMode
    context: ForwardContext | None = None
    key_positions: tuple[Tensor, Tensor] | None = None
    records: tuple[LinearRecords, ...] | None = None


class LayerOutputs(NamedTuple):
    """What a reading gives: vectors after the last layer, the layers, and per layer what each level read."""

    x: Tensor
    layers: tuple[LayerState, ...]
    level_inputs: list[list[Tensor]]
    hidden_states: list[Tensor]


def hope_block(x: Vectors, layer: LayerState, mix: Sublayer, feed_forward: Sublayer) -> tuple[Vectors, LayerState]:
    """Eq. 97: r = x + SelfTitans(norm x), then r + CMS(norm r); in Hope-Attention the first is attention."""
    y, layer = mix(x, layer)
    r = x + y
    y, layer = feed_forward(r, layer)
    return r + y, layer


def run_layers(
    blocks: list[Block], x: Vectors, layers: tuple[LayerState, ...], options: ForwardOptions
) -> LayerOutputs:
    """Every layer in order."""
    made: list[LayerState] = []
    inputs: list[list[Tensor]] = []
    between: list[Tensor] = []
    for n, (part, layer) in enumerate(zip(blocks, layers, strict=True)):
        between.append(x)
        notes = None if options.records is None else options.records[n]
        x, layer = hope_block(
            x, layer, partial(apply_mixer, part, options), partial(apply_feed_forward, part, options, notes, inputs)
        )
        made.append(layer)
    return LayerOutputs(x, tuple(made), inputs, between)


def apply_mixer(block: Block, options: ForwardOptions, x: Vectors, layer: LayerState) -> tuple[Vectors, LayerState]:
    """The first half of a block, before its residual."""
    y = block.submodule("norm1")(x)
    memory = dict(block.named_children()).get("memory")
    if isinstance(memory, SelfTitans | Titans):
        y, layer = memory(
            y,
            layer,
            live=options.attention_mask,
            learn=options.update_weights,
            gradient=options.gradient_mode.outer_gradient,
            horizon=options.gradient_mode.truncate_after,
        )
    else:
        y, layer = attend(block, options, y, layer)
    return apply_dropout(block, y), layer


def attend(block: Block, options: ForwardOptions, y: Vectors, layer: LayerState) -> tuple[Vectors, LayerState]:
    """Attention on the layer's own cache."""
    held = layer.cache
    assert held is not None
    assert options.context is not None
    assert options.key_positions is not None
    past = (held.keys[0], held.values[0]) if held.S else None
    out, k, v = block.self_attention(y, past, options.context)
    return out, replace(layer, cache=KVCache((k,), (v,), *options.key_positions))


def apply_feed_forward(
    block: Block,
    options: ForwardOptions,
    records: LinearRecords | None,
    level_inputs: list[list[Tensor]],
    r: Vectors,
    layer: LayerState,
) -> tuple[Vectors, LayerState]:
    """The second half of a block, before its residual: the levels as they stand, or learning what is their own."""
    levels = block.get_submodule("mlp")
    assert isinstance(levels, CMS)
    y = block.submodule("norm2")(r)
    params = levels.params
    if options.update_weights and params.shape.options.inner_objective == "associative" and not params.shape.is_frozen:
        y, layer = cms_forward.forward_with_state(
            params,
            layer,
            y,
            attention_mask=options.attention_mask,
            outer_gradient=options.gradient_mode.outer_gradient,
            truncate_after=options.gradient_mode.truncate_after,
        )
    else:
        y, read = cms_forward.forward_levels(params, cms_forward.require_levels(layer), y, records)
        level_inputs.append(read)
    return apply_dropout(block, y), layer


def apply_dropout(block: Block, y: Vectors) -> Vectors:
    """What dropout leaves in training."""
    share = block.config.dropout.residual if block.training else 0.0
    return F.dropout(y, share) if share else y


def forward_pass(
    model: Decoder,
    inputs_embeds: Vectors,
    layers: tuple[LayerState, ...],
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    position_ids: Int[Tensor, "B T"] | None = None,
    attention_bias: Float[Tensor, "#B #T #P"] | None = None,
    update_weights: bool = True,
    gradient_mode: GradientMode | None = None,
    records: tuple[LinearRecords, ...] | None = None,
    double_backward: bool = False,
) -> tuple[Vectors, LayerOutputs]:
    """One pass over a model whose blocks are those of a Hope: the vectors after the final norm, and what was found.

    `twice` says that the gradients of this pass are to have gradients, which fused attention has not.
    """
    blocks = [part for part in model.layers if isinstance(part, Block)]
    how = ForwardOptions(attention_mask, update_weights, gradient_mode or GradientMode(), records=records)
    if layers[0].cache is not None:
        held = layers[0].cache
        whole = attention_mask is None and held.S == 0
        alive = (
            torch.ones(inputs_embeds.shape[:2], dtype=torch.bool, device=inputs_embeds.device)
            if attention_mask is None
            else attention_mask
        )
        shared = whole and position_ids is None
        if position_ids is None:
            position_ids = models_positions.default_position_ids(alive, held.positions, held.valid)
        at = torch.cat([held.positions, position_ids], 1), torch.cat([held.valid, alive], 1)
        whole = whole or bool(at[1].all())
        frame = model.build_context(
            *at,
            held.S,
            attention_bias,
            inputs_embeds.dtype,
            all_valid=whole,
            needs_scores=double_backward,
            shared_positions=shared,
        )
        frame = frame._replace(backend="eager") if double_backward else frame
        how = replace(how, context=frame, key_positions=at)
        inputs_embeds = model.add_positions(inputs_embeds, position_ids)
    found = run_layers(blocks, inputs_embeds, layers, how)
    return model.final_norm(found.x), found


def collect_activations(
    capture: tuple[str, ...], inputs_embeds: Tensor, outputs: LayerOutputs, hidden_states: Tensor
) -> dict[str, Tensor]:
    """The stages asked for. Raises `Usage` (2) for one that is not kept here."""
    have = {"embed": inputs_embeds, "final_norm": hidden_states, f"hidden.{len(outputs.hidden_states)}": hidden_states}
    have |= {f"hidden.{n}": x for n, x in enumerate(outputs.hidden_states)}
    odd = next((name for name in capture if name not in have), None)
    if odd is not None:
        raise UsageError(
            f"hope: stage {odd} is not kept; there are embed, hidden.0 to hidden.{len(outputs.hidden_states)}, final_norm"
        )
    return {name: have[name] for name in capture}
