"""Results of compressors on documents as tables, JSON and pages: gains, recall, learned against fixed lengths."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from laconic.evaluation.compression import scores
from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.report.page import PageBlock, PagePlot, PageSection
from laconic.evaluation.report.papers import list_papers
from laconic.evaluation.report.plots import PlotSeries, plot_lines
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import (
    Column,
    Table,
    build_table,
    figures_to_json,
    format_mean,
    format_percent,
    format_with_error,
)

LEGEND = (
    "documents: held-out documents, or stretches of them, that were scored. vectors: per segment. before: vectors or "
    "tokens before the tail. none: no context. truncated: as many last tokens as vectors. other text: vectors of "
    "another document. gain: nats per token saved against no context, paired by document (untrained: against the "
    "untrained model). share: of the whole text's gain; – where the whole text was not read, or its gain is not "
    "significant. Lengths are hard except in soft. oracle length: the cheapest length of each segment, found by trial; "
    "an upper bound, not a method."
)


class GainRow(NamedTuple):
    """The gain of one condition of a run: a row of the table."""

    result: RunResult
    gain: scores.ContextGain


COLUMNS = (
    Column("data set", lambda row: row.result.task, is_text=True),
    Column("run", lambda row: row.result.run, is_text=True),
    Column("condition", lambda row: row.gain.condition, is_text=True),
    Column("documents", lambda row: f"{len(row.result.items_by_seed[0]):,}"),
    Column("vectors", lambda row: "–" if row.gain.mean_vectors is None else f"{row.gain.mean_vectors:.2f}"),
    Column("before", lambda row: f"{row.gain.context_size:.1f}"),
    Column("nats/token", lambda row: format_mean(row.gain.nll)),
    Column("perplexity", lambda row: f"{math.exp(row.gain.nll.mean):.2f}"),
    Column("accuracy", lambda row: f"{format_percent(row.gain.accuracy.mean)} %"),
    Column("gain ± s.e.", lambda row: format_with_error(f"{row.gain.gain.mean:+.4f}", row.gain.se, 4)),
    Column(
        "share", lambda row: "–" if row.gain.share_of_full is None else f"{format_percent(row.gain.share_of_full)} %"
    ),
)


def result_to_json(result: RunResult) -> dict[str, Any]:
    data: dict[str, Any] = {
        "dataset": result.task,
        "run": result.run,
        **result.info,
        "seeds": list(result.seeds),
        "documents": len(result.items_by_seed[0]),
        "conditions": [
            gain._asdict() | {"perplexity": math.exp(gain.nll.mean)} for gain in scores.context_gains(result)
        ],
        "bucket_tokens": BUCKET_TOKENS,
        "nll_by_position": {name: scores.nll_by_position(result, name) for name in result.conditions},
        "gap": scores.soft_hard_gap(result),
    }
    if scores.is_recall(result):
        first = result.items_by_seed[0][0].conditions
        with_vectors = [name for name in result.conditions if first[name]["vectors_per_segment"]]
        by_facts = {name: scores.recall_by_facts(result, name) for name in with_vectors}
        correlation = {name: scores.length_fact_correlation(result, name) for name in with_vectors}
        data["recall"] = {"by_facts": by_facts, "correlation": correlation}
    return figures_to_json(data)


def build_gain_table(results: Sequence[RunResult]) -> Table:
    return build_table(COLUMNS, [GainRow(result, gain) for result in results for gain in scores.context_gains(result)])


def format_recall(results: Sequence[RunResult]) -> list[str]:
    """Format the recall of runs by the number of facts for the lengths that they choose, and soft against hard."""
    lines: list[str] = []
    for result in results:
        for name in ("compressed", "sampled") if scores.is_recall(result) else ():
            if name in result.conditions:
                correlation = scores.length_fact_correlation(result, name)
                cells = "; ".join(
                    f"F={group.num_facts} {format_percent(group.accuracy)} % correct, N {group.mean_vectors:.2f}"
                    for group in scores.recall_by_facts(result, name)
                )
                text = "–" if correlation is None else f"{correlation:.3f}"
                lines.append(f"{result.run}, {name}: {cells}; correlation of N with F {text}")
        if gap := scores.soft_hard_gap(result):
            sampled = format_with_error(f"{gap.sampled_length:.3f}", gap.sampled_se, 3)
            lines.append(
                f"{result.run}, soft minus hard: {gap.nll:+.4f} nats per token, {100 * gap.accuracy:+.1f} points of "
                f"accuracy, {gap.num_vectors:+.2f} vectors; E[N] {gap.expected_length:.3f}, mean of sampled N {sampled}"
            )
    return lines


SERIES_STYLES = {
    scores.FIXED_LENGTH: ("o", "-"),
    scores.LEARNED_LENGTH: ("D", "none"),
    scores.TEXT_END: (".", ":"),
    scores.ORACLE_LENGTH: (".", "--"),
}
LEAD = (
    "Texts are compressed once into summary vectors, on held-out documents. The same tokens of each document are "
    "scored with no context, after the vectors, and after the text."
)
COMPARISON_NOTE = (
    "Paired by document with the straight line between the two nearest fixed lengths; beyond the longest, with that "
    f"length. Above or below the line means by more than {scores.SIGNIFICANT_ERRORS} standard errors over documents "
    "and seeds. Several rules of one head are compared, without correction for their number."
)
CAVEATS = (
    "Documents may be stretches of a few texts. Stretches are alike within a text; standard errors are over texts if "
    f"there are {scores.MIN_TEXT_GROUPS} or more, otherwise over stretches, and then errors over texts are larger.",
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
    if not results and not file_sections:
        return []
    by_documents: dict[Any, list[RunResult]] = {}
    for result in results:
        by_documents.setdefault((result.task, scores.document_keys(result)), []).append(result)
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
    points = [point for result in results for point in scores.pareto_points(result)]
    blocks: list[PageBlock] = [build_gain_table(results)]
    if len(points) > 1:
        blocks.append(plot_pareto(points, results))
    if comparisons := scores.compare_learned_lengths(points):
        blocks += [build_comparison_table(comparisons), COMPARISON_NOTE]
    return PageSection(f"{results[0].task}: {len(results[0].items_by_seed[0]):,} documents", blocks)


def plot_pareto(points: Sequence[scores.ParetoPoint], results: Sequence[RunResult]) -> list[PagePlot]:
    """Plot accuracy, or nats per token, against vectors per segment; horizontal lines are the whole text."""
    has_facts = scores.is_recall(results[0])
    lengths = [point.mean_point[0] for point in points]
    y_label, better = ("accuracy, %", "Higher") if has_facts else ("nats per token", "Lower")
    series: list[PlotSeries] = []
    for color, result in enumerate(results):
        for kind, (marker, linestyle) in SERIES_STYLES.items():
            means = [point.mean_point for point in points if (point.result.run, point.kind) == (result.run, kind)]
            values = [(x, 100 * y if has_facts else -y) for x, y in means]
            series.append(PlotSeries(f"{result.run}: {kind}", values, color, linestyle, marker))
        if "full" in result.conditions and not has_facts:
            nats = float(result.scores("full", scores.nll_per_token).mean())
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


def build_comparison_table(comparisons: Sequence[scores.LengthComparison]) -> Table:
    has_facts = scores.is_recall(comparisons[0].point.result)
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
            lambda c: format_with_error(f"{scale * c.difference:+z.{digits}f}", scale * c.se, digits),
        ),
        Column("result", lambda c: c.verdict),
    )
    return build_table(columns, comparisons, "Learned lengths against fixed ones of the same mean")
