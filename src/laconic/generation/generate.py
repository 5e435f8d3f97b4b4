"""Text generation: prefill the prompt in chunks, then decode one token per step until every row has ended."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from laconic.batches import PassCounts, StopReason
from laconic.errors import NonFiniteError, UsageError
from laconic.generation.backends import (
    StatefulBackend,
    as_recurrent,
    choose_backend,
    clone_outside_inference,
    final_state,
)
from laconic.generation.config import GREEDY, GenerationConfig, check_config, check_range, check_type, list_integers
from laconic.generation.prompt import (
    InputIds,
    Prompt,
    TokenizerLike,
    build_prompt,
    check_is_decoder,
    check_rows,
    check_vocabulary,
    prefill,
)
from laconic.generation.result import Generation
from laconic.generation.sampling import Sampler
from laconic.generation.state import DecodeState
from laconic.generation.text_stream import IncrementalDetokenizer
from laconic.interfaces import RecurrentState, StatefulLM
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


def generate(
    decoder: Decoder,
    tokenizer: TokenizerLike | None = None,
    prompts: Sequence[str] | None = None,
    *,
    input_ids: InputIds | None = None,
    inputs_embeds: Float[Tensor, "B T D"] | None = None,
    attention_mask: Shaped[Tensor, "B T"] | None = None,
    state: KVCache | DecodeState | RecurrentState | None = None,
    first_positions: Int[Tensor, " B"] | None = None,
    config: GenerationConfig = GREEDY,
) -> list[Generation]:
    """Continue a batch of prompts.

    Rows are independent: each result equals that of its prompt alone. Greedy unless `config.temperature` is set.

    Continuing from the `state` of a result equals continuing from the prompt and all of its `token_ids`, those of a
    stop string or eos included. Only the repetition penalty sees no ids from before the call.

    Args:
        decoder: A decoder, or a model with fast weights such as `laconic.Hope`.
        tokenizer: Needed for `prompts`, for `text` in the results, and for stop strings.
        prompts: Texts. Pass exactly one of `prompts`, `input_ids` and `inputs_embeds`.
        input_ids: One list of ids per row, or a tensor with `attention_mask`.
        inputs_embeds: Embeddings, for example latent thoughts or summary vectors.
        attention_mask: True, or 1, at real tokens of tensor inputs.
        state: What to continue from, one row per prompt: `Generation.state`, a KV cache or fast weights. Texts that
            follow a state are encoded without special tokens. After a `Generation.state`, "" adds nothing.
        first_positions: Position of each row's first token; by default the one after the last cached position.
        config: Length, sampling, stop conditions and streaming.

    Returns:
        One `Generation` per row.

    Raises:
        UsageError: Options or inputs do not fit one another (exit code 2).
        InputError: An id is outside the vocabulary, or the tokenizer belongs to another model (66).
        NonFiniteError: The model's logits or fast weights are not finite (65).

    Examples:
        >>> import laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> config = laconic.GenerationConfig(max_tokens=5, eos_token_ids=())
        >>> first = laconic.generate(decoder, input_ids=[[1, 17, 42]], config=config)[0]
        >>> second = laconic.generate(decoder, input_ids=[[8]], state=first.state, config=config)[0]
        >>> ids = [1, 17, 42, *first.token_ids, 8]
        >>> second.token_ids == laconic.generate(decoder, input_ids=[ids], config=config)[0].token_ids
        True
    """
    check_is_decoder(decoder)
    expected = "a tokenizer or None (token ids: generate(decoder, input_ids=[[1, 2]], config=…))"
    check_type("tokenizer", tokenizer, TokenizerLike | None, expected)
    check_type("prompts", prompts, Iterable | None, "a text or a list of texts")
    check_type("input_ids", input_ids, Iterable | None, "one list of ids per row, or a tensor [B, T]")
    for name, x in (("inputs_embeds", inputs_embeds), ("attention_mask", attention_mask)):
        check_type(name, x, Tensor | None, "a tensor")
    if tokenizer is not None:
        check_vocabulary(tokenizer, decoder.config.vocab_size)
    with torch.inference_mode():
        prompt = build_prompt(decoder, tokenizer, prompts, input_ids, inputs_embeds, attention_mask, state)
        if not prompt.token_ids:
            return []
        if isinstance(state, DecodeState):
            state = state.cache
        if first_positions is not None:
            rows = len(prompt.token_ids)
            check_type("first_positions", first_positions, Tensor, "a tensor of integers [B]")
            if first_positions.shape != (rows,) or bool((first_positions < 0).any()):
                raise UsageError(f"first_positions {first_positions}: give {rows} positions of 0 or more, one per row")
            prompt = prompt._replace(first_positions=first_positions.to(prompt.attention_mask.device))
        return generate_from_prompt(decoder, tokenizer, prompt, state, config)


def generate_from_prompt(
    decoder: Decoder,
    tokenizer: TokenizerLike | None,
    prompt: Prompt,
    state: KVCache | RecurrentState | None,
    config: GenerationConfig,
) -> list[Generation]:
    """Continue a prompt as `generate` does, in inference mode."""
    check_config(config)
    if config.stop_list and tokenizer is None:
        raise UsageError("stop_strings need a tokenizer; pass one, or use eos_token_ids")
    prompt = prompt._replace(update_flags=resolve_update_flags(decoder, state, prompt.first_positions, config))
    first_new_position = find_first_new_position(decoder, prompt, state)
    check_position_table(decoder.config, first_new_position, config.max_tokens)
    sampler = build_sampler(decoder, prompt, config)
    decode = None if tokenizer is None else tokenizer.decode
    eos = resolve_eos(decoder, config)
    sequences = [SequenceState(index, decode, ids, eos, config) for index, ids in enumerate(prompt.token_ids)]
    return decode_loop(decoder, prompt, state, sequences, sampler, config, first_new_position)


def resolve_eos(decoder: Decoder, config: GenerationConfig) -> tuple[int, ...]:
    """Return the ids that end a row, from the options or else from the model's configuration."""
    eos = config.eos_token_ids
    return decoder.config.eos_token_ids if eos is None else tuple(list_integers("eos_token_ids", eos))


def build_sampler(decoder: Decoder, prompt: Prompt, config: GenerationConfig) -> Sampler:
    """Return the sampler; raise UsageError for ids outside the vocabulary or a wrong number of seeds."""
    V = decoder.config.vocab_size
    rows = len(prompt.token_ids)
    eos = resolve_eos(decoder, config)
    suppressed = list_integers("suppress_token_ids", config.suppress_token_ids)
    given_eos = () if config.eos_token_ids is None else eos
    for name, ids in (("eos_token_ids", given_eos), ("suppress_token_ids", suppressed)):
        for i in ids:
            check_range(name, i, 0 <= i < V, f"in [0, {V}), the vocabulary")
    seeds = list_integers("seed", config.seed)
    seeds = seeds * rows if isinstance(config.seed, SupportsIndex) else seeds
    if len(seeds) != rows:
        raise UsageError(f"seed has {len(seeds)} entries for {rows} rows; pass one per row or a single int")
    return Sampler(config, seeds, prompt.token_ids, [i for i in eos if i < V], suppressed)


def resolve_update_flags(
    decoder: Decoder, state: KVCache | RecurrentState | None, first_positions: Tensor | None, config: GenerationConfig
) -> tuple[bool, bool]:
    """Return whether prompt and output update fast weights; by default only for models without attention."""
    is_stateful = isinstance(decoder, StatefulLM)
    expected = "one KVCache, DecodeState or fast weights (several have concat_rows, a KVMemory has to_cache)"
    check_type("state", state, KVCache | RecurrentState | None, expected)
    if state is not None and isinstance(state, RecurrentState) != is_stateful:
        kinds = ("a KV cache", "fast weights")
        raise UsageError(f"state is {kinds[not is_stateful]}, the model has {kinds[is_stateful]}; pass a matching one")
    if not is_stateful and (config.update_on_prompt or config.update_on_output):
        name = "update_on_prompt" if config.update_on_prompt else "update_on_output"
        raise UsageError(f"{name}: a {decoder.config.family} decoder has no fast weights; use a Hope model")
    if is_stateful and first_positions is not None:
        raise UsageError("first_positions: a model with fast weights counts its own positions; remove first_positions")
    default = False
    if is_stateful:
        before = decoder.initial_state(1) if state is None else state
        default = as_recurrent(before).attention_cache is None
    return (
        default if config.update_on_prompt is None else config.update_on_prompt,
        default if config.update_on_output is None else config.update_on_output,
    )


def find_first_new_position(decoder: Decoder, prompt: Prompt, state: KVCache | RecurrentState | None) -> int:
    """Return the position of the first new token of the longest row, if the state fits prompt and model."""
    rows = len(prompt.attention_mask)
    device = prompt.attention_mask.device
    cache = state if isinstance(state, KVCache) else None
    if cache is not None:
        check_rows(rows, cache.B)
        try:
            cache.check_fits(decoder.config, rows)
        except ValueError as error:
            raise UsageError(f"{error}; pass the state of this model") from None
        dtype, expected = cache.keys[0].dtype, decoder.dtype
        if torch.promote_types(dtype, expected) != expected:
            raise UsageError(f"state is {dtype}, the model {expected}; convert its KVCache: cache.to(dtype={expected})")
    elif state is not None:
        recurrent = as_recurrent(state)
        check_rows(rows, len(recurrent.position))
        cache = recurrent.attention_cache
    start = torch.zeros(rows, dtype=torch.long, device=device)
    if prompt.first_positions is not None:
        start = prompt.first_positions
    elif cache is not None:
        start = cache.next_position
    return int((start + prompt.attention_mask.sum(1)).amax())


def check_position_table(config: DecoderConfig, first_new_position: int, max_tokens: int) -> None:
    """Raise UsageError if a learned position table is too short for `max_tokens` new tokens."""
    excess = first_new_position + max_tokens - config.max_position_embeddings
    if excess > 0 and config.position_encoding == "table":
        raise UsageError(
            f"prompt of {first_new_position:,} positions + max_tokens={max_tokens:,} exceeds the "
            f"{config.max_position_embeddings:,} positions of {config.family}; shorten by {excess:,}"
        )


class SequenceState:
    """One running row: its ids, log probabilities, text (if there is `decode`), and why it ended."""

    def __init__(
        self,
        index: int,
        decode: Callable[[list[int]], str] | None,
        prompt_ids: Sequence[int],
        eos_token_ids: tuple[int, ...],
        config: GenerationConfig,
    ) -> None:
        self.index, self.eos_token_ids, self.config = index, eos_token_ids, config
        self.detokenizer = decode and IncrementalDetokenizer(decode, prompt_ids, config.stop_list, config.min_tokens)
        self.remaining_eos = config.eos_count
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.new_text = ""  # of the last id
        self.stop_reason: StopReason | None = None

    def append(self, token: int, logprob: float) -> StopReason | None:
        """Add an id; return the reason if it is the last one. Raise NonFiniteError for a NaN log probability."""
        if not math.isfinite(logprob):
            raise NonFiniteError(f"row {self.index}, token {len(self.token_ids)}: logits are not finite")
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.new_text = ""
        self.remaining_eos -= token in self.eos_token_ids
        if self.remaining_eos == 0:
            self.stop_reason = "eos"
        elif self.detokenizer is not None:
            self.new_text = self.detokenizer.append(token)
        if self.detokenizer is not None and self.detokenizer.found_stop:
            self.stop_reason = "stop"
        elif self.stop_reason is None and len(self.token_ids) == self.config.max_tokens:
            self.stop_reason = "length"
        if self.stop_reason and self.detokenizer is not None:
            self.new_text += self.detokenizer.flush()
        if self.config.on_token is not None and self.config.on_token(self.index, token, self.new_text, logprob):
            self.stop_reason = self.stop_reason or "cancelled"
        return self.stop_reason


def decode_loop(
    decoder: Decoder,
    prompt: Prompt,
    state: KVCache | RecurrentState | None,
    sequences: list[SequenceState],
    sampler: Sampler,
    config: GenerationConfig,
    first_new_position: int,
) -> list[Generation]:
    """Prefill, then decode until every row has ended.

    Rows that have ended leave the batch once they are more than half of it. `first_new_position` is that of the longest
    row, for the warning beyond the context.
    """
    Pmax = decoder.config.max_position_embeddings
    uses_rope = decoder.config.position_encoding == "rope"
    # New tokens that can be generated without reading position Pmax; the last new token is not read.
    num_fitting = max(0, Pmax + 1 - first_new_position)
    warning = f"position {Pmax:,} exceeds the {Pmax:,} positions that this {decoder.config.family} was trained on"
    if uses_rope and not num_fitting:
        warnings.warn(warning)  # before a long prompt is read
    hidden, state_after, prefill_passes = prefill(
        decoder, prompt, state, config.prefill_chunk_size, config.on_prefill, first_new_position
    )
    logits = decoder.logits(hidden)
    backend = choose_backend(decoder, state_after, config.max_tokens - 1, prompt.update_flags[1])
    finished: dict[int, Generation] = {}
    prompt_lengths = [int(n) for n in prompt.attention_mask.sum(1)]
    S = state.S if isinstance(state, KVCache) else 0
    for t in range(config.max_tokens):
        if uses_rope and t == num_fitting > 0:
            warnings.warn(warning)
        ids, logprobs = sampler(logits, block_eos=t < config.min_tokens)
        step = torch.stack([ids.double(), logprobs.double()], 1).cpu()  # the only device synchronisation of a step
        tokens = cast(list[tuple[float, float]], step.numpy().tolist())
        for row, sequence in enumerate(sequences):
            token, logprob = tokens[row]
            if sequence.stop_reason is not None:
                continue
            if isinstance(backend, StatefulBackend) and not math.isfinite(logprob):
                backend.check_finite(row)
            reason = sequence.append(int(token), logprob)
            if reason is not None:
                row_state = final_state(backend, row, int(token), S) if config.return_state else None
                text = "" if sequence.detokenizer is None else sequence.detokenizer.text
                passes = PassCounts(prefill_passes, 0, 0, t + isinstance(row_state, RecurrentState))
                result = (text, sequence.token_ids, sequence.logprobs, passes, reason, row_state)
                num_prompt_tokens = prompt_lengths[sequence.index]
                generation = Generation(*result, clone_outside_inference(hidden[row]), num_prompt_tokens)
                finished[sequence.index] = generation
                if config.on_finish is not None:
                    config.on_finish(sequence.index, generation)
        running = [row for row, sequence in enumerate(sequences) if sequence.stop_reason is None]
        if not running:
            break
        if 2 * len(running) < len(sequences):
            backend.select_rows(running)
            sampler.select_rows(running)
            sequences = [sequences[row] for row in running]
            ids = ids[running]
        hidden, logits = backend.step(ids)
    return [finished[b] for b in sorted(finished)]
