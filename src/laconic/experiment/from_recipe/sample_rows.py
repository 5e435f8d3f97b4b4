"""Some training rows of a recipe for `laconic train --plan`: the first rows, or rows as long as the published ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic import rng
from laconic.batches import DocumentBatch, ReasoningExample
from laconic.config.data import DataConfig, is_row_file
from laconic.config.recipe import Recipe
from laconic.data.documents.dataset import tokenize_documents
from laconic.data.documents.load import Document, load_documents
from laconic.data.reasoning import load as reasoning_load
from laconic.data.reasoning.catalog import PublishedLengths, find_dataset, split_name
from laconic.data.strict_jsonl import check_data_file
from laconic.data.tokenizer import Tokenizer
from laconic.errors import translate_os_errors
from laconic.experiment.from_recipe.build_data import (
    build_document_rows,
    encode_examples,
    encode_training_rows,
    load_training_rows,
)
from laconic.interfaces import TrainingData

MAX_ROWS = 2000  # rows that are tokenized
MIN_CHARACTERS, CHARACTERS_PER_TOKEN = 400_000, 10  # of documents that are tokenized
WORD, STEP_TOKENS = " a", 9  # of assumed rows: text of one token, and tokens of a step and its separator
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


class RowSample(NamedTuple):
    """Some training rows, how many rows there are in all, and whether they are only assumed."""

    source: TrainingData
    num_rows: int
    notes: tuple[str, ...] = ()
    is_assumed: bool = False


def sample_training_rows(recipe: Recipe, tokenizer: Tokenizer, context: int) -> RowSample:
    """Load the first training rows. Data that is not local is not downloaded if its lengths are known."""
    data = recipe.data
    limit = max(MAX_ROWS, 2 * recipe.train.batch_size)
    if data.source == "text":
        return _sample_documents(recipe, tokenizer, context)
    if data.source not in ("file", "catalog"):
        source = load_training_rows(recipe, tokenizer, context).source
        return RowSample(source, len(source))
    is_local = data.source == "file" or all(reasoning_load.is_local(name, data) for name in data.name or ())
    published = None if is_local else _find_published_lengths(recipe)
    if published is not None:
        examples = _assume_examples(published, limit)
        total = min(published.rows, data.max_train_rows or published.rows)
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"on_too_long": "drop"})})
        assumed = encode_examples(recipe, tokenizer, examples, context, recipe.train.batch_size)
        note = f"{(data.name or ('',))[0]} is not local: rows and lengths as published; set data.name=FILE"
        notes = (note, *assumed.counts.describe_left_out())
        return RowSample(assumed, total * len(assumed) // limit, notes, True)
    alone = data.model_copy(update={"valid": None, "test": None})  # which may not be local
    num_lines = _count_lines(data)
    if num_lines > limit:  # only the beginning is read
        alone = alone.model_copy(update={"max_train_rows": limit})
    file = reasoning_load.load_training_examples(alone, recipe.reads_documents)
    total = num_lines if num_lines > limit else len(file.examples)
    rows = encode_training_rows(recipe, tokenizer, replace(file, examples=file.examples[:limit]), context)
    notes = rows.notes if total <= limit else tuple(f"first {limit:,} rows: {note}" for note in rows.notes)
    return RowSample(rows.source, len(rows.source) * total // min(total, limit), notes)


def _count_lines(data: DataConfig) -> int:
    """Return how many training rows the lines of JSONL files make, without blank ones; 0 for other files and sets."""
    files = [Path(name) for name in data.name or (data.path or "",)]
    if not all(is_row_file(str(file)) and file.is_file() and file.suffix.lower() != ".parquet" for file in files):
        return 0
    count = 0
    for file in files:
        with translate_os_errors(file), file.open("rb") as lines:
            count += sum(not line.isspace() for line in lines)
    return min(count, data.max_train_rows or count)


def _sample_documents(recipe: Recipe, tokenizer: Tokenizer, context: int) -> RowSample:
    """Tokenize the first local documents and the longest; of others, assume as many full rows as the run needs."""
    data = recipe.data
    train = recipe.train
    path = Path(recipe.data.path or "")
    if train.steps is not None and (data.path is None or not path.is_file()):
        if data.path is not None and path.is_dir():
            check_data_file(path)
        documents = [Document(f"row {i}", ("",)) for i in range(train.batch_size)]
        ids = [np.zeros(data.text.row_tokens + train.stateful, np.int32)] * train.batch_size
        name = (data.name or ("",))[0] if data.path is None else path.name
        note = f"{name} is not local: full rows, as many as the steps need; data.path=FILE counts yours"
        source = build_document_rows(recipe, documents, ids, context, "train")
        return RowSample(source, train.steps * train.batch_size, (note,), True)
    documents, notes = load_documents(data, "train")
    row_characters = CHARACTERS_PER_TOKEN * data.text.row_tokens
    num_characters = sum(len(x.text) for x in documents)
    room = max(MIN_CHARACTERS, train.batch_size * row_characters)
    sample: list[Document] = []
    if num_characters > room:  # the widest rows, which need the most memory, may be at the end
        longest = max(documents, key=lambda document: len(document.text))
        sample.append(replace(longest, sections=(longest.text[:row_characters],)))
    for document in documents:
        if room > 0:
            size = len(document.text)
            sample.append(document if size <= room else replace(document, sections=(document.text[:room],)))
            room -= size
    ids = tokenize_documents(sample, tokenizer)
    scale = num_characters / max(1, sum(len(part.text) for part in sample))
    source = build_document_rows(recipe, sample, ids, context, "train")
    note = f"{len(documents):,} documents, about {round(scale * sum(map(len, ids))):,} tokens in all"
    return RowSample(source, round(scale * len(source)), (*notes, note))


def _find_published_lengths(recipe: Recipe) -> PublishedLengths | None:
    """Return what is known of a single set; a file that does not exist yet is like its validation set."""
    data = recipe.data
    if data.name is None or len(data.name) != 1:
        return None
    is_file = is_row_file(data.name[0])
    info = find_dataset(split_name(data.valid or "")[0] if is_file else data.name[0])
    return None if info is None or (is_file and info.generator is None) else info.published_lengths


def _assume_examples(published: PublishedLengths, num_rows: int) -> list[ReasoningExample]:
    """Return examples with the published quantiles of lengths, and long chains for long questions."""
    at = (np.arange(num_rows) + 0.5) / num_rows
    columns = (published.question, published.chain, published.short_chain, published.answer)
    lengths = np.stack([np.interp(at, QUANTILES, values).round() for values in columns], 1).astype(int)
    examples: list[ReasoningExample] = []
    for i, (question, chain, short_chain, answer) in enumerate(lengths.tolist()):
        steps = [min(STEP_TOKENS, short_chain - n) for n in range(0, short_chain, STEP_TOKENS)] + [chain - short_chain]
        words = tuple(WORD * (n - 1) for n in steps if n > 1)
        examples.append(ReasoningExample(str(i), WORD * question, words, "1" + WORD * (answer - min(published.answer))))
    return examples


class MicroBatch(NamedTuple):
    """Indices of rows, and the tokens in each part of each row."""

    rows: list[int]
    tokens: Mapping[str, NDArray[np.int64]]

    @property
    def width(self) -> int:
        return sum(int(counts.max()) for counts in self.tokens.values())

    @property
    def num_tokens(self) -> int:
        return sum(int(counts.sum()) for counts in self.tokens.values())


def make_micro_batches(source: TrainingData, size: int) -> list[MicroBatch]:
    """Return shuffled micro-batches of the first rows, from the narrowest to the widest."""
    order = rng.permutation(min(len(source), max(MAX_ROWS, size)), 0)
    batches: list[MicroBatch] = []
    for i in range(0, max(1, len(order) - size + 1), size):
        rows = np.resize(order[i : i + size], size).tolist()
        batch = source.batch(rows, 0, 0)
        if isinstance(batch, DocumentBatch):
            masks = {"document": batch.attention_mask}
        else:
            parts = ("question", "chain", "answer", "document")
            masks = {part: mask for part in parts if (mask := getattr(batch, f"{part}_mask")) is not None}
        batches.append(MicroBatch(rows, {part: mask.sum(1).numpy() for part, mask in masks.items()}))
    return sorted(batches, key=lambda batch: batch.width)
