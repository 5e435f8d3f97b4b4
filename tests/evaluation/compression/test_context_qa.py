"""Scores of context questions and in-context classification, against figures computed by hand."""

from typing import Any

import pytest

from laconic.evaluation.compression import context_qa
from laconic.evaluation.compression.context_qa import ContextTaskResult, Item, group_items
from laconic.evaluation.results_store import EvalMetadata


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Cat.", ("cat",), (1, 1, 1)),
        ("a black cat", ("cat", "dog"), (0, 2 / 3, 1 / 2)),
        ("", ("cat",), (0, 0, 0)),
        ("cat and dog", ("cat", "dog"), (0, 1 / 2, 1)),
        ("the", ("an",), (1, 1, 0)),
    ],
)
def test_answer_metrics(prediction: str, answers: tuple[str, ...], expected: tuple[float, float, float]) -> None:
    values = [metric(prediction, answers) for metric in context_qa.METRICS.values()]
    assert values == pytest.approx(list(expected))


def label_item(
    id: int, split: str, seed: int, balanced: bool, label: int, nll: list[float], null_nll: list[float]
) -> Item:
    shared = {"split": split, "order_seed": seed, "balanced": balanced, "label": label, "label_tokens": [1, 2]}
    condition = {"label_nll": nll, "null_nll": null_nll, "context_size": 4 + seed}
    return Item(str(id), shared, {"condition": condition})


def labels_result(*runs: list[Item]) -> ContextTaskResult:
    return ContextTaskResult("run", "file", "labels", False, tuple(range(len(runs))), runs)


def test_icl_variant_is_chosen_on_validation_items_only() -> None:
    # Per token 1 against 1.5, so the first label; calibrated 0.5 against 0, the second.
    nll, null_nll = [1.0, 3.0], [0.5, 3.0]
    valid = [label_item(0, "valid", 0, False, 0, nll, null_nll), label_item(1, "valid", 0, True, 1, nll, null_nll)]
    balanced = label_item(2, "valid", 0, True, 1, nll, null_nll)
    combinations = [(b, seed, label) for b in (False, True) for seed in (0, 1) for label in (0, 1, 1)]
    test = [label_item(3 + i, "test", seed, b, label, nll, null_nll) for i, (b, seed, label) in enumerate(combinations)]
    result = labels_result([*valid, balanced, *test])
    (score,) = result.icl_scores
    assert (score.variants, score.validation_accuracy, score.context_size) == (("neither",), 1, pytest.approx(4.4))
    assert (score.accuracy, score.std) == (pytest.approx(1 / 3), 0)
    assert score.accuracies == pytest.approx((1 / 3, 1 / 3))
    assert (result.majority_accuracy, result.num_labels, result.num_items) == (2 / 3, 2, 3)
    choices = [context_qa.choose_label(balanced, "condition", calibrated) for calibrated in (False, True)]
    assert choices == [0, 1]
    other = [label_item(0, "valid", 0, False, 1, nll, null_nll), valid[1]]
    (score,) = labels_result([*valid, *test], [*other, *test]).icl_scores
    assert score.variants == ("neither", "calibrated")
    assert (score.accuracy, len(score.accuracies)) == (pytest.approx(1 / 2), 4)
    assert score.std == pytest.approx(((1 / 6) ** 2 * 4 / 3) ** 0.5)


def answer_item(id: int, context: int, none: str, compressed: str, full: str | None) -> Item:
    outputs = {"none": (none, 0), "compressed": (compressed, 2), "full": (full, 9)}
    conditions: dict[str, Any] = {
        name: {"output": text, "context_size": size} for name, (text, size) in outputs.items() if text is not None
    }
    return Item(str(id), {"context": context, "task": None, "answers": ["cat"]}, conditions)


def test_answer_scores_are_paired_and_clustered_by_context() -> None:
    items = [
        answer_item(0, 0, "cat", "cat", "cat"),
        answer_item(1, 0, "dog", "cat", None),  # the whole text did not fit
        answer_item(2, 1, "dog", "cat", "cat"),
        answer_item(3, 1, "dog", "dog", "cat"),
    ]
    result = ContextTaskResult("run", "file", "answers", True, (0,), [items])
    none, compressed = result.condition_scores
    assert (none.condition, compressed.condition) == ("none", "compressed")
    assert (compressed.context_size, result.num_items) == (2, 4)
    x = compressed.metrics["match"]
    assert (x.mean.mean, x.gain) == (0.75, 0.5)
    deviations, gain_deviations = [2 - 1.5, 1 - 1.5], [1 - 1.0, 1 - 1.0]  # sums over the questions of each context
    assert x.se == pytest.approx((2 * sum(d * d for d in deviations)) ** 0.5 / 4)
    assert x.gain_se == pytest.approx((2 * sum(d * d for d in gain_deviations)) ** 0.5 / 4)
    assert none.metrics["match"].gain == 0
    data = result.to_json()
    assert (data["contexts"], data["conditions"][1]["metrics"]["match"]["mean"]["mean"]) == (2, 0.75)


def test_one_context_has_no_standard_error() -> None:
    result = ContextTaskResult("run", "file", "answers", False, (0,), [[answer_item(0, 0, "cat", "cat", None)]])
    assert result.to_json()["conditions"][0]["metrics"]["match"]["se"] is None


def test_group_items_inverts_to_records() -> None:
    items = [answer_item(0, 0, "cat", "cat", "cat"), answer_item(1, 0, "dog", "cat", None)]
    records = [record for item in items for record in item.to_records(EvalMetadata("context_qa", "file"))]
    for item, loaded in zip(items, group_items(records), strict=True):
        assert loaded.id == item.id
        assert list(loaded.conditions) == list(item.conditions)
        assert {**item.shared, **item.conditions["compressed"]} == loaded.conditions["compressed"]
        assert loaded.shared["answers"] == ["cat"]
