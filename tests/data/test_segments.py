"""Segment boundaries: Eq. AC7 against its oracle, lengths within limits, one draw per step."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laconic.config.data import TextConfig
from laconic.data.documents.segments import SegmentBoundaries, min_segment_length, random_lengths
from laconic.errors import UsageError
from laconic.rng import uniform
from tests.oracles.segmenting import MISREAD, ORACLE

CASES = [(3072, 2, 2048), (3072, 2, 4096), (90, 5, 40), (61, 4, 25), (64, 3, 33)]  # the first two are the papers'


def draws(W: int, seed: int) -> list[float]:
    return uniform(seed, 0, np.arange(W)).tolist()


def ours(W: int, w: int, X: int, values: list[float]) -> list[int]:
    low = min_segment_length(W, w, X)
    return random_lengths(W, w, low, np.asarray(values[: W - w * low]))


@pytest.mark.equation("autocompressor", "AC7")
@pytest.mark.parametrize(("W", "w", "X"), CASES)
def test_eq_ac7_random_lengths(W: int, w: int, X: int) -> None:
    for seed in range(5):
        assert ours(W, w, X, draws(W, seed)) == ORACLE["AC7"](W, w, X, draws(W, seed))


@pytest.mark.equation("autocompressor", "AC7")
@pytest.mark.parametrize("name", MISREAD["AC7"])
def test_eq_ac7_is_told_apart(name: str) -> None:
    results = [(case, seed) for case in CASES for seed in range(5)]
    assert any(
        MISREAD["AC7"][name](*case, draws(case[0], seed)) != ORACLE["AC7"](*case, draws(case[0], seed))
        for case, seed in results
    )


def test_random_lengths_in_the_papers_range() -> None:
    for X, low, high in ((2048, 1024, 2048), (4096, 2, 3070)):
        results = [ours(3072, 2, X, draws(3072, seed)) for seed in range(300)]
        assert all(low <= length <= high for lengths in results for length in lengths)
        assert min(map(min, results)) < low + (high - low) * 0.03
        assert max(map(max, results)) > high - (high - low) * 0.03


@given(st.integers(2, 6), st.integers(5, 200), st.integers(5, 400), st.integers(0, 99))
def test_draw_lengths_sum_and_respect_limits(w: int, mean: int, X: int, seed: int) -> None:
    W = w * mean
    assume(W - w * min_segment_length(W, w, X) >= w - 1)
    lengths = ours(W, w, X, draws(W, seed))
    assert sum(lengths) == W
    assert len(lengths) == w
    assert min_segment_length(W, w, X) <= min(lengths)
    assert max(lengths) <= max(X, W - 2 * (w - 1))
    assert max(lengths) <= X or min_segment_length(W, w, X) == 2


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"row_tokens": 10, "segment_tokens": 4}, (4, 8, 10)),
        ({"row_tokens": 12, "segment_tokens": 4}, (4, 8, 12)),
        ({"row_tokens": 10, "segment_tokens": (2, 5, 3)}, (2, 7, 10)),
    ],
)
def test_fixed_ends(options: dict[str, Any], ends: tuple[int, ...]) -> None:
    cuts = SegmentBoundaries(TextConfig.model_validate({**options, "segment_lengths": "fixed"}), 0, 100)
    assert cuts.fixed_ends() == cuts.draw_ends(7) == ends


@pytest.mark.parametrize(
    "options",
    [
        {"row_tokens": 600, "segment_tokens": 100, "min_segment_tokens": 50, "max_segment_tokens": 160},
        {
            "row_tokens": 700,
            "segment_tokens": 100,
            "segments_per_window": 2,
            "segment_overlap": 0,
            "min_segment_tokens": 20,
        },
        {"row_tokens": 800, "segment_tokens": 100, "segments_per_window": 8, "max_segment_tokens": 300},
    ],
)
def test_draw_ends(options: dict[str, Any]) -> None:
    config = TextConfig.model_validate(options)
    cuts = SegmentBoundaries(config, 3, 400)
    results = [cuts.draw_ends(step) for step in range(20)]
    assert results == [cuts.draw_ends(step) for step in range(20)]
    assert len(set(results)) == 20
    assert results != [SegmentBoundaries(config, 4, 400).draw_ends(step) for step in range(20)]
    for ends in results:
        lengths = np.diff([0, *ends])
        assert len(ends) == config.row_tokens // 100
        assert ends[-1] == config.row_tokens
        assert (config.min_segment_tokens or 2) <= lengths.min()
        assert lengths.max() <= (config.max_segment_tokens or 400)
        # every window's worth of segments has its share of the tokens
        assert [
            ends[min(i + config.segments_per_window, len(ends)) - 1]
            for i in range(0, len(ends), config.segments_per_window)
        ] == [
            min(i + config.segments_per_window, len(ends)) * 100
            for i in range(0, len(ends), config.segments_per_window)
        ]


def test_draw_lengths_respect_positions_of_the_model() -> None:
    config = TextConfig(row_tokens=600, segment_tokens=100)
    lengths = [np.diff([0, *SegmentBoundaries(config, 0, 120).draw_ends(step)]) for step in range(20)]
    assert min(map(min, lengths)) >= min_segment_length(300, 3, 120) == 90
    assert max(map(max, lengths)) <= 120


def test_segment_boundaries_refuse_impossible_limits() -> None:
    line = "leave nothing to draw for 3 segments"
    with pytest.raises(UsageError, match=line):
        SegmentBoundaries(TextConfig(row_tokens=600, segment_tokens=100), 0, 100)
    with pytest.raises(UsageError, match="exceeded by all of 300 draws"):
        SegmentBoundaries(
            TextConfig(
                row_tokens=2000,
                segment_tokens=100,
                segments_per_window=20,
                min_segment_tokens=2,
                max_segment_tokens=101,
            ),
            0,
            400,
        )


def test_draw_lengths_gives_up() -> None:
    cuts = SegmentBoundaries(
        TextConfig(row_tokens=600, segment_tokens=100, min_segment_tokens=2, max_segment_tokens=180), 0, 400
    )
    cuts.max_length = 99
    with pytest.raises(UsageError, match="exceeded by all of 10,000 draws"):
        cuts.draw_ends(0)
