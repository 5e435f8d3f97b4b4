"""A published checkpoint end to end: LoRA training of the 260K Llama, evaluation, inspection, export and reload."""

import json
from pathlib import Path

import pytest
import torch

from laconic.models.decoder import Decoder
from tests.conftest import needs, shared_dir
from tests.house.source import sandbox
from tests.house.warm import laconic
from tests.tolerances import FLOAT32, error

pytestmark = pytest.mark.medium

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
batch_size = 2
learning_rate = 5e-3
[lora]
rank = 4
[validation]
max_rows = 4
max_tokens = 8
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained run."""
    needs("peft")
    needs("transformers")
    shared_dir()
    folder = sandbox(tmp_path_factory.mktemp("path"), wants_shared=True)
    (folder / "lora.toml").write_text(RECIPE, encoding="utf-8")
    process = laconic("laconic train lora.toml --out run", folder)
    assert process.returncode == 0, process.stderr
    return folder


def test_lora_run_saves_the_adapter_only(run_folder: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert (run_folder / "run/steps/step-000003/adapter_model.safetensors").stat().st_size > 0
    assert not (run_folder / "run/steps/step-000003/model.safetensors").exists()


def test_lora_run_evaluates_on_real_questions(run_folder: Path) -> None:
    process = laconic(
        "laconic evaluate run --tasks gsm8k,multiarith --limit 3 --protocol decimal --format json", run_folder
    )
    assert process.returncode == 0, process.stderr
    datasets = {result["dataset"].partition(":")[0]: result for result in json.loads(process.stdout)["datasets"]}
    assert set(datasets) == {"gsm8k", "multiarith"}
    for result in datasets.values():
        assert result["questions"] == 3
        assert result["runs"][0]["passes"]["latent"] == 3


@pytest.mark.slow
def test_lora_run_is_inspected(run_folder: Path) -> None:
    command = (
        'laconic inspect run "Tom has 3 apples and eats 1. How many are left?" --chain "<<3-1=2>>" --out page.html'
    )
    process = laconic(command, run_folder)
    assert process.returncode == 0, process.stderr
    assert "<html" in (run_folder / "page.html").read_text(encoding="utf-8")


def test_lora_run_exports_to_transformers_and_reloads(run_folder: Path) -> None:
    import transformers

    process = laconic("laconic export run --out exported", run_folder)
    assert process.returncode == 0, process.stderr
    ids = torch.tensor([[1, 5, 9, 200, 37]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run_folder / "exported", dtype=torch.float32).eval()
    ours = Decoder.from_pretrained(run_folder / "exported")
    base = Decoder.from_pretrained(run_folder.parent / "shared/models/stories260k")
    with torch.no_grad():
        logits = ours.logits(ours(ours.embed(ids)).hidden_states)
        assert error(logits, theirs(ids).logits) <= FLOAT32
        assert error(logits, base.logits(base(base.embed(ids)).hidden_states)) > 100 * FLOAT32  # the adapter is merged
    theirs.save_pretrained(run_folder / "back")
    back = Decoder.from_pretrained(run_folder / "back")
    assert back.fingerprint == ours.fingerprint
