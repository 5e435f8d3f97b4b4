"""A whole parity run: progress, and a reference that no longer matches the adapter."""

from pathlib import Path

import pytest
import torch

from laconic.verification import hf_hooks
from laconic.verification.hf_reference import TransformersReference
from laconic.verification.inputs import build_inputs
from laconic.verification.run import run_parity
from laconic.verification.tiny_models import build_tiny_decoder
from tests.conftest import needs


@pytest.mark.medium
def test_run_reports_each_case() -> None:
    needs("transformers")
    events: list[tuple[str, int, int]] = []
    assert run_parity("tiny:gpt2", inputs="I8,I10", on_case=lambda *event: events.append(event)).is_ok
    assert all(done < total for _, done, total in events)
    assert ["I8" in name for name, _, _ in events].count(True) >= 1
    assert len({name for name, _, _ in events}) == len(events) >= 2


def test_run_detects_a_reference_with_other_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The adapter computes scores itself, and checks that they give transformers' probabilities."""
    needs("transformers")
    decoder = build_tiny_decoder("llama")
    decoder.save_pretrained(tmp_path / "model")
    reference = TransformersReference(tmp_path / "model", torch.float32)
    case = build_inputs(decoder).cases[0]
    list(reference.iterate_stages(case))
    monkeypatch.setattr(hf_hooks.math, "inf", 3.0)
    with pytest.raises(RuntimeError, match="needs an update"):
        list(reference.iterate_stages(case))
