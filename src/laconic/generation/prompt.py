"""Prompts: validate and left-pad texts, ids or embeddings, and prefill the model with them in chunks."""

import inspect
from collections.abc import Sequence, Sized
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from laconic.batches.padding import pad_rows
from laconic.errors import InputError, UsageError
from laconic.generation.config import OnPrefill
from laconic.generation.state import DecodeState
from laconic.interfaces import ChecksFiniteState, RecurrentState, StatefulLM
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput, check_inputs_embeds
from laconic.models.next_token import last_valid
from laconic.models.ops.rope_scaling import has_fixed_frequencies

MIN_SHARED_POSITIONS = 512  # to be saved by reading once what several prompts begin with, in a pass of its own
FIRST_PASS_CHUNKS = 8  # read at once on an empty cache, where attention needs no mask: a tenth faster on 2,048 tokens
InputIds = Sequence[Sequence[int]] | Shaped[Tensor, "B T"]


@runtime_checkable
class TokenizerLike(Protocol):
    """The part of a tokenizer that generation needs. Its `base_vocab_size`, or `vocab_size`, must fit the model."""

    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: list[int], /) -> str: ...


class Prompt(NamedTuple):
    """A validated prompt: `input_ids` [B, T] or `inputs_embeds` [B, T, D], and the ids of each row without padding.

    `first_positions` are the positions of each row's first token; None continues after the last cached position.
    `update_flags` say whether prompt and output update fast weights. With `last_hidden`, the hidden state of each row's
    last position, everything has been read.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Bool[Tensor, "B T"]
    token_ids: list[list[int]]
    first_positions: Int[Tensor, " B"] | None = None
    update_flags: tuple[bool, bool] = (False, False)
    last_hidden: Float[Tensor, "B D"] | None = None

    @property
    def position_ids(self) -> Int[Tensor, "B T"] | None:
        """Positions of the prompt if `first_positions` is set; padding gets 0."""
        if self.first_positions is None:
            return None
        return (self.first_positions[:, None] + self.attention_mask.cumsum(1) - 1) * self.attention_mask


def build_prompt(
    decoder: Decoder,
    tokenizer: TokenizerLike | None = None,
    prompts: Sequence[str] | None = None,
    input_ids: InputIds | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    state: KVCache | DecodeState | RecurrentState | None = None,
) -> Prompt:
    """Validate `prompts`, `input_ids` or `inputs_embeds`, and move it to the model's device.

    Unread ids of a `DecodeState` are put before it.
    """
    inputs = {"prompts": prompts, "input_ids": input_ids, "inputs_embeds": inputs_embeds}
    present = [name for name, x in inputs.items() if x is not None]
    if len(present) != 1:
        raise UsageError(f"{' and '.join(present) or 'no prompt'} given; pass one of prompts, input_ids, inputs_embeds")
    if attention_mask is not None and not isinstance(inputs[present[0]], Tensor):
        raise UsageError("attention_mask needs a tensor of input_ids or inputs_embeds; lists and texts are padded here")
    device = decoder.device
    unread = state.unread_ids if isinstance(state, DecodeState) else None
    unread_rows = None if unread is None else [list(map(int, row)) for row in unread]
    if inputs_embeds is not None:
        check_inputs_embeds(decoder.config, inputs_embeds)
        mask = convert_mask(attention_mask, inputs_embeds)
        if unread is not None:
            check_rows(len(mask), len(unread))
            inputs_embeds = torch.cat([decoder.embed(unread), inputs_embeds.to(device)], 1)
            mask = F.pad(mask, (unread.shape[1], 0), value=True)
        check_nonempty_rows(mask)
        return Prompt(None, inputs_embeds.to(device), mask.to(device), unread_rows or [[] for _ in mask])
    if input_ids is not None:
        rows = list_rows(input_ids, attention_mask)
    else:
        rows = encode_prompts(tokenizer, () if prompts is None else prompts, is_continuation=state is not None)
    check_ids(rows, decoder.config.vocab_size)
    if unread_rows is not None:
        check_rows(len(rows), len(unread_rows))
        rows = [before + row for before, row in zip(unread_rows, rows, strict=True)]
    padded, mask = pad_rows(rows, pad_left=True)
    check_nonempty_rows(mask)
    return Prompt(padded.to(device), None, mask.to(device), rows)


def convert_mask(attention_mask: Tensor | None, inputs: Tensor) -> Bool[Tensor, "B T"]:
    """Return a mask of booleans, or of zeros and ones as transformers' tokenizers return it, as booleans."""
    if attention_mask is None:
        return torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    mask = attention_mask.bool()
    if attention_mask.is_floating_point() or bool((attention_mask != mask).any()):
        raise UsageError(f"attention_mask is {attention_mask.dtype}; give booleans, or integers 0 and 1")
    if mask.shape != inputs.shape[:2]:
        raise UsageError(f"attention_mask is {list(mask.shape)}, the inputs are {list(inputs.shape[:2])}")
    return mask


def list_rows(input_ids: Sequence[object] | Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the ids of each row without padding. Raises UsageError for ids that are not one list per row."""
    if isinstance(input_ids, Tensor) and input_ids.is_floating_point():
        raise UsageError(f"input_ids are {input_ids.dtype}; pass embeddings as inputs_embeds")
    if input_ids.ndim != 2 if isinstance(input_ids, Tensor) else not all(isinstance(row, Sized) for row in input_ids):
        raise UsageError("input_ids: pass one list per row: [[…]]")
    if not isinstance(input_ids, Tensor):
        return [list(row) for row in cast(Sequence[Sequence[int]], input_ids)]
    mask = convert_mask(attention_mask, input_ids).cpu()
    return [list(map(int, row[real])) for row, real in zip(input_ids.cpu(), mask, strict=True)]


def encode_prompts(
    tokenizer: TokenizerLike | None, prompts: Sequence[str], is_continuation: bool = False
) -> list[list[int]]:
    """Encode texts; continuations, which may be empty, without special tokens such as BOS."""
    if tokenizer is None:
        raise UsageError("prompts need a tokenizer; pass one, or input_ids")
    encode: Any = tokenizer.encode
    if is_continuation and "add_special_tokens" in inspect.signature(encode).parameters:
        encode = partial(encode, add_special_tokens=False)
    rows = [list(encode(text)) for text in ([prompts] if isinstance(prompts, str) else prompts)]
    for b, row in enumerate(rows):
        if not row and not is_continuation:
            raise UsageError(f"prompt {b} is empty and the tokenizer adds no BOS token; pass text, ids or embeddings")
    return rows


def check_rows(num_prompts: int, num_rows: int) -> None:
    """Raise UsageError unless there is one prompt per row of a state."""
    if num_prompts != num_rows:
        raise UsageError(f"{num_prompts} prompts on a state of {num_rows} rows; select or concatenate rows")


def check_ids(rows: list[list[int]], vocab_size: int) -> None:
    """Raise InputError for an id outside the vocabulary, UsageError for floats, text and lists."""
    for b, row in enumerate(rows):
        for t, i in enumerate(row):
            if not hasattr(i, "__index__"):
                raise UsageError(
                    f"input_ids[{b}] has a {type(i).__name__} where an integer is expected; give token ids"
                )
            if not 0 <= i < vocab_size:
                raise InputError(f"input_ids[{b}, {t}] = {i} is outside the vocabulary of {vocab_size}")


def check_nonempty_rows(attention_mask: Tensor) -> None:
    """Raise UsageError for a row without a real token."""
    empty = (~attention_mask.any(1)).nonzero()
    if len(empty):
        raise UsageError(f"row {int(empty[0])} of the prompt has no token")


def check_is_decoder(model: object) -> None:
    """Raise `UsageError` for something else, such as a model of `laconic.load`, which only contains a decoder."""
    if not hasattr(model, "config"):
        hint = "its attribute decoder" if hasattr(model, "decoder") else "a laconic.Decoder"
        raise UsageError(f"a {type(model).__name__} is not a decoder; pass {hint}")


def check_vocabulary(tokenizer: TokenizerLike, vocab_size: int) -> None:
    """Raise InputError if the tokenizer has more ids than the model has embeddings; added tokens may be unused."""
    size = getattr(tokenizer, "base_vocab_size", getattr(tokenizer, "vocab_size", 0))
    if size > vocab_size:
        raise InputError(
            f"the tokenizer has {size} ids, the model {vocab_size} embeddings; "
            "resize the vocabulary or use the model's own tokenizer"
        )


def prefill(
    decoder: Decoder,
    prompt: Prompt,
    state: KVCache | RecurrentState | None,
    chunk_size: int,
    on_prefill: OnPrefill | None = None,
    first_new_position: int = 0,
) -> tuple[Float[Tensor, "B D"], KVCache | RecurrentState, int]:
    """Read the prompt, `chunk_size` positions per pass.

    Returns the hidden state of each row's last token, the new state, and the number of forward passes.

    What all rows begin with, such as examples before each question, is read once. Its last pass and the first one
    after it count as one, as for a row that is read alone in one pass.

    A first pass on an empty cache reads more, unless `on_prefill` is to follow the progress. If RoPE's frequencies
    change before `first_new_position`, that of the longest row, one pass reads all: the keys of a pass are rotated for
    the length at its end, so a result would depend on the chunks, and thus on padding and callbacks.
    """
    if prompt.last_hidden is not None and state is not None:
        return prompt.last_hidden, state, 0
    last_hidden: Tensor | None = None
    B, T = prompt.attention_mask.shape
    all_valid = bool(prompt.attention_mask.all())
    if not isinstance(decoder, StatefulLM) and not has_fixed_frequencies(decoder.config.rope, first_new_position):
        chunk_size = T
    elif state is None and not isinstance(decoder, StatefulLM) and on_prefill is None:
        n = count_shared_inputs(prompt)
        if (B - 1) * n >= MIN_SHARED_POSITIONS:
            first, rest = split_shared_inputs(prompt, n)
            _, cache, num_first = prefill(decoder, first, None, chunk_size)
            assert isinstance(cache, KVCache)
            hidden, state, num_rest = prefill(decoder, rest, cache.repeat_rows(B), chunk_size)
            return hidden, state, num_first - 1 + num_rest
    needs_no_mask = all_valid and state is None and not isinstance(decoder, StatefulLM)
    first_chunks = FIRST_PASS_CHUNKS if needs_no_mask and on_prefill is None else 1
    ends = [*range(first_chunks * chunk_size, T, chunk_size), T]
    chunks = [slice(start, stop) for start, stop in pairwise([0, *ends])]
    if on_prefill is not None:
        on_prefill(0, T)
    for columns in chunks:
        mask = prompt.attention_mask[:, columns]
        output = read_chunk(decoder, prompt, columns, state, None if all_valid else mask)
        state = output.cache
        hidden = last_valid(output.hidden_states, mask[:, -output.hidden_states.shape[1] :])
        last_hidden = hidden if last_hidden is None else torch.where(mask.any(1, keepdim=True), hidden, last_hidden)
        if on_prefill is not None:
            on_prefill(columns.stop, T)
    assert last_hidden is not None
    assert state is not None
    return last_hidden, state, len(chunks)


def count_shared_inputs(prompt: Prompt) -> int:
    """Return how many first ids or embeddings all rows share, without each row's last; 0 unless padded left."""
    mask = prompt.attention_mask
    B, T = mask.shape
    if (B - 1) * T < MIN_SHARED_POSITIONS:
        return 0
    lengths = mask.sum(1)
    columns = torch.arange(T, device=mask.device)
    if prompt.first_positions is not None or not torch.equal(mask, columns >= T - lengths[:, None]):
        return 0
    inputs = prompt.inputs_embeds if prompt.input_ids is None else prompt.input_ids[:, :, None]
    assert inputs is not None
    rows = (T - lengths)[:, None] + columns[: int(lengths.min()) - 1]
    first = inputs.take_along_dim(rows[:, :, None], 1)
    is_shared = (first == first[:1]).all(-1).all(0)
    return int(is_shared.cumprod(0).sum())


def split_shared_inputs(prompt: Prompt, n: int) -> tuple[Prompt, Prompt]:
    """Return the first n inputs of one row of a left-padded prompt, which all rows share, and all that follows them."""
    mask = prompt.attention_mask
    T = mask.shape[1]
    lengths = mask.sum(1)
    start = T - int(lengths[0])
    ids, embeds = prompt.input_ids, prompt.inputs_embeds
    first = Prompt(
        None if ids is None else ids[:1, start : start + n],
        None if embeds is None else embeds[:1, start : start + n],
        mask[:1, start : start + n],
        [prompt.token_ids[0][:n]],
    )
    rest = prompt._replace(
        input_ids=None if ids is None else ids[:, n:],
        inputs_embeds=None if embeds is None else embeds[:, n:],
        attention_mask=torch.arange(n, T, device=mask.device) >= T - (lengths - n)[:, None],
    )
    return first, rest


def read_chunk(
    decoder: Decoder, prompt: Prompt, columns: slice, state: Any, attention_mask: Tensor | None
) -> DecoderOutput:
    """Read some columns of the prompt into a KV cache, or fast weights: of embeddings without next-token targets."""
    model = cast(Any, decoder)
    ids = prompt.input_ids
    update_weights = prompt.update_flags[0]
    if ids is not None and isinstance(decoder, StatefulLM):
        output = model.read_tokens(ids[:, columns], state, attention_mask=attention_mask, update_weights=update_weights)
        if update_weights and isinstance(model, ChecksFiniteState):
            model.check_finite_state(output.cache)
        return output
    embeds = cast(Tensor, prompt.inputs_embeds)[:, columns] if ids is None else decoder.embed(ids[:, columns])
    if isinstance(decoder, StatefulLM):
        return model(embeds, state, attention_mask=attention_mask, update_weights=update_weights)
    position_ids = None if prompt.position_ids is None else prompt.position_ids[:, columns]
    num_outputs = 1 if attention_mask is None else None
    return decoder(embeds, state, attention_mask=attention_mask, position_ids=position_ids, num_outputs=num_outputs)
