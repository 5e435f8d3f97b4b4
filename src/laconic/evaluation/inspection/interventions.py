"""Interventions on latents: zero, mean, shuffle, swap or noise, to test whether answers depend on them.

Either the vectors are replaced just before they are read, in every pass, and everything after them is recomputed; or
the latents' keys and values are replaced in the finished cache. A replacing key is taken before rotation and rotated to
its new position, since a cache whose slots keep their old rotations would be the same cache in another order.

Shapes: B rows, M latents, D width, G KV heads, E head size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.errors import UsageError
from laconic.evaluation.inspection.inspected_run import InspectedRun, KeysValues, LayerTensors, latent_keys_values
from laconic.latent.rollout import LatentRollout
from laconic.models.block import Block, build_context
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.rng import uniform

InterventionKind = Literal["swap", "mean", "shuffle", "noise", "zero"]
InterventionTarget = Literal["vectors", "cache"]
INTERVENTION_KINDS: tuple[InterventionKind, ...] = get_args(InterventionKind)
INTERVENTION_TARGETS: tuple[InterventionTarget, ...] = get_args(InterventionTarget)
SHUFFLE_STREAM, SWAP_STREAM, NOISE_STREAM = 1, 2, 3  # streams of random numbers


class InterventionSpec(NamedTuple):
    """One intervention on all latents."""

    kind: InterventionKind
    target: InterventionTarget = "vectors"


def list_interventions(num_latents: int) -> list[InterventionSpec]:
    """Return every intervention that is possible; a single latent cannot be shuffled."""
    return [
        InterventionSpec(kind, target)
        for kind in INTERVENTION_KINDS
        for target in INTERVENTION_TARGETS
        if kind != "shuffle" or num_latents > 1
    ]


class ReferenceMeans(NamedTuple):
    """Means over a reference set: vectors of each pass [T, M, D]; keys before rotation and values [G, M, E]."""

    vectors: Tensor
    keys_before_rope: LayerTensors
    values: LayerTensors


@dataclass(frozen=True)
class InterventionInputs:
    """What interventions on a batch draw on: its rollout without intervention, with recorded passes, and others'.

    All random numbers are keyed by `seed` and `row_index`, the index of each row in its set. "swap" needs
    `donor_rollout`, the rollout of the donors' questions, and "mean" needs means.
    """

    rollout: LatentRollout
    row_index: NDArray[np.int64]
    seed: int = 0
    donor_rollout: LatentRollout | None = None
    means: ReferenceMeans | None = None


def derangement(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return a permutation along the last axis that is a single cycle, in the order of `u`: no element stays."""
    order = np.argsort(u, axis=-1, kind="stable")
    permutation = np.empty_like(order)
    np.put_along_axis(permutation, order, np.roll(order, -1, axis=-1), axis=-1)
    return permutation


def choose_donors(n: int, seed: int) -> NDArray[np.int64]:
    """Return the row that donates its latents to each of `n` rows; `UsageError` for a single row."""
    if n < 2:
        raise UsageError("swap needs at least two questions; raise --limit, or use a larger --task")
    return derangement(uniform(seed, SWAP_STREAM, np.arange(n)))


def shuffle_order(inputs: InterventionInputs) -> Int[Tensor, "B M"]:
    """Return the latent that each slot receives; none receives its own."""
    slots = np.arange(inputs.rollout.latents.shape[1])
    order = derangement(uniform(inputs.seed, SHUFFLE_STREAM, inputs.row_index[:, None], slots))
    return torch.from_numpy(order).to(inputs.rollout.latents.device)


def norm_matched_noise(like: Tensor, inputs: InterventionInputs, *key: int) -> Tensor:
    """Return Gaussian vectors with the norms of `like` [B, …, E], drawn for each row alone (Box and Muller 1958)."""
    n = like[0].numel()
    u, v = (uniform(inputs.seed, NOISE_STREAM, *key, half, inputs.row_index[:, None], np.arange(n)) for half in (0, 1))
    normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
    noise = torch.from_numpy(normal).to(like.device, like.dtype).view(like.shape)
    return noise * (like.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))


def replacement_vectors(
    kind: InterventionKind, z: Tensor, t: int, inputs: InterventionInputs
) -> Float[Tensor, "B m D"]:
    """Return what is read in place of z. A shuffle of sequential latents takes those without intervention."""
    rollout = inputs.rollout
    is_sequential = rollout.passes[0].latent_setup == 0
    record, slots = (0, slice(t - 1, t)) if is_sequential else (t, slice(None))
    match kind:
        case "swap":
            assert inputs.donor_rollout is not None
            return inputs.donor_rollout.records[record].latents[:, slots]
        case "mean":
            assert inputs.means is not None
            return inputs.means.vectors[record][slots].expand_as(z)
        case "shuffle":
            source = rollout.records[0].latents if is_sequential else z
            return source.gather(1, shuffle_order(inputs)[..., None].expand_as(source))[:, slots]
        case "noise":
            return norm_matched_noise(z, inputs, t)
        case "zero":
            return torch.zeros_like(z)


def intervene_on_cache(decoder: Decoder, kind: InterventionKind, inputs: InterventionInputs) -> KVCache:
    rollout = inputs.rollout
    cache = rollout.cache
    M = rollout.latents.shape[1]
    source = inputs.donor_rollout if kind == "swap" else rollout
    assert source is not None
    latents = latent_keys_values(decoder, source)
    context = build_context(
        decoder.config,
        cache.positions,
        cache.valid,
        cache.S - M,
        None,
        cache.keys[0].dtype,
        backend=decoder.attn_implementation,
        all_valid=False,
        needs_visible=False,
    )
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for l, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        new_k, new_v = (replacement_kv(kind, l, side, latents, inputs) for side in ("keys_before_rope", "values"))
        rotated = cast(Block, decoder.layers[l]).apply_rope(new_k.to(k.dtype), context)
        keys.append(torch.cat([k[:, :, :-M], rotated], 2))
        values.append(torch.cat([v[:, :, :-M], new_v.to(v.dtype)], 2))
    return replace(cache, keys=tuple(keys), values=tuple(values))


def replacement_kv(
    kind: InterventionKind,
    layer: int,
    side: Literal["keys_before_rope", "values"],
    latents: KeysValues,
    inputs: InterventionInputs,
) -> Float[Tensor, "B G M E"]:
    """Return the keys before rotation, or the values, that the slots of one layer receive.

    `latents` are those of the rollout, for "swap" those of the donors.
    """
    x = getattr(latents, side)[layer]
    match kind:
        case "swap":
            return x
        case "mean":
            return getattr(inputs.means, side)[layer].expand_as(x)
        case "shuffle":
            return x.gather(2, shuffle_order(inputs)[:, None, :, None].expand_as(x))
        case "noise":
            return norm_matched_noise(x, inputs, layer, int(side == "values"))
        case "zero":
            return torch.zeros_like(x)


def run_intervention(
    run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs, spec: InterventionSpec
) -> LatentRollout:
    """Return the rollout of a batch under an intervention; answers continue its cache."""
    if spec.target == "cache":
        return inputs.rollout._replace(cache=intervene_on_cache(run.decoder, spec.kind, inputs))
    return run.think(batch, intervention=lambda z, t: replacement_vectors(spec.kind, z, t, inputs).to(z.dtype))


@torch.no_grad()
def compute_reference_means(run: InspectedRun, batches: Iterable[ReasoningBatch]) -> ReferenceMeans:
    """Return the mean of each slot over all rows of the batches, in float64."""
    totals: list[Tensor] = []
    n = 0
    for batch in batches:
        rollout = run.think(batch, record_passes=True)
        slots = latent_keys_values(run.decoder, rollout)
        vectors = torch.stack([record.latents for record in rollout.records], 1)
        sums = [x.double().sum(0) for x in (vectors, *slots.keys_before_rope, *slots.values)]
        totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
        n += batch.B
    vectors, *rest = [x / n for x in totals]
    L = len(rest) // 2
    return ReferenceMeans(vectors, tuple(rest[:L]), tuple(rest[L:]))
