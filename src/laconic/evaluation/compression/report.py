"""The page on runs that read: what a memory is worth, against how many vectors, and what learned lengths bring."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from laconic.evaluation.compression import fact_recall, pareto
from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.pareto import LengthComparison
from laconic.evaluation.compression.perplexity import (
    FULL_TUNED,
    MIN_TEXT_GROUPS,
    SIGNIFICANT_ERRORS,
    UNTRAINED,
    ContextGain,
    common_conditions,
)
from laconic.evaluation.compression.pictures import (
    LegendEntry,
    build_legend,
    condition_title,
    plot_pareto,
    plot_positions,
)
from laconic.evaluation.compression.table import CompressionResult
from laconic.evaluation.report import old_plots as report_plots
from laconic.evaluation.report import reported_reading
from laconic.evaluation.report.html import load_template
from laconic.evaluation.report.old_plots import has_matplotlib
from laconic.evaluation.report.runs_table import MIN_SEEDS, format_count, format_percent

CAVEATS = (
    "That a learned length is better than a fixed one of the same mean is not known: no run of the original design was "
    "published, the nearest published attempts report that continuous ratios fail (arXiv:2603.25926) and that means "
    "over spans do better (arXiv:2510.20797). A verdict here is of these runs alone.",
    "A compressed context loses to the plain text wherever that fits the model.",
    "A memory that is replaced forgets; what tiny models show does not carry over to large ones.",
    "The soft figures are of another reading, not of the one that is used: a gate bounds no information.",
)


class ReportSection(NamedTuple):
    """All that the page shows of a set."""

    name: str
    num_documents: int
    is_recall: bool
    rows: Sequence[tuple[CompressionResult, ContextGain, bool]]
    pareto_plot: Markup | None
    legend: Sequence[LegendEntry]
    position_plot: Markup | None
    comparisons: Sequence[LengthComparison]
    results: Sequence[CompressionResult]

    @property
    def has_full_tuned(self) -> bool:
        """Whether a plain run stands beside."""
        return any(FULL_TUNED in common_conditions(line.documents_by_seed) for line in self.results)


def is_main_row(condition: str) -> bool:
    """Whether a way stands in the table itself; lengths one by one stand folded beneath it."""
    return not condition.startswith(("n = ", "end", "quantile"))


def build_section(i: int, results: Sequence[CompressionResult]) -> ReportSection:
    """The runs on the same documents; `i` tells drawings apart."""
    rows = [(line, worth, is_main_row(worth.condition)) for line in results for worth in line.gains]
    found = [point for line in results for point in pareto.pareto_points(line)]
    runs = list(dict.fromkeys(line.run for line in results))
    drawn = plot_pareto(found, runs, results, i) if has_matplotlib() and len(found) > 1 else None
    keys = build_legend(found, runs, results)
    long = sum(bool(n) for n in results[0].documents_by_seed[0][0].scored_tokens) > 1
    along = plot_positions(results, i) if has_matplotlib() and long else None
    return ReportSection(
        results[0].dataset,
        len(results[0].documents_by_seed[0]),
        results[0].is_recall,
        rows,
        drawn,
        keys,
        along,
        pareto.compare_learned_lengths(results),
        results,
    )


def summary_sentences(sections: Sequence[ReportSection]) -> list[str]:
    """What the figures say, first of all."""
    found: list[str] = []
    for each in sections:
        for line in each.results:
            said = {w.condition: w for w in line.gains}
            if "compressed" in said:
                found.append(summarize_run(line, said))
    return found


def summarize_run(result: CompressionResult, gains: dict[str, ContextGain]) -> str:
    """A run on a set in a sentence."""
    w = gains["compressed"]
    times = w.gain.mean / w.se if w.se > 0 else float("nan")
    text = f"{result.dataset}, {result.run}: {w.mean_vectors:.2f} vectors a segment save {w.gain.mean:+.4f} ± {w.se:.4f} nats a token"
    text += f" ({times:.1f} standard errors)"
    text += f", {format_percent(w.share_of_full)} % of what the whole text saves" if w.share_of_full is not None else ""
    if "truncated" in gains:
        text += f"; as many tokens of text save {gains['truncated'].gain.mean:+.4f}"
    if FULL_TUNED in gains:
        text += f"; a plain model trained as long saves {gains[FULL_TUNED].gain.mean:+.4f} with the whole text"
    return text + "."


def describe_comparison(comparison: LengthComparison) -> str:
    """A verdict in words."""
    if comparison.is_better:
        return "above the line"
    return "below the line" if comparison.difference < -SIGNIFICANT_ERRORS * comparison.se else "no difference shown"


def format_signed(x: float, digits: int) -> str:
    """A difference with its sign, without a negative 0."""
    return f"{round(x, digits) + 0.0:+.{digits}f}"


def list_caveats(sections: Sequence[ReportSection], file_results: Sequence[ContextTaskResult] = ()) -> list[str]:
    """What the figures themselves say is not shown, then what is always to be said."""
    lines = [line for each in sections for line in each.results]
    found: list[str] = []
    few = min([len(each.seeds) for each in (*lines, *file_results)], default=MIN_SEEDS)
    if few < MIN_SEEDS:
        found.append(f"Seeds: {few} of some runs. Intervals are of these runs; another seed may fall outside them.")
    texts = [len({row.id.split("@")[0] for row in line.documents_by_seed[0]}) for line in lines if not line.is_recall]
    if texts and min(texts) < MIN_TEXT_GROUPS:
        found.append(
            f"Documents are stretches of {min(texts)} texts; standard errors are over stretches, which are alike "
            "within one text, so those over texts are larger."
        )
    return [*found, *CAVEATS]


def recall_tables(
    sections: Sequence[ReportSection],
) -> list[tuple[CompressionResult, str, list[fact_recall.RecallByFacts], float | None]]:
    """Recall by the number of facts, of the lengths that each run has by itself."""
    return [
        (
            line,
            way,
            fact_recall.recall_by_facts(line.pooled_documents, way),
            fact_recall.length_fact_correlation(line.pooled_documents, way),
        )
        for each in sections
        if each.is_recall
        for line in each.results
        for way in ("compressed", "sampled")
        if way in common_conditions(line.documents_by_seed)
    ]


def length_histograms(sections: Sequence[ReportSection]) -> list[tuple[CompressionResult, list[tuple[int, float]]]]:
    """Shares of segments by their length, of runs that learn it."""
    found: list[tuple[CompressionResult, list[tuple[int, float]]]] = []
    for each in sections:
        for line in each.results:
            if line.run_info.get("length") in ("stop_head", "classifier"):
                counts = fact_recall.length_histogram(line.pooled_documents, "compressed")
                total, lengths = sum(counts.values()), range(min(1, *counts), int(line.run_info["cap"]) + 1)
                found.append((line, [(n, counts.get(n, 0) / total) for n in lengths]))
    return found


def render_page(
    results: Sequence[CompressionResult],
    file_results: Sequence[ContextTaskResult] = (),
    run_descriptions: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole file; `told` are findings on files."""
    filters = {
        "percent": format_percent,
        "number": format_count,
        "judged": describe_comparison,
        "words": condition_title,
        "signed": format_signed,
    }
    sets: dict[Any, list[CompressionResult]] = {}
    for line in results:
        sets.setdefault((line.dataset, line.document_keys), []).append(line)
    blocks = [build_section(i, same) for i, same in enumerate(sets.values())]
    gaps = [(line, gap) for line in results if (gap := fact_recall.soft_hard_gap(line.pooled_documents)) is not None]
    return load_template("memories.html", **filters).render(
        blocks=blocks, sentences=summary_sentences(blocks), recalls=recall_tables(blocks), gaps=gaps, histograms=length_histograms(blocks),
        answers=group_by_file(file_results, "answers"), labels=group_by_file(file_results, "labels"), limits=list_caveats(blocks, file_results),
        papers=reported_reading.compare_compression_tables(results, file_results),
        facts=run_descriptions, colours=report_plots.COLORS, exp=np.exp, untrained=UNTRAINED, tuned=FULL_TUNED, errors=SIGNIFICANT_ERRORS,
        drawn=has_matplotlib(),
    )  # fmt: skip


def group_by_file(file_results: Sequence[ContextTaskResult], kind: str) -> list[list[ContextTaskResult]]:
    """The findings of a kind, those on one file together."""
    found: dict[tuple[str, bool], list[ContextTaskResult]] = {}
    for each in file_results:
        if each.kind == kind:
            found.setdefault((each.file, each.query_aware), []).append(each)
    return [*found.values()]
