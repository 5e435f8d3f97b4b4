"""`laconic export RUN` writes a folder that answers as the run does, without the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.config.recipe import METHOD_TABLES
from laconic.errors import BusyError, CorruptArtifactError, UsageError
from laconic.experiment.export import export_run
from laconic.experiment.load_run import load_run
from tests.conftest import RunCli, needs
from tests.runs import train_tiny_run

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
SHORT = laconic.GenerationConfig(max_tokens=6)
PROMPTS = {"digits": ["1+2*3=", "4*5-6="], "text": ["Book 1.", "A sentence"]}


def generate_ids(model: Any) -> list[list[int]]:
    """Greedy ids after two prompts of the kind that the model was trained on."""
    prompts = PROMPTS[model.recipe.data.source]
    return [list(answer.token_ids) for answer in model.generate(prompts, config=SHORT)]


@pytest.mark.parametrize("method", sorted(METHOD_TABLES))
def test_export_answers_as_the_run(method: str, run_cli: RunCli, tmp_path: Path) -> None:
    run = train_tiny_run(method, tmp_path)
    trained, folder = laconic.load(run), tmp_path / "exported"
    expected = generate_ids(trained)
    assert run_cli("export", run, "--out", folder).code == 0
    shutil.move(tmp_path / "runs", tmp_path / "gone")
    model = laconic.load(folder)
    assert type(model) is type(trained)
    assert generate_ids(model) == expected
    assert str(tmp_path) not in (folder / "laconic/recipe.toml").read_text()
    prompts = PROMPTS["text" if method in ("autocompressor", "hope", "lm") else "digits"]
    output = run_cli("generate", folder, *prompts, "--max-tokens", "6", "--format", "json").out
    assert [row["ids"] for row in json.loads(output.splitlines()[-1])["generations"]] == expected
    if isinstance(trained, laconic.Reasoner) and trained.has_latents:
        assert isinstance(model, laconic.Reasoner)
        assert torch.equal(model.think("1+2=").latents, trained.think("1+2=").latents)
    if isinstance(trained, laconic.TextCompressor):
        assert isinstance(model, laconic.TextCompressor)
        memories = [m.compress(["A sentence of a book. " * 9]) for m in (trained, model)]
        assert torch.equal(memories[0].vectors, memories[1].vectors)


@pytest.mark.parametrize("scope", ["both", "write"])
def test_export_adapter_of_a_compressor(scope: str, tmp_path: Path) -> None:
    """A merged adapter changes roundings only; one that is switched off for reading stays an adapter."""
    needs("peft")
    overrides = ("train.trainable=lora", "lora.rank=2", "train.learning_rate=0.1", f"compression.adapter_scope={scope}")
    run = train_tiny_run("autocompressor", tmp_path, *overrides)
    trained = laconic.load(run)
    export_run(load_run(run, CPU), tmp_path / "exported")
    assert (tmp_path / "exported/laconic/adapter_model.safetensors").is_file() == (scope == "write")
    model = laconic.load(tmp_path / "exported")
    assert isinstance(trained, laconic.TextCompressor)
    assert isinstance(model, laconic.TextCompressor)
    memories = [m.compress(["A sentence of a book. " * 9]) for m in (trained, model)]
    torch.testing.assert_close(memories[0].vectors, memories[1].vectors, rtol=1e-4, atol=1e-5)
    assert generate_ids(model) == generate_ids(trained)


def test_export_decoder_loads_in_transformers(tmp_path: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    run = train_tiny_run("kava", tmp_path)
    decoder = export_run(load_run(run, CPU), tmp_path / "exported")
    ids = torch.tensor([[1, 2, 3]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(input_ids=ids).logits
    torch.testing.assert_close(theirs, decoder.logits(decoder(decoder.embed(ids)).hidden_states))


def test_export_keeps_the_stage_and_dtype(tmp_path: Path) -> None:
    run = train_tiny_run("coconut", tmp_path)
    export_run(load_run(run, CPU), tmp_path / "exported", dtype=torch.bfloat16)
    exported, trained = load_run(tmp_path / "exported", CPU), load_run(run, CPU)
    assert exported.parts.decoder.token_embedding.weight.dtype == torch.bfloat16
    assert exported.epoch == trained.epoch == 0
    assert exported.method.eval_stage == trained.method.eval_stage


def test_export_refusals(tmp_path: Path) -> None:
    run = train_tiny_run("kava", tmp_path)
    export_run(load_run(run, CPU), tmp_path / "exported")
    with pytest.raises(BusyError):
        export_run(load_run(run, CPU), tmp_path / "exported")
    with pytest.raises(UsageError, match="exported at step 1"):
        laconic.load(tmp_path / "exported", step=7)
    export_run(load_run(train_tiny_run("pccot", tmp_path), CPU), tmp_path / "other")
    shutil.copyfile(tmp_path / "other/model.safetensors", tmp_path / "exported/model.safetensors")
    with pytest.raises(CorruptArtifactError):
        laconic.load(tmp_path / "exported")
