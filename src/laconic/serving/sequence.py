"""One request in the engine: its prompt, its sampler, and the events of its tokens."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.generation.generate import SequenceState
from laconic.generation.result import StopReason
from laconic.generation.sampling import Sampler
from laconic.latent.stepwise_rollout import RolloutRead, RolloutReads, RowCounts
from laconic.serving.ragged import CacheRow
from laconic.serving.requests import EngineEvent, EngineRequest, FinishEvent, PromptEvent, TokenEvent, TokenLogprob
from laconic.serving.row_by_row import StateRow

LOGPROB_ROWS = 64  # prompt positions whose logits are computed at once
OnEvent = Callable[[EngineEvent], None]


@dataclass
class RunningSequence:
    """A request from its submission to its last event."""

    id: int
    request: EngineRequest
    on_event: OnEvent  # called on the engine's thread
    prompt: Tensor | None = None  # ids [T] or embeddings [T, D]; while a question is thought about, its next read
    is_read_at_once: bool = False  # in one step, since the length at a step's end changes the keys of the prompt
    row: CacheRow | StateRow | None = None  # state in the model, once the sequence runs
    num_read: int = 0
    num_cached: int = 0  # of these, positions that an earlier sequence has read
    num_tokens: int = 0
    next_id: int | None = None  # chosen last, and read by the next step; None while the prompt is read
    thinking: RolloutReads | None = None  # the reads of a question and its latents, until the last one is done
    num_outputs: int = 1  # hidden states that the current one of these reads sends back
    hidden_states: Tensor | None = None  # those of its chunks so far, or the last one of a prompt that has been read
    latent_passes: int = 0
    latent_positions: int = 0
    has_ended: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    sampler: Sampler = field(init=False)  # this and the next from the start on
    output: SequenceState = field(init=False)

    @property
    def num_unread_prompt(self) -> int:
        return 0 if self.prompt is None else len(self.prompt) - self.num_read

    @property
    def is_shareable(self) -> bool:
        """Whether nothing precedes the ids of the prompt, so that they alone determine its keys and values."""
        request = self.request
        return request.question is None and request.state is None and request.first_position is None

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """The ids whose keys and values may be those of an earlier sequence: all but the last, or none."""
        is_shared = self.is_shareable and not (self.request.with_prompt_logprobs or self.is_read_at_once)
        return self.request.token_ids[:-1] if is_shared else ()

    @cached_property
    def prompt_hash(self) -> int:
        """Hash of the prompt's ids; every step looks for sequences with the same ones."""
        return hash(self.request.token_ids)

    def take_prompt(self, num_tokens: int) -> Tensor:
        assert self.prompt is not None
        chunk = self.prompt[self.num_read : self.num_read + num_tokens]
        self.num_read += len(chunk)
        return chunk

    def start_read(self, read: RolloutRead) -> None:
        """Set what is read next, in place of the last slots of the row if they are replaced."""
        if self.row is not None:
            self.row.drop_last(read.num_replaced)
        self.prompt = read.inputs_embeds[0]
        self.num_read = 0
        self.num_outputs, self.hidden_states = read.num_outputs, None

    def continue_thinking(self, hidden_states: Float[Tensor, "n D"]) -> None:
        """Take the hidden states of a chunk; after the last chunk of a read, set the next read, if there is one."""
        before = [] if self.hidden_states is None else [self.hidden_states]
        self.hidden_states = torch.cat([*before, hidden_states])[-self.num_outputs :]
        if self.num_unread_prompt or self.thinking is None:
            return
        try:
            self.start_read(self.thinking.send(self.hidden_states[None]))
        except StopIteration as end:
            counts: RowCounts = end.value[0]
            self.latent_passes, self.latent_positions = counts.passes.latent, counts.num_latents
            self.thinking = self.hidden_states = None

    def choose_next(self, logits: Float[Tensor, "1 V"]) -> None:
        """Choose an id from the logits of the last position, and send its event, and the last one if it ends."""
        top = find_top_logprobs(logits, self.request.num_top_logprobs)[0]
        ids, logprobs = self.sampler(logits, block_eos=self.num_tokens < self.output.config.min_tokens)
        self.next_id = int(ids[0])
        reason = self.add_token(self.next_id, float(logprobs[0]), top)
        if reason is not None:
            self.finish(reason)

    def add_token(
        self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...] = ()
    ) -> StopReason | None:
        """Send the event of a new token; return the reason if it is the last one."""
        assert self.output.detokenizer is not None
        offset = self.output.detokenizer.num_characters
        reason = self.output.append(token, logprob or 0.0)
        self.num_tokens += 1
        self.send(TokenEvent(self.output.new_text, TokenLogprob(token, logprob, top), offset))
        return reason

    def score_prompt(
        self, num_tokens: int, hidden_states: Float[Tensor, "n D"], logits: Callable[[Tensor], Float[Tensor, "n V"]]
    ) -> None:
        """Add the log probabilities of the prompt ids that follow the positions of the chunk just read."""
        assert self.prompt is not None
        start = self.num_read - num_tokens
        if start == 0:
            self.prompt_logprobs.append(TokenLogprob(int(self.prompt[0]), None))
        following = self.prompt[start + 1 : start + 1 + len(hidden_states)]
        for i in range(0, len(following), LOGPROB_ROWS):
            ids = following[i : i + LOGPROB_ROWS]
            scores = logits(hidden_states[i : i + len(ids)])
            logprobs = scores.float().log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
            tops = find_top_logprobs(scores, self.request.num_top_logprobs)
            entries = zip(ids.tolist(), logprobs, tops, strict=True)
            self.prompt_logprobs += [TokenLogprob(int(token), logprob, top) for token, logprob, top in entries]

    def end_prompt(self) -> None:
        assert self.row is not None
        self.row.end_prompt()
        self.send(PromptEvent(tuple(self.prompt_logprobs), self.num_cached))

    def finish(self, reason: StopReason) -> None:
        self.has_ended = True
        self.send(FinishEvent(reason, self.latent_passes, self.latent_positions))

    def fail(self, error: Exception) -> None:
        self.has_ended = True
        self.row = None  # freed at once, since memory may be short
        self.send(error)

    @contextmanager
    def fail_on_error(self) -> Generator[None]:
        """End with the error that the body raises, so that other requests go on."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def send(self, event: EngineEvent) -> None:
        """Call `on_event`; a receiver that fails, such as a closed event loop, has no use for further events."""
        try:
            self.on_event(event)
        except Exception:
            self.has_ended = True


@torch.no_grad()
def find_top_logprobs(logits: Float[Tensor, "N V"], count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the most likely ids of each row with their log probabilities in nats, most likely first."""
    if not count:
        return [()] * len(logits)
    values, ids = logits.float().log_softmax(-1).topk(min(count, logits.shape[1]))
    return [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
