"""The result of a parity run: a one-sentence summary, a table for the terminal, and JSON.

Errors are reported in floors, that is divided by the float32 noise floor of their stage.
"""

import math
import platform
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.decoder import Decoder
from laconic.verification.inputs import REQUIRED_INPUTS
from laconic.verification.parity import StageResult, first_divergence, usual_suspects

SCHEMA_VERSION = 3


class InputStatus(NamedTuple):
    """Whether one required input (I1 to I17) was compared, and why not.

    Without a comparison it is "covered" by the tiny model of the family, because this model cannot have the input;
    "inapplicable" to the family; "not in bundle", which is a failure only if the input was requested by name; or
    "not run", a failure.
    """

    name: str
    status: Literal["compared", "covered", "inapplicable", "not in bundle", "not run"]
    reason: str = ""


@dataclass
class ParityReport:
    """One parity run; stages and results are in the order of computation."""

    model: str
    reference: str  # its name, or "none"
    dtype: str
    backend: str = "sdpa"
    command: str = ""
    family: str = ""
    fingerprint: str = ""
    stage_order: tuple[str, ...] = ()
    results: list[StageResult] = field(default_factory=list)
    inputs: list[InputStatus] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # comparisons that did not run, with the reason
    seconds: float = 0.0

    @classmethod
    def for_decoder(cls, decoder: Decoder, *, model: str, dtype: str, command: str) -> "ParityReport":
        stages = (*MODEL_ACTIVATIONS[:1], *layer_activations(decoder.config), *MODEL_ACTIVATIONS[1:])
        return cls(
            model,
            reference="none",
            dtype=dtype,
            backend=decoder.attn_implementation,
            command=command,
            family=decoder.config.family,
            fingerprint=decoder.fingerprint,
            stage_order=tuple(stage.name for stage in stages),
        )

    @property
    def is_ok(self) -> bool:
        has_passed = any(result.verdict == "pass" for result in self.results)
        has_failed = any(result.verdict in ("fail", "not run") for result in self.results)
        is_complete = not self.problems and all(status.status != "not run" for status in self.inputs)
        return has_passed and not has_failed and is_complete

    @property
    def first_divergence(self) -> StageResult | None:
        return first_divergence(self.results) or next((r for r in self.results if r.verdict == "fail"), None)

    @property
    def missing_from_bundle(self) -> list[str]:
        return [status.name for status in self.inputs if status.status == "not in bundle"]

    def summary(self) -> str:
        """Describe the outcome and list the inputs that are not in the bundle."""
        missing = self.missing_from_bundle
        return self.describe_outcome() + (f" Not in the bundle: {', '.join(missing)}." if missing else "")

    def describe_outcome(self) -> str:
        """Return a sentence on the first divergence; without one, that all agrees, or what did not run."""
        first = self.first_divergence
        if first is not None:
            layer = "" if first.layer is None else f" of layer {first.layer}"
            error = "ratio of errors" if first.kind == "ratio" else f"{first.kind} error"
            text = (
                f"First divergence: {first.stage}{layer}, case {first.case}: {error} {first.error:.2e}, "
                f"{format_number(first.error_in_floors)} floors, worst at {list(first.index)}. "
                f"Usual suspects: {usual_suspects(first.stage)}."
            )
            return " ".join([*(f"{problem}." for problem in self.problems), text])
        if self.is_ok:
            cases = "" if is_low_precision(self.results) else f" over {len({r.case for r in self.results})} cases"
            equal = sum(result.bitwise for result in self.results)
            count = f"{len(self.results):,} comparisons{cases}, {equal:,} equal to the bit"
            return f"No divergence: {count}, {self.seconds:.1f} s."
        inputs = [f"{status.name}: {status.reason}" for status in self.inputs if status.status == "not run"]
        stages = [r.note or f"{r.stage}: not run" for r in self.results if r.verdict == "not run"][:3]
        reasons = dict.fromkeys(text.removesuffix(": not run") for text in [*self.problems, *inputs, *stages])
        return "Not run: " + ("; ".join(reasons) or "nothing was compared") + "."

    def results_by_stage(self) -> list[list[StageResult]]:
        groups = ([r for r in self.results if r.stage == stage] for stage in self.stage_order)
        return [group for group in groups if group]

    def to_table(self) -> Table:
        """Return a table for the terminal: one row per stage, with the errors of the first, worst and last layer."""
        unit = "error over the reference's" if is_low_precision(self.results) else "local error in floors"
        table = Table(title=f"{self.model}\n{self.reference}, {self.dtype}\n{unit}")
        for name in ("stage", "first layer", "worst layer", "last layer", "propagated", "verdict"):
            table.add_column(name, justify="left" if name in ("stage", "verdict") else "right")
        styles = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}
        for results in self.results_by_stage():
            compared = [r for r in results if r.kind in ("local", "ratio")]
            layers = sorted({r.layer for r in results if r.layer is not None}) or [None]
            first, last = ([r for r in compared if r.layer == layer] for layer in (layers[0], layers[-1]))
            worst = max(compared, key=severity, default=None)
            layer = "" if worst is None or worst.layer is None else f" ({worst.layer})"
            cells = (format_worst(first), format_worst(compared) + layer, format_worst(last))
            error = max((r.error for r in results if r.kind == "propagated"), default=math.nan)
            propagated = "–" if math.isnan(error) else f"{error:.1e}"
            verdict = worst_verdict(results)
            table.add_row(results[0].stage, *cells, propagated, styles.get(verdict, f"[yellow]{verdict}[/]"))
        return table

    def to_json(self, *, all_results: bool = False) -> dict[str, Any]:
        """Return the report as JSON, with `all_results` every comparison; NaN becomes null, infinity "inf"."""
        first = self.first_divergence
        names = ("model", "family", "fingerprint", "dtype", "backend", "command", "problems")
        return {
            "schema": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in names},
            "ok": self.is_ok,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "reference": self.reference},
            "seconds": round(self.seconds, 2),
            "inputs": [status._asdict() | {"description": REQUIRED_INPUTS[status.name]} for status in self.inputs],
            "first_divergence": None if first is None else result_to_json(first),
            "summary": self.summary(),
            "stages": [stage_to_json(results) for results in self.results_by_stage()],
            **({"results": [result_to_json(result) for result in self.results]} if all_results else {}),
        }


def stage_to_json(results: list[StageResult]) -> dict[str, Any]:
    worst = {r.kind: result_to_json(r) for r in sorted(results, key=severity)}  # of each kind the last one stays
    equal = sum(r.bitwise for r in results)
    counts = {"comparisons": len(results), "equal_to_the_bit": equal}
    return {"stage": results[0].stage, "verdict": worst_verdict(results), **counts, "worst": worst}


def is_low_precision(results: list[StageResult]) -> bool:
    return any(result.kind == "ratio" for result in results)


def severity(result: StageResult) -> tuple[int, float]:
    error = result.error_in_floors
    return {"fail": 2, "not run": 1}.get(result.verdict, 0), 0.0 if math.isnan(error) else error


def worst_verdict(results: list[StageResult]) -> str:
    worst = max(results, key=severity).verdict
    return worst if worst in ("fail", "not run") else "pass"


def format_number(x: float) -> str:
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "inf"
    return f"{x:.2f}" if x < 100 else f"{x:.1e}"


def format_worst(results: list[StageResult]) -> str:
    worst = max(results, key=severity, default=None)
    if worst is None:
        return "–"
    return "not run" if worst.verdict == "not run" else format_number(worst.error_in_floors)


def result_to_json(result: StageResult) -> dict[str, Any]:
    row = asdict(result) | {"error_in_floors": result.error_in_floors, "index": list(result.index)}
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):  # JSON has neither NaN nor infinity
            row[name] = None if math.isnan(value) else "inf"
    return row
