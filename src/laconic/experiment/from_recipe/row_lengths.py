"""Number and token lengths of a recipe's training rows for `laconic train --plan`: counted if local, else assumed."""

from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from laconic import rng
from laconic.batches import DocumentBatch, ReasoningBatch
from laconic.batches.padding import pad_rows
from laconic.config.data import DataConfig, is_row_file
from laconic.config.recipe import DOCUMENT_SOURCES, Recipe
from laconic.data.documents.load import load_documents
from laconic.data.documents.segments import SegmentBoundaries
from laconic.data.reasoning import load as reasoning_load
from laconic.data.reasoning.catalog import PublishedLengths, find_dataset, split_name
from laconic.data.reasoning.dataset import ReasoningDataset, collate
from laconic.data.reasoning.encode import EncodedExample
from laconic.data.strict_jsonl import check_data_file
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.experiment.from_recipe.build_data import (
    SyntheticData,
    load_training_rows,
    max_segment_tokens,
    segment_config,
)
from laconic.interfaces import Batch

MAX_ROWS = 2000  # rows that are tokenized
MAX_CHARACTERS = 400_000  # characters of documents that are tokenized
STEP_TOKENS = 9  # tokens of a chain step in a batch without text
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
PARTS = ("question", "chain", "answer", "document")
Lengths = NDArray[np.int64]  # [rows, parts]


class RowLengths(NamedTuple):
    """Training rows of a recipe: their number, and the token lengths of all or the first of them."""

    num_rows: int
    lengths: Lengths
    notes: tuple[str, ...] = ()
    is_assumed: bool = False
    synthetic: SyntheticData | None = None  # documents of a synthetic task, which are cheap to make

    def parts(self) -> tuple[str, ...]:
        n = self.lengths.shape[1]
        return PARTS[3:] if n == 1 else PARTS[:n]


def find_row_lengths(recipe: Recipe, tokenizer: Tokenizer, context: int) -> RowLengths:
    data = recipe.data
    if data.source in DOCUMENT_SOURCES:
        return _document_lengths(recipe, tokenizer, context)
    if data.source == "digits":
        digits = load_training_rows(recipe, tokenizer, context).source
        batch = cast(ReasoningBatch, digits.batch(range(min(len(digits), MAX_ROWS)), 0, 0))
        masks = (batch.question_mask, batch.chain_mask, batch.answer_mask, batch.document_mask)
        counts = torch.stack([mask.sum(1) for mask in masks if mask is not None], 1)
        return RowLengths(len(digits), counts.numpy())
    local = data.source != "catalog" or all(reasoning_load.is_local(name, data) for name in data.name or ())
    published = None if local else _find_published(data)
    return _count_reasoning_rows(recipe, tokenizer, context) if published is None else _assume_rows(recipe, published)


def _find_published(data: DataConfig) -> PublishedLengths | None:
    """Return what is known of a single set; a file that does not exist yet is like its validation set."""
    if data.name is None or len(data.name) != 1:
        return None
    is_file = is_row_file(data.name[0])
    info = find_dataset(split_name(data.valid or "")[0] if is_file else data.name[0])
    return None if info is None or (is_file and info.generator is None) else info.published_lengths


def _count_reasoning_rows(recipe: Recipe, tokenizer: Tokenizer, context: int) -> RowLengths:
    """Tokenize the first rows, and count the others by lines."""
    data = recipe.data
    counts = [_count_rows(data, name) for name in data.name or (data.path or "",)]
    limits = [data.max_train_rows, None if None in counts else sum(count or 0 for count in counts)]
    num_rows = min((n for n in limits if n is not None), default=None)
    num_read = max(MAX_ROWS, recipe.train.batch_size)
    first = {"max_train_rows": None if num_rows is None else min(num_rows, num_read), "valid": None, "test": None}
    rows = load_training_rows(recipe.model_copy(update={"data": data.model_copy(update=first)}), tokenizer, context)
    source = cast(ReasoningDataset, rows.source)
    lengths = source.lengths.astype(np.int64)
    if recipe.reads_documents:
        lengths = np.column_stack([lengths, [len(ids) for ids in source.documents]])
    if num_rows is None or num_rows <= num_read:
        return RowLengths(len(lengths), lengths, rows.notes)
    notes = tuple(f"first {num_read:,} rows: {note}" for note in rows.notes)
    return RowLengths(num_rows * len(lengths) // num_read, lengths, notes)


def _count_rows(data: DataConfig, name: str) -> int | None:
    """Return the number of rows of a file (its lines, without blank ones) or set, or None if it is unknown."""
    if not is_row_file(name):
        return reasoning_load.count_training_rows(data.model_copy(update={"name": (name,)}))
    path = Path(name)
    if path.suffix.lower() == ".parquet" or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(not line.isspace() for line in file)


def _assume_rows(recipe: Recipe, published: PublishedLengths) -> RowLengths:
    """Draw lengths from the published quantiles, with long chains for long questions."""
    data = recipe.data
    quantiles = (published.question, published.chain, published.answer)
    if data.chain_steps == "drop_last":
        quantiles = (published.question, published.short_chain, published.answer)
    at = (rng.permuted_index(0, 0, np.arange(MAX_ROWS), MAX_ROWS) + 0.5) / MAX_ROWS
    lengths = np.stack([np.interp(at, QUANTILES, values).round().astype(np.int64) for values in quantiles], 1)
    notes = [f"{(data.name or ('',))[0]} is not local: rows as published, lengths in GPT-2 tokens; set data.name=FILE"]
    too_long = lengths.sum(1) > (data.max_tokens or np.inf)
    if too_long.any():
        notes.append(f"about {too_long.mean():.2%} of the rows exceed {data.max_tokens} tokens: {data.on_too_long}")
    if data.on_too_long == "drop":
        lengths = lengths[~too_long]
    num_rows = min(published.rows, data.max_train_rows or published.rows) * len(lengths) // MAX_ROWS
    if num_rows < recipe.train.batch_size:
        raise InputError(f"about {num_rows:,} rows are usable, fewer than a batch of {recipe.train.batch_size:,}")
    return RowLengths(num_rows, lengths, tuple(notes), True)


def _document_lengths(recipe: Recipe, tokenizer: Tokenizer, context: int) -> RowLengths:
    """Return the rows of documents: synthetic, of local files, or as many full rows as the run needs."""
    data, train, row_tokens = recipe.data, recipe.train, recipe.data.text.row_tokens
    if data.source != "text":
        source = cast(SyntheticData, load_training_rows(recipe, tokenizer, context).source)
        return RowLengths(len(source), np.full((len(source), 1), source.max_length), synthetic=source)
    if train.steps is not None and (data.path is None or not Path(data.path).is_file()):
        if data.path is not None and Path(data.path).is_dir():
            check_data_file(Path(data.path))
        name = (data.name or ("",))[0] if data.path is None else Path(data.path).name
        note = f"{name} is not local: full rows, as many as the steps need; data.path=FILE counts yours"
        lengths = np.full((train.batch_size, 1), row_tokens)
        return RowLengths(train.steps * train.batch_size, lengths, (note,), True)
    documents, notes = load_documents(data, "train")
    tokens, characters, encoded = list[int](), 0, 0
    for document in documents:
        part = document.text[: MAX_CHARACTERS - characters]
        count = len(tokenizer.encode(part, add_special_tokens=False)) if part else 0
        characters, encoded = characters + len(part), encoded + count
        tokens.append(count if len(part) == len(document.text) else round(len(document.text) * encoded / characters))
    if train.stateful:  # every row has the next token too
        rows = sum(len(range(0, n - 1, row_tokens)) for n in tokens) // train.batch_size * train.batch_size
        lengths = np.full((rows, 1), row_tokens + 1, dtype=np.int64)
    else:
        full = [row for n in tokens for row in [row_tokens] * (n // row_tokens) + [n % row_tokens]]
        lengths = np.array([n for n in full if n > 1], dtype=np.int64)[:, None]
    note = f"{len(documents):,} documents, about {sum(tokens):,} tokens in all"
    return RowLengths(len(lengths), lengths, (*notes, note))


def make_micro_batches(lengths: Lengths, size: int) -> list[list[int]]:
    """Return shuffled micro-batches of row indices, from the narrowest to the widest."""
    order = rng.permutation(len(lengths), 0)
    batches = [order[i : i + size] for i in range(0, max(1, len(order) - size + 1), size)]
    batches.sort(key=lambda rows: int(lengths[rows].max(0).sum()))
    return [np.resize(rows, size).tolist() for rows in batches]


def make_blank_batch(recipe: Recipe, rows: RowLengths, chosen: list[int], context: int, epoch: int, step: int) -> Batch:
    """Return a batch with the lengths of the chosen rows, whose tokens are all 0."""
    if rows.synthetic is not None:
        return rows.synthetic.batch(chosen, epoch, step)
    if rows.lengths.shape[1] == 1:
        (text, mask), config = pad_rows([[0] * int(n) for n in rows.lengths[chosen, 0]]), segment_config(recipe)
        ends = SegmentBoundaries(config, recipe.seed, max_segment_tokens(recipe, context)).draw_ends(step)
        T, windows = text.shape[1], (config.segments_per_window, config.segment_overlap)
        cuts = (*(end for end in ends if end < T), T)
        index, names = torch.as_tensor(chosen, dtype=torch.long), tuple(map(str, chosen))
        return DocumentBatch(text, mask, mask.clone(), cuts, index, names, epoch, step, windows=windows)
    examples: list[EncodedExample] = []
    for row in chosen:
        question, chain, answer, *documents = ((0,) * n for n in rows.lengths[row].tolist())
        step_index = tuple(i // STEP_TOKENS for i in range(len(chain)))
        is_result = tuple(i % STEP_TOKENS == STEP_TOKENS - 1 for i in range(len(chain)))
        n, parts = len(answer), (question, chain, step_index, is_result, answer)  # token n - 2 is the answer's number
        document_ids = documents[0] if documents else ()
        examples.append(EncodedExample(str(row), *parts, (n - 2, n - 1), max(n - 3, 0), document_ids=document_ids))
    return collate(examples, chosen, epoch, step)
