"""All suites, in the order in which `laconic evaluate` tries them, and the page of `laconic report`."""

from collections.abc import Sequence
from pathlib import Path

from laconic.config.recipe import DOCUMENT_METHODS, Recipe
from laconic.console import pluralize
from laconic.errors import InputError, UsageError
from laconic.evaluation.checkpoints import NO_FILE
from laconic.evaluation.compression.suite import CompressionSuite
from laconic.evaluation.inspection.audit_suite import AuditSuite
from laconic.evaluation.memories.suite import MemorySuite
from laconic.evaluation.reasoning.suite import ReasoningSuite
from laconic.evaluation.report.page import PageSection, build_facts_table, render_page
from laconic.evaluation.runs import load_recipes, short_run_names
from laconic.evaluation.streams.suite import StreamSuite
from laconic.evaluation.streams.tasks import STREAM_NAMES
from laconic.evaluation.suite import EvalSuite, load_results
from laconic.evaluation.tables import MIN_SEEDS
from laconic.evaluation.text_loss import TextLossSuite

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what metrics of other types raise
SUITES: tuple[EvalSuite, ...] = (
    TextLossSuite(),
    MemorySuite(),
    StreamSuite(),
    CompressionSuite(),
    AuditSuite(),
    ReasoningSuite(),
)


def choose_suite(runs: Sequence[str], tasks: Sequence[str]) -> EvalSuite:
    recipes = load_recipes(runs)
    suite = next((suite for suite in SUITES if suite.accepts(recipes.values(), tasks)), None)
    stream = next((task for task in tasks if task in STREAM_NAMES), None)
    if stream is not None and not isinstance(suite, StreamSuite):
        raise UsageError(f"--tasks {stream}: for runs of methods hope and lm; the loss of a model is --tasks loss")
    if suite is None:
        reader = next(folder for folder, recipe in recipes.items() if recipe.method in DOCUMENT_METHODS)
        raise UsageError(f"{reader} reads documents, and others answer questions; evaluate them separately")
    return suite


def build_sections(suite: EvalSuite, paths: Sequence[str]) -> list[PageSection]:
    """Return the sections of one suite; its metrics come from files that may be another person's or version's."""
    results = load_results(suite, paths)
    try:
        return list(suite.build_sections(results, paths))
    except MALFORMED as error:
        kinds = ", ".join(kind for kind, stored in results.items() if stored)
        raise InputError(
            f"{', '.join(paths)}: stored results of {kinds} lack what this version reads ({type(error).__name__}: "
            f"{error}); remove them and evaluate again"
        ) from error


def build_report(paths: Sequence[str]) -> str:
    """Return the HTML report of runs, or of directories of several seeds; no model is loaded."""
    sections = [section for suite in reversed(SUITES) for section in build_sections(suite, paths)]
    if not any(any(section.blocks) for section in sections):
        raise InputError(f"{', '.join(paths)}: no stored results; run laconic evaluate on them first")
    runs = [(title, list(load_recipes([p]).values())) for p, title in zip(paths, short_run_names(paths), strict=True)]
    few = min(len(recipes) for _, recipes in runs)
    caveat = f"Some runs have only {pluralize(few, 'seed')}; another seed's result may lie outside these intervals."
    facts = [(title, describe_run(recipes)) for title, recipes in runs]
    end = [
        PageSection("What this does not show", [[caveat] if few < MIN_SEEDS else []]),
        PageSection("Runs", [build_facts_table(facts)]),
    ]
    return render_page("Evaluation results", [*sections, *end])


def describe_run(recipes: Sequence[Recipe]) -> str:
    """Return method, data, row of a paper and seeds of a run, whose seeds have these recipes."""
    first = recipes[0]
    seeds = ", ".join(str(recipe.seed) for recipe in recipes)
    if Path(str(first.data.path)).name == NO_FILE:
        return f"published model {Path(str(first.model.name)).name}"
    row = (first.paper_table, first.table_row) if first.table_row else ()
    parts = [f"method {first.method}", f"data {first.data.source}", *row, f"seeds {seeds}"]
    return ", ".join(part for part in parts if part)
