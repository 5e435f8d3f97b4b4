"""Answers and labels judged, against figures made by hand."""

import json

import pytest

from laconic.evaluation.compression import context_qa
from laconic.evaluation.compression.context_qa import ContextTaskResult


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
    assert [score(said, answers) for score in context_qa.METRICS.values()] == pytest.approx(list(asked))


def line(id: int, part: str, seed: int, balanced: bool, label: int, nats: list[float], without: list[float]) -> str:
    ways = [{"way": "way", "nats": nats, "without": without, "held": 4 + seed}]
    return json.dumps({
        "id": id, "part": part, "seed": seed, "balanced": balanced, "label": label, "tokens": [1, 2], "ways": ways,
    })  # fmt: skip


def labels(*runs: list[str]) -> ContextTaskResult:
    return ContextTaskResult("run", "file", "labels", False, tuple(range(len(runs))), runs)


def test_calibration_and_order_are_chosen_on_validation_rows_alone() -> None:
    nats, without = [1.0, 3.0], [0.5, 3.0]  # a token: 1 against 1.5, so the first; calibrated .5 against 0, the second
    valid = [line(0, "valid", 0, False, 0, nats, without), line(1, "valid", 0, True, 1, nats, without)]
    plain = line(2, "valid", 0, True, 1, nats, without)
    test = [
        line(3 + i, "test", seed, b, label, nats, without)
        for i, (b, seed, label) in enumerate((b, s, y) for b in (False, True) for s in (0, 1) for y in (0, 1, 1))
    ]
    found = labels([*valid, plain, *test])
    (way,) = found.icl_scores
    assert (way.variants, way.validation_accuracy, way.context_size) == (("neither",), 1, pytest.approx(4.4))
    assert (way.accuracy, way.std, way.accuracies) == (pytest.approx(1 / 3), 0, pytest.approx((1 / 3, 1 / 3)))
    assert (found.majority_accuracy, found.num_labels, found.num_items) == (2 / 3, 2, 3)
    row = json.loads(plain)
    assert (context_qa.choose_label(row, "way", False), context_qa.choose_label(row, "way", True)) == (0, 1)
    other = [text.replace('"balanced": false, "label": 0', '"balanced": false, "label": 1') for text in valid]
    (way,) = labels([*valid, *test], [*other, *test]).icl_scores
    assert way.variants == ("neither", "calibrated")
    assert (way.accuracy, len(way.accuracies)) == (pytest.approx(1 / 2), 4)
    assert way.std == pytest.approx(((1 / 6) ** 2 * 4 / 3) ** 0.5)


def asked(id: int, context: int, none: str, compressed: str, full: str | None) -> str:
    said = {"none": (none, 0), "compressed": (compressed, 2), "full": (full, 9)}
    ways = [{"way": way, "said": text, "held": held} for way, (text, held) in said.items() if text is not None]
    return json.dumps({"id": id, "context": context, "task": None, "answers": ["cat"], "ways": ways})


def test_answers_are_paired_with_those_without_context_and_errors_are_over_contexts() -> None:
    lines = [
        asked(2, 1, "dog", "cat", "cat"), asked(0, 0, "cat", "cat", "cat"), asked(1, 0, "dog", "cat", None),
        asked(3, 1, "dog", "dog", "cat"),
    ]  # fmt: skip
    found = ContextTaskResult("run", "file", "answers", True, (0,), [lines])
    none, compressed = found.condition_scores  # the whole text did not fit once
    assert (none.condition, compressed.condition, compressed.context_size, found.num_items) == (
        "none",
        "compressed",
        2,
        4,
    )
    x = compressed.metrics["match"]
    assert (x.mean.mean, x.gain) == (0.75, 0.5)
    d, e = [2 - 1.5, 1 - 1.5], [1 - 1.0, 1 - 1.0]  # what the two contexts have more than their share
    assert x.se == pytest.approx((2 * sum(y * y for y in d)) ** 0.5 / 4)
    assert x.gain_se == pytest.approx((2 * sum(y * y for y in e)) ** 0.5 / 4)
    assert none.metrics["match"].gain == 0
    plain = found.to_json()
    assert (plain["contexts"], plain["ways"][1]["scores"]["match"]["mean"]["mean"]) == (2, 0.75)


def test_one_context_has_no_standard_error() -> None:
    found = ContextTaskResult("run", "file", "answers", False, (0,), [[asked(0, 0, "cat", "cat", None)]])
    assert found.to_json()["ways"][0]["scores"]["match"]["se"] is None
