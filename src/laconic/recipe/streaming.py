"""A run measured on streams: which items, what reads them, and how many bytes its ids have."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from laconic.core.contract import Learner
from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput
from laconic.core.state import State
from laconic.data.languages import Strings, languages_tokenizer
from laconic.data.lengths import byte_lengths
from laconic.data.mqar import Mqar, mqar_tokenizer
from laconic.data.needles import KINDS, Needles
from laconic.data.passages import Passages
from laconic.data.settings import Part
from laconic.evaluation.listening import Cached, Row
from laconic.evaluation.streams import Stream, measure
from laconic.methods.hope_model import Hope
from laconic.recipe.opened import Opened
from laconic.recipe.rows import HELD_OUT, check_own, encoded

STREAMS: tuple[Stream, ...] = ("mqar", "languages", "needle", "ppl")
LENGTHS = (512, 1024, 2048)  # tokens of an item with a needle, where nobody asks for others
EACH = 4  # items with a needle of each kind, length and depth
AT_ONCE: Mapping[Stream, int] = {"mqar": 128, "languages": 128, "needle": 8, "ppl": 8}  # items read at once


def streamed(
    run: Opened,
    name: Stream,
    device: torch.device,
    *,
    part: Part = "test",
    count: int | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    before: State | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """What a run makes of a stream, as its recipe has it: pairs, strings, its held out texts, or needles in them.

    `count` are items at most, of needles those of each kind, length and depth; a text is an item. `lengths` are of
    needles, those that the model has room for. Raises `BadInput` (66) where a run has no such stream.
    """
    source, decoder = source_of(run, name, part, count, lengths), run.plain()
    bytes_of = byte_lengths(run.parts.tokenizer) if name == "ppl" else None
    return measure(
        reader(decoder), name, source, device, batch=AT_ONCE[name], before=before, bytes_of=bytes_of, folder=folder,
        key=key, texts=texts, show=show,
    )  # fmt: skip


def reader(decoder: Decoder) -> Learner:
    """A model that learns while it reads, or a decoder as one."""
    return decoder if isinstance(decoder, Hope) else Cached(decoder)


def source_of(
    run: Opened, name: Stream, part: Part, count: int | None, lengths: tuple[int, ...]
) -> Mqar | Strings | Needles | Passages:
    """The items of a stream."""
    data, tokenizer = run.recipe.data, run.parts.tokenizer
    if name == "mqar":
        check_own(tokenizer, mqar_tokenizer(), "mqar documents")
        return Mqar(HELD_OUT, data.mqar, part, count)
    if name == "languages":
        check_own(tokenizer, languages_tokenizer(), "strings")
        return Strings(HELD_OUT, data.languages, part, count)
    if data.kind != "text":
        raise BadInput(f"{name}: this run was trained on {data.kind}, which is no text; give a run of data.kind text")
    found, ids, _ = encoded(run.recipe, tokenizer, part)
    room = run.parts.decoder.config.max_position_embeddings
    if name == "needle":
        asked = tuple(length for length in lengths if length <= room)
        if not asked:
            raise BadInput(f"needle: the model reads {room} tokens, lengths are {lengths[0]} and more; ask for shorter")
        return Needles(tokenizer, [each for each in ids if len(each)], KINDS, asked, count=count or EACH)
    T = min(data.text.tokens, room)
    how = data.text.model_copy(update={"tokens": T, "segments": "fixed", "segment": T, "low": None, "high": None})
    return Passages(found[:count], ids[:count], how, HELD_OUT, room, fixed=True)
