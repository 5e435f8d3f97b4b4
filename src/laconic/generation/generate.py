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

from laconic.errors import NonFiniteError, UsageError
from laconic.generation import backends as generation_backends
from laconic.generation.prompt import InputIds, Prompt, Tokenizer, build_prompt, check_vocabulary, pad_left, prefill
from laconic.generation.sampling import Number, Sampler, SamplingConfig, check_range
from laconic.generation.text_stream import IncrementalDetokenizer
from laconic.interfaces import StatefulLM
from laconic.models import input_checks
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.nested.state import FastWeightState

__all__ = ["Generation", "PassCounts", "generate", "pad_left"]

OnToken = Callable[[int, int, str, float], None]
StopReason = Literal["eos", "stop", "length"]


class PassCounts(NamedTuple):
    """Decoder calls in which a row was not finished: pieces of the prompt, thoughts placed, thoughts, tokens."""

    prompt: int
    latent_setup: int
    latent: int
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
    token_ids: list[int]
    logprobs: list[float]
    passes: PassCounts
    stop_reason: StopReason
    state: KVCache | FastWeightState
    last_hidden: Tensor
    decoder_calls: int


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer | None = None,
    prompts: Sequence[str] | None = None,
    *,
    input_ids: InputIds | None = None,
    inputs_embeds: Float[Tensor, "B T D"] | None = None,
    attention_mask: Shaped[Tensor, "B T"] | None = None,
    state: KVCache | FastWeightState | None = None,
    first_positions: Int[Tensor, " B"] | None = None,
    update_on_prompt: bool | None = None,
    update_on_output: bool | None = None,
    max_tokens: int,
    min_tokens: int = 0,
    temperature: Number = 0.0,
    top_k: int = 0,
    top_p: Number = 1.0,
    min_p: Number = 0.0,
    repetition_penalty: Number = 1.0,
    stop_strings: str | Sequence[str] = (),
    eos_token_ids: int | Sequence[int] | None = None,
    eos_count: int = 1,
    suppress_token_ids: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    prefill_chunk_size: int = 512,
    return_state: bool = True,
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
    how = SamplingConfig(temperature, top_k, top_p, min_p, repetition_penalty)
    stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    check_settings(max_tokens, min_tokens, prefill_chunk_size, eos_count, stop_strings, tokenizer)
    if tokenizer is not None:
        check_vocabulary(tokenizer, decoder.config.vocab_size)
    with torch.inference_mode():
        prompt = build_prompt(decoder, tokenizer, prompts, input_ids, inputs_embeds, attention_mask)
        if not prompt.token_ids:
            return []
        prompt = prompt._replace(
            first_positions=None if first_positions is None else first_positions.to(prompt.attention_mask.device)
        )
        seeds = [seed] * len(prompt.token_ids) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(prompt.token_ids):
            raise UsageError(
                f"seed has {len(seeds)} entries, there are {len(prompt.token_ids)} rows; give one each or one for all"
            )
        prompt = prompt._replace(
            update_flags=resolve_update_flags(decoder, state, first_positions, update_on_prompt, update_on_output)
        )
        first = check_max_length(decoder, prompt, state, max_tokens)
        ends = (
            decoder.config.eos_token_ids
            if eos_token_ids is None
            else (eos_token_ids,)
            if isinstance(eos_token_ids, int)
            else tuple(eos_token_ids)
        )
        V = decoder.config.vocab_size
        for name, ids_given in (("eos", ends if eos_token_ids is not None else ()), ("banned", suppress_token_ids)):
            for i in ids_given:
                check_range(name, i, 0 <= i < V, f"in [0, vocabulary {V})")
        decode = None if tokenizer is None else tokenizer.decode
        rows = [
            SequenceState(
                b,
                IncrementalDetokenizer(decode, row, stop_strings) if decode else None,
                ends,
                eos_count,
                max_tokens,
                on_token,
            )
            for b, row in enumerate(prompt.token_ids)
        ]
        sampler = Sampler(how, seeds, prompt.token_ids, [end for end in ends if end < V], suppress_token_ids)
        return decode_loop(decoder, prompt, state, prefill_chunk_size, rows, sampler, min_tokens, first, return_state)


def check_settings(
    max_tokens: int,
    min_tokens: int,
    prefill_chunk_size: int,
    eos_count: int,
    stop_strings: Sequence[str],
    tokenizer: Tokenizer | None,
) -> None:
    """Raises `Usage` for numbers and stop strings that cannot be meant."""
    numbers: dict[str, object] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "chunk": prefill_chunk_size,
        "eos_count": eos_count,
    }
    for name, value in numbers.items():
        if not isinstance(value, SupportsIndex):
            raise UsageError(f"{name} {value!r}: must be an integer")
    check_range("max_tokens", max_tokens, max_tokens >= 1, "≥ 1")
    check_range("min_tokens", min_tokens, 0 <= min_tokens <= max_tokens, f"in [0, max_tokens {max_tokens}]")
    check_range("chunk", prefill_chunk_size, prefill_chunk_size >= 1, "≥ 1")
    check_range("eos_count", eos_count, eos_count >= 1, "≥ 1")
    if "" in stop_strings:
        raise UsageError("stop: an empty string stops everything; leave it out")
    if stop_strings and tokenizer is None:
        raise UsageError("stop strings given without a tokenizer; give one, or eos ids")


def resolve_update_flags(
    decoder: Decoder,
    state: KVCache | FastWeightState | None,
    first_positions: Tensor | None,
    update_on_prompt: bool | None,
    update_on_output: bool | None,
) -> tuple[bool, bool]:
    """Whether prompt and answer teach. Raises `Usage` for a state of another kind, and for what only one kind has."""
    learns = isinstance(decoder, StatefulLM)
    if state is not None and isinstance(state, FastWeightState) != learns:
        kinds = ("a cache", "fast weights")
        raise UsageError(f"state holds {kinds[not learns]}, the model keeps {kinds[learns]}; give one of its own")
    if not learns and (update_on_prompt or update_on_output):
        raise UsageError(f"learn: a {decoder.config.family} decoder has no fast weights; give a Hope, or leave it out")
    if learns and first_positions is not None:
        raise UsageError("start: a model that learns while it reads counts its own positions; leave it out")
    needed = learns and generation_backends.has_no_attention(
        decoder.initial_state(1) if state is None else generation_backends.as_fast_weights(state)
    )
    return (
        needed if update_on_prompt is None else update_on_prompt,
        needed if update_on_output is None else update_on_output,
    )


def check_max_length(decoder: Decoder, prompt: Prompt, state: KVCache | FastWeightState | None, max_tokens: int) -> int:
    """The position of the first token to come, of the longest row.

    Raises `Usage` where a learned table has too few positions for `max_tokens` more.
    """
    held = torch.zeros(len(prompt.attention_mask), dtype=torch.long, device=prompt.attention_mask.device)
    if isinstance(state, FastWeightState):
        if len(state.position) != len(held):
            raise UsageError(f"{len(held)} prompts on a state of {len(state.position)} rows; take or join its rows")
        state = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    elif state is not None:
        input_checks.check_cache(decoder.config, state, len(prompt.attention_mask))
    if state is not None:
        held = 1 + F.pad(state.positions.masked_fill(~state.valid, -1), (1, 0), value=-1).amax(1)
    held = held if prompt.first_positions is None else prompt.first_positions
    first, config = int((held + prompt.attention_mask.sum(1)).amax()), decoder.config
    over = first + max_tokens - config.max_position_embeddings
    if over > 0 and config.position_encoding == "table":
        raise UsageError(
            f"prompt {first:,} + max_tokens {max_tokens:,} > {config.max_position_embeddings:,} positions of "
            f"{config.family}; shorten by {over:,}"
        )
    return first


class SequenceState:
    """One continuation in the making."""

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer | None,
        eos_token_ids: Sequence[int],
        eos_count: int,
        max_tokens: int,
        on_token: OnToken | None,
    ) -> None:
        self.index, self.detokenizer, self.eos_token_ids, self.max_tokens = (
            index,
            detokenizer,
            eos_token_ids,
            max_tokens,
        )
        self.remaining_eos, self.on_token = eos_count, on_token
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None

    def append(self, token: int, logprob: float) -> StopReason | None:
        """One more id, and why it is the last, if it is. Raises `NonFinite` for a probability that is no number."""
        if not math.isfinite(logprob):
            raise NonFiniteError(
                f"row {self.index}, token {len(self.token_ids)}: logits are not finite; check the weights"
            )
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        text = ""
        self.remaining_eos -= token in self.eos_token_ids
        if self.remaining_eos == 0:
            self.stop_reason = "eos"
        elif self.detokenizer is not None:
            text = self.detokenizer.append(token)
        if self.detokenizer is not None and self.detokenizer.found_stop:
            self.stop_reason = "stop"
        elif self.stop_reason is None and len(self.token_ids) == self.max_tokens:
            self.stop_reason = "length"
        if self.stop_reason and self.detokenizer is not None:
            text += self.detokenizer.flush()
        if self.on_token is not None:
            self.on_token(self.index, token, text, logprob)
        return self.stop_reason

    def to_generation(
        self, state: KVCache | FastWeightState, last_hidden: Tensor, prefill_passes: int, last_id_read: bool
    ) -> Generation:
        """What is handed back when the row has ended; `whole`: its last id was read too."""
        assert self.stop_reason is not None
        text, n = "" if self.detokenizer is None else self.detokenizer.text, len(self.token_ids) - (not last_id_read)
        return Generation(
            text,
            self.token_ids,
            self.logprobs,
            PassCounts(prefill_passes, 0, 0, n),
            self.stop_reason,
            state,
            last_hidden,
            0,
        )


def decode_loop(
    decoder: Decoder,
    prompt: Prompt,
    state: KVCache | FastWeightState | None,
    prefill_chunk_size: int,
    sequences: list[SequenceState],
    sampler: Sampler,
    min_tokens: int,
    first_new_position: int,
    return_state: bool = True,
) -> list[Generation]:
    """Reads the prompt, then goes on until every row has its reason to end; `first` is where the longest goes on."""
    max_tokens, Pmax = sequences[0].max_tokens, decoder.config.max_position_embeddings
    hidden, held, pieces = prefill(decoder, prompt, state, prefill_chunk_size)
    logits, path = (
        decoder.logits(hidden),
        generation_backends.choose_backend(decoder, held, max_tokens - 1, prompt.update_flags[1]),
    )
    nothing, done = generation_backends.empty_state(decoder, hidden), dict[int, Generation]()
    S, whole = state.S if isinstance(state, KVCache) else 0, return_state and isinstance(held, FastWeightState)
    for t in range(max_tokens):
        if decoder.config.position_encoding == "rope" and t == max(0, Pmax + 1 - first_new_position):
            warnings.warn(f"position {Pmax:,} ≥ {Pmax:,} of {decoder.config.family}: farther than it was trained")
        ids, logprobs = sampler(logits, block_eos=t < min_tokens)
        told = torch.stack([ids.double(), logprobs.double()], 1).cpu()  # the one wait of a step
        chosen = cast(list[tuple[float, float]], told.numpy().tolist())
        for place, row in enumerate(sequences):
            if isinstance(path, generation_backends.StatefulBackend) and not math.isfinite(chosen[place][1]):
                path.check_finite(place)
            if row.stop_reason is None and row.append(int(chosen[place][0]), chosen[place][1]):
                kept = generation_backends.final_state(path, place, row.token_ids[-1], S) if return_state else nothing
                done[row.index] = row.to_generation(
                    kept, generation_backends.clone_outside_inference(hidden[place]), pieces, whole
                )
        left = [place for place, row in enumerate(sequences) if row.stop_reason is None]
        if not left:
            break
        if 2 * len(left) < len(sequences):
            path.select_rows(left)
            sampler.select_rows(left)
            sequences, ids = [sequences[place] for place in left], ids[left]
        hidden, logits = path.step(ids)
    calls = pieces + max(g.passes.answer for g in done.values())
    return [replace(done[b], decoder_calls=calls) for b in sorted(done)]
