"""Answers to context questions of a small compressor, and their scores against figures computed by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from laconic.evaluation.compression import context_qa
from laconic.evaluation.compression.context_qa import answer_question, build_score_table, score_conditions
from laconic.evaluation.context_questions import ContextQuestion
from laconic.evaluation.results_store import EvalItem, EvalMetadata
from laconic.evaluation.suite import RunResult
from laconic.generation.config import GenerationConfig
from tests.compression.compressors import reader


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


def test_answer_question_after_each_context() -> None:
    model, question = reader(), ContextQuestion("a long text", "who?", ("x",), "it is", 3)
    memory, config = model.compress(["a long text"]), GenerationConfig(max_tokens=3)
    expected = {
        "none": (model.generate(["who?\nit is"], config=config), 0),
        "compressed": (model.generate(["who?\nit is"], config, memory=memory), 4),
        "truncated": (model.generate(["ext\nwho?\nit is"], config=config), 4),
        "full": (model.generate(["a long text\nwho?\nit is"], config=config), 12),
    }
    assert answer_question(model, question, memory) == {
        name: {"output": output[0].text, "context_size": size} for name, (output, size) in expected.items()
    }


def test_answer_question_leaves_out_contexts_that_do_not_fit() -> None:
    model, text = reader(room=48), "a long text of some forty signs, or more so"
    answers = answer_question(model, ContextQuestion(text, "who?", ("x",), "", 3), model.compress([text]))
    assert list(answers) == ["none", "compressed", "truncated"]


def test_build_question_job_compresses_each_context_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, texts = reader(), list[str]()
    compress = type(model).compress
    monkeypatch.setattr(type(model), "compress", lambda self, new: texts.extend(new) or compress(self, new))
    rows = [{"context": text, "question": "who?", "answer": "x", "max_new_tokens": 2} for text in ("a", "b", "a")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = context_qa.build_question_job(model, tmp_path / "rows.jsonl", EvalMetadata("context_qa", "rows"))
    assert job.order == [0, 2, 1]
    items = [item for i in job.order for unit in job.evaluate([i]) for item in unit]
    assert texts == ["a", "b"]
    assert [(item.id, item.shared["context"], item.shared["answers"]) for item in items] == [
        *(("0", 0, ["x"]), ("2", 0, ["x"]), ("1", 1, ["x"])),
    ]


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
    result = RunResult("run", "file", (0,), [items])
    none, compressed = score_conditions(result)
    assert (none.condition, compressed.condition) == ("none", "compressed")
    assert compressed.context_size == 2
    x = compressed.metrics["match"]
    assert (x.mean.mean, x.gain) == (0.75, 0.5)
    deviations, gain_deviations = [2 - 1.5, 1 - 1.5], [1 - 1.0, 1 - 1.0]  # sums over the questions of each context
    assert x.se == pytest.approx((2 * sum(d * d for d in deviations)) ** 0.5 / 4)
    assert x.gain_se == pytest.approx((2 * sum(d * d for d in gain_deviations)) ** 0.5 / 4)
    assert none.metrics["match"].gain == 0
    assert context_qa.count_items(result) == {"items": 4, "contexts": 2}


def test_one_context_has_no_standard_error() -> None:
    result = RunResult("run", "file", (0,), [[answer_item(0, 0, "cat", "cat", None)]])
    assert math.isnan(score_conditions(result)[0].metrics["match"].se)
    assert list(build_score_table(result).rows[1][2:4]) == ["100.0", "+0.0"]
