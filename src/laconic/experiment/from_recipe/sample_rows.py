"""Some training rows of a recipe for `laconic train --plan`: the first rows, or rows as long as the published ones."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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

MAX_ROWS, ROWS_AT_ONCE = 2000, 50  # rows that are tokenized
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
        return sample_documents(recipe, tokenizer, context)
    if data.source not in ("file", "catalog"):
        source = load_training_rows(recipe, tokenizer, context).source
        return RowSample(source, len(source))
    is_local = data.source == "file" or all(reasoning_load.is_local(name, data) for name in data.name or ())
    published = None if is_local else find_published_lengths(recipe)
    if published is not None:
        examples = assume_examples(published, limit)
        total = min(published.rows, data.max_train_rows or published.rows)
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"on_too_long": "drop"})})
        assumed = encode_examples(recipe, tokenizer, examples, context, recipe.train.batch_size)
        note = f"{(data.name or ('',))[0]} is not local: rows and lengths as published; set data.name=FILE"
        notes = (note, *assumed.counts.describe_left_out())
        return RowSample(assumed, total * len(assumed) // limit, notes, True)
    alone = data.model_copy(update={"valid": None, "test": None})  # which may not be local
    num_lines = count_lines(data)
    if num_lines > limit:  # only the beginning is read
        alone = alone.model_copy(update={"max_train_rows": limit})
    file = reasoning_load.load_training_examples(alone, recipe.reads_documents)
    total = num_lines if num_lines > limit else len(file.examples)
    rows = encode_training_rows(recipe, tokenizer, replace(file, examples=file.examples[:limit]), context)
    notes = rows.notes if total <= limit else tuple(f"first {limit:,} rows: {note}" for note in rows.notes)
    return RowSample(rows.source, len(rows.source) * total // min(total, limit), notes)


def count_lines(data: DataConfig) -> int:
    """Return how many training rows the lines of JSONL files make, without blank ones; 0 for other files and sets."""
    files = [Path(name) for name in data.name or (data.path or "",)]
    if not all(is_row_file(str(file)) and file.is_file() and file.suffix.lower() != ".parquet" for file in files):
        return 0
    count = 0
    for file in files:
        with translate_os_errors(file), file.open("rb") as lines:
            count += sum(not line.isspace() for line in lines)
    return min(count, data.max_train_rows or count)


def sample_documents(recipe: Recipe, tokenizer: Tokenizer, context: int) -> RowSample:
    """Tokenize the first local documents and the longest; of others, assume as many full rows as the run needs."""
    data, train = recipe.data, recipe.train
    path = Path(data.path or "")
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
    sample = documents
    if num_characters > room:
        longest = max(documents, key=lambda document: len(document.text))  # its rows need the most memory
        sample = [replace(longest, sections=(longest.text[:row_characters],))]
        for document in documents:
            if room > 0:
                sample.append(replace(document, sections=(document.text[:room],)))
                room -= len(document.text)
    ids = tokenize_documents(sample, tokenizer)
    scale = num_characters / max(1, sum(len(part.text) for part in sample))
    source = build_document_rows(recipe, sample, ids, context, "train")
    note = f"{len(documents):,} documents, about {round(scale * sum(map(len, ids))):,} tokens in all"
    return RowSample(source, round(scale * len(source)), (*notes, note))


def find_published_lengths(recipe: Recipe) -> PublishedLengths | None:
    """Return what is known of a single set; a file that does not exist yet is like its validation set."""
    data = recipe.data
    if data.name is None or len(data.name) != 1:
        return None
    is_file = is_row_file(data.name[0])
    info = find_dataset(split_name(data.valid or "")[0] if is_file else data.name[0])
    return None if info is None or (is_file and info.generator is None) else info.published_lengths


def assume_examples(published: PublishedLengths, num_rows: int) -> list[ReasoningExample]:
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


def count_row_tokens(source: TrainingData) -> dict[str, NDArray[np.int64]]:
    """Return the number of tokens in each part of each row, of the first rows."""
    num_rows = min(len(source), MAX_ROWS)
    counts: dict[str, list[NDArray[np.int64]]] = {}
    for start in range(0, num_rows, ROWS_AT_ONCE):
        batch = source.batch(range(start, min(start + ROWS_AT_ONCE, num_rows)), 0, 0)
        parts = ("question", "chain", "answer", "document")
        masks = {part: getattr(batch, f"{part}_mask", None) for part in parts}
        if isinstance(batch, DocumentBatch):
            masks = {"document": batch.attention_mask}
        for part, mask in masks.items():
            counts.setdefault(part, []).append(np.zeros(batch.B, np.int64) if mask is None else mask.sum(1).numpy())
    tokens = {part: np.concatenate(arrays) for part, arrays in counts.items()}
    return {part: numbers for part, numbers in tokens.items() if part != "document" or numbers.any()}
