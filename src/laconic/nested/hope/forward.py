"""Forward pass of the layers of Hope: a memory or attention, then the levels of a continuum memory system.

Nested Learning arXiv:2512.24695, Eqs. 94 to 97; norms and residuals are the decoder's. A pass takes the state of every
layer and returns the new one. Updates from the next token's loss are in `task_updates.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.block import Block, ForwardContext, build_context
from laconic.models.cache import KVCache
from laconic.models.cache_slots import default_position_ids
from laconic.models.decoder import Decoder
from laconic.nested.cms.layer import CMS, forward_levels, require_levels
from laconic.nested.cms.level import GradientMode, LinearRecords
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.state import LayerState
from laconic.nested.titans.layer import Titans

Vectors = Float[Tensor, "B T D"]
FULL_GRADIENTS = GradientMode()
Sublayer = Callable[[Tensor, LayerState], tuple[Tensor, LayerState]]


@dataclass(frozen=True)
class ForwardOptions:
    """What all layers of one pass share.

    Attributes:
        update_weights: Whether memories, and levels with the associative objective, learn.
        key_positions: Positions and validity mask of all cache slots after the pass.
        records: One dictionary per layer, to which the inputs and outputs of its linear maps are written.
        double_backward: Whether gradients of this pass are differentiated, which fused attention does not support.
    """

    attention_mask: Bool[Tensor, "B T"] | None = None
    update_weights: bool = True
    gradient_mode: GradientMode = FULL_GRADIENTS
    context: ForwardContext | None = None
    key_positions: tuple[Tensor, Tensor] | None = None
    records: tuple[LinearRecords, ...] | None = None
    double_backward: bool = False


class LayerOutputs(NamedTuple):
    """New states, inputs of each layer's levels, and inputs of each layer."""

    layers: list[LayerState]
    level_inputs: list[list[Tensor]]
    hidden_states: list[Tensor]


def hope_block(x: Vectors, layer: LayerState, mix: Sublayer, feed_forward: Sublayer) -> tuple[Vectors, LayerState]:
    """Eq. 97: r = x + SelfTitans(norm x), then r + CMS(norm r); in Hope-Attention the first is attention."""
    y, layer = mix(x, layer)
    r = x + y
    y, layer = feed_forward(r, layer)
    return r + y, layer


def apply_mixer(block: Block, options: ForwardOptions, x: Vectors, layer: LayerState) -> tuple[Vectors, LayerState]:
    """Run the memory or attention of a block, before its residual."""
    y = block.submodule("norm1")(x)
    memory = dict(block.named_children()).get("memory")
    if isinstance(memory, SelfTitans | Titans):
        mode = options.gradient_mode._asdict()
        y, layer = memory(
            y, layer, attention_mask=options.attention_mask, update_weights=options.update_weights, **mode
        )
        return apply_dropout(block, y), layer
    cache = layer.cache
    assert cache is not None
    assert options.context is not None
    assert options.key_positions is not None
    past = (cache.keys[0], cache.values[0]) if cache.S else None
    y, k, v = block.self_attention(y, past, options.context)
    return apply_dropout(block, y), replace(layer, cache=KVCache((k,), (v,), *options.key_positions))


def apply_feed_forward(
    block: Block,
    options: ForwardOptions,
    records: LinearRecords | None,
    level_inputs: list[list[Tensor]],
    r: Vectors,
    layer: LayerState,
) -> tuple[Vectors, LayerState]:
    """Run the levels of a block, before its residual; with the associative objective they learn."""
    levels = block.get_submodule("mlp")
    assert isinstance(levels, CMS)
    y = block.submodule("norm2")(r)
    is_associative = levels.shape.options.inner_objective == "associative"
    if options.update_weights and is_associative and not levels.shape.is_frozen:
        y, layer = levels(y, layer, attention_mask=options.attention_mask, **options.gradient_mode._asdict())
    else:
        y, inputs = forward_levels(levels.params, require_levels(layer), y, records)
        level_inputs.append(inputs)
    return apply_dropout(block, y), layer


def apply_dropout(block: Block, y: Vectors) -> Vectors:
    rate = block.config.dropout.residual if block.training else 0.0
    return F.dropout(y, rate) if rate else y


def forward_pass(
    model: Decoder,
    inputs_embeds: Vectors,
    layers: Sequence[LayerState],
    options: ForwardOptions,
    position_ids: Int[Tensor, "B T"] | None = None,
    attention_bias: Float[Tensor, "#B #T #P"] | None = None,
) -> tuple[Vectors, LayerOutputs]:
    """Run the layers of a Hope model once; return the hidden states after the final norm, and the layers' outputs.

    Other arguments are those of `Hope.forward`; masks and positions of attention are added to the options.
    """
    cache, attention_mask = layers[0].cache, options.attention_mask
    if cache is not None:
        all_valid = attention_mask is None and cache.S == 0
        shared_positions = all_valid and position_ids is None
        if attention_mask is None:
            attention_mask = torch.ones(inputs_embeds.shape[:2], dtype=torch.bool, device=inputs_embeds.device)
        if position_ids is None:
            position_ids = default_position_ids(attention_mask, cache.positions, cache.valid)
        positions = torch.cat([cache.positions, position_ids], 1)
        valid = torch.cat([cache.valid, attention_mask], 1)
        context = build_context(
            model.config,
            positions[:1] if shared_positions else positions,
            valid,
            cache.S,
            attention_bias,
            inputs_embeds.dtype,
            backend="eager" if options.double_backward else model.attn_implementation,
            all_valid=all_valid or bool(valid.all()),
            needs_visible=False,
        )
        options = replace(options, context=context, key_positions=(positions, valid))
        inputs_embeds = model.add_positions(inputs_embeds, position_ids)
    blocks = [block for block in model.layers if isinstance(block, Block)]
    x = inputs_embeds
    new_layers: list[LayerState] = []
    level_inputs: list[list[Tensor]] = []
    hidden_states: list[Tensor] = []
    for n, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
        hidden_states.append(x)
        records = None if options.records is None else options.records[n]
        feed_forward = partial(apply_feed_forward, block, options, records, level_inputs)
        x, layer = hope_block(x, layer, partial(apply_mixer, block, options), feed_forward)
        new_layers.append(layer)
    return model.final_norm(x), LayerOutputs(new_layers, level_inputs, hidden_states)


def collect_activations(
    capture: tuple[str, ...], inputs_embeds: Tensor, outputs: LayerOutputs, hidden_states: Tensor
) -> dict[str, Tensor]:
    """Return the captured activations by name. Raises `UsageError` for one that is not available."""
    L = len(outputs.hidden_states)
    available = {"embed": inputs_embeds, "final_norm": hidden_states, f"hidden.{L}": hidden_states}
    available |= {f"hidden.{n}": x for n, x in enumerate(outputs.hidden_states)}
    unknown = next((name for name in capture if name not in available), None)
    if unknown is not None:
        raise UsageError(f"hope: cannot capture {unknown}; available: embed, hidden.0 to hidden.{L}, final_norm")
    return {name: available[name] for name in capture}
