"""Answers and labels judged, against figures made by hand."""

import json

import pytest

from laconic.evaluation import told


@pytest.mark.parametrize(
    ("said", "answers", "asked"),
    [
        ("The Cat.", ("cat",), (1, 1, 1)),
        ("a black cat", ("cat", "dog"), (0, 2 / 3, 1 / 2)),
        ("", ("cat",), (0, 0, 0)),
        ("cat and dog", ("cat", "dog"), (0, 1 / 2, 1)),
        ("the", ("an",), (1, 1, 0)),
    ],
)
def test_scores_of_an_answer(said: str, answers: tuple[str, ...], asked: tuple[float, float, float]) -> None:
    assert [score(said, answers) for score in told.SCORES.values()] == pytest.approx(list(asked))


def line(part: str, seed: int, balanced: bool, label: int, nats: list[float], without: list[float]) -> str:
    return json.dumps({
        "part": part, "seed": seed, "balanced": balanced, "label": label, "tokens": [1, 2], "nats": {"way": nats},
        "without": {"way": without},
    })  # fmt: skip


def test_calibration_and_order_are_chosen_on_validation_rows_alone() -> None:
    nats, without = [1.0, 3.0], [0.5, 3.0]  # a token: 1 against 1.5, so the first; calibrated .5 against 0, the second
    valid = [line("valid", 0, False, 0, nats, without), line("valid", 0, True, 1, nats, without)]
    plain = line("valid", 0, True, 1, nats, without)
    test = [
        line("test", seed, b, label, nats, without) for b in (False, True) for seed in (0, 1) for label in (0, 1, 1)
    ]
    found = told.labels([*valid, plain, *test])
    way = found["ways"]["way"]
    assert (way["balanced"], way["calibrated"], way["on_validation"]) == (False, False, 1)
    assert (way["accuracy"], way["sd"], way["seeds"]) == (pytest.approx(1 / 3), 0, pytest.approx([1 / 3] * 2))
    assert found["floor"] == {"label": 1, "share": 2 / 3}
    row = json.loads(plain)
    assert (told.chosen(row, "way", False), told.chosen(row, "way", True)) == (0, 1)
