"""The digits task on SmolLM2: one token per digit and bracket, and the recipes of the chain, KaVa and its controls."""

from pathlib import Path
from typing import Any

import pytest

import laconic
from laconic.data.generators.digits import iter_digit_rows
from tests.conftest import RunCli

pytestmark = pytest.mark.real
ONE_UPDATE = ("train.steps=1", "train.warmup_steps=0", "train.batch_size=2", "validation.max_rows=2")


def test_digits_and_brackets_are_single_tokens(smollm2: Path) -> None:
    tokenizer = laconic.load_tokenizer(smollm2)
    row = next(iter_digit_rows(1, 0, num_operations=4, part="train"))
    assert len(tokenizer.encode(row["question"], add_special_tokens=False)) == len(row["question"]) == 10
    assert [len(tokenizer.encode(step, add_special_tokens=False)) for step in row["steps"]] == [3] * 4


def test_recipes_train_one_after_another(
    smollm2: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in (("--out", "digits.jsonl"), ("--out", "digits-mixed.jsonl", "--results-only-fraction", "0.4")):
        assert run_cli("data", "make", "digits", "--rows", "40", *flags).code == 0
    for name in ("cot", "kava", "pccot", "nocot"):
        result = run_cli("train", f"{name}-smollm2-digits", *ONE_UPDATE)
        assert result.code == 0, result.err
    pause = ("latents.jacobi_iterations=0", "latents.projection=none", "--out", "runs/pause")
    assert run_cli("train", "pccot-smollm2-digits", *pause, *ONE_UPDATE).code == 0
    reasoner: Any = laconic.load("runs/kava-smollm2-digits")
    assert len(reasoner.think("3+4*2-5*6=").latents) == 3
    assert len(reasoner.generate("3+4*2-5*6=", laconic.GenerationConfig(max_tokens=2))[0].token_ids) <= 2
