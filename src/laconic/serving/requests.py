"""Requests to the engine, and the events that it answers with."""

from dataclasses import dataclass

from laconic.batches import ReasoningBatch
from laconic.generation.config import GREEDY, GenerationConfig
from laconic.generation.result import StopReason
from laconic.interfaces import RecurrentState
from laconic.models.cache import KVCache


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate; a request with `n=3` is three of these."""

    token_ids: tuple[int, ...] = ()  # with the chat template and special tokens already applied
    question: ReasoningBatch | None = None  # in place of ids, for runs that answer questions; one row
    config: GenerationConfig = GREEDY  # its callbacks are not called
    state: KVCache | RecurrentState | None = None  # what the prompt continues, with one row
    first_position: int | None = None  # of the first prompt id; None: the one after the last cached position
    num_top_logprobs: int = 0
    with_prompt_logprobs: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) if self.question is None else int(self.question.question_mask.sum())


@dataclass(frozen=True)
class TokenLogprob:
    """An id with its log probability in nats, and the most likely ids at its position.

    `logprob` is None for the first id of a prompt, which has no context.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptEvent:
    """The prompt has been read. `logprobs` has one entry per prompt id if they were requested, else none.

    The keys and values of the first `num_cached` ids were those of an earlier request.
    """

    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """A new token. `text` has whole characters only; the texts of all events concatenate to the answer.

    `offset` is the number of characters decoded before the token, so a token of a stop string, which is not part of the
    answer, has an offset at or after the answer's end.
    """

    text: str
    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True)
class FinishEvent:
    """The sequence has ended; no event follows. `latent_*` are 0 for models that do not think."""

    reason: StopReason
    latent_passes: int = 0
    latent_positions: int = 0


# An exception is the last event of a sequence that has failed, for example because logits were not finite.
EngineEvent = PromptEvent | TokenEvent | FinishEvent | Exception
