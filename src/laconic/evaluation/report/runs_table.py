"""Runs side by side: the table on a terminal, what may be said of it, and one HTML page that asks for nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laconic.batches import PassCounts
from laconic.evaluation import statistics
from laconic.evaluation.inspection.kv_similarity import KV_SPACES
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.reasoning.latency import Latency
from laconic.evaluation.report import old_plots as report_plots
from laconic.evaluation.report.html import load_template
from laconic.evaluation.statistics import Difference, Estimate, ScoreMatrix

MIN_SEEDS = 3  # seeds below which no headline is made


@dataclass(frozen=True)
class MethodResult:
    """One way to answer, over its seeds: `right` [R, N], `curves` a (step, share right) list for each seed.

    `passes` and `held` are means of a question; `sweep` the shares right by number of test-time rounds, per seed;
    `teacher` what the same weights reach by writing the chain, per seed. `trained` is the rounds it was trained with,
    `tint` its colour's place in `drawings.COLOURS`.
    """

    name: str
    title: str
    description: str
    correct: ScoreMatrix
    passes: tuple[float, float, float, float]
    cache_positions: tuple[float, float]
    is_control: bool = False
    color_index: int = 0
    latency: Latency | None = None
    questions_per_second: float | None = None
    bytes_per_position: int = 0
    learning_curves: Sequence[Sequence[tuple[int, float]]] = ()
    iteration_sweep: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    trained_iterations: int | None = None
    cot_accuracy: Sequence[float] = ()
    training_seconds: Sequence[float] = ()

    @property
    def accuracy(self) -> Estimate:
        """Accuracy with its interval."""
        return statistics.estimate_proportion(self.correct)


@dataclass(frozen=True)
class ComparisonReport:
    """All that the page shows. `focus` names the line that others are compared with, `chain` the one that writes it."""

    title: str
    lead: str
    results: Sequence[MethodResult]
    focus: str
    cot_baseline: str
    majority_baseline: tuple[str, float]
    protocol: str
    seeds: Sequence[int]
    caveats: Sequence[str] = ()
    recipe_differences: Sequence[tuple[str, str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()
    runs: Sequence[tuple[str, str]] = ()
    command: str = ""
    inspection: QuestionInspection | None = None
    inspection_title: str = "Question"

    def find_result(self, name: str) -> MethodResult | None:
        """The line of that name."""
        return next((line for line in self.results if line.name == name), None)

    @property
    def num_questions(self) -> int:
        """How many problems every line answered."""
        return self.results[0].correct.shape[1]


class FocusComparison(NamedTuple):
    """The focus against another line, and what may be said of it."""

    other: MethodResult
    difference: Difference
    is_significant: bool
    text: str


def compare_to_focus(report: ComparisonReport) -> list[FocusComparison]:
    """The focus minus every other line, with Holm's correction over all of them."""
    focus = report.find_result(report.focus)
    others = [line for line in report.results if line.name != report.focus]
    if focus is None:
        return []
    found = [statistics.paired_difference(*common_seeds(focus, line)) for line in others]
    claims = statistics.find_significant(found)
    rows = zip(others, found, claims, strict=True)
    return [FocusComparison(line, d, claim, statistics.describe_difference(d, claim)) for line, d, claim in rows]


def common_seeds(a: MethodResult, b: MethodResult) -> tuple[ScoreMatrix, ScoreMatrix]:
    """The seeds that both lines have, from the first."""
    n = min(len(a.correct), len(b.correct))
    return a.correct[:n], b.correct[:n]


def format_percent(share: float) -> str:
    """A share in a hundred, one decimal."""
    return f"{100 * share:.1f}"


def format_accuracy(estimate: Estimate) -> str:
    """A headline needs three seeds for its ±; fewer are named."""
    if estimate.sd is not None and estimate.num_seeds >= MIN_SEEDS:
        return f"{format_percent(estimate.mean)} ± {format_percent(estimate.sd)} %"
    return f"{format_percent(estimate.mean)} %"


def format_interval(estimate: Estimate) -> str:
    """The 95 % interval in a hundred."""
    return f"{format_percent(estimate.low)} – {format_percent(estimate.high)}"


def format_count(x: float) -> str:
    """A mean count: whole if it is whole."""
    return f"{x:.0f}" if abs(x - round(x)) < 0.005 else f"{x:.1f}"


def format_passes(passes: Sequence[float]) -> str:
    """Passes by part, those that occur: `1 place + 3 think + 2 answer`."""
    return " + ".join(f"{format_count(n)} {name}" for name, n in zip(PassCounts._fields, passes, strict=True) if n)


def result_cells(result: MethodResult) -> tuple[str, str, str, str, str, str]:
    """A row of the table: accuracy, interval, passes, their parts, positions held, milliseconds."""
    took = "–" if result.latency is None else f"{result.latency.median:.1f}"
    held = f"{format_count(result.cache_positions[0])} → {format_count(result.cache_positions[1])}"
    found = result.accuracy
    return (
        format_accuracy(found),
        format_interval(found),
        format_count(sum(result.passes)),
        format_passes(result.passes),
        held,
        took,
    )


def build_table(report: ComparisonReport) -> Any:
    """The rows for a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="")
    for i, name in enumerate(("", "accuracy", "95 % interval", "passes", "positions", "ms")):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for i, line in enumerate(report.results):
        if line.is_control and i and not report.results[i - 1].is_control:
            made.add_row()
        right, bounds, total, _, held, took = result_cells(line)
        made.add_row(line.title, right, bounds, f"{total} = {'+'.join(map(format_count, line.passes))}", held, took)
    return made


def format_footnotes(report: ComparisonReport) -> str:
    """What stands under the table on a terminal."""
    answer, floor = report.majority_baseline
    n = f"n={len(report.seeds)}"
    head = (
        f'majority floor {format_percent(floor)} % (always "{answer}"); {report.num_questions:,} unseen problems, {n}'
    )
    against = [f"{c.other.title}: {c.text}" for c in compare_to_focus(report)]
    focus = report.find_result(report.focus)
    title = [f"{focus.title} against"] if focus and against else []
    shown = [f"  {text}" for text in against]
    units = "passes: read + place + think + answer; positions held when the answer begins and ends; ms: one at a time"
    return "\n".join(
        [head, units, "", *title, *shown, "", "Not shown", *(f"  {text}" for text in list_caveats(report))]
    )


def report_to_json(report: ComparisonReport) -> dict[str, Any]:
    """The figures as JSON holds them."""
    rows = [
        {
            "name": line.name,
            "control": line.is_control,
            "accuracy": line.accuracy._asdict(),
            "passes": dict(zip(PassCounts._fields, line.passes, strict=True)) | {"total": sum(line.passes)},
            "held": {
                "begin": line.cache_positions[0],
                "end": line.cache_positions[1],
                "bytes": line.cache_positions[1] * line.bytes_per_position,
            },
            "milliseconds": line.latency and line.latency._asdict(),
            "teacher": list(line.cot_accuracy),
            "sweep": {str(rounds): list(shares) for rounds, shares in line.iteration_sweep.items()},
            "seconds": list(line.training_seconds),
        }
        for line in report.results
    ]
    against = [
        {"other": c.other.name, **c.difference._asdict(), "claim": c.is_significant, "text": c.text}
        for c in compare_to_focus(report)
    ]
    floor = {"answer": report.majority_baseline[0], "share": report.majority_baseline[1]}
    about = {
        "protocol": report.protocol,
        "seeds": list(report.seeds),
        "questions": report.num_questions,
        "floor": floor,
    }
    return {"schema": 1, **about, "rows": rows, "against": against, "limits": list_caveats(report)}


def list_caveats(report: ComparisonReport) -> list[str]:
    """What the figures themselves say is not shown, then what the report was told."""
    focus, chain = report.find_result(report.focus), report.find_result(report.cot_baseline)
    found: list[str] = []
    if len(report.seeds) < MIN_SEEDS:
        runs = "one run" if len(report.seeds) == 1 else f"{len(report.seeds)} runs"
        found.append(f"Seeds: {runs} of each. The intervals are of these runs; another seed may fall outside them.")
    if focus and chain:
        few, many = sum(focus.passes), sum(chain.passes)
        if few >= many:
            found.append(
                f"Passes are not saved: {focus.title} takes {format_count(few)} a question, the chain {format_count(many)}."
            )
        if focus.cache_positions[1] >= chain.cache_positions[1]:
            found.append(
                f"The cache is not shorter: {format_count(focus.cache_positions[1])} positions at the end, {format_count(chain.cache_positions[1])} "
                "with the chain."
            )
    for c in compare_to_focus(report):
        if not c.is_significant and c.other.is_control:
            found.append(f"That {focus.title if focus else ''} does more than {c.other.title}: {c.text}.")
    return [*found, *report.caveats]


def render_report(report: ComparisonReport) -> str:
    """The whole file."""
    lines = [line for line in report.results if not line.is_control]
    return load_template("report.html", percent=format_percent, number=format_count).render(
        r=report, rows=[(line, result_cells(line), line.accuracy) for line in report.results], compared=compare_to_focus(report),
        few=len(report.seeds) < MIN_SEEDS, limits=list_caveats(report), pictures=report_plots.plot_results(lines, report.majority_baseline[1]),
        thoughts=report.inspection and latents_context(report.inspection), colours=report_plots.COLORS,
    )  # fmt: skip


def latents_context(inspection: QuestionInspection) -> dict[str, Any]:
    """The inspected question as the page's grids take it."""
    held = inspection.selection.mask if inspection.selection else np.zeros((0, 0, 0))
    maps = ((what, inspection.find_map(what, "chain")) for what in KV_SPACES)
    return {
        "shown": inspection.lens,
        "hits": sum(word in inspection.lens.chain for word in inspection.lens.top_tokens),
        "slots": len(inspection.lens.top_tokens),
        "heads": [
            (l, g, set(np.flatnonzero(head).tolist()))
            for l, layer in zip(inspection.matched_layers, held, strict=True)
            for g, head in enumerate(layer)
        ],
        "whole": bool(held.all()),
        "shares": inspection.selection.token_shares if inspection.selection else (),
        "stands": list(inspection.best_tokens),
        "maps": [(f"{what[0].upper()}{what[1:]}, student and teacher", map.mean) for what, map in maps if map],
    }
