"""The whole path on a checkpoint that we did not make: the 260K Llama through LoRA, answers, inspection, and back."""

import json
from pathlib import Path

import pytest
import torch

from laconic.models.decoder import Decoder
from tests.conftest import needs, shared_dir
from tests.house.source import sandbox
from tests.house.warm import laconic
from tests.tolerances import FLOAT32, error

RECIPE = """
method = "kava"
[model]
name = "../shared/models/stories260k"
[latents]
num_latents = 4
jacobi_iterations = 3
[data]
source = "catalog"
name = "gsm8k"
valid = "gsm8k-aug:valid"
data_dir = "../shared/data"
max_train_rows = 64
max_tokens = 300
on_too_long = "drop"
[train]
trainable = "lora"
steps = 3
batch_size = 4
learning_rate = 5e-3
[lora]
rank = 4
[validation]
max_rows = 4
max_tokens = 8
"""


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run in it."""
    needs("peft")
    needs("transformers")
    shared_dir()
    folder = sandbox(tmp_path_factory.mktemp("path"), wants_shared=True)
    (folder / "lora.toml").write_text(RECIPE, encoding="utf-8")
    done = laconic("laconic train lora.toml --out run", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_adapter_learns_and_the_base_stays(inside: Path) -> None:
    lines = [json.loads(line) for line in (inside / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert (inside / "run/steps/step-000003/adapter_model.safetensors").stat().st_size > 0
    assert not (inside / "run/steps/step-000003/model.safetensors").exists()


def test_it_is_evaluated_on_real_questions(inside: Path) -> None:
    done = laconic("laconic evaluate run --tasks gsm8k,multiarith --limit 3 --protocol decimal --format json", inside)
    assert done.returncode == 0, done.stderr
    sets = {found["set"].partition(":")[0]: found for found in json.loads(done.stdout)["sets"]}
    assert set(sets) == {"gsm8k", "multiarith"}
    for found in sets.values():
        assert found["questions"] == 3
        assert found["runs"][0]["passes"]["think"] == 3


@pytest.mark.slow
def test_it_is_looked_into(inside: Path) -> None:
    asked = 'laconic inspect run "Tom has 3 apples and eats 1. How many are left?" --chain "<<3-1=2>>" --out page.html'
    done = laconic(asked, inside)
    assert done.returncode == 0, done.stderr
    assert "<html" in (inside / "page.html").read_text(encoding="utf-8")


def test_it_leaves_for_transformers_and_comes_back(inside: Path) -> None:
    import transformers

    done = laconic("laconic export run --out exported", inside)
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([[1, 5, 9, 200, 37]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(inside / "exported", dtype=torch.float32).eval()
    ours = Decoder.from_pretrained(inside / "exported")
    base = Decoder.from_pretrained(inside.parent / "shared/models/stories260k")
    with torch.no_grad():
        logits = ours.logits(ours(ours.embed(ids)).hidden)
        assert error(logits, theirs(ids).logits) <= FLOAT32
        assert error(logits, base.logits(base(base.embed(ids)).hidden)) > 100 * FLOAT32  # the adapter is in it
    theirs.save_pretrained(inside / "back")
    back = Decoder.from_pretrained(inside / "back")
    assert back.fingerprint == ours.fingerprint
