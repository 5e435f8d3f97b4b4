"""Jacobi iteration that ends for each row on its own: as many passes as a question needs.

PCCoT arXiv:2506.18582 runs T iterations for every question. The iteration has converged once another one would not
change the latents. Latent m depends on those before it only, so it is final after m iterations at the latest.

With a stop head (`latent.stop_head`), a row ends after N iterations if the head keeps N latents.

Symbols: z_m^(t) the latents read in iteration t, T the largest number of iterations; the residual of iteration t is
the largest |z_m^(t+1) - z_m^(t)| / |z_m^(t)| over the latents m of a row.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.batches import PassCounts
from laconic.errors import UsageError
from laconic.latent.rollout import (
    ForwardFn,
    LatentPrefix,
    LatentRollout,
    ProjectFn,
    initial_latents,
    jacobi_update,
    read_placeholders,
)
from laconic.latent.stop_head import keep_first_latents
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache

CountFn = Callable[[Float[Tensor, "B M D"]], Int[Tensor, " B"]]


def check_tolerance(tolerance: float, num_iterations: int | None) -> None:
    """Raise `UsageError` for a tolerance that is not 0 or above, or for latents without iterations."""
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"jacobi_tolerance={tolerance}: give a number of 0 or more")
    if tolerance and not num_iterations:
        raise UsageError(f"jacobi_tolerance={tolerance}: there are no Jacobi iterations to end; remove it")


def jacobi_residual(z: Float[Tensor, "B M D"], z_next: Float[Tensor, "B M D"]) -> Float[Tensor, " B"]:
    """Return the largest relative change |z_next - z| / |z| of a latent in each row.

    A mean over the latents would hide a single one that still changes among many.
    """
    dtype = accumulation_dtype(z.dtype)
    z, z_next = z.to(dtype), z_next.to(dtype)
    return ((z_next - z).square().sum(2) / z.square().sum(2)).amax(1).sqrt()


def run_adaptive_rollout(
    decoder: ForwardFn,
    prefix: LatentPrefix,
    placeholder: Float[Tensor, " D"],
    M: int,
    num_iterations: int,
    *,
    project: ProjectFn,
    tolerance: float = 0.0,
    count_latents: CountFn | None = None,
) -> LatentRollout:
    """Run the Jacobi iteration of `run_latent_rollout`, and end each row on its own.

    A row ends once its residual is below the tolerance, or when the latents that the stop head keeps are final. A row
    that has ended takes part in no further pass, so its latents do not depend on those of other rows.

    `count_latents` maps the latents' hidden states to the number N of latents that each row keeps; whether N <= n must
    depend on the first n only. The other slots of the cache are not valid.
    """
    B, Np, D = prefix.embeds.shape
    placeholders = placeholder.to(prefix.embeds.dtype).expand(B, M, D)
    output, prefix_cache = read_placeholders(decoder, prefix, placeholders)
    begin_hidden = output.hidden_states[:, Np - 1]
    rows = torch.arange(B, device=placeholders.device)
    z_next = initial_latents(output.hidden_states[:, Np - 1 :], project)
    ended_rows, ended = list[Tensor](), list[LatentRollout]()
    for t in range(1, num_iterations + 1):
        z = z_next
        output = decoder(z, prefix_cache)
        z_next = jacobi_update(z, output.hidden_states, project)
        N = None if count_latents is None else count_latents(output.hidden_states)
        if t == num_iterations:
            stops = torch.ones_like(rows).bool()
        else:
            stops = jacobi_residual(z, z_next) < tolerance
            stops = stops if N is None else stops | (t >= N)
        if not bool(stops.any()):
            continue
        index = stops.nonzero()[:, 0]
        rest = (~stops).nonzero()[:, 0]
        last_cache = output.cache if N is None else keep_first_latents(output.cache, N, M)
        passes = (PassCounts(0, 1, t, 0),) * len(index)
        part = (z[index], output.hidden_states[index], begin_hidden[rows[index]], last_cache.select_rows(index))
        ended_rows.append(rows[index])
        ended.append(LatentRollout(*part, passes))
        if not len(rest):
            break
        rows, z_next, prefix_cache = rows[rest], z_next[rest], prefix_cache.select_rows(rest)  # go on with the others
    return join_rollouts(ended, torch.cat(ended_rows).argsort())


def join_rollouts(parts: list[LatentRollout], order: Int[Tensor, " B"]) -> LatentRollout:
    """Return the rollout of all rows, in their order, from those that ended together."""
    passes = [counts for part in parts for counts in part.passes]
    return LatentRollout(
        torch.cat([part.latents for part in parts])[order],
        torch.cat([part.hidden_states for part in parts])[order],
        torch.cat([part.begin_hidden for part in parts])[order],
        KVCache.concat_rows(*(part.cache for part in parts)).select_rows(order),
        tuple(passes[int(i)] for i in order),
    )
