"""Parity itself: what it measures, that it reads the decoder people read, and that what did not run does not pass."""

import importlib.util
import json
import math
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from laconic.errors import InputError, UsageError
from laconic.models.config import WEIGHT_NAMES
from laconic.models.decoder import Decoder
from laconic.verification import error as difference_module
from laconic.verification.error import ErrorAccumulator, PredictionAgreement, valid_mask
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.inputs import REQUIRED_INPUTS, build_inputs
from laconic.verification.low_precision import ErrorRatios
from laconic.verification.page import page
from laconic.verification.parity import (
    ParityCase,
    StageResult,
    compare_stages,
    first_divergence,
    local_stage,
    measure_floors,
    trace_stages,
)
from laconic.verification.report import ParityReport, format_number
from laconic.verification.run import open_reference, run_parity
from laconic.verification.tiny_models import ROPE_VARIANTS, build_tiny_decoder, tiny_configs
from laconic.verification.traces import iterate_stages, sharpened_queries, threaded_generator
from tests.conftest import needs
from tests.verify.test_reference import compared

FAMILIES = tuple(WEIGHT_NAMES)
ALL = "B T D"


def padded(decoder: Decoder, cuts: tuple[int, ...] = ()) -> ParityCase:
    ids = torch.randint(0, decoder.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(3))
    return ParityCase("case", ids, valid=torch.arange(10) >= torch.tensor([[0], [3]]), piece_sizes=cuts)


def difference(x: torch.Tensor, y: torch.Tensor, live: torch.Tensor | None = None) -> ErrorAccumulator:
    live = torch.ones(x.shape[:2], dtype=torch.bool) if live is None else live
    made = ErrorAccumulator()
    made.add(x, y, valid_mask(ALL, y.shape, live, 0), 0, ALL)
    return made


def test_error_is_relative_over_live_slots():
    y, live = torch.randn(2, 3, 4), torch.tensor([[True, True, True], [False, True, True]])
    x = y * 1.01
    x[1, 0] = torch.nan
    found = difference(x, y, live)
    assert found.error == pytest.approx(0.01, rel=1e-5)
    assert found.cosine == pytest.approx(1.0)
    assert not found.is_bitwise_equal
    x = y.clone()
    x[0, 2, 1] += 5
    assert difference(x, y).index == (0, 2, 1)
    assert difference(x, y).max_abs == pytest.approx(5.0, rel=1e-6)
    assert difference(y.clone(), y).is_bitwise_equal


def test_large_stages_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch):
    y, axes = torch.randn(2, 3, 7, 5), "B H T P"
    x, live = y.clone(), torch.ones(2, 7, dtype=torch.bool)
    x[1, 2, 6, 4] += 9
    whole, parts = ErrorAccumulator(), ErrorAccumulator()
    whole.add(x, y, torch.ones_like(y, dtype=torch.bool), 3, axes)
    monkeypatch.setattr(difference_module, "LARGE", 40)
    parts.add(x, y, valid_mask("B H T", y.shape[:3], live, 0)[..., None].expand(y.shape), 3, axes)
    assert parts.index == whole.index == (1, 2, 9, 4)
    assert parts.error == pytest.approx(whole.error)
    assert parts.count == whole.count == y.numel()


def test_faint_references_are_judged_absolutely():
    y = torch.full((1, 2, 4), 1e-8)
    found = difference(y + 5e-8, y)
    assert found.is_tiny
    assert found.error == pytest.approx(5e-8, rel=1e-4)


def test_hidden_scores_must_be_hidden_on_both_sides():
    axes, live, y = "B H T P", torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 1, 2, 2)
    y[0, 0, 0, 1] = -math.inf
    for x, want in ((y.clone(), 0.0), (torch.ones(1, 1, 2, 2), math.inf)):
        found = ErrorAccumulator()
        found.add(x, y, valid_mask(axes, y.shape, live, 0), 0, axes)
        assert (found.error, found.is_bitwise_equal, found.count) == (want, want == 0, 3 + (want > 0))
    assert found.index == (0, 0, 0, 1)


def test_nan_and_shapes_are_infinitely_wrong():
    y = torch.ones(1, 2, 2)
    assert difference(torch.full((1, 2, 2), math.nan), y).error == math.inf
    assert difference(torch.zeros(1, 2, 3), y).error == math.inf
    assert difference(torch.zeros(1, 2, 3), y).shape_note == "shape [1, 2, 3], reference [1, 2, 2]"


def test_predictions():
    live, y = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[[2.0, 1.0], [0.0, 3.0]]])
    made = PredictionAgreement()
    made.add(y.flip(-1), y, live)
    p = torch.softmax(y, -1)
    want = (p * (p / p.flip(-1)).log()).sum(-1).mean()
    assert made.kl_and_top1[0] == pytest.approx(float(want), rel=1e-6)
    assert made.kl_and_top1[1] == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_is_the_forward_pass(family: str):
    decoder = build_tiny_decoder(family)
    case = padded(decoder)
    made = trace_stages(decoder, case)
    decoder.attn_implementation = "eager"
    assert case.ids is not None
    seen = decoder(decoder.embed(case.ids), live=case.valid, want=("hidden", "q_rot", "logits"))
    for name, want in seen.activations.items():
        mine = {"hidden.0": "embed", "hidden.1": "resid2.0", "hidden.2": "final_norm"}.get(name, name)
        assert torch.equal(made[mine], want), name
    assert not any(block._forward_hooks for block in decoder.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_is_the_decoder_in_float64(family: str):
    decoder = build_tiny_decoder(family)
    case = padded(decoder, cuts=(4, 1, 5))
    twin, wide = Float64Decoder.from_decoder(decoder), build_tiny_decoder(family).double()
    for one, other in zip(iterate_stages(twin, case), iterate_stages(wide, case), strict=True):
        assert one.activations.keys() == other.activations.keys()
        for name in one.activations:
            torch.testing.assert_close(one.activations[name], other.activations[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(), (4, 1, 5)])
def test_a_decoder_is_its_own_reference(cuts: tuple[int, ...]):
    decoder = build_tiny_decoder("qwen3")
    case = padded(decoder, cuts)
    findings = compare_stages(decoder, trace_stages(decoder, case), case)
    assert {f.verdict for f in findings} == {"pass", "shown"}
    assert all(f.bitwise for f in findings if f.kind == "local")
    assert first_divergence(findings) is None


def test_the_first_wrong_stage_is_named_with_its_layer():
    decoder = build_tiny_decoder("llama")
    case = padded(decoder, cuts=(6, 4))
    floors, reference = measure_floors(decoder, case), trace_stages(decoder, case)
    with torch.no_grad():
        decoder.layers[1].part("up").weight[3, 4] += 0.01
    findings = compare_stages(decoder, reference, case, floors)
    found = first_divergence(findings)
    assert found is not None
    assert (found.stage, found.layer, found.kind) == ("up", 1, "local")
    assert {f.stage for f in findings if f.kind == "local" and f.verdict == "fail"} == {"up"}
    assert next(f for f in findings if f.stage == "logits" and f.kind == "propagated").verdict == "fail"
    assert torch.equal(local_stage(decoder, "gate", 1, reference, case), reference["gate.1/1"])


def test_a_missing_stage_is_not_run():
    decoder = build_tiny_decoder("llama")
    case = padded(decoder)
    reference = trace_stages(decoder, case)
    del reference["q_rot.1"]
    missing = {(f.stage, f.layer, f.note) for f in compare_stages(decoder, reference, case) if f.verdict == "not run"}
    assert ("q_rot", 1, "q_rot.1: not in the bundle: not run") in missing


def test_an_unknown_stage_of_local():
    decoder = build_tiny_decoder("llama")
    case = padded(decoder)
    with pytest.raises(KeyError, match="no such stage at layer 7"):
        local_stage(decoder, "q", 7, trace_stages(decoder, case), case)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "opt"])
def test_peaked_gives_the_weights_back(family: str):
    decoder = build_tiny_decoder(family)
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    with sharpened_queries(decoder, 8.0):
        assert sum(not torch.equal(p, before[name]) for name, p in decoder.named_parameters()) > 0
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())


def test_an_abandoned_stream_ends_its_thread_and_errors_come_through():
    decoder = build_tiny_decoder("llama")
    parts = iterate_stages(decoder, padded(decoder))
    next(parts)
    parts.close()
    assert not any(block._forward_hooks for block in decoder.layers)

    def broken(give: object) -> None:
        raise ValueError("from within")

    with pytest.raises(ValueError, match="from within"):
        list(threaded_generator(broken))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_is_made_or_explained(family: str):
    made = build_inputs(build_tiny_decoder(family))
    covered = {name for case in made.cases for name in case.covered_inputs}
    assert covered | made.inapplicable.keys() == set(REQUIRED_INPUTS)
    assert not made.unavailable
    assert made.inapplicable.keys() == ({"I3", "I4", "I15"} if family in ("gpt2", "opt") else set())
    for case in made.cases:
        want = case.position_ids[case.valid_mask]
        assert sum(size for _, size in case.pieces()) == case.shape[1]
        if not case.pass_positions and case.valid is not None:
            assert torch.equal(want, (case.valid_mask.cumsum(1) - 1)[case.valid_mask])


def test_what_a_model_cannot_have_is_missing():
    plain = build_tiny_decoder("llama")
    plain.init_parameters([name for name, _ in plain.named_parameters()], 0)
    assert build_inputs(plain).unavailable == {"I6": "a norm's weight is 1 or a bias 0"}
    wide = Decoder(replace(tiny_configs("mistral")[""], windows=(4096, 4096)))
    assert "longer than 1,024" in build_inputs(wide).unavailable["I1"]
    narrow = Decoder(replace(tiny_configs("mistral")[""], windows=(3, 3)))
    assert "I9" in build_inputs(narrow).unavailable


VARIED = [
    *[("llama", kind, ("I15", "I15 long")) for kind in ROPE_VARIANTS],
    *[(family, "window", ("I1", "I10")) for family in ("qwen2", "qwen3")],
    *[("llama", "biases", ("I8",)), ("qwen3", "biases", ("I8",)), ("qwen2", "tied", ("I8",))],
    *[("gpt2", "by layer", ("I8",)), ("gpt2", "long", ("I2",)), ("opt", "no bias", ("I8",)), ("opt", "long", ("I2",))],
]


@pytest.mark.parametrize(("family", "variant", "names"), VARIED)
def test_variants_against_transformers(family: str, variant: str, names: tuple[str, ...]):
    needs("transformers")
    decoder = build_tiny_decoder(family, variant)
    with open_reference(decoder, None, torch.float32) as reference:
        for case in build_inputs(decoder).cases:
            if case.name in names:
                findings = compared(decoder, reference, case).results()
                assert not [f for f in findings if f.verdict not in ("pass", "shown")], case.name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_against_transformers(family: str):
    """The default run of the command line for a fixture: all inputs, all variants."""
    needs("transformers")
    report = run_parity(f"tiny:{family}")
    assert report.is_ok, report.summary()
    assert {i.name for i in report.inputs} == set(REQUIRED_INPUTS)


@pytest.mark.slow  # the README's own command is the same, and runs by default
def test_stories260k_all_inputs_within_half_a_minute(shared: Path):
    needs("transformers")
    began = time.monotonic()
    report = run_parity(str(shared / "models" / "stories260k"))
    assert report.is_ok, report.summary()
    assert time.monotonic() - began < 30
    assert {i.name: i.status for i in report.inputs} == {**dict.fromkeys(REQUIRED_INPUTS, "made"), "I4": "covered"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_by_ratio(dtype: str):
    needs("transformers")
    report = run_parity("tiny:gpt2", dtype=dtype, inputs="I1,I8,I10")
    assert report.is_ok, report.summary()
    logits = [f for f in report.results if f.stage == "logits"]
    assert all(f.kl is not None and f.error_in_floors <= 1.5 for f in logits)


def test_what_is_wrong_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch):
    from laconic.models import attention

    decoder = build_tiny_decoder("llama").bfloat16()
    right = attention.attention_probabilities
    clean, ratios = build_tiny_decoder("llama").bfloat16(), ErrorRatios(decoder)

    class Reference:
        def stream(self, case: ParityCase):
            with monkeypatch.context() as patch:
                patch.setattr(attention, "attention_probabilities", right)
                yield from list(iterate_stages(clean, case))

    def coarse(a: torch.Tensor) -> torch.Tensor:
        return (right(a) * 16).round() / 16 if a.dtype == torch.bfloat16 else right(a)

    monkeypatch.setattr(attention, "attention_probabilities", coarse)
    ratios.add_case(padded(decoder), Reference())
    assert any(f.verdict == "fail" for f in ratios.results())


def test_layers_and_inputs_are_chosen():
    needs("transformers")
    report = run_parity("tiny:gpt2", inputs="I8", layers="last")
    assert report.is_ok
    assert {f.layer for f in report.results if not f.case.count("/")} == {None, 1}
    for wrong in ({"inputs": "I18"}, {"layers": "2"}, {"dtype": "float64"}):
        with pytest.raises(UsageError):
            run_parity("tiny:llama", **wrong)
    with pytest.raises(InputError, match="tiny:phi3: known are tiny:llama"):
        run_parity("tiny:phi3")


def test_what_did_not_run_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    build_tiny_decoder("llama", "yarn").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = run_parity(str(tmp_path / "model"))
    assert not report.is_ok
    assert report.summary().startswith("Not run: transformers is not installed and no bundle is shipped")
    assert not run_parity("tiny:llama", reference="transformers").is_ok
    with pytest.raises(UsageError, match="neither transformers, golden nor a folder"):
        run_parity("tiny:llama", reference=str(tmp_path))
    empty = ParityReport("m", "r", "float32")
    assert not empty.is_ok
    assert "nothing was compared" in empty.summary()


class Reader(HTMLParser):
    """Collects what a page asks for and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_as_table_json_and_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = run_parity("tiny:llama", command="laconic verify parity 'tiny:llama' --out <x>")
    report.results.append(StageResult("I8", "k", 1, "local", math.inf, 1e-7, verdict="fail", index=(0, 1)))
    report.cause = "<b>bias</b>"
    assert not report.is_ok
    assert "First divergence: k of layer 1, case I8" in report.summary()
    assert report.to_table().row_count == len(report.stage_order)
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["schema"] == 1
    assert plain["divergence"]["error"] == "inf"
    assert {"findings", "inputs", "versions", "backend", "command"} <= plain.keys()
    reader, text = Reader(), page(report)
    reader.mlp_forward(text)
    assert not reader.asked
    assert "script" not in reader.tags
    assert "url(" not in text
    assert "<b>bias</b>" in reader.text, "a cause is text, never markup"
    assert "laconic verify parity 'tiny:llama' --out <x>" in reader.text
    assert all(stage in reader.text for stage in report.stage_order)


def test_what_did_not_run_is_said_once():
    report = ParityReport("m", "r", "float32", problems=["no bundle: not run"] * 2)
    report.results = [
        StageResult(case, "q", 1, "local", note="q.1: not in the bundle: not run") for case in ("I1", "I2")
    ]
    assert report.summary() == "Not run: no bundle; q.1: not in the bundle."


def test_numbers_of_floors():
    assert [format_number(x) for x in (math.nan, math.inf, 0.5, 123456.0)] == ["–", "inf", "0.50", "1.2e+05"]
