"""Words in the thoughts on one question: what the decoder's head reads in their hidden states, beside the chain.

Shapes: M slots, D width; a batch of one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.errors import InputError
from laconic.evaluation.inspection.subject import DecodeToken
from laconic.latent.rollout import LatentRollout

LogitHead = Callable[[Tensor], Tensor]


class TokenGuess(NamedTuple):
    """A word that the head reads in a hidden state, and how likely it takes it for."""

    token: str
    probability: float


@dataclass(frozen=True)
class LogitLens:
    """A question's thoughts: `passes[t][i]` is the head's top words at bot (i = 0) or slot i after pass t."""

    question: tuple[str, ...]
    chain: tuple[str, ...]
    answer: str
    passes: tuple[tuple[tuple[TokenGuess, ...], ...], ...]

    @property
    def share_in_chain(self) -> float:
        """Share of slots whose likeliest word after the last pass occurs in the chain."""
        return share_in_chain(self.top_tokens, self.chain)

    @property
    def lcs_ratio(self) -> float:
        """How much of the chain those words are, in its order: their longest common subsequence over its length."""
        return lcs_ratio(self.top_tokens, self.chain)

    @property
    def top_tokens(self) -> tuple[str, ...]:
        """The likeliest word at each slot after the last pass."""
        return tuple(guesses[0].token for guesses in self.passes[-1][1:])


@torch.no_grad()
def apply_logit_lens(
    rollout: LatentRollout, batch: ReasoningBatch, logits: LogitHead, decode_token: DecodeToken, top: int = 5
) -> LogitLens:
    """What is read in the thoughts on the one row of `batch`, which were made with their trace."""
    if batch.B != 1:
        raise InputError(f"{batch.B} questions to look into; give one")
    return LogitLens(
        decode_valid_tokens(batch.question_ids, batch.question_mask, decode_token),
        decode_valid_tokens(batch.chain_ids, batch.chain_mask, decode_token),
        "".join(decode_token(int(i)) for i in batch.answer_ids[batch.answer_mask & batch.answer_number_mask]),
        tuple(
            top_tokens_of_pass(rollout.begin_hidden, trace.hidden_states, logits, decode_token, top)
            for trace in rollout.records
        ),
    )


def decode_valid_tokens(ids: Tensor, valid: Tensor, decode_token: DecodeToken) -> tuple[str, ...]:
    """The words of the live columns of one row."""
    return tuple(decode_token(int(i)) for i in ids[valid])


def top_tokens_of_pass(
    start: Float[Tensor, "1 D"], hidden: Float[Tensor, "1 M D"], logits: LogitHead, decode_token: DecodeToken, k: int
) -> tuple[tuple[TokenGuess, ...], ...]:
    """The head's `k` likeliest words at bot and at each slot, in hidden states before they are projected."""
    p, ids = logits(torch.cat([start[:, None], hidden], 1))[0].float().softmax(-1).topk(k)
    return tuple(
        tuple(TokenGuess(decode_token(i), q) for i, q in zip(row, chance, strict=True))
        for row, chance in zip(ids.tolist(), p.tolist(), strict=True)
    )


@torch.no_grad()
def top_token_ids(rollout: LatentRollout, logits: LogitHead) -> tuple[tuple[int, ...], ...]:
    """The head's likeliest id at each slot after the last pass, row by row: logits of all rows at once are large."""
    return tuple(tuple(logits(hidden).argmax(-1).tolist()) for hidden in rollout.hidden_states)


def share_in_chain(top: Sequence[Any], chain: Sequence[Any]) -> float:
    """The share of slots whose likeliest token occurs in a chain."""
    return sum(token in chain for token in top) / len(top)


def lcs_ratio(top: Sequence[Any], chain: Sequence[Any]) -> float:
    """The longest common subsequence of both over the length of the chain; 0 for an empty one."""
    best = [0] * (len(top) + 1)
    for token in chain:
        before = 0  # of the previous row, one column to the left
        for i, other in enumerate(top, 1):
            before, best[i] = best[i], before + 1 if token == other else max(best[i], best[i - 1])
    return best[-1] / len(chain) if chain else 0.0
