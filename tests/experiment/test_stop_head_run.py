"""A run whose stop head is trained after its latents: phases, files, and what its commands report."""

import json
from pathlib import Path
from typing import cast

import pytest

import laconic
from laconic.experiment.text_models.reasoner import Reasoner
from tests.conftest import RunCli
from tests.tiny_recipes import TINY_RECIPE

POLICY = 'length_policy = "stop_head"\nlength_cost = 100.0\nhead_only_after = 0.5\nhead_lr_multiplier = 1000.0\n'


@pytest.mark.medium
def test_stop_head_run_trains_the_head_last_and_ends_early(tmp_path: Path, run_cli: RunCli) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    text = TINY_RECIPE.replace("jacobi_iterations = 1", f"jacobi_iterations = 3\n{POLICY}")
    recipe.write_text(text)
    code, _, err = run_cli("train", recipe, "--out", out, "train.steps=8", "train.save_every=4", "train.keep_every=4")
    assert code == 0, err
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in metrics if "loss" in row]
    assert ["latents" in row for row in updates] == [False] * 4 + [True] * 4
    weights = [(out / f"steps/step-{n:06d}/model.safetensors").read_bytes() for n in (4, 8)]
    assert weights[0] == weights[1], "the decoder is frozen while the head is trained"
    reasoner = cast(Reasoner, laconic.load(out))
    (answer,) = reasoner.generate("3 + 4 * 2 =", laconic.GenerationConfig(max_tokens=3))
    assert answer.passes.latent == 1, "latents of this price are never worth it"
    thoughts = reasoner.think("3 + 4 * 2 =")
    assert (len(thoughts.latents), len(thoughts.tokens), thoughts.passes.latent) == (1, 1, 3)
    code, page, err = run_cli("audit", out, "--task", "valid", "--limit", 12)
    assert code == 0, err
    assert "as trained" in page
    code, _, err = run_cli("export", out, "--to", "vllm", "--out", tmp_path / "vllm")
    assert code == 2
    assert "stop_head" in err
