"""Latent rollout before answers, as a generator that yields what rows read next and receives the hidden states.

`run_reads` runs the reads of a batch. An engine with continuous batching runs those of one row, and reads the latents
of several questions and the tokens of other answers in one pass. The latents are those of `LatentThoughts.think`.

Latent m depends on those before it only, so it is final after m Jacobi iterations at the latest. PCCoT arXiv:2506.18582
runs T iterations for every question; here a row can end earlier, when the next iteration would not change its latents,
or when those that a stop head (`latent.stop_head`) keeps are final.

The last read of a row ends with a suffix, whose last hidden state chooses the first new token. If any iteration may be
the last of a row, all of them read the suffix, and the next one removes it. It follows the latents, so it does not
change them.

Symbols: z_m^(t) the latents read in iteration t, M their number, T the number of iterations, N the number of latents
that a row keeps, bot the last vector of the prefix; the residual of iteration t is the largest
|z_m^(t+1) - z_m^(t)| / |z_m^(t)| over the latents m of a row.
"""

import math
from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.batches import PassCounts
from laconic.errors import UsageError
from laconic.latent.rollout import ForwardFn
from laconic.latent.thoughts import LatentThoughts
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache


class RolloutRead(NamedTuple):
    """Vectors that rows read next."""

    inputs_embeds: Float[Tensor, "B n D"]
    num_outputs: int = 1  # last hidden states to send back
    num_replaced: int = 0  # slots at the end of the rows' KV cache to remove first
    is_running: Bool[Tensor, " rows"] | None = None  # False at rows of the read before that have ended; None: all go on


class RowCounts(NamedTuple):
    """Decoder calls of a row's rollout if nothing is chunked, and the number N of latents that it keeps."""

    passes: PassCounts
    num_latents: int


RolloutReads = Generator[RolloutRead, Float[Tensor, "B num_outputs D"], tuple[RowCounts, ...]]


class FinishedReads(NamedTuple):
    """The last hidden state of each row, the KV cache of all that it has read, and its counts."""

    hidden_states: Float[Tensor, "B D"]
    cache: KVCache
    counts: tuple[RowCounts, ...]


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
    z, z_next = z.to(accumulation_dtype(z.dtype)), z_next.to(accumulation_dtype(z.dtype))
    return ((z_next - z).square().sum(2) / z.square().sum(2)).amax(1).sqrt()


def is_sequential(latent_thoughts: LatentThoughts, M: int, tolerance: float) -> bool:
    """Return whether one latent is read after the other.

    A stop head without a tolerance asks in iteration t whether N = t, for which the first t latents suffice, unless it
    may keep latents that no iteration makes final.
    """
    T = latent_thoughts.num_iterations
    return T is None or (latent_thoughts.stop_head is not None and not tolerance and T >= M)


def can_read_suffix(latent_thoughts: LatentThoughts, M: int, tolerance: float) -> bool:
    """Return whether the last iteration of a row can read a suffix: if N is known before, and so where it belongs."""
    return latent_thoughts.stop_head is None or is_sequential(latent_thoughts, M, tolerance)


def read_latents(
    latent_thoughts: LatentThoughts,
    prefix: Float[Tensor, "B Np D"],
    M: int,
    suffix: Float[Tensor, "1 Ns D"],
    tolerance: float = 0.0,
) -> RolloutReads:
    """Yield the reads of a prefix, which ends with bot, of M latents and a suffix; return the counts of each row.

    A row ends once its residual is below the tolerance (0 runs all iterations), or when the N latents that the stop
    head keeps are final. It has no part in further reads, so its latents do not depend on those of other rows.

    A read leaves out what no other latent and no suffix depends on: latents that are already final, in iteration t the
    first t - 1, whose keys and values are in the cache, and z_M. More iterations than latents change nothing.
    """
    T, head, project = latent_thoughts.num_iterations, latent_thoughts.stop_head, latent_thoughts.project
    check_tolerance(tolerance, T)
    B = len(prefix)
    last = M if T is None else min(T, M)
    one_by_one = is_sequential(latent_thoughts, M, tolerance)
    ends_early = bool(tolerance) or head is not None
    setup = PassCounts(1, 0, 0, 0) if T is None else PassCounts(0, 1, 0, 0)
    suffix = suffix.to(prefix.dtype).expand(B, -1, -1)
    n = 1 if one_by_one else M  # latents that the outputs of the next read give
    placeholders = latent_thoughts.placeholder.to(prefix.dtype).expand(B, M if T == 0 else n - 1, -1)
    inputs = torch.cat([prefix, placeholders], 1)
    if last == 0:
        yield RolloutRead(torch.cat([inputs, suffix], 1))
        return (RowCounts(setup, M),) * B
    z = project((yield RolloutRead(inputs, num_outputs=n)))
    num_replaced = n - 1  # the placeholders
    rows = torch.arange(B, device=z.device)  # those that are running
    is_running = None
    hidden_states = z[:, :0]
    counts: dict[int, RowCounts] = {}
    for t in range(1, last + 1):
        n = 1 if one_by_one else M - t
        inputs = torch.cat([z, suffix[: len(z)].to(z.dtype)], 1) if ends_early or t == last else z[:, :n]
        outputs = yield RolloutRead(inputs, inputs.shape[1], num_replaced, is_running)
        z_next = project(outputs[:, :n])
        num_replaced = inputs.shape[1] - 1  # all but the first latent, which is final
        num_latents = torch.full_like(rows, M)
        if head is not None:  # whether N <= t depends on the first t only, so those that have not been read may be 0
            hidden_states = torch.cat([hidden_states[:, : t - 1], outputs[:, : z.shape[1]]], 1)
            num_latents = head.count_latents(F.pad(hidden_states, (0, 0, 0, M - hidden_states.shape[1])))
        stops = (num_latents <= t) | (t == last)
        if tolerance and t < last:
            stops = stops | (jacobi_residual(z[:, 1:], z_next) < tolerance)
        z = z_next
        is_running = None
        if bool(stops.any()):
            for row, n_kept in zip(rows[stops], num_latents[stops], strict=True):
                counts[int(row)] = RowCounts(setup._replace(latent=t), int(n_kept))
            is_running = ~stops
            rows, z, hidden_states = rows[is_running], z[is_running], hidden_states[is_running]
        if not len(rows):
            break
    return tuple(counts[row] for row in range(B))


def run_reads(decoder: ForwardFn, reads: RolloutReads, cache: KVCache | None, mask: Tensor | None) -> FinishedReads:
    """Run the reads of a batch after a `cache`; `mask` is True at the real vectors of the prefix."""
    read = next(reads)
    ended = list[tuple[Tensor, Tensor, KVCache]]()
    rows = torch.arange(len(read.inputs_embeds), device=read.inputs_embeds.device)
    while True:
        if mask is not None:
            mask = F.pad(mask, (0, read.inputs_embeds.shape[1] - mask.shape[1]), value=True)
        output = decoder(read.inputs_embeds, cache, attention_mask=mask, num_outputs=read.num_outputs)
        last_hidden = output.hidden_states[:, -1]
        cache = output.cache
        mask = None
        try:
            read = reads.send(output.hidden_states)
        except StopIteration as end:
            ended.append((rows, last_hidden, cache))
            return join_rows(ended, end.value)
        if read.is_running is not None:
            has_ended = ~read.is_running
            ended.append((rows[has_ended], last_hidden[has_ended], cache.select_rows(has_ended)))
            rows = rows[read.is_running]
            cache = cache.select_rows(read.is_running)
        cache = cache.crop(cache.S - read.num_replaced)


def join_rows(ended: list[tuple[Tensor, Tensor, KVCache]], counts: tuple[RowCounts, ...]) -> FinishedReads:
    """Return what all rows have read, in their order; `ended` are index, last hidden state and cache of some rows."""
    if len(ended) == 1:
        return FinishedReads(*ended[0][1:], counts)
    rows, hidden_states, caches = zip(*ended, strict=True)
    order = torch.cat(rows).argsort()
    return FinishedReads(torch.cat(hidden_states)[order], KVCache.concat_rows(*caches).select_rows(order), counts)


def run_stepwise_rollout(
    latent_thoughts: LatentThoughts,
    question: Float[Tensor, "1 Nq D"],
    M: int,
    suffix: Float[Tensor, "1 Ns D"],
    tolerance: float = 0.0,
) -> RolloutReads:
    """Yield the reads of one question, of M latents and of a suffix, which replaces latents that a stop head drops."""
    prefix = torch.cat([question, latent_thoughts.begin.to(question.dtype).expand(1, 1, -1)], 1)
    if can_read_suffix(latent_thoughts, M, tolerance):
        return (yield from read_latents(latent_thoughts, prefix, M, suffix, tolerance))
    (counts,) = yield from read_latents(latent_thoughts, prefix, M, suffix[:, :0], tolerance)
    yield RolloutRead(suffix, num_replaced=M - counts.num_latents)
    return (counts,)
