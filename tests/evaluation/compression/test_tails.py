"""Tails after their contexts, and excerpts of them: what is scored is the same whatever stands before."""

import numpy as np
import pytest

from laconic.data.documents.dataset import TokenArray
from laconic.errors import InputError
from laconic.evaluation.compression.tails import DocumentTails, sample_tails, segment_ends


def book(n: int, start: int = 0) -> TokenArray:
    return np.arange(start, start + n, dtype=np.int32)


def made(count: int | None = None) -> DocumentTails:
    return sample_tails(("a", "b"), (book(1000), book(250, 5000)), 200, 40, count)


@pytest.mark.parametrize(
    ("n", "segment", "ends"),
    [(200, 50, (50, 100, 150, 200, 240)), (120, 50, (20, 70, 120, 160)), (30, 50, (30, 70)), (50, 50, (50, 90))],
)
def test_segments_are_counted_from_the_tail(n: int, segment: int, ends: tuple[int, ...]) -> None:
    assert segment_ends(n, segment, 40) == ends
    assert made().continuation_batch([0], n, segment).segment_ends == ends


def test_stretches_do_not_overlap_and_are_from_all_documents() -> None:
    found = made()
    assert sorted(found.names) == ["a@0", "a@240", "a@480", "a@720", "b@0"]
    assert len(set(found.token_ids.flatten().tolist())) == 5 * 240
    assert found.context_tokens == 200
    assert made(3).names == found.names[:3]
    assert made().token_ids.tolist() == found.token_ids.tolist()


@pytest.mark.parametrize("n", [0, 30, 120, 200])
def test_tails_are_scored_alike_after_any_context(n: int) -> None:
    found = made()
    batch = found.continuation_batch([0, 3], n, 50)
    assert batch.input_ids.shape == (2, n + 40)
    assert batch.input_ids[:, n:].tolist() == found.token_ids[[0, 3], 200:].tolist()
    assert batch.input_ids[:, :n].tolist() == found.token_ids[[0, 3], 200 - n : 200].tolist()
    assert batch.loss_mask[:, n + 1 :].all()
    assert not batch.loss_mask[:, : n + 1].any()
    (piece,) = batch.sequential_parts
    assert piece.loss_mask.equal(batch.loss_mask)
    assert batch.document_ids == (found.names[0], found.names[3])


def test_an_excerpt_is_a_span_of_its_context() -> None:
    found = made()
    batch = found.excerpt_batch(range(5), 200, 50)
    assert batch.segment_ends == (50, 100, 150, 200, 248)
    starts: list[int] = []
    for row in batch.input_ids.tolist():
        context, span = row[:200], row[200:]
        at = context.index(span[0])
        assert context[at : at + 48] == span
        starts.append(at)
    assert len(set(starts)) > 3
    assert found.excerpt_batch([4, 1], 200, 50).input_ids.tolist() == batch.input_ids[[4, 1]].tolist()
    assert batch.loss_mask.sum(1).tolist() == [47] * 5


def test_what_is_too_short_is_refused() -> None:
    with pytest.raises(
        InputError, match="stretches of 1,200 tokens, the longest document has 1,000; shorten the context"
    ):
        sample_tails(("a",), (book(1000),), 1000, 200)
    with pytest.raises(InputError, match="a context of 201 tokens, the stretches have 200; make longer ones"):
        made().continuation_batch([0], 201, 50)
    with pytest.raises(InputError, match="an excerpt of 48 tokens from a context of 47; give a longer context"):
        made().excerpt_batch([0], 47, 50)
