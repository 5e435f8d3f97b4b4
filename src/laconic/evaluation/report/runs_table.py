"""Compare methods over their seeds: the table on a terminal, what the figures show, JSON and an HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laconic.batches import PassCounts
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.evaluation import statistics
from laconic.evaluation.inspection.page import lens_blocks, map_blocks, selection_blocks
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.inspection.summary import QuestionSummary
from laconic.evaluation.reasoning.latency import Latency
from laconic.evaluation.report.page import (
    NO_PLOTS,
    PagePlot,
    PageSection,
    render_details,
    render_facts,
    render_list,
    render_page,
    render_plots,
    render_table,
)
from laconic.evaluation.report.plots import PlotSeries, has_matplotlib, plot_bars, plot_lines
from laconic.evaluation.statistics import Difference, Estimate, ScoreMatrix
from laconic.evaluation.tables import (
    MIN_SEEDS,
    Table,
    format_accuracy,
    format_count,
    format_interval,
    format_percent,
)

INSPECTED_SPACES = ("keys", "values")


@dataclass(frozen=True)
class MethodResult:
    """One method over its seeds.

    Attributes:
        name: Key of the method.
        title: Its title in tables.
        description: How it answers.
        correct: 1 for each correct answer, [seeds, questions].
        passes: Mean forward passes per question, by part.
        cache_positions: Mean cache positions when the answer begins and at its end.
        is_control: Whether it is an ablation of another method.
        color_index: Place in the colour cycle of plots.
        latency: Time per question.
        questions_per_second: Throughput.
        bytes_per_position: Bytes of one cache position.
        learning_curves: (step, accuracy) points for each seed.
        iteration_sweep: Accuracy of each seed by the number of Jacobi iterations.
        trained_iterations: Jacobi iterations of training.
        cot_accuracy: Accuracy of each seed with the chain written out by the same weights.
        training_seconds: Training time of each seed.
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
    """Methods on one task.

    Attributes:
        title: Title of the page.
        lead: What was done.
        results: The methods.
        focus: Name of the method that the others are compared with.
        cot_baseline: Name of the method that writes the chain.
        majority_baseline: The most frequent answer and its share.
        protocol: How answers are matched.
        seeds: Training seeds.
        caveats: What the results leave open.
        recipe_differences: Key, value and reason where recipes differ from the papers.
        facts: Names and values about data, device and versions.
        runs: Names and values about each run.
        command: The command that repeats it.
        inspection: One question inspected.
        inspection_title: What that question is.
    """

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
        """Return the method of that name."""
        return next((result for result in self.results if result.name == name), None)

    @property
    def num_questions(self) -> int:
        """Number of questions that every method answered."""
        return self.results[0].correct.shape[1]


class FocusComparison(NamedTuple):
    """The focus minus another method."""

    other: MethodResult
    difference: Difference
    is_significant: bool
    text: str


def compare_to_focus(report: ComparisonReport) -> list[FocusComparison]:
    """Return the focus minus every other method, with Holm's correction over all."""
    focus = report.find_result(report.focus)
    others = [result for result in report.results if result.name != report.focus]
    if focus is None:
        return []
    differences = [statistics.paired_difference(*common_seeds(focus, other)) for other in others]
    rows = zip(others, differences, statistics.find_significant(differences), strict=True)
    return [FocusComparison(x, d, is_clear, statistics.describe_difference(d, is_clear)) for x, d, is_clear in rows]


def common_seeds(a: MethodResult, b: MethodResult) -> tuple[ScoreMatrix, ScoreMatrix]:
    """Return the scores of the seeds that both have, from the first."""
    n = min(len(a.correct), len(b.correct))
    return a.correct[:n], b.correct[:n]


def format_passes(passes: Sequence[float]) -> str:
    """Format passes by part, without those that do not occur: `1 latent setup + 3 latent + 2 answer`."""
    parts = zip(PassCounts._fields, passes, strict=True)
    return " + ".join(f"{format_count(n)} {name.replace('_', ' ')}" for name, n in parts if n)


def result_cells(result: MethodResult) -> tuple[str, str, str, str, str, str]:
    """Return the cells of a method: accuracy, interval, passes, their parts, cache positions, milliseconds."""
    begin, end = result.cache_positions
    return (
        format_accuracy(result.accuracy),
        format_interval(result.accuracy),
        format_count(sum(result.passes)),
        format_passes(result.passes),
        f"{format_count(begin)} → {format_count(end)}",
        "–" if result.latency is None else f"{result.latency.median:.1f}",
    )


def build_table(report: ComparisonReport) -> Table:
    """Return the table for a terminal; controls follow after an empty line."""
    rows: list[Sequence[str]] = []
    for i, result in enumerate(report.results):
        if result.is_control and i and not report.results[i - 1].is_control:
            rows.append(())
        accuracy, interval, total, _, positions, ms = result_cells(result)
        passes = f"{total} = {'+'.join(map(format_count, result.passes))}"
        rows.append((result.title, accuracy, interval, passes, positions, ms))
    return Table(("", "accuracy", "95 % interval", "passes", "positions", "ms"), rows)


def format_footnotes(report: ComparisonReport) -> str:
    """Return the lines under the table."""
    answer, share = report.majority_baseline
    lines = [
        f'majority baseline {format_percent(share)} % (always "{answer}"); {report.num_questions:,} unseen problems, '
        f"n={len(report.seeds)}",
        "passes: prompt + latent setup + latent + answer; positions in the cache when the answer begins and ends; "
        "ms: one question at a time",
        "",
    ]
    focus, compared = report.find_result(report.focus), compare_to_focus(report)
    if focus and compared:
        lines += [f"{focus.title} against", *(f"  {c.other.title}: {c.text}" for c in compared)]
    return "\n".join([*lines, "", "Not shown", *(f"  {text}" for text in list_caveats(report))])


def report_to_json(report: ComparisonReport) -> dict[str, Any]:
    """Return the figures as JSON."""
    rows = [
        {
            "name": result.name,
            "is_control": result.is_control,
            "accuracy": result.accuracy._asdict(),
            "passes": dict(zip(PassCounts._fields, result.passes, strict=True)) | {"total": sum(result.passes)},
            "cache_positions": {
                "begin": result.cache_positions[0],
                "end": result.cache_positions[1],
                "bytes": result.cache_positions[1] * result.bytes_per_position,
            },
            "milliseconds": result.latency and result.latency._asdict(),
            "cot_accuracy": list(result.cot_accuracy),
            "iteration_sweep": {str(n): list(shares) for n, shares in result.iteration_sweep.items()},
            "training_seconds": list(result.training_seconds),
        }
        for result in report.results
    ]
    comparisons = [
        {"other": c.other.name, **c.difference._asdict(), "is_significant": c.is_significant, "text": c.text}
        for c in compare_to_focus(report)
    ]
    return {
        "schema": 2,
        "protocol": report.protocol,
        "seeds": list(report.seeds),
        "questions": report.num_questions,
        "majority_baseline": dict(zip(("answer", "share"), report.majority_baseline, strict=True)),
        "rows": rows,
        "comparisons": comparisons,
        "caveats": list_caveats(report),
    }


def list_caveats(report: ComparisonReport) -> list[str]:
    """Return what the figures do not show, then the report's own caveats."""
    focus, cot = report.find_result(report.focus), report.find_result(report.cot_baseline)
    caveats: list[str] = []
    if len(report.seeds) < MIN_SEEDS:
        runs = "one run" if len(report.seeds) == 1 else f"{len(report.seeds)} runs"
        caveats.append(f"Seeds: {runs} of each. Intervals hold for these runs; another seed may fall outside them.")
    if focus and cot:
        passes, cot_passes = sum(focus.passes), sum(cot.passes)
        if passes >= cot_passes:
            caveats.append(
                f"No passes are saved: {focus.title} takes {format_count(passes)} per question, the chain "
                f"{format_count(cot_passes)}."
            )
        if focus.cache_positions[1] >= cot.cache_positions[1]:
            caveats.append(
                f"The cache is not shorter: {format_count(focus.cache_positions[1])} positions at the end, "
                f"{format_count(cot.cache_positions[1])} with the chain."
            )
    for c in compare_to_focus(report):
        if not c.is_significant and c.other.is_control and focus:
            caveats.append(f"That {focus.title} is better than {c.other.title}: {c.text}.")
    return [*caveats, *report.caveats]


def render_report(report: ComparisonReport) -> str:
    """Return the page."""
    focus = report.find_result(report.focus)
    sections = [PageSection("Results", results_blocks(report))]
    if focus and (compared := compare_to_focus(report)):
        pairs = "problems" if len(report.seeds) == 1 else "problems and seeds"
        about = (
            f"{focus.title} minus the other, on the same {pairs}: 95 % paired bootstrap, Holm's correction over the "
            f"{len(compared)} comparisons. Where the interval contains 0, nothing is claimed."
        )
        table = render_facts([(f"over {c.other.title}", c.text) for c in compared])
        sections.append(PageSection(f"Differences from {focus.title}", [about, table]))
    if report.inspection:
        sections.append(PageSection("One question inspected", inspection_blocks(report, report.inspection)))
    caveats, differences = list_caveats(report), report.recipe_differences
    table = Table(("key", "here", "why"), differences, num_text_columns=3)
    facts = [("command", report.command)] if report.command else []
    facts += [("seeds", ", ".join(map(str, report.seeds))), *report.facts]
    runs = [render_details(f"Runs ({len(report.runs)})", [render_facts(report.runs)])] if report.runs else []
    sections += [
        PageSection("What this does not show", [render_list(caveats)] if caveats else []),
        PageSection("Where the recipes differ from the papers", [render_table(table)] if differences else []),
        PageSection("Runs", [render_facts(facts), *runs]),
    ]
    return render_page(report.title, sections, [report.lead])


def results_blocks(report: ComparisonReport) -> list[str]:
    """Return the plots and the table of results."""
    answer, floor = report.majority_baseline
    rows = [
        (
            f"{result.title}{' (control)' if result.is_control else ''}",
            result.description,
            f"{accuracy} ({interval})",
            passes,
            positions,
            ms,
        )
        for result in report.results
        for accuracy, interval, _, passes, positions, ms in [result_cells(result)]
    ]
    header = ("method", "how it answers", "accuracy, 95 % interval", "forward passes", "cache positions", "ms")
    n = "" if len(report.seeds) >= MIN_SEEDS else f" n={len(report.seeds)}."
    about = (
        f"{report.num_questions:,} unseen problems, judged by the {report.protocol}.{n} The majority baseline, always "
        f"“{answer}”, is correct in {format_percent(floor)} %. Positions: when the answer begins → at its end. "
        "Milliseconds: batch size 1, greedy, median. A control is the same training with one part removed or replaced."
    )
    table = render_table(Table(header, rows, num_text_columns=2))
    return [*(plot_results(report) if has_matplotlib() else [NO_PLOTS]), table, about]


def plot_results(report: ComparisonReport) -> list[str]:
    """Return plots of accuracy, learning curves and Jacobi iterations."""
    floor = 100 * report.majority_baseline[1]
    bars = [
        (
            r.title,
            100 * r.accuracy.mean,
            100 * r.accuracy.low,
            100 * r.accuracy.high,
            2 if r.is_control else r.color_index,
        )
        for r in report.results
    ]
    image = plot_bars(bars, x_label="accuracy, %", alt_text="Accuracy", floor=floor)
    plots = [PagePlot("Accuracy", "Dark line: 95 % interval. Dashed: majority baseline.", image)]
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
    return [render_plots(plots)]


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, float]]:
    """Return the mean over seeds of learning curves, in percent, at the steps that all have."""
    common = set.intersection(*({step for step, _ in curve} for curve in curves if curve))
    by_step = {step: [share for curve in curves for s, share in curve if s == step] for step in sorted(common)}
    return [(step, 100 * float(np.mean(shares))) for step, shares in by_step.items()]


def inspection_blocks(report: ComparisonReport, inspection: QuestionInspection) -> list[str]:
    """Return what one question shows of the latents."""
    lens = inspection.lens
    summary = QuestionSummary("".join(lens.question), "", lens.chain, None, None, (inspection,), DIGIT)
    blocks = [f"{report.inspection_title}: {' '.join(lens.question)}", f"Its chain: {' '.join(lens.chain)}"]
    if inspection.best_tokens:
        tokens = ", ".join(f"{m + 1} {token} {100 * x:.0f} %" for m, (token, x) in enumerate(inspection.best_tokens))
        blocks.append(f"Each latent is distilled towards, with the share of layers and heads that chose it: {tokens}.")
    blocks += lens_blocks(summary)
    blocks += [block for space in INSPECTED_SPACES for block in map_blocks(summary, space, "chain")]
    return [*blocks, *(selection_blocks(inspection, lens.chain) if inspection.selections else [])]
