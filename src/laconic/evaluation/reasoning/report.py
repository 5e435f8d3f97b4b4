"""The sections of a report about question sets, from stored results."""

from collections.abc import Sequence

from laconic.evaluation.reasoning.run import load_stored_result
from laconic.evaluation.reasoning.table import (
    ReasoningRow,
    ReasoningTable,
    header_of,
    list_caveats,
    rows_by_dataset,
)
from laconic.evaluation.report.page import PageSection, PageTable, render_list, render_table
from laconic.evaluation.report.paper_figures import find_paper_figures
from laconic.evaluation.runs import StoredTask, load_stored_tasks


def build_sections(paths: Sequence[str]) -> list[PageSection]:
    """Return one section per protocol and question set, with all runs and conditions."""
    by_protocol: dict[str, list[ReasoningRow]] = {}
    for stored in load_stored_tasks(paths, "reasoning"):
        row = build_row(stored)
        by_protocol.setdefault(row.results[0].protocol, []).append(row)
    sections: list[PageSection] = []
    for protocol, rows in by_protocol.items():
        datasets = list(dict.fromkeys(row.dataset for row in rows))
        runs = list(dict.fromkeys(row.run for row in rows))
        rows.sort(key=lambda row: (datasets.index(row.dataset), runs.index(row.run), row.condition))
        table = ReasoningTable(rows)
        width = len(header_of(table))
        blocks_by_set = rows_by_dataset(table)
        for i, (title, cells) in enumerate(blocks_by_set):
            full = [[*row, *[""] * (width - len(row))] for row in cells]
            blocks = [render_table(PageTable(header_of(table), full))]
            if i == len(blocks_by_set) - 1:
                blocks.append(render_list(list_caveats(table)))
            sections.append(PageSection(f"{title} ({protocol})", blocks))
    return sections


def build_row(stored: StoredTask) -> ReasoningRow:
    """Return the table row of a stored result."""
    condition = stored.variant.get("condition", "")
    recipe, is_whole = stored.recipe, stored.stored[0].metadata.limit is None and not condition
    papers = find_paper_figures(recipe.paper_table, recipe.table_row, stored.task) if is_whole else None
    results = tuple(map(load_stored_result, stored.stored))
    return ReasoningRow(stored.task, stored.title, condition, stored.seeds, results, paper_figures=papers)
