"""The task `loss`: equal to transformers' loss, and the difference that int8 weights make."""

import json
from pathlib import Path

import pytest
import torch

import laconic
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import EvalRequest, RunResult
from laconic.evaluation.text_loss import TextLossSuite, load_excerpts
from laconic.training.signals import StopSignal
from tests.conftest import RunCli, needs

SECTIONS = [f"Once upon a time there was a {animal}. It had a big red ball and a friend. " * 12 for animal in "ab"]
TOKENS = 48
DATA = {"data": "animals"}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"book": "animals", "text": text}) + "\n" for text in [*SECTIONS, "short"]))
    return file


@pytest.mark.medium
def test_evaluate_loss_equals_transformers(texts: Path, run_cli: RunCli) -> None:
    needs("transformers")
    from transformers import LlamaForCausalLM

    flags = ("--tasks", "loss", "--documents", texts, "--tokens", TOKENS, "--format", "json")
    result = run_cli("evaluate", "stories260k", *flags, "--quantize", "int8", "--baseline", "stories260k")
    assert result.code == 0, result.err
    int8, float32 = json.loads(result.out)["results"]
    model = laconic.load("stories260k")
    windows = load_excerpts(model.tokenizer, str(texts), TOKENS, None)
    assert list(windows) == ["animals 1", "animals 2"]
    reference = LlamaForCausalLM.from_pretrained(str(model.decoder.source_folder), dtype=torch.float32)
    with torch.no_grad():
        rows = [torch.tensor([ids]) for ids in windows.values()]
        expected = sum(float(reference(ids, labels=ids).loss) for ids in rows) / len(rows)
    assert float32["nats"]["mean"] == pytest.approx(expected, abs=1e-5)
    assert float32["difference"] is None
    assert int8["run"] == "stories260k-int8-plain-0-shot"
    assert int8["difference"]["mean"] == pytest.approx(int8["nats"]["mean"] - expected, abs=1e-5)
    assert 0 < abs(int8["difference"]["mean"]) < 0.05


def test_losses_on_other_windows_are_not_compared() -> None:
    results = [
        RunResult(
            run, "loss", (0,), [[EvalItem("w", {"text": {"nats": 1.0, "correct": 0.5}})]], variant=DATA, source=ids
        )
        for run, ids in (("a", {"w": [1, 2]}), ("b", {"w": [1, 2]}), ("c", {"w": [3, 2]}))
    ]
    request = EvalRequest(["a", "c"], ["loss"], torch.device("cpu"), StopSignal(), baseline="b")
    report = TextLossSuite().report(request, {"loss": [results[0], results[2], results[1]]})
    assert [row["difference"] is None for row in report.data["results"]] == [False, True, True]
    assert [note.partition(":")[0] for note in report.data["notes"]] == ["c is not compared with b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--documents FILE"),
        (("--documents", "texts.jsonl", "--tokens", "9999"), "positions"),
        (("--documents", "texts.jsonl", "--tokens", "400"), "no text has 400 tokens"),
    ],
)
def test_evaluate_loss_refusals(texts: Path, run_cli: RunCli, flags: tuple[str, ...], message: str) -> None:
    flags = tuple(str(texts) if flag == texts.name else flag for flag in flags)
    result = run_cli("evaluate", "stories260k", "--tasks", "loss", *flags)
    assert result.code != 0
    assert message in result.err
    assert "Traceback" not in result.err
