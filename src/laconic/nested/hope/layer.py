"""A self-modifying Titans memory as a layer: vectors in, vectors out, with a state that is a value.

Nested Learning arXiv:2512.24695, section 8. `start` and `advance` are pure; `SelfTitans` holds what training changes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import OuterGradient
from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype, split_heads
from laconic.nested.hope.hope_shape import Options, SelfTitansParams, SelfTitansShape
from laconic.nested.hope.memories import SelfModifyingMemories
from laconic.nested.init import half_life_bias, logit, register_parameters, sample_normal, softplus_inverse
from laconic.nested.recurrence.chunked_scan import (
    MAX_SCAN_TOKENS,
    ScanOptions,
    check_inputs,
    scan_chunks,
    scan_in_segments,
)
from laconic.nested.recurrence.memory_cells import Vectors, zero_state
from laconic.nested.recurrence.packing import causal_conv, pack_left, unpack
from laconic.nested.state import LayerState, LinearMemoryState, MLPMemoryState
from laconic.nested.titans.equations import l2_normalize
from laconic.nested.titans.layer import gate_and_project


def build_memories(params: SelfTitansParams, outer_gradient: OuterGradient = "full") -> SelfModifyingMemories:
    """The memories of a layer, in the wide type."""
    return SelfModifyingMemories(
        params.shape, {name: w.to(accumulation_dtype(w.dtype)) for name, w in params.weights.items()}, outer_gradient
    )


def initial_state(params: SelfTitansParams, batch_size: int) -> LayerState:
    """Nothing read: every count 0, every fast weight at its trained start."""
    (shape, w), o = params, params.shape.options
    like = w["o_proj.weight"].detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    tails = (
        {"x": like.new_zeros(batch_size, o.conv_kernel_size - 1, shape.num_heads * shape.head_dim)}
        if o.input_proj == "map"
        else {}
    )
    memory: dict[str, LinearMemoryState | MLPMemoryState] = {}
    for name in build_memories(params).state_groups:
        square = (shape.num_heads, shape.head_dim, shape.head_dim)
        if f"{name}.W1" in w:
            memory[name] = MLPMemoryState(
                *(zero_state(batch_size, tuple(w[f"{name}.{W}"].shape), o.momentum, like) for W in ("W1", "W2"))
            )
        else:
            memory[name] = zero_state(batch_size, square, o.momentum, like)
    return LayerState(conv_tails=tails, memory=memory)


def forward_with_state(
    params: SelfTitansParams,
    state: LayerState,
    x: Float[Tensor, "B T D"],
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
    outer_gradient: OuterGradient = "full",
    truncate_after: int | None = None,
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """What the memory answers to every vector, without the residual, and the state after the last.

    With `learn` False nothing is written and nothing decays; only the convolution moves on. `gradient` says what of
    the outer loss flows through the writes, and never changes a value; `horizon` is in chunks, for "truncated".
    """
    check_inputs("hope", params.shape.width, state, x, attention_mask, outer_gradient, truncate_after)
    if x.shape[1] > MAX_SCAN_TOKENS:
        return scan_in_segments(
            partial(
                forward_with_state,
                params,
                update_weights=update_weights,
                outer_gradient=outer_gradient,
                truncate_after=truncate_after,
            ),
            state,
            x,
            attention_mask,
        )
    rows = pack_left(x, attention_mask)
    heads, q, tails = mix_inputs(params, state, rows.x, rows.lengths)
    memories = build_memories(params, outer_gradient)
    with torch.autocast(x.device.type, enabled=False):
        if update_weights:
            how = ScanOptions(outer_gradient, truncate_after, {}, params.shape.options.activation_checkpointing)
            y, memory = scan_chunks(memories, state.memory, (heads, q), rows.lengths, how)
        else:
            y, memory = memories.read(state.memory, heads, q), state.memory
    y = unpack(gate_and_project(y, rows.x, params.weights), rows.order, attention_mask)
    return y, replace(state, conv_tails=tails, memory=memory)


def mix_inputs(
    params: SelfTitansParams, state: LayerState, x: Float[Tensor, "B T D"], lengths: tuple[int, ...] | None
) -> tuple[Vectors, Vectors, dict[str, Tensor]]:
    """The input of every head, its static query, and the tail of the convolution."""
    (shape, w), o = params, params.shape.options
    dtype, tails = accumulation_dtype(x.dtype), dict(state.conv_tails)
    heads = x.to(dtype)
    if o.input_proj == "map":
        y = F.linear(x, w["mix_proj.weight"]).to(dtype)
        y, tails["x"] = causal_conv(y, state.conv_tails["x"], w["mix_conv.weight"], lengths)
        heads = F.silu(y)
    heads = split_heads(heads, shape.num_heads)
    if o.adaptive_query:
        return heads, heads, tails
    return heads, l2_normalize(split_heads(F.linear(x, w["q_proj.weight"]).to(dtype), shape.num_heads)), tails


class SelfTitans(nn.Module):
    """A self-modifying memory in place of attention: `y, state = layer(x, state, live=live)`.

    Without a state it begins with none of the batch's rows having learned anything. The caller adds the residual.
    """

    def __init__(
        self, width: int, num_heads: int = 4, head_dim: int | None = None, options: Options | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if head_dim is None and (num_heads < 1 or width % num_heads):
            raise UsageError(f"hope: width {width} does not divide by {num_heads} heads; give the width of a head")
        self.shape = SelfTitansShape(width, num_heads, head_dim or width // num_heads, options or Options())
        register_parameters(self, init_weights(self.shape, torch.Generator().manual_seed(seed)))

    @property
    def params(self) -> SelfTitansParams:
        """The shape and the tensors by name, as `start` and `advance` take them."""
        return SelfTitansParams(self.shape, dict(self.named_parameters()))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient = "full",
        truncate_after: int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        params = self.params
        state = initial_state(params, len(x)) if state is None else state
        return forward_with_state(
            params,
            state,
            x,
            attention_mask=attention_mask,
            update_weights=update_weights,
            outer_gradient=outer_gradient,
            truncate_after=truncate_after,
        )


def init_weights(shape: SelfTitansShape, generator: torch.Generator) -> dict[str, Tensor]:
    """What training begins with: projections and starts normal, rows of gates 0 so that their bias alone sets them."""
    o, D, H, E = shape.options, shape.width, shape.num_heads, shape.head_dim
    w: dict[str, Tensor] = {}
    if o.input_proj == "map":
        w["mix_proj.weight"] = sample_normal(generator, H * E, D, std=D**-0.5)
        w["mix_conv.weight"] = sample_normal(generator, H * E, o.conv_kernel_size, std=o.conv_kernel_size**-0.5)
    if not o.adaptive_query:
        w["q_proj.weight"] = sample_normal(generator, H * E, D, std=D**-0.5)
    hidden = o.mlp_width or E
    for name in ("k", "v", "memory", *(("q",) if o.adaptive_query else ())):
        if o.memory_kind == "mlp":
            w[f"{name}.W1"] = sample_normal(generator, H, E, hidden, std=hidden**-0.5)
            w[f"{name}.W2"] = sample_normal(generator, H, hidden, E, std=E**-0.5)
        else:
            w[f"{name}.M"] = sample_normal(generator, H, E, E, std=E**-0.5)
    for group in shape.group_chunk_sizes:
        step = o.projection_lr_init if group == "projections" else o.memory_lr_init
        for name, bias in gate_biases(o, step).items():
            w |= {f"{name}.{group}.weight": torch.zeros(H, E), f"{name}.{group}.bias": torch.full((H,), bias)}
    w["g_proj.weight"] = sample_normal(generator, H * E, D, std=D**-0.5)
    w["norm.weight"] = torch.ones(H * E)
    w["o_proj.weight"] = sample_normal(generator, D, H * E, std=(H * E) ** -0.5)
    return w | (init_window_recall(shape, w) if o.init == "window" else {})


def init_window_recall(shape: SelfTitansShape, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A key as that of the sum of its window, a query as the key of its own token, but for what is not linear in a key.

    So a token that is asked again finds what stood behind it.
    """
    H, E, D, conv = shape.num_heads, shape.head_dim, shape.width, shape.options.conv_kernel_size
    k, one = w.get("k.M"), torch.eye(E)
    M = one if k is None else k + one if shape.options.memory_kind == "affine" else k
    query = (M @ w["mix_proj.weight"].view(H, E, D)).flatten(0, 1)
    return {"mix_conv.weight": torch.full((H * E, conv), conv**-0.5), "q_proj.weight": query}


def gate_biases(o: Options, step_size: float) -> dict[str, float]:
    """Where the gates of a group begin."""
    inverse = softplus_inverse(step_size) if o.lr_form == "softplus" else logit(step_size / o.max_lr, "step")
    found = {"keep": half_life_bias(o.decay_half_life), "step": inverse}
    return found | ({"momentum": logit(o.momentum_init, "momentum_start")} if o.momentum else {})
