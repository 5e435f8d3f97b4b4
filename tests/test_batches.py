"""DocumentBatch: windows score every token exactly once, except those excepted in the AutoCompressor's section 5."""

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
    """Return a batch of segments of these lengths; row b is real in columns [start, end); tokens are distinct."""
    ends = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    column = torch.arange(ends[-1])
    mask = torch.stack([(column >= a) & (column < b) for a, b in spans])
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    names = tuple(f"book {b}" for b in range(len(spans)))
    return DocumentBatch(ids, mask, mask.clone(), ends, torch.arange(len(spans)), names, windows=(w, o))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw segment lengths, windows, and rows that start and end anywhere."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    w, o = draw(st.integers(2, 4)), draw(st.integers(0, 1))
    T = sum(lengths)
    starts = draw(st.lists(st.integers(0, T), min_size=1, max_size=3))
    return lengths, w, o, [(a, draw(st.integers(a, T))) for a in starts]


def expected_windows(lengths: list[int], w: int, o: int) -> list[list[int]]:
    """Return the segments of each window: window j covers (j-1)(w-o)+1 .. (j-1)(w-o)+w, until all are covered."""
    counts: list[list[int]] = []
    while not counts or counts[-1][-1] < len(lengths) - 1:
        start = len(counts) * (w - o)
        counts.append([i for i in range(start, start + w) if i < len(lengths)])
    return counts


@given(layouts())
def test_windows_score_every_token_once_except_the_first(layout: Layout) -> None:
    lengths, w, o, spans = layout
    batch = documents(lengths, w, o, spans)
    counts = torch.zeros(batch.input_ids.numel(), dtype=torch.int)
    for part in batch.sequential_parts:
        counts[part.input_ids[part.loss_mask]] += 1
    starts = [sum(lengths[: window[0]]) for window in expected_windows(lengths, w, o)]
    for b, (start, end) in enumerate(spans):
        for t in range(batch.input_ids.shape[1]):
            # Without overlap, the first token of every window has no context; with overlap, only the document's first.
            firsts = {start} if o else {max(start, begin) for begin in starts}
            is_scored = start <= t < end and t not in firsts
            assert int(counts[batch.input_ids[b, t]]) == is_scored, (b, t)


@given(layouts())
def test_windows_cover_the_segments_in_order(layout: Layout) -> None:
    lengths, w, o, spans = layout
    batch = documents(lengths, w, o, spans)
    parts, windows = batch.sequential_parts, expected_windows(lengths, w, o)
    assert [part.first_segment for part in parts] == [window[0] for window in windows]
    for part, window in zip(parts, windows, strict=True):
        columns = [batch.segment_slices[i] for i in window]
        assert [s.stop - s.start for s in part.segment_slices] == [lengths[i] for i in window]
        assert part.input_ids.equal(batch.input_ids[:, columns[0].start : columns[-1].stop])
        assert part.attention_mask.equal(batch.attention_mask[:, columns[0].start : columns[-1].stop])
        assert part.document_ids == batch.document_ids
        assert part.row_index.equal(batch.row_index)
    for part, following in pairwise(parts):
        assert part.carried_segments == following.first_segment - part.first_segment == len(part.segment_ends) - o
    assert parts[-1].carried_segments is None


def test_overlapping_window_predicts_the_first_new_token() -> None:
    first, second = documents([2, 2, 2, 2], 3, 1, [(0, 8)]).sequential_parts
    assert first.loss_mask.tolist() == [[False, True, True, True, True, True]]
    assert second.loss_mask.tolist() == [[False, False, True, True]]


@given(layouts())
def test_window_is_its_own_only_part(layout: Layout) -> None:
    for part in documents(*layout).sequential_parts:
        (only_part,) = part.sequential_parts
        assert only_part.loss_mask.equal(part.loss_mask)
        assert (only_part.first_segment, only_part.carried_segments, only_part.segment_ends) == (
            part.first_segment,
            part.carried_segments,
            part.segment_ends,
        )


def test_document_batch_selects_and_counts_rows() -> None:
    batch = replace(
        documents([3, 2], 2, 0, [(0, 5), (0, 2)]), num_facts=torch.tensor([4, 1]), loss_denominators={"scored": 5.0}
    )
    assert isinstance(batch, Batch)
    assert (batch.B, batch.num_tokens, batch.ids) == (2, 7, ("book 0", "book 1"))
    selected = batch.select_rows([1])
    assert (selected.ids, selected.num_tokens, selected.loss_denominators) == (("book 1",), 2, {"scored": 5.0})
    assert selected.num_facts is not None
    assert selected.num_facts.tolist() == [1]
    assert batch.to("cpu").attention_mask.equal(batch.attention_mask)


@pytest.mark.parametrize(("w", "o"), [(2, 0), (3, 1)])
def test_windows_respect_the_loss_mask(w: int, o: int) -> None:
    batch = documents([2, 2, 2], w, o, [(0, 6)])
    only = torch.tensor([[True, False, False, True, False, True]])
    counts = torch.cat([part.input_ids[part.loss_mask] for part in replace(batch, loss_mask=only).sequential_parts])
    assert counts.tolist() == [3, 5]
