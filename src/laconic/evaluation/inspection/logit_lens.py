"""Logit lens: the most likely tokens at each latent, compared with the tokens of the written chain.

Shapes: M latents, D width; a batch of one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.latent.rollout import LatentRollout

LogitHead = Callable[[Tensor], Tensor]


class TokenGuess(NamedTuple):
    """A token and the probability that the output head gives it."""

    token: str
    probability: float


@dataclass(frozen=True)
class LogitLens:
    """The output head applied to the latents of one question.

    `passes[t][i]` are the most likely tokens at bot (i = 0) or latent i after pass t.
    """

    question: tuple[str, ...]
    chain: tuple[str, ...]
    passes: tuple[tuple[tuple[TokenGuess, ...], ...], ...]

    @property
    def share_in_chain(self) -> float:
        return share_in_chain(self.top_tokens, self.chain)

    @property
    def lcs_ratio(self) -> float:
        """Longest common subsequence of these tokens and the chain, over the chain's length."""
        return lcs_ratio(self.top_tokens, self.chain)

    @property
    def top_tokens(self) -> tuple[str, ...]:
        """The most likely token at each latent after the last pass."""
        return tuple(guesses[0].token for guesses in self.passes[-1][1:])


@torch.no_grad()
def apply_logit_lens(
    rollout: LatentRollout, batch: ReasoningBatch, logits: LogitHead, decode_token: Callable[[int], str], top: int = 5
) -> LogitLens:
    """Apply the output head to the latents of the one question of a batch, for the `top` most likely tokens of each."""

    def find_guesses(hidden_states: Float[Tensor, "1 M D"]) -> tuple[tuple[TokenGuess, ...], ...]:
        states = torch.cat([rollout.begin_hidden[:, None], hidden_states], 1)
        p, ids = logits(states)[0].float().softmax(-1).topk(top)
        return tuple(
            tuple(TokenGuess(decode_token(i), q) for i, q in zip(row, probabilities, strict=True))
            for row, probabilities in zip(ids.tolist(), p.tolist(), strict=True)
        )

    return LogitLens(
        tuple(decode_token(int(i)) for i in batch.question_ids[batch.question_mask]),
        tuple(decode_token(int(i)) for i in batch.chain_ids[batch.chain_mask]),
        tuple(find_guesses(record.hidden_states) for record in rollout.records),
    )


@torch.no_grad()
def top_token_ids(rollout: LatentRollout, logits: LogitHead) -> tuple[tuple[int, ...], ...]:
    """Return the most likely id at each latent after the last pass; row by row, since all logits at once are large."""
    return tuple(tuple(logits(hidden).argmax(-1).tolist()) for hidden in rollout.hidden_states)


def share_in_chain(top: Sequence[Any], chain: Sequence[Any]) -> float:
    return sum(token in chain for token in top) / len(top)


def lcs_ratio(top: Sequence[Any], chain: Sequence[Any]) -> float:
    """Return the length of the longest common subsequence over the chain's length; 0 for an empty chain."""
    best = [0] * (len(top) + 1)
    for token in chain:
        diagonal = 0  # the previous row's value one column to the left
        for i, other in enumerate(top, 1):
            diagonal, best[i] = best[i], diagonal + 1 if token == other else max(best[i], best[i - 1])
    return best[-1] / len(chain) if chain else 0.0
