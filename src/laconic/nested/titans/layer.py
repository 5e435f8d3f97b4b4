"""A Titans memory as a layer: vectors in, vectors out, with an immutable state.

Titans arXiv:2501.00663. The functions are pure; the module `Titans` holds the weights and calls them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import OuterGradient, TitansOptions
from laconic.models.attention import accumulation_dtype
from laconic.nested.init import INITIAL_MOMENTUM, half_life_bias, logit, register_parameters, sample_normal
from laconic.nested.recurrence.chunked_scan import (
    MAX_SCAN_TOKENS,
    PackedTokens,
    check_inputs,
    get_weights,
    pack_left,
    scan_chunks,
    scan_in_segments,
    to_ints,
    token_counts,
    unpack,
)
from laconic.nested.recurrence.gated_delta_rule import decay_gate
from laconic.nested.recurrence.memory_cells import MemoryStart, MLPStart, UpdateRule, gate_and_project, zero_state
from laconic.nested.state import LayerState, MemoryState, MLPMemoryState, check_reader
from laconic.nested.titans.equations import (
    MEMORY,
    PROJECTION_NAMES,
    TitansMemory,
    TitansParams,
    TitansShape,
    project_qkv,
    read_memory,
)


def initial_state(params: TitansParams, batch_size: int) -> LayerState:
    shape, w = params
    o = shape.options
    like = w["q_proj.weight"].detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    conv_tails = {name: like.new_zeros(batch_size, o.conv_kernel_size - 1, shape.width) for name in PROJECTION_NAMES}
    start = memory_start(w)
    memory: MemoryState
    if isinstance(start, MLPStart):
        memory = MLPMemoryState(*(zero_state(batch_size, tuple(x.shape), o.momentum, like) for x in start))
    else:
        memory = zero_state(batch_size, tuple(cast(Tensor, start).shape), o.momentum, like)
    return LayerState(conv_tails=conv_tails, memory={MEMORY: memory}, readers=shape.label)


def memory_start(w: Mapping[str, Tensor], name: str = MEMORY) -> MemoryStart:
    """Return the trained start of a memory in the accumulation type."""
    if f"{name}.M" in w:
        return w[f"{name}.M"].to(accumulation_dtype(w[f"{name}.M"].dtype))
    W1, W2 = (w[f"{name}.{part}"] for part in ("W1", "W2"))
    return MLPStart(W1.to(accumulation_dtype(W1.dtype)), W2.to(accumulation_dtype(W2.dtype)))


def prepend_persistent(
    w: Mapping[str, Tensor], state: LayerState, x: Tensor, attention_mask: Tensor | None, persistent: bool
) -> tuple[Tensor, Tensor | None]:
    """Eq. 19: learned vectors before the first valid token of every row that has read nothing yet."""
    new_rows = [row for row, n in enumerate(to_ints(token_counts(state.memory))) if n == 0] if persistent else []
    if not new_rows:
        return x, attention_mask
    N, B = w["persistent"].shape[0], len(x)
    valid = x.new_ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
    is_new = torch.zeros(B, dtype=torch.bool, device=x.device)
    is_new[new_rows] = True
    prefix_valid = (is_new & valid.any(1))[:, None].expand(B, N)
    prefix = w["persistent"].to(x.dtype).expand(B, N, -1)
    return torch.cat([prefix, x], 1), torch.cat([prefix_valid, valid], 1)


def compute_gates(params: TitansParams, tokens: PackedTokens) -> tuple[Tensor, ...]:
    """Return decay, step size and momentum of every head and token."""
    w, o = params.weights, params.shape.options
    x = tokens.x.to(accumulation_dtype(tokens.x.dtype))
    names = ("keep", "step", "momentum") if o.momentum else ("keep", "step")
    decay, step_size, *momentum = (
        F.linear(x, w[f"{name}.weight"].to(x.dtype), w[f"{name}.bias"].to(x.dtype)).mT for name in names
    )
    return (decay_gate(decay), step_size.sigmoid(), *map(decay_gate, momentum))


def build_memory(params: TitansParams, outer_gradient: OuterGradient) -> TitansMemory:
    """Return the memory of the layer; a `max_memory_norm` of 0 sets no bound."""
    shape, o = params.shape, params.shape.options
    rule = UpdateRule("zero", o.read_at, outer_gradient)
    return TitansMemory(shape.chunk_size, memory_start(params.weights), rule, o.loss_factor, o.max_memory_norm or None)


class Titans(nn.Module):
    """A Titans memory in place of attention, for any vectors: `y, state = memory(x, state)`.

    Args:
        width: D, the width of the vectors.
        num_heads: Heads that the width is split into.
        chunk_size: Tokens between two chunk boundaries.
        options: Options of the memory.
        seed: Seed of the initial weights.

    Examples:
        >>> import torch, laconic
        >>> memory = laconic.Titans(32, num_heads=2, chunk_size=4)
        >>> y, state = memory(torch.randn(1, 10, 32))
        >>> y.shape
        torch.Size([1, 10, 32])
    """

    def __init__(
        self, width: int, num_heads: int = 4, chunk_size: int = 64, options: TitansOptions | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.shape = TitansShape(width, num_heads, chunk_size, options or TitansOptions())
        register_parameters(self, init_weights(self.shape, torch.Generator().manual_seed(seed)))

    @property
    def params(self) -> TitansParams:
        return TitansParams(self.shape, get_weights(self))

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
        """Read vectors through the memory, which learns from them.

        Arguments, results and errors are those of `CMS.forward`. If `update_weights` is False, nothing is written and
        nothing decays; only the convolutions move on.
        """
        params = self.params
        shape, w = params
        state = initial_state(params, len(x)) if state is None else state
        check_inputs("titans", shape.width, state, x, attention_mask, outer_gradient, truncate_after)
        check_reader(shape.label, state)
        T = x.shape[1]
        if T > MAX_SCAN_TOKENS:
            scan = partial(self.forward, outer_gradient=outer_gradient, truncate_after=truncate_after)
            return scan_in_segments(partial(scan, update_weights=update_weights), state, x, attention_mask)
        has_persistent = update_weights and shape.options.num_persistent_tokens > 0
        x, attention_mask = prepend_persistent(w, state, x, attention_mask, has_persistent)
        tokens = pack_left(x, attention_mask)
        qkv = project_qkv(tokens.x, w, state.conv_tails, shape.num_heads, tokens.lengths)
        conv_tails = {**state.conv_tails, **qkv.conv_tails}
        with torch.autocast(x.device.type, enabled=False):
            chunked = build_memory(params, outer_gradient)
            if update_weights:
                inputs = (*qkv[:3], *compute_gates(params, tokens))
                checkpointing = shape.options.activation_checkpointing
                y, memory = scan_chunks(chunked, state.memory, inputs, tokens.lengths, checkpointing, truncate_after)
            else:
                memory = state.memory
                y = read_memory(chunked.start, memory[MEMORY], qkv.q, chunked.rule)
        y = unpack(gate_and_project(y, tokens.x, w), tokens.order, attention_mask)
        return y[:, y.shape[1] - T :], replace(state, conv_tails=conv_tails, memory=memory)


def init_weights(shape: TitansShape, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the initial weights by name.

    Projections and starts are normal, gates have zero weights so that their bias alone sets them, and queries equal
    keys. A key's convolution sums its window; a query's and a value's take their own token. A repeated token then
    recalls what followed it, which random convolutions learn in some runs only.
    """
    o, D, E = shape.options, shape.width, shape.head_dim
    w = {f"{name}_proj.weight": sample_normal(generator, D, D, std=D**-0.5) for name in ("k", "v", "g", "o")}
    w["q_proj.weight"] = w["k_proj.weight"].clone()
    W = o.conv_kernel_size
    last_tap = torch.eye(W)[-1].repeat(D, 1)
    w["q_conv.weight"] = last_tap
    w["v_conv.weight"] = last_tap.clone()
    w["k_conv.weight"] = torch.full((D, W), W**-0.5)
    biases = {"keep": half_life_bias(o.decay_half_life), "step": logit(o.initial_lr(shape.chunk_size))}
    if o.momentum:
        biases["momentum"] = logit(INITIAL_MOMENTUM)
    for name, bias in biases.items():
        w |= {f"{name}.weight": torch.zeros(shape.num_heads, D), f"{name}.bias": torch.full((shape.num_heads,), bias)}
    if o.memory_depth == 1:
        w[f"{MEMORY}.M"] = sample_normal(generator, shape.num_heads, E, E, std=E**-0.5)
    else:
        hidden = o.mlp_width or E
        w[f"{MEMORY}.W1"] = sample_normal(generator, shape.num_heads, E, hidden, std=hidden**-0.5)
        w[f"{MEMORY}.W2"] = sample_normal(generator, shape.num_heads, hidden, E, std=E**-0.5)
    w["norm.weight"] = torch.ones(D)
    if o.num_persistent_tokens:
        w["persistent"] = sample_normal(generator, o.num_persistent_tokens, D, std=1.0)
    return w
