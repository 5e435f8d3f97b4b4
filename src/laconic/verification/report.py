"""The result of a parity run: a one-sentence summary, a table for the terminal, and JSON.

Errors are reported in floors, that is divided by the float32 noise floor of their stage.
"""

import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from rich.table import Table

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.decoder import Decoder
from laconic.verification.inputs import REQUIRED_INPUTS
from laconic.verification.parity import StageResult, first_divergence, usual_suspects

SCHEMA_VERSION = 3


@dataclass(frozen=True)
class InputStatus:
    """Whether one required input was compared.

    Attributes:
        name: I1 to I17, a key of `REQUIRED_INPUTS`.
        status: "compared"; "covered" by the tiny model of the family, because this model cannot have the input;
            "inapplicable" to the family; "not in bundle", which is a failure only if the input was requested by
            name; or "not run", a failure.
        reason: Why it was not compared.
    """

    name: str
    status: Literal["compared", "covered", "inapplicable", "not in bundle", "not run"]
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether this input lets the run pass."""
        return self.status != "not run"


@dataclass
class ParityReport:
    """One parity run.

    Attributes:
        model: Name of the model.
        reference: Name of the reference, or "none".
        dtype: Type of the decoder's weights.
        backend: Attention backend of the decoder.
        command: Command line of the run.
        family: Model family.
        fingerprint: Fingerprint of the weights.
        stage_order: Names of the stages in the order of computation.
        num_layers: Number of layers.
        results: Results in the order of computation.
        inputs: Status of each required input.
        problems: Comparisons that did not run, with the reason.
        seconds: Duration.
    """

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
    seconds: float = 0.0

    @classmethod
    def for_decoder(cls, decoder: Decoder, *, model: str, dtype: str, command: str = "") -> "ParityReport":
        config = decoder.config
        layer_stages = [stage.name for stage in layer_activations(config)]
        return cls(
            model=model, reference="none", dtype=dtype, command=command, family=config.family,
            fingerprint=decoder.fingerprint, backend=decoder.attn_implementation,
            stage_order=("embed", *layer_stages, *(stage.name for stage in MODEL_ACTIVATIONS[1:])),
            num_layers=config.num_hidden_layers,
        )  # fmt: skip

    @property
    def is_ok(self) -> bool:
        """Whether every requested comparison ran and passed."""
        has_passed = any(result.verdict == "pass" for result in self.results)
        has_failed = any(result.verdict in ("fail", "not run") for result in self.results)
        return has_passed and not has_failed and not self.problems and all(status.is_ok for status in self.inputs)

    @property
    def first_divergence(self) -> StageResult | None:
        """The first stage at which decoder and reference differ."""
        return first_divergence(self.results) or next((r for r in self.results if r.verdict == "fail"), None)

    @property
    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), "torch": torch.__version__, "reference": self.reference}

    def worst_result(self, stage: str, layer: int | None, kinds: Iterable[str]) -> StageResult | None:
        """Return the result with the largest error in floors over all cases; failures count as larger."""
        candidates = [r for r in self.results if r.stage == stage and r.layer == layer and r.kind in kinds]
        return max(candidates, key=severity, default=None)

    @property
    def missing_from_bundle(self) -> list[str]:
        """The inputs that a bundle does not contain."""
        return [status.name for status in self.inputs if status.status == "not in bundle"]

    def summary(self) -> str:
        """Return the outcome in one sentence, and the inputs that are missing from the bundle."""
        missing, outcome = self.missing_from_bundle, self.outcome_summary()
        return f"{outcome} Not in the bundle: {', '.join(missing)}." if missing else outcome

    def outcome_summary(self) -> str:
        """Return the outcome in one sentence: the first divergence, what did not run, or that there is none."""
        if (first := self.first_divergence) is not None:
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
        inputs = [f"{status.name}: {status.reason}" for status in self.inputs if not status.is_ok]
        stages = [r.note or f"{r.stage}: not run" for r in self.results if r.verdict == "not run"][:3]
        reasons = dict.fromkeys(text.removesuffix(": not run") for text in [*self.problems, *inputs, *stages])
        return "Not run: " + ("; ".join(reasons) or "nothing was compared") + "."

    def to_table(self) -> Table:
        """Return a table for the terminal: one row per stage, with the errors of the first, worst and last layer."""
        unit = "error over the reference's" if is_low_precision(self.results) else "local error in floors"
        table = Table(title=f"{self.model}\n{self.reference}, {self.dtype}\n{unit}")
        for name in ("stage", "first layer", "worst layer", "last layer", "propagated", "verdict"):
            table.add_column(name, justify="left" if name in ("stage", "verdict") else "right")
        styles = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}
        for row in self.table_rows():
            table.add_row(*row[:-1], styles.get(row[-1], f"[yellow]{row[-1]}[/]"))
        return table

    def table_rows(self) -> list[tuple[str, ...]]:
        rows, kinds = [], ("local", "ratio")
        for stage in self.stage_order:
            results = [r for r in self.results if r.stage == stage]
            if not results:
                continue
            layers = sorted({r.layer for r in results if r.layer is not None})
            ends: list[int | None] = [layers[0], layers[-1]] if layers else [None, None]
            first, last = (self.worst_result(stage, layer, kinds) for layer in ends)
            worst = max((r for r in results if r.kind in kinds), key=severity, default=None)
            propagated = max((r for r in results if r.kind == "propagated"), key=lambda r: r.error, default=None)
            layer = "" if worst is None or worst.layer is None else f" ({worst.layer})"
            error = "–" if propagated is None else f"{propagated.error:.1e}"
            cells = (format_cell(first), format_cell(worst) + layer, format_cell(last))
            rows.append((stage, *cells, error, worst_verdict(results)))
        return rows

    def to_json(self, *, all_results: bool = False) -> dict[str, Any]:
        """Return the report as JSON; NaN becomes null, infinity the text "inf".

        Args:
            all_results: Whether to add every comparison, thousands for a model of 30 layers.
        """
        first = self.first_divergence
        names = ("model", "family", "fingerprint", "dtype", "backend", "command")
        return {
            "schema": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in names},
            "ok": self.is_ok,
            "versions": self.versions,
            "seconds": round(self.seconds, 2),
            "inputs": [asdict(status) | {"description": REQUIRED_INPUTS[status.name]} for status in self.inputs],
            "problems": self.problems,
            "first_divergence": None if first is None else result_to_json(first),
            "summary": self.summary(),
            "stages": [stage for name in self.stage_order if (stage := self.stage_to_json(name))],
            **({"results": [result_to_json(result) for result in self.results]} if all_results else {}),
        }

    def stage_to_json(self, stage: str) -> dict[str, Any]:
        """Return the number of comparisons of a stage, how many are equal to the bit, and the worst of each kind."""
        results = [r for r in self.results if r.stage == stage]
        if not results:
            return {}
        worst = {
            kind: result_to_json(max((r for r in results if r.kind == kind), key=severity))
            for kind in dict.fromkeys(r.kind for r in results)
        }
        equal = sum(r.bitwise for r in results)
        counts = {"comparisons": len(results), "equal_to_the_bit": equal}
        return {"stage": stage, "verdict": worst_verdict(results), **counts, "worst": worst}


def is_low_precision(results: list[StageResult]) -> bool:
    """Return whether the results are ratios to the reference's own error."""
    return any(result.kind == "ratio" for result in results)


def severity(result: StageResult) -> tuple[int, float]:
    """Return a sort key: failures first, then what did not run, then the error in floors."""
    error = result.error_in_floors
    return {"fail": 2, "not run": 1}.get(result.verdict, 0), 0.0 if math.isnan(error) else error


def worst_verdict(results: list[StageResult]) -> str:
    worst = max(results, key=severity).verdict
    return worst if worst in ("fail", "not run") else "pass"


def format_number(x: float) -> str:
    """Format an error in floors."""
    if math.isnan(x):
        return "–"
    return "inf" if math.isinf(x) else f"{x:.2f}" if x < 100 else f"{x:.1e}"


def format_cell(result: StageResult | None) -> str:
    """Format the error of a result for the table."""
    if result is None:
        return "–"
    return "not run" if result.verdict == "not run" else format_number(result.error_in_floors)


def result_to_json(result: StageResult) -> dict[str, Any]:
    row = asdict(result) | {"error_in_floors": result.error_in_floors, "index": list(result.index)}
    return {
        name: (None if math.isnan(v) else "inf" if math.isinf(v) else v) if isinstance(v, float) else v
        for name, v in row.items()
    }
