"""A self-modifying Titans memory as a layer: vectors in, vectors out, with an immutable state.

Nested Learning arXiv:2512.24695, section 8. The functions are pure; `SelfTitans` holds the trained weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import OuterGradient, SelfModifyingOptions
from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype, split_heads
from laconic.nested.hope.memories import SelfModifyingMemories, SelfTitansParams, SelfTitansShape
from laconic.nested.init import INITIAL_MOMENTUM, half_life_bias, logit, register_parameters, sample_normal
from laconic.nested.recurrence.chunked_scan import (
    MAX_SCAN_TOKENS,
    causal_conv,
    check_inputs,
    get_weights,
    pack_left,
    scan_chunks,
    scan_in_segments,
    unpack,
)
from laconic.nested.recurrence.memory_cells import Vectors, gate_and_project, l2_normalize, zero_state
from laconic.nested.state import LayerState, MemoryState, MLPMemoryState, check_reader


def build_memories(params: SelfTitansParams, outer_gradient: OuterGradient = "full") -> SelfModifyingMemories:
    """Return the memories of a layer, with weights in the accumulation type."""
    weights = {name: w.to(accumulation_dtype(w.dtype)) for name, w in params.weights.items()}
    return SelfModifyingMemories(params.shape, weights, outer_gradient)


def initial_state(params: SelfTitansParams, batch_size: int) -> LayerState:
    shape, w = params
    o = shape.options
    like = w["o_proj.weight"].detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    conv_tails = {"x": like.new_zeros(batch_size, o.conv_kernel_size - 1, shape.num_heads * shape.head_dim)}
    memory: dict[str, MemoryState] = {}
    for name in shape.state_groups:
        if f"{name}.W1" in w:
            shapes = [tuple(w[f"{name}.{W}"].shape) for W in ("W1", "W2")]
            memory[name] = MLPMemoryState(*(zero_state(batch_size, size, o.momentum, like) for size in shapes))
        else:
            memory[name] = zero_state(batch_size, (shape.num_heads, shape.head_dim, shape.head_dim), o.momentum, like)
    return LayerState(conv_tails=conv_tails, memory=memory, readers=shape.label)


def mix_inputs(
    params: SelfTitansParams, state: LayerState, x: Float[Tensor, "B T D"], lengths: tuple[int, ...] | None
) -> tuple[Vectors, Vectors, dict[str, Tensor]]:
    """Return the input of every head, its static query, and the tail of the convolution."""
    shape, w = params
    dtype = accumulation_dtype(x.dtype)
    conv_tails = dict(state.conv_tails)
    y = F.linear(x, w["mix_proj.weight"]).to(dtype)
    y, conv_tails["x"] = causal_conv(y, state.conv_tails["x"], w["mix_conv.weight"], lengths)
    heads = split_heads(F.silu(y), shape.num_heads)
    if shape.options.adaptive_query:
        return heads, heads, conv_tails
    q = split_heads(F.linear(x, w["q_proj.weight"]).to(dtype), shape.num_heads)
    return heads, l2_normalize(q), conv_tails


class SelfTitans(nn.Module):
    """A self-modifying memory in place of attention: `y, state = layer(x, state)`; the caller adds the residual.

    The width of a head is by default the width of the vectors divided by the heads.
    """

    def __init__(
        self,
        width: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        options: SelfModifyingOptions | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if head_dim is None and (num_heads < 1 or width % num_heads):
            raise UsageError(f"hope: width {width} is not divisible by {num_heads} heads; set head_dim")
        options = options or SelfModifyingOptions()
        self.shape = SelfTitansShape(width, num_heads, head_dim or width // num_heads, options)
        register_parameters(self, init_weights(self.shape, torch.Generator().manual_seed(seed)))

    @property
    def params(self) -> SelfTitansParams:
        return SelfTitansParams(self.shape, get_weights(self))

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
        """Read vectors through the memories, which learn from them.

        Arguments, results and errors are those of `CMS.forward`. If `update_weights` is False, nothing is written and
        nothing decays; only the convolution moves on.
        """
        params = self.params
        state = initial_state(params, len(x)) if state is None else state
        check_inputs("hope", params.shape.width, state, x, attention_mask, outer_gradient, truncate_after)
        check_reader(params.shape.label, state)
        if x.shape[1] > MAX_SCAN_TOKENS:
            scan = partial(self.forward, outer_gradient=outer_gradient, truncate_after=truncate_after)
            return scan_in_segments(partial(scan, update_weights=update_weights), state, x, attention_mask)
        tokens = pack_left(x, attention_mask)
        heads, q, conv_tails = mix_inputs(params, state, tokens.x, tokens.lengths)
        memories = build_memories(params, outer_gradient)
        with torch.autocast(x.device.type, enabled=False):
            if update_weights:
                checkpointing = params.shape.options.activation_checkpointing
                inputs = (heads, q)
                y, memory = scan_chunks(memories, state.memory, inputs, tokens.lengths, checkpointing, truncate_after)
            else:
                memory = state.memory
                y = memories.read(memory, heads, q)
        y = unpack(gate_and_project(y, tokens.x, params.weights), tokens.order, attention_mask)
        return y, replace(state, conv_tails=conv_tails, memory=memory)


def init_weights(shape: SelfTitansShape, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the initial weights: projections and starts normal, rows of gates 0 so that their bias alone sets them."""
    o, D, H, E = shape.options, shape.width, shape.num_heads, shape.head_dim
    w = {
        "mix_proj.weight": sample_normal(generator, H * E, D, std=D**-0.5),
        "mix_conv.weight": sample_normal(generator, H * E, o.conv_kernel_size, std=o.conv_kernel_size**-0.5),
    }
    if not o.adaptive_query:
        w["q_proj.weight"] = sample_normal(generator, H * E, D, std=D**-0.5)
    for name in ("k", "v", "memory", *(("q",) if o.adaptive_query else ())):
        if o.memory_kind == "mlp":
            w[f"{name}.W1"] = sample_normal(generator, H, E, E, std=E**-0.5)
            w[f"{name}.W2"] = sample_normal(generator, H, E, E, std=E**-0.5)
        else:
            w[f"{name}.M"] = sample_normal(generator, H, E, E, std=E**-0.5)
    biases = {"keep": half_life_bias(o.decay_half_life), "step": 0.0}  # that of "step" differs between the groups
    if o.momentum:
        biases["momentum"] = logit(INITIAL_MOMENTUM)
    for group in shape.group_chunk_sizes:
        step_size = o.projection_lr_init if group == "projections" else o.memory_lr_init
        biases["step"] = logit(step_size / o.max_lr)
        for name, bias in biases.items():
            w |= {f"{name}.{group}.weight": torch.zeros(H, E), f"{name}.{group}.bias": torch.full((H,), bias)}
    w["g_proj.weight"] = sample_normal(generator, H * E, D, std=D**-0.5)
    w["norm.weight"] = torch.ones(H * E)
    w["o_proj.weight"] = sample_normal(generator, D, H * E, std=(H * E) ** -0.5)
    return w | (init_window_recall(shape, w) if o.init == "window" else {})


def init_window_recall(shape: SelfTitansShape, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return initial weights such that a repeated token recalls what followed it before.

    The convolution sums the window, so a key belongs to the sum of the last tokens. A query is the key of its own token
    alone, up to the nonlinear part of the key's map.
    """
    H, E, D, W = shape.num_heads, shape.head_dim, shape.width, shape.options.conv_kernel_size
    key_map = w.get("k.M", torch.eye(E))
    if "k.M" in w and shape.options.memory_kind == "affine":
        key_map = key_map + torch.eye(E)
    query = (key_map @ w["mix_proj.weight"].view(H, E, D)).flatten(0, 1)
    return {"mix_conv.weight": torch.full((H * E, W), W**-0.5), "q_proj.weight": query}
