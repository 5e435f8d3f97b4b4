"""Question sets: accuracy, cost and comparisons of runs that answer questions."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from platform import platform
from typing import Any

import torch

from laconic import __version__
from laconic.config.recipe import COT_TEACHER_METHODS, DOCUMENT_METHODS, Recipe
from laconic.console import pluralize
from laconic.data.reasoning import answer_matching
from laconic.errors import PreemptedError, UsageError
from laconic.evaluation.example_answers import NUM_EXAMPLES, build_examples_table
from laconic.evaluation.reasoning import table
from laconic.evaluation.reasoning.evaluate import AnswerFunction, Latency, measure_latencies
from laconic.evaluation.reasoning.question_sets import QuestionSet, check_tasks, load_question_set
from laconic.evaluation.reasoning.run import (
    COT_CONDITION,
    EvalCondition,
    answer_function,
    build_question_job,
    check_iterations,
    choose_protocol,
    decoding_for,
)
from laconic.evaluation.reasoning.table import ReasoningTable
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.report.papers import recipe_differences
from laconic.evaluation.results_store import EvalJob, EvalKind
from laconic.evaluation.runs import describe_folder, flush_denormals, seed_runs, short_run_names
from laconic.evaluation.suite import EvalReport, EvalRequest, Results, RunResult
from laconic.evaluation.tables import Table
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import TrainingData
from laconic.training.signals import SignalInterruptError

EXAMPLES_NOTE = f"The first {NUM_EXAMPLES} questions of each set, and what was generated; of several seeds, the first."


class ReasoningSuite:
    """Question sets for runs that answer questions."""

    kinds: Sequence[EvalKind] = ("reasoning",)
    users = "runs that answer questions"
    options: Collection[str] = (
        "data_dir", "protocol", "tolerance", "with_cot", "jacobi_iterations", "jacobi_tolerance", "batch_size",
        "baseline", "latency",
    )  # fmt: skip

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return not any(recipe.method in DOCUMENT_METHODS for recipe in recipes)

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        protocols = {
            folder: choose_protocol(recipe, request.protocol, request.tolerance) for folder, recipe in recipes.items()
        }
        answer_matching.require_one_protocol([protocol.name for protocol in protocols.values()])
        for folder, recipe in recipes.items():
            answer_matching.check_format(protocols[folder], recipe.data.format, describe_folder(folder))
            for name in ("jacobi_iterations", "jacobi_tolerance"):
                for value in getattr(request, name):
                    check_iterations(recipe, f"--{name.replace('_', '-')} {value:g}", describe_folder(folder))
        if request.with_cot and not any(may_write_chain(recipe.method) for recipe in recipes.values()):
            trained = ", ".join(COT_TEACHER_METHODS)
            raise UsageError(f"--with-cot: no run is trained to write the chain too; give a run of {trained}")
        for folder, recipe in recipes.items():
            check_tasks(recipe, request.tasks, describe_folder(folder))

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return {
            "method": recipe.method,
            "dtype": recipe.model.dtype,
            "paper_table": recipe.paper_table,
            "table_row": recipe.table_row,
            "differences": recipe_differences(recipe),
            "allow_contamination": recipe.data.allow_contamination,
        }

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        protocol = choose_protocol(run.recipe, request.protocol, request.tolerance)
        questions = load_question_set(run, task, protocol, root=request.data_dir, limit=request.limit)
        for condition in list_conditions(request, run.recipe.method):
            yield build_question_job(run, questions, condition, limit=request.limit, batch_size=request.batch_size)

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        """Return one table of all sets, with comparisons, caveats and notes; runs are timed here if requested."""
        titles = dict(zip(short_run_names(request.paths), request.paths, strict=True))
        runs = results["reasoning"]
        timings = measure_timings(request, runs, titles) if request.latency else {}
        rows = [row for result in runs for row in table.build_rows(result, timings.get(id(result)))]
        baseline = next((title for title, path in titles.items() if path == request.baseline), None)
        by_run = [list(same) for _, same in groupby(runs, key=lambda result: result.run)]
        facts = [*map(describe_seeds, by_run), *environment_facts(request.device)]
        notes = dict.fromkeys(
            text for same in by_run for text in (*list_notes(same), *list_request_notes(request, same))
        )
        outcome = ReasoningTable(rows, baseline, facts, tuple(notes))
        blocks = (table.build_terminal_table(outcome), table.format_footnotes(outcome))
        return EvalReport(blocks, table.table_to_json(outcome))

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        sections: list[PageSection] = []
        for group in group_results(results["reasoning"]):
            rows = [row for result in group for row in table.build_rows(result)]
            datasets, runs = [row.dataset for row in rows], [row.run for row in rows]
            rows.sort(key=lambda row: (datasets.index(row.dataset), runs.index(row.run), row.condition))
            outcome = ReasoningTable(rows)
            protocol = outcome.protocol
            header = [column.title for column in table.list_columns(outcome)]
            for title, cells in table.rows_by_dataset(outcome):
                sections.append(PageSection(f"{title} ({protocol})", [Table(header, cells)]))
            if outcome.examples:
                examples = build_examples_table(outcome.examples)
                sections.append(PageSection(f"Examples ({protocol})", [EXAMPLES_NOTE, examples]))
            notes = list(dict.fromkeys((*table.list_caveats(outcome), *list_notes(group))))
            sections[-1] = sections[-1]._replace(blocks=[*sections[-1].blocks, notes])
        return sections


def group_results(results: Sequence[RunResult]) -> list[list[RunResult]]:
    """Group stored results that can share a table: of one protocol, and of each set the same questions.

    Results on other questions of a set, such as its first 100, are in another group; the longest comes first.
    """
    groups: dict[tuple[str, int], list[RunResult]] = {}
    selections: dict[tuple[str, str], list[Sequence[tuple[str, str]]]] = {}
    for result in results:
        protocol = result.figures[0]["protocol"]
        questions = tuple((item.shared["question"], item.shared["gold"]) for item in result.items_by_seed[0])
        of_set = selections.setdefault((protocol, result.task), [])
        if questions not in of_set:
            of_set.append(questions)
        groups.setdefault((protocol, of_set.index(questions)), []).append(result)
    return sorted(groups.values(), key=lambda group: -max(len(result.items_by_seed[0]) for result in group))


def may_write_chain(method: str) -> bool:
    """Return whether a method is trained to write the chain too; a class of one's own, `module:Class`, may be."""
    return method in COT_TEACHER_METHODS or ":" in method


def list_conditions(request: EvalRequest, method: str) -> list[EvalCondition]:
    conditions = [EvalCondition(), *(EvalCondition(iterations=n) for n in request.jacobi_iterations)]
    conditions += [EvalCondition(tolerance=x) for x in request.jacobi_tolerance]
    if request.with_cot and may_write_chain(method):
        conditions.insert(1, EvalCondition(with_cot=True))
    return conditions


def measure_timings(request: EvalRequest, results: Sequence[RunResult], paths: Mapping[str, str]) -> dict[int, Latency]:
    """Time the first seed of every run, by the identity of its result; all runs take turns at each question."""
    runs = {title: request.load_run(seed_runs(path)[0]) for title, path in paths.items()}
    timings: dict[int, Latency] = {}
    for dataset in dict.fromkeys(result.task for result in results):
        same = [result for result in results if result.task == dataset]
        systems = [greedy_system(request, runs[result.run], result) for result in same]
        total = len(same[0].items_by_seed[0])
        try:
            with flush_denormals(request.device), request.stop.interruptible():
                latencies = measure_latencies(systems, request.latency, total, str(request.device))
        except SignalInterruptError:
            name = request.stop.signal_name
            raise PreemptedError(f"{name}: interrupted while timing {dataset}; the answers are stored") from None
        timings |= dict(zip(map(id, same), latencies, strict=True))
    return timings


def greedy_system(request: EvalRequest, run: LoadedRun, result: RunResult) -> tuple[AnswerFunction, TrainingData]:
    """Return a function that answers greedily under the condition of a result, and the questions."""
    name = result.variant.get("condition", "")
    questions = result.source
    assert isinstance(questions, QuestionSet)
    condition = next(x for x in list_conditions(request, run.recipe.method) if x.name == name)
    decoding = decoding_for(run, questions, with_cot=condition.with_cot)
    return answer_function(run, replace(decoding, sampling=answer_matching.GREEDY), condition), questions.source


def list_notes(results: Sequence[RunResult]) -> Iterator[str]:
    """Yield what has to be said beside stored figures."""
    for result in results:
        yield from result.notes
        if differences := result.info["differences"]:
            row = f"{result.info['paper_table']}, {result.info['table_row']}"
            yield f"{result.run} differs from {row}, in {', '.join(differences)}"


def list_request_notes(request: EvalRequest, results: Sequence[RunResult]) -> Iterator[str]:
    """Yield what has to be said beside figures because of what was requested of a run."""
    run, info = results[0].run, results[0].info
    if request.with_cot and not may_write_chain(info["method"]):
        yield f"{run}: method {info['method']} is evaluated as trained only, not {COT_CONDITION}"
    if request.latency and results[0].source.protocol.sampling != answer_matching.GREEDY:
        yield f"{run}: timings are of greedy decoding, accuracy of sampled answers"


def describe_seeds(results: Sequence[RunResult]) -> tuple[str, str]:
    first = results[0]
    seeds = ", ".join(f"seed {seed} at step {step}" for seed, step in zip(first.seeds, first.steps, strict=True))
    return first.run, f"{first.info['method']}, {first.info['dtype']}; {seeds}"


def environment_facts(device: torch.device) -> list[tuple[str, str]]:
    threads = pluralize(torch.get_num_threads(), "thread")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    others = [f"{package} {version(package)}" for package in ("torch", "tokenizers")]
    versions = ", ".join([f"laconic {__version__}", *others])  # a checkout on PYTHONPATH has no metadata
    return [("device", f"{device}, {name}; {platform()}"), ("versions", versions)]
