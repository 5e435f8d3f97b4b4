"""What a parity run found: the verdict, a table for the terminal, and JSON."""

import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.decoder import Decoder
from laconic.verification.inputs import REQUIRED_INPUTS
from laconic.verification.parity import StageResult, first_divergence

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class InputStatus:
    """One required input: `made`, `foreign` to the family, `covered` by the tiny fixture, `unread`, or `not run`.

    `unread` are those that a bundle does not hold and that nobody named: no failure, and the sentence lists them.
    """

    name: str
    status: str
    why: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status != "not run"


@dataclass
class ParityReport:
    """One parity run. `problems` are comparisons that did not run; `findings` are in the order of computation."""

    model: str
    reference: str
    dtype: str
    backend: str = "sdpa"
    command: str = ""
    family: str = ""
    fingerprint: str = ""
    stage_order: tuple[str, ...] = ()
    num_layers: int = 0
    results: list[StageResult] = field(default_factory=list)
    inputs: list[InputStatus] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cause: str = ""
    seconds: float = 0.0

    @classmethod
    def for_decoder(cls, decoder: Decoder, **fields: Any) -> "ParityReport":
        """An empty report on a decoder."""
        config = decoder.config
        order = (
            "embed",
            *(stage.name for stage in layer_activations(config)),
            *(stage.name for stage in MODEL_ACTIVATIONS[1:]),
        )
        return cls(
            family=config.family, fingerprint=decoder.fingerprint, backend=decoder.attn_implementation, stage_order=order,
            num_layers=config.num_hidden_layers, **fields,
        )  # fmt: skip

    @property
    def is_ok(self) -> bool:
        """Whether every comparison asked for ran and passed."""
        ran = any(f.verdict == "pass" for f in self.results)
        good = all(f.verdict not in ("fail", "not run") for f in self.results)
        return ran and good and not self.problems and all(i.is_ok for i in self.inputs)

    @property
    def first_divergence(self) -> StageResult | None:
        """The first stage at which the two part."""
        return first_divergence(self.results) or next((f for f in self.results if f.verdict == "fail"), None)

    @property
    def versions(self) -> dict[str, str]:
        """What ran."""
        return {"python": platform.python_version(), "torch": torch.__version__, "reference": self.reference}

    def worst_result(self, stage: str, layer: int | None, kinds: Iterable[str]) -> StageResult | None:
        """The largest error in floors over all cases, failures first."""
        held = [f for f in self.results if f.stage == stage and f.layer == layer and f.kind in kinds]
        return max(held, key=severity, default=None)

    @property
    def missing_from_bundle(self) -> list[str]:
        """The inputs that a bundle does not hold."""
        return [i.name for i in self.inputs if i.status == "unread"]

    def summary(self) -> str:
        """One sentence on the first divergence, or on there being none, and which inputs the bundle does not hold."""
        return (
            f"{self.outcome_summary()} Not in the bundle: {', '.join(self.missing_from_bundle)}."
            if self.missing_from_bundle
            else self.outcome_summary()
        )

    def outcome_summary(self) -> str:
        """The sentence on what was compared."""
        found = self.first_divergence
        if found is not None:
            where = "" if found.layer is None else f" of layer {found.layer}"
            what = "ratio of errors" if found.kind == "ratio" else f"{found.kind} error"
            says = (
                f"First divergence: {found.stage}{where}, case {found.case}: {what} {found.error:.2e}, "
                f"{format_number(found.error_in_floors)} floors, worst at {list(found.index)}."
            )
            says = f"{says} Likely cause: {self.cause}." if self.cause else says
            return " ".join([*(f"{problem}." for problem in self.problems), says])
        if self.is_ok:
            cases = {f.case for f in self.results}
            over = "" if is_low_precision(self.results) else f" over {len(cases)} cases"
            return f"No divergence: {len(self.results):,} comparisons{over}, {self.seconds:.1f} s."
        missing = [f"{i.name}: {i.why}" for i in self.inputs if not i.is_ok]
        unread = [f.note or f"{f.stage}: not run" for f in self.results if f.verdict == "not run"][:3]
        said = dict.fromkeys(text.removesuffix(": not run") for text in [*self.problems, *missing, *unread])
        return "Not run: " + ("; ".join(said) or "nothing was compared") + "."

    def to_table(self) -> Table:
        """Stage × first, worst and last layer: local error in floors; propagated error; verdict."""
        unit = "error over the reference's" if is_low_precision(self.results) else "local error in floors"
        table = Table(title=f"{self.model}\n{self.reference}, {self.dtype}\n{unit}")
        for name in ("stage", "first layer", "worst layer", "last layer", "propagated", "verdict"):
            table.add_column(name, justify="left" if name in ("stage", "verdict") else "right")
        for row in self.table_rows():
            good = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}.get(row[-1], f"[yellow]{row[-1]}[/]")
            table.add_row(*row[:-1], good)
        return table

    def table_rows(self) -> list[tuple[str, ...]]:
        """The table's rows as text."""
        made, main = [], ("local", "ratio")
        for stage in self.stage_order:
            held = [f for f in self.results if f.stage == stage]
            if not held:
                continue
            layers = sorted({f.layer for f in held if f.layer is not None})
            ends: list[int | None] = [layers[0], layers[-1]] if layers else [None, None]
            first, last = (self.worst_result(stage, layer, main) for layer in ends)
            worst = max((f for f in held if f.kind in main), key=severity, default=None)
            far = max((f for f in held if f.kind == "propagated"), key=lambda f: f.error, default=None)
            at = "" if worst is None or worst.layer is None else f" ({worst.layer})"
            run = "–" if far is None else f"{far.error:.1e}"
            made.append(
                (stage, format_cell(first), format_cell(worst) + at, format_cell(last), run, worst_verdict(held))
            )
        return made

    def to_json(self) -> dict[str, Any]:
        """The same as plain data, `schema` 1; numbers that are none are null, infinite ones the text "inf"."""
        found = self.first_divergence
        names = ("model", "family", "fingerprint", "dtype", "backend", "command")
        plain = {name: getattr(self, name) for name in names}
        return {
            "schema": SCHEMA_VERSION, **plain, "ok": self.is_ok, "versions": self.versions, "seconds": round(self.seconds, 2),
            "inputs": [asdict(i) | {"what": REQUIRED_INPUTS.get(i.name, "")} for i in self.inputs],
            "problems": self.problems, "divergence": None if found is None else result_to_json(found), "cause": self.cause,
            "sentence": self.summary(), "findings": [result_to_json(f) for f in self.results],
        }  # fmt: skip


def is_low_precision(results: list[StageResult]) -> bool:
    """Whether these are ratios."""
    return any(f.kind == "ratio" for f in results)


def severity(result: StageResult) -> tuple[int, float]:
    """What did not run or failed is worse than any number."""
    return (
        {"fail": 2, "not run": 1}.get(result.verdict, 0),
        0.0 if math.isnan(result.error_in_floors) else result.error_in_floors,
    )


def worst_verdict(results: list[StageResult]) -> str:
    """The worst of several."""
    worst = max(results, key=severity).verdict
    return worst if worst in ("fail", "not run") else "pass"


def format_number(x: float) -> str:
    """A number of floors in few characters."""
    if math.isnan(x):
        return "–"
    return "inf" if math.isinf(x) else f"{x:.2f}" if x < 100 else f"{x:.1e}"


def format_cell(result: StageResult | None) -> str:
    """An error in floors."""
    if result is None:
        return "–"
    return "not run" if result.verdict == "not run" else format_number(result.error_in_floors)


def result_to_json(result: StageResult) -> dict[str, Any]:
    """A finding as JSON can hold it."""
    row = asdict(result) | {"floors": result.error_in_floors, "index": list(result.index)}
    return {
        name: (None if math.isnan(v) else "inf" if math.isinf(v) else v) if isinstance(v, float) else v
        for name, v in row.items()
    }
