"""Stateful batches: rows continue, every target is scored at most once, orders depend on seed and epoch."""

from dataclasses import replace

import pytest
import torch

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.training import TrainingConfig
from laconic.data.documents.dataset import tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError
from laconic.interfaces import TrainingData
from laconic.training.row_order import compute_update_index

T, LENGTHS = 8, (41, 8, 1, 64, 30, 9)
BOOKS = [
    Document(f"book {n}", (bytes((n * 17 + i * 7) % 90 + 33 for i in range(size)).decode(),))
    for n, size in enumerate(LENGTHS)
]
PIECES = sum(-(-(n - 1) // T) for n in LENGTHS)


def lanes(B: int = 3, tokens: int = T, seed: int = 1, books: int = 6) -> StatefulBatches:
    return StatefulBatches(BOOKS[:books], tokenize_documents(BOOKS[:books], build_byte_tokenizer()), tokens, B, seed)


def epoch_of(source: StatefulBatches, B: int, epoch: int = 0) -> list[DocumentBatch]:
    """Return the batches of an epoch as the training loop requests them."""
    config = TrainingConfig.model_validate({"steps": 1, "batch_size": B, "stateful": True})
    steps = range(epoch * source.num_steps, (epoch + 1) * source.num_steps)
    places = [compute_update_index(config, 5, step, len(source)) for step in steps]
    return [source.batch(at.rows, at.epoch, at.step) for at in places]


def test_stateful_batches_read_documents_in_order() -> None:
    source = lanes()
    assert isinstance(source, TrainingData)
    assert len(source) == PIECES // 3 * 3
    texts = {book.text.encode(): book.name for book in BOOKS}
    batches = epoch_of(source, 3)
    assert batches[0].document_starts is not None
    assert batches[0].document_starts.tolist() == [True] * 3
    for lane in range(3):
        read, targets = b"", list[bytes]()
        for batch in batches:
            assert batch.document_starts is not None
            row = bytes(batch.input_ids[lane][batch.attention_mask[lane]].tolist())
            if batch.document_starts[lane]:
                targets.append(read)
                read = row
            else:
                assert read[-1] == row[0], "the last target is what the next piece begins with"
                assert batch.attention_mask[lane, 0]
                read += row[1:]
        targets.append(read)
        assert all(text in texts for text in targets[2:-1]), "a lane's first and last documents alone may lack a part"
        assert all(any(part in text for text in texts) for part in targets)


def test_stateful_batches_score_every_target_once() -> None:
    source = lanes(1)
    targets = [piece.targets for batch in epoch_of(source, 1) for piece in batch.sequential_parts]
    assert sum(int((t != IGNORE_INDEX).sum()) for t in targets) == sum(n - 1 for n in LENGTHS)
    assert all((t[:, -1] == IGNORE_INDEX).all() for t in targets), "the last column is read in the next batch"
    assert all(batch.input_ids.shape == (1, T + 1) for batch in epoch_of(source, 1))


def test_stateful_batches_do_not_depend_on_the_micro_batch() -> None:
    source = lanes()
    whole = source.batch(range(3, 6), 2, 7)
    for b, row in enumerate(range(3, 6)):
        one = source.batch([row], 2, 7)
        assert torch.equal(one.input_ids[0], whole.input_ids[b])
        assert (one.document_ids[0], one.row_index.tolist()) == (whole.document_ids[b], [row])


def test_stateful_batches_order_by_seed_and_epoch() -> None:
    def names(seed: int, epoch: int) -> list[str]:
        return [name for batch in epoch_of(lanes(seed=seed), 3, epoch) for name in batch.document_ids]

    assert names(1, 0) == names(1, 0)
    assert len({tuple(names(*key)) for key in ((1, 0), (1, 1), (2, 0))}) == 3
    fresh = epoch_of(lanes(), 3, 1)[0].document_starts
    assert fresh is not None
    assert fresh.all(), "an epoch begins with fresh lanes"


def test_stateful_batches_fingerprint() -> None:
    datasets = [lanes(), lanes(2), lanes(tokens=9), lanes(seed=2), lanes(books=5)]
    assert len({dataset.fingerprint for dataset in datasets}) == len(datasets)
    assert lanes().fingerprint == datasets[0].fingerprint


def test_stateful_batches_fingerprint_without_file_names() -> None:
    renamed, named = ([replace(book, name=f"b:{n}") for n, book in enumerate(BOOKS)] for _ in range(2))
    named[0] = replace(named[0], book="emma")
    ids = tokenize_documents(BOOKS, build_byte_tokenizer())
    first, second = (StatefulBatches(books, ids, T, 3, 1).fingerprint for books in (renamed, named))
    assert first == lanes().fingerprint != second


def test_stateful_batches_max_rows() -> None:
    books = tokenize_documents(BOOKS, build_byte_tokenizer())
    few, whole = StatefulBatches(BOOKS, books, T, 3, 1, max_rows=7), lanes()
    assert (len(few), few.num_steps) == (9, 3)
    assert few.batch(range(9), 0, 0).input_ids.equal(whole.batch(range(9), 0, 0).input_ids)
    assert few.fingerprint != whole.fingerprint
    assert len(StatefulBatches(BOOKS, books, T, 3, 1, max_rows=1000)) == len(whole)


def test_stateful_batches_refuse_too_few_chunks() -> None:
    line = f"{PIECES} chunks of 8 tokens, fewer than a batch of 40"
    with pytest.raises(InputError, match=line):
        lanes(40)
