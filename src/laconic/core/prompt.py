"""What generation starts from: texts, ids or vectors, checked, padded on the left, and read in pieces."""

from collections.abc import Sequence, Sized
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from laconic.core import finite
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder, Seen
from laconic.core.errors import BadInput, Usage
from laconic.core.fit import check_vectors, kind
from laconic.core.learner import Learner
from laconic.core.places import last_live
from laconic.core.state import State

Ids = Sequence[Sequence[int]] | Shaped[Tensor, "B T"]


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

    ids: Tensor | None
    vectors: Tensor | None
    live: Bool[Tensor, "B T"]
    rows: list[list[int]]
    start: Int[Tensor, " B"] | None = None
    learn: tuple[bool, bool] = (False, False)

    @property
    def positions(self) -> Int[Tensor, "B T"] | None:
        """Where each stands, if that is said; what is dead stands at 0."""
        return None if self.start is None else (self.start[:, None] + self.live.cumsum(1) - 1) * self.live


class Reading(NamedTuple):
    """A prompt read: the vector of each row's last live position, the new state, and how many passes it took."""

    hidden: Float[Tensor, "B D"]
    state: Cache | State
    pieces: int


def pad_left(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Rows of ids at the right end of one matrix, and where it is `live`."""
    T = max(map(len, rows), default=0)
    ids = [[pad] * (T - len(row)) + list(row) for row in rows]
    live = [[False] * (T - len(row)) + [True] * len(row) for row in rows]
    shape, cpu = (len(rows), T), "cpu"
    return (
        torch.tensor(ids, dtype=torch.long, device=cpu).view(shape),
        torch.tensor(live, dtype=torch.bool, device=cpu).view(shape),
    )


def prompt_of(
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Sequence[str] | None,
    ids: Ids | None,
    vectors: Tensor | None,
    live: Tensor | None,
) -> Prompt:
    """The one of `prompts`, `ids` and `vectors` that is given, on the decoder's device.

    Raises `Usage` for none or two of them, for a row without a live position; `BadInput` for ids that are no words.
    """
    given = [name for name, x in (("prompts", prompts), ("ids", ids), ("vectors", vectors)) if x is not None]
    if len(given) != 1:
        raise Usage(f"{' and '.join(given) or 'no prompt'} given; give one of prompts, ids and vectors")
    if live is not None and live.dtype != torch.bool:
        raise Usage(f"live is {kind(live)}; give booleans, mask.bool() say")
    if ids is not None:
        check_nested(ids)
    if vectors is not None:
        check_vectors(decoder.config, vectors)
    for what, x in (("ids", ids), ("vectors", vectors)):
        if live is not None and isinstance(x, Tensor) and live.shape != x.shape[:2]:
            raise Usage(f"live is {list(live.shape)}, {what} are {list(x.shape[:2])}")
    if isinstance(ids, Tensor):
        if ids.is_floating_point():
            raise Usage(f"ids are {kind(ids)}; did you mean vectors=?")
        alive = torch.ones_like(ids, dtype=torch.bool) if live is None else live
        ids = [[int(i) for i in row[there]] for row, there in zip(ids.cpu(), alive.cpu(), strict=True)]
    elif live is not None and vectors is None:
        raise Usage(f"live given with {given[0]}, whose padding is made here; give live with vectors")
    if vectors is not None:
        alive = torch.ones(vectors.shape[:2], dtype=torch.bool) if live is None else live
        check_rows(alive)
        device = decoder.words.weight.device
        return Prompt(None, vectors.to(device), alive.to(device), [[] for _ in range(len(alive))])
    rows = encoded(tokenizer, prompts) if prompts is not None else [list(row) for row in ids or ()]
    check_ids(rows, decoder.config.vocab_size)
    padded, alive = pad_left(rows)
    check_rows(alive)
    device = decoder.words.weight.device
    return Prompt(padded.to(device), None, alive.to(device), rows)


def check_nested(ids: Sequence[object] | Tensor) -> None:
    """Raises `Usage` for ids that are not one list a row."""
    shape = list(ids.shape) if isinstance(ids, Tensor) else [len(ids)]
    if len(shape) != 2 if isinstance(ids, Tensor) else not all(isinstance(row, Sized) for row in ids):
        raise Usage(f"ids are {shape}; give one list a row, [[…]]")


def encoded(tokenizer: Tokenizer | None, prompts: Sequence[str]) -> list[list[int]]:
    """Texts as ids. Raises `Usage` for a text of none, and where there is no tokenizer."""
    if tokenizer is None:
        raise Usage("prompts given without a tokenizer; give one, or ids")
    rows = [list(tokenizer.encode(text)) for text in ([prompts] if isinstance(prompts, str) else prompts)]
    for b, row in enumerate(rows):
        if not row:
            raise Usage(f"prompt {b} is empty and the tokenizer adds no first token; give text, ids or vectors")
    return rows


def check_ids(rows: list[list[int]], vocabulary: int) -> None:
    """Raises `BadInput` for an id that has no row in the embedding matrix."""
    for b, row in enumerate(rows):
        if row and not (min(row) >= 0 and max(row) < vocabulary):
            t = next(t for t, i in enumerate(row) if not 0 <= i < vocabulary)
            raise BadInput(f"ids[{b}, {t}] = {row[t]}, vocabulary {vocabulary}")


def check_rows(live: Tensor) -> None:
    """Raises `Usage` for a row that nothing can follow."""
    dead = (~live.any(1)).nonzero()
    if len(dead):
        raise Usage(f"row {int(dead[0])} has no live position")


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Raises `BadInput` if the tokenizer, where it says how many ids it has, has more than the model has rows."""
    size = getattr(tokenizer, "vocab_size", 0)
    if size > rows:
        raise BadInput(f"tokenizer has {size} ids, model has {rows} rows; grow the model or take its own tokenizer")


def read(decoder: Decoder, prompt: Prompt, state: Cache | State | None, chunk: int) -> Reading:
    """Reads the prompt `chunk` positions at once; logits are the caller's, of the last vectors only."""
    hidden: Tensor | None = None
    whole, T = bool(prompt.live.all()), prompt.live.shape[1]
    piece = learned if isinstance(decoder, Learner) else cached
    for start in range(0, T, chunk):
        here = slice(start, start + chunk)
        live = prompt.live[:, here]
        seen = piece(decoder, prompt, here, state, None if whole else live)
        last, state = last_live(seen.hidden, live), seen.state
        hidden = last if hidden is None else torch.where(live.any(1, keepdim=True), last, hidden)
    assert hidden is not None
    assert state is not None
    return Reading(hidden, state, -(-T // chunk))


def cached(decoder: Decoder, prompt: Prompt, here: slice, state: Any, live: Tensor | None) -> Seen:
    """A piece of the prompt on a cache."""
    positions = prompt.positions
    vectors = decoder.embed(prompt.ids[:, here]) if prompt.ids is not None else prompt.vectors
    assert vectors is not None
    vectors = vectors if prompt.ids is not None else vectors[:, here]
    return decoder(vectors, state, live=live, positions=None if positions is None else positions[:, here])


def learned(decoder: Decoder, prompt: Prompt, here: slice, state: Any, live: Tensor | None) -> Seen:
    """A piece of the prompt on fast weights; vectors are no words, and have no targets to learn the task of."""
    learner: Any = decoder
    if prompt.ids is not None:
        ids = prompt.ids[:, here]
        before = learner.start(len(ids)) if state is None else state
        return finite.read(learner, ids, before, live=live, learn=prompt.learn[0])
    assert prompt.vectors is not None
    return learner(prompt.vectors[:, here], state, live=live, learn=prompt.learn[0])
