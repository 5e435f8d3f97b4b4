"""Document tails after contexts, and excerpts of contexts."""

from dataclasses import replace

import numpy as np
import pytest

from laconic.data.documents.dataset import TokenArray
from laconic.errors import InputError
from laconic.evaluation.compression.run import choose_contexts
from laconic.evaluation.compression.tails import DocumentTails, sample_tails, segment_ends


def book(n: int, start: int = 0) -> TokenArray:
    return np.arange(start, start + n, dtype=np.int32)


def make_tails(limit: int | None = None) -> DocumentTails:
    return sample_tails(("a", "b"), (book(1000), book(250, 5000)), 200, 40, limit)


@pytest.mark.parametrize(
    ("n", "segment", "ends"),
    [(200, 50, (50, 100, 150, 200, 240)), (120, 50, (20, 70, 120, 160)), (30, 50, (30, 70)), (50, 50, (50, 90))],
)
def test_segment_ends_count_back_from_the_tail(n: int, segment: int, ends: tuple[int, ...]) -> None:
    assert segment_ends(n, segment, 40) == ends


def test_sample_tails_covers_all_documents_without_overlap() -> None:
    result = make_tails()
    assert sorted(result.names) == ["a@0", "a@240", "a@480", "a@720", "b@0"]
    assert len(set(result.token_ids.flatten().tolist())) == 5 * 240
    assert result.context_tokens == 200
    assert make_tails(3).names == result.names[:3]
    assert make_tails().token_ids.tolist() == result.token_ids.tolist()


@pytest.mark.parametrize("n", [0, 30, 120, 200])
def test_batch_scores_the_same_tail_after_any_context(n: int) -> None:
    result = replace(make_tails(), context_tokens=n)
    batch = result.batch([0, 3], 0, 0)
    assert batch.input_ids.shape == (2, n + 40)
    assert batch.input_ids[:, n:].tolist() == result.token_ids[[0, 3], 200:].tolist()
    assert batch.input_ids[:, :n].tolist() == result.token_ids[[0, 3], 200 - n : 200].tolist()
    assert batch.loss_mask[:, n + 1 :].all()
    assert not batch.loss_mask[:, : n + 1].any()
    (piece,) = batch.sequential_parts
    assert piece.loss_mask.equal(batch.loss_mask)
    assert batch.document_ids == (result.names[0], result.names[3])


def test_batch_of_excerpts_copies_from_the_context() -> None:
    result = replace(make_tails(), excerpt_tokens=48)
    batch = result.batch(range(5), 0, 0)
    assert batch.segment_ends == (40, 80, 120, 160, 200, 248)
    starts: list[int] = []
    for row in batch.input_ids.tolist():
        context, span = row[:200], row[200:]
        at = context.index(span[0])
        assert context[at : at + 48] == span
        starts.append(at)
    assert len(set(starts)) > 3
    assert result.batch([4, 1], 0, 0).input_ids.tolist() == batch.input_ids[[4, 1]].tolist()
    assert batch.loss_mask.sum(1).tolist() == [47] * 5
    assert result.fingerprint != make_tails().fingerprint


def test_choose_contexts_fits_half_of_the_documents() -> None:
    assert choose_contexts([300, 300, 5000], 200) == [50]
    assert choose_contexts([300, 800, 5000], 200) == [50, 200, 400, 600]
    assert choose_contexts([100], 200) == [50]


def test_sample_tails_rejects_lengths_that_are_too_long() -> None:
    with pytest.raises(InputError, match=r"1,200 tokens of a document, .* has 1,000"):
        sample_tails(("a",), (book(1000),), 1000, 200)
