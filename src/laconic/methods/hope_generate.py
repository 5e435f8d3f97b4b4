"""Answers of a model that learns while it reads: the prompt read, then one id after another, all of them read."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.core.decoder import Seen
from laconic.core.errors import Usage
from laconic.core.families import DecoderConfig
from laconic.core.generate import Passes
from laconic.core.places import last_live
from laconic.core.sampling import Sampler, Sampling
from laconic.core.state import State
from laconic.methods.packing import integers


class Written(NamedTuple):
    """Ids of each row, up to the one that ended it; the calls that read prompt and answer; the state after them."""

    ids: list[list[int]]
    passes: list[Passes]
    state: State


@runtime_checkable
class Learner(Protocol):
    """A model that reads ids on a state."""

    @property
    def config(self) -> DecoderConfig: ...
    def advance(
        self, ids: Tensor, state: State | None = None, *, live: Tensor | None = None, learn: bool = True
    ) -> Seen: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@torch.no_grad()
def generate(
    model: Learner,
    ids: Int[Tensor, "B T"],
    state: State | None = None,
    *,
    live: Bool[Tensor, "B T"] | None = None,
    max_tokens: int,
    learn: bool = True,
    learn_answer: bool = False,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    chunk: int = 512,
) -> Written:
    """Continues ids on a state; `learn` says whether the prompt teaches, `learn_answer` what is written.

    The prompt is read `chunk` tokens at once. Every row ends at an eos of the config or at `max_tokens`; the state is
    that after reading prompt and answer. `seeds` are one a row, by default 0. Raises `Usage` (2) for numbers below 1.
    """
    if min(max_tokens, chunk) < 1:
        raise Usage(f"hope: max_tokens {max_tokens}, chunk {chunk}; both are at least 1")
    alive = torch.ones_like(ids, dtype=torch.bool) if live is None else live
    hidden: list[Tensor] = []
    for a in range(0, ids.shape[1], chunk):
        here = None if live is None else live[:, a : a + chunk]
        seen = model.advance(ids[:, a : a + chunk], state, live=here, learn=learn)
        state = _state(seen)
        hidden.append(seen.hidden)
    last, pieces = last_live(torch.cat(hidden, 1), alive), len(hidden)
    prompts = [integers(ids[row][alive[row]]) for row in range(len(ids))]
    sampler = Sampler(sampling, list(seeds or [0] * len(ids)), prompts, ())
    going, found = torch.ones(len(ids), dtype=torch.bool), [list[int]() for _ in prompts]
    for _ in range(max_tokens):
        chosen, _ = sampler(model.logits(last), hold=False)
        now = going.clone()
        for row in range(len(ids)):
            if now[row]:
                found[row].append(int(chosen[row]))
                going[row] = found[row][-1] not in model.config.eos
        seen = model.advance(chosen[:, None], state, live=now[:, None].to(ids.device), learn=learn_answer)
        state, last = _state(seen), seen.hidden[:, 0]
        if not going.any():
            break
    assert state is not None
    return Written(found, [Passes(pieces, 0, 0, len(row)) for row in found], state)


def _state(seen: Seen) -> State:
    held: Any = seen.state
    assert isinstance(held, State)
    return held
