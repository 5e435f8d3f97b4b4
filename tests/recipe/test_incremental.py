"""Class-incremental learning by name: every method on a few rows, and what is refused."""

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
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope, HopeAttention

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 257, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128}


def decoder() -> Decoder:
    return Decoder(DecoderConfig.tiny("llama", **SIZES, **HEADS)).eval()


def incremental(*args: Any, note: Any = None, **how: Any) -> dict[str, Any]:
    plan = plan_class_incremental(*args, **how)
    return plan.summarise(plan.run_many(range(len(plan)), note))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    made = [
        {"text": f"{part} {label} {i}", "label": label, "split": part}
        for part, n in (("train", 3), ("test", 1))
        for label in ("ab", "cd", "ef", "gh")
        for i in range(n)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.mark.usefixtures("unchecked")
def test_every_method_on_two_orders(rows: Path) -> None:
    model = HopeAttention.from_decoder(decoder(), (4, 8), "grow", options=CMSOptions(associative_target="start"))
    said: list[str] = []
    found = incremental(
        model,
        build_byte_tokenizer(),
        "banking77",
        rows,
        orders=(0, 1),
        task=2,
        how=FinetuneConfig(batch_size=4),
        note=said.append,
    )
    assert list(found["methods"]) == list(METHODS)
    assert found["tasks"] == [2, 2]
    assert (found["train_examples"], found["test_examples"], found["left_out"]) == (12, 4, 0)
    for name, own in found["methods"].items():
        A = own["ways"]["seen"]["matrices"]
        assert len(A) == 2
        assert [x is None for x in A[0][0]] == [name == "joint", True]
        assert ("seen-prior" in own["ways"]) == (not name.startswith("ncm"))
    assert found["methods"]["learner"]["notes"][0]["updates"][0] > 0
    assert found == json.loads(json.dumps(found))
    assert len(build_table(found)) == 1 + len(METHODS)
    assert said[0].startswith("banking77, learner, order 0: task 1 of 2, ")


@pytest.mark.usefixtures("unchecked")
def test_what_a_model_lacks_is_left_out(rows: Path) -> None:
    tokenizer = build_byte_tokenizer()
    plain = incremental(decoder(), tokenizer, "banking77", rows, orders=(0,), task=2, methods=("frozen", "icl"))
    assert list(plain["methods"]) == ["frozen", "icl"]
    with pytest.raises(
        UsageError, match=r"classes: method learner was asked for, the model does not learn while it reads;"
    ):
        incremental(decoder(), tokenizer, "banking77", rows, orders=(0,), task=2, methods=("learner",))
    with pytest.raises(UsageError, match=r"classes: no method finetun; did you mean finetune\?"):
        incremental(decoder(), tokenizer, "banking77", rows, orders=(0,), task=2, methods=("finetun",))
    blind = Hope(HopeConfig.attention_free(257, 16, 1, chunk_sizes=(8,), num_heads=2, head_dim=8)).eval()
    with pytest.raises(
        UsageError, match=r"classes: method icl was asked for, the model has no attention to a context; leave"
    ):
        incremental(blind, tokenizer, "banking77", rows, orders=(0,), task=2, methods=("icl",))
    found = incremental(blind, tokenizer, "banking77", rows, orders=(0,), task=2, methods=("learner", "finetune"))
    assert list(found["methods"]) == ["learner", "finetune"]
