"""What commands do on a GPU: the same losses, answers, memories and states as on the CPU.

These tests need a CUDA device: `pytest -m cuda`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import laconic
from laconic.config.recipe import DOCUMENT_METHODS
from laconic.evaluation.class_incremental.finetune_baselines import FinetuneConfig
from laconic.evaluation.class_incremental.protocol import METHODS as CLASS_METHODS
from laconic.evaluation.class_incremental.run import build_learner
from laconic.nested.optim.input_recording import record_inputs
from laconic.nested.recurrence.gated_delta_rule import Gates, chunk_gated_delta_rule
from laconic.storage.run_dir import RunDirectory
from laconic.verification.run import run_parity
from tests.cli.test_train import metrics
from tests.conftest import REPO, call_cli
from tests.evaluation import streamed
from tests.runs import train_tiny_run
from tests.tiny_recipes import TINY_RECIPE

pytestmark = [pytest.mark.cuda, pytest.mark.loopback]
METHODS = ("cot", "nocot", "icot", "coconut", "codi", "pccot", "kava", "lm", "hope", "autocompressor")
DEVICES = ("cpu", "cuda")
TOLERANCE = 1e-4  # float32 without TF32 on both sides


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(str(folder)) if "loss" in line]


@pytest.mark.parametrize("method", METHODS)
def test_training_has_the_losses_of_the_cpu(method: str, tmp_path: Path) -> None:
    runs: list[Path] = []
    for i, device in enumerate(DEVICES):
        (tmp_path / str(i)).mkdir()
        runs.append(train_tiny_run(method, tmp_path / str(i), "train.steps=3", "--device", device))
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=TOLERANCE)
    if method not in DOCUMENT_METHODS:
        answers: list[str] = []
        for device in DEVICES:
            run = laconic.load(runs[1], device=device)
            assert isinstance(run, laconic.Reasoner)
            answers.append(run.generate("1+2-3=")[0].text)
        assert answers[0] == answers[1]


@pytest.mark.parametrize("method", ["kava", "hope"])
def test_resume_is_bit_for_bit(method: str, tmp_path: Path) -> None:
    keys = ("--device", "cuda", "train.deterministic=true", "train.save_every=2", "train.steps=4")
    run = RunDirectory(train_tiny_run(method, tmp_path, *keys))
    before = {file.name: load_file(file) for file in run.get_step(4).path.rglob("*.safetensors")}
    shutil.rmtree(run.step_path(4))
    train_tiny_run(method, tmp_path, *keys)
    for name, tensors in before.items():
        (file,) = run.get_step(4).path.rglob(name)
        resumed = load_file(file)
        assert tensors.keys() == resumed.keys()
        assert all(torch.equal(t, resumed[key]) for key, t in tensors.items()), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_with_transformers(family: str, dtype: str) -> None:
    report = run_parity(f"tiny:{family}", device="cuda", dtype=dtype)
    assert report.is_ok, report.summary()


def test_generation_equals_that_of_the_cpu() -> None:
    texts: list[list[str]] = []
    for device in DEVICES:
        model = laconic.load("stories260k", device=device)
        assert isinstance(model, laconic.LanguageModel)
        config = laconic.GenerationConfig(max_tokens=40)
        texts.append([g.text for g in model.generate(["Once upon a time", "Lily and Tom"], config)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", ["kvzip", "snapkv", "rkv", "h2o", "expected", "window"])
def test_compressed_caches_equal_those_of_the_cpu(method: str, tmp_path: Path) -> None:
    Path("text.txt").write_text("Once upon a time there was a little dog. He ran to the park. " * 6)
    for i, device in enumerate(DEVICES):
        args = ("compress", "stories260k", "text.txt", "--method", method, "--keep", "0.25")
        assert call_cli(*args, "--device", device, "--out", f"{i}.safetensors") == 0
    one, two = load_file("0.safetensors"), load_file("1.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.usefixtures("unchecked")
def test_learned_state_equals_that_of_the_cpu(tmp_path: Path) -> None:
    Path("text.txt").write_text("Once upon a time there was a little dog. He ran to the park. " * 6)
    for i, device in enumerate(DEVICES):
        args = ("compress", "stories260k", "text.txt", "--learn", "--device", device)
        assert call_cli(*args, "--out", f"{i}.safetensors") == 0
    one, two = load_file("0.safetensors"), load_file("1.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("method", [method for method in CLASS_METHODS if method != "joint"])
def test_classes_have_the_scores_of_the_cpu(method: str) -> None:
    stream, scores = streamed.tasks(), list[np.ndarray]()
    for device in DEVICES:
        model = streamed.attending().to(device)
        learner = build_learner(method, model, stream, FinetuneConfig(batch_size=4))
        learner.learn(stream.train[0])
        learner.learn(stream.train[1])
        scores.append(learner.score(stream.test[0], stream.seen_classes(0)))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-2, atol=1e-2)  # Adam divides by small gradients


@pytest.mark.parametrize("width", [16, 64])
def test_delta_rule_equals_that_of_the_cpu(width: int) -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(3, 2, 4, 64, width).unbind()
    k, rate = torch.nn.functional.normalize(k, dim=-1), torch.rand(2, 4, 64)
    results: list[tuple[torch.Tensor, ...]] = []
    for device in DEVICES:
        gates = Gates(torch.full_like(rate, 0.98).to(device), rate.to(device), erase=rate.to(device))
        state = torch.zeros(2, 4, width, width, device=device)
        S, _, Y = chunk_gated_delta_rule(state, k.to(device), v.to(device), q.to(device), gates)
        assert Y is not None
        results.append((S.cpu(), Y.cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["M3", "DGD"])
def test_optimizer_steps_equal_those_of_the_cpu(optimizer: str) -> None:
    weights: list[list[torch.Tensor]] = []
    for device in DEVICES:
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        model.to(device)
        stepper: torch.optim.Optimizer
        if optimizer == "M3":
            stepper = laconic.M3([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
        else:
            record_inputs(model)
            stepper = laconic.DGD(model.parameters(), lr=1e-2)
        for _ in range(3):
            stepper.zero_grad()
            model(torch.randn(16, 8, generator=generator).to(device)).square().mean().backward()
            stepper.step()
        weights.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-2, atol=1e-3)  # Newton-Schulz runs in bfloat16


@pytest.mark.parametrize("keys", [("train.parallel=ddp",), ("train.parallel=fsdp", "train.reshard=true")])
def test_one_rank_with_nccl(keys: tuple[str, ...], tmp_path: Path) -> None:
    Path("tiny.toml").write_text(TINY_RECIPE + '[distillation]\nhidden_scale = "none"\n')
    assert call_cli("train", "tiny.toml", "--out", "one", "--device", "cpu") == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "-m", "laconic", "train", "tiny.toml", "--out", "two", "--device", "cuda", *keys]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert losses(Path("two")) == pytest.approx(losses(Path("one")), rel=TOLERANCE)
    assert json.loads((Path("two") / "env.json").read_text())
