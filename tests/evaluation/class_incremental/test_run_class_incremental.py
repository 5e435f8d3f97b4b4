"""Class-incremental evaluation: every method on a few rows, and refused methods."""

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.config.nested import CMSOptions
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.evaluation.class_incremental.finetune_baselines import FinetuneConfig
from laconic.evaluation.class_incremental.report import build_table
from laconic.evaluation.class_incremental.run import METHODS, plan_class_incremental
from laconic.evaluation.results_store import EvalMetadata
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope, HopeAttention

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 257, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128}


def decoder() -> Decoder:
    return Decoder(DecoderConfig.tiny("llama", **SIZES, **HEADS)).eval()


def run_plan(*args: Any, log: Any = None, **options: Any) -> dict[str, Any]:
    plan = plan_class_incremental(*args, **options)
    metadata = EvalMetadata("class_incremental", "banking77")
    return plan.summarise([record for unit in plan.run_units(range(len(plan)), metadata, log) for record in unit])


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


@pytest.mark.usefixtures("unchecked")
def test_plan_runs_every_method_on_two_orders(rows: Path) -> None:
    model = HopeAttention.from_decoder(decoder(), (4, 8), "grow", options=CMSOptions(associative_target="start"))
    messages: list[str] = []
    result = run_plan(
        model,
        build_byte_tokenizer(),
        "banking77",
        rows,
        orders=(0, 1),
        classes_per_task=2,
        config=FinetuneConfig(batch_size=4),
        log=messages.append,
    )
    assert list(result["methods"]) == list(METHODS)
    assert result["tasks"] == [2, 2]
    assert (result["train_examples"], result["test_examples"], result["dropped"]) == (12, 4, 0)
    for name, method in result["methods"].items():
        A = method["criteria"]["seen"]["matrices"]
        assert len(A) == 2
        assert [x is None for x in A[0][0]] == [name == "joint", True]
        assert ("seen-prior" in method["criteria"]) == (not name.startswith("ncm"))
    assert result["methods"]["learner"]["notes"][0]["updates"][0] > 0
    assert result == json.loads(json.dumps(result))
    assert len(build_table(result)) == 1 + len(METHODS)
    assert messages[0].startswith("banking77, learner, order 0: task 1 of 2, ")


@pytest.mark.usefixtures("unchecked")
def test_plan_leaves_out_unavailable_methods(rows: Path) -> None:
    tokenizer = build_byte_tokenizer()
    plain = run_plan(
        decoder(), tokenizer, "banking77", rows, orders=(0,), classes_per_task=2, methods=("frozen", "icl")
    )
    assert list(plain["methods"]) == ["frozen", "icl"]
    with pytest.raises(UsageError, match="learner: the model does not learn"):
        run_plan(decoder(), tokenizer, "banking77", rows, orders=(0,), classes_per_task=2, methods=("learner",))
    with pytest.raises(UsageError, match=r"finetun; did you mean finetune\?"):
        run_plan(decoder(), tokenizer, "banking77", rows, orders=(0,), classes_per_task=2, methods=("finetun",))
    attention_free = Hope(HopeConfig.attention_free(257, 16, 1, chunk_sizes=(8,), num_heads=2, head_dim=8)).eval()
    with pytest.raises(UsageError, match="icl: the model has no attention"):
        run_plan(attention_free, tokenizer, "banking77", rows, orders=(0,), classes_per_task=2, methods=("icl",))
    result = run_plan(
        attention_free, tokenizer, "banking77", rows, orders=(0,), classes_per_task=2, methods=("learner", "finetune")
    )
    assert list(result["methods"]) == ["learner", "finetune"]
