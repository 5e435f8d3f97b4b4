"""The report of `laconic report`: every stored result of some runs, grouped by task, on one page."""

from collections.abc import Sequence

from laconic.errors import InputError
from laconic.evaluation.compression import cli_runs as compression_runs
from laconic.evaluation.compression import report as compression_report
from laconic.evaluation.compression.cli_files import load_file_results
from laconic.evaluation.reasoning import report as reasoning_report
from laconic.evaluation.report.page import NO_PLOTS, PageSection, render_facts, render_list, render_page
from laconic.evaluation.report.plots import has_matplotlib
from laconic.evaluation.run_names import short_run_names
from laconic.evaluation.runs import load_recipes
from laconic.evaluation.streams import cli_runs as streams_runs
from laconic.evaluation.streams.report import FIXED_CAVEATS
from laconic.evaluation.tables import MIN_SEEDS


def build_report(paths: Sequence[str]) -> str:
    """Return the HTML report of runs; no model is loaded.

    Args:
        paths: Run directories, or directories of several seeds.

    Raises:
        InputError: Nothing is stored, or seeds of a run were evaluated on different items.
    """
    reasoning = reasoning_report.build_sections(paths)
    streams = streams_runs.build_sections(paths)
    compression = compression_report.build_sections(compression_runs.load_results(paths), load_file_results(paths))
    sections = [*reasoning, *compression, *streams]
    if not any(section.blocks for section in sections):
        raise InputError(f"{', '.join(paths)}: no stored results; run laconic evaluate on them first")
    caveats = list_caveats(paths, bool(streams))
    plots = [] if has_matplotlib() else [NO_PLOTS]
    end = [PageSection("What this does not show", [render_list(caveats)] if caveats else [])]
    end.append(PageSection("Runs", [render_facts(describe_runs(paths))]))
    return render_page("Evaluation results", [*sections, *end], plots)


def list_caveats(paths: Sequence[str], has_streams: bool) -> list[str]:
    """Return what the figures do not show."""
    few = min(len(load_recipes([path])) for path in paths)
    caveats = [f"Seeds: {few} of some runs; another seed may fall outside these intervals."] if few < MIN_SEEDS else []
    return [*caveats, *(FIXED_CAVEATS if has_streams else ())]


def describe_runs(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return title, method, data, paper row and seeds of each run."""
    facts: list[tuple[str, str]] = []
    for path, title in zip(paths, short_run_names(paths), strict=True):
        recipes = list(load_recipes([path]).values())
        first, seeds = recipes[0], ", ".join(str(recipe.seed) for recipe in recipes)
        row = f", {first.paper_table}, {first.table_row}" if first.table_row else ""
        facts.append((title, f"method {first.method}, data {first.data.source}{row}, seeds {seeds}"))
    return facts
