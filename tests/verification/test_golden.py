"""Golden bundles: the shipped ones pass without transformers; changed or missing numbers are failures."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from laconic.errors import BusyError, InputError
from laconic.models.config import WEIGHT_NAMES
from laconic.verification.golden import BUNDLE_DIR, METADATA_FILE, TENSOR_FILE, NotRunError, load_bundle
from laconic.verification.run import run_parity
from laconic.verification.tiny_models import build_tiny_decoder
from tests.conftest import needs
from tools import golden_bundle
from tools.golden_bundle import write_reference_bundle

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
def test_bundle_tiny_models_pass(family: str):
    report = run_parity(f"tiny:{family}")
    assert report.is_ok, report.summary()
    assert report.reference.startswith("golden bundle of transformers")
    assert {f.case for f in report.results} == {"small", "I1", "I2", "I10", "I14"}


@pytest.mark.medium
@pytest.mark.usefixtures("alone")
def test_bundle_stories260k_passes(shared: Path):
    report = run_parity(str(shared / "models" / "stories260k"))
    assert report.is_ok, report.summary()
    assert any(f.kind == "local" for f in report.results)


def test_bundle_size():
    for folder in BUNDLE_DIR.iterdir():
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1_500_000, folder.name


def test_bundle_requested_input_missing_is_a_failure():
    report = run_parity("tiny:llama", reference=str(LLAMA), inputs="I8,I16")
    assert not report.is_ok
    assert "I16: not in the bundle" in report.summary()


def test_bundle_is_float32():
    report = run_parity("tiny:llama", reference=str(LLAMA), dtype="bfloat16")
    assert not report.is_ok
    assert "bfloat16 not run" in report.summary()


def test_bundle_of_other_weights_is_compared(tmp_path: Path):
    decoder = build_tiny_decoder("llama")
    with torch.no_grad():
        for name in ("norm1", "norm2"):
            decoder.layers[1].submodule(name).weight.copy_(decoder.layers[0].submodule("norm2").weight)
    decoder.save_pretrained(tmp_path / "model")
    report = run_parity(str(tmp_path / "model"), reference=str(LLAMA))
    ours, theirs = decoder.fingerprint[:4], load_bundle(LLAMA).metadata.fingerprint[:4]
    assert not report.is_ok
    text = f"bundle is of weights {theirs}…, model is {ours}…. First divergence: norm1 of layer 1"
    assert report.summary().startswith(text)


def save_edited(folder: Path, **changes: Any) -> str:
    """The llama fixture on disk, with some lines of its config.json changed."""
    build_tiny_decoder("llama").save_pretrained(folder)
    path = folder / "config.json"
    text = json.loads(path.read_text())
    for name, value in changes.items():
        next(d for d in (text, *(v for v in text.values() if isinstance(v, dict))) if name in d)[name] = value
    path.write_text(json.dumps(text))
    return str(folder)


@pytest.mark.parametrize(("name", "value", "stage"), [("rms_norm_eps", 1e-3, "norm1"), ("rope_theta", 5e4, "q_rot")])
def test_bundle_detects_an_edited_config(tmp_path: Path, name: str, value: float, stage: str):
    report = run_parity(save_edited(tmp_path / "model", **{name: value}), reference="golden")
    assert not report.is_ok
    assert report.first_divergence is not None
    assert (report.first_divergence.stage, report.first_divergence.layer, report.problems) == (stage, 0, [])


def test_bundle_of_another_shape_is_not_run(tmp_path: Path):
    folder = save_edited(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    report = run_parity(folder, reference="golden")
    assert not report.is_ok
    assert report.summary() == "Not run: num_attention_heads is 8, the bundle's 4."


def test_bundle_golden_finds_the_shipped_one(tmp_path: Path):
    report = run_parity("tiny:llama", reference="golden")
    assert report.is_ok
    assert report.reference.startswith("golden bundle")
    assert report.missing_from_bundle == ["I5", "I7", "I9", "I11", "I12", "I13", "I15", "I16", "I17"]
    assert report.summary().endswith(f" Not in the bundle: {', '.join(report.missing_from_bundle)}.")
    assert report.to_json()["summary"] == report.summary()
    decoder = build_tiny_decoder("llama")
    with torch.no_grad():
        decoder.layers[0].submodule("up").weight[0, 0] += 1
    decoder.save_pretrained(tmp_path / "model")
    report = run_parity(str(tmp_path / "model"), reference="golden", inputs="I8,I8")
    assert report.summary() == "Not run: no bundle is shipped for these weights."
    assert not report.is_ok


def test_bundle_of_another_family_is_not_run(tmp_path: Path):
    report = run_parity("tiny:mistral", reference=str(LLAMA))
    assert not report.is_ok
    assert not report.results
    assert "bundle is of weights" in report.summary()


def test_bundle_detects_changed_numbers(copy: Path):
    tensors = load_file(copy / TENSOR_FILE)
    tensors["small/up.1"][0, 0, 0] += 1
    save_file(tensors, copy / TENSOR_FILE, metadata={"format": "pt"})
    with pytest.raises(NotRunError, match=r"up\.1 of case small has a different hash"):
        load_bundle(copy)
    assert not run_parity("tiny:llama", reference=str(copy)).is_ok


def test_bundle_detects_missing_numbers(copy: Path):
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
    with pytest.raises(InputError, match="format"):
        load_bundle(copy)


def test_bundle_long_case_detects_a_window(monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.medium
def test_write_bundle_round_trip(tmp_path: Path):
    needs("transformers")
    write_reference_bundle("tiny:opt", tmp_path / "new")
    again = run_parity("tiny:opt", reference=str(tmp_path / "new"))
    assert again.is_ok, again.summary()
    shipped = load_bundle(BUNDLE_DIR / "tiny-opt")
    fresh = load_bundle(tmp_path / "new")
    assert [case.input.name for case in shipped.metadata.cases] == [case.input.name for case in fresh.metadata.cases]
    with pytest.raises(BusyError, match="exists and is not empty"):
        write_reference_bundle("tiny:opt", tmp_path / "new")


def test_write_bundle_refuses_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needs("transformers")
    from laconic.models import block

    right = block.rms_norm
    monkeypatch.setattr(block, "rms_norm", lambda x, weight, eps: right(x, weight, 1e-2))
    with pytest.raises(NotRunError, match="no bundle is written"):
        write_reference_bundle("tiny:llama", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.medium
def test_write_bundle_samples_wide_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    needs("transformers")
    monkeypatch.setattr(golden_bundle, "MAX_WHOLE_BYTES", 1000)
    write_reference_bundle("tiny:opt", tmp_path / "new")
    assert all(entry.kind == "long" for entry in load_bundle(tmp_path / "new").metadata.cases)
    assert run_parity("tiny:opt", reference=str(tmp_path / "new")).is_ok


WRONG_METADATA: dict[str, tuple[tuple[Any, ...], Any]] = {
    "cases.0.kind": (("cases", 0, "kind"), "medium"),
    "ids is not 2 rows of 16": (("cases", 0, "input", "ids", 1), [1]),
    "cases.0.input.ids.0.0": (("cases", 0, "input", "ids", 0, 0), -5),
    "cuts .9. do not add up": (("cases", 0, "input", "cuts"), [9]),
    "its shape .99.": (("cases", 0, "stages", "embed", "shape"), [99]),
    "cases.0.stages.embed.floor": (("cases", 0, "stages", "embed", "floor"), "small"),
    "config.family": (("config", "family"), 1),
}


@pytest.mark.parametrize(("path", "value"), WRONG_METADATA.values(), ids=WRONG_METADATA)
def test_load_bundle_refuses_metadata(
    path: tuple[Any, ...], value: Any, copy: Path, request: pytest.FixtureRequest
) -> None:
    metadata = json.loads((copy / METADATA_FILE).read_text())
    parent = metadata
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    (copy / METADATA_FILE).write_text(json.dumps(metadata))
    with pytest.raises(InputError, match=request.node.callspec.id) as caught:
        load_bundle(copy)
    assert "\n" not in str(caught.value)
