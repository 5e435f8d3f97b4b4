"""Class-incremental evaluation: every method on a few rows, and the methods of a model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest

from laconic.config.nested import CMSOptions
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError
from laconic.evaluation.class_incremental.intent_data import INTENT_DATASETS
from laconic.evaluation.class_incremental.protocol import METHODS
from laconic.evaluation.class_incremental.report import build_method_table
from laconic.evaluation.class_incremental.run import (
    RATE_TIMES_WIDTH,
    add_levels,
    available_methods,
    plan_class_incremental,
)
from laconic.evaluation.results_store import EvalJob, EvalMetadata, run_resumable
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope, HopeAttention
from tests.models.fixtures import fresh

METADATA = EvalMetadata("class_incremental", "banking77")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 257, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128}


def decoder() -> Decoder:
    return Decoder(DecoderConfig.tiny("llama", **SIZES, **HEADS)).eval()


def run_plan(model: Any, rows: Path, orders: Sequence[int], log: Any = None) -> dict[str, Any]:
    plan = plan_class_incremental(model, build_byte_tokenizer(), "banking77", rows, orders=orders)
    job = EvalJob(METADATA, len(plan), lambda units: [[plan.run_unit(i, log)] for i in units])
    with TemporaryDirectory() as folder:
        return plan.summarise(run_resumable(job, Path(folder)))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    examples = [
        {"text": f"{part} {label} {i}", "label": label, "split": part}
        for part, n in (("train", 3), ("test", 1))
        for label in ("ab", "cd", "ef", "gh")
        for i in range(n)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in examples))
    return path


@pytest.fixture(autouse=True)
def two_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the four classes into two tasks."""
    info = replace(INTENT_DATASETS["banking77"], classes_per_task=2)
    monkeypatch.setitem(cast(Any, INTENT_DATASETS), "banking77", info)


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
def test_plan_runs_every_method_on_two_orders(rows: Path) -> None:
    model = HopeAttention.from_decoder(decoder(), (4, 8), "grow", options=CMSOptions(associative_target="start"))
    messages: list[str] = []
    result = run_plan(model, rows, (0, 1), messages.append)
    assert list(result["methods"]) == list(METHODS)
    assert result["tasks"] == [2, 2]
    assert (result["train_examples"], result["test_examples"], result["dropped"]) == (12, 4, 0)
    for name, method in result["methods"].items():
        A = method["matrices"]
        assert len(A) == 2
        assert [x is None for x in A[0][0]] == [name == "joint", True]
    assert result["methods"]["learner"]["notes"][0]["updates"][0] > 0
    assert result == json.loads(json.dumps(result))
    assert len(build_method_table(result).rows) == len(METHODS)
    assert messages[0].startswith("banking77, learner, order 0: task 1 of 2, ")


@pytest.mark.usefixtures("unchecked")
def test_available_methods_leaves_out_what_a_model_does_not_have() -> None:
    attention_free = Hope(HopeConfig.attention_free(257, 16, 1, chunk_sizes=(8,), num_heads=2, head_dim=8)).eval()
    assert available_methods(add_levels(decoder())) == list(METHODS)
    assert set(METHODS) - set(available_methods(attention_free)) == {"icl", "lora"}


def test_plan_of_a_file_holds_out_a_fifth_of_each_class(tmp_path: Path) -> None:
    """Of rows without a test split; classes that do not divide evenly are put into up to five tasks."""
    file = tmp_path / "intents.jsonl"
    examples = [{"text": f"{label} {i}", "label": label} for label in "abcdefg" for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in examples))
    plan = plan_class_incremental(decoder(), build_byte_tokenizer(), f"classes:{file}", None, orders=(0, 1))
    assert plan.description["set"] == "intents"
    assert plan.description["tasks"] == [2, 2, 3]
    assert (plan.description["train_examples"], plan.description["test_examples"]) == (56, 14)
    stream = plan.streams[0]
    for classes, train, test in zip(stream.task_classes, stream.train, stream.test, strict=True):
        assert {item.label for item in train} == {item.label for item in test} == set(classes)
    assert not {item.input_ids for task in stream.train for item in task} & {
        item.input_ids for task in stream.test for item in task
    }
    again = plan_class_incremental(decoder(), build_byte_tokenizer(), f"classes:{file}", None, orders=(0,))
    assert again.streams[0].fingerprint == stream.fingerprint


def test_plan_of_a_file_holds_out_different_texts(tmp_path: Path) -> None:
    """A text that repeats is held out once, and leaves the other texts for training."""
    file = tmp_path / "intents.jsonl"
    rows = [{"text": f"{label} {i}", "label": label} for label in "abcd" for i in (0, 0, 0, 0, 1, 1, 2, 3, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = plan_class_incremental(decoder(), build_byte_tokenizer(), f"classes:{file}", None, orders=(0,))
    assert plan.description["test_examples"] == 4
    for train, test in zip(plan.streams[0].train, plan.streams[0].test, strict=True):
        assert len({item.input_ids for item in train}) == 4 * len({item.label for item in test})
    file.write_text("".join(json.dumps({"text": f"{i}", "label": x}) + "\n" for x in "abcd" for i in range(20)))
    plan = plan_class_incremental(decoder(), build_byte_tokenizer(), f"classes:{file}", None, orders=(0,))
    assert plan.description["test_examples"] == 4 * 4  # texts that every class has


def test_plan_of_a_file_drops_texts_beyond_the_context(tmp_path: Path) -> None:
    """Before texts are held out, and with room for the longest label, with which every text is scored."""
    file, model = tmp_path / "intents.jsonl", fresh("gpt2", vocab_size=257, max_position_embeddings=64)
    rows = [{"text": f"{label} {i}", "label": label} for label in ("a", "b", "c", "a long label") for i in range(5)]
    fitting = 64 - len(" →".encode()) - len(" a long label\n") - 1
    rows += [{"text": "x" * fitting, "label": "a"}, {"text": "y" * (fitting + 1), "label": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match=r"^intents: 1 row left out: longer than the model's 64 positions$"):
        plan = plan_class_incremental(model, build_byte_tokenizer(), f"classes:{file}", None, orders=(0,))
    assert (plan.description["train_examples"], plan.description["test_examples"]) == (4 * 4 + 1, 4)
    assert plan.description["dropped"] == 1
    for method in ("learner", "finetune", "icl", "ewc", "joint"):
        plan.run_unit(plan.methods.index(method))
    for row in rows:
        row["text"] += "z" * 64 * (row["label"] == "c")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"^intents: every text of class c exceeds the model's 64 positions"):
        plan_class_incremental(model, build_byte_tokenizer(), f"classes:{file}", None, orders=(0,))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("abc", r"^intents: 3 classes; give at least four, for two tasks of two classes$"),
        ("a", r"^intents: 1 classes; give at least four"),
        ("abc!", r"^intents\.jsonl: the label '!' has no words, or those of another label; rename it$"),
    ],
)
def test_plan_of_a_file_with_few_classes_is_refused(tmp_path: Path, labels: str, message: str) -> None:
    file = tmp_path / "intents.jsonl"
    file.write_text("".join(json.dumps({"text": f"{x} {i}", "label": x}) + "\n" for x in labels for i in range(2)))
    with pytest.raises(InputError, match=message):
        plan_class_incremental(decoder(), build_byte_tokenizer(), f"classes:{file}", None)


def test_plan_of_a_plain_decoder_puts_levels_on_it_for_the_learner_alone(rows: Path) -> None:
    plain = decoder()
    plan = plan_class_incremental(plain, build_byte_tokenizer(), "banking77", rows, orders=(0,))
    assert isinstance(plan.learner, HopeAttention)
    assert cast(Any, plan.model).decoder is plain
    assert plan.config.learning_rate == RATE_TIMES_WIDTH / 16
