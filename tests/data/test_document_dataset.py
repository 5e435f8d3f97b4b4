"""Document rows: cover the documents, share their segment ends, and depend only on rows and step."""

from typing import Any

import numpy as np
import pytest
import torch

from laconic.config.data import TextConfig
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError
from laconic.interfaces import TrainingData

BOOKS = [Document("long", ("a" * 700, "b" * 98)), Document("short", ("c" * 130,)), Document("tiny", ("d",))]
FIXED: dict[str, Any] = {"row_tokens": 300, "segment_tokens": 100, "segment_lengths": "fixed"}


def build_dataset(values: dict[str, Any] | None = None, **options: Any) -> DocumentDataset:
    config = TextConfig.model_validate(FIXED if values is None else values)
    ids = tokenize_documents(BOOKS, build_byte_tokenizer())
    return DocumentDataset(BOOKS, ids, config, seed=3, max_segment_tokens=1000, **options)


def test_document_dataset_rows_cover_the_documents() -> None:
    source = build_dataset()
    assert isinstance(source, TrainingData)
    assert len(source) == 4  # a single token predicts nothing, so tiny has none
    batch = source.batch(range(4), 0, 0)
    assert batch.attention_mask.sum(1).tolist() == [300, 300, 200, 130]
    assert batch.document_ids == ("long@0", "long@300", "long@600", "short@0")
    text = bytes(batch.input_ids[:3][batch.attention_mask[:3]].tolist()).decode()
    assert text == BOOKS[0].text
    assert source.max_length == 300
    assert (batch.windows, batch.row_index.tolist()) == ((3, 1), [0, 1, 2, 3])
    assert batch.loss_mask.equal(batch.attention_mask)


def test_document_dataset_batch_width() -> None:
    batch = build_dataset().batch([3], 0, 0)
    assert (batch.input_ids.shape[1], batch.segment_ends) == (130, (100, 130))
    assert build_dataset().batch([3, 2], 0, 0).segment_ends == (100, 200)


def test_document_dataset_pads_to_row_tokens() -> None:
    batch, tight = build_dataset(pad_to_row_tokens=True).batch([3], 0, 0), build_dataset().batch([3], 0, 0)
    assert (batch.input_ids.shape[1], batch.segment_ends) == (300, (100, 200, 300))
    assert batch.attention_mask[0].nonzero()[:, 0].tolist() == [*range(130)]
    assert torch.equal(batch.input_ids[batch.attention_mask], tight.input_ids[tight.attention_mask])
    assert build_dataset(pad_to_row_tokens=True).fingerprint == build_dataset().fingerprint


def test_document_dataset_segments_depend_on_the_step() -> None:
    source = build_dataset({"row_tokens": 300, "segment_tokens": 100})
    first, other_rows, other_step = source.batch([0], 0, 5), source.batch([1, 3], 0, 5), source.batch([0], 0, 6)
    assert first.segment_ends == other_rows.segment_ends != other_step.segment_ends
    assert first.segment_ends[-1] == other_step.segment_ends[-1] == 300
    fixed = build_dataset({"row_tokens": 300, "segment_tokens": 100}, fixed_segments=True)
    assert fixed.batch([0], 0, 5).segment_ends == (100, 200, 300)


def test_document_dataset_fingerprint() -> None:
    datasets = [
        build_dataset(),
        build_dataset({**FIXED, "row_tokens": 200}),
        build_dataset(fixed_segments=True),
        build_dataset(max_rows=2),
        DocumentDataset(
            BOOKS[:2], tokenize_documents(BOOKS[:2], build_byte_tokenizer()), TextConfig.model_validate(FIXED), 3, 1000
        ),
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == len(datasets)
    assert build_dataset().fingerprint == datasets[0].fingerprint


def test_document_dataset_fingerprint_without_file_names() -> None:
    """Rows without a name are called FILE:NUMBER, and the file may be renamed; names that rows give count."""

    def fingerprint(*books: Document) -> str:
        ids = tokenize_documents(books, build_byte_tokenizer())
        return DocumentDataset(books, ids, TextConfig.model_validate(FIXED), 3, 1000).fingerprint

    text = ("a" * 400,)
    assert fingerprint(Document("a.jsonl:1", text)) == fingerprint(Document("b.jsonl:1", text))
    books = [fingerprint(Document(name, text, name)) for name in ("emma", "alice")]
    assert len({*books, fingerprint(Document("a.jsonl:1", text))}) == 3


def test_document_dataset_max_rows_are_spread() -> None:
    book = [Document("long", ("x" * 5000,))]
    ids = tokenize_documents(book, build_byte_tokenizer())
    config = TextConfig(row_tokens=100, segment_tokens=50, segment_lengths="fixed")
    row_names = [
        DocumentDataset(book, ids, config, seed, 1000, max_rows=10).batch(range(10), 0, 0).document_ids
        for seed in (0, 1)
    ]
    assert row_names[0] == row_names[1]
    places = sorted(int(name.partition("@")[2]) for name in row_names[0])
    assert places[0] < 2500 < places[-1]
    assert len(set(places)) == 10


def test_document_dataset_refuses_too_few_rows() -> None:
    line = r"4 rows of 300 tokens, fewer than a batch of 8"
    with pytest.raises(InputError, match=line):
        build_dataset(min_rows=8)


def test_tokenize_documents_progress() -> None:
    calls: list[tuple[str, int, int]] = []
    ids = tokenize_documents(BOOKS, build_byte_tokenizer(), lambda *values: calls.append(values))
    assert calls == [("characters tokenized", 0, 931)]
    assert [len(dataset) for dataset in ids] == [800, 130, 1]
    assert all(dataset.dtype == np.int32 for dataset in ids)


def test_document_dataset_scores_every_target_once() -> None:
    batch = build_dataset({"row_tokens": 800, "segment_tokens": 100, "min_segment_tokens": 20}).batch([0, 1], 0, 2)
    scored = torch.zeros(2)
    for piece in batch.sequential_parts:
        scored += piece.loss_mask.sum(1)
    assert scored.tolist() == [799, 129]
