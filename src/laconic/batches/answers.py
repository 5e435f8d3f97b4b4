"""Answers of a model, and the forward passes that they took."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

StopReason = Literal["eos", "stop", "length", "cancelled"]


class PassCounts(NamedTuple):
    """Decoder calls that a row took part in before it ended.

    `prompt`: chunks of the prompt; `latent_setup`: the pass that reads question and placeholders; `latent`: passes
    that update latent thoughts; `answer`: generated tokens that were read.
    """

    prompt: int
    latent_setup: int
    latent: int
    answer: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class AnswerBatch:
    """Answers to B questions.

    Args:
        texts: Decoded answers.
        token_ids: Generated ids of each row.
        passes: Decoder calls of each row.
        cache_positions: Per row, the number of cached positions when the answer began and when it ended.
        logprobs: Log probability of each id; empty for a method that does not return them.
        stop_reasons: Why each answer ended, as in `laconic.Generation`; empty for such a method.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    passes: tuple[PassCounts, ...]
    cache_positions: tuple[tuple[int, int], ...]
    logprobs: tuple[tuple[float, ...], ...] = ()
    stop_reasons: tuple[StopReason, ...] = ()
