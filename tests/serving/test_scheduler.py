"""ChunkSizer finds the chunk that fits the time of a step; share_positions wastes none of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.serving.scheduler import MIN_CHUNK, MIN_PROMPT_SHARE, STEP_SECONDS, ChunkSizer, share_positions


@pytest.mark.parametrize("fixed", [0.0, 0.02])
@pytest.mark.parametrize("per_position", [0.0005, 0.002])
@pytest.mark.parametrize("decode_seconds", [0.03, 0.08])
def test_chunk_sizer_fills_a_step(decode_seconds: float, per_position: float, fixed: float) -> None:
    """Also if a chunk has a cost that does not depend on its length."""
    sizer = ChunkSizer(512)
    for _ in range(5):
        sizer.record(decode_seconds, 4, 0)
    for _ in range(30):
        size = sizer.choose(4)
        seconds = decode_seconds + fixed + size * per_position
        sizer.record(seconds, 4, size)
        assert seconds <= STEP_SECONDS + per_position
    assert seconds >= STEP_SECONDS - 2 * per_position
    assert sizer.choose(0) > sizer.choose(4), "prompts alone are read in larger chunks"


@pytest.mark.parametrize("decode_seconds", [0.13, 0.15, 0.4])
def test_chunk_sizer_never_stops_reading_prompts(decode_seconds: float) -> None:
    """Where decoding alone takes as long as a step may, a share of its time goes to prompts."""
    sizer = ChunkSizer(512)
    sizer.record(decode_seconds, 16, 0)
    for _ in range(30):
        size = sizer.choose(16)
        sizer.record(decode_seconds + 0.001 * size, 16, size)
    assert size == pytest.approx(MIN_PROMPT_SHARE * decode_seconds / 0.001, abs=2)
    for _ in range(30):
        sizer.record(9.0, 16, sizer.choose(16))
    assert sizer.choose(16) == MIN_CHUNK
    assert ChunkSizer(3).choose(16) == 3


def test_chunk_sizer_notices_that_rows_have_left() -> None:
    """Prompts are read without a break, so that no step measures the decoding rows alone."""
    sizer = ChunkSizer(512)
    sizer.record(0.12, 16, 0)
    for _ in range(30):
        size = sizer.choose(2)
        seconds = 0.02 + 0.001 * size
        sizer.record(seconds, 2, size)
    assert seconds == pytest.approx(STEP_SECONDS, abs=0.01)


@pytest.mark.parametrize("seconds", [0.031, 0.1])
def test_chunk_sizer_does_not_learn_from_the_end_of_a_prompt(seconds: float) -> None:
    """The next prompt would begin with tiny chunks, however fast or slow the few positions seem."""
    sizer = ChunkSizer(512)
    sizer.record(0.03, 4, 0)
    for _ in range(30):
        size = sizer.choose(4)
        sizer.record(0.03 + 0.001 * size, 4, size)
    for _ in range(5):
        assert sizer.choose(4) == size
        sizer.record(seconds, 4, 2)


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 60))
def test_share_positions_uses_all_of_them(remaining: list[int], size: int) -> None:
    shares = share_positions(remaining, size)
    assert sum(shares) == min(size, sum(remaining))
    assert all(0 <= share <= n for share, n in zip(shares, remaining, strict=True))
    unfinished = [share for share, n in zip(shares, remaining, strict=True) if share < n]
    assert not unfinished or max(shares) - min(unfinished) <= 1
