"""Scan tokens through memories that are written while they are read, from chunk boundary to chunk boundary.

Rows of a batch may be at different offsets within a chunk: rows at the same offset are processed together, and each row
gives the result it gives alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.config.nested import OuterGradient
from laconic.errors import UsageError
from laconic.nested.recurrence.memory_cells import MemoryStates
from laconic.nested.state import (
    LayerState,
    LinearMemoryState,
    detach,
    is_counter,
    map_groups,
    map_tensors,
    num_rows,
    where_rows,
)

MAX_SCAN_TOKENS = 1024  # tokens per segment of a long text, whose vectors then fit into a processor's cache


class PackedTokens(NamedTuple):
    """Tokens with the valid ones of each row moved to the left; the rest is zero.

    `lengths` is the number of valid tokens per row, None if every token is valid; `order` is the permutation applied.
    """

    x: Shaped[Tensor, "B T D"]
    order: Int[Tensor, "B T"] | None
    lengths: tuple[int, ...] | None


def pack_left(x: Shaped[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None) -> PackedTokens:
    """Move the valid tokens of each row to the left, in order, and set the rest to zero."""
    if valid is None or bool(valid.all()):
        return PackedTokens(x, None, None)
    order = torch.sort((~valid).to(torch.uint8), stable=True, dim=1).indices
    packed = x.gather(1, order[..., None].expand_as(x))
    return PackedTokens(packed * valid.gather(1, order)[..., None], order, to_ints(valid.sum(1)))


def unpack(
    y: Float[Tensor, "B T D"], order: Int[Tensor, "B T"] | None, valid: Bool[Tensor, "B T"] | None
) -> Float[Tensor, "B T D"]:
    """Undo `pack_left`; positions that are not valid become zero."""
    if order is None or valid is None:
        return y
    inverse = order.argsort(1)
    return y.gather(1, inverse[..., None].expand_as(y)) * valid[..., None]


def to_ints(x: Int[Tensor, " N"]) -> tuple[int, ...]:
    return tuple(cast(list[int], x.tolist()))  # pyright: ignore[reportUnknownMemberType]


def build_valid_mask(lengths: tuple[int, ...] | None, T: int, device: torch.device) -> Bool[Tensor, "B T"] | None:
    """Return the mask of the valid tokens of packed rows, or None if all are valid."""
    if lengths is None:
        return None
    return torch.arange(T, device=device) < torch.tensor(lengths, device=device)[:, None]


def causal_conv(
    x: Float[Tensor, "B T D"],
    tail: Float[Tensor, "B W1 D"],
    weight: Float[Tensor, "D W"],
    lengths: tuple[int, ...] | None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B W1 D"]]:
    """Apply a causal depthwise convolution to packed tokens; the last tap of `weight` is that of the current token.

    `tail` are the W - 1 tokens before the first; those of the next call are returned beside the result.
    """
    D, W = weight.shape
    padded = torch.cat([tail.to(x.dtype), x], 1)
    T = x.shape[1]
    taps = weight.to(x.dtype)
    y = padded[:, :T] * taps[:, 0]
    for j in range(1, W):
        y = torch.addcmul(y, padded[:, j : j + T], taps[:, j])
    if lengths is None:
        return y, padded[:, padded.shape[1] - (W - 1) :]
    index = torch.tensor(lengths, device=x.device)[:, None] + torch.arange(W - 1, device=x.device)
    return y, padded.gather(1, index[..., None].expand(-1, -1, D))


def split_at_boundaries(offset: int, T: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of T tokens that no chunk boundary crosses; the first token is `offset` after a boundary."""
    start, end = 0, chunk_size - offset % chunk_size
    while start < T:
        yield start, min(end, T)
        start, end = end, end + chunk_size


@runtime_checkable
class ChunkedMemory(Protocol):
    """Memories that are scanned together; `chunk_sizes` and the states are by name."""

    @property
    def chunk_sizes(self) -> Mapping[str, int]: ...

    def step_chunk(
        self, states: MemoryStates, inputs: tuple[Tensor, ...], valid: Tensor | None
    ) -> tuple[Tensor, MemoryStates]: ...  # writes and reads tokens that no chunk boundary separates

    def end_chunks(self, states: MemoryStates, names: list[str]) -> MemoryStates: ...  # only those of `names`


def check_inputs(
    layer: str,
    width: int,
    state: LayerState,
    x: Tensor,
    attention_mask: Tensor | None,
    outer_gradient: OuterGradient,
    truncate_after: int | None,
) -> None:
    """Raise `UsageError` if the vectors, the mask, the state or the gradient mode do not fit a nested layer."""
    B = len(x)
    if x.ndim != 3 or x.shape[2] != width or not B or not x.shape[1]:
        raise UsageError(f"{layer}: expected vectors [B, T, {width}] with B, T >= 1, got {list(x.shape)}")
    if layer != "cms" and not state.memory:
        raise UsageError(f"{layer}: the state is that of another kind of layer; leave it out to start with a new one")
    rows = num_rows(state)
    if rows != B:
        raise UsageError(f"{layer}: the batch has {B} rows, the state {rows}; see laconic.nested.state.select_rows")
    if attention_mask is not None and (attention_mask.shape != x.shape[:2] or attention_mask.is_floating_point()):
        got = f"{attention_mask.dtype} {list(attention_mask.shape)}".removeprefix("torch.")
        raise UsageError(f"{layer}: attention_mask is {got}, expected bool or integers {list(x.shape[:2])}")
    check_gradient_mode(layer, outer_gradient, truncate_after)


def get_weights(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a nested layer by name. Raises `UsageError` if one of them has been replaced."""
    weights: dict[str, Tensor] = dict(layer.named_parameters())
    for name in weights:  # which the layer reads by name, so the hooks of submodules, by which torch prunes, never run
        if "parametrizations." in name or name.endswith(("_orig", "_g", "_v")):
            problem = f"{name} comes from pruning or a parametrization, which this layer does not apply"
            raise UsageError(f"{type(layer).__name__}: {problem}; call prune.remove or remove_parametrizations first")
    return weights


def check_gradient_mode(layer: str, outer_gradient: OuterGradient, truncate_after: int | None) -> None:
    """Raise `UsageError` for an unknown outer gradient, and for `truncate_after` that does not fit it."""
    modes = get_args(OuterGradient)
    if outer_gradient not in modes:
        raise UsageError(f"{layer}: outer_gradient {outer_gradient!r} is not one of {', '.join(modes)}")
    is_set = truncate_after is not None
    if is_set != (outer_gradient == "truncated") or (is_set and truncate_after < 1):
        raise UsageError(f"{layer}: truncate_after {truncate_after}: set it (>= 1) for 'truncated', and only for it")


def scan_in_segments(
    scan_function: Callable[..., tuple[Tensor, LayerState]], state: LayerState, x: Tensor, attention_mask: Tensor | None
) -> tuple[Tensor, LayerState]:
    """Process a long text in segments of MAX_SCAN_TOKENS, which bounds the working memory."""
    outputs: list[Tensor] = []
    for start in range(0, x.shape[1], MAX_SCAN_TOKENS):
        part = slice(start, start + MAX_SCAN_TOKENS)
        mask = None if attention_mask is None else attention_mask[:, part]
        y, state = scan_function(x[:, part], state, attention_mask=mask)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def scan_chunks(
    memory: ChunkedMemory,
    states: MemoryStates,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    activation_checkpointing: bool = False,
    truncate_after: int | None = None,
) -> tuple[Tensor, MemoryStates]:
    """Scan packed tokens, each input [B, H, T, ...], through memories whose rows may be at different offsets.

    `lengths` are the valid tokens of each row, None if all are valid. With `activation_checkpointing` each chunk is
    recomputed in the backward pass; after `truncate_after` chunks a state is detached. Returns what the memories
    answer, and their states after the last token.
    """
    period = max(memory.chunk_sizes.values())  # which every chunk size divides
    offsets = [n % period for n in to_ints(token_counts(states))]

    def scan(rows: list[int], states: MemoryStates, inputs: tuple[Tensor, ...]) -> tuple[Tensor, MemoryStates]:
        group_lengths = None if lengths is None else tuple(lengths[row] for row in rows)
        offset = offsets[rows[0]]
        return _scan_aligned(
            memory, states, inputs, group_lengths, offset, is_checkpointed=activation_checkpointing,
            truncate_after=truncate_after,
        )  # fmt: skip

    return map_groups(offsets, scan, states, inputs)


def token_counts(states: MemoryStates) -> Tensor:
    """Return the tokens read by each row, which all memories of a layer share."""
    state = next(iter(states.values()))
    return state.num_tokens if isinstance(state, LinearMemoryState) else state.W1.num_tokens


def _scan_aligned(
    memory: ChunkedMemory,
    states: MemoryStates,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    offset: int,
    *,
    is_checkpointed: bool,
    truncate_after: int | None,
) -> tuple[Tensor, MemoryStates]:
    """Scan rows at the same offset, up to the next boundary of any memory at a time."""
    T = inputs[0].shape[2]
    num_tokens = token_counts(states)
    T_valid = T if lengths is None else max(lengths)
    valid = build_valid_mask(lengths, T, inputs[0].device)
    outputs: list[Tensor] = []
    for a, b in split_at_boundaries(offset, T_valid, min(memory.chunk_sizes.values())):
        part_valid = None if valid is None or (lengths is not None and min(lengths) >= b) else valid[:, a:b]
        part = tuple(x[:, :, a:b] for x in inputs)
        if is_checkpointed and torch.is_grad_enabled():
            y, states = cast(Any, checkpoint)(memory.step_chunk, states, part, part_valid, use_reentrant=False)
        else:
            y, states = memory.step_chunk(states, part, part_valid)
        outputs.append(y)
        ending = [name for name, chunk_size in memory.chunk_sizes.items() if (offset + b) % chunk_size == 0]
        if ending:
            ended = memory.end_chunks(states, ending)
            if truncate_after is not None:
                since_cut = {name: (num_tokens + b) // memory.chunk_sizes[name] % truncate_after for name in ending}
                ended = {name: where_rows(since_cut[name] == 0, detach(x), x) for name, x in ended.items()}
            if lengths is not None:
                reached = torch.tensor([n >= b for n in lengths])
                ended = {name: where_rows(reached, new, states[name]) for name, new in ended.items()}
            states = {**states, **ended}
    total = num_tokens + T if lengths is None else num_tokens + torch.tensor(lengths)
    states = map_tensors(states, lambda x: total if is_counter(x) else x)
    if T_valid < T:
        width = outputs[0].shape[-1] if outputs else inputs[0].shape[-1]
        outputs.append(inputs[0].new_zeros(*inputs[0].shape[:2], T - T_valid, width))
    return torch.cat(outputs, 2), states
