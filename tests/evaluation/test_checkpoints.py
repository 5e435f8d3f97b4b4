"""Published checkpoints under evaluation: prompts, solved examples, and answers as of `laconic.generate`."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import laconic
from laconic.batches import ReasoningExample
from laconic.evaluation.checkpoints import (
    CheckpointPrompt,
    PromptStyle,
    format_example,
    is_checkpoint,
    load_checkpoint_run,
    prepare_checkpoint,
    read_prompt,
)
from laconic.evaluation.class_incremental import run as class_incremental
from laconic.evaluation.class_incremental.intent_data import INTENT_DATASETS
from laconic.models.checkpoints.weights import find_checkpoint
from laconic.models.ops.int8_linear import Int8Linear
from tests.conftest import RunCli, check_refused
from tests.data.test_chat_rows import CHATML

ROWS = [
    {"question": f"Tom has {a} apples and gets {b}. How many?", "steps": [f"{a}+{b}={a + b}"], "answer": str(a + b)}
    for a, b in ((1, 2), (3, 4), (5, 6))
]
SHOT = "Question: Tom has 5 apples and gets 6. How many?\nAnswer: 5+6=11\nThe answer is: 11\n\n"  # the row not asked


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def outputs(cache: Path) -> list[str]:
    (file,) = cache.glob("evaluations/*/*/evaluations/*/records.jsonl")
    items = [json.loads(line) for line in file.read_text().splitlines()]
    return [item["metrics"]["output"] for item in sorted(items, key=lambda item: item["item"])]


@pytest.mark.medium
def test_evaluate_checkpoint_plain_equals_generate(rows: Path, run_cli: RunCli) -> None:
    flags = ("--tasks", rows, "--shots", 1, "--shots-from", rows, "--limit", 2, "--batch-size", 2, "--format", "json")
    result = run_cli("evaluate", "stories260k", *flags)
    assert result.code == 0, result.err
    assert "stories260k-plain-1-shot" in result.out
    model = laconic.load("stories260k")
    prompts = [f"{SHOT}Question: {row['question']}\nAnswer:" for row in ROWS[:2]]
    config = laconic.GenerationConfig(max_tokens=256, stop_strings=("\n\nQuestion:", "\nQuestion:"))
    for output, prompt in zip(outputs(rows.parent / "cache"), prompts, strict=True):
        expected = model.generate(prompt, config)[0].text.strip()
        assert expected
        assert output.strip().startswith(expected)  # the ids of a stop string are part of the output
    again = run_cli("evaluate", "stories260k", *flags)
    assert json.loads(again.out) == json.loads(result.out)


@pytest.mark.medium
def test_evaluate_checkpoint_chat_asks_with_the_template(rows: Path, tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(laconic.load("stories260k").decoder.source_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    flags = ("--tasks", rows, "--limit", 1, "--shots", 1, "--shots-from", rows)
    assert run_cli("evaluate", folder, *flags).code == 0
    model = laconic.load(folder)
    turns = [
        {"role": "user", "content": ROWS[1]["question"]},
        {"role": "assistant", "content": "3+4=7\nThe answer is: 7"},
        {"role": "user", "content": ROWS[0]["question"]},
    ]
    ids = model.tokenizer.encode(model.tokenizer.apply_chat_template(turns), add_special_tokens=False)
    config = laconic.GenerationConfig(max_tokens=256)
    expected = laconic.generate(model.decoder, model.tokenizer, input_ids=[ids], config=config)[0].text
    assert [text.strip() for text in outputs(tmp_path / "cache")] == [expected.strip()]


def test_prepare_checkpoint_keeps_prompts_apart(rows: Path) -> None:
    model = find_checkpoint("stories260k")
    zero, one = (prepare_checkpoint(model, "stories260k", shots=shots) for shots in (0, 1))
    assert zero != one
    assert zero == prepare_checkpoint(model, "stories260k")
    prompt = read_prompt(one)
    assert prompt is not None
    assert (prompt.style, prompt.shots) == ("plain", 1)
    assert read_prompt(rows.parent) is None
    assert is_checkpoint("stories260k")
    assert not is_checkpoint(one)
    assert not is_checkpoint(rows.parent)


def test_format_example_in_a_chat() -> None:
    shot = ReasoningExample("shot", "1 + 1?", ("1+1=2",), "2")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    example = ReasoningExample("last", "2 + 2?", (), "4", {"messages": messages})
    formatted = format_example(example, CheckpointPrompt("chat", 1), [shot], "The answer is:")
    assert [turn["role"] for turn in formatted.metadata["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_format_example_with_a_document(style: PromptStyle) -> None:
    example = ReasoningExample("last", "Who?", (), "Rex", document="A dog named Rex.")
    formatted = format_example(example, CheckpointPrompt(style), (), "The answer is:")
    text = formatted.question if style == "plain" else formatted.metadata["messages"][0]["content"]
    assert "A dog named Rex.\n\nWho?" in text
    assert formatted.document is None


@pytest.mark.medium
def test_evaluate_checkpoint_quantize_compares_with_float_weights(rows: Path, run_cli: RunCli) -> None:
    flags = ("--quantize", "int8", "--baseline", "stories260k", "--tasks", rows, "--limit", 1)
    result = run_cli("evaluate", "stories260k", *flags, "--format", "json")
    assert result.code == 0, result.err
    assert "stories260k-int8-plain-0-shot" in result.out
    keys = {
        file.parents[2].name: json.loads(file.read_text())["metadata"]["key"].get("quantize")
        for file in (rows.parent / "cache").glob("evaluations/*/*/evaluations/*/result.json")
    }
    assert keys == {"stories260k-int8-plain-0-shot": "int8", "stories260k-plain-0-shot": None}
    folder = prepare_checkpoint(find_checkpoint("stories260k"), "stories260k", quantize="int8")
    modules = load_checkpoint_run(folder, torch.device("cpu")).parts.decoder.modules()
    assert any(isinstance(module, Int8Linear) for module in modules)
    refused = run_cli("evaluate", rows.parent / "no-run", "--quantize", "int8")
    assert refused.code != 0


def test_evaluate_checkpoint_refusals(rows: Path, run_cli: RunCli) -> None:
    missing = run_cli("evaluate", "stories260k", "--tasks", rows, "--prompt", "chat")
    check_refused(missing, 66, "no chat template")
    default = run_cli("evaluate", "stories260k")
    assert (default.code, default.err) == (
        2, "laconic: --tasks test: a model has no test set of its own; name a data set or a file\n"
    )  # fmt: skip
    shots = run_cli("evaluate", "stories260k", "--tasks", rows, "--shots", 2)
    check_refused(shots, 2, "--shots-from")
    many = run_cli("evaluate", "stories260k", "--tasks", rows, "--shots", 9, "--shots-from", rows)
    check_refused(many, 66, "has 0 examples that are not asked")


def test_evaluate_checkpoint_on_classes(rows: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [{"text": f"{part} {label}", "label": label, "split": part} for part in ("train", "test") for label in "ab"]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    info = replace(INTENT_DATASETS["banking77"], classes_per_task=1)
    monkeypatch.setitem(cast(Any, INTENT_DATASETS), "banking77", info)
    monkeypatch.setattr(class_incremental, "METHODS", ("learner",))
    one_order = partial(class_incremental.plan_class_incremental, orders=(0,))
    monkeypatch.setattr(class_incremental, "plan_class_incremental", one_order)
    flags = ("--tasks", "banking77", "--data-dir", rows, "--shots", 1)
    result = run_cli("evaluate", "stories260k", *flags, "--format", "json")
    assert result.code == 0, result.err
    (figures,) = json.loads(result.out)["classes"]
    assert list(figures["methods"]) == ["learner"]
    assert figures["finetuning"]["learning_rate"] == 1e-3  # for a width of 64
    texts = [{"text": f"{i} {label}", "label": label} for label in "abcd" for i in range(2)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    result = run_cli("evaluate", "stories260k", "--tasks", f"classes:{rows}", "--shots", 1, "--format", "json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["classes"][0]["tasks"] == [2, 2]
    missing = run_cli("evaluate", "stories260k", "--tasks", "classes:gone.jsonl")
    assert (missing.code, missing.err[:48]) == (66, "laconic: --tasks classes:gone.jsonl: no such fil")
    refused = run_cli("evaluate", "stories260k", *flags, "--quantize", "int8")
    check_refused(refused, 2, "rounded weights are not fine-tuned")
