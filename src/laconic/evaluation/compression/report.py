"""HTML report on compressors: gains over no context, quality by number of vectors, learned against fixed lengths."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from laconic.evaluation.compression import fact_recall, pareto
from laconic.evaluation.compression.context_qa_report import (
    answers_section,
    group_by_file,
    labels_section,
)
from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.pareto import LengthComparison
from laconic.evaluation.compression.perplexity import FULL_TUNED, MIN_TEXT_GROUPS, SIGNIFICANT_ERRORS, UNTRAINED
from laconic.evaluation.compression.plots import condition_title, plot_pareto, plot_positions
from laconic.evaluation.compression.table import FIGURE_COLUMNS, document_keys, gain_rows, is_recall, recall_rows
from laconic.evaluation.report import page
from laconic.evaluation.report.page import PagePlot, PageSection
from laconic.evaluation.report.paper_tables import render_papers
from laconic.evaluation.report.plots import has_matplotlib
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import MIN_SEEDS, Column, build_table, format_percent, format_signed

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
FOLDED_CONDITIONS = ("n = ", "end", "quantile")  # individual lengths
CAVEATS = (
    "Whether a learned length is better than a fixed one of the same mean is an open question: no run of the original "
    "design was published, and the nearest published work reports that continuous ratios fail (arXiv:2603.25926) and "
    "that means over spans do better (arXiv:2510.20797). A comparison here holds for these runs only.",
    "A compressed context loses to the plain text wherever the text fits the model.",
    "A memory that is overwritten forgets. What tiny models show does not carry over to large ones.",
    "Soft figures describe a reading that is not used at inference: a gate does not bound the information.",
)


PAPERS_NOTE = (
    "AutoCompressors of other models, texts and sizes than these runs; comparable only where a run uses the paper’s "
    "recipe. The original variable-length design published no figures."
)
SOFT_NOTE = (
    "Soft: all vectors, each gated by its survival. The gap is between the training objective and inference. E[N] "
    "should match the mean of sampled lengths."
)
GAIN_COLUMNS = (
    Column("run", lambda row: row.result.run, is_text=True),
    Column("condition", lambda row: condition_title(row.gain.condition), is_text=True),
    *FIGURE_COLUMNS,
    Column(
        f"gain after {BUCKET_TOKENS} tokens",
        lambda row: "–" if row.gain.late_gain is None else format_signed(row.gain.late_gain.mean, 4),
    ),
)
RECALL_COLUMNS = (
    Column("run, lengths", lambda row: row[0], is_text=True),
    Column("facts", lambda row: str(row[1].num_facts)),
    Column("documents", lambda row: str(row[1].num_documents)),
    Column("accuracy, %", lambda row: format_percent(row[1].accuracy)),
    Column("nats per token", lambda row: f"{row[1].nll:.4f}"),
    Column("mean N", lambda row: f"{row[1].mean_vectors:.2f}"),
)
SOFT_COLUMNS = (
    Column("run, data set", lambda row: f"{row[0].run}, {row[0].task}", is_text=True),
    Column("nats per token", lambda row: format_signed(row[1].nll, 4)),
    Column("accuracy, points", lambda row: format_signed(100 * row[1].accuracy, 1)),
    Column("E[N] − N", lambda row: format_signed(row[1].num_vectors, 2)),
    Column("E[N]", lambda row: f"{row[1].expected_length:.3f}"),
    Column("sampled N", lambda row: f"{row[1].sampled_length:.3f} ± {row[1].sampled_se:.3f}"),
)


def build_sections(results: Sequence[RunResult], file_results: Sequence[RunResult] = ()) -> list[PageSection]:
    """Return the sections on context compression: results on documents, then on files of questions or labels."""
    if not results and not file_results:
        return []
    by_documents: dict[Any, list[RunResult]] = {}
    for result in results:
        by_documents.setdefault((result.task, document_keys(result)), []).append(result)
    labels = group_by_file(file_results, "labels")
    papers = render_papers(["tails", "retrieval", "ablations", *([] if labels else ["labels"])])
    recalls = [(recall_title(row), group) for row in recall_rows(results) for group in row.groups]
    compressed = [result for result in results if "compressed" in result.conditions]
    gaps = [(r, gap) for r in results if (gap := fact_recall.soft_hard_gap(r.pooled_items)) is not None]
    return [
        PageSection("Context compression", [LEAD, *map(summarize_run, compressed)]),
        *(document_section(same) for same in by_documents.values()),
        PageSection("Recall by the number of facts", render_rows(RECALL_COLUMNS, recalls)),
        PageSection("Soft reading against hard", [SOFT_NOTE, *render_rows(SOFT_COLUMNS, gaps)] if gaps else []),
        *(labels_section(group, render_papers(["labels"])) for group in labels),
        *(answers_section(group) for group in group_by_file(file_results, "answers")),
        PageSection("Published results on compression", [PAPERS_NOTE, *papers]),
        PageSection("Limitations of compression results", [page.render_list(list_caveats(results, file_results))]),
    ]


def render_rows(columns: Sequence[Column], rows: Sequence[Any]) -> list[Markup]:
    """Return the table of some rows; nothing without rows."""
    return [page.render_table(build_table(columns, rows))] if rows else []


def recall_title(row: Any) -> str:
    """Return the run, the lengths, and the correlation of lengths with facts."""
    correlation = "" if row.correlation is None else f" (correlation of N with facts {row.correlation:.3f})"
    return f"{row.result.run}, {row.condition}{correlation}"


def summarize_run(result: RunResult) -> str:
    """Summarize a compressor on a data set in one sentence."""
    gains = {gain.condition: gain for _, gain in gain_rows(result)}
    gain = gains["compressed"]
    ratio = gain.gain.mean / gain.se if gain.se > 0 else float("nan")
    text = (
        f"{result.task}, {result.run}: {gain.mean_vectors:.2f} vectors per segment save {gain.gain.mean:+.4f} ± "
        f"{gain.se:.4f} nats per token ({ratio:.1f} standard errors)"
    )
    if gain.share_of_full is not None:
        text += f", {format_percent(gain.share_of_full)} % of what the whole text saves"
    if "truncated" in gains:
        text += f"; as many tokens of text save {gains['truncated'].gain.mean:+.4f}"
    if "other text" in gains:
        text += f"; vectors of another text save {gains['other text'].gain.mean:+.4f}"
    if FULL_TUNED in gains:
        text += f"; a language model of equal training saves {gains[FULL_TUNED].gain.mean:+.4f} with the whole text"
    return text + "."


def document_section(results: Sequence[RunResult]) -> PageSection:
    """Build the section of results on the same documents."""
    first = results[0]
    rows = [row for result in results for row in gain_rows(result)]
    main, details = (
        [row for row in rows if row.gain.condition.startswith(FOLDED_CONDITIONS) is is_folded]
        for is_folded in (False, True)
    )
    plots = page.render_plots(document_plots(results)) if has_matplotlib() else page.NO_PLOTS
    blocks: list[str | Markup] = [*render_rows(GAIN_COLUMNS, main), GAIN_NOTE, plots]
    if details:
        blocks.append(page.render_details("All lengths", render_rows(GAIN_COLUMNS, details)))
    if comparisons := pareto.compare_learned_lengths(results):
        blocks += [comparison_table(comparisons, is_recall(first)), COMPARISON_NOTE]
    return PageSection(f"{first.task}: {len(first.items_by_seed[0]):,} documents", blocks)


def document_plots(results: Sequence[RunResult]) -> list[PagePlot]:
    """Plot quality against vectors if several lengths were evaluated, and loss along the tail if it is long."""
    points, plots = [point for result in results for point in pareto.pareto_points(result)], list[PagePlot]()
    if len(points) > 1:
        title, better = ("Accuracy", "Higher") if is_recall(results[0]) else ("Nats per token", "Lower")
        caption = f"{better} is better. One point per length; diamonds are learned lengths. The best lengths are an "
        plots.append(PagePlot(f"{title} against vectors", caption + "upper bound.", plot_pareto(points, results)))
    if sum(bool(n) for n in results[0].items_by_seed[0][0].shared["scored_tokens"]) > 1:
        caption = "Dotted: no context; solid: compressed; dashed: whole text."
        plots.append(PagePlot("Along the tail", caption, plot_positions(results)))
    return plots


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
        Column("better by", lambda c: f"{format_signed(scale * c.difference, digits)} ± {scale * c.se:.{digits}f}"),
        Column("result", lambda c: c.verdict),
    )
    caption = "Learned lengths against fixed ones of the same mean"
    return page.render_table(build_table(columns, comparisons, caption))


def list_caveats(results: Sequence[RunResult], file_results: Sequence[RunResult] = ()) -> list[str]:
    """Return what the figures do not show, followed by `CAVEATS`."""
    caveats: list[str] = []
    num_seeds = min([len(result.seeds) for result in (*results, *file_results)], default=MIN_SEEDS)
    if num_seeds < MIN_SEEDS:
        caveats.append(
            f"Some runs have only {num_seeds} seed{'s' * (num_seeds > 1)}; another seed may fall outside the intervals."
        )
    num_texts = [
        len({item.id.split("@")[0] for item in result.items_by_seed[0]}) for result in results if not is_recall(result)
    ]
    if num_texts and min(num_texts) < MIN_TEXT_GROUPS:
        caveats.append(
            f"Documents are stretches of only {min(num_texts)} texts. Standard errors are over stretches, which are "
            "alike within a text, so errors over texts are larger."
        )
    return [*caveats, *CAVEATS]
