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

from laconic.core import state as values
from laconic.core.attention import wide
from laconic.core.block import Block
from laconic.core.contract import UNSCORED
from laconic.core.decoder import Decoder
from laconic.core.state import Continuum, Factors, Layer, Opened, State
from laconic.methods.cms_layer import CMS
from laconic.methods.cms_levels import Notes, Way, cut, errors, shorter
from laconic.methods.cms_reading import learned, levels_of, room
from laconic.methods.cms_shape import Params
from laconic.methods.hope_reading import Found, Vectors, read
from laconic.methods.packing import integers

Ids = Int[Tensor, "B T"]
Layers = tuple[Layer, ...]


def continua(model: Decoder) -> list[Params]:
    """The continuum memory of every layer."""
    found = [part.get_submodule("mlp") for part in model.blocks if isinstance(part, Block)]
    return [levels.params for levels in found if isinstance(levels, CMS)]


def silent(ids: Ids, taught: Bool[Tensor, "B T"] | None) -> Ids:
    """Ids, those that are not to be learned of as their complements."""
    return ids if taught is None else torch.where(taught, ids, ~ids)


def words(ids: Ids) -> Ids:
    """What is read: the ids themselves, learned of or not."""
    return torch.where(ids < 0, ~ids, ids)


def unopened(layers: Layers, like: Ids) -> Opened:
    """No token read since the layers' last boundary."""
    return Opened(like[:, :0], torch.zeros(len(like), dtype=torch.long), layers)


class Rows(NamedTuple):
    """Rows that stand alike: their layers now, and the open chunk, with the layers where it began."""

    layers: Layers
    ids: Ids
    began: Layers


def standing(state: State) -> Rows:
    """Of rows that stand alike."""
    assert state.open is not None
    n = int(state.open.count[0])
    return Rows(state.layers, state.open.ids[:, :n], state.open.layers if n else state.layers)


def alike(state: State, lengths: list[int]) -> list[list[int]]:
    """Rows with the same counts everywhere, and as many tokens to come, together."""
    assert state.open is not None
    counts = [level.count for layer in state.layers for level in levels_of(layer)]
    keys = zip(*map(integers, counts), integers(state.open.count), lengths, strict=True)
    found: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return list(found.values())


def learn_along(model: Decoder, state: State, ids: Ids, live: Tensor | None, way: Way) -> tuple[Vectors, State]:
    """Every token in order, the levels learning; hidden states after the final norm, zeros where nothing is live."""
    lengths = [ids.shape[1]] * len(ids) if live is None else list(integers(live.sum(1)))
    order = None if live is None else torch.sort((~live).to(torch.uint8), stable=True, dim=1).indices
    moved = ids if order is None else ids.gather(1, order)
    groups, hidden, states = alike(state, lengths), list[Tensor](), list[State]()
    for rows in groups:
        own = values.take(state, rows) if len(groups) > 1 else state
        n = lengths[rows[0]]
        y, after = _aligned(model, own, moved[rows, :n], way)
        hidden.append(F.pad(y, (0, 0, 0, ids.shape[1] - n)))
        states.append(after)
    if len(groups) > 1:
        back = torch.tensor([row for rows in groups for row in rows]).argsort()
        x, state = torch.cat(hidden)[back.to(ids.device)], values.take(values.join(*states), back)
    else:
        x, state = hidden[0], states[0]
    return (x if order is None else x.gather(1, order.argsort(1)[..., None].expand_as(x))), state


def _aligned(model: Decoder, state: State, ids: Ids, way: Way) -> tuple[Vectors, State]:
    """Rows that stand alike, piece by piece, each within one chunk."""
    rows, ys, at, n = standing(state), list[Tensor](), 0, ids.shape[1]
    while at < n:
        left = room_of(model, rows.began) - rows.ids.shape[1]
        if left == 0:
            rows = closed(model, rows, ids[:, at], way)
            continue
        end = min(n, at + left)
        piece, full = ids[:, at:end], not rows.ids.shape[1] and end - at == left and end < n
        if full and (rows.layers[0].cache is not None or way.gradient == "full"):
            y, layers = at_once(model, rows.layers, piece, ids[:, end], way)
            rows = Rows(layers, piece[:, :0], layers)
        else:
            y, found = read(model, model.embed(words(piece)), rows.layers, way=way)
            rows = Rows(found.layers, torch.cat([rows.ids, piece], 1), rows.began)
        ys.append(y)
        at = end
    y = torch.cat(ys, 1) if ys else model.embed(words(ids))
    count = torch.full_like(state.position, rows.ids.shape[1])
    return y, State(rows.layers, state.position + n, Opened(rows.ids, count, rows.began))


def room_of(model: Decoder, layers: Layers) -> int:
    """Tokens from the start of a fastest chunk to its end, in rows that stand alike."""
    pairs = zip(continua(model), layers, strict=True)
    return min(room(params, levels_of(layer)) for params, layer in pairs)


def closed(model: Decoder, rows: Rows, last: Int[Tensor, " B"], way: Way) -> Rows:
    """The open chunk read again from where it began, for its errors; `last` is the target of its last token."""
    keeps = way.through
    with torch.inference_mode(False), torch.enable_grad():
        began = rows.began if keeps else values.mapped(rows.began, cut)
        notes: tuple[Notes, ...] = tuple({} for _ in began)
        hidden, found = read(model, model.embed(words(cut(rows.ids))), began, notes=notes, twice=keeps)
        pairs = sent_back(model, hidden, targets(rows.ids, last), notes, keeps=keeps, again=False)
    layers = taught(model, rows.layers, pairs, found, way)
    return Rows(layers, rows.ids[:, :0], layers)


def at_once(model: Decoder, layers: Layers, ids: Ids, last: Int[Tensor, " B"], way: Way) -> tuple[Vectors, Layers]:
    """A whole chunk whose targets are known: one pass is both what is read and what is learned from."""
    outer, keeps = torch.is_grad_enabled(), way.through
    with torch.inference_mode(False), torch.enable_grad():
        began = layers if outer else values.mapped(layers, cut)
        notes: tuple[Notes, ...] = tuple({} for _ in layers)
        hidden, found = read(model, model.embed(words(cut(ids))), began, way=way, notes=notes, twice=keeps)
        pairs = sent_back(model, hidden, targets(ids, last), notes, keeps=keeps, again=outer)
    if not outer:
        hidden, found = hidden.detach(), found._replace(layers=values.detach(found.layers))
    return hidden, taught(model, found.layers, pairs, found, way)


def targets(ids: Ids, last: Int[Tensor, " B"]) -> Ids:
    """What follows each token, nothing where that is not to be learned of."""
    found = torch.cat([cut(ids)[:, 1:], cut(last)[:, None]], 1)
    return found.masked_fill(found < 0, UNSCORED)


def sent_back(
    model: Decoder, hidden: Vectors, asked: Ids, notes: tuple[Notes, ...], *, keeps: bool, again: bool
) -> list[dict[str, Factors]]:
    """delta and x at every map of every layer, of the sum of -log p over a chunk, in one backward."""
    logits = model.logits(hidden)
    loss = F.cross_entropy(
        logits.flatten(0, 1).to(wide(logits.dtype)), asked.flatten(), ignore_index=UNSCORED, reduction="sum"
    )
    names = {f"{n} {name}": noted for n, own in enumerate(notes) for name, noted in own.items()}
    found = errors(loss, names, through=keeps, again=again)
    return [{name: found[f"{n} {name}"] for name in own} for n, own in enumerate(notes)]


def taught(model: Decoder, layers: Layers, pairs: list[dict[str, Factors]], found: Found, way: Way) -> Layers:
    """Every layer with the chunk's terms in its levels."""
    made: list[Layer] = []
    for n, (params, layer) in enumerate(zip(continua(model), layers, strict=True)):
        most, keeps = params.shape.options.clip_error, way.through
        inputs = [z if keeps else cut(z) for z in found.inputs[n]]
        own = [
            {name: shorter(pairs[n][f"levels.{l}.{name}"], most) for name in params.shape.maps}
            for l in range(len(inputs))
        ]
        made.append(replace(layer, cms=Continuum(learned(params, levels_of(layer), own, inputs, way=way))))
    return tuple(made)


def interrupted(model: Decoder, state: State, ids: Ids | None, live: Tensor | None, way: Way) -> State:
    """The state before tokens that teach nothing: what the open chunk has so far is learned from, and it begins anew.

    The first of these tokens is the last target, if ids say what it is.
    """
    assert state.open is not None
    if not bool(state.open.count.any()):
        return state
    B = len(state.position)
    last = torch.full((B,), UNSCORED)
    if ids is not None:
        at = torch.zeros(B, dtype=torch.long, device=ids.device) if live is None else live.int().argmax(1)
        last = ids.gather(1, at[:, None])[:, 0]
        last = last if live is None else last.where(live.any(1), torch.full_like(last, UNSCORED))
    groups = alike(state, [0] * B)
    states: list[State] = []
    for rows in groups:
        own = values.take(state, rows)
        held = standing(own)
        held = closed(model, held, last.to(held.ids.device)[rows], way) if held.ids.shape[1] else held
        states.append(State(held.layers, own.position, unopened(held.layers, held.ids)))
    back = torch.tensor([row for rows in groups for row in rows]).argsort()
    return values.take(values.join(*states), back) if len(groups) > 1 else states[0]
