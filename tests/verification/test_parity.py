"""Parity runs: the error measure, the recorded stages, required inputs, low precision, and the report."""

import importlib.util
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import InputError, UsageError
from laconic.models import activations as models_activations
from laconic.models.config import WEIGHT_NAMES
from laconic.models.decoder import Decoder
from laconic.models.init import init_parameters
from laconic.verification.error import ErrorAccumulator, PredictionAgreement, valid_mask
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.inputs import REQUIRED_INPUTS, build_inputs
from laconic.verification.low_precision import ErrorRatios
from laconic.verification.parity import CaseComparison, ParityCase, StageResult, first_divergence, usual_suspects
from laconic.verification.report import ParityReport, format_number
from laconic.verification.run import open_reference, run_parity
from laconic.verification.tiny_models import ROPE_VARIANTS, build_tiny_decoder, tiny_configs
from laconic.verification.traces import LayerActivations, iterate_stages, sharpened_queries
from tests.conftest import needs
from tests.verification.caught import compare_stages, trace_stages
from tests.verification.test_reference import compare

FAMILIES = tuple(WEIGHT_NAMES)
ALL = "B T D"


def padded(decoder: Decoder, piece_sizes: tuple[int, ...] = ()) -> ParityCase:
    ids = torch.randint(0, decoder.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(3))
    return ParityCase("case", ids, valid=torch.arange(10) >= torch.tensor([[0], [3]]), piece_sizes=piece_sizes)


def accumulate(x: torch.Tensor, y: torch.Tensor, valid: torch.Tensor | None = None) -> ErrorAccumulator:
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
    built = ErrorAccumulator()
    built.add(x, y, valid_mask(ALL, y.shape, valid, 0), 0, ALL)
    return built


def test_error_is_relative_over_valid_positions():
    y, valid = torch.randn(2, 3, 4), torch.tensor([[True, True, True], [False, True, True]])
    x = y * 1.01
    x[1, 0] = torch.nan
    error = accumulate(x, y, valid)
    assert error.error == pytest.approx(0.01, rel=1e-5)
    assert error.cosine == pytest.approx(1.0)
    assert not error.is_bitwise_equal
    x = y.clone()
    x[0, 2, 1] += 5
    assert accumulate(x, y).index == (0, 2, 1)
    assert accumulate(x, y).max_abs == pytest.approx(5.0, rel=1e-6)
    assert accumulate(y.clone(), y).is_bitwise_equal


def test_error_of_tiny_references_is_absolute():
    y = torch.full((1, 2, 4), 1e-8)
    error = accumulate(y + 5e-8, y)
    assert error.is_tiny
    assert error.error == pytest.approx(5e-8, rel=1e-4)


def test_error_masked_scores_must_match():
    axes, valid, y = "B H T P", torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 1, 2, 2)
    y[0, 0, 0, 1] = -math.inf
    for x, expected in ((y.clone(), 0.0), (torch.ones(1, 1, 2, 2), math.inf)):
        error = ErrorAccumulator()
        error.add(x, y, valid_mask(axes, y.shape, valid, 0), 0, axes)
        assert (error.error, error.is_bitwise_equal, error.count) == (expected, expected == 0, 3 + (expected > 0))
    assert error.index == (0, 0, 0, 1)


def test_error_is_infinite_for_nan_and_other_shapes():
    y = torch.ones(1, 2, 2)
    assert accumulate(torch.full((1, 2, 2), math.nan), y).error == math.inf
    assert accumulate(torch.zeros(1, 2, 3), y).error == math.inf
    assert accumulate(torch.zeros(1, 2, 3), y).shape_note == "shape [1, 2, 3], reference [1, 2, 2]"


def test_prediction_agreement_kl_and_top1():
    valid, y = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[[2.0, 1.0], [0.0, 3.0]]])
    built = PredictionAgreement()
    built.add(y.flip(-1), y, valid)
    p = torch.softmax(y, -1)
    expected = (p * (p / p.flip(-1)).log()).sum(-1).mean()
    assert built.kl_and_top1[0] == pytest.approx(float(expected), rel=1e-6)
    assert built.kl_and_top1[1] == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_stages_equals_forward(family: str):
    decoder = build_tiny_decoder(family)
    case = padded(decoder)
    built = trace_stages(decoder, case)
    decoder.attn_implementation = "eager"
    assert case.ids is not None
    output = decoder(decoder.embed(case.ids), attention_mask=case.valid, capture=("hidden", "q_rot", "logits"))
    for name, expected in output.activations.items():
        mine = {"hidden.0": "embed", "hidden.1": "resid2.0", "hidden.2": "final_norm"}.get(name, name)
        assert torch.equal(built[mine], expected), name
    assert not any(block._forward_hooks for block in decoder.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_decoder_equals_double(family: str):
    decoder = build_tiny_decoder(family)
    case = padded(decoder, piece_sizes=(4, 1, 5))
    twin, wide = Float64Decoder.from_decoder(decoder), build_tiny_decoder(family).double()
    for one, other in zip(iterate_stages(twin, case), iterate_stages(wide, case), strict=True):
        assert one.activations.keys() == other.activations.keys()
        for name in one.activations:
            torch.testing.assert_close(one.activations[name], other.activations[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("piece_sizes", [(), (4, 1, 5)])
def test_compare_stages_decoder_with_itself(piece_sizes: tuple[int, ...]):
    decoder = build_tiny_decoder("qwen3")
    case = padded(decoder, piece_sizes)
    results = compare_stages(decoder, trace_stages(decoder, case), case)
    assert {f.verdict for f in results} == {"pass", "shown"}
    assert all(f.bitwise for f in results if f.kind == "local")
    assert first_divergence(results) is None


def test_first_divergence_stage_and_layer():
    decoder = build_tiny_decoder("llama")
    case = padded(decoder, piece_sizes=(6, 4))
    reference = trace_stages(decoder, case)
    with torch.no_grad():
        decoder.layers[1].submodule("up").weight[3, 4] += 0.01  # pyright: ignore[reportCallIssue]
    results = compare_stages(decoder, reference, case)
    first = first_divergence(results)
    assert first is not None
    assert (first.stage, first.layer, first.kind) == ("up", 1, "local")
    assert {f.stage for f in results if f.kind == "local" and f.verdict == "fail"} == {"up"}
    assert next(f for f in results if f.stage == "logits" and f.kind == "propagated").verdict == "fail"
    assert next(f for f in results if (f.stage, f.layer, f.kind) == ("gate", 1, "local")).bitwise


def test_compare_stages_missing_stage_is_not_run():
    decoder = build_tiny_decoder("llama")
    case = padded(decoder)
    reference = trace_stages(decoder, case)
    del reference["q_rot.1"]
    missing = {(f.stage, f.layer, f.note) for f in compare_stages(decoder, reference, case) if f.verdict == "not run"}
    assert ("q_rot", 1, "q_rot.1: not in the bundle: not run") in missing


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "opt"])
def test_sharpened_queries_restores_weights(family: str):
    decoder = build_tiny_decoder(family)
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    with sharpened_queries(decoder, 8.0):
        assert sum(not torch.equal(p, before[name]) for name, p in decoder.named_parameters()) > 0
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_build_inputs_builds_or_explains_every_input(family: str):
    built = build_inputs(build_tiny_decoder(family))
    covered = {name for case in built.cases for name in case.covered_inputs}
    assert covered | built.inapplicable.keys() == set(REQUIRED_INPUTS)
    assert not built.unavailable
    assert built.inapplicable.keys() == ({"I3", "I4", "I15"} if family in ("gpt2", "opt") else set())
    for case in built.cases:
        expected = case.position_ids[case.valid_mask]
        assert sum(size for _, size in case.pieces()) == case.shape[1]
        if not case.pass_positions and case.valid is not None:
            assert torch.equal(expected, (case.valid_mask.cumsum(1) - 1)[case.valid_mask])


def test_build_inputs_unavailable():
    plain = build_tiny_decoder("llama")
    init_parameters(dict(plain.named_parameters()), plain.config.initializer_range, 0)
    assert build_inputs(plain).unavailable == {"I6": "a norm weight is 1 or a bias is 0"}
    wide = Decoder(replace(tiny_configs("mistral")[""], sliding_windows=(4096, 4096)))
    assert "exceeds 512" in build_inputs(wide).unavailable["I1"]
    narrow = Decoder(replace(tiny_configs("mistral")[""], sliding_windows=(3, 3)))
    assert "I9" in build_inputs(narrow).unavailable


VARIED = [
    *[("llama", kind, ("I15", "I15 long")) for kind in ROPE_VARIANTS],
    *[(family, "window", ("I1", "I10")) for family in ("qwen2", "qwen3")],
    *[("llama", "biases", ("I8",)), ("qwen3", "biases", ("I8",)), ("qwen2", "tied", ("I8",))],
    *[("gpt2", "by layer", ("I8",)), ("gpt2", "long", ("I2",)), ("opt", "no bias", ("I8",)), ("opt", "long", ("I2",))],
]


@pytest.mark.medium
@pytest.mark.parametrize(("family", "variant", "names"), VARIED)
def test_tiny_variants_against_transformers(family: str, variant: str, names: tuple[str, ...]):
    needs("transformers")
    decoder = build_tiny_decoder(family, variant)
    with open_reference(decoder, None, torch.float32) as reference:
        for case in build_inputs(decoder).cases:
            if case.name in names:
                results = compare(decoder, reference, case)
                assert not [f for f in results if f.verdict not in ("pass", "shown")], case.name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_run_tiny_models_all_inputs_against_transformers(family: str):
    """The default run of the command line for a fixture: all inputs, all variants."""
    needs("transformers")
    report = run_parity(f"tiny:{family}")
    assert report.is_ok, report.summary()
    assert {i.name for i in report.inputs} == set(REQUIRED_INPUTS)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_ratio(dtype: str):
    needs("transformers")
    report = run_parity("tiny:gpt2", dtype=dtype, inputs="I1,I8,I10")
    assert report.is_ok, report.summary()
    logits = [f for f in report.results if f.stage == "logits"]
    assert all(f.kl is not None and f.error_in_floors <= 1.5 for f in logits)


def test_low_precision_detects_coarse_probabilities(monkeypatch: pytest.MonkeyPatch):
    from laconic.models.ops import attention_backends

    decoder = build_tiny_decoder("llama").bfloat16()
    right = attention_backends.attention_probabilities
    clean, ratios = build_tiny_decoder("llama").bfloat16(), ErrorRatios(decoder)

    class Reference:
        def iterate_stages(self, case: ParityCase):
            with monkeypatch.context() as patch:
                patch.setattr(attention_backends, "attention_probabilities", right)
                yield from list(iterate_stages(clean, case))

    def coarse(a: torch.Tensor) -> torch.Tensor:
        return (right(a) * 16).round() / 16 if a.dtype == torch.bfloat16 else right(a)

    monkeypatch.setattr(attention_backends, "attention_probabilities", coarse)
    ratios.add_case(padded(decoder), Reference())
    assert any(f.verdict == "fail" for f in ratios.results())


def test_run_selects_inputs():
    needs("transformers")
    report = run_parity("tiny:gpt2", inputs="I8")
    assert report.is_ok
    assert {f.case for f in report.results if not f.case.count("/")} == {"I8"}
    for wrong in ({"inputs": "I18"}, {"dtype": "float64"}):
        with pytest.raises(UsageError):
            run_parity("tiny:llama", **wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="tiny:phi3"):
        run_parity("tiny:phi3")


def test_run_without_reference_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    build_tiny_decoder("llama", "yarn").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = run_parity(str(tmp_path / "model"))
    assert not report.is_ok
    assert report.summary().startswith("Not run: transformers is not installed and no bundle is shipped")
    assert not run_parity("tiny:llama", reference="transformers").is_ok
    with pytest.raises(UsageError, match="expected transformers"):
        run_parity("tiny:llama", reference=str(tmp_path))
    empty = ParityReport("m", "r", "float32")
    assert not empty.is_ok
    assert "nothing was compared" in empty.summary()


def test_report_table_and_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = run_parity("tiny:llama", command="laconic verify parity tiny:llama")
    report.results.append(StageResult("I8", "k", 1, "local", math.inf, 1e-7, verdict="fail", index=(0, 1)))
    assert not report.is_ok
    assert "First divergence: k of layer 1, case I8" in report.summary()
    assert "Usual suspects: orientation" in report.summary()
    assert report.to_table().row_count == len(report.stage_order)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["schema"] == 3
    assert data["first_divergence"]["error"] == "inf"
    assert {"stages", "inputs", "versions", "backend", "command", "summary"} <= data.keys()
    assert "results" not in data
    assert [stage["stage"] for stage in data["stages"]] == list(report.stage_order)
    assert sum(stage["comparisons"] for stage in data["stages"]) == len(report.results)
    k = next(stage for stage in data["stages"] if stage["stage"] == "k")
    assert (k["verdict"], k["worst"]["local"]["case"], k["worst"]["local"]["error"]) == ("fail", "I8", "inf")
    assert len(report.to_json(all_results=True)["results"]) == len(report.results)


def test_report_counts_results_equal_to_the_bit():
    report = ParityReport("tiny:llama", "golden", "float32", seconds=1.0)
    report.results = [
        StageResult("a", "k", 0, "local", error, 1e-7, bitwise=error == 0, verdict="pass") for error in (0.0, 1e-8, 0.0)
    ]
    assert report.summary() == "No divergence: 3 comparisons over 1 cases, 2 equal to the bit, 1.0 s."


def test_report_names_suspects_for_every_stage():
    stages = (*models_activations.LAYER_ACTIVATIONS, *models_activations.MODEL_ACTIVATIONS)
    assert all(usual_suspects(stage.name) for stage in stages)


def test_report_lists_each_reason_once():
    report = ParityReport("m", "r", "float32", problems=["no bundle: not run"] * 2)
    report.results = [
        StageResult(case, "q", 1, "local", note="q.1: not in the bundle: not run") for case in ("I1", "I2")
    ]
    assert report.summary() == "Not run: no bundle; q.1: not in the bundle."


def test_report_format_number():
    assert [format_number(x) for x in (math.nan, math.inf, 0.5, 123456.0)] == ["–", "inf", "0.50", "1.2e+05"]


@pytest.mark.medium
def test_comparison_frees_each_layer_once_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build_tiny_decoder("llama")
    layers: list[weakref.WeakSet[torch.Tensor]] = []
    add_layer = CaseComparison.add_layer

    def counted(self: CaseComparison, *args: Any) -> None:
        runs = [arg for arg in args if isinstance(arg, LayerActivations)]
        reused = ("embed", "resid2", "x", "k_rot", "k_cache", "v", "v_cache")  # by the next layer or piece
        layers.append(weakref.WeakSet(x for run in runs for n, x in run.activations.items() if n not in reused))
        assert not any(layers[:-2])
        add_layer(self, *args)

    monkeypatch.setattr(CaseComparison, "add_layer", counted)
    case = ParityCase("case", torch.arange(8)[None])
    CaseComparison(decoder, case).run(iterate_stages(decoder, case), with_default_backend=True)
    assert len(layers) == len(decoder.layers) + 2 > 3
