"""The latent rollout: M thoughts in place of a written chain, all at once in rounds, or one after the other.

PCCoT arXiv:2506.18582 (Jacobi), CODI arXiv:2502.21074 and Coconut arXiv:2412.06769 (sequential), pause tokens
arXiv:2310.02226 (rounds = 0).

Symbols: z_1 … z_M thoughts, the vectors read in the slots; h_L the hidden state after the final norm; prj `project`;
bot the last vector of `prefix`; T `rounds`. Nothing is detached.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.errors import UsageError
from laconic.generation.generate import PassCounts
from laconic.models.cache import KVCache
from laconic.models.decoder import DecoderOutput

ForwardFn = Callable[..., DecoderOutput]
ProjectFn = Callable[[Tensor], Tensor]
Intervention = Callable[[Tensor, int], Tensor]
LatentSchedule = Literal["jacobi", "sequential"]


class PassRecord(NamedTuple):
    """One pass over the slots: the vectors it read, what came out, and the cache it left."""

    latents: Float[Tensor, "B M D"]
    hidden_states: Float[Tensor, "B M D"]
    cache: KVCache


class LatentRollout(NamedTuple):
    """Thoughts as read in the last pass, its hidden states and its cache; `start` is the hidden state at bot.

    `trace[t]` is pass t, of which 0 reads the placeholders; thoughts made one after the other have one entry.
    """

    latents: Float[Tensor, "B M D"]
    hidden_states: Float[Tensor, "B M D"]
    begin_hidden: Float[Tensor, "B D"]
    cache: KVCache
    passes: PassCounts
    records: tuple[PassRecord, ...] = ()


def run_latent_rollout(
    decoder: ForwardFn,
    prefix: Float[Tensor, "B Np D"],
    placeholder: Float[Tensor, " D"],
    M: int,
    num_iterations: int | None,
    *,
    project: ProjectFn,
    cache: KVCache | None = None,
    attention_mask: Bool[Tensor, "B Np"] | None = None,
    schedule: LatentSchedule = "jacobi",
    intervention: Intervention | None = None,
    record_passes: bool = False,
) -> LatentRollout:
    """M thoughts after `prefix`, whose last vector is bot; `state` is what was read before it, `live` its padding.

    `edit(z, t)` changes thoughts just before they are read: in round t the [B, M, D] (t = 0 where the placeholders
    are the thoughts); one after the other, z_t as [B, 1, D]. A round starts from what the last one read unedited.
    Raises `Usage` (2) for numbers that cannot be meant, for rounds of thoughts made one after the other.
    """
    if M < 1:
        raise UsageError(f"{M} thoughts; give at least one")
    if schedule == "sequential":
        if num_iterations is not None:
            raise UsageError(f"rounds {num_iterations}: thoughts made one after the other have none; leave them out")
        return run_sequential_rollout(decoder, prefix, M, project, cache, attention_mask, intervention, record_passes)
    if num_iterations is None or num_iterations < 0:
        raise UsageError(f"rounds {num_iterations}: Jacobi thoughts need a number of rounds, 0 or more")
    return run_jacobi_rollout(
        decoder, prefix, placeholder, M, num_iterations, project, cache, attention_mask, intervention, record_passes
    )


def run_jacobi_rollout(
    decoder: ForwardFn,
    prefix: Float[Tensor, "B Np D"],
    placeholder: Float[Tensor, " D"],
    M: int,
    num_iterations: int,
    project: ProjectFn,
    cache: KVCache | None = None,
    attention_mask: Bool[Tensor, "B Np"] | None = None,
    intervention: Intervention | None = None,
    record_passes: bool = False,
) -> LatentRollout:
    """Placeholders read once behind `prefix`, then all thoughts `rounds` times, each time on the prefix alone."""
    (B, Np, D), held = prefix.shape, 0 if cache is None else cache.S
    z = placeholder.to(prefix.dtype).expand(B, M, D)
    read = intervention(z, 0) if intervention is not None and num_iterations == 0 else z
    alive = None if attention_mask is None else torch.cat([attention_mask, attention_mask.new_ones(B, M)], 1)
    seen = decoder(torch.cat([prefix, read], 1), cache, live=alive)
    base, start, hidden = seen.cache.crop(held + Np), seen.hidden_states[:, Np - 1], seen.hidden_states[:, Np:]
    passes = [PassRecord(read, hidden, seen.cache)]
    for t in range(1, num_iterations + 1):
        z = initial_latents(seen.hidden_states[:, Np - 1 :], project) if t == 1 else jacobi_update(z, hidden, project)
        read = z if intervention is None else intervention(z, t)
        seen = decoder(read, base)
        hidden = seen.hidden_states
        passes.append(PassRecord(read, hidden, seen.cache))
    return LatentRollout(
        read, hidden, start, seen.cache, PassCounts(0, 1, num_iterations, 0), tuple(passes) if record_passes else ()
    )


def initial_latents(hidden_states: Float[Tensor, "B N D"], project: ProjectFn) -> Float[Tensor, "B M D"]:
    """Eq. 1: z_m = prj(h_L at its left neighbour), at bot and placeholders 1 … M-1; `hidden` is of bot and all M."""
    return project(hidden_states[:, :-1])


def jacobi_update(
    z: Float[Tensor, "B M D"], hidden_states: Float[Tensor, "B M D"], project: ProjectFn
) -> Float[Tensor, "B M D"]:
    """Eq. 2: z_m = prj(h_L of slot m-1 in the pass that read z) for m = 2 … M, and z_1 stays."""
    return torch.cat([z[:, :1], project(hidden_states[:, :-1])], 1) if z.shape[1] > 1 else z


def run_sequential_rollout(
    decoder: ForwardFn,
    prefix: Float[Tensor, "B Np D"],
    M: int,
    project: ProjectFn,
    cache: KVCache | None = None,
    attention_mask: Bool[Tensor, "B Np"] | None = None,
    intervention: Intervention | None = None,
    record_passes: bool = False,
) -> LatentRollout:
    """Eq. 1: z_1 = prj(h_L(bot)), z_{m+1} = prj(h_L(z_m)), each read on all before it; z_{M+1} is not made."""
    seen = decoder(prefix, cache, live=attention_mask)
    start = seen.hidden_states[:, -1]
    thoughts: list[Tensor] = []
    hidden = [seen.hidden_states[:, -1:]]
    for m in range(1, M + 1):
        z = project(hidden[-1])
        thoughts.append(z if intervention is None else intervention(z, m))
        seen = decoder(thoughts[-1], seen.cache)
        hidden.append(seen.hidden_states)
    none = seen.hidden_states[:, :0]  # so that there may be no thoughts at all, at Coconut's first stage
    whole = PassRecord(torch.cat([none, *thoughts], 1), torch.cat([none, *hidden[1:]], 1), seen.cache)
    return LatentRollout(
        whole.latents, whole.hidden_states, start, seen.cache, PassCounts(1, 0, M, 0), (whole,) if record_passes else ()
    )
