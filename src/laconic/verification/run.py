"""`laconic verify parity MODEL`: the model and a reference read the required inputs, and every stage is compared."""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.decoder import Decoder
from laconic.verification import golden
from laconic.verification.causes import likely
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.hf_reference import TransformersReference
from laconic.verification.inputs import REQUIRED_INPUTS, build_inputs
from laconic.verification.low_precision import ErrorRatios
from laconic.verification.parity import CaseComparison
from laconic.verification.report import InputStatus, ParityReport
from laconic.verification.tiny_models import TINY_PREFIX, build_tiny_decoder, tiny_configs
from laconic.verification.traces import ParityCase, forward_arguments, iterate_stages, sharpened_queries

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CaseCallback = Callable[[str, int, int], None]
GOLDEN_REFERENCE = "golden"
VARIANT_INPUTS = ("I1", "I2", "I8", "I10", "I14", "I15")
"""What a variant of a tiny fixture is read with; the plain one reads everything."""


def run_parity(
    model: str,
    *,
    reference: str | None = None,
    dtype: str = "float32",
    inputs: str = "all",
    layers: str = "all",
    write_golden: str | Path | None = None,
    command: str = "",
    on_case: CaseCallback = lambda name, done, total: None,
) -> ParityReport:
    """Compares a folder, a hub name or `tiny:FAMILY` with `reference`: "transformers", "golden", or a bundle's folder.

    "golden" is the bundle shipped for these weights; None takes transformers if it is installed, else that bundle.
    transformers reads the same folder: a changed weight or config.json (epsilon, theta) is a change for both sides and
    shows only against a bundle. A comparison that cannot be made is a line in the report, which then is not `ok`.
    `on_case(name, done, total)` hears of each case begun. Raises `Usage` for settings that cannot be meant.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: known are {', '.join(DTYPES)}")
    asked = parse_inputs(inputs)
    began = time.monotonic()
    with torch.no_grad():
        decoder, folder = load_decoder(model, DTYPES[dtype])
        plan = ParityRun(model, decoder, folder, dtype, asked, inputs == "all", parse_layers(layers, decoder), on_case)
        report = ParityReport.for_decoder(decoder, model=model, reference="none", dtype=dtype, command=command)
        try:
            plan.run(report, reference)
            if write_golden is not None:
                with open_reference(decoder, folder, DTYPES[dtype]) as made:
                    golden.write_bundle(decoder, made, Path(write_golden))
        except golden.NotRunError as problem:
            report.problems.append(str(problem))
    report.seconds = time.monotonic() - began
    return report


def parse_inputs(text: str) -> tuple[str, ...]:
    """`all`, or names between commas."""
    names = tuple(REQUIRED_INPUTS) if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in REQUIRED_INPUTS:
            raise UsageError(f"--inputs {name}: known are all, {', '.join(REQUIRED_INPUTS)}")
    return names


def parse_layers(text: str, decoder: Decoder) -> frozenset[int] | None:
    """`all`, or numbers and `last` between commas."""
    L = len(decoder.layers)
    if text == "all":
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != "last" and not (name.isdecimal() and int(name) < L):
            raise UsageError(f"--layers {name}: known are all, last, 0 to {L - 1}")
    return frozenset(L - 1 if name == "last" else int(name) for name in names)


def load_decoder(model: str, dtype: torch.dtype) -> tuple[Decoder, Path | None]:
    """The decoder in evaluation, and the folder it came from; a fixture has none."""
    if model.startswith(TINY_PREFIX):
        return build_tiny_decoder(model.removeprefix(TINY_PREFIX)).to(dtype), None
    decoder = Decoder.from_pretrained(model, dtype=dtype)
    return decoder, decoder.source_folder


@contextmanager
def open_reference(decoder: Decoder, folder: Path | None, dtype: torch.dtype) -> Iterator[TransformersReference]:
    """The same checkpoint in transformers; a fixture is saved for it first."""
    if folder is not None:
        yield TransformersReference(folder, dtype)
        return
    with tempfile.TemporaryDirectory(prefix="laconic-") as name:
        decoder.save_pretrained(Path(name) / "model")
        yield TransformersReference(Path(name) / "model", dtype)


class ParityRun:
    """What was asked for, and the steps to it."""

    def __init__(
        self, model: str, decoder: Decoder, folder: Path | None, dtype: str, input_names: tuple[str, ...], is_all_inputs: bool,
        layers: frozenset[int] | None, on_case: CaseCallback,
    ) -> None:  # fmt: skip
        self.model, self.decoder, self.folder, self.dtype = model, decoder, folder, dtype
        self.input_names, self.is_all_inputs, self.layers, self.on_case = input_names, is_all_inputs, layers, on_case
        self.inputs_by_case: dict[str, tuple[str, ...]] = {}

    def covered_inputs(self, report: ParityReport) -> set[str]:
        """The required inputs that were read."""
        return {name for f in report.results for name in self.inputs_by_case.get(f.case, ())}

    def run(self, report: ParityReport, reference: str | None) -> None:
        """Chooses the reference and runs. Raises `NotRun` where there is none."""
        installed = importlib.util.find_spec("transformers") is not None
        if reference == "transformers" or (reference is None and installed):
            if not installed:
                raise golden.NotRunError("transformers is not installed: not run; pip install laconic[hf]")
            self.run_transformers(report)
            return
        bundle = golden.find_shipped_bundle(self.decoder) if reference in (None, GOLDEN_REFERENCE) else Path(reference)
        if bundle is None:
            also = "" if reference else "transformers is not installed and "
            raise golden.NotRunError(f"{also}no bundle is shipped for these weights: not run")
        if not (bundle / golden.METADATA_FILE).is_file():
            raise UsageError(
                f"--reference {reference}: neither transformers, {GOLDEN_REFERENCE} nor a folder with {golden.METADATA_FILE}"
            )
        self.run_bundle(report, golden.load_bundle(bundle))

    def run_transformers(self, report: ParityReport) -> None:
        """Against transformers: the model, then the fixtures that stand in for what it cannot have."""
        made = build_inputs(self.decoder)
        report.inputs = [
            InputStatus(name, "foreign", made.inapplicable[name])
            for name in self.input_names
            if name in made.inapplicable
        ]
        missing = {name: made.unavailable[name] for name in self.input_names if name in made.unavailable}
        with open_reference(self.decoder, self.folder, DTYPES[self.dtype]) as reference:
            report.reference = reference.name
            self.compare_cases(report, self.decoder, reference, made.cases, self.input_names, "")
        family = self.decoder.config.family
        tiny = self.folder is None
        for variant in tiny_configs(family):
            left = tuple(name for name in missing if name not in self.covered_inputs(report))
            if (variant and tiny) or left:
                self.run_fixture(report, variant, VARIANT_INPUTS if tiny else left, tiny)
        done = self.covered_inputs(report)
        own = [name for name in self.input_names if name not in made.inapplicable and name not in missing]
        report.inputs += [InputStatus(name, "made") for name in own]
        for name, why in missing.items():
            where = f"in {TINY_PREFIX}{family}" if name in done else "not run"
            report.inputs.append(InputStatus(name, "covered" if name in done else "not run", f"{why}; {where}"))
        report.inputs.sort(key=lambda i: self.input_names.index(i.name))

    def run_fixture(self, report: ParityReport, variant: str, names: tuple[str, ...], is_tiny: bool) -> None:
        """One fixture of the family."""
        decoder = build_tiny_decoder(self.decoder.config.family, variant).to(DTYPES[self.dtype])
        label = f"{variant}/" if is_tiny else f"{decoder.name_or_path}{' ' + variant if variant else ''}/"
        names = tuple(name for name in names if name in self.input_names)
        cases = build_inputs(decoder).cases
        if any(set(case.covered_inputs) & set(names) for case in cases):
            with open_reference(decoder, None, DTYPES[self.dtype]) as reference:
                self.compare_cases(report, decoder, reference, cases, names, label)

    def compare_cases(
        self,
        report: ParityReport,
        decoder: Decoder,
        reference: Any,
        cases: list[ParityCase],
        names: tuple[str, ...],
        label: str,
    ) -> None:
        """Those cases that are among the inputs named, each a line of work."""
        todo = [replace(case, name=label + case.name) for case in cases if set(case.covered_inputs) & set(names)]
        self.inputs_by_case |= {case.name: case.covered_inputs for case in todo}
        if self.dtype != "float32":
            ratios = ErrorRatios(decoder)
            for n, case in enumerate(todo):
                self.on_case(case.name, n, len(todo))
                ratios.add_case(case, reference)
            found = [replace(f, case=label + f.case) for f in ratios.results()]
            self.inputs_by_case |= {label + "all": tuple(name for case in todo for name in case.covered_inputs)}
            report.results += found
            return
        for n, case in enumerate(todo):
            self.on_case(case.name, n, len(todo))
            self.compare_case(report, decoder, lambda case=case: reference.stream(case), case)

    def compare_case(self, report: ParityReport, decoder: Decoder, reference_stages: Any, case: ParityCase) -> None:
        """One case, layer by layer beside the reference, our float64 run and the default back end."""
        mine = decoder is self.decoder
        twin = Float64Decoder.from_decoder(decoder)
        comparison = CaseComparison(decoder, case, None, twin, self.layers if mine else None)
        with sharpened_queries(decoder, case.query_scale):
            other = run_default_backend(decoder, case)
            for made, own, wide in zip(
                reference_stages(), iterate_stages(decoder, case), iterate_stages(twin, case), strict=True
            ):
                comparison.add_layer(made, own, wide, other)
            if comparison.evidence is not None and not report.cause:
                report.cause = likely(comparison.evidence)
        report.results += comparison.results()

    def run_bundle(self, report: ParityReport, bundle: golden.GoldenBundle) -> None:
        """Against a golden bundle: the inputs it has."""
        report.reference = bundle.name
        if self.dtype != "float32":
            raise golden.NotRunError(f"a bundle holds float32: {self.dtype} not run; use --reference transformers")
        if problem := golden.check_compatible(bundle, self.decoder):
            report.problems.append(problem)
        held = {name for case in bundle.cases for name in case.covered_inputs}
        foreign = build_inputs(self.decoder).inapplicable
        for name in self.input_names:
            absent = "foreign" if name in foreign else "unread" if self.is_all_inputs else "not run"
            why = foreign.get(name, "not in the bundle")
            report.inputs.append(InputStatus(name, "made") if name in held else InputStatus(name, absent, why))
        for case in bundle.cases:
            if not set(case.covered_inputs) & set(self.input_names):
                continue
            if bundle.is_complete(case):
                self.compare_case(
                    report, self.decoder, lambda case=case: bundle.iterate_stages(case, self.decoder), case
                )
            else:
                found = golden.compare_sampled(bundle, self.decoder, case)
                report.results += [f for f in found if self.layers is None or f.layer in (None, *self.layers)]


def run_default_backend(decoder: Decoder, case: ParityCase) -> dict[str, Tensor]:
    """What the decoder's own back end makes of a case, at `context` of every layer and at the logits."""
    made: dict[str, Tensor] = {}
    state, vectors, n = None, case.embed(decoder), len(case.pieces())
    for piece, (S, T) in enumerate(case.pieces()):
        seen = decoder(vectors[:, S : S + T], state, **forward_arguments(case, S, T), want=("context", "logits"))
        state = seen.state
        made |= {name if n == 1 else f"{name}/{piece}": t for name, t in seen.stages.items()}
    return made
