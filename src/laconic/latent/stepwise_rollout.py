"""Latent rollout of one question as a generator, which yields what to read next and receives the hidden states.

An engine with continuous batching reads the latents of several questions and the tokens of other answers in one pass.
The results are those of `LatentThoughts.think`.

Symbols: z_m the latents, M their number, T the number of Jacobi iterations, bot the last vector of the prefix.
"""

from collections.abc import Generator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.batches import PassCounts
from laconic.latent.adaptive_rollout import CountFn, jacobi_residual
from laconic.latent.rollout import ProjectFn, initial_latents, jacobi_update
from laconic.latent.thoughts import LatentThoughts


class RolloutRead(NamedTuple):
    """Vectors that a row reads next."""

    inputs_embeds: Float[Tensor, "B n D"]
    num_outputs: int = 1  # last hidden states to send back
    num_replaced: int = 0  # slots at the end of the row's KV cache to remove first


class StepwiseCounts(NamedTuple):
    """Decoder calls of a rollout if nothing is chunked, and the number of latents in the cache at its end."""

    passes: PassCounts
    num_latents: int


RolloutReads = Generator[RolloutRead, Float[Tensor, "1 num_outputs D"], StepwiseCounts]


def run_stepwise_rollout(
    latent_thoughts: LatentThoughts,
    question: Float[Tensor, "1 Nq D"],
    M: int,
    suffix: Float[Tensor, "1 Ns D"],
    tolerance: float = 0.0,
) -> RolloutReads:
    """Compute M latents after a question, and read a suffix, whose last hidden state chooses the first new token.

    The Jacobi iteration ends when its residual is below the tolerance; 0 runs all iterations. Latents that a stop head
    does not keep are replaced by the suffix.
    """
    prefix = torch.cat([question, latent_thoughts.begin.to(question.dtype).expand(1, 1, -1)], 1)
    T, stop_head = latent_thoughts.num_iterations, latent_thoughts.stop_head
    if T and (tolerance or stop_head is not None):
        count_latents = None if stop_head is None else stop_head.count_latents
        placeholders = latent_thoughts.placeholder.to(question.dtype).expand(1, M, -1)
        counts = yield from read_adaptive(prefix, placeholders, T, latent_thoughts.project, tolerance, count_latents)
        yield RolloutRead(suffix, num_replaced=M - counts.num_latents)
        return counts
    last, passes = yield from read_latents(latent_thoughts, prefix, M)
    yield last._replace(inputs_embeds=torch.cat([last.inputs_embeds, suffix.to(last.inputs_embeds.dtype)], 1))
    return StepwiseCounts(passes, M)


def read_latents(
    latent_thoughts: LatentThoughts, prefix: Float[Tensor, "B Np D"], M: int
) -> Generator[RolloutRead, Tensor, tuple[RolloutRead, PassCounts]]:
    """Yield the reads of a prefix, which ends with bot, and M latents; return the last read and the passes.

    More iterations than latents change nothing, so they are left out.
    """
    T, project = latent_thoughts.num_iterations, latent_thoughts.project
    if T is None:
        return (yield from read_sequential(prefix, M, project)), PassCounts(1, 0, M, 0)
    placeholders = latent_thoughts.placeholder.to(prefix.dtype).expand(len(prefix), M, -1)
    return (yield from read_jacobi(prefix, placeholders, min(T, M), project)), PassCounts(0, 1, min(T, M), 0)


def read_sequential(
    prefix: Float[Tensor, "B Np D"], M: int, project: ProjectFn
) -> Generator[RolloutRead, Tensor, RolloutRead]:
    """Eq. 1: z_1 = prj(h_L(bot)), z_(m+1) = prj(h_L(z_m)); return the last read, which is the prefix if M = 0."""
    read = RolloutRead(prefix)
    for _ in range(M):
        read = RolloutRead(project((yield read)))
    return read


def read_jacobi(
    prefix: Float[Tensor, "B Np D"], placeholders: Float[Tensor, "B M D"], num_iterations: int, project: ProjectFn
) -> Generator[RolloutRead, Tensor, RolloutRead]:
    """Read placeholders, then the latents in every iteration, on as few positions as it needs; return the last read.

    A read leaves out z_M, on which no other latent depends, and the latents that are already final: in iteration t the
    first t - 1, whose keys and values the read before has computed.
    """
    M = placeholders.shape[1]
    if num_iterations == 0:
        return RolloutRead(torch.cat([prefix, placeholders], 1))
    z = project((yield RolloutRead(torch.cat([prefix, placeholders[:, 1:]], 1), num_outputs=M)))
    for _ in range(num_iterations - 1):
        n = z.shape[1] - 1  # latents that are not final: the last n slots of the cache, which are read again
        z = project((yield RolloutRead(z[:, :-1], num_outputs=n, num_replaced=n)))
    return RolloutRead(z, num_replaced=z.shape[1] - 1)


def read_adaptive(
    prefix: Float[Tensor, "1 Np D"],
    placeholders: Float[Tensor, "1 M D"],
    num_iterations: int,
    project: ProjectFn,
    tolerance: float,
    count_latents: CountFn | None,
) -> Generator[RolloutRead, Tensor, StepwiseCounts]:
    """Read as `read_jacobi`, the last read included, until the residual or the stop head ends the iteration."""
    M = placeholders.shape[1]
    outputs = yield RolloutRead(torch.cat([prefix, placeholders], 1), num_outputs=M + 1)
    z = initial_latents(outputs, project)
    num_latents, t = M, 0
    for t in range(1, num_iterations + 1):
        hidden_states = yield RolloutRead(z, num_outputs=M, num_replaced=M)
        if count_latents is not None:
            num_latents = int(count_latents(hidden_states))
            if t >= num_latents:
                break
        z_next = jacobi_update(z, hidden_states, project)
        if tolerance and bool(jacobi_residual(z, z_next) < tolerance):
            break
        z = z_next
    return StepwiseCounts(PassCounts(0, 1, t, 0), num_latents)
