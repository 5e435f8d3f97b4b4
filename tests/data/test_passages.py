"""Stretches of documents: together the documents, cut alike in all rows, a pure function of rows and step."""

from typing import Any

import numpy as np
import pytest
import torch

from laconic.core.contract import Source
from laconic.core.errors import BadInput
from laconic.data.passages import Passages, tokenized
from laconic.data.settings import Text
from laconic.data.text import Document
from laconic.data.tokens import byte_tokenizer

BOOKS = [Document("long", ("a" * 700, "b" * 98)), Document("short", ("c" * 130,)), Document("tiny", ("d",))]
FIXED: dict[str, Any] = {"tokens": 300, "segment": 100, "segments": "fixed"}


def passages(said: dict[str, Any] | None = None, **more: Any) -> Passages:
    how = Text.model_validate(FIXED if said is None else said)
    return Passages(BOOKS, tokenized(BOOKS, byte_tokenizer()), how, 3, 1000, **more)


def test_rows_together_are_the_documents() -> None:
    source = passages()
    assert isinstance(source, Source)
    assert len(source) == 4  # a single token predicts nothing, so tiny has none
    batch = source.batch(range(4), 0, 0)
    assert batch.live.sum(1).tolist() == [300, 300, 200, 130]
    assert batch.names == ("long@0", "long@300", "long@600", "short@0")
    text = bytes(batch.text[:3][batch.live[:3]].tolist()).decode()
    assert text == BOOKS[0].text
    assert source.longest == 300
    assert (batch.windows, batch.index.tolist()) == ((3, 1), [0, 1, 2, 3])
    assert batch.scored.equal(batch.live)


def test_a_batch_is_as_wide_as_its_longest_row() -> None:
    batch = passages().batch([3], 0, 0)
    assert (batch.text.shape[1], batch.cuts) == (130, (100, 130))
    assert passages().batch([3, 2], 0, 0).cuts == (100, 200)


def test_whole_batches_have_all_segments() -> None:
    batch, tight = passages(whole=True).batch([3], 0, 0), passages().batch([3], 0, 0)
    assert (batch.text.shape[1], batch.cuts) == (300, (100, 200, 300))
    assert batch.live[0].nonzero()[:, 0].tolist() == [*range(130)]
    assert torch.equal(batch.text[batch.live], tight.text[tight.live])
    assert passages(whole=True).fingerprint == passages().fingerprint


def test_cuts_are_drawn_for_the_step() -> None:
    source = passages({"tokens": 300, "segment": 100})
    first, again, other = (source.batch(rows, 0, step) for rows, step in (([0], 5), ([1, 3], 5), ([0], 6)))
    assert first.cuts == again.cuts != other.cuts
    assert first.cuts[-1] == other.cuts[-1] == 300
    assert passages({"tokens": 300, "segment": 100}, fixed=True).batch([0], 0, 5).cuts == (100, 200, 300)


def test_fingerprints_tell_rows_apart() -> None:
    made = [
        passages(),
        passages({**FIXED, "tokens": 200}),
        passages(fixed=True),
        passages(count=2),
        Passages(BOOKS[:2], tokenized(BOOKS[:2], byte_tokenizer()), Text.model_validate(FIXED), 3, 1000),
    ]
    assert len({each.fingerprint for each in made}) == len(made)
    assert passages().fingerprint == made[0].fingerprint


def test_some_rows_are_from_everywhere_and_always_the_same() -> None:
    book = [Document("long", ("x" * 5000,))]
    ids, how = tokenized(book, byte_tokenizer()), Text(tokens=100, segment=50, segments="fixed")
    found = [Passages(book, ids, how, seed, 1000, count=10).batch(range(10), 0, 0).names for seed in (0, 1)]
    assert found[0] == found[1]
    places = sorted(int(name.partition("@")[2]) for name in found[0])
    assert places[0] < 2500 < places[-1]
    assert len(set(places)) == 10


def test_too_little_text_is_refused() -> None:
    line = r"4 stretches of 300 tokens in 3 documents, a batch asks for 8; give more text, or lower data\.text\.tokens"
    with pytest.raises(BadInput, match=line):
        passages(least=8)


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    ids = tokenized(BOOKS, byte_tokenizer(), lambda *said: told.append(said))
    assert told == [("characters encoded", 0, 931)]
    assert [len(each) for each in ids] == [800, 130, 1]
    assert all(each.dtype == np.int32 for each in ids)


def test_every_token_but_a_documents_first_is_scored_once() -> None:
    batch = passages({"tokens": 800, "segment": 100, "low": 20}).batch([0, 1], 0, 2)
    scored = torch.zeros(2)
    for piece in batch.pieces:
        scored += piece.scored.sum(1)
    assert scored.tolist() == [799, 129]
