"""Lanes: a lane goes on where it was, every token but a first is a target at most once, orders are keyed."""

import pytest
import torch

from laconic.core.contract import UNSCORED, Documents, Source
from laconic.core.errors import BadInput
from laconic.data.lanes import Lanes
from laconic.data.passages import tokenized
from laconic.data.text import Document
from laconic.data.tokens import byte_tokenizer
from laconic.training.settings import Training
from laconic.training.step import place

T, LENGTHS = 8, (41, 8, 1, 64, 30, 9)
BOOKS = [
    Document(f"book {n}", (bytes((n * 17 + i * 7) % 90 + 33 for i in range(size)).decode(),))
    for n, size in enumerate(LENGTHS)
]
PIECES = sum(-(-(n - 1) // T) for n in LENGTHS)


def lanes(B: int = 3, tokens: int = T, seed: int = 1, books: int = 6) -> Lanes:
    return Lanes(BOOKS[:books], tokenized(BOOKS[:books], byte_tokenizer()), tokens, B, seed)


def epoch_of(source: Lanes, B: int, epoch: int = 0) -> list[Documents]:
    """The batches of an epoch as the loop asks for them."""
    how = Training(steps=1, batch=B, carry=True)
    steps = range(epoch * source.times, (epoch + 1) * source.times)
    places = [place(how, 5, step, len(source)) for step in steps]
    return [source.batch(at.rows, at.epoch, at.step) for at in places]


def test_a_lane_is_documents_in_order() -> None:
    source = lanes()
    assert isinstance(source, Source)
    assert len(source) == PIECES // 3 * 3
    texts = {book.text.encode(): book.name for book in BOOKS}
    batches = epoch_of(source, 3)
    assert batches[0].fresh is not None
    assert batches[0].fresh.tolist() == [True] * 3
    for lane in range(3):
        read, found = b"", list[bytes]()
        for batch in batches:
            assert batch.fresh is not None
            row = bytes(batch.text[lane][batch.live[lane]].tolist())
            if batch.fresh[lane]:
                found.append(read)
                read = row
            else:
                assert read[-1] == row[0], "the last target is what the next piece begins with"
                assert batch.live[lane, 0]
                read += row[1:]
        found.append(read)
        assert all(text in texts for text in found[2:-1]), "a lane's first and last documents alone may lack a part"
        assert all(any(part in text for text in texts) for part in found)


def test_every_token_but_a_documents_first_is_a_target_once() -> None:
    source = lanes(1)
    targets = [piece.targets for batch in epoch_of(source, 1) for piece in batch.pieces]
    assert sum(int((t != UNSCORED).sum()) for t in targets) == sum(n - 1 for n in LENGTHS)
    assert all((t[:, -1] == UNSCORED).all() for t in targets), "the last column is read in the next batch"
    assert all(batch.text.shape == (1, T + 1) for batch in epoch_of(source, 1))


def test_rows_do_not_depend_on_the_micro_batch() -> None:
    source = lanes()
    whole = source.batch(range(3, 6), 2, 7)
    for b, row in enumerate(range(3, 6)):
        one = source.batch([row], 2, 7)
        assert torch.equal(one.text[0], whole.text[b])
        assert (one.names[0], one.index.tolist()) == (whole.names[b], [row])


def test_orders_are_keyed_by_seed_and_epoch() -> None:
    def names(seed: int, epoch: int) -> list[str]:
        return [name for batch in epoch_of(lanes(seed=seed), 3, epoch) for name in batch.names]

    assert names(1, 0) == names(1, 0)
    assert len({tuple(names(*key)) for key in ((1, 0), (1, 1), (2, 0))}) == 3
    fresh = epoch_of(lanes(), 3, 1)[0].fresh
    assert fresh is not None
    assert fresh.all(), "an epoch begins with fresh lanes"


def test_fingerprints_tell_lanes_apart() -> None:
    made = [lanes(), lanes(2), lanes(tokens=9), lanes(seed=2), lanes(books=5)]
    assert len({each.fingerprint for each in made}) == len(made)
    assert lanes().fingerprint == made[0].fingerprint


def test_lanes_end_after_so_many_rows() -> None:
    books = tokenized(BOOKS, byte_tokenizer())
    few, whole = Lanes(BOOKS, books, T, 3, 1, count=7), lanes()
    assert (len(few), few.times) == (9, 3)
    assert few.batch(range(9), 0, 0).text.equal(whole.batch(range(9), 0, 0).text)
    assert few.fingerprint != whole.fingerprint
    assert len(Lanes(BOOKS, books, T, 3, 1, count=1000)) == len(whole)


def test_fewer_pieces_than_lanes_are_refused() -> None:
    line = rf"{PIECES} pieces of 8 tokens in 6 documents, a batch has 40 lanes; give more text, or lower train\.batch"
    with pytest.raises(BadInput, match=line):
        lanes(40)
