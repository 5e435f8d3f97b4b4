"""Words in the thoughts on one question: what the decoder's head reads in their hidden states, beside the chain.

Shapes: M slots, D width; a batch of one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.core.contract import Reasoning
from laconic.core.errors import BadInput
from laconic.core.rollout import Rollout
from laconic.evaluation.subject import Words

Head = Callable[[Tensor], Tensor]


class Guess(NamedTuple):
    """A word that the head reads in a hidden state, and how likely it takes it for."""

    word: str
    p: float


@dataclass(frozen=True)
class Inspection:
    """A question's thoughts: `passes[t][i]` is the head's top words at bot (i = 0) or slot i after pass t."""

    question: tuple[str, ...]
    chain: tuple[str, ...]
    answer: str
    passes: tuple[tuple[tuple[Guess, ...], ...], ...]

    @property
    def spoken(self) -> float:
        """Share of slots whose likeliest word after the last pass occurs in the chain."""
        return spoken(self.top, self.chain)

    @property
    def common(self) -> float:
        """How much of the chain those words are, in its order: their longest common subsequence over its length."""
        return common(self.top, self.chain)

    @property
    def top(self) -> tuple[str, ...]:
        """The likeliest word at each slot after the last pass."""
        return tuple(guesses[0].word for guesses in self.passes[-1][1:])


@torch.no_grad()
def inspect(rolled: Rollout, batch: Reasoning, logits: Head, words: Words, top: int = 5) -> Inspection:
    """What is read in the thoughts on the one row of `batch`, which were made with their trace."""
    if batch.B != 1:
        raise BadInput(f"{batch.B} questions to look into; give one")
    return Inspection(
        live_words(batch.question, batch.question_live, words),
        live_words(batch.chain, batch.chain_live, words),
        "".join(words(int(i)) for i in batch.answer[batch.answer_live & batch.number]),
        tuple(pass_words(rolled.start, trace.hidden, logits, words, top) for trace in rolled.trace),
    )


def live_words(ids: Tensor, live: Tensor, words: Words) -> tuple[str, ...]:
    """The words of the live columns of one row."""
    return tuple(words(int(i)) for i in ids[live])


def pass_words(
    start: Float[Tensor, "1 D"], hidden: Float[Tensor, "1 M D"], logits: Head, words: Words, k: int
) -> tuple[tuple[Guess, ...], ...]:
    """The head's `k` likeliest words at bot and at each slot, in hidden states before they are projected."""
    p, ids = logits(torch.cat([start[:, None], hidden], 1))[0].float().softmax(-1).topk(k)
    return tuple(
        tuple(Guess(words(i), q) for i, q in zip(row, chance, strict=True))
        for row, chance in zip(ids.tolist(), p.tolist(), strict=True)
    )


@torch.no_grad()
def top_ids(rolled: Rollout, logits: Head) -> tuple[tuple[int, ...], ...]:
    """The head's likeliest id at each slot after the last pass, row by row: logits of all rows at once are large."""
    return tuple(tuple(logits(hidden).argmax(-1).tolist()) for hidden in rolled.hidden)


def spoken(top: Sequence[Any], chain: Sequence[Any]) -> float:
    """The share of slots whose likeliest token occurs in a chain."""
    return sum(token in chain for token in top) / len(top)


def common(top: Sequence[Any], chain: Sequence[Any]) -> float:
    """The longest common subsequence of both over the length of the chain; 0 for an empty one."""
    best = [0] * (len(top) + 1)
    for token in chain:
        before = 0  # of the previous row, one column to the left
        for i, other in enumerate(top, 1):
            before, best[i] = best[i], before + 1 if token == other else max(best[i], best[i - 1])
    return best[-1] / len(chain) if chain else 0.0
