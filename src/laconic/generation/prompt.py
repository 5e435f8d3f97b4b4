"""What generation starts from: texts, ids or vectors, checked, padded on the left, and read in pieces."""

from collections.abc import Sequence, Sized
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from laconic.errors import InputError, UsageError
from laconic.interfaces import StatefulLM
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.models.input_checks import check_inputs_embeds, dtype_name
from laconic.models.positions import last_valid
from laconic.nested import nan_check
from laconic.nested.state import FastWeightState

InputIds = Sequence[Sequence[int]] | Shaped[Tensor, "B T"]


@runtime_checkable
class Tokenizer(Protocol):
    """What generation asks of a tokenizer; where it also says its `vocab_size`, that must fit the model."""

    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: list[int], /) -> str: ...


class Prompt(NamedTuple):
    """What is read before the first token: `ids` [B, T] or `vectors` [B, T, D], and the ids of each row, if any.

    `start` is the position of each row's first; None: behind the last that is held. `learn` says whether it teaches,
    and what is written after it, of a model that learns while it reads.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Bool[Tensor, "B T"]
    token_ids: list[list[int]]
    first_positions: Int[Tensor, " B"] | None = None
    update_flags: tuple[bool, bool] = (False, False)

    @property
    def position_ids(self) -> Int[Tensor, "B T"] | None:
        """Where each stands, if that is said; what is dead stands at 0."""
        return (
            None
            if self.first_positions is None
            else (self.first_positions[:, None] + self.attention_mask.cumsum(1) - 1) * self.attention_mask
        )


class PrefillResult(NamedTuple):
    """A prompt read: the vector of each row's last live position, the new state, and how many passes it took."""

    last_hidden: Float[Tensor, "B D"]
    state: KVCache | FastWeightState
    num_passes: int


def pad_left(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Rows of ids at the right end of one matrix, and where it is `live`."""
    T = max(map(len, rows), default=0)
    ids = [[pad_token_id] * (T - len(row)) + list(row) for row in rows]
    live = [[False] * (T - len(row)) + [True] * len(row) for row in rows]
    shape, cpu = (len(rows), T), "cpu"
    return (
        torch.tensor(ids, dtype=torch.long, device=cpu).view(shape),
        torch.tensor(live, dtype=torch.bool, device=cpu).view(shape),
    )


def build_prompt(
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Sequence[str] | None,
    input_ids: InputIds | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
) -> Prompt:
    """The one of `prompts`, `ids` and `vectors` that is given, on the decoder's device.

    Raises `Usage` for none or two of them, for a row without a live position; `BadInput` for ids that are no words.
    """
    given = [
        name for name, x in (("prompts", prompts), ("ids", input_ids), ("vectors", inputs_embeds)) if x is not None
    ]
    if len(given) != 1:
        raise UsageError(f"{' and '.join(given) or 'no prompt'} given; give one of prompts, ids and vectors")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise UsageError(f"live is {dtype_name(attention_mask)}; give booleans, mask.bool() say")
    if input_ids is not None:
        check_nested_ids(input_ids)
    if inputs_embeds is not None:
        check_inputs_embeds(decoder.config, inputs_embeds)
    for what, x in (("ids", input_ids), ("vectors", inputs_embeds)):
        if attention_mask is not None and isinstance(x, Tensor) and attention_mask.shape != x.shape[:2]:
            raise UsageError(f"live is {list(attention_mask.shape)}, {what} are {list(x.shape[:2])}")
    if isinstance(input_ids, Tensor):
        if input_ids.is_floating_point():
            raise UsageError(f"ids are {dtype_name(input_ids)}; did you mean vectors=?")
        alive = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        input_ids = [[int(i) for i in row[there]] for row, there in zip(input_ids.cpu(), alive.cpu(), strict=True)]
    elif attention_mask is not None and inputs_embeds is None:
        raise UsageError(f"live given with {given[0]}, whose padding is made here; give live with vectors")
    if inputs_embeds is not None:
        alive = torch.ones(inputs_embeds.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
        check_nonempty_rows(alive)
        device = decoder.token_embedding.weight.device
        return Prompt(None, inputs_embeds.to(device), alive.to(device), [[] for _ in range(len(alive))])
    rows = encode_prompts(tokenizer, prompts) if prompts is not None else [list(row) for row in input_ids or ()]
    check_ids(rows, decoder.config.vocab_size)
    padded, alive = pad_left(rows)
    check_nonempty_rows(alive)
    device = decoder.token_embedding.weight.device
    return Prompt(padded.to(device), None, alive.to(device), rows)


def check_nested_ids(ids: Sequence[object] | Tensor) -> None:
    """Raises `Usage` for ids that are not one list a row."""
    shape = list(ids.shape) if isinstance(ids, Tensor) else [len(ids)]
    if len(shape) != 2 if isinstance(ids, Tensor) else not all(isinstance(row, Sized) for row in ids):
        raise UsageError(f"ids are {shape}; give one list a row, [[…]]")


def encode_prompts(tokenizer: Tokenizer | None, prompts: Sequence[str]) -> list[list[int]]:
    """Texts as ids. Raises `Usage` for a text of none, and where there is no tokenizer."""
    if tokenizer is None:
        raise UsageError("prompts given without a tokenizer; give one, or ids")
    rows = [list(tokenizer.encode(text)) for text in ([prompts] if isinstance(prompts, str) else prompts)]
    for b, row in enumerate(rows):
        if not row:
            raise UsageError(f"prompt {b} is empty and the tokenizer adds no first token; give text, ids or vectors")
    return rows


def check_ids(rows: list[list[int]], vocab_size: int) -> None:
    """Raises `BadInput` for an id that has no row in the embedding matrix."""
    for b, row in enumerate(rows):
        if row and not (min(row) >= 0 and max(row) < vocab_size):
            t = next(t for t, i in enumerate(row) if not 0 <= i < vocab_size)
            raise InputError(f"ids[{b}, {t}] = {row[t]}, vocabulary {vocab_size}")


def check_nonempty_rows(attention_mask: Tensor) -> None:
    """Raises `Usage` for a row that nothing can follow."""
    dead = (~attention_mask.any(1)).nonzero()
    if len(dead):
        raise UsageError(f"row {int(dead[0])} has no live position")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `BadInput` if the tokenizer, where it says how many ids it has, has more than the model has rows."""
    size = getattr(tokenizer, "vocab_size", 0)
    if size > vocab_size:
        raise InputError(
            f"tokenizer has {size} ids, model has {vocab_size} rows; grow the model or take its own tokenizer"
        )


def prefill(
    decoder: Decoder, prompt: Prompt, state: KVCache | FastWeightState | None, chunk_size: int
) -> PrefillResult:
    """Reads the prompt `chunk` positions at once; logits are the caller's, of the last vectors only."""
    hidden: Tensor | None = None
    whole, T = bool(prompt.attention_mask.all()), prompt.attention_mask.shape[1]
    piece = prefill_state if isinstance(decoder, StatefulLM) else prefill_cache
    for start in range(0, T, chunk_size):
        here = slice(start, start + chunk_size)
        live = prompt.attention_mask[:, here]
        seen = piece(decoder, prompt, here, state, None if whole else live)
        last, state = last_valid(seen.hidden_states, live), seen.cache
        hidden = last if hidden is None else torch.where(live.any(1, keepdim=True), last, hidden)
    assert hidden is not None
    assert state is not None
    return PrefillResult(hidden, state, -(-T // chunk_size))


def prefill_cache(
    decoder: Decoder, prompt: Prompt, columns: slice, state: Any, attention_mask: Tensor | None
) -> DecoderOutput:
    """A piece of the prompt on a cache."""
    positions = prompt.position_ids
    vectors = decoder.embed(prompt.input_ids[:, columns]) if prompt.input_ids is not None else prompt.inputs_embeds
    assert vectors is not None
    vectors = vectors if prompt.input_ids is not None else vectors[:, columns]
    return decoder(vectors, state, live=attention_mask, positions=None if positions is None else positions[:, columns])


def prefill_state(
    decoder: Decoder, prompt: Prompt, columns: slice, state: Any, attention_mask: Tensor | None
) -> DecoderOutput:
    """A piece of the prompt on fast weights; vectors are no words, and have no targets to learn the task of."""
    learner: Any = decoder
    if prompt.input_ids is not None:
        ids = prompt.input_ids[:, columns]
        before = learner.start(len(ids)) if state is None else state
        return nan_check.read_tokens_checked(
            learner, ids, before, attention_mask=attention_mask, update_weights=prompt.update_flags[0]
        )
    assert prompt.inputs_embeds is not None
    return learner(prompt.inputs_embeds[:, columns], state, live=attention_mask, learn=prompt.update_flags[0])
