"""Thoughts changed on purpose, to see whether an answer depends on them: zero, mean, shuffle, swap, noise.

Either the vectors are changed just before they are read, in every round, and all that follows is computed anew; or the
slots' keys and values are replaced in the cache when the thoughts are done. A key then takes the place it comes to
stand in: it is changed before rotation and turned to its own slot's position, since a cache whose slots carry their
old rotations along would be the same cache in another order.

Shapes: B rows, M slots, D width, G heads of keys, E width of a head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from laconic.core.block import rotated
from laconic.core.cache import Cache
from laconic.core.contract import Reasoning
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.keyed import uniform
from laconic.core.rollout import Edit, Rollout
from laconic.evaluation.subject import Layers, Slots, Subject, slots

Kind = Literal["zero", "mean", "shuffle", "swap", "noise"]
Where = Literal["vectors", "cache"]
KINDS, WHERES = get_args(Kind), get_args(Where)
SHUFFLED, SWAPPED, NOISE = 1, 2, 3  # purposes of draws


class Intervention(NamedTuple):
    """One way to change thoughts; `at` are the slots that are changed, from 0, None: all."""

    kind: Kind
    where: Where = "vectors"
    at: tuple[int, ...] | None = None


class Means(NamedTuple):
    """Means over a reference set: vectors of each pass [T, M, D]; keys before rotation, and values, [G, M, E]."""

    vectors: Tensor
    before: Layers
    values: Layers
    questions: int


@dataclass(frozen=True)
class Given:
    """What an edit of a batch draws on: its own thoughts unedited, with their trace; those of its donors; means.

    `index` are the places of the rows in their set, which with `seed` are the key of all draws.
    """

    own: Rollout
    index: NDArray[np.int64]
    seed: int = 0
    donors: Rollout | None = None
    means: Means | None = None


def deranged(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places along the last axis in a single cycle that goes by the order of `u`: none stays where it was."""
    order = np.argsort(u, axis=-1, kind="stable")
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.roll(order, -1, axis=-1), axis=-1)
    return found


def donors(n: int, seed: int) -> NDArray[np.int64]:
    """The row whose thoughts each of `n` rows is given. Raises `Usage` (2) where there is no other row."""
    if n < 2:
        raise Usage(f"swap: {n} question has no other to take thoughts from; give more rows, or leave swap out")
    return deranged(uniform(seed, SWAPPED, np.arange(n)))


def shuffled(given: Given, at: Sequence[int]) -> Int[Tensor, "B M"]:
    """The slot that each slot is given the thought of; only those `at` change places."""
    if len(at) < 2:
        raise Usage(f"shuffle: {len(at)} slot has no other to change places with; name two or more, or all")
    moved, M = np.array(at), given.own.thoughts.shape[1]
    order = np.tile(np.arange(M), (len(given.index), 1))
    order[:, moved] = moved[deranged(uniform(given.seed, SHUFFLED, given.index[:, None], moved))]
    return torch.from_numpy(order).to(given.own.thoughts.device)


def listed(intervention: Intervention, M: int) -> tuple[int, ...]:
    """The slots that an intervention changes. Raises `Usage` (2) for one that is not there."""
    at = tuple(range(M)) if intervention.at is None else intervention.at
    if not at or min(at) < 0 or max(at) >= M:
        raise Usage(f"slots {[m + 1 for m in at]}: there are {M} thoughts, from 1; name some of them")
    return at


def noise(like: Tensor, given: Given, *key: int) -> Tensor:
    """Gaussian vectors of the norms of those of `like` [B, …, E], drawn for each row alone (Box and Muller 1958)."""
    n = like[0].numel()
    u, v = (uniform(given.seed, NOISE, *key, half, given.index[:, None], np.arange(n)) for half in (0, 1))
    drawn = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
    made = torch.from_numpy(drawn).to(like.device, like.dtype).view(like.shape)
    return made * (like.norm(dim=-1, keepdim=True) / made.norm(dim=-1, keepdim=True))


def in_turn(rolled: Rollout) -> bool:
    """Whether the thoughts were made one after the other."""
    return rolled.passes.place == 0


def columns(rolled: Rollout, t: int) -> slice:
    """The slots that the call `edit(z, t)` is about."""
    return slice(t - 1, t) if in_turn(rolled) else slice(None)


def read_in(rolled: Rollout, t: int) -> Float[Tensor, "B m D"]:
    """The vectors that a rollout read where `edit(z, t)` would have been called."""
    return rolled.trace[0 if in_turn(rolled) else t].thoughts[:, columns(rolled, t)]


def editor(intervention: Intervention, given: Given) -> Edit:
    """The edit that changes vectors just before they are read."""
    own, M = given.own, given.own.thoughts.shape[1]
    at = listed(intervention, M)
    chosen = torch.zeros(M, dtype=torch.bool, device=own.thoughts.device)
    chosen[list(at)] = True
    order = shuffled(given, at) if intervention.kind == "shuffle" else None

    def edit(z: Tensor, t: int) -> Tensor:
        new = vectors(intervention.kind, z, t, given, order)
        return torch.where(chosen[columns(own, t)][None, :, None], new.to(z.dtype), z)

    return edit


def vectors(kind: Kind, z: Tensor, t: int, given: Given, order: Tensor | None) -> Float[Tensor, "B m D"]:
    """What is read in place of z. One after the other, a shuffle takes what the slots held unedited."""
    own, here = given.own, columns(given.own, t)
    if kind == "mean" and given.means is not None:
        return given.means.vectors[0 if in_turn(own) else t][here].expand_as(z)
    if kind == "swap" and given.donors is not None:
        return read_in(given.donors, t)
    if kind == "shuffle" and order is not None:
        held = own.trace[0].thoughts if in_turn(own) else z
        return held.gather(1, order[..., None].expand_as(held))[:, here]
    if kind == "noise":
        return noise(z, given, t)
    return nothing(kind, z)


def nothing(kind: Kind, like: Tensor) -> Tensor:
    """Zeros; raises `Usage` (2) where an edit asks for what is not given."""
    if kind != "zero":
        raise Usage(f"{kind}: needs the thoughts on other questions, and there are none; give --on SET")
    return torch.zeros_like(like)


def cached(decoder: Decoder, intervention: Intervention, given: Given) -> Cache:
    """The cache of the unedited thoughts with keys and values of its slots replaced in every layer."""
    own, state, M = given.own, given.own.state, given.own.thoughts.shape[1]
    at = listed(intervention, M)
    order = shuffled(given, at) if intervention.kind == "shuffle" else None
    mine = slots(decoder, own)
    theirs = slots(decoder, given.donors) if intervention.kind == "swap" and given.donors is not None else None
    frame = decoder.frame(
        state.positions, state.live, state.S - M, None, state.keys[0].dtype, whole=False, eager=False
    )  # fmt: skip
    chosen = torch.zeros(state.S, dtype=torch.bool, device=state.live.device)
    chosen[[state.S - M + m for m in at]] = True
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for l, (k, v) in enumerate(zip(state.keys, state.values, strict=True)):
        new_k, new_v = (held(intervention.kind, l, side, mine, theirs, given, order) for side in ("before", "values"))
        keys.append(put(k, rotated(new_k.to(k.dtype), frame), chosen))
        values.append(put(v, new_v.to(v.dtype), chosen))
    return replace(state, keys=tuple(keys), values=tuple(values))


def held(
    kind: Kind,
    layer: int,
    side: Literal["before", "values"],
    mine: Slots,
    theirs: Slots | None,
    given: Given,
    order: Tensor | None,
) -> Float[Tensor, "B G M E"]:
    """Keys before rotation, or values, that the slots of one layer are given."""
    x = getattr(mine, side)[layer]
    if kind == "mean" and given.means is not None:
        return getattr(given.means, side)[layer].expand_as(x)
    if kind == "swap" and theirs is not None:
        return getattr(theirs, side)[layer]
    if kind == "shuffle" and order is not None:
        return x.gather(2, order[:, None, :, None].expand_as(x))
    if kind == "noise":
        return noise(x, given, layer, int(side == "values"))
    return nothing(kind, x)


def put(x: Float[Tensor, "B G S E"], new: Float[Tensor, "B G M E"], chosen: Tensor) -> Float[Tensor, "B G S E"]:
    """The last M slots of a cache given anew, those that are chosen."""
    M = new.shape[2]
    return torch.cat([x[:, :, :-M], torch.where(chosen[-M:][:, None], new, x[:, :, -M:])], 2)


def edited(subject: Subject, batch: Reasoning, intervention: Intervention, given: Given) -> Rollout:
    """The rollout of a batch under an intervention, whose cache an answer follows."""
    if intervention.where == "cache":
        return given.own._replace(state=cached(subject.decoder, intervention, given))
    return subject.think(batch, edit=editor(intervention, given))


@torch.no_grad()
def means(subject: Subject, batches: Iterable[Reasoning]) -> Means:
    """The mean of each slot over all rows of the batches, in float64."""
    total: list[Tensor] = []
    n = 0
    for batch in batches:
        rolled = subject.think(batch, trace=True)
        found = slots(subject.decoder, rolled)
        read = torch.stack([trace.thoughts for trace in rolled.trace], 1)
        sums = [x.double().sum(0) for x in (read, *found.before, *found.values)]
        total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
        n += batch.B
    each = [x / n for x in total]
    L = (len(each) - 1) // 2
    return Means(each[0], tuple(each[1 : 1 + L]), tuple(each[1 + L :]), n)
