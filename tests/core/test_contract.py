"""Documents as windows: every token is scored exactly once but those that the method's section 5 excepts."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.batches import DocumentBatch
from laconic.interfaces import Batch

Layout = tuple[list[int], int, int, list[tuple[int, int]]]


def documents(lengths: list[int], w: int, o: int, spans: list[tuple[int, int]]) -> DocumentBatch:
    """Segments of these lengths; row b is live in columns [start, end); tokens are numbers of their own."""
    cuts = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    column = torch.arange(cuts[-1])
    live = torch.stack([(column >= a) & (column < b) for a, b in spans])
    text = torch.arange(live.numel()).reshape(live.shape)
    names = tuple(f"book {b}" for b in range(len(spans)))
    return DocumentBatch(text, live, live.clone(), cuts, torch.arange(len(spans)), names, windows=(w, o))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Segments, windows, and rows that begin and end where they like."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    w, o = draw(st.integers(2, 4)), draw(st.integers(0, 1))
    T = sum(lengths)
    begins = draw(st.lists(st.integers(0, T), min_size=1, max_size=3))
    return lengths, w, o, [(a, draw(st.integers(a, T))) for a in begins]


def expected(lengths: list[int], w: int, o: int) -> list[list[int]]:
    """The segments of each window, from 0: window j covers (j-1)(w-o)+1 .. (j-1)(w-o)+w, until all are covered."""
    found: list[list[int]] = []
    while not found or found[-1][-1] < len(lengths) - 1:
        start = len(found) * (w - o)
        found.append([i for i in range(start, start + w) if i < len(lengths)])
    return found


@given(layouts())
def test_every_token_is_scored_once_but_the_first_of_a_window(layout: Layout) -> None:
    lengths, w, o, spans = layout
    whole = documents(lengths, w, o, spans)
    found = torch.zeros(whole.input_ids.numel(), dtype=torch.int)
    for piece in whole.sequential_parts:
        found[piece.input_ids[piece.loss_mask]] += 1
    begins = [sum(lengths[: window[0]]) for window in expected(lengths, w, o)]
    for b, (start, end) in enumerate(spans):
        for t in range(whole.input_ids.shape[1]):
            # Without overlap a window's first live token has nothing before it; with one, only the document's has.
            firsts = {start} if o else {max(start, begin) for begin in begins}
            due = start <= t < end and t not in firsts
            assert int(found[whole.input_ids[b, t]]) == due, (b, t)


@given(layouts())
def test_windows_cover_the_segments_in_order_and_say_what_they_hand_on(layout: Layout) -> None:
    lengths, w, o, spans = layout
    whole = documents(lengths, w, o, spans)
    pieces, windows = whole.sequential_parts, expected(lengths, w, o)
    assert [piece.first_segment for piece in pieces] == [window[0] for window in windows]
    for piece, window in zip(pieces, windows, strict=True):
        columns = [whole.segment_slices[i] for i in window]
        assert [s.stop - s.start for s in piece.segment_slices] == [lengths[i] for i in window]
        assert piece.input_ids.equal(whole.input_ids[:, columns[0].start : columns[-1].stop])
        assert piece.attention_mask.equal(whole.attention_mask[:, columns[0].start : columns[-1].stop])
        assert piece.document_ids == whole.document_ids
        assert piece.row_index.equal(whole.row_index)
    for piece, after in pairwise(pieces):
        assert piece.carried_segments == after.first_segment - piece.first_segment == len(piece.segment_ends) - o
    assert pieces[-1].carried_segments is None


def test_with_overlap_the_last_token_read_again_predicts_the_next_segments_first() -> None:
    first, second = documents([2, 2, 2, 2], 3, 1, [(0, 8)]).sequential_parts
    assert first.loss_mask.tolist() == [[False, True, True, True, True, True]]
    assert second.loss_mask.tolist() == [[False, False, True, True]]


@given(layouts())
def test_a_window_has_itself_as_its_only_piece(layout: Layout) -> None:
    for piece in documents(*layout).sequential_parts:
        (again,) = piece.sequential_parts
        assert again.loss_mask.equal(piece.loss_mask)
        assert (again.first_segment, again.carried_segments, again.segment_ends) == (
            piece.first_segment,
            piece.carried_segments,
            piece.segment_ends,
        )


def test_rows_are_taken_and_counted() -> None:
    batch = replace(
        documents([3, 2], 2, 0, [(0, 5), (0, 2)]), num_facts=torch.tensor([4, 1]), loss_denominators={"scored": 5.0}
    )
    assert isinstance(batch, Batch)
    assert (batch.B, batch.num_tokens, batch.ids) == (2, 7, ("book 0", "book 1"))
    taken = batch.select_rows([1])
    assert (taken.ids, taken.num_tokens, taken.loss_denominators) == (("book 1",), 2, {"scored": 5.0})
    assert taken.num_facts is not None
    assert taken.num_facts.tolist() == [1]
    assert batch.to("cpu").attention_mask.equal(batch.attention_mask)


@pytest.mark.parametrize(("w", "o"), [(2, 0), (3, 1)])
def test_only_what_the_batch_scores_is_scored(w: int, o: int) -> None:
    whole = documents([2, 2, 2], w, o, [(0, 6)])
    only = torch.tensor([[True, False, False, True, False, True]])
    found = torch.cat([piece.input_ids[piece.loss_mask] for piece in replace(whole, loss_mask=only).sequential_parts])
    assert found.tolist() == [3, 5]
