"""Compare methods over their seeds: the table on a terminal, what the figures show, JSON and an HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laconic.console import pluralize
from laconic.evaluation import tables
from laconic.evaluation.reasoning.table import ReasoningRow, RowComparison, compare_costs, compare_rows
from laconic.evaluation.report.page import PagePlot, PageSection, build_facts_table, render_page
from laconic.evaluation.report.plots import PlotSeries, plot_accuracies, plot_lines
from laconic.evaluation.statistics import describe_test
from laconic.evaluation.tables import MIN_SEEDS, Column, Table, format_count, format_percent

CONTROL_COLOR = 2
TERMS = (
    "passes: prompt + latent setup + latent + answer; positions in the cache when the answer begins and ends; ms: one "
    "question at a time"
)


@dataclass(frozen=True)
class MethodResult:
    """One method over its seeds.

    `row` has its answers to the questions; `row.run` is the key of the method. A control is the same training with one
    part removed or replaced. Learning curves are (step, accuracy) points for each seed; `iteration_sweep` has the
    accuracy of each seed by the number of Jacobi iterations.
    """

    row: ReasoningRow
    title: str
    description: str
    is_control: bool = False
    learning_curves: Sequence[Sequence[tuple[int, float]]] = ()
    iteration_sweep: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])

    @property
    def name(self) -> str:
        return self.row.run


@dataclass(frozen=True)
class ComparisonReport:
    """Methods on the same questions: what a page shows of them.

    `focus` names the method that the others are compared with, `cot_baseline` the one that writes the chain. Recipe
    differences are keys, values and reasons where recipes differ from the papers; facts are names and values.
    """

    title: str
    lead: str
    results: Sequence[MethodResult]
    focus: str
    cot_baseline: str
    caveats: Sequence[str] = ()
    recipe_differences: Sequence[tuple[str, str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()

    @property
    def by_name(self) -> dict[str, MethodResult]:
        return {result.name: result for result in self.results}

    @property
    def seeds(self) -> Sequence[int]:
        return self.results[0].row.seeds


def compare_to_focus(report: ComparisonReport) -> list[tuple[MethodResult, RowComparison]]:
    """Return every other method, and the focus minus it, with Holm's correction over all."""
    focus = report.by_name[report.focus]
    others = [result for result in report.results if result is not focus]
    return list(zip(others, compare_rows([(focus.row, other.row) for other in others]), strict=True))


def format_total(passes: Sequence[float]) -> str:
    return f"{format_count(sum(passes))} = {'+'.join(map(format_count, passes))}"


COLUMNS = (
    Column("", lambda result: result.title, is_text=True),
    Column("accuracy", lambda result: tables.format_accuracy(result.row.accuracy)),
    Column("95 % interval", lambda result: tables.format_interval(result.row.accuracy)),
    Column("passes", lambda result: format_total(result.row.mean_passes)),
    Column("positions", lambda result: " → ".join(map(format_count, result.row.mean_cache_positions))),
    Column("ms", lambda result: "–" if result.row.latency is None else f"{result.row.latency.median:.1f}"),
)
DESCRIPTION = Column(
    "how it answers", lambda result: f"{result.description}{' (control)' if result.is_control else ''}", is_text=True
)


def build_terminal_table(report: ComparisonReport) -> Table:
    """Return the table for a terminal; controls follow after an empty line."""
    methods, controls = (
        tables.build_table(COLUMNS, [result for result in report.results if result.is_control is is_control])
        for is_control in (False, True)
    )
    return methods._replace(rows=[*methods.rows, *([(), *controls.rows] if controls.rows else [])])


def describe_questions(report: ComparisonReport) -> str:
    row = report.results[0].row
    answer, share = row.majority_baseline
    return (
        f'majority baseline {format_percent(share)} % (always "{answer}"); {row.accuracy.num_items:,} unseen problems, '
        f"{pluralize(len(report.seeds), 'seed')}"
    )


def format_footnotes(report: ComparisonReport) -> str:
    lines = [describe_questions(report), TERMS, ""]
    if compared := compare_to_focus(report):
        title = report.by_name[report.focus].title
        lines += [f"{title} against", *(f"  {other.title}: {c.text}" for other, c in compared)]
    return "\n".join([*lines, "", "Not shown", *(f"  {text}" for text in list_caveats(report))])


def report_to_json(report: ComparisonReport) -> dict[str, Any]:
    rows = [
        {
            "name": result.name,
            "is_control": result.is_control,
            **result.row.costs_to_json(),
            "milliseconds": result.row.latency,
            "iteration_sweep": {str(n): shares for n, shares in result.iteration_sweep.items()},
        }
        for result in report.results
    ]
    first = report.results[0].row
    data = {
        "schema": 3,
        "protocol": first.protocol,
        "seeds": report.seeds,
        "questions": first.accuracy.num_items,
        "majority_baseline": first.majority_baseline,
        "rows": rows,
        "comparisons": [{"other": other.name, **c.to_json()} for other, c in compare_to_focus(report)],
        "caveats": list_caveats(report),
    }
    return tables.figures_to_json(data)


def list_caveats(report: ComparisonReport) -> list[str]:
    """Return what the figures do not show, then the report's own caveats."""
    focus = report.by_name[report.focus]
    cot = report.by_name.get(report.cot_baseline)
    caveats: list[str] = []
    if len(report.seeds) < MIN_SEEDS:
        runs = "one run" if len(report.seeds) == 1 else f"{len(report.seeds)} runs"
        caveats.append(f"Seeds: {runs} of each. Intervals hold for these runs; another seed may fall outside them.")
    if cot:
        caveats += [f"Costs: {text}." for text in compare_costs(focus.row, cot.row, focus.title)]
    for other, c in compare_to_focus(report):
        if not c.is_significant and other.is_control:
            caveats.append(f"That {focus.title} is better than {other.title}: {c.text}.")
    return [*caveats, *report.caveats]


def render_report(report: ComparisonReport) -> str:
    table = tables.build_table((COLUMNS[0], DESCRIPTION, *COLUMNS[1:]), report.results)
    sections = [PageSection("Results", [plot_results(report), table, f"{describe_questions(report)}. {TERMS}."])]
    if compared := compare_to_focus(report):
        title = report.by_name[report.focus].title
        pairs = "problems" if len(report.seeds) == 1 else "problems and seeds"
        about = (
            f"{title} minus the other, on the same {pairs}: 95 % interval; p: {describe_test(len(report.seeds))}, "
            f"Holm's correction over the {len(compared)} comparisons. Where p is above 5 % or the interval contains 0, "
            "nothing is claimed."
        )
        differences = build_facts_table([(f"over {other.title}", c.text) for other, c in compared])
        sections.append(PageSection(f"Differences from {title}", [about, differences]))
    caveats = list_caveats(report)
    keys = report.recipe_differences
    key_table = Table(("key", "here", "why"), keys, num_text_columns=3)
    sections += [
        PageSection("What this does not show", [caveats]),
        PageSection("Where the recipes differ from the papers", [key_table] if keys else []),
        PageSection("Runs", [build_facts_table(report.facts)]),
    ]
    return render_page(report.title, sections, [report.lead])


def plot_results(report: ComparisonReport) -> list[PagePlot]:
    methods = [result for result in report.results if not result.is_control]
    colors = {result.name: i + (i >= CONTROL_COLOR) for i, result in enumerate(methods)}
    floor = 100 * report.results[0].row.majority_baseline.share
    bars = [
        (
            r.title,
            100 * r.row.accuracy.mean,
            100 * r.row.accuracy.low,
            100 * r.row.accuracy.high,
            colors.get(r.name, CONTROL_COLOR),
        )
        for r in report.results
    ]
    plots = [PagePlot("Accuracy", "Dark line: 95 % interval. Dashed: majority baseline.", plot_accuracies(bars, floor))]
    curves = [
        PlotSeries(r.title, mean_curve(r.learning_curves), colors[r.name]) for r in methods if any(r.learning_curves)
    ]
    sweeps = [
        PlotSeries(r.title, [(n, 100 * float(np.mean(x))) for n, x in r.iteration_sweep.items()], colors[r.name])
        for r in methods
        if len(r.iteration_sweep) > 1
    ]
    for lines, title, caption, x_label in (
        (curves, "Learning curves", "Validation accuracy, mean over seeds.", "training steps"),
        (sweeps, "Jacobi iterations at test time", "Other numbers than in training.", "Jacobi iterations"),
    ):
        plots += plot_lines(
            title,
            lines,
            caption,
            x_label=x_label,
            y_label="accuracy, %",
            y_scale="percent",
            alt_text=f"Accuracy by {x_label}",
            floor=floor,
        )
    return plots


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, float]]:
    """Return the mean over seeds of learning curves, in percent, at the steps that all have."""
    by_seed = [dict(curve) for curve in curves if curve]
    common = sorted(set.intersection(*map(set, by_seed)))
    return [(step, 100 * float(np.mean([curve[step] for curve in by_seed]))) for step in common]
