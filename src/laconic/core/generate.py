"""Generation: a prompt read in pieces, then one token a step until each row has come to its end."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, SupportsIndex, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from laconic.core import fit, paths
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.errors import NonFinite, Usage
from laconic.core.learner import Learner
from laconic.core.prompt import Ids, Prompt, Tokenizer, check_vocabulary, pad_left, prompt_of, read
from laconic.core.sampling import Number, Sampler, Sampling, check
from laconic.core.state import State
from laconic.core.wording import Wording

__all__ = ["Generation", "Passes", "generate", "pad_left"]

OnToken = Callable[[int, int, str, float], None]
Reason = Literal["eos", "stop", "length"]


class Passes(NamedTuple):
    """Decoder calls in which a row was not finished: pieces of the prompt, thoughts placed, thoughts, tokens."""

    read: int
    place: int
    think: int
    answer: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True)
class Generation:
    """The continuation of one row, without its prompt.

    `ids` end with the eos that ended them, which `text` does not hold. `logprobs` in nats, before any filter. `state`
    is what was read: the prompt and every id but the last, of a model that learns while it reads that one too;
    `hidden` [D] is the vector that gave that last id. `calls` counts the decoder calls of the whole batch.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    passes: Passes
    stop_reason: Reason
    state: Cache | State
    hidden: Tensor
    calls: int


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer | None = None,
    prompts: Sequence[str] | None = None,
    *,
    ids: Ids | None = None,
    vectors: Float[Tensor, "B T D"] | None = None,
    live: Shaped[Tensor, "B T"] | None = None,
    state: Cache | State | None = None,
    start: Int[Tensor, " B"] | None = None,
    learn: bool | None = None,
    learn_answer: bool | None = None,
    max_tokens: int,
    min_tokens: int = 0,
    temperature: Number = 0.0,
    top_k: int = 0,
    top_p: Number = 1.0,
    min_p: Number = 0.0,
    repetition_penalty: Number = 1.0,
    stop: str | Sequence[str] = (),
    eos: int | Sequence[int] | None = None,
    eos_count: int = 1,
    banned: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    chunk: int = 512,
    keep_state: bool = True,
    on_token: OnToken | None = None,
) -> list[Generation]:
    """Continues `prompts`, `ids` or `vectors` (one of them; `live` goes with vectors), on `state` if it is given.

    `start` is the position of each row's first token; by default the one behind the last that `state` holds.
    `temperature` 0 takes the likeliest id. `seed` is every row's, or a list of one each: what a row draws depends on
    its own alone. A row ends with an id of `eos` (default: the config's; `()` for none), the first or the one that
    `eos_count` says, before a string of `stop`, or at `max_tokens`; before `min_tokens` no eos is taken, and never an
    id that is `banned`. The prompt is read `chunk` positions at once. Without `keep_state` every `state` is empty.
    `on_token(row, id, text, logprob)` hears of each token; its texts are whole characters and add up to the text.

    A model that learns while it reads has a `State`; `learn` and `learn_answer` say whether the prompt and what is
    written teach it. None: only where it has no attention, and would not see them otherwise.

    Raises `Usage` (2) for settings, `BadInput` (66) for ids and tokenizers that do not fit, `NonFinite` (65).
    """
    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    check_settings(max_tokens, min_tokens, chunk, eos_count, stop, tokenizer)
    if tokenizer is not None:
        check_vocabulary(tokenizer, decoder.config.vocab_size)
    with torch.inference_mode():
        prompt = prompt_of(decoder, tokenizer, prompts, ids, vectors, live)
        if not prompt.rows:
            return []
        prompt = prompt._replace(start=None if start is None else start.to(prompt.live.device))
        seeds = [seed] * len(prompt.rows) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(prompt.rows):
            raise Usage(
                f"seed has {len(seeds)} entries, there are {len(prompt.rows)} rows; give one each or one for all"
            )
        prompt = prompt._replace(learn=taught(decoder, state, start, learn, learn_answer))
        first = check_length(decoder, prompt, state, max_tokens)
        ends = decoder.config.eos if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        V = decoder.config.vocab_size
        for name, ids_given in (("eos", ends if eos is not None else ()), ("banned", banned)):
            for i in ids_given:
                check(name, i, 0 <= i < V, f"in [0, vocabulary {V})")
        decode = None if tokenizer is None else tokenizer.decode
        rows = [
            Row(b, Wording(decode, row, stop) if decode else None, ends, eos_count, max_tokens, on_token)
            for b, row in enumerate(prompt.rows)
        ]
        sampler = Sampler(how, seeds, prompt.rows, [end for end in ends if end < V], banned)
        return run(decoder, prompt, state, chunk, rows, sampler, min_tokens, first, keep_state)


def check_settings(
    max_tokens: int, min_tokens: int, chunk: int, eos_count: int, stop: Sequence[str], tokenizer: Tokenizer | None
) -> None:
    """Raises `Usage` for numbers and stop strings that cannot be meant."""
    numbers: dict[str, object] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "chunk": chunk,
        "eos_count": eos_count,
    }
    for name, value in numbers.items():
        if not isinstance(value, SupportsIndex):
            raise Usage(f"{name} {value!r}: must be an integer")
    check("max_tokens", max_tokens, max_tokens >= 1, "≥ 1")
    check("min_tokens", min_tokens, 0 <= min_tokens <= max_tokens, f"in [0, max_tokens {max_tokens}]")
    check("chunk", chunk, chunk >= 1, "≥ 1")
    check("eos_count", eos_count, eos_count >= 1, "≥ 1")
    if "" in stop:
        raise Usage("stop: an empty string stops everything; leave it out")
    if stop and tokenizer is None:
        raise Usage("stop strings given without a tokenizer; give one, or eos ids")


def taught(
    decoder: Decoder,
    state: Cache | State | None,
    start: Tensor | None,
    learn: bool | None,
    learn_answer: bool | None,
) -> tuple[bool, bool]:
    """Whether prompt and answer teach. Raises `Usage` for a state of another kind, and for what only one kind has."""
    learns = isinstance(decoder, Learner)
    if state is not None and isinstance(state, State) != learns:
        kinds = ("a cache", "fast weights")
        raise Usage(f"state holds {kinds[not learns]}, the model keeps {kinds[learns]}; give one of its own")
    if not learns and (learn or learn_answer):
        raise Usage(f"learn: a {decoder.config.family} decoder has no fast weights; give a Hope, or leave it out")
    if learns and start is not None:
        raise Usage("start: a model that learns while it reads counts its own positions; leave it out")
    needed = learns and paths.blind(decoder.start(1) if state is None else paths.held(state))
    return needed if learn is None else learn, needed if learn_answer is None else learn_answer


def check_length(decoder: Decoder, prompt: Prompt, state: Cache | State | None, max_tokens: int) -> int:
    """The position of the first token to come, of the longest row.

    Raises `Usage` where a learned table has too few positions for `max_tokens` more.
    """
    held = torch.zeros(len(prompt.live), dtype=torch.long, device=prompt.live.device)
    if isinstance(state, State):
        if len(state.position) != len(held):
            raise Usage(f"{len(held)} prompts on a state of {len(state.position)} rows; take or join its rows")
        state = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    elif state is not None:
        fit.check_state(decoder.config, state, len(prompt.live))
    if state is not None:
        held = 1 + F.pad(state.positions.masked_fill(~state.live, -1), (1, 0), value=-1).amax(1)
    held = held if prompt.start is None else prompt.start
    first, config = int((held + prompt.live.sum(1)).amax()), decoder.config
    over = first + max_tokens - config.max_position_embeddings
    if over > 0 and config.place == "table":
        raise Usage(
            f"prompt {first:,} + max_tokens {max_tokens:,} > {config.max_position_embeddings:,} positions of "
            f"{config.family}; shorten by {over:,}"
        )
    return first


class Row:
    """One continuation in the making."""

    def __init__(
        self,
        index: int,
        wording: Wording | None,
        ends: Sequence[int],
        eos_count: int,
        max_tokens: int,
        on_token: OnToken | None,
    ) -> None:
        self.index, self.wording, self.ends, self.max_tokens = index, wording, ends, max_tokens
        self.eos_left, self.on_token = eos_count, on_token
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.reason: Reason | None = None

    def add(self, token: int, logprob: float) -> Reason | None:
        """One more id, and why it is the last, if it is. Raises `NonFinite` for a probability that is no number."""
        if not math.isfinite(logprob):
            raise NonFinite(f"row {self.index}, token {len(self.ids)}: logits are not finite; check the weights")
        self.ids.append(token)
        self.logprobs.append(logprob)
        text = ""
        self.eos_left -= token in self.ends
        if self.eos_left == 0:
            self.reason = "eos"
        elif self.wording is not None:
            text = self.wording.add(token)
        if self.wording is not None and self.wording.stopped:
            self.reason = "stop"
        elif self.reason is None and len(self.ids) == self.max_tokens:
            self.reason = "length"
        if self.reason and self.wording is not None:
            text += self.wording.end()
        if self.on_token is not None:
            self.on_token(self.index, token, text, logprob)
        return self.reason

    def generation(self, state: Cache | State, hidden: Tensor, pieces: int, whole: bool) -> Generation:
        """What is handed back when the row has ended; `whole`: its last id was read too."""
        assert self.reason is not None
        text, n = "" if self.wording is None else self.wording.text, len(self.ids) - (not whole)
        return Generation(text, self.ids, self.logprobs, Passes(pieces, 0, 0, n), self.reason, state, hidden, 0)


def run(
    decoder: Decoder,
    prompt: Prompt,
    state: Cache | State | None,
    chunk: int,
    rows: list[Row],
    sampler: Sampler,
    min_tokens: int,
    first: int,
    keep_state: bool = True,
) -> list[Generation]:
    """Reads the prompt, then goes on until every row has its reason to end; `first` is where the longest goes on."""
    max_tokens, Pmax = rows[0].max_tokens, decoder.config.max_position_embeddings
    hidden, held, pieces = read(decoder, prompt, state, chunk)
    logits, path = decoder.logits(hidden), paths.path_of(decoder, held, max_tokens - 1, prompt.learn[1])
    nothing, done = paths.nothing(decoder, hidden), dict[int, Generation]()
    S, whole = state.S if isinstance(state, Cache) else 0, keep_state and isinstance(held, State)
    for t in range(max_tokens):
        if decoder.config.place == "rope" and t == max(0, Pmax + 1 - first):
            warnings.warn(f"position {Pmax:,} ≥ {Pmax:,} of {decoder.config.family}: farther than it was trained")
        ids, logprobs = sampler(logits, hold=t < min_tokens)
        told = torch.stack([ids.double(), logprobs.double()], 1).cpu()  # the one wait of a step
        chosen = cast(list[tuple[float, float]], told.numpy().tolist())
        for place, row in enumerate(rows):
            if isinstance(path, paths.Learning) and not math.isfinite(chosen[place][1]):
                path.check(place)
            if row.reason is None and row.add(int(chosen[place][0]), chosen[place][1]):
                kept = paths.left(path, place, row.ids[-1], S) if keep_state else nothing
                done[row.index] = row.generation(kept, paths.apart(hidden[place]), pieces, whole)
        left = [place for place, row in enumerate(rows) if row.reason is None]
        if not left:
            break
        if 2 * len(left) < len(rows):
            path.take(left)
            sampler.take(left)
            rows, ids = [rows[place] for place in left], ids[left]
        hidden, logits = path.step(ids)
    calls = pieces + max(g.passes.answer for g in done.values())
    return [replace(done[b], calls=calls) for b in sorted(done)]
