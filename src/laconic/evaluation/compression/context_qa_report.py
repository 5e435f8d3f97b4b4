"""Sections of the compression report on context question answering and in-context classification."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.plots import condition_title
from laconic.evaluation.compression.table import format_signed
from laconic.evaluation.report import page
from laconic.evaluation.report.page import PageSection, PageTable
from laconic.evaluation.tables import format_count, format_percent


def group_by_file(file_results: Sequence[ContextTaskResult], kind: str) -> list[list[ContextTaskResult]]:
    """Group the results of a kind by file."""
    groups: dict[tuple[str, bool], list[ContextTaskResult]] = {}
    for result in file_results:
        if result.kind == kind:
            groups.setdefault((result.file, result.query_aware), []).append(result)
    return [*groups.values()]


def labels_section(group: Sequence[ContextTaskResult], papers: Sequence[str | Markup]) -> PageSection:
    """Build the section of a file of labelled texts."""
    first = group[0]
    lead = (
        f"{first.num_items} texts, {first.num_labels} labels. The label with the least mean nats per token is chosen, "
        "after demonstrations as vectors, as text, or none; the majority baseline is "
        f"{format_percent(first.majority_accuracy)} %."
    )
    rows = [
        (
            result.run,
            score.condition,
            format_count(score.context_size),
            format_percent(score.accuracy) + ("" if score.std is None else f" ± {format_percent(score.std)}"),
            ", ".join(dict.fromkeys(score.variants)),
        )
        for result in group
        for score in result.icl_scores
    ]
    header = ("run", "demonstrations", "before the text", "accuracy, %", "chosen on validation")
    note = (
        f"±: standard deviation over {len(first.icl_scores[0].accuracies)} orders of demonstrations"
        f"{' and seeds' if len(first.seeds) > 1 else ''}. Before: vectors or tokens. Last tokens: as many of the "
        "demonstrations’ text as they have vectors. Whether demonstrations are balanced by label and scores are "
        "calibrated is chosen on validation texts only. A condition at or below the majority baseline shows no "
        "in-context learning."
    )
    table = page.render_table(PageTable(header, rows, num_text_columns=2))
    return PageSection(f"In-context classification: {first.file}", [lead, table, note, *papers])


def answers_section(group: Sequence[ContextTaskResult]) -> PageSection:
    """Build the section of a file of context questions."""
    first = group[0]
    lead = f"{first.num_items} questions about {first.num_contexts} contexts, answered greedily."
    if first.query_aware:
        lead += " The question preceded the context in the compression."
    header = ["run", "context", "before the question"]
    for name in first.condition_scores[0].metrics:
        header += [f"{name}, %", "gain over no context"]
    rows: list[Sequence[str]] = []
    for result in group:
        for score in result.condition_scores:
            row = [result.run, condition_title(score.condition), format_count(score.context_size)]
            for x in score.metrics.values():
                gain = f"{format_signed(100 * x.gain, 1)} ± {format_percent(x.gain_se)}"
                row += [f"{format_percent(x.mean.mean)} ± {format_percent(x.se)}"]
                row += ["–" if score.condition == "none" else gain]
            rows.append(row)
    note = (
        "±: standard error over contexts, paired for differences. Truncated: as many last tokens of the context as "
        "there are vectors. Match: normalized words equal those of an answer. F1: of words. Substring match: "
        "share of the answers that occur in the output."
    )
    table = page.render_table(PageTable(header, rows, num_text_columns=2))
    return PageSection(f"Context question answering: {first.file}", [lead, table, note])


def paper_blocks(papers: Sequence[Any], topics: Sequence[str]) -> list[str | Markup]:
    """Build folded tables of published results, with the verdict on each row."""
    return [
        page.render_details(
            table.title,
            [
                f"{table.source}.",
                page.render_table(
                    PageTable([*table.columns, "these runs"], [[*row, verdict] for row, verdict in rows])
                ),
            ],
        )
        for table, rows in papers
        if table.topic in topics
    ]
