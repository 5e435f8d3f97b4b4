"""HTML report on compressors: gains over no context, quality by number of vectors, learned against fixed lengths."""

from collections.abc import Sequence
from typing import Any

from laconic.evaluation.compression.pareto import (
    FIXED_LENGTH,
    LEARNED_LENGTH,
    ORACLE_LENGTH,
    TEXT_END,
    LengthComparison,
    ParetoPoint,
    compare_learned_lengths,
    document_keys,
    pareto_points,
)
from laconic.evaluation.compression.scores import MIN_TEXT_GROUPS, SIGNIFICANT_ERRORS, is_recall, nll_per_token
from laconic.evaluation.compression.table import LEGEND, build_gain_table, format_recall
from laconic.evaluation.report.page import PageBlock, PagePlot, PageSection
from laconic.evaluation.report.papers import list_papers
from laconic.evaluation.report.plots import PlotSeries, plot_lines
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import Column, Table, build_table, format_signed, format_with_error

SERIES_STYLES = {
    FIXED_LENGTH: ("o", "-"),
    LEARNED_LENGTH: ("D", "none"),
    TEXT_END: (".", ":"),
    ORACLE_LENGTH: (".", "--"),
}
LEAD = (
    "Texts are compressed once into summary vectors, on held-out documents. The same tokens of each document are "
    "scored with no context, after the vectors, and after the text."
)
COMPARISON_NOTE = (
    "Paired by document with the straight line between the two nearest fixed lengths; beyond the longest, with that "
    f"length. Above or below the line means by more than {SIGNIFICANT_ERRORS} standard errors over documents and "
    "seeds. Several rules of one head are compared, without correction for their number."
)
CAVEATS = (
    "Documents may be stretches of a few texts. Stretches are alike within a text; standard errors are over texts if "
    f"there are {MIN_TEXT_GROUPS} or more, otherwise over stretches, and then errors over texts are larger.",
    "Whether a learned length is better than a fixed one of the same mean is an open question: no run of the original "
    "design was published, and the nearest published work reports that continuous ratios fail (arXiv:2603.25926) and "
    "that means over spans do better (arXiv:2510.20797). A comparison here holds for these runs only.",
    "Where the full text fits the model's context, it gives a lower loss than a compressed one.",
    "A memory that is overwritten forgets. Results of tiny models need not hold for large ones.",
    "Soft figures are of a reading that inference does not use; gates do not limit what the vectors carry.",
)
PAPERS_NOTE = (
    "AutoCompressors of other models, texts and sizes than these runs; comparable only where a run uses the paper’s "
    "recipe. The original variable-length design published no figures."
)


def build_sections(results: Sequence[RunResult], file_sections: Sequence[PageSection]) -> list[PageSection]:
    """Return the sections on context compression: results on documents, then on files of questions or labels."""
    if not results and not file_sections:
        return []
    by_documents: dict[Any, list[RunResult]] = {}
    for result in results:
        by_documents.setdefault((result.task, document_keys(result)), []).append(result)
    papers = list_papers(["tails", "retrieval", "ablations", "labels"])
    return [
        PageSection("Context compression", [LEAD, *([LEGEND] if results else [])]),
        *map(document_section, by_documents.values()),
        PageSection("Recall and soft reading", [format_recall(results)]),
        *file_sections,
        PageSection("Published results on compression", [PAPERS_NOTE, *papers]),
        PageSection("Limitations of compression results", [CAVEATS]),
    ]


def document_section(results: Sequence[RunResult]) -> PageSection:
    """Return the section about runs on the same documents, with a plot if several lengths were evaluated."""
    points = [point for result in results for point in pareto_points(result)]
    blocks: list[PageBlock] = [build_gain_table(results)]
    if len(points) > 1:
        blocks.append(plot_pareto(points, results))
    if comparisons := compare_learned_lengths(points):
        blocks += [build_comparison_table(comparisons), COMPARISON_NOTE]
    return PageSection(f"{results[0].task}: {len(results[0].items_by_seed[0]):,} documents", blocks)


def plot_pareto(points: Sequence[ParetoPoint], results: Sequence[RunResult]) -> list[PagePlot]:
    """Plot accuracy, or nats per token, against vectors per segment; horizontal lines are the whole text."""
    has_facts = is_recall(results[0])
    lengths = [point.mean_point[0] for point in points]
    y_label, better = ("accuracy, %", "Higher") if has_facts else ("nats per token", "Lower")
    series: list[PlotSeries] = []
    for color, result in enumerate(results):
        for kind, (marker, linestyle) in SERIES_STYLES.items():
            means = [point.mean_point for point in points if (point.result.run, point.kind) == (result.run, kind)]
            values = [(x, 100 * y if has_facts else -y) for x, y in means]
            series.append(PlotSeries(f"{result.run}: {kind}", values, color, linestyle, marker))
        if "full" in result.conditions and not has_facts:
            nats = float(result.scores("full", nll_per_token).mean())
            values = [(min(lengths), nats), (max(lengths), nats)]
            series.append(PlotSeries(f"{result.run}: whole text", values, color, "-.", "None"))
    return plot_lines(
        "Quality against vectors",
        series,
        f"{better} is better. One point per length; diamonds are learned lengths. The best lengths are an upper bound.",
        x_label="mean vectors per segment",
        y_label=y_label,
        alt_text="Quality by vectors per segment",
    )


def build_comparison_table(comparisons: Sequence[LengthComparison]) -> Table:
    """Build the table of learned against fixed lengths of the same mean."""
    has_facts = is_recall(comparisons[0].point.result)
    scale, sign, digits = (100, 1, 1) if has_facts else (1, -1, 4)
    columns = (
        Column("run, rule", lambda c: f"{c.point.result.run}, {c.point.condition}", is_text=True),
        Column("fixed lengths of", lambda c: c.baseline, is_text=True),
        Column("vectors", lambda c: f"{c.point.mean_point[0]:.2f}"),
        Column(
            "accuracy, %" if has_facts else "nats per token",
            lambda c: f"{sign * scale * c.point.mean_point[1]:.{digits}f}",
        ),
        Column("on the line", lambda c: f"{sign * scale * c.fixed_quality:.{digits}f}"),
        Column(
            "better by",
            lambda c: format_with_error(format_signed(scale * c.difference, digits), scale * c.se, digits),
        ),
        Column("result", lambda c: c.verdict),
    )
    return build_table(columns, comparisons, "Learned lengths against fixed ones of the same mean")
