"""Documents as a plan sees them: how many stretches, how long; counted where they are at hand, else assumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.batches import DocumentBatch
from laconic.config.recipe import Recipe
from laconic.data.documents.load import Document, load_documents
from laconic.data.documents.segments import SegmentBoundaries
from laconic.data.documents.tokenize import disable_special_tokens
from laconic.data.reasoning.dataset import pad_rows
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.build_data import SyntheticData, load_training_rows, max_segment_tokens, segment_boundaries

LOOK = 400_000  # characters that are encoded, of documents that have more


class Stretches:
    """Rows that say nothing, of some lengths, cut as those of a recipe (contract.Source)."""

    fingerprint = ""

    def __init__(self, lengths: NDArray[np.int64], recipe: Recipe, context: int) -> None:
        self.lengths, self.how = lengths, segment_boundaries(recipe)
        self.cuts = SegmentBoundaries(self.how, recipe.seed, max_segment_tokens(recipe, context))

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The rows on a grid, every token the first of the vocabulary."""
        text, live = pad_rows([[0] * int(n) for n in self.lengths[list(rows), 0]])
        width = text.shape[1]
        return DocumentBatch(
            text, live, live.clone(), (*(end for end in self.cuts.random_ends(step) if end < width), width),
            torch.as_tensor(rows, dtype=torch.long), tuple(map(str, rows)), epoch, step,
            windows=(self.how.segments_per_window, self.how.segment_overlap),
        )  # fmt: skip


class Found(NamedTuple):
    """Rows: how many there are, batches of them, their lengths [n, 1], what is to be said, whether it is assumed."""

    rows: int
    source: Stretches | SyntheticData
    lengths: NDArray[np.int64]
    notes: tuple[str, ...]
    assumed: bool


def stretches(recipe: Recipe, tokenizer: Tokenizer, context: int) -> Found:
    """The rows of documents that a recipe is trained on. Raises `BadInput` (66) where they are bad or nobody knows."""
    data, steps = recipe.data, recipe.train.steps
    if data.source != "text":
        made = cast(SyntheticData, load_training_rows(recipe, tokenizer, context).source)
        return Found(len(made), made, np.full((len(made), 1), made.max_length), (), False)
    whole = data.text.row_tokens
    if steps is not None and (data.path is None or not Path(data.path).is_file()):
        rows = steps * recipe.train.batch_size
        where = Path(data.path).name if data.path else (data.name or ("",))[0]
        note = (
            f"{where} is not at hand: rows of {whole:,} tokens, as many as the steps ask for, so both are assumed; "
            "data.path=FILE counts yours"
        )
        lengths = np.full((recipe.train.batch_size, 1), whole)
        return Found(rows, Stretches(lengths, recipe, context), lengths, (note,), True)
    found, notes = load_documents(data, "train")
    tokens = tokens_of(found, tokenizer)
    if recipe.train.stateful:  # pieces of lanes, and with each the token after it
        B, count = recipe.train.batch_size, sum(len(range(0, n - 1, whole)) for n in tokens)
        lengths = np.full((count // B * B, 1), whole + 1, dtype=np.int64)
    else:
        lengths = np.array([n for each in tokens for n in cut(each, whole)], dtype=np.int64)[:, None]
    said = f"{len(found):,} documents of about {sum(tokens):,} tokens"
    return Found(len(lengths), Stretches(lengths, recipe, context), lengths, (*notes, said), False)


def tokens_of(documents: Sequence[Document], tokenizer: Tokenizer) -> list[int]:
    """Tokens of each document; once LOOK characters are encoded, by their number of characters."""
    inner, found, seen, made = disable_special_tokens(tokenizer), list[int](), 0, 0
    for document in documents:
        text = document.text
        part = text[: LOOK - seen]
        n = len(inner.encode(part, add_special_tokens=False).ids) if part else 0
        seen, made = seen + len(part), made + n
        found.append(n if len(part) == len(text) else round(len(text) * made / seen))
    return found


def cut(tokens: int, step: int) -> list[int]:
    """Tokens of the stretches of a document, without one of a single token, which predicts nothing."""
    whole, rest = divmod(tokens, step)
    return [step] * whole + ([rest] if rest > 1 else [])
