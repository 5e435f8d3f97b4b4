"""`laconic verify parity MODEL`: run the required inputs through the model and a reference, and compare every stage."""

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from laconic.console import ProgressFn
from laconic.errors import UsageError, check_known
from laconic.models.checkpoints.weights import resolve_device
from laconic.models.decoder import Decoder
from laconic.verification import golden
from laconic.verification.hf_reference import TransformersReference, silence_warnings
from laconic.verification.inputs import REQUIRED_INPUTS, build_inputs
from laconic.verification.low_precision import ErrorRatios
from laconic.verification.parity import CaseComparison
from laconic.verification.report import InputStatus, ParityReport
from laconic.verification.tiny_models import TINY_PREFIX, build_tiny_decoder, tiny_configs
from laconic.verification.traces import ParityCase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GOLDEN_REFERENCE = "golden"
VARIANT_INPUTS = ("I1", "I2", "I8", "I10", "I14", "I15")  # for the variants of a tiny model; the plain one reads all


def run_parity(
    model: str,
    *,
    reference: str | None = None,
    dtype: str = "float32",
    inputs: str = "all",
    device: str = "cpu",
    command: str = "",
    on_case: ProgressFn = lambda name, done, total: None,
) -> ParityReport:
    """Compare a model with a reference implementation, stage by stage.

    transformers reads the same folder: a changed weight or config.json (epsilon, RoPE base) changes both sides and
    shows only against a bundle. A comparison that cannot be made is a line in the report, which then is not ok.

    Args:
        reference: "transformers"; "golden", the bundle shipped for these weights; or a bundle's folder. None:
            transformers if it is installed, else the shipped bundle.
        inputs: "all", or comma-separated names of required inputs.
        on_case: Called with (name, done, total) when a case starts.
    """
    check_known("dtype", dtype, DTYPES)
    names = parse_inputs(inputs)
    start = time.monotonic()
    with torch.no_grad():
        decoder, folder = load_parity_decoder(model, DTYPES[dtype], resolve_device(device))
        report = ParityReport.for_decoder(decoder, model=model, dtype=dtype, command=command)
        try:
            ParityRun(decoder, folder, report, names, inputs == "all", on_case).run(reference)
        except golden.NotRunError as problem:
            report.problems.append(str(problem))
    report.seconds = time.monotonic() - start
    return report


def parse_inputs(text: str) -> tuple[str, ...]:
    names = tuple(REQUIRED_INPUTS) if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in REQUIRED_INPUTS:
            raise UsageError(f"--inputs {name}: unknown; expected all, {', '.join(REQUIRED_INPUTS)}")
    return names


def load_parity_decoder(
    model: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Decoder, Path | None]:
    """Return the decoder in evaluation mode and its folder; a tiny model has none."""
    if model.startswith(TINY_PREFIX):
        return build_tiny_decoder(model.removeprefix(TINY_PREFIX)).to(device, dtype), None
    decoder = Decoder.from_pretrained(model, dtype=dtype, device=device)
    return decoder, decoder.source_folder


@contextmanager
def open_reference(decoder: Decoder, folder: Path | None, dtype: torch.dtype) -> Iterator[TransformersReference]:
    """Load the same checkpoint with transformers; a tiny model is saved for it first."""
    if folder is not None:
        yield TransformersReference(folder, dtype, decoder.device)
        return
    with tempfile.TemporaryDirectory(prefix="laconic-") as name:
        decoder.save_pretrained(Path(name) / "model")
        with silence_warnings():  # about RoPE settings that are far apart so that a mistake in them shows
            reference = TransformersReference(Path(name) / "model", dtype, decoder.device)
        yield reference


@dataclass
class ParityRun:
    """Comparisons of one model, whose results and problems go into `report`; `covered` are the inputs compared so far.

    `folder` is that of the checkpoint, None for a tiny model. `is_all_inputs` says that no input was named.
    """

    decoder: Decoder
    folder: Path | None
    report: ParityReport
    input_names: tuple[str, ...]
    is_all_inputs: bool
    on_case: ProgressFn
    covered: set[str] = field(default_factory=set)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.report.dtype]

    def run(self, reference: str | None) -> None:
        """Choose the reference and compare. Raises `NotRunError` without a reference."""
        is_installed = importlib.util.find_spec("transformers") is not None
        if reference == "transformers" or (reference is None and is_installed):
            if not is_installed:
                raise golden.NotRunError(
                    "transformers is not installed: not run; in a clone of laconic: pip install '.[hf]'"
                )
            self.run_transformers()
            return
        bundle = golden.find_shipped_bundle(self.decoder) if reference in (None, GOLDEN_REFERENCE) else Path(reference)
        if bundle is None:
            prefix = "" if reference else "transformers is not installed and "
            raise golden.NotRunError(f"{prefix}no bundle is shipped for these weights: not run")
        if not (bundle / golden.METADATA_FILE).is_file():
            raise UsageError(
                f"--reference {reference}: expected transformers, {GOLDEN_REFERENCE}, or a folder with "
                f"{golden.METADATA_FILE}"
            )
        self.run_bundle(golden.load_bundle(bundle))

    def run_transformers(self) -> None:
        """Compare with transformers; tiny models of the family cover the inputs that this model cannot have."""
        inputs = build_inputs(self.decoder)
        unavailable = {name: inputs.unavailable[name] for name in self.input_names if name in inputs.unavailable}
        with open_reference(self.decoder, self.folder, self.dtype) as reference:
            self.report.reference = reference.name
            self.compare_cases(self.decoder, reference, inputs.cases, self.input_names, "")
        family, is_tiny = self.decoder.config.family, self.folder is None
        for variant in tiny_configs(family):
            remaining = tuple(name for name in unavailable if name not in self.covered)
            if (variant and is_tiny) or remaining:
                self.run_tiny_model(variant, VARIANT_INPUTS if is_tiny else remaining, is_tiny)
        for name in self.input_names:
            if name in inputs.inapplicable:
                status = InputStatus(name, "inapplicable", inputs.inapplicable[name])
            elif name not in unavailable:
                status = InputStatus(name, "compared")
            elif name in self.covered:
                status = InputStatus(name, "covered", f"{unavailable[name]}; covered by {TINY_PREFIX}{family}")
            else:
                status = InputStatus(name, "not run", f"{unavailable[name]}; not run")
            self.report.inputs.append(status)

    def run_tiny_model(self, variant: str, names: tuple[str, ...], is_tiny: bool) -> None:
        decoder = build_tiny_decoder(self.decoder.config.family, variant).to(self.decoder.device, self.dtype)
        label = variant if is_tiny else f"{decoder.name_or_path} {variant}".rstrip()
        names = tuple(name for name in names if name in self.input_names)
        cases = build_inputs(decoder).cases
        if any(set(case.covered_inputs) & set(names) for case in cases):
            with open_reference(decoder, None, self.dtype) as reference:
                self.compare_cases(decoder, reference, cases, names, f"{label}/")

    def compare_cases(
        self,
        decoder: Decoder,
        reference: TransformersReference,
        cases: list[ParityCase],
        names: tuple[str, ...],
        label: str,
    ) -> None:
        """Compare the cases of the named inputs; `label` is the prefix of their names in the report."""
        selected = [replace(case, name=label + case.name) for case in cases if set(case.covered_inputs) & set(names)]
        ratios = ErrorRatios(decoder)
        for n, case in enumerate(selected):
            self.on_case(case.name, n, len(selected))
            self.covered.update(case.covered_inputs)
            if self.dtype == torch.float32:
                stages = reference.iterate_stages(case)
                self.report.results += CaseComparison(decoder, case).run(stages, with_default_backend=True)
            else:
                ratios.add_case(case, reference)
        self.report.results += [replace(result, case=label + result.case) for result in ratios.results()]

    def run_bundle(self, bundle: golden.GoldenBundle) -> None:
        self.report.reference = f"golden bundle of {bundle.metadata.reference}"
        if self.dtype != torch.float32:
            raise golden.NotRunError(f"a bundle is float32: {self.report.dtype} not run; use --reference transformers")
        if problem := golden.check_compatible(bundle, self.decoder):
            self.report.problems.append(problem)
        cases = [(entry, entry.input.build_case().to(self.decoder.device)) for entry in bundle.metadata.cases]
        contained = {name for _, case in cases for name in case.covered_inputs}
        inapplicable = build_inputs(self.decoder).inapplicable
        for name in self.input_names:
            if name in contained:
                status = InputStatus(name, "compared")
            elif name in inapplicable:
                status = InputStatus(name, "inapplicable", inapplicable[name])
            else:
                status = InputStatus(name, "not in bundle" if self.is_all_inputs else "not run", "not in the bundle")
            self.report.inputs.append(status)
        for entry, case in cases:
            if not set(case.covered_inputs) & set(self.input_names):
                continue
            if entry.kind == "small":
                stages = bundle.iterate_stages(entry, case, self.decoder)
                self.report.results += CaseComparison(self.decoder, case).run(stages, with_default_backend=True)
            else:
                self.report.results += bundle.compare_sampled(entry, case, self.decoder)
