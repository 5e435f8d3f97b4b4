"""A whole parity run: what is refused, what counts as not run, and what is told while it goes on."""

import pytest
import torch

from laconic.errors import UsageError
from laconic.verification import golden, hf_hooks
from laconic.verification.hf_reference import TransformersReference
from laconic.verification.run import run_parity
from laconic.verification.tiny_models import build_tiny_decoder
from tests.conftest import needs


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"inputs": "I1,I99"}, "--inputs I99: known are all, I1, I2"),
        ({"layers": "0,9"}, "--layers 9: known are all, last, 0 to 1"),
        ({"dtype": "int8"}, "dtype 'int8': known are float32"),
    ],
)
def test_settings_that_cannot_be_meant(asked, said):
    with pytest.raises(UsageError) as error:
        run_parity("tiny:llama", **asked)
    assert said in str(error.value)


def test_a_bundle_says_nothing_of_low_precision():
    report = run_parity(
        "tiny:llama", dtype="bfloat16", reference=str(golden.find_shipped_bundle(build_tiny_decoder("llama")))
    )
    assert not report.is_ok
    assert report.problems == ["a bundle holds float32: bfloat16 not run; use --reference transformers"]


def test_each_case_is_told_when_it_begins():
    needs("transformers")
    told: list[tuple[str, int, int]] = []
    assert run_parity("tiny:gpt2", inputs="I8,I10", on_case=lambda *event: told.append(event)).is_ok
    assert all(done < total for _, done, total in told)
    assert ["I8" in name for name, _, _ in told].count(True) >= 1
    assert len({name for name, _, _ in told}) == len(told) >= 2


def test_a_reference_that_attends_in_another_way_is_an_error(monkeypatch, tmp_path):
    """The adapter takes scores by itself, and asks that they give transformers' own probabilities."""
    needs("transformers")
    decoder = build_tiny_decoder("llama")
    decoder.save_pretrained(tmp_path / "model")
    reference = TransformersReference(tmp_path / "model", torch.float32)
    from laconic.verification.inputs import build_inputs

    case = build_inputs(decoder).cases[0]
    list(reference.iterate_stages(case))
    monkeypatch.setattr(hf_hooks.math, "inf", 3.0)
    with pytest.raises(RuntimeError, match="does not attend as this adapter believes; it needs an update"):
        list(reference.iterate_stages(case))
