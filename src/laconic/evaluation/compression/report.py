"""HTML report on compressors: gains over no context, quality by number of vectors, learned against fixed lengths."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from laconic.evaluation.compression import pareto
from laconic.evaluation.compression.context_qa_report import build_file_section
from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.pareto import (
    FIXED_LENGTH,
    LEARNED_LENGTH,
    ORACLE_LENGTH,
    TEXT_END,
    LengthComparison,
    ParetoPoint,
)
from laconic.evaluation.compression.perplexity import (
    FULL_TUNED,
    MIN_TEXT_GROUPS,
    SIGNIFICANT_ERRORS,
    nll_by_position,
    nll_per_document,
    text_name,
)
from laconic.evaluation.compression.table import (
    LEGEND,
    build_gain_table,
    condition_title,
    document_keys,
    format_recall,
    is_recall,
)
from laconic.evaluation.report import page
from laconic.evaluation.report.page import PagePlot, PageSection
from laconic.evaluation.report.papers import render_papers
from laconic.evaluation.report.plots import NUM_COLORS, PlotSeries, has_matplotlib, plot_lines
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import Column, build_table, format_signed, format_with_error

SERIES_STYLES = {
    FIXED_LENGTH: ("o", "-"),
    LEARNED_LENGTH: ("D", "none"),
    TEXT_END: (".", ":"),
    ORACLE_LENGTH: (".", "--"),
}
POSITION_STYLES = {"none": ":", "compressed": "-", "full": "--"}
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


def build_sections(results: Sequence[RunResult], file_results: Sequence[RunResult] = ()) -> list[PageSection]:
    """Return the sections on context compression: results on documents, then on files of questions or labels."""
    if not results and not file_results:
        return []
    by_documents: dict[Any, list[RunResult]] = {}
    for result in results:
        by_documents.setdefault((result.task, document_keys(result)), []).append(result)
    recall, papers = format_recall(results), render_papers(["tails", "retrieval", "ablations", "labels"])
    return [
        PageSection("Context compression", [LEAD, *([LEGEND] if results else [])]),
        *(document_section(same) for same in by_documents.values()),
        PageSection("Recall and soft reading", [page.render_list(recall)] if recall else []),
        *map(build_file_section, file_results),
        PageSection("Published results on compression", [PAPERS_NOTE, *papers]),
        PageSection("Limitations of compression results", [page.render_list(list_caveats(results))]),
    ]


def document_section(results: Sequence[RunResult]) -> PageSection:
    first = results[0]
    plots = page.render_plots(document_plots(results)) if has_matplotlib() else page.NO_PLOTS
    blocks: list[str | Markup] = [page.render_table(build_gain_table(results)), plots]
    if comparisons := pareto.compare_learned_lengths(results):
        blocks += [comparison_table(comparisons, is_recall(first)), COMPARISON_NOTE]
    return PageSection(f"{first.task}: {len(first.items_by_seed[0]):,} documents", blocks)


def document_plots(results: Sequence[RunResult]) -> list[PagePlot]:
    """Plot quality against vectors if several lengths were evaluated, and loss along the tail if it is long."""
    points = [point for result in results for point in pareto.pareto_points(result)]
    plots = [plot_pareto(points, results)] if len(points) > 1 else []
    is_long = sum(bool(n) for n in results[0].items_by_seed[0][0].shared["scored_tokens"]) > 1
    return [*plots, *([plot_positions(results)] if is_long else [])]


def plot_pareto(points: Sequence[ParetoPoint], results: Sequence[RunResult]) -> PagePlot:
    """Plot accuracy, or nats per token, against vectors per segment; horizontal lines are the whole text."""
    has_facts, lengths = is_recall(results[0]), [point.mean_point[0] for point in points]
    y_label, better = ("accuracy, %", "Higher") if has_facts else ("nats per token", "Lower")
    series: list[PlotSeries] = []
    for color, result in enumerate(results):
        for kind, (marker, linestyle) in SERIES_STYLES.items():
            means = [point.mean_point for point in points if (point.result.run, point.kind) == (result.run, kind)]
            values = [(x, 100 * y if has_facts else -y) for x, y in means]
            series.append(PlotSeries(f"{result.run}: {kind}", values, color % NUM_COLORS, linestyle, marker))
        for condition in () if has_facts else (FULL_TUNED, "full"):
            if condition in result.conditions:
                nats = float(nll_per_document(result.items_by_seed, condition).mean())
                values = [(min(lengths), nats), (max(lengths), nats)]
                label = f"{result.run}: {condition_title(condition)}"
                series.append(PlotSeries(label, values, color % NUM_COLORS, "-.", "None"))
    alt_text = "Quality by vectors per segment"
    image = plot_lines(series, x_label="mean vectors per segment", y_label=y_label, alt_text=alt_text)
    caption = "One point per length; diamonds are learned lengths. The best lengths are an upper bound."
    return PagePlot("Quality against vectors", f"{better} is better. {caption}", image)


def plot_positions(results: Sequence[RunResult]) -> PagePlot:
    """Plot nats per token along the tail: without context, compressed, and with the whole text."""
    series: list[PlotSeries] = []
    for color, result in enumerate(results):
        for condition, linestyle in POSITION_STYLES.items():
            if condition in result.conditions:
                nats = enumerate(nll_by_position(result.items_by_seed, condition))
                values = [(BUCKET_TOKENS * (bucket + 0.5), y) for bucket, y in nats]
                label = f"{result.run}: {condition_title(condition)}"
                series.append(PlotSeries(label, values, color % NUM_COLORS, linestyle))
    alt_text = "Nats per token by position in the tail"
    image = plot_lines(series, x_label="tokens of the tail", y_label="nats per token", alt_text=alt_text)
    return PagePlot("Along the tail", "Dotted: no context; solid: compressed; dashed: whole text.", image)


def comparison_table(comparisons: Sequence[LengthComparison], has_facts: bool) -> Markup:
    """Build the table of learned against fixed lengths of the same mean."""
    scale, sign, digits = (100, 1, 1) if has_facts else (1, -1, 4)
    quality = "accuracy, %" if has_facts else "nats per token"
    columns = (
        Column("run, rule", lambda c: f"{c.point.result.run}, {c.point.condition}", is_text=True),
        Column("fixed lengths of", lambda c: c.baseline, is_text=True),
        Column("vectors", lambda c: f"{c.point.mean_point[0]:.2f}"),
        Column(quality, lambda c: f"{sign * scale * c.point.mean_point[1]:.{digits}f}"),
        Column("on the line", lambda c: f"{sign * scale * c.fixed_quality:.{digits}f}"),
        Column(
            "better by",
            lambda c: format_with_error(format_signed(scale * c.difference, digits), scale * c.se, digits),
        ),
        Column("result", lambda c: c.verdict),
    )
    caption = "Learned lengths against fixed ones of the same mean"
    return page.render_table(build_table(columns, comparisons, caption))


def list_caveats(results: Sequence[RunResult]) -> Sequence[str]:
    """Return what the figures do not show, followed by `CAVEATS`."""
    num_texts = [
        len({text_name(item.id) for item in result.items_by_seed[0]}) for result in results if not is_recall(result)
    ]
    if not num_texts or min(num_texts) >= MIN_TEXT_GROUPS:
        return CAVEATS
    caveat = (
        f"Documents are stretches of only {min(num_texts)} texts. Standard errors are over stretches, which are alike "
        "within a text, so errors over texts are larger."
    )
    return [caveat, *CAVEATS]
