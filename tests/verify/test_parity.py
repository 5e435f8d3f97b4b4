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

from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput, Usage
from laconic.core.families import NAMES
from laconic.verify import difference as difference_module
from laconic.verify.cases import INPUTS, inputs
from laconic.verify.difference import Difference, Predictions, visible
from laconic.verify.low import Ratios
from laconic.verify.page import page
from laconic.verify.parity import Case, Finding, compare, first_divergence, local, measure, trace
from laconic.verify.report import Report, show
from laconic.verify.run import against, run
from laconic.verify.tiny import ROPES, fixture, variants
from laconic.verify.traces import peaked, pulled, stream
from laconic.verify.twin import Widened
from tests.conftest import needs
from tests.verify.test_reference import compared

FAMILIES = tuple(NAMES)
ALL = "B T D"


def padded(decoder: Decoder, cuts: tuple[int, ...] = ()) -> Case:
    ids = torch.randint(0, decoder.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(3))
    return Case("case", ids, live=torch.arange(10) >= torch.tensor([[0], [3]]), cuts=cuts)


def difference(x: torch.Tensor, y: torch.Tensor, live: torch.Tensor | None = None) -> Difference:
    live = torch.ones(x.shape[:2], dtype=torch.bool) if live is None else live
    made = Difference()
    made.add(x, y, visible(ALL, y.shape, live, 0), 0, ALL)
    return made


def test_error_is_relative_over_live_slots():
    y, live = torch.randn(2, 3, 4), torch.tensor([[True, True, True], [False, True, True]])
    x = y * 1.01
    x[1, 0] = torch.nan
    found = difference(x, y, live)
    assert found.error == pytest.approx(0.01, rel=1e-5)
    assert found.cosine == pytest.approx(1.0)
    assert not found.equal
    x = y.clone()
    x[0, 2, 1] += 5
    assert difference(x, y).index == (0, 2, 1)
    assert difference(x, y).max_abs == pytest.approx(5.0, rel=1e-6)
    assert difference(y.clone(), y).equal


def test_large_stages_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch):
    y, axes = torch.randn(2, 3, 7, 5), "B H T P"
    x, live = y.clone(), torch.ones(2, 7, dtype=torch.bool)
    x[1, 2, 6, 4] += 9
    whole, parts = Difference(), Difference()
    whole.add(x, y, torch.ones_like(y, dtype=torch.bool), 3, axes)
    monkeypatch.setattr(difference_module, "LARGE", 40)
    parts.add(x, y, visible("B H T", y.shape[:3], live, 0)[..., None].expand(y.shape), 3, axes)
    assert parts.index == whole.index == (1, 2, 9, 4)
    assert parts.error == pytest.approx(whole.error)
    assert parts.count == whole.count == y.numel()


def test_faint_references_are_judged_absolutely():
    y = torch.full((1, 2, 4), 1e-8)
    found = difference(y + 5e-8, y)
    assert found.faint
    assert found.error == pytest.approx(5e-8, rel=1e-4)


def test_hidden_scores_must_be_hidden_on_both_sides():
    axes, live, y = "B H T P", torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 1, 2, 2)
    y[0, 0, 0, 1] = -math.inf
    for x, want in ((y.clone(), 0.0), (torch.ones(1, 1, 2, 2), math.inf)):
        found = Difference()
        found.add(x, y, visible(axes, y.shape, live, 0), 0, axes)
        assert (found.error, found.equal, found.count) == (want, want == 0, 3 + (want > 0))
    assert found.index == (0, 0, 0, 1)


def test_nan_and_shapes_are_infinitely_wrong():
    y = torch.ones(1, 2, 2)
    assert difference(torch.full((1, 2, 2), math.nan), y).error == math.inf
    assert difference(torch.zeros(1, 2, 3), y).error == math.inf
    assert difference(torch.zeros(1, 2, 3), y).shape == "shape [1, 2, 3], reference [1, 2, 2]"


def test_predictions():
    live, y = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[[2.0, 1.0], [0.0, 3.0]]])
    made = Predictions()
    made.add(y.flip(-1), y, live)
    p = torch.softmax(y, -1)
    want = (p * (p / p.flip(-1)).log()).sum(-1).mean()
    assert made.both[0] == pytest.approx(float(want), rel=1e-6)
    assert made.both[1] == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_is_the_forward_pass(family: str):
    decoder = fixture(family)
    case = padded(decoder)
    made = trace(decoder, case)
    decoder.attention = "eager"
    assert case.ids is not None
    seen = decoder(decoder.embed(case.ids), live=case.live, want=("hidden", "q_rot", "logits"))
    for name, want in seen.stages.items():
        mine = {"hidden.0": "embed", "hidden.1": "resid2.0", "hidden.2": "final_norm"}.get(name, name)
        assert torch.equal(made[mine], want), name
    assert not any(block._forward_hooks for block in decoder.blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_is_the_decoder_in_float64(family: str):
    decoder = fixture(family)
    case = padded(decoder, cuts=(4, 1, 5))
    twin, wide = Widened.of(decoder), fixture(family).double()
    for one, other in zip(stream(twin, case), stream(wide, case), strict=True):
        assert one.stages.keys() == other.stages.keys()
        for name in one.stages:
            torch.testing.assert_close(one.stages[name], other.stages[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(), (4, 1, 5)])
def test_a_decoder_is_its_own_reference(cuts: tuple[int, ...]):
    decoder = fixture("qwen3")
    case = padded(decoder, cuts)
    findings = compare(decoder, trace(decoder, case), case)
    assert {f.verdict for f in findings} == {"pass", "shown"}
    assert all(f.bitwise for f in findings if f.kind == "local")
    assert first_divergence(findings) is None


def test_the_first_wrong_stage_is_named_with_its_layer():
    decoder = fixture("llama")
    case = padded(decoder, cuts=(6, 4))
    floors, reference = measure(decoder, case), trace(decoder, case)
    with torch.no_grad():
        decoder.blocks[1].part("up").weight[3, 4] += 0.01
    findings = compare(decoder, reference, case, floors)
    found = first_divergence(findings)
    assert found is not None
    assert (found.stage, found.layer, found.kind) == ("up", 1, "local")
    assert {f.stage for f in findings if f.kind == "local" and f.verdict == "fail"} == {"up"}
    assert next(f for f in findings if f.stage == "logits" and f.kind == "propagated").verdict == "fail"
    assert torch.equal(local(decoder, "gate", 1, reference, case), reference["gate.1/1"])


def test_a_missing_stage_is_not_run():
    decoder = fixture("llama")
    case = padded(decoder)
    reference = trace(decoder, case)
    del reference["q_rot.1"]
    missing = {(f.stage, f.layer, f.note) for f in compare(decoder, reference, case) if f.verdict == "not run"}
    assert ("q_rot", 1, "q_rot.1: not in the bundle: not run") in missing


def test_an_unknown_stage_of_local():
    decoder = fixture("llama")
    case = padded(decoder)
    with pytest.raises(KeyError, match="no such stage at layer 7"):
        local(decoder, "q", 7, trace(decoder, case), case)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "opt"])
def test_peaked_gives_the_weights_back(family: str):
    decoder = fixture(family)
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    with peaked(decoder, 8.0):
        assert sum(not torch.equal(p, before[name]) for name, p in decoder.named_parameters()) > 0
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())


def test_an_abandoned_stream_ends_its_thread_and_errors_come_through():
    decoder = fixture("llama")
    parts = stream(decoder, padded(decoder))
    next(parts)
    parts.close()
    assert not any(block._forward_hooks for block in decoder.blocks)

    def broken(give: object) -> None:
        raise ValueError("from within")

    with pytest.raises(ValueError, match="from within"):
        list(pulled(broken))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_is_made_or_explained(family: str):
    made = inputs(fixture(family))
    covered = {name for case in made.cases for name in case.covers}
    assert covered | made.foreign.keys() == set(INPUTS)
    assert not made.missing
    assert made.foreign.keys() == ({"I3", "I4", "I15"} if family in ("gpt2", "opt") else set())
    for case in made.cases:
        want = case.places[case.alive]
        assert sum(size for _, size in case.pieces()) == case.shape[1]
        if not case.given and case.live is not None:
            assert torch.equal(want, (case.alive.cumsum(1) - 1)[case.alive])


def test_what_a_model_cannot_have_is_missing():
    plain = fixture("llama")
    plain.initialise([name for name, _ in plain.named_parameters()], 0)
    assert inputs(plain).missing == {"I6": "a norm's weight is 1 or a bias 0"}
    wide = Decoder(replace(variants("mistral")[""], windows=(4096, 4096)))
    assert "longer than 1,024" in inputs(wide).missing["I1"]
    narrow = Decoder(replace(variants("mistral")[""], windows=(3, 3)))
    assert "I9" in inputs(narrow).missing


VARIED = [
    *[("llama", kind, ("I15", "I15 long")) for kind in ROPES],
    *[(family, "window", ("I1", "I10")) for family in ("qwen2", "qwen3")],
    *[("llama", "biases", ("I8",)), ("qwen3", "biases", ("I8",)), ("qwen2", "tied", ("I8",))],
    *[("gpt2", "by layer", ("I8",)), ("gpt2", "long", ("I2",)), ("opt", "no bias", ("I8",)), ("opt", "long", ("I2",))],
]


@pytest.mark.parametrize(("family", "variant", "names"), VARIED)
def test_variants_against_transformers(family: str, variant: str, names: tuple[str, ...]):
    needs("transformers")
    decoder = fixture(family, variant)
    with against(decoder, None, torch.float32) as reference:
        for case in inputs(decoder).cases:
            if case.name in names:
                findings = compared(decoder, reference, case).findings()
                assert not [f for f in findings if f.verdict not in ("pass", "shown")], case.name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_against_transformers(family: str):
    """The default run of the command line for a fixture: all inputs, all variants."""
    needs("transformers")
    report = run(f"tiny:{family}")
    assert report.ok, report.sentence()
    assert {i.name for i in report.inputs} == set(INPUTS)


@pytest.mark.slow  # the README's own command is the same, and runs by default
def test_stories260k_all_inputs_within_half_a_minute(shared: Path):
    needs("transformers")
    began = time.monotonic()
    report = run(str(shared / "models" / "stories260k"))
    assert report.ok, report.sentence()
    assert time.monotonic() - began < 30
    assert {i.name: i.status for i in report.inputs} == {**dict.fromkeys(INPUTS, "made"), "I4": "covered"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_by_ratio(dtype: str):
    needs("transformers")
    report = run("tiny:gpt2", dtype=dtype, inputs="I1,I8,I10")
    assert report.ok, report.sentence()
    logits = [f for f in report.findings if f.stage == "logits"]
    assert all(f.kl is not None and f.floors <= 1.5 for f in logits)


def test_what_is_wrong_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch):
    from laconic.core import attention

    decoder = fixture("llama").bfloat16()
    right = attention.probabilities
    clean, ratios = fixture("llama").bfloat16(), Ratios(decoder)

    class Reference:
        def stream(self, case: Case):
            with monkeypatch.context() as patch:
                patch.setattr(attention, "probabilities", right)
                yield from list(stream(clean, case))

    def coarse(a: torch.Tensor) -> torch.Tensor:
        return (right(a) * 16).round() / 16 if a.dtype == torch.bfloat16 else right(a)

    monkeypatch.setattr(attention, "probabilities", coarse)
    ratios.add(padded(decoder), Reference())
    assert any(f.verdict == "fail" for f in ratios.findings())


def test_layers_and_inputs_are_chosen():
    needs("transformers")
    report = run("tiny:gpt2", inputs="I8", layers="last")
    assert report.ok
    assert {f.layer for f in report.findings if not f.case.count("/")} == {None, 1}
    for wrong in ({"inputs": "I18"}, {"layers": "2"}, {"dtype": "float64"}):
        with pytest.raises(Usage):
            run("tiny:llama", **wrong)
    with pytest.raises(BadInput, match="tiny:phi3: known are tiny:llama"):
        run("tiny:phi3")


def test_what_did_not_run_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fixture("llama", "yarn").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = run(str(tmp_path / "model"))
    assert not report.ok
    assert report.sentence().startswith("Not run: transformers is not installed and no bundle is shipped")
    assert not run("tiny:llama", reference="transformers").ok
    with pytest.raises(Usage, match="neither transformers, golden nor a folder"):
        run("tiny:llama", reference=str(tmp_path))
    empty = Report("m", "r", "float32")
    assert not empty.ok
    assert "nothing was compared" in empty.sentence()


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
    report = run("tiny:llama", command="laconic verify parity 'tiny:llama' --out <x>")
    report.findings.append(Finding("I8", "k", 1, "local", math.inf, 1e-7, verdict="fail", index=(0, 1)))
    report.cause = "<b>bias</b>"
    assert not report.ok
    assert "First divergence: k of layer 1, case I8" in report.sentence()
    assert report.table().row_count == len(report.order)
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["schema"] == 1
    assert plain["divergence"]["error"] == "inf"
    assert {"findings", "inputs", "versions", "backend", "command"} <= plain.keys()
    reader, text = Reader(), page(report)
    reader.feed(text)
    assert not reader.asked
    assert "script" not in reader.tags
    assert "url(" not in text
    assert "<b>bias</b>" in reader.text, "a cause is text, never markup"
    assert "laconic verify parity 'tiny:llama' --out <x>" in reader.text
    assert all(stage in reader.text for stage in report.order)


def test_what_did_not_run_is_said_once():
    report = Report("m", "r", "float32", problems=["no bundle: not run"] * 2)
    report.findings = [Finding(case, "q", 1, "local", note="q.1: not in the bundle: not run") for case in ("I1", "I2")]
    assert report.sentence() == "Not run: no bundle; q.1: not in the bundle."


def test_numbers_of_floors():
    assert [show(x) for x in (math.nan, math.inf, 0.5, 123456.0)] == ["–", "inf", "0.50", "1.2e+05"]
