"""Levels that learn the task: the next token's loss, sent back through all layers once per fastest chunk.

Nested Learning arXiv:2512.24695, 71, and section 3.3 for the one gradient that all levels share. A term exists once its
target is known: the chunk that ends at token i is closed when token i+1 arrives, before that is read. No gradient of an
inner loss crosses the start of its chunk, which makes pieces the whole. A chunk that was read in pieces is read again.

The step of a token weighs what its own input and the gradient at its outputs give, of all the chunk's losses.

An id that is read but not learned of, as a target, stands here as its complement ~id, which is below 0.
"""

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
from laconic.nested import state as values
from laconic.nested.cms.config import CMSParams
from laconic.nested.cms.forward import accumulate_tokens, require_levels, tokens_to_boundary
from laconic.nested.cms.layer import CMS
from laconic.nested.cms.level import GradientMode, LinearRecords, clip_error, detach_for_grad, linear_errors
from laconic.nested.hope.forward import LayerOutputs, Vectors, forward_pass
from laconic.nested.recurrence.packing import to_ints
from laconic.nested.state import CMSState, FastWeightState, LayerState, LowRankChange, OpenChunk

Ids = Int[Tensor, "B T"]
LayerStates = tuple[LayerState, ...]


def cms_params_of(model: Decoder) -> list[CMSParams]:
    """The continuum memory of every layer."""
    found = [part.get_submodule("mlp") for part in model.layers if isinstance(part, Block)]
    return [levels.params for levels in found if isinstance(levels, CMS)]


def mask_untaught(ids: Ids, target_mask: Bool[Tensor, "B T"] | None) -> Ids:
    """Ids, those that are not to be learned of as their complements."""
    return ids if target_mask is None else torch.where(target_mask, ids, ~ids)


def unmask_ids(ids: Ids) -> Ids:
    """What is read: the ids themselves, learned of or not."""
    return torch.where(ids < 0, ~ids, ids)


def empty_open_chunk(layers: LayerStates, like: Ids) -> OpenChunk:
    """No token read since the layers' last boundary."""
    return OpenChunk(like[:, :0], torch.zeros(len(like), dtype=torch.long), layers)


class AlignedRows(NamedTuple):
    """Rows that stand alike: their layers now, and the open chunk, with the layers where it began."""

    layers: LayerStates
    chunk_ids: Ids
    layers_at_start: LayerStates


def to_aligned_rows(state: FastWeightState) -> AlignedRows:
    """Of rows that stand alike."""
    assert state.open_chunk is not None
    n = int(state.open_chunk.num_tokens[0])
    return AlignedRows(
        state.layers, state.open_chunk.input_ids[:, :n], state.open_chunk.layers_at_start if n else state.layers
    )


def group_aligned_rows(state: FastWeightState, lengths: list[int]) -> list[list[int]]:
    """Rows with the same counts everywhere, and as many tokens to come, together."""
    assert state.open_chunk is not None
    counts = [level.num_tokens for layer in state.layers for level in require_levels(layer)]
    keys = zip(*map(to_ints, counts), to_ints(state.open_chunk.num_tokens), lengths, strict=True)
    found: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return list(found.values())


def read_and_learn(
    model: Decoder, state: FastWeightState, ids: Ids, attention_mask: Tensor | None, gradient_mode: GradientMode
) -> tuple[Vectors, FastWeightState]:
    """Every token in order, the levels learning; hidden states after the final norm, zeros where nothing is live."""
    lengths = [ids.shape[1]] * len(ids) if attention_mask is None else list(to_ints(attention_mask.sum(1)))
    order = (
        None if attention_mask is None else torch.sort((~attention_mask).to(torch.uint8), stable=True, dim=1).indices
    )
    moved = ids if order is None else ids.gather(1, order)
    groups, hidden, states = group_aligned_rows(state, lengths), list[Tensor](), list[FastWeightState]()
    for rows in groups:
        own = values.select_rows(state, rows) if len(groups) > 1 else state
        n = lengths[rows[0]]
        y, after = _aligned(model, own, moved[rows, :n], gradient_mode)
        hidden.append(F.pad(y, (0, 0, 0, ids.shape[1] - n)))
        states.append(after)
    if len(groups) > 1:
        back = torch.tensor([row for rows in groups for row in rows]).argsort()
        x, state = torch.cat(hidden)[back.to(ids.device)], values.select_rows(values.concat_rows(*states), back)
    else:
        x, state = hidden[0], states[0]
    return (x if order is None else x.gather(1, order.argsort(1)[..., None].expand_as(x))), state


def _aligned(model: Decoder, state: FastWeightState, ids: Ids, way: GradientMode) -> tuple[Vectors, FastWeightState]:
    """Rows that stand alike, piece by piece, each within one chunk."""
    rows, ys, at, n = to_aligned_rows(state), list[Tensor](), 0, ids.shape[1]
    while at < n:
        left = room_of(model, rows.layers_at_start) - rows.chunk_ids.shape[1]
        if left == 0:
            rows = finish_chunk(model, rows, ids[:, at], way)
            continue
        end = min(n, at + left)
        piece, full = ids[:, at:end], not rows.chunk_ids.shape[1] and end - at == left and end < n
        if full and (rows.layers[0].cache is not None or way.outer_gradient == "full"):
            y, layers = read_whole_chunk(model, rows.layers, piece, ids[:, end], way)
            rows = AlignedRows(layers, piece[:, :0], layers)
        else:
            y, found = forward_pass(model, model.embed(unmask_ids(piece)), rows.layers, gradient_mode=way)
            rows = AlignedRows(found.layers, torch.cat([rows.chunk_ids, piece], 1), rows.layers_at_start)
        ys.append(y)
        at = end
    y = torch.cat(ys, 1) if ys else model.embed(unmask_ids(ids))
    count = torch.full_like(state.position, rows.chunk_ids.shape[1])
    return y, FastWeightState(rows.layers, state.position + n, OpenChunk(rows.chunk_ids, count, rows.layers_at_start))


def room_of(model: Decoder, layers: LayerStates) -> int:
    """Tokens from the start of a fastest chunk to its end, in rows that stand alike."""
    pairs = zip(cms_params_of(model), layers, strict=True)
    return min(tokens_to_boundary(params, require_levels(layer)) for params, layer in pairs)


def finish_chunk(
    model: Decoder, rows: AlignedRows, next_ids: Int[Tensor, " B"], gradient_mode: GradientMode
) -> AlignedRows:
    """The open chunk read again from where it began, for its errors; `last` is the target of its last token."""
    keeps = gradient_mode.is_differentiable
    with torch.inference_mode(False), torch.enable_grad():
        began = rows.layers_at_start if keeps else values.map_tensors(rows.layers_at_start, detach_for_grad)
        notes: tuple[LinearRecords, ...] = tuple({} for _ in began)
        hidden, found = forward_pass(
            model, model.embed(unmask_ids(detach_for_grad(rows.chunk_ids))), began, records=notes, double_backward=keeps
        )
        pairs = backward_errors(
            model, hidden, chunk_targets(rows.chunk_ids, next_ids), notes, create_graph=keeps, retain_graph=False
        )
    layers = apply_errors(model, rows.layers, pairs, found, gradient_mode)
    return AlignedRows(layers, rows.chunk_ids[:, :0], layers)


def read_whole_chunk(
    model: Decoder, layers: LayerStates, ids: Ids, next_ids: Int[Tensor, " B"], gradient_mode: GradientMode
) -> tuple[Vectors, LayerStates]:
    """A whole chunk whose targets are known: one pass is both what is read and what is learned from."""
    outer, keeps = torch.is_grad_enabled(), gradient_mode.is_differentiable
    with torch.inference_mode(False), torch.enable_grad():
        began = layers if outer else values.map_tensors(layers, detach_for_grad)
        notes: tuple[LinearRecords, ...] = tuple({} for _ in layers)
        hidden, found = forward_pass(
            model,
            model.embed(unmask_ids(detach_for_grad(ids))),
            began,
            gradient_mode=gradient_mode,
            records=notes,
            double_backward=keeps,
        )
        pairs = backward_errors(
            model, hidden, chunk_targets(ids, next_ids), notes, create_graph=keeps, retain_graph=outer
        )
    if not outer:
        hidden, found = hidden.detach(), found._replace(layers=values.detach(found.layers))
    return hidden, apply_errors(model, found.layers, pairs, found, gradient_mode)


def chunk_targets(ids: Ids, next_ids: Int[Tensor, " B"]) -> Ids:
    """What follows each token, nothing where that is not to be learned of."""
    found = torch.cat([detach_for_grad(ids)[:, 1:], detach_for_grad(next_ids)[:, None]], 1)
    return found.masked_fill(found < 0, IGNORE_INDEX)


def backward_errors(
    model: Decoder,
    hidden_states: Vectors,
    targets: Ids,
    records: tuple[LinearRecords, ...],
    *,
    create_graph: bool,
    retain_graph: bool,
) -> list[dict[str, LowRankChange]]:
    """delta and x at every map of every layer, of the sum of -log p over a chunk, in one backward."""
    logits = model.logits(hidden_states)
    loss = F.cross_entropy(
        logits.flatten(0, 1).to(accumulation_dtype(logits.dtype)),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    names = {f"{n} {name}": noted for n, own in enumerate(records) for name, noted in own.items()}
    found = linear_errors(loss, names, create_graph=create_graph, retain_graph=retain_graph)
    return [{name: found[f"{n} {name}"] for name in own} for n, own in enumerate(records)]


def apply_errors(
    model: Decoder,
    layers: LayerStates,
    errors: list[dict[str, LowRankChange]],
    outputs: LayerOutputs,
    gradient_mode: GradientMode,
) -> LayerStates:
    """Every layer with the chunk's terms in its levels."""
    made: list[LayerState] = []
    for n, (params, layer) in enumerate(zip(cms_params_of(model), layers, strict=True)):
        most, keeps = params.shape.options.max_error_norm, gradient_mode.is_differentiable
        inputs = [z if keeps else detach_for_grad(z) for z in outputs.level_inputs[n]]
        own = [
            {name: clip_error(errors[n][f"levels.{l}.{name}"], most) for name in params.shape.projections}
            for l in range(len(inputs))
        ]
        made.append(
            replace(
                layer,
                cms=CMSState(
                    accumulate_tokens(params, require_levels(layer), own, inputs, gradient_mode=gradient_mode)
                ),
            )
        )
    return tuple(made)


def flush_open_chunk(
    model: Decoder, state: FastWeightState, ids: Ids | None, attention_mask: Tensor | None, gradient_mode: GradientMode
) -> FastWeightState:
    """The state before tokens that teach nothing: what the open chunk has so far is learned from, and it begins anew.

    The first of these tokens is the last target, if ids say what it is.
    """
    assert state.open_chunk is not None
    if not bool(state.open_chunk.num_tokens.any()):
        return state
    B = len(state.position)
    last = torch.full((B,), IGNORE_INDEX)
    if ids is not None:
        at = (
            torch.zeros(B, dtype=torch.long, device=ids.device)
            if attention_mask is None
            else attention_mask.int().argmax(1)
        )
        last = ids.gather(1, at[:, None])[:, 0]
        last = (
            last if attention_mask is None else last.where(attention_mask.any(1), torch.full_like(last, IGNORE_INDEX))
        )
    groups = group_aligned_rows(state, [0] * B)
    states: list[FastWeightState] = []
    for rows in groups:
        own = values.select_rows(state, rows)
        held = to_aligned_rows(own)
        held = (
            finish_chunk(model, held, last.to(held.chunk_ids.device)[rows], gradient_mode)
            if held.chunk_ids.shape[1]
            else held
        )
        states.append(FastWeightState(held.layers, own.position, empty_open_chunk(held.layers, held.chunk_ids)))
    back = torch.tensor([row for rows in groups for row in rows]).argsort()
    return values.select_rows(values.concat_rows(*states), back) if len(groups) > 1 else states[0]
