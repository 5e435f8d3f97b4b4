"""Compare methods over their seeds: the table on a terminal, what the figures show, JSON and an HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laconic.batches import PassCounts
from laconic.console import pluralize
from laconic.evaluation import tables
from laconic.evaluation.inspection.page import lens_blocks, map_blocks, selection_blocks
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.paired_proportions import describe_test
from laconic.evaluation.reasoning.table import ReasoningRow, RowComparison, compare_costs, compare_rows
from laconic.evaluation.report import page
from laconic.evaluation.report.page import NO_PLOTS, PagePlot, PageSection, render_facts, render_table
from laconic.evaluation.report.plots import PlotSeries, has_matplotlib, plot_accuracies, plot_lines
from laconic.evaluation.tables import MIN_SEEDS, Column, Table, format_count, format_percent

INSPECTED_SPACES = ("keys", "values")


@dataclass(frozen=True)
class MethodResult:
    """One method over its seeds.

    `row` has its answers to the questions; `row.run` is the key of the method. Learning curves are (step, accuracy)
    points for each seed; `iteration_sweep` has the accuracy of each seed by the number of Jacobi iterations, and
    `cot_accuracy` with the chain written out by the same weights.
    """

    row: ReasoningRow
    title: str
    description: str
    is_control: bool = False
    color_index: int = 0
    learning_curves: Sequence[Sequence[tuple[int, float]]] = ()
    iteration_sweep: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    trained_iterations: int | None = None
    cot_accuracy: Sequence[float] = ()
    training_seconds: Sequence[float] = ()

    @property
    def name(self) -> str:
        return self.row.run


@dataclass(frozen=True)
class ComparisonReport:
    """Methods on one task: what a page shows of them.

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
    command: str = ""
    inspection: QuestionInspection | None = None

    def find_result(self, name: str) -> MethodResult | None:
        return next((result for result in self.results if result.name == name), None)

    @property
    def first_row(self) -> ReasoningRow:
        """The first method's answers; all methods answered the same questions."""
        return self.results[0].row

    @property
    def seeds(self) -> Sequence[int]:
        return self.first_row.seeds


def compare_to_focus(report: ComparisonReport) -> list[tuple[MethodResult, RowComparison]]:
    """Return every other method, and the focus minus it, with Holm's correction over all."""
    focus = report.find_result(report.focus)
    others = [result for result in report.results if result.name != report.focus]
    if focus is None:
        return []
    return list(zip(others, compare_rows([(focus.row, other.row) for other in others]), strict=True))


def format_passes(passes: Sequence[float]) -> str:
    """Format passes by part, without those that do not occur: `1 latent setup + 3 latent + 2 answer`."""
    parts = zip(PassCounts._fields, passes, strict=True)
    return " + ".join(f"{format_count(n)} {name.replace('_', ' ')}" for name, n in parts if n)


def format_total(passes: Sequence[float]) -> str:
    return f"{format_count(sum(passes))} = {'+'.join(map(format_count, passes))}"


POSITIONS = Column("positions", lambda result: " → ".join(map(format_count, result.row.mean_cache_positions)))
MILLISECONDS = Column("ms", lambda result: "–" if result.row.latency is None else f"{result.row.latency.median:.1f}")
TERMINAL_COLUMNS = (
    Column("", lambda result: result.title, is_text=True),
    Column("accuracy", lambda result: tables.format_accuracy(result.row.accuracy)),
    Column("95 % interval", lambda result: tables.format_interval(result.row.accuracy)),
    Column("passes", lambda result: format_total(result.row.mean_passes)),
    POSITIONS,
    MILLISECONDS,
)
PAGE_COLUMNS = (
    Column("method", lambda result: f"{result.title}{' (control)' if result.is_control else ''}", is_text=True),
    Column("how it answers", lambda result: result.description, is_text=True),
    Column(
        "accuracy, 95 % interval",
        lambda result: f"{tables.format_accuracy(result.row.accuracy)} ({tables.format_interval(result.row.accuracy)})",
    ),
    Column("forward passes", lambda result: format_passes(result.row.mean_passes)),
    POSITIONS._replace(title="cache positions"),
    MILLISECONDS,
)


def build_terminal_table(report: ComparisonReport) -> Table:
    """Return the table for a terminal; controls follow after an empty line."""
    table = tables.build_table(TERMINAL_COLUMNS, report.results)
    rows = [*table.rows]
    first_control = next((i for i, result in enumerate(report.results) if result.is_control), 0)
    return table._replace(rows=[*rows[:first_control], (), *rows[first_control:]] if first_control else rows)


def format_footnotes(report: ComparisonReport) -> str:
    answer, share = report.first_row.results[0].majority_baseline
    lines = [
        f'majority baseline {format_percent(share)} % (always "{answer}"); {report.first_row.accuracy.num_items:,} '
        f"unseen problems, {pluralize(len(report.seeds), 'seed')}",
        "passes: prompt + latent setup + latent + answer; positions in the cache when the answer begins and ends; "
        "ms: one question at a time",
        "",
    ]
    focus, compared = report.find_result(report.focus), compare_to_focus(report)
    if focus and compared:
        lines += [f"{focus.title} against", *(f"  {other.title}: {c.text}" for other, c in compared)]
    return "\n".join([*lines, "", "Not shown", *(f"  {text}" for text in list_caveats(report))])


def report_to_json(report: ComparisonReport) -> dict[str, Any]:
    rows = [
        {
            "name": result.name,
            "is_control": result.is_control,
            **result.row.costs_to_json(),
            "milliseconds": result.row.latency,
            "cot_accuracy": result.cot_accuracy,
            "iteration_sweep": {str(n): shares for n, shares in result.iteration_sweep.items()},
            "training_seconds": result.training_seconds,
        }
        for result in report.results
    ]
    comparisons = [{"other": other.name, **c.to_json()} for other, c in compare_to_focus(report)]
    first = report.first_row.results[0]
    data = {
        "schema": 2,
        "protocol": first.protocol,
        "seeds": report.seeds,
        "questions": len(first.records),
        "majority_baseline": first.majority_baseline,
        "rows": rows,
        "comparisons": comparisons,
        "caveats": list_caveats(report),
    }
    return tables.figures_to_json(data)


def list_caveats(report: ComparisonReport) -> list[str]:
    """Return what the figures do not show, then the report's own caveats."""
    focus, cot = report.find_result(report.focus), report.find_result(report.cot_baseline)
    caveats: list[str] = []
    if len(report.seeds) < MIN_SEEDS:
        runs = "one run" if len(report.seeds) == 1 else f"{len(report.seeds)} runs"
        caveats.append(f"Seeds: {runs} of each. Intervals hold for these runs; another seed may fall outside them.")
    if focus and cot:
        caveats += [f"Costs: {text}." for text in compare_costs(focus.row, cot.row, focus.title)]
    for other, c in compare_to_focus(report):
        if not c.is_significant and other.is_control and focus:
            caveats.append(f"That {focus.title} is better than {other.title}: {c.text}.")
    return [*caveats, *report.caveats]


def render_report(report: ComparisonReport) -> str:
    focus = report.find_result(report.focus)
    sections = [PageSection("Results", results_blocks(report))]
    if focus and (compared := compare_to_focus(report)):
        pairs, test = "problems" if len(report.seeds) == 1 else "problems and seeds", describe_test(len(report.seeds))
        about = (
            f"{focus.title} minus the other, on the same {pairs}: 95 % interval; p: {test}, "
            f"Holm's correction over the {len(compared)} comparisons. Where p is above 5 % or the interval contains 0, "
            "nothing is claimed."
        )
        table = render_facts([(f"over {other.title}", c.text) for other, c in compared])
        sections.append(PageSection(f"Differences from {focus.title}", [about, table]))
    if report.inspection:
        sections.append(PageSection("One question inspected", inspection_blocks(report.inspection)))
    caveats, differences = list_caveats(report), report.recipe_differences
    table = Table(("key", "here", "why"), differences, num_text_columns=3)
    facts = [("command", report.command)] if report.command else []
    facts += [("seeds", ", ".join(map(str, report.seeds))), *report.facts]
    sections += [
        PageSection("What this does not show", [page.render_list(caveats)] if caveats else []),
        PageSection("Where the recipes differ from the papers", [render_table(table)] if differences else []),
        PageSection("Runs", [render_facts(facts)]),
    ]
    return page.render_page(report.title, sections, [report.lead])


def results_blocks(report: ComparisonReport) -> list[str]:
    first = report.first_row
    answer, floor = first.results[0].majority_baseline
    n = "" if len(report.seeds) >= MIN_SEEDS else f" {pluralize(len(report.seeds), 'seed')}."
    about = (
        f"{first.accuracy.num_items:,} unseen problems, judged by the {first.results[0].protocol}.{n} The majority "
        f"baseline, always “{answer}”, is correct in {format_percent(floor)} %. Positions: when the answer begins → at "
        "its end. Milliseconds: batch size 1, greedy, median. A control is the same training with one part removed or "
        "replaced."
    )
    plots = page.render_plots(plot_results(report, 100 * floor)) if has_matplotlib() else NO_PLOTS
    return [plots, render_table(tables.build_table(PAGE_COLUMNS, report.results)), about]


def plot_results(report: ComparisonReport, floor: float) -> list[PagePlot]:
    """Return plots of accuracy, learning curves and Jacobi iterations; `floor` is the majority baseline in percent."""
    accuracies = [(r, r.row.accuracy, 2 if r.is_control else r.color_index) for r in report.results]
    bars = [(r.title, 100 * x.mean, 100 * x.low, 100 * x.high, color) for r, x, color in accuracies]
    plots = [PagePlot("Accuracy", "Dark line: 95 % interval. Dashed: majority baseline.", plot_accuracies(bars, floor))]
    methods = [result for result in report.results if not result.is_control]
    curves = [
        PlotSeries(r.title, mean_curve(r.learning_curves), r.color_index) for r in methods if any(r.learning_curves)
    ]
    percent: dict[str, Any] = {"y_label": "accuracy, %", "is_percent": True, "floor": floor}
    if curves:
        image = plot_lines(curves, x_label="training steps", alt_text="Accuracy over training steps", **percent)
        plots.append(PagePlot("Learning curves", "Validation accuracy, mean over seeds.", image))
    sweeps = [
        PlotSeries(r.title, [(n, 100 * float(np.mean(x))) for n, x in r.iteration_sweep.items()], r.color_index)
        for r in methods
        if len(r.iteration_sweep) > 1
    ]
    if sweeps:
        image = plot_lines(sweeps, x_label="Jacobi iterations", alt_text="Accuracy by Jacobi iterations", **percent)
        trained = ", ".join(f"{r.title} {r.trained_iterations}" for r in methods if r.trained_iterations is not None)
        plots.append(PagePlot("Jacobi iterations at test time", f"Trained with: {trained}.", image))
    return plots


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, float]]:
    """Return the mean over seeds of learning curves, in percent, at the steps that all have."""
    by_seed = [dict(curve) for curve in curves if curve]
    common = sorted(set.intersection(*map(set, by_seed)))
    return [(step, 100 * float(np.mean([curve[step] for curve in by_seed]))) for step in common]


def inspection_blocks(inspection: QuestionInspection) -> list[str]:
    lens = inspection.lens
    blocks = [f"The first test problem: {' '.join(lens.question)}", f"Its chain: {' '.join(lens.chain)}"]
    if inspection.best_tokens:
        tokens = ", ".join(f"{m + 1} {token} {100 * x:.0f} %" for m, (token, x) in enumerate(inspection.best_tokens))
        blocks.append(f"Each latent is distilled towards, with the share of layers and heads that chose it: {tokens}.")
    blocks += lens_blocks([inspection])
    blocks += [block for space in INSPECTED_SPACES for block in map_blocks([inspection], space, "chain")]
    return [*blocks, *(selection_blocks(inspection) if inspection.selections else [])]
