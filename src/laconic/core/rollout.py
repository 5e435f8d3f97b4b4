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

from laconic.core.cache import Cache
from laconic.core.decoder import Seen
from laconic.core.errors import Usage
from laconic.core.generate import Passes

Reader = Callable[..., Seen]
Project = Callable[[Tensor], Tensor]
Edit = Callable[[Tensor, int], Tensor]
Mode = Literal["jacobi", "sequential"]


class Trace(NamedTuple):
    """One pass over the slots: the vectors it read, what came out, and the cache it left."""

    thoughts: Float[Tensor, "B M D"]
    hidden: Float[Tensor, "B M D"]
    state: Cache


class Rollout(NamedTuple):
    """Thoughts as read in the last pass, its hidden states and its cache; `start` is the hidden state at bot.

    `trace[t]` is pass t, of which 0 reads the placeholders; thoughts made one after the other have one entry.
    """

    thoughts: Float[Tensor, "B M D"]
    hidden: Float[Tensor, "B M D"]
    start: Float[Tensor, "B D"]
    state: Cache
    passes: Passes
    trace: tuple[Trace, ...] = ()


def rollout(
    decoder: Reader,
    prefix: Float[Tensor, "B Np D"],
    slot: Float[Tensor, " D"],
    M: int,
    rounds: int | None,
    *,
    project: Project,
    state: Cache | None = None,
    live: Bool[Tensor, "B Np"] | None = None,
    mode: Mode = "jacobi",
    edit: Edit | None = None,
    trace: bool = False,
) -> Rollout:
    """M thoughts after `prefix`, whose last vector is bot; `state` is what was read before it, `live` its padding.

    `edit(z, t)` changes thoughts just before they are read: in round t the [B, M, D] (t = 0 where the placeholders
    are the thoughts); one after the other, z_t as [B, 1, D]. A round starts from what the last one read unedited.
    Raises `Usage` (2) for numbers that cannot be meant, for rounds of thoughts made one after the other.
    """
    if M < 1:
        raise Usage(f"{M} thoughts; give at least one")
    if mode == "sequential":
        if rounds is not None:
            raise Usage(f"rounds {rounds}: thoughts made one after the other have none; leave them out")
        return sequential(decoder, prefix, M, project, state, live, edit, trace)
    if rounds is None or rounds < 0:
        raise Usage(f"rounds {rounds}: Jacobi thoughts need a number of rounds, 0 or more")
    return jacobi(decoder, prefix, slot, M, rounds, project, state, live, edit, trace)


def jacobi(
    decoder: Reader,
    prefix: Float[Tensor, "B Np D"],
    slot: Float[Tensor, " D"],
    M: int,
    rounds: int,
    project: Project,
    state: Cache | None = None,
    live: Bool[Tensor, "B Np"] | None = None,
    edit: Edit | None = None,
    trace: bool = False,
) -> Rollout:
    """Placeholders read once behind `prefix`, then all thoughts `rounds` times, each time on the prefix alone."""
    (B, Np, D), held = prefix.shape, 0 if state is None else state.S
    z = slot.to(prefix.dtype).expand(B, M, D)
    read = edit(z, 0) if edit is not None and rounds == 0 else z
    alive = None if live is None else torch.cat([live, live.new_ones(B, M)], 1)
    seen = decoder(torch.cat([prefix, read], 1), state, live=alive)
    base, start, hidden = seen.state.crop(held + Np), seen.hidden[:, Np - 1], seen.hidden[:, Np:]
    passes = [Trace(read, hidden, seen.state)]
    for t in range(1, rounds + 1):
        z = first(seen.hidden[:, Np - 1 :], project) if t == 1 else shift(z, hidden, project)
        read = z if edit is None else edit(z, t)
        seen = decoder(read, base)
        hidden = seen.hidden
        passes.append(Trace(read, hidden, seen.state))
    return Rollout(read, hidden, start, seen.state, Passes(0, 1, rounds, 0), tuple(passes) if trace else ())


def first(hidden: Float[Tensor, "B N D"], project: Project) -> Float[Tensor, "B M D"]:
    """Eq. 1: z_m = prj(h_L at its left neighbour), at bot and placeholders 1 … M-1; `hidden` is of bot and all M."""
    return project(hidden[:, :-1])


def shift(z: Float[Tensor, "B M D"], hidden: Float[Tensor, "B M D"], project: Project) -> Float[Tensor, "B M D"]:
    """Eq. 2: z_m = prj(h_L of slot m-1 in the pass that read z) for m = 2 … M, and z_1 stays."""
    return torch.cat([z[:, :1], project(hidden[:, :-1])], 1) if z.shape[1] > 1 else z


def sequential(
    decoder: Reader,
    prefix: Float[Tensor, "B Np D"],
    M: int,
    project: Project,
    state: Cache | None = None,
    live: Bool[Tensor, "B Np"] | None = None,
    edit: Edit | None = None,
    trace: bool = False,
) -> Rollout:
    """Eq. 1: z_1 = prj(h_L(bot)), z_{m+1} = prj(h_L(z_m)), each read on all before it; z_{M+1} is not made."""
    seen = decoder(prefix, state, live=live)
    start = seen.hidden[:, -1]
    thoughts: list[Tensor] = []
    hidden = [seen.hidden[:, -1:]]
    for m in range(1, M + 1):
        z = project(hidden[-1])
        thoughts.append(z if edit is None else edit(z, m))
        seen = decoder(thoughts[-1], seen.state)
        hidden.append(seen.hidden)
    none = seen.hidden[:, :0]  # so that there may be no thoughts at all, at Coconut's first stage
    whole = Trace(torch.cat([none, *thoughts], 1), torch.cat([none, *hidden[1:]], 1), seen.state)
    return Rollout(whole.thoughts, whole.hidden, start, seen.state, Passes(1, 0, M, 0), (whole,) if trace else ())
