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

from laconic.batches import ReasoningBatch
from laconic.errors import UsageError
from laconic.evaluation.inspection.subject import InspectedRun, LatentKeysValues, LayerTensors, latent_keys_values
from laconic.latent.rollout import Intervention, LatentRollout
from laconic.models.block import apply_rope
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.rng import uniform

InterventionKind = Literal["zero", "mean", "shuffle", "swap", "noise"]
InterventionTarget = Literal["vectors", "cache"]
INTERVENTION_KINDS, INTERVENTION_TARGETS = get_args(InterventionKind), get_args(InterventionTarget)
SHUFFLE_STREAM, SWAP_STREAM, NOISE_STREAM = 1, 2, 3  # purposes of draws


class InterventionSpec(NamedTuple):
    """One way to change thoughts; `at` are the slots that are changed, from 0, None: all."""

    kind: InterventionKind
    target: InterventionTarget = "vectors"
    slots: tuple[int, ...] | None = None


class ReferenceMeans(NamedTuple):
    """Means over a reference set: vectors of each pass [T, M, D]; keys before rotation, and values, [G, M, E]."""

    vectors: Tensor
    keys_before_rope: LayerTensors
    values: LayerTensors
    num_questions: int


@dataclass(frozen=True)
class InterventionInputs:
    """What an edit of a batch draws on: its own thoughts unedited, with their trace; those of its donors; means.

    `index` are the places of the rows in their set, which with `seed` are the key of all draws.
    """

    rollout: LatentRollout
    row_index: NDArray[np.int64]
    seed: int = 0
    donor_rollout: LatentRollout | None = None
    means: ReferenceMeans | None = None


def derangement(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places along the last axis in a single cycle that goes by the order of `u`: none stays where it was."""
    order = np.argsort(u, axis=-1, kind="stable")
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.roll(order, -1, axis=-1), axis=-1)
    return found


def choose_donors(n: int, seed: int) -> NDArray[np.int64]:
    """The row whose thoughts each of `n` rows is given. Raises `Usage` (2) where there is no other row."""
    if n < 2:
        raise UsageError(f"swap: {n} question has no other to take thoughts from; give more rows, or leave swap out")
    return derangement(uniform(seed, SWAP_STREAM, np.arange(n)))


def shuffle_order(inputs: InterventionInputs, slots: Sequence[int]) -> Int[Tensor, "B M"]:
    """The slot that each slot is given the thought of; only those `at` change places."""
    if len(slots) < 2:
        raise UsageError(f"shuffle: {len(slots)} slot has no other to change places with; name two or more, or all")
    moved, M = np.array(slots), inputs.rollout.latents.shape[1]
    order = np.tile(np.arange(M), (len(inputs.row_index), 1))
    order[:, moved] = moved[derangement(uniform(inputs.seed, SHUFFLE_STREAM, inputs.row_index[:, None], moved))]
    return torch.from_numpy(order).to(inputs.rollout.latents.device)


def resolve_slots(spec: InterventionSpec, M: int) -> tuple[int, ...]:
    """The slots that an intervention changes. Raises `Usage` (2) for one that is not there."""
    at = tuple(range(M)) if spec.slots is None else spec.slots
    if not at or min(at) < 0 or max(at) >= M:
        raise UsageError(f"slots {[m + 1 for m in at]}: there are {M} thoughts, from 1; name some of them")
    return at


def norm_matched_noise(like: Tensor, inputs: InterventionInputs, *key: int) -> Tensor:
    """Gaussian vectors of the norms of those of `like` [B, …, E], drawn for each row alone (Box and Muller 1958)."""
    n = like[0].numel()
    u, v = (uniform(inputs.seed, NOISE_STREAM, *key, half, inputs.row_index[:, None], np.arange(n)) for half in (0, 1))
    drawn = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
    made = torch.from_numpy(drawn).to(like.device, like.dtype).view(like.shape)
    return made * (like.norm(dim=-1, keepdim=True) / made.norm(dim=-1, keepdim=True))


def is_sequential(rollout: LatentRollout) -> bool:
    """Whether the thoughts were made one after the other."""
    return rollout.passes.latent_setup == 0


def slots_of_pass(rollout: LatentRollout, t: int) -> slice:
    """The slots that the call `edit(z, t)` is about."""
    return slice(t - 1, t) if is_sequential(rollout) else slice(None)


def latents_read(rollout: LatentRollout, t: int) -> Float[Tensor, "B m D"]:
    """The vectors that a rollout read where `edit(z, t)` would have been called."""
    return rollout.records[0 if is_sequential(rollout) else t].latents[:, slots_of_pass(rollout, t)]


def make_intervention(spec: InterventionSpec, inputs: InterventionInputs) -> Intervention:
    """The edit that changes vectors just before they are read."""
    own, M = inputs.rollout, inputs.rollout.latents.shape[1]
    at = resolve_slots(spec, M)
    chosen = torch.zeros(M, dtype=torch.bool, device=own.latents.device)
    chosen[list(at)] = True
    order = shuffle_order(inputs, at) if spec.kind == "shuffle" else None

    def edit(z: Tensor, t: int) -> Tensor:
        new = replacement_vectors(spec.kind, z, t, inputs, order)
        return torch.where(chosen[slots_of_pass(own, t)][None, :, None], new.to(z.dtype), z)

    return edit


def replacement_vectors(
    kind: InterventionKind, z: Tensor, t: int, inputs: InterventionInputs, order: Tensor | None
) -> Float[Tensor, "B m D"]:
    """What is read in place of z. One after the other, a shuffle takes what the slots held unedited."""
    own, here = inputs.rollout, slots_of_pass(inputs.rollout, t)
    if kind == "mean" and inputs.means is not None:
        return inputs.means.vectors[0 if is_sequential(own) else t][here].expand_as(z)
    if kind == "swap" and inputs.donor_rollout is not None:
        return latents_read(inputs.donor_rollout, t)
    if kind == "shuffle" and order is not None:
        held = own.records[0].latents if is_sequential(own) else z
        return held.gather(1, order[..., None].expand_as(held))[:, here]
    if kind == "noise":
        return norm_matched_noise(z, inputs, t)
    return zeros_for(kind, z)


def zeros_for(kind: InterventionKind, like: Tensor) -> Tensor:
    """Zeros; raises `Usage` (2) where an edit asks for what is not given."""
    if kind != "zero":
        raise UsageError(f"{kind}: needs the thoughts on other questions, and there are none; give --task SET")
    return torch.zeros_like(like)


def intervene_on_cache(decoder: Decoder, spec: InterventionSpec, inputs: InterventionInputs) -> KVCache:
    """The cache of the unedited thoughts with keys and values of its slots replaced in every layer."""
    own, state, M = inputs.rollout, inputs.rollout.cache, inputs.rollout.latents.shape[1]
    at = resolve_slots(spec, M)
    order = shuffle_order(inputs, at) if spec.kind == "shuffle" else None
    mine = latent_keys_values(decoder, own)
    theirs = (
        latent_keys_values(decoder, inputs.donor_rollout)
        if spec.kind == "swap" and inputs.donor_rollout is not None
        else None
    )
    frame = decoder.build_context(
        state.positions, state.valid, state.S - M, None, state.keys[0].dtype, all_valid=False, needs_scores=False
    )  # fmt: skip
    chosen = torch.zeros(state.S, dtype=torch.bool, device=state.valid.device)
    chosen[[state.S - M + m for m in at]] = True
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for l, (k, v) in enumerate(zip(state.keys, state.values, strict=True)):
        new_k, new_v = (
            replacement_kv(spec.kind, l, side, mine, theirs, inputs, order) for side in ("before", "values")
        )
        keys.append(write_slots(k, apply_rope(new_k.to(k.dtype), frame), chosen))
        values.append(write_slots(v, new_v.to(v.dtype), chosen))
    return replace(state, keys=tuple(keys), values=tuple(values))


def replacement_kv(
    kind: InterventionKind,
    layer: int,
    side: Literal["before", "values"],
    latents: LatentKeysValues,
    donors: LatentKeysValues | None,
    inputs: InterventionInputs,
    order: Tensor | None,
) -> Float[Tensor, "B G M E"]:
    """Keys before rotation, or values, that the slots of one layer are given."""
    x = getattr(latents, side)[layer]
    if kind == "mean" and inputs.means is not None:
        return getattr(inputs.means, side)[layer].expand_as(x)
    if kind == "swap" and donors is not None:
        return getattr(donors, side)[layer]
    if kind == "shuffle" and order is not None:
        return x.gather(2, order[:, None, :, None].expand_as(x))
    if kind == "noise":
        return norm_matched_noise(x, inputs, layer, int(side == "values"))
    return zeros_for(kind, x)


def write_slots(
    x: Float[Tensor, "B G S E"], new: Float[Tensor, "B G M E"], slot_mask: Tensor
) -> Float[Tensor, "B G S E"]:
    """The last M slots of a cache given anew, those that are chosen."""
    M = new.shape[2]
    return torch.cat([x[:, :, :-M], torch.where(slot_mask[-M:][:, None], new, x[:, :, -M:])], 2)


def run_intervention(
    run: InspectedRun, batch: ReasoningBatch, spec: InterventionSpec, inputs: InterventionInputs
) -> LatentRollout:
    """The rollout of a batch under an intervention, whose cache an answer follows."""
    if spec.target == "cache":
        return inputs.rollout._replace(cache=intervene_on_cache(run.decoder, spec, inputs))
    return run.think(batch, edit=make_intervention(spec, inputs))


@torch.no_grad()
def compute_reference_means(run: InspectedRun, batches: Iterable[ReasoningBatch]) -> ReferenceMeans:
    """The mean of each slot over all rows of the batches, in float64."""
    total: list[Tensor] = []
    n = 0
    for batch in batches:
        rolled = run.think(batch, trace=True)
        found = latent_keys_values(run.decoder, rolled)
        read = torch.stack([trace.latents for trace in rolled.records], 1)
        sums = [x.double().sum(0) for x in (read, *found.keys_before_rope, *found.values)]
        total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
        n += batch.B
    each = [x / n for x in total]
    L = (len(each) - 1) // 2
    return ReferenceMeans(each[0], tuple(each[1 : 1 + L]), tuple(each[1 + L :]), n)
