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

from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.verify import golden
from laconic.verify.cases import INPUTS, inputs
from laconic.verify.causes import likely
from laconic.verify.low import Ratios
from laconic.verify.parity import Comparison
from laconic.verify.reference import Transformers
from laconic.verify.report import Input, Report
from laconic.verify.tiny import PREFIX, fixture, variants
from laconic.verify.traces import Case, arguments, peaked, stream
from laconic.verify.twin import Widened

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OnCase = Callable[[str, int, int], None]
GOLDEN = "golden"
VARIED = ("I1", "I2", "I8", "I10", "I14", "I15")
"""What a variant of a tiny fixture is read with; the plain one reads everything."""


def run(
    model: str,
    *,
    reference: str | None = None,
    dtype: str = "float32",
    inputs: str = "all",
    layers: str = "all",
    write_golden: str | Path | None = None,
    command: str = "",
    on_case: OnCase = lambda name, done, total: None,
) -> Report:
    """Compares a folder, a hub name or `tiny:FAMILY` with `reference`: "transformers", "golden", or a bundle's folder.

    "golden" is the bundle shipped for these weights; None takes transformers if it is installed, else that bundle.
    transformers reads the same folder: a changed weight or config.json (epsilon, theta) is a change for both sides and
    shows only against a bundle. A comparison that cannot be made is a line in the report, which then is not `ok`.
    `on_case(name, done, total)` hears of each case begun. Raises `Usage` for settings that cannot be meant.
    """
    if dtype not in DTYPES:
        raise Usage(f"dtype {dtype!r}: known are {', '.join(DTYPES)}")
    asked = chosen(inputs)
    began = time.monotonic()
    with torch.no_grad():
        decoder, folder = loaded(model, DTYPES[dtype])
        plan = Plan(model, decoder, folder, dtype, asked, inputs == "all", layers_of(layers, decoder), on_case)
        report = Report.of(decoder, model=model, reference="none", dtype=dtype, command=command)
        try:
            plan.into(report, reference)
            if write_golden is not None:
                with against(decoder, folder, DTYPES[dtype]) as made:
                    golden.write_bundle(decoder, made, Path(write_golden))
        except golden.NotRun as problem:
            report.problems.append(str(problem))
    report.seconds = time.monotonic() - began
    return report


def chosen(text: str) -> tuple[str, ...]:
    """`all`, or names between commas."""
    names = tuple(INPUTS) if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in INPUTS:
            raise Usage(f"--inputs {name}: known are all, {', '.join(INPUTS)}")
    return names


def layers_of(text: str, decoder: Decoder) -> frozenset[int] | None:
    """`all`, or numbers and `last` between commas."""
    L = len(decoder.blocks)
    if text == "all":
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != "last" and not (name.isdecimal() and int(name) < L):
            raise Usage(f"--layers {name}: known are all, last, 0 to {L - 1}")
    return frozenset(L - 1 if name == "last" else int(name) for name in names)


def loaded(model: str, dtype: torch.dtype) -> tuple[Decoder, Path | None]:
    """The decoder in evaluation, and the folder it came from; a fixture has none."""
    if model.startswith(PREFIX):
        return fixture(model.removeprefix(PREFIX)).to(dtype), None
    decoder = Decoder.from_pretrained(model, dtype=dtype)
    return decoder, decoder.folder


@contextmanager
def against(decoder: Decoder, folder: Path | None, dtype: torch.dtype) -> Iterator[Transformers]:
    """The same checkpoint in transformers; a fixture is saved for it first."""
    if folder is not None:
        yield Transformers(folder, dtype)
        return
    with tempfile.TemporaryDirectory(prefix="laconic-") as name:
        decoder.save_pretrained(Path(name) / "model")
        yield Transformers(Path(name) / "model", dtype)


class Plan:
    """What was asked for, and the steps to it."""

    def __init__(
        self, model: str, decoder: Decoder, folder: Path | None, dtype: str, asked: tuple[str, ...], every: bool,
        layers: frozenset[int] | None, on_case: OnCase,
    ) -> None:  # fmt: skip
        self.model, self.decoder, self.folder, self.dtype = model, decoder, folder, dtype
        self.asked, self.every, self.layers, self.on_case = asked, every, layers, on_case
        self.covers: dict[str, tuple[str, ...]] = {}

    def done(self, report: Report) -> set[str]:
        """The required inputs that were read."""
        return {name for f in report.findings for name in self.covers.get(f.case, ())}

    def into(self, report: Report, reference: str | None) -> None:
        """Chooses the reference and runs. Raises `NotRun` where there is none."""
        installed = importlib.util.find_spec("transformers") is not None
        if reference == "transformers" or (reference is None and installed):
            if not installed:
                raise golden.NotRun("transformers is not installed: not run; pip install laconic[hf]")
            self.live(report)
            return
        bundle = golden.shipped(self.decoder) if reference in (None, GOLDEN) else Path(reference)
        if bundle is None:
            also = "" if reference else "transformers is not installed and "
            raise golden.NotRun(f"{also}no bundle is shipped for these weights: not run")
        if not (bundle / golden.TABLE).is_file():
            raise Usage(f"--reference {reference}: neither transformers, {GOLDEN} nor a folder with {golden.TABLE}")
        self.kept(report, golden.open_bundle(bundle))

    def live(self, report: Report) -> None:
        """Against transformers: the model, then the fixtures that stand in for what it cannot have."""
        made = inputs(self.decoder)
        report.inputs = [Input(name, "foreign", made.foreign[name]) for name in self.asked if name in made.foreign]
        missing = {name: made.missing[name] for name in self.asked if name in made.missing}
        with against(self.decoder, self.folder, DTYPES[self.dtype]) as reference:
            report.reference = reference.name
            self.compared(report, self.decoder, reference, made.cases, self.asked, "")
        family = self.decoder.config.family
        tiny = self.folder is None
        for variant in variants(family):
            left = tuple(name for name in missing if name not in self.done(report))
            if (variant and tiny) or left:
                self.stand_in(report, variant, VARIED if tiny else left, tiny)
        done = self.done(report)
        own = [name for name in self.asked if name not in made.foreign and name not in missing]
        report.inputs += [Input(name, "made") for name in own]
        for name, why in missing.items():
            where = f"in {PREFIX}{family}" if name in done else "not run"
            report.inputs.append(Input(name, "covered" if name in done else "not run", f"{why}; {where}"))
        report.inputs.sort(key=lambda i: self.asked.index(i.name))

    def stand_in(self, report: Report, variant: str, names: tuple[str, ...], tiny: bool) -> None:
        """One fixture of the family."""
        decoder = fixture(self.decoder.config.family, variant).to(DTYPES[self.dtype])
        label = f"{variant}/" if tiny else f"{decoder.name_or_path}{' ' + variant if variant else ''}/"
        names = tuple(name for name in names if name in self.asked)
        cases = inputs(decoder).cases
        if any(set(case.covers) & set(names) for case in cases):
            with against(decoder, None, DTYPES[self.dtype]) as reference:
                self.compared(report, decoder, reference, cases, names, label)

    def compared(
        self, report: Report, decoder: Decoder, reference: Any, cases: list[Case], names: tuple[str, ...], label: str
    ) -> None:
        """Those cases that are among the inputs named, each a line of work."""
        todo = [replace(case, name=label + case.name) for case in cases if set(case.covers) & set(names)]
        self.covers |= {case.name: case.covers for case in todo}
        if self.dtype != "float32":
            ratios = Ratios(decoder)
            for n, case in enumerate(todo):
                self.on_case(case.name, n, len(todo))
                ratios.add(case, reference)
            found = [replace(f, case=label + f.case) for f in ratios.findings()]
            self.covers |= {label + "all": tuple(name for case in todo for name in case.covers)}
            report.findings += found
            return
        for n, case in enumerate(todo):
            self.on_case(case.name, n, len(todo))
            self.one(report, decoder, lambda case=case: reference.stream(case), case)

    def one(self, report: Report, decoder: Decoder, told: Any, case: Case) -> None:
        """One case, layer by layer beside the reference, our float64 run and the default back end."""
        mine = decoder is self.decoder
        twin = Widened.of(decoder)
        comparison = Comparison(decoder, case, None, twin, self.layers if mine else None)
        with peaked(decoder, case.peak):
            other = default_run(decoder, case)
            for made, own, wide in zip(told(), stream(decoder, case), stream(twin, case), strict=True):
                comparison.add(made, own, wide, other)
            if comparison.evidence is not None and not report.cause:
                report.cause = likely(comparison.evidence)
        report.findings += comparison.findings()

    def kept(self, report: Report, bundle: golden.Bundle) -> None:
        """Against a golden bundle: the inputs it has."""
        report.reference = bundle.name
        if self.dtype != "float32":
            raise golden.NotRun(f"a bundle holds float32: {self.dtype} not run; use --reference transformers")
        if problem := golden.foreign(bundle, self.decoder):
            report.problems.append(problem)
        held = {name for case in bundle.cases for name in case.covers}
        foreign = inputs(self.decoder).foreign
        for name in self.asked:
            absent = "foreign" if name in foreign else "unread" if self.every else "not run"
            why = foreign.get(name, "not in the bundle")
            report.inputs.append(Input(name, "made") if name in held else Input(name, absent, why))
        for case in bundle.cases:
            if not set(case.covers) & set(self.asked):
                continue
            if bundle.whole(case):
                self.one(report, self.decoder, lambda case=case: bundle.stream(case, self.decoder), case)
            else:
                found = golden.sampled(bundle, self.decoder, case)
                report.findings += [f for f in found if self.layers is None or f.layer in (None, *self.layers)]


def default_run(decoder: Decoder, case: Case) -> dict[str, Tensor]:
    """What the decoder's own back end makes of a case, at `context` of every layer and at the logits."""
    made: dict[str, Tensor] = {}
    state, vectors, n = None, case.read(decoder), len(case.pieces())
    for piece, (S, T) in enumerate(case.pieces()):
        seen = decoder(vectors[:, S : S + T], state, **arguments(case, S, T), want=("context", "logits"))
        state = seen.state
        made |= {name if n == 1 else f"{name}/{piece}": t for name, t in seen.stages.items()}
    return made
