"""A Titans memory as a layer: vectors in, vectors out, with a state that is a value.

Titans arXiv:2501.00663; TNT arXiv:2511.07343 for memories that start again and a second one of larger chunks. `start`
and `advance` are pure; `Titans` holds what training changes and calls them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import OuterGradient
from laconic.models.attention import accumulation_dtype
from laconic.nested import state as values
from laconic.nested.init import half_life_bias, logit, register_parameters, sample_normal
from laconic.nested.recurrence.chunked_scan import (
    MAX_SCAN_TOKENS,
    ScanOptions,
    check_inputs,
    scan_chunks,
    scan_in_segments,
    token_counts,
    with_num_tokens,
)
from laconic.nested.recurrence.gated_delta_rule import decay_gate
from laconic.nested.recurrence.memory_cells import MemoryStates, MLPStart, Start, UpdateRule, Vectors, zero_state
from laconic.nested.recurrence.packing import PackedTokens, first_of_chunks, pack_left, to_ints, unpack
from laconic.nested.state import LayerState, LinearMemoryState, MLPMemoryState
from laconic.nested.titans.config import Options, TitansParams, TitansShape
from laconic.nested.titans.equations import PROJECTION_NAMES, TitansMemory, project_qkv, read_memory

NORM_EPS = 1e-6


def initial_state(params: TitansParams, batch_size: int) -> LayerState:
    """Nothing read: every count 0, every fast weight at its trained start."""
    shape, w = params
    o, like = shape.options, w["q_proj.weight"].detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    tails = {name: like.new_zeros(batch_size, o.conv_kernel_size - 1, shape.width) for name in PROJECTION_NAMES}
    if o.gate_granularity == "chunk":
        tails["chunk"] = like.new_zeros(batch_size, 1, shape.width)
    memory = {
        name: zero_memory_state(memory_start(w, name), batch_size, o.momentum, like)
        for name in shape.memory_chunk_sizes
    }
    return LayerState(conv_tails=tails, memory=memory)


def memory_start(w: Mapping[str, Tensor], name: str) -> Start | MLPStart:
    """The trained start of a memory, in the wide type."""
    if f"{name}.M" in w:
        return w[f"{name}.M"].to(accumulation_dtype(w[f"{name}.M"].dtype))
    W1, W2 = (w[f"{name}.{part}"] for part in ("W1", "W2"))
    return MLPStart(W1.to(accumulation_dtype(W1.dtype)), W2.to(accumulation_dtype(W2.dtype)))


def zero_memory_state(
    start: Start | MLPStart, batch_size: int, momentum: bool, like: Tensor
) -> LinearMemoryState | MLPMemoryState:
    """No change of a memory that starts there."""
    if isinstance(start, MLPStart):
        return MLPMemoryState(*(zero_state(batch_size, tuple(x.shape), momentum, like) for x in start))
    assert start is not None
    return zero_state(batch_size, tuple(start.shape), momentum, like)


def forward_with_state(
    params: TitansParams,
    state: LayerState,
    x: Float[Tensor, "B T D"],
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
    outer_gradient: OuterGradient = "full",
    truncate_after: int | None = None,
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """What the memory answers to every vector, without the residual, and the state after the last.

    With `learn` False nothing is written and nothing decays; only the convolutions move on. `gradient` says what of
    the outer loss flows through the writes, and never changes a value; `horizon` is in chunks, for "truncated".
    """
    shape, w = params
    check_inputs("titans", shape.width, state, x, attention_mask, outer_gradient, truncate_after)
    T = x.shape[1]
    if T > MAX_SCAN_TOKENS and shape.options.reset_every is None:
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
    x, attention_mask = prepend_persistent(
        w, state, x, attention_mask, update_weights and shape.options.num_persistent_tokens > 0
    )
    rows = pack_left(x, attention_mask)
    vectors = project_qkv(rows.x, w, state.conv_tails, shape.num_heads, rows.lengths)
    tails = {**state.conv_tails, **vectors.conv_tails}
    with torch.autocast(x.device.type, enabled=False):
        if update_weights:
            inputs, tails = compute_gates(params, state, rows, tails)
            how = ScanOptions(
                outer_gradient, truncate_after, reset_periods(shape), shape.options.activation_checkpointing
            )
            y, memory = scan_all_memories(params, state.memory, (*vectors[:3], *inputs), rows.lengths, how)
        else:
            memory = state.memory
            rule = UpdateRule("zero", shape.options.read_at, outer_gradient)
            y = sum_outputs(
                [read_memory(memory_start(w, name), memory[name], vectors.q, rule) for name in shape.memory_chunk_sizes]
            )
    y = unpack(gate_and_project(y, rows.x, w), rows.order, attention_mask)
    return y[:, y.shape[1] - T :], replace(state, conv_tails=tails, memory=memory)


def prepend_persistent(
    w: Mapping[str, Tensor], state: LayerState, x: Tensor, attention_mask: Tensor | None, persistent: bool
) -> tuple[Tensor, Tensor | None]:
    """Eq. 19: learned vectors before the first live one of every row that has learned nothing yet."""
    new = [row for row, n in enumerate(to_ints(token_counts(state.memory))) if n == 0] if persistent else []
    if not new:
        return x, attention_mask
    N, B = w["persistent"].shape[0], len(x)
    attention_mask = x.new_ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
    first = torch.zeros(B, dtype=torch.bool, device=x.device)
    first[new] = True
    before = (first & attention_mask.any(1))[:, None].expand(B, N)
    return torch.cat([w["persistent"].to(x.dtype).expand(B, N, -1), x], 1), torch.cat([before, attention_mask], 1)


def compute_gates(
    params: TitansParams, state: LayerState, rows: PackedTokens, conv_tails: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """keep, step and momentum of every head and token, and the tails after them."""
    (shape, w), o = params, params.shape.options
    x = rows.x.to(accumulation_dtype(rows.x.dtype))
    if o.gate_granularity == "chunk":
        x, tail = first_of_chunks(x, conv_tails["chunk"], token_counts(state.memory), shape.chunk_size, rows.lengths)
        conv_tails = {**conv_tails, "chunk": tail}
    names = ("keep", "step", "momentum") if o.momentum else ("keep", "step")
    keep, step, *rest = (F.linear(x, w[f"{n}.weight"].to(x.dtype), w[f"{n}.bias"].to(x.dtype)).mT for n in names)
    return (decay_gate(keep), o.max_lr * step.sigmoid(), *map(decay_gate, rest)), conv_tails


def reset_periods(shape: TitansShape) -> dict[str, int]:
    """The period of the local memory, if it has one."""
    n = shape.options.reset_every
    return {} if n is None else {"memory": n}


def scan_all_memories(
    params: TitansParams,
    states: MemoryStates,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    options: ScanOptions,
) -> tuple[Vectors, MemoryStates]:
    """What all memories answer together, each with its own chunk."""
    o = params.shape.options
    found: list[Vectors] = []
    moved: dict[str, LinearMemoryState | MLPMemoryState] = {}
    for name in params.shape.memory_chunk_sizes:
        system = build_memory(params, name, options.outer_gradient, o.max_memory_norm)
        own = options._replace(reset_periods={k: n for k, n in options.reset_periods.items() if k == name})
        read = scan_reset_spans if own.reset_periods and lengths is None else scan_chunks
        y, part = read(system, {name: states[name]}, inputs, lengths, own)
        found.append(y)
        moved[name] = part[name]
    return sum_outputs(found), moved


def build_memory(params: TitansParams, name: str, outer_gradient: OuterGradient, max_norm: float) -> TitansMemory:
    """One memory of the layer; a guard of 0 is none."""
    o = params.shape.options
    rule, start = UpdateRule("zero", o.read_at, outer_gradient), memory_start(params.weights, name)
    return TitansMemory(name, params.shape.memory_chunk_sizes[name], start, rule, o.loss_factor, max_norm or None)


def scan_reset_spans(
    memory: TitansMemory,
    states: MemoryStates,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    options: ScanOptions,
) -> tuple[Vectors, MemoryStates]:
    """The same as `read_along` where all rows are at a reset: the spans between resets are read as rows of a batch."""
    period, count, B, T = options.reset_periods[memory.name], token_counts(states), len(inputs[0]), inputs[0].shape[2]
    n = T // period
    if n < 2 or any(c % period for c in to_ints(count)):
        return scan_chunks(memory, states, inputs, lengths, options)
    spans = tuple(
        x[:, :, : n * period].reshape(B, -1, n, period, *x.shape[3:]).transpose(1, 2).flatten(0, 1) for x in inputs
    )
    many = (count[:, None] + period * torch.arange(n)).flatten()
    part = with_num_tokens(values.repeat_rows(states[memory.name], n), many)
    y, after = scan_chunks(memory, {memory.name: part}, spans, None, options)
    y = y.reshape(B, n, *y.shape[1:]).transpose(1, 2).flatten(2, 3)
    after = values.select_rows(after, [n * row + n - 1 for row in range(B)])
    if n * period == T:
        return y, after
    rest, after = scan_chunks(memory, after, tuple(x[:, :, n * period :] for x in inputs), None, options)
    return torch.cat([y, rest], 2), after


def sum_outputs(outputs: list[Vectors]) -> Vectors:
    """The answers of all memories."""
    return outputs[0] if len(outputs) == 1 else torch.stack(outputs).sum(0)


def gate_and_project(y: Vectors, x: Float[Tensor, "B T D"], w: Mapping[str, Tensor]) -> Float[Tensor, "B T D"]:
    """Each head's answer brought to root mean square 1 and weighed, gated by the input, mixed by W_o."""
    y = y * (y.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    y = y.transpose(1, 2).flatten(2) * w["norm.weight"].to(y.dtype)
    gate = F.silu(F.linear(x, w["g_proj.weight"]))
    return F.linear(y.to(x.dtype) * gate, w["o_proj.weight"])


class Titans(nn.Module):
    """A memory in place of attention, for any vectors: `y, state = memory(x, state, live=live)`.

    Without a state it begins with none of the batch's rows having learned anything. The caller adds the residual.
    """

    def __init__(
        self, width: int, num_heads: int = 4, chunk_size: int = 64, options: Options | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.shape = TitansShape(width, num_heads, chunk_size, options or Options())
        register_parameters(self, init_weights(self.shape, torch.Generator().manual_seed(seed)))

    @property
    def params(self) -> TitansParams:
        """The shape and the tensors by name, as `start` and `advance` take them."""
        return TitansParams(self.shape, dict(self.named_parameters()))

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


def init_weights(shape: TitansShape, generator: torch.Generator) -> dict[str, Tensor]:
    """What training begins with: projections and starts normal, gates at their bias alone, queries as keys.

    A key begins as the sum of its window, a query and a value as their own token, so that a token asked again finds
    what stood behind it. Taps drawn at random have to find each other's place first, and do so in some runs only.
    """
    o, D, E = shape.options, shape.width, shape.head_dim
    w = {f"{name}_proj.weight": sample_normal(generator, D, D, std=D**-0.5) for name in ("k", "v", "g", "o")}
    w["q_proj.weight"] = w["k_proj.weight"].clone()
    own = torch.eye(o.conv_kernel_size)[-1].repeat(D, 1)
    w |= {
        "q_conv.weight": own,
        "k_conv.weight": torch.full((D, o.conv_kernel_size), o.conv_kernel_size**-0.5),
        "v_conv.weight": own.clone(),
    }
    biases = {
        "keep": half_life_bias(o.decay_half_life),
        "step": logit(o.initial_lr(shape.chunk_size) / o.max_lr, "step_start"),
    }
    if o.momentum:
        biases["momentum"] = logit(o.momentum_init, "momentum_start")
    for name, bias in biases.items():
        w |= {f"{name}.weight": torch.zeros(shape.num_heads, D), f"{name}.bias": torch.full((shape.num_heads,), bias)}
    for name in shape.memory_chunk_sizes:
        if o.memory_depth == 1:
            w[f"{name}.M"] = sample_normal(generator, shape.num_heads, E, E, std=E**-0.5)
        else:
            hidden = o.mlp_width or E
            w[f"{name}.W1"] = sample_normal(generator, shape.num_heads, E, hidden, std=hidden**-0.5)
            w[f"{name}.W2"] = sample_normal(generator, shape.num_heads, hidden, E, std=E**-0.5)
    w["norm.weight"] = torch.ones(D)
    return w | (
        {"persistent": sample_normal(generator, o.num_persistent_tokens, D, std=1.0)} if o.num_persistent_tokens else {}
    )
