"""Golden bundles: what is shipped passes without transformers, and whatever is not what was written is a failure."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from laconic.errors import BusyError
from laconic.models.config import WEIGHT_NAMES
from laconic.verification import golden
from laconic.verification.golden import BUNDLE_DIR, METADATA_FILE, TENSOR_FILE, NotRunError, load_bundle
from laconic.verification.page import page
from laconic.verification.run import run_parity
from laconic.verification.tiny_models import build_tiny_decoder
from tests.conftest import needs

LLAMA = BUNDLE_DIR / "tiny-llama"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A bundle that may be changed."""
    return Path(shutil.copytree(LLAMA, tmp_path / "bundle"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", tuple(WEIGHT_NAMES))
def test_the_fixtures_pass_against_what_is_shipped(family: str):
    report = run_parity(f"tiny:{family}")
    assert report.is_ok, report.summary()
    assert report.reference.startswith("golden bundle of transformers")
    assert {f.case for f in report.results} == {"small", "I1", "I2", "I10", "I14"}


@pytest.mark.usefixtures("alone")
def test_stories260k_passes_against_what_is_shipped(shared: Path):
    report = run_parity(str(shared / "models" / "stories260k"))
    assert report.is_ok, report.summary()
    assert any(f.kind == "local" for f in report.results)


def test_a_bundle_is_small():
    for folder in BUNDLE_DIR.iterdir():
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1_500_000, folder.name


def test_an_input_that_is_not_in_the_bundle_is_not_run():
    report = run_parity("tiny:llama", reference=str(LLAMA), inputs="I8,I16")
    assert not report.is_ok
    assert "I16: not in the bundle" in report.summary()


def test_low_precision_is_not_in_a_bundle():
    report = run_parity("tiny:llama", reference=str(LLAMA), dtype="bfloat16")
    assert not report.is_ok
    assert "bfloat16 not run" in report.summary()


def test_other_weights_are_named_and_still_compared(tmp_path: Path):
    decoder = build_tiny_decoder("llama")
    with torch.no_grad():
        for name in ("norm1", "norm2"):
            decoder.layers[1].part(name).weight.copy_(decoder.layers[0].part("norm2").weight)
    decoder.save_pretrained(tmp_path / "model")
    report = run_parity(str(tmp_path / "model"), reference=str(LLAMA))
    ours, theirs = decoder.fingerprint[:4], load_bundle(LLAMA).metadata["fingerprint"][:4]
    assert not report.is_ok
    said = f"bundle is of weights {theirs}…, model is {ours}…. First divergence: norm1 of layer 1"
    assert report.summary().startswith(said)


def edited(folder: Path, **changes: Any) -> str:
    """The llama fixture on disk, with some lines of its config.json changed."""
    build_tiny_decoder("llama").save_pretrained(folder)
    path = folder / "config.json"
    said = json.loads(path.read_text())
    for name, value in changes.items():
        next(d for d in (said, *(v for v in said.values() if isinstance(v, dict))) if name in d)[name] = value
    path.write_text(json.dumps(said))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "value", "stage", "cause"),
    [
        ("rms_norm_eps", 1e-3, "norm1", "epsilon: 0.001, the reference's 1.0"),
        ("rope_theta", 5e4, "q_rot", "base: 50000, the reference's 10000"),
    ],
)
def test_an_edited_config_shows_against_the_shipped_bundle(
    tmp_path: Path, name: str, value: float, stage: str, cause: str
):
    report = run_parity(edited(tmp_path / "model", **{name: value}), reference="golden")
    assert not report.is_ok
    assert report.first_divergence is not None
    assert (report.first_divergence.stage, report.first_divergence.layer, report.problems) == (stage, 0, [])
    assert report.cause.startswith(cause)


def test_equal_weights_of_another_shape_are_not_run(tmp_path: Path):
    folder = edited(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    report = run_parity(folder, reference="golden")
    assert not report.is_ok
    assert report.summary() == "Not run: num_attention_heads is 8, the bundle's 4."


def test_golden_is_the_shipped_bundle(tmp_path: Path):
    report = run_parity("tiny:llama", reference="golden")
    assert report.is_ok
    assert report.reference.startswith("golden bundle")
    assert report.missing_from_bundle == ["I5", "I7", "I9", "I11", "I12", "I13", "I15", "I16", "I17"]
    assert report.summary().endswith(f" Not in the bundle: {', '.join(report.missing_from_bundle)}.")
    assert report.to_json()["sentence"] == report.summary()
    assert '"soft">unread' in page(report)
    assert "every input in the bundle passed" in page(report)
    decoder = build_tiny_decoder("llama")
    with torch.no_grad():
        decoder.layers[0].part("up").weight[0, 0] += 1
    decoder.save_pretrained(tmp_path / "model")
    report = run_parity(str(tmp_path / "model"), reference="golden", inputs="I8,I8")
    assert report.summary() == "Not run: no bundle is shipped for these weights."
    assert not report.is_ok


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda block: exchanged(block.part("norm1").weight, block.part("norm2").weight), "norm weights exchanged: "),
        (lambda block: block.part("up").weight[3, 4].add_(0.01), "weights: row 3 of up_proj in layer 1 differs"),
    ],
)
def test_changed_weights_are_named_against_a_bundle(tmp_path: Path, change: Callable[[Any], Any], cause: str):
    decoder = build_tiny_decoder("llama")
    with torch.no_grad():
        change(decoder.layers[1])
    decoder.save_pretrained(tmp_path / "model")
    report = run_parity(str(tmp_path / "model"), reference=str(LLAMA))
    assert not report.is_ok
    assert report.cause.startswith(cause)


def exchanged(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def test_another_shape_is_not_run(tmp_path: Path):
    report = run_parity("tiny:mistral", reference=str(LLAMA))
    assert not report.is_ok
    assert not report.results
    assert "bundle is of weights" in report.summary()


def test_changed_numbers_are_found(copy: Path):
    tensors = load_file(copy / TENSOR_FILE)
    tensors["small/up.1"][0, 0, 0] += 1
    save_file(tensors, copy / TENSOR_FILE, metadata={"format": "pt"})
    with pytest.raises(NotRunError, match=r"up\.1 of case small has another hash; fetch it again"):
        load_bundle(copy)
    assert not run_parity("tiny:llama", reference=str(copy)).is_ok


def test_missing_numbers_and_stages_are_found(copy: Path):
    about = json.loads((copy / METADATA_FILE).read_text())
    stages = about["cases"][0]["stages"]
    del stages["q_rot.1"], about["cases"][1]["stages"]["mid.0"]
    (copy / METADATA_FILE).write_text(json.dumps(about))
    report = run_parity("tiny:llama", reference=str(copy))
    notes = {f.note for f in report.results if f.verdict == "not run"}
    assert {"q_rot.1: not in the bundle: not run", "mid.0: not in the bundle: not run"} <= notes
    assert not report.is_ok
    about["cases"][0]["stages"]["q.1"]["at"] = "nowhere"
    (copy / METADATA_FILE).write_text(json.dumps(about))
    with pytest.raises(NotRunError, match=r"q\.1: not in the bundle: not run"):
        load_bundle(copy)
    (copy / METADATA_FILE).write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(NotRunError, match="format 2, known is 1"):
        load_bundle(copy)


def test_a_long_case_finds_what_the_small_one_cannot(monkeypatch: pytest.MonkeyPatch):
    """A window of 128 where there is none shows beyond 128 slots only."""
    from laconic.models import attention

    right = attention.visibility_mask
    monkeypatch.setattr(attention, "visibility_mask", lambda live, S, window: right(live, S, window or 128))
    report = run_parity("tiny:llama", reference=str(LLAMA))
    bad = {(f.case, f.stage) for f in report.results if f.verdict == "fail"}
    assert ("I1", "probs") in bad
    assert {case for case, _ in bad} == {"I1"}
    assert report.first_divergence is not None
    assert report.first_divergence.case == "I1"


def test_written_and_read(tmp_path: Path):
    needs("transformers")
    report = run_parity("tiny:opt", inputs="I17", write_golden=tmp_path / "new")
    assert report.is_ok
    again = run_parity("tiny:opt", reference=str(tmp_path / "new"))
    assert again.is_ok, again.summary()
    kept = load_bundle(BUNDLE_DIR / "tiny-opt")
    fresh = load_bundle(tmp_path / "new")
    assert [case.name for case in kept.cases] == [case.name for case in fresh.cases]
    with pytest.raises(BusyError, match="exists and is not empty"):
        run_parity("tiny:opt", inputs="I17", write_golden=tmp_path / "new")


def test_no_bundle_is_written_where_we_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needs("transformers")
    from laconic.models import block

    right = block.rms_norm
    monkeypatch.setattr(block, "rms_norm", lambda x, weight, eps: right(x, weight, 1e-2))
    report = run_parity("tiny:llama", inputs="I17", write_golden=tmp_path / "new")
    assert not report.is_ok
    assert any("no bundle is written" in problem for problem in report.problems)
    assert not (tmp_path / "new").exists()


def test_a_model_too_wide_is_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    needs("transformers")
    monkeypatch.setattr(golden, "MAX_WHOLE_BYTES", 1000)
    report = run_parity("tiny:opt", inputs="I17", write_golden=tmp_path / "new")
    assert report.is_ok
    assert all(entry["kind"] == "long" for entry in load_bundle(tmp_path / "new").metadata["cases"])
    assert run_parity("tiny:opt", reference=str(tmp_path / "new")).is_ok
