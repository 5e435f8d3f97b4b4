"""HTML report on compressors: gains over no context, quality by number of vectors, learned against fixed lengths."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from laconic.evaluation.compression import fact_recall, pareto
from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.context_qa_report import (
    answers_section,
    group_by_file,
    labels_section,
    paper_blocks,
)
from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.paper_tables import compare_compression_tables
from laconic.evaluation.compression.pareto import LengthComparison
from laconic.evaluation.compression.perplexity import (
    FULL_TUNED,
    MIN_TEXT_GROUPS,
    SIGNIFICANT_ERRORS,
    UNTRAINED,
    ContextGain,
    common_conditions,
)
from laconic.evaluation.compression.plots import condition_title, plot_pareto, plot_positions
from laconic.evaluation.compression.table import CompressionResult, format_signed
from laconic.evaluation.report import page
from laconic.evaluation.report.page import PagePlot, PageSection, PageTable
from laconic.evaluation.report.plots import has_matplotlib
from laconic.evaluation.statistics import Estimate
from laconic.evaluation.tables import MIN_SEEDS, format_count, format_percent

LEAD = (
    "Texts are compressed once into summary vectors, on held-out documents. The same tokens of each document are "
    "scored with no context, after the vectors, and after the text."
)
GAIN_NOTE = (
    "Gain: nats per token saved against the same weights with no context, ± standard error over documents, paired; for "
    f"“{UNTRAINED}”, the run before its first step, against that model with no context. The ± after a mean is over "
    "seeds. Truncated: as many last tokens of the text as there are vectors. Share: of the whole text’s gain. Lengths "
    "are hard, except in “soft”. Oracle length: the cheapest length of each segment (nats of what follows plus price), "
    "found by trial; an upper bound, not a method. Full-tuned: a language-model baseline, trained without memory, "
    "reads the whole text; its gain is against this run’s no context."
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
    "A compressed context loses to the plain text wherever the text fits the model.",
    "A memory that is overwritten forgets. What tiny models show does not carry over to large ones.",
    "Soft figures describe a reading that is not used at inference: a gate does not bound the information.",
)


def build_sections(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult] = ()
) -> list[PageSection]:
    """Return the sections of a report about context compression.

    Args:
        results: Results on documents.
        file_results: Results on files of context questions or labelled texts.
    """
    if not results and not file_results:
        return []
    by_documents: dict[Any, list[CompressionResult]] = {}
    for result in results:
        by_documents.setdefault((result.dataset, result.document_keys), []).append(result)
    labels = group_by_file(file_results, "labels")
    topics = ["tails", "retrieval", "ablations", *([] if labels else ["labels"])]
    papers = compare_compression_tables(results, file_results)
    return [
        PageSection("Context compression", [LEAD, *summary_sentences(results)]),
        *(document_section(same) for same in by_documents.values()),
        PageSection("Recall by the number of facts", recall_blocks(results)),
        PageSection("Soft reading against hard", gap_blocks(results)),
        PageSection("Learned lengths", histogram_blocks(results)),
        *(labels_section(group, paper_blocks(papers, ["labels"])) for group in labels),
        *(answers_section(group) for group in group_by_file(file_results, "answers")),
        PageSection("Published results on compression", [PAPERS_NOTE, *paper_blocks(papers, topics)]),
        PageSection("Limitations of compression results", [page.render_list(list_caveats(results, file_results))]),
    ]


PAPERS_NOTE = (
    "AutoCompressors of other models, texts and sizes than these runs; comparable only where a run uses the paper’s "
    "recipe. The last column says what these runs show. The original variable-length design published no figures."
)


def summary_sentences(results: Sequence[CompressionResult]) -> list[str]:
    """Return the sentences at the top of the page."""
    sentences: list[str] = []
    for result in results:
        gains = {gain.condition: gain for gain in result.gains}
        if "compressed" in gains:
            sentences.append(summarize_run(result, gains))
    return sentences


def summarize_run(result: CompressionResult, gains: dict[str, ContextGain]) -> str:
    """Summarize a run on a data set in one sentence."""
    gain = gains["compressed"]
    ratio = gain.gain.mean / gain.se if gain.se > 0 else float("nan")
    text = (
        f"{result.dataset}, {result.run}: {gain.mean_vectors:.2f} vectors per segment save {gain.gain.mean:+.4f} ± "
        f"{gain.se:.4f} nats per token ({ratio:.1f} standard errors)"
    )
    if gain.share_of_full is not None:
        text += f", {format_percent(gain.share_of_full)} % of what the whole text saves"
    if "truncated" in gains:
        text += f"; as many tokens of text save {gains['truncated'].gain.mean:+.4f}"
    if FULL_TUNED in gains:
        text += f"; a language model of equal training saves {gains[FULL_TUNED].gain.mean:+.4f} with the whole text"
    return text + "."


def document_section(results: Sequence[CompressionResult]) -> PageSection:
    """Build the section of results on the same documents."""
    first = results[0]
    rows = [(result, gain) for result in results for gain in result.gains]
    main, details = ([row for row in rows if is_main_row(row[1].condition) is is_main] for is_main in (True, False))
    blocks: list[str | Markup] = [gain_table(main, first.is_recall), GAIN_NOTE]
    if has_matplotlib():
        blocks.append(page.render_plots(document_plots(results)))
    else:
        blocks.append(page.NO_PLOTS)
    if details:
        blocks.append(page.render_details("All lengths", [gain_table(details, first.is_recall)]))
    comparisons = pareto.compare_learned_lengths(results)
    if comparisons:
        blocks += [comparison_table(comparisons, first.is_recall), COMPARISON_NOTE]
    return PageSection(f"{first.dataset}: {len(first.documents_by_seed[0]):,} documents", blocks)


def is_main_row(condition: str) -> bool:
    """Test whether a condition belongs to the main table; individual lengths are in a folded one."""
    return not condition.startswith(("n = ", "end", "quantile"))


def document_plots(results: Sequence[CompressionResult]) -> list[PagePlot]:
    """Plot quality against vectors if several lengths were evaluated, and loss along the tail if it is long."""
    points, plots = [point for result in results for point in pareto.pareto_points(result)], list[PagePlot]()
    if len(points) > 1:
        title, better = ("Accuracy", "Higher") if results[0].is_recall else ("Nats per token", "Lower")
        caption = f"{better} is better. One point per length; diamonds are learned lengths. The best lengths are an "
        plots.append(PagePlot(f"{title} against vectors", caption + "upper bound.", plot_pareto(points, results)))
    if sum(bool(n) for n in results[0].documents_by_seed[0][0].scored_tokens) > 1:
        caption = "Dotted: no context; solid: compressed; dashed: whole text."
        plots.append(PagePlot("Along the tail", caption, plot_positions(results)))
    return plots


def gain_table(rows: Sequence[tuple[CompressionResult, ContextGain]], is_recall: bool) -> Markup:
    """Build the table of gains over no context."""
    header = ["run", "condition", "vectors per segment", "before the tail", "nats per token", "perplexity", "gain"]
    header += [f"gain after {BUCKET_TOKENS} tokens", "accuracy, %" if is_recall else "share"]
    return page.render_table(
        PageTable(
            header,
            [
                (
                    result.run,
                    condition_title(gain.condition),
                    "–" if gain.mean_vectors is None else f"{gain.mean_vectors:.2f}",
                    format_count(gain.context_size),
                    format_mean(gain.nll),
                    f"{np.exp(gain.nll.mean):.2f}",
                    f"{format_signed(gain.gain.mean, 4)} ± {gain.se:.4f}",
                    "–" if gain.late_gain is None else format_signed(gain.late_gain.mean, 4),
                    format_accuracy_or_share(gain, is_recall),
                )
                for result, gain in rows
            ],
            num_text_columns=2,
        )
    )


def format_mean(estimate: Estimate) -> str:
    """Format a mean with its standard deviation over seeds."""
    return f"{estimate.mean:.4f}" + ("" if estimate.sd is None else f" ± {estimate.sd:.4f}")


def format_accuracy_or_share(gain: ContextGain, is_recall: bool) -> str:
    """Format the accuracy for fact recall, otherwise the share of the whole text's gain."""
    if is_recall:
        std = "" if gain.accuracy.sd is None else f" ± {format_percent(gain.accuracy.sd)}"
        return format_percent(gain.accuracy.mean) + std
    return "–" if gain.share_of_full is None else f"{format_percent(gain.share_of_full)} %"


def comparison_table(comparisons: Sequence[LengthComparison], is_recall: bool) -> Markup:
    """Build the table of learned against fixed lengths of the same mean."""
    scale, sign, digits = (100, 1, 1) if is_recall else (1, -1, 4)
    header = ["run, rule", "fixed lengths of", "vectors", "accuracy, %" if is_recall else "nats per token"]
    rows = [
        (
            f"{c.run}, {c.condition}",
            c.baseline,
            f"{c.x:.2f}",
            f"{sign * scale * c.quality:.{digits}f}",
            f"{sign * scale * c.fixed_quality:.{digits}f}",
            f"{format_signed(scale * c.difference, digits)} ± {scale * c.se:.{digits}f}",
            describe_comparison(c),
        )
        for c in comparisons
    ]
    caption = "Learned lengths against fixed ones of the same mean"
    return page.render_table(PageTable([*header, "on the line", "better by", "result"], rows, caption, 2))


def describe_comparison(comparison: LengthComparison) -> str:
    """Describe a comparison in words."""
    if comparison.is_better:
        return "above the line"
    is_worse = comparison.difference < -SIGNIFICANT_ERRORS * comparison.se
    return "below the line" if is_worse else "no difference shown"


def recall_blocks(results: Sequence[CompressionResult]) -> list[str | Markup]:
    """Build the table of recall by the number of facts, for the lengths that each run chooses."""
    rows: list[Sequence[str]] = []
    for result in (result for result in results if result.is_recall):
        documents = result.pooled_documents
        for condition in ("compressed", "sampled"):
            if condition not in common_conditions(result.documents_by_seed):
                continue
            r = fact_recall.length_fact_correlation(documents, condition)
            correlation = "" if r is None else f" (correlation of N with facts {r:.3f})"
            rows += [
                (
                    f"{result.run}, {condition}{correlation}",
                    str(group.num_facts),
                    str(group.num_documents),
                    format_percent(group.accuracy),
                    f"{group.nll:.4f}",
                    f"{group.mean_vectors:.2f}",
                )
                for group in fact_recall.recall_by_facts(documents, condition)
            ]
    header = ("run, lengths", "facts", "documents", "accuracy, %", "nats per token", "mean N")
    return [page.render_table(PageTable(header, rows))] if rows else []


def gap_blocks(results: Sequence[CompressionResult]) -> list[str | Markup]:
    """Build the table of soft reading minus hard reading."""
    gaps = [(r, gap) for r in results if (gap := fact_recall.soft_hard_gap(r.pooled_documents)) is not None]
    if not gaps:
        return []
    rows = [
        (
            f"{result.run}, {result.dataset}",
            format_signed(gap.nll, 4),
            format_signed(100 * gap.accuracy, 1),
            format_signed(gap.num_vectors, 2),
            f"{gap.expected_length:.3f}",
            f"{gap.sampled_length:.3f} ± {gap.sampled_se:.3f}",
        )
        for result, gap in gaps
    ]
    note = (
        "Soft: all vectors, each gated by its survival. The gap is between the training objective and inference. E[N] "
        "should match the mean of sampled lengths."
    )
    header = ("run, data set", "nats per token", "accuracy, points", "E[N] − N", "E[N]", "sampled N")
    return [note, page.render_table(PageTable(header, rows))]


def histogram_blocks(results: Sequence[CompressionResult]) -> list[str | Markup]:
    """Build one table of the share of segments by length for each run with a learned length."""
    return [
        page.render_table(
            PageTable(
                ("vectors", "share of segments"),
                [(str(n), f"{format_percent(share)} %") for n, share in shares],
                f"{result.run}, {result.dataset}",
                0,
            )
        )
        for result, shares in length_histograms(results)
    ]


def length_histograms(
    results: Sequence[CompressionResult],
) -> list[tuple[CompressionResult, list[tuple[int, float]]]]:
    """Return the share of segments by length, for runs with a learned length."""
    histograms: list[tuple[CompressionResult, list[tuple[int, float]]]] = []
    for result in results:
        if result.run_info.get("length_policy") in ("stop_head", "classifier"):
            counts = fact_recall.length_histogram(result.pooled_documents, "compressed")
            total, lengths = sum(counts.values()), range(min(1, *counts), int(result.run_info["max_vectors"]) + 1)
            histograms.append((result, [(n, counts.get(n, 0) / total) for n in lengths]))
    return histograms


def list_caveats(results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult] = ()) -> list[str]:
    """Return what the figures do not show, followed by `CAVEATS`."""
    caveats: list[str] = []
    num_seeds = min([len(result.seeds) for result in (*results, *file_results)], default=MIN_SEEDS)
    if num_seeds < MIN_SEEDS:
        caveats.append(
            f"Some runs have only {num_seeds} seed{'s' * (num_seeds > 1)}; another seed may fall outside the intervals."
        )
    num_texts = [
        len({document.id.split("@")[0] for document in result.documents_by_seed[0]})
        for result in results
        if not result.is_recall
    ]
    if num_texts and min(num_texts) < MIN_TEXT_GROUPS:
        caveats.append(
            f"Documents are stretches of only {min(num_texts)} texts. Standard errors are over stretches, which are "
            "alike within a text, so errors over texts are larger."
        )
    return [*caveats, *CAVEATS]
