"""Levels trained by the next token's loss, with one backward pass through all layers per chunk of the fastest level.

Nested Learning arXiv:2512.24695, Eq. 71, and section 3.3 for the one gradient that all levels share. A token's loss can
be computed once its target is known: the chunk that ends at token i is finished when token i + 1 arrives, before that
token is read. No gradient of an inner loss crosses the start of its chunk, so a text read in pieces gives the same
result as the whole text. A chunk that was read in pieces is read a second time for its gradient.

A token's step size scales its own contribution, that of its input and output, to the gradient of the chunk's loss. The
id of a token that is read but is not a target is stored as its complement ~id, which is negative.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX
from laconic.models.attention import accumulation_dtype
from laconic.models.block import Block
from laconic.models.decoder import Decoder
from laconic.nested.cms.layer import CMS, accumulate_tokens, require_levels, tokens_to_boundary
from laconic.nested.cms.level import CMSParams, GradientMode, LinearRecords, clip_error, detach_for_grad, linear_errors
from laconic.nested.hope.forward import ForwardOptions, LayerOutputs, Vectors, forward_pass
from laconic.nested.recurrence.chunked_scan import pack_left, to_ints, unpack
from laconic.nested.state import (
    CMSState,
    FastWeightState,
    LayerState,
    LowRankChange,
    OpenChunk,
    detach,
    map_groups,
    map_tensors,
)

Ids = Int[Tensor, "B T"]
LayerStates = list[LayerState]  # of one read, which replaces them one by one, so that the old ones are freed
LinearErrors = dict[str, LowRankChange]  # delta and x by `0 levels.1.up_proj`, the index of the layer first


def cms_params_of(model: Decoder) -> list[CMSParams]:
    modules = [block.get_submodule("mlp") for block in model.layers if isinstance(block, Block)]
    return [cms.params for cms in modules if isinstance(cms, CMS)]


def complement_non_targets(ids: Ids, target_mask: Bool[Tensor, "B T"] | Ids | None) -> Ids:
    return ids if target_mask is None else torch.where(target_mask.bool(), ids, ~ids)


def restore_ids(ids: Ids) -> Ids:
    return torch.where(ids < 0, ~ids, ids)


def empty_open_chunk(layers: Sequence[LayerState], like: Ids) -> OpenChunk:
    return OpenChunk(like[:, :0], torch.zeros(len(like), dtype=torch.long), tuple(layers))


class AlignedRows(NamedTuple):
    """Rows at the same offset: states of their layers now and at the start of the open chunk, and its ids."""

    layers: LayerStates
    chunk_ids: Ids
    layers_at_start: LayerStates


def to_aligned_rows(state: FastWeightState) -> AlignedRows:
    """Return the open chunk of rows at the same offset."""
    assert state.open_chunk is not None
    n = int(state.open_chunk.num_tokens[0])
    layers = list(state.layers)
    start = list(state.open_chunk.layers_at_start) if n else layers
    return AlignedRows(layers, state.open_chunk.input_ids[:, :n], start)


def row_offsets(state: FastWeightState) -> Iterator[tuple[int, ...]]:
    """Yield the offsets of each row in all chunks."""
    assert state.open_chunk is not None
    counts = [level.num_tokens for layer in state.layers for level in require_levels(layer)]
    yield from zip(*map(to_ints, counts), to_ints(state.open_chunk.num_tokens), strict=True)


def read_and_learn(
    model: Decoder,
    state: FastWeightState,
    ids: Ids,
    attention_mask: Bool[Tensor, "B T"] | None,
    gradient_mode: GradientMode,
) -> tuple[Vectors, FastWeightState]:
    """Read every token in order while the levels learn; return the final hidden states, and the state."""
    tokens = pack_left(ids[..., None], attention_mask)
    lengths = tokens.lengths or (ids.shape[1],) * len(ids)

    def read(rows: list[int], state: FastWeightState, ids: Ids) -> tuple[Vectors, FastWeightState]:
        n = lengths[rows[0]]
        y, state = _read_aligned(model, state, ids[:, :n], gradient_mode)
        return F.pad(y, (0, 0, 0, ids.shape[1] - n)), state

    x, state = map_groups(zip(row_offsets(state), lengths, strict=True), read, state, tokens.x[..., 0])
    return unpack(x, tokens.order, attention_mask), state


def _read_aligned(
    model: Decoder, state: FastWeightState, ids: Ids, gradient_mode: GradientMode
) -> tuple[Vectors, FastWeightState]:
    """Read rows at the same offset, at most one chunk at a time."""
    rows = to_aligned_rows(state)
    if state.is_donated:
        vars(state).update(layers=(), open_chunk=None)  # the callers hold the state until this returns
    outputs: list[Tensor] = []
    position = 0
    n = ids.shape[1]
    while position < n:
        levels = map(require_levels, rows.layers_at_start)
        room = min(map(tokens_to_boundary, cms_params_of(model), levels)) - rows.chunk_ids.shape[1]
        if room == 0:
            rows = finish_chunk(model, rows, ids[:, position], gradient_mode)
            continue
        end = min(n, position + room)
        part = ids[:, position:end]
        is_whole_chunk = not rows.chunk_ids.shape[1] and end - position == room and end < n
        # Errors need the whole gradient through a memory, which a pass in another gradient mode does not compute.
        if is_whole_chunk and (rows.layers[0].cache is not None or gradient_mode.outer_gradient == "full"):
            y = read_whole_chunk(model, rows.layers, part, ids[:, end], gradient_mode)
        else:
            embeds = model.embed(restore_ids(part))
            y, forward = forward_pass(model, embeds, rows.layers, ForwardOptions(gradient_mode=gradient_mode))
            rows = AlignedRows(forward.layers, torch.cat([rows.chunk_ids, part], 1), rows.layers_at_start)
        outputs.append(y)
        position = end
    y = torch.cat(outputs, 1) if outputs else model.embed(restore_ids(ids))
    num_tokens = torch.full_like(state.position, rows.chunk_ids.shape[1])
    open_chunk = OpenChunk(rows.chunk_ids, num_tokens, tuple(rows.layers_at_start))
    return y, replace(state, layers=tuple(rows.layers), position=state.position + n, open_chunk=open_chunk)


def finish_chunk(
    model: Decoder, rows: AlignedRows, next_ids: Int[Tensor, " B"], gradient_mode: GradientMode
) -> AlignedRows:
    """Read the open chunk again from its start and learn from its loss; `next_ids` are the last targets."""
    options = ForwardOptions(double_backward=gradient_mode.is_differentiable)
    _, outputs, errors = read_with_errors(
        model, rows.layers_at_start, rows.chunk_ids, next_ids, options, keeps_start_graph=options.double_backward
    )
    rows.layers_at_start.clear()
    outputs.layers.clear()
    apply_errors(model, rows.layers, errors, outputs, gradient_mode)
    return AlignedRows(rows.layers, rows.chunk_ids[:, :0], rows.layers)


def read_whole_chunk(
    model: Decoder, layers: LayerStates, ids: Ids, next_ids: Int[Tensor, " B"], gradient_mode: GradientMode
) -> Vectors:
    """Read a complete chunk whose targets are known: one forward pass serves for reading and for learning."""
    is_training = torch.is_grad_enabled()
    options = ForwardOptions(gradient_mode=gradient_mode, double_backward=gradient_mode.is_differentiable)
    hidden, outputs, errors = read_with_errors(
        model, layers, ids, next_ids, options, keeps_start_graph=is_training, retain_graph=is_training
    )
    layers[:] = outputs.layers if is_training else detach(tuple(outputs.layers))
    outputs.layers.clear()
    apply_errors(model, layers, errors, outputs, gradient_mode)
    return hidden if is_training else hidden.detach()


def read_with_errors(
    model: Decoder,
    layers: LayerStates,
    ids: Ids,
    next_ids: Int[Tensor, " B"],
    options: ForwardOptions,
    *,
    keeps_start_graph: bool,
    retain_graph: bool = False,
) -> tuple[Vectors, LayerOutputs, LinearErrors]:
    """Read a chunk from its start; return also the errors of its linear maps, for its summed cross-entropy."""
    with torch.inference_mode(False), torch.enable_grad():
        start = layers if keeps_start_graph else map_tensors(tuple(layers), detach_for_grad)
        ids, next_ids = detach_for_grad(ids), detach_for_grad(next_ids)
        records: tuple[LinearRecords, ...] = tuple({} for _ in layers)
        options = replace(options, records=records)
        hidden_states, outputs = forward_pass(model, model.embed(restore_ids(ids)), start, options)
        targets = torch.cat([ids[:, 1:], next_ids[:, None]], 1)
        targets = targets.masked_fill(targets < 0, IGNORE_INDEX)  # complements too
        logits = model.logits(hidden_states).flatten(0, 1)
        loss = F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), targets.flatten(), reduction="sum")
        named_records = {f"{n} {name}": record for n, layer in enumerate(records) for name, record in layer.items()}
        errors = linear_errors(loss, named_records, create_graph=options.double_backward, retain_graph=retain_graph)
    return hidden_states, outputs, errors


def apply_errors(
    model: Decoder, layers: LayerStates, errors: LinearErrors, outputs: LayerOutputs, gradient_mode: GradientMode
) -> None:
    """Add the terms of a chunk to the levels of every layer, which is replaced in `layers`."""
    for n, params in enumerate(cms_params_of(model)):
        shape, keep_graph = params.shape, gradient_mode.is_differentiable
        inputs = [z if keep_graph else detach_for_grad(z) for z in outputs.level_inputs[n]]
        max_norm = shape.options.max_error_norm
        level_errors = [
            {name: clip_error(errors[f"{n} levels.{l}.{name}"], max_norm) for name in shape.projections}
            for l in range(len(inputs))
        ]
        levels = accumulate_tokens(params, require_levels(layers[n]), level_errors, inputs, gradient_mode)
        layers[n] = replace(layers[n], cms=CMSState(levels))


def flush_open_chunk(
    model: Decoder, state: FastWeightState, ids: Ids | None, attention_mask: Tensor | None, gradient_mode: GradientMode
) -> FastWeightState:
    """Learn from the open chunk before tokens that are read without learning; a new chunk begins after them.

    The first of these tokens is the last target of the open chunk, if `ids` are given.
    """
    assert state.open_chunk is not None
    if not bool(state.open_chunk.num_tokens.any()):
        return state
    next_ids = torch.full((len(state.position),), IGNORE_INDEX, device=state.open_chunk.input_ids.device)
    if ids is not None:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.int()
        first = ids.gather(1, mask.argmax(1, keepdim=True))[:, 0]
        next_ids = first.where(mask.any(1), next_ids)

    def finish(_: list[int], state: FastWeightState, next_ids: Int[Tensor, " B"]) -> FastWeightState:
        rows = to_aligned_rows(state)
        if rows.chunk_ids.shape[1]:
            rows = finish_chunk(model, rows, next_ids, gradient_mode)
        return replace(state, layers=tuple(rows.layers), open_chunk=empty_open_chunk(rows.layers, rows.chunk_ids))

    return map_groups(row_offsets(state), finish, state, next_ids)
