"""Scores of context questions and in-context classification, against figures computed by hand."""

from typing import Any

import pytest

from laconic.evaluation.compression import context_qa
from laconic.evaluation.compression.context_qa_report import build_score_table, result_to_json, score_conditions
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import RunResult


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Cat.", ("cat",), (1, 1, 1)),
        ("a black cat", ("cat", "dog"), (0, 2 / 3, 1 / 2)),
        ("", ("cat",), (0, 0, 0)),
        ("cat and dog", ("cat", "dog"), (0, 1 / 2, 1)),
        ("the", ("an",), (1, 1, 0)),
        ("snake_case", ("snakecase",), (1, 1, 0)),  # as the script of SQuAD
        ("का", ("कि",), (0, 0, 0)),  # vowel signs are not punctuation
    ],
)
def test_answer_metrics(prediction: str, answers: tuple[str, ...], expected: tuple[float, float, float]) -> None:
    values = [metric(prediction, answers) for metric in context_qa.METRICS.values()]
    assert values == pytest.approx(list(expected))


def label_item(
    id: int, split: str, seed: int, balanced: bool, label: int, nll: list[float], null_nll: list[float]
) -> EvalItem:
    shared = {"split": split, "order_seed": seed, "balanced": balanced, "label": label, "label_tokens": [1, 2]}
    condition = {"label_nll": nll, "null_nll": null_nll, "context_size": 4 + seed}
    return EvalItem(str(id), {"condition": {**shared, **condition}})


def run_result(kind: str, *seeds: list[EvalItem]) -> RunResult:
    return RunResult("run", "file", tuple(range(len(seeds))), seeds, variant={"kind": kind})


def test_icl_variant_is_chosen_on_validation_items_only() -> None:
    # Per token 1 against 1.5, so the first label; calibrated 0.5 against 0, the second.
    nll, null_nll = [1.0, 3.0], [0.5, 3.0]
    valid = [label_item(0, "valid", 0, False, 0, nll, null_nll), label_item(1, "valid", 0, True, 1, nll, null_nll)]
    balanced = label_item(2, "valid", 0, True, 1, nll, null_nll)
    combinations = [(b, seed, label) for b in (False, True) for seed in (0, 1) for label in (0, 1, 1)]
    test = [label_item(3 + i, "test", seed, b, label, nll, null_nll) for i, (b, seed, label) in enumerate(combinations)]
    items = [*valid, balanced, *test]
    (score,) = score_conditions(run_result("labels", items))
    assert (score.variants, score.validation_accuracy, score.context_size) == (("neither",), 1, pytest.approx(4.4))
    assert (score.accuracy, score.std) == (pytest.approx(1 / 3), 0)
    assert score.accuracies == pytest.approx((1 / 3, 1 / 3))
    assert (context_qa.majority_accuracy(items), context_qa.count_test_texts(items)) == (2 / 3, 3)
    choices = [context_qa.choose_label(balanced, "condition", calibrated) for calibrated in (False, True)]
    assert choices == [0, 1]
    other = [label_item(0, "valid", 0, False, 1, nll, null_nll), valid[1]]
    (score,) = score_conditions(run_result("labels", [*valid, *test], [*other, *test]))
    assert score.variants == ("neither", "calibrated")
    assert (score.accuracy, len(score.accuracies)) == (pytest.approx(1 / 2), 4)
    assert score.std == pytest.approx(((1 / 6) ** 2 * 4 / 3) ** 0.5)


def answer_item(id: int, context: int, none: str, compressed: str, full: str | None) -> EvalItem:
    outputs = {"none": (none, 0), "compressed": (compressed, 2), "full": (full, 9)}
    conditions: dict[str, Any] = {
        name: {"output": text, "context_size": size} for name, (text, size) in outputs.items() if text is not None
    }
    shared = {"context": context, "task": None, "answers": ["cat"]}
    return EvalItem(str(id), {name: {**shared, **metrics} for name, metrics in conditions.items()})


def test_answer_scores_are_paired_and_clustered_by_context() -> None:
    items = [
        answer_item(0, 0, "cat", "cat", "cat"),
        answer_item(1, 0, "dog", "cat", None),  # the whole text did not fit
        answer_item(2, 1, "dog", "cat", "cat"),
        answer_item(3, 1, "dog", "dog", "cat"),
    ]
    result = run_result("answers", items)
    none, compressed = score_conditions(result)
    assert (none.condition, compressed.condition) == ("none", "compressed")
    assert compressed.context_size == 2
    x = compressed.metrics["match"]
    assert (x.mean.mean, x.gain) == (0.75, 0.5)
    deviations, gain_deviations = [2 - 1.5, 1 - 1.5], [1 - 1.0, 1 - 1.0]  # sums over the questions of each context
    assert x.se == pytest.approx((2 * sum(d * d for d in deviations)) ** 0.5 / 4)
    assert x.gain_se == pytest.approx((2 * sum(d * d for d in gain_deviations)) ** 0.5 / 4)
    assert none.metrics["match"].gain == 0
    data = result_to_json(result)
    assert (data["items"], data["contexts"], data["conditions"][1]["metrics"]["match"]["mean"]["mean"]) == (4, 2, 0.75)


def test_one_context_has_no_standard_error() -> None:
    result = run_result("answers", [answer_item(0, 0, "cat", "cat", None)])
    assert result_to_json(result)["conditions"][0]["metrics"]["match"]["se"] is None
    assert list(build_score_table(result).rows[1][2:4]) == ["100.0", "+0.0"]
