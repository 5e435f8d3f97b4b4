"""One question looked into: thoughts read through the head, beside the chain they stand for, and what was kept of it.

It asks a method for `think` and `teach` and knows none. Shapes: M slots, Nc chain columns, G heads of keys, E width of
a head; a batch of one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.core.contract import Reasoning
from laconic.core.errors import BadInput
from laconic.core.rollout import Rollout
from laconic.evaluation.similarity import plain, similarity
from laconic.evaluation.subject import Kept, Words


class Taught(Protocol):
    """What a teacher leaves in each layer: keys and values on the chain, what of them is kept; the layers matched."""

    @property
    def k_t(self) -> Sequence[Tensor]: ...
    @property
    def v_t(self) -> Sequence[Tensor]: ...
    @property
    def kept(self) -> Sequence[Kept]: ...
    @property
    def matched(self) -> Sequence[int]: ...


class Thinker(Protocol):
    """A method that thinks; `teach` only where it has a teacher."""

    def think(self, questions: Reasoning, edit: Any = None, trace: bool = False) -> Rollout: ...


class Guess(NamedTuple):
    """A word that the head reads in a hidden state, and how likely it takes it for."""

    word: str
    p: float


@dataclass(frozen=True)
class Inspection:
    """A question's thoughts: `passes[t][i]` is the head's top words at bot (i = 0) or slot i after pass t.

    `keys` and `values` [M][Nc] are cosines of student and teacher, mean over the layers matched and their heads; keys
    only where the teacher's stand after rotation, as in a cache. `kept[n][head]` are the chain columns that the slots
    stand for in layer `layers[n]`.
    """

    question: tuple[str, ...]
    chain: tuple[str, ...]
    answer: str
    passes: tuple[tuple[tuple[Guess, ...], ...], ...]
    keys: tuple[tuple[float, ...], ...] | None = None
    values: tuple[tuple[float, ...], ...] | None = None
    kept: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    layers: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as plain lists."""
        return asdict(self) | {"spoken": self.spoken, "common": self.common, "shares": self.shares}

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

    @property
    def shares(self) -> tuple[float, ...]:
        """How often each chain column is kept, over the layers matched and their heads."""
        heads = [head for layer in self.kept or () for head in layer]
        return tuple(sum(i in head for head in heads) / max(1, len(heads)) for i in range(len(self.chain)))


@torch.no_grad()
def inspect(
    method: Thinker,
    logits: Callable[[Tensor], Tensor],
    batch: Reasoning,
    words: Words,
    *,
    rotated: bool = True,
    top: int = 5,
) -> Inspection:
    """Thoughts of the one row of `batch`, and where the method has a teacher, the chain beside them.

    `logits` is the decoder's head, `rotated` whether the teacher's keys stand after rotation.
    """
    if batch.B != 1:
        raise BadInput(f"{batch.B} questions to look into; give one")
    found = method.think(batch, trace=True)
    chain = live_words(batch.chain, batch.chain_live, words)
    made = Inspection(
        live_words(batch.question, batch.question_live, words),
        chain,
        "".join(words(int(i)) for i in batch.answer[batch.answer_live & batch.number]),
        tuple(pass_words(found.start, trace.hidden, logits, words, top) for trace in found.trace),
    )
    if not hasattr(method, "teach") or not chain:
        return made
    taught: Taught = method.teach(batch)  # pyright: ignore[reportAttributeAccessIssue]
    M, columns = found.thoughts.shape[1], batch.chain_live[0]
    pairs = [(found.state.values, taught.v_t), *([(found.state.keys, taught.k_t)] if rotated else [])]
    layers = taught.matched
    maps = [
        similarity([own[l][0, :, -M:] for l in layers], [theirs[l][0][:, columns] for l in layers])
        for own, theirs in pairs
    ]
    kept = tuple(
        tuple(tuple(head[alive].tolist()) for head, alive in zip(layer.index[0], layer.live[0], strict=True))
        for layer in (taught.kept[l] for l in layers)
    )
    keys = plain(maps[1].mean(0)) if rotated else None
    return Inspection(made.question, chain, made.answer, made.passes, keys, plain(maps[0].mean(0)), kept, tuple(layers))


def live_words(ids: Tensor, live: Tensor, words: Words) -> tuple[str, ...]:
    """The words of the live columns of one row."""
    return tuple(words(int(i)) for i in ids[live])


def pass_words(
    start: Float[Tensor, "1 D"],
    hidden: Float[Tensor, "1 M D"],
    logits: Callable[[Tensor], Tensor],
    words: Words,
    k: int,
) -> tuple[tuple[Guess, ...], ...]:
    """The head's `k` likeliest words at bot and at each slot, in hidden states before they are projected."""
    p, ids = logits(torch.cat([start[:, None], hidden], 1))[0].float().softmax(-1).topk(k)
    return tuple(
        tuple(Guess(words(i), q) for i, q in zip(row, chance, strict=True))
        for row, chance in zip(ids.tolist(), p.tolist(), strict=True)
    )


@torch.no_grad()
def top_ids(rolled: Rollout, logits: Callable[[Tensor], Tensor]) -> tuple[tuple[int, ...], ...]:
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
