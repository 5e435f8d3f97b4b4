"""Evaluate runs on question sets for `laconic evaluate`: every seed, set and condition, and timings."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from laconic.config.recipe import Recipe
from laconic.console import progress, status
from laconic.data.reasoning import answer_matching
from laconic.errors import PreemptedError, UsageError, translate_os_errors
from laconic.evaluation.reasoning.evaluate import AnswerFunction, ReasoningResult
from laconic.evaluation.reasoning.latency import measure_latencies, measure_throughput
from laconic.evaluation.reasoning.question_sets import QuestionSet, check_unique_titles, load_question_set
from laconic.evaluation.reasoning.run import (
    COT_CONDITION,
    answer_function,
    budget_warnings,
    check_iterations,
    choose_protocol,
    decoding_for,
    evaluate_run,
    format_condition,
    with_iterations,
)
from laconic.evaluation.reasoning.table import UNCHANGED_FLAG, ReasoningRow, ReasoningTable, changed_subset
from laconic.evaluation.report.paper_figures import find_paper_figures
from laconic.evaluation.report.recipe_diff import recipe_differences
from laconic.evaluation.results_store import EVALUATIONS_FOLDER
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.evaluation.runs import flush_denormals, load_recipes, resolve_step, seed_runs
from laconic.evaluation.validation import COT_TEACHER_METHODS
from laconic.experiment.load_run import LoadedRun, load_run
from laconic.interfaces import TrainingData
from laconic.storage import lock
from laconic.training.ranks import Ranks
from laconic.training.signals import SignalInterruptError, StopSignal


@dataclass(frozen=True)
class ReasoningRequest:
    """What `laconic evaluate` asks of runs that answer questions.

    Attributes:
        runs: Run directories, or directories of several seeds.
        baseline: A run that the others are compared with.
        datasets: Question sets: names, files, "test" or "valid".
        protocol: Name of the answer protocol; None for the default of each recipe's format.
        tolerance: Tolerance of protocol "decimal".
        root: Folder of the data sets' files.
        limit: Number of questions per set.
        with_cot: Also evaluate with the chain written out, where the method was trained for it.
        iterations: Also evaluate with these numbers of Jacobi iterations.
        checkpoint: "latest", "best" or a step number.
        batch_size: Questions per batch, on each rank.
        num_timed: Number of questions to time; 0 for none.
        device: Where models are loaded.
        ranks: Processes that share each batch.
        stop: Signal that interrupts.
    """

    runs: Sequence[str]
    baseline: str | None
    datasets: Sequence[str]
    protocol: str | None
    tolerance: Decimal | None
    root: str | None
    limit: int | None
    with_cot: bool
    iterations: Sequence[int]
    checkpoint: str
    batch_size: int
    num_timed: int
    device: torch.device
    ranks: Ranks
    stop: StopSignal

    def choose_protocol(self, recipe: Recipe) -> answer_matching.AnswerProtocol:
        """Return the answer protocol of a run."""
        return choose_protocol(recipe, self.protocol, self.tolerance)


@dataclass
class RunGroup:
    """The seeds of a run: its question sets by name, and its results by set and condition."""

    name: str
    path: str
    recipe: Recipe | None = None
    seeds: list[int] = field(default_factory=list[int])
    steps: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])
    datasets: dict[str, QuestionSet] = field(default_factory=dict[str, QuestionSet])
    results: dict[tuple[str, str], list[ReasoningResult]] = field(
        default_factory=dict[tuple[str, str], list[ReasoningResult]]
    )


@dataclass(frozen=True)
class EvalCondition:
    """One way to answer: as trained, with the chain written out, or with other Jacobi iterations."""

    with_cot: bool = False
    iterations: int | None = None

    @property
    def name(self) -> str:
        """Its name in tables and stored results."""
        return format_condition(with_cot=self.with_cot, iterations=self.iterations)


def run_evaluations(request: ReasoningRequest) -> ReasoningTable:
    """Evaluate every run on every set under every condition.

    Raises:
        UsageError: The runs cannot be evaluated with one protocol, or not as requested.
        PreemptedError: After a signal; finished answers are stored.
    """
    paths = list(dict.fromkeys((*request.runs, request.baseline or request.runs[0])))
    check_request(request, paths)
    titles = dict(zip(paths, short_run_names(paths), strict=True))
    groups = [evaluate_group(request, path, titles[path]) for path in paths]
    rows = [row for group in groups for row in build_rows(request, group)]
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    rows.sort(key=lambda row: datasets.index(row.dataset))
    if request.num_timed:
        rows = add_timings(request, rows, {group.name: group for group in groups})
    notes = dict.fromkeys(text for group in groups for text in group_notes(request, group))
    facts = [(group.name, describe_group(group)) for group in groups]
    baseline = titles[request.baseline] if request.baseline else None
    return ReasoningTable(rows, baseline, [*facts, *environment_facts(request.device)], tuple(notes))


def check_request(request: ReasoningRequest, paths: Sequence[str]) -> None:
    """Refuse, before anything is evaluated, what some run cannot do."""
    recipes = load_recipes(paths)
    answer_matching.require_one_protocol([request.choose_protocol(recipe).name for recipe in recipes.values()])
    for folder, recipe in recipes.items():
        answer_matching.check_format(request.choose_protocol(recipe), recipe.data.format, str(folder))
        for iterations in request.iterations:
            check_iterations(recipe, iterations, str(folder))
    if request.with_cot and not any(recipe.method in COT_TEACHER_METHODS for recipe in recipes.values()):
        methods = ", ".join(sorted({recipe.method for recipe in recipes.values()}))
        raise UsageError(
            f"--with-cot: method {methods} is not trained to write the chain too; "
            f"give a run of {', '.join(COT_TEACHER_METHODS)}"
        )
    for folder, recipe in recipes.items():
        check_unique_titles(recipe, request.datasets, str(folder))


def evaluate_group(request: ReasoningRequest, path: str, name: str) -> RunGroup:
    """Evaluate all seeds of a run on every set."""
    group = RunGroup(name, path)
    for folder in seed_runs(path):
        run = load_at_checkpoint(request, folder)
        group.recipe = run.recipe
        group.seeds.append(run.recipe.seed)
        group.steps.append(run.step)
        with lock_evaluations(folder, request.ranks):
            for questions, condition, result in evaluate_seed(request, run, seed_run_name(name, path, folder)):
                group.notes += budget_warnings(run, questions, name, with_cot=condition.with_cot)
                group.datasets.setdefault(questions.name, questions)
                group.results.setdefault((questions.name, condition.name), []).append(result)
    return group


def load_at_checkpoint(request: ReasoningRequest, folder: Path) -> LoadedRun:
    """Load a run at the requested checkpoint."""
    with status(f"loading {folder}"):
        return load_run(folder, request.device, resolve_step(folder, request.checkpoint))


@contextmanager
def lock_evaluations(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Lock a run's `evaluations` folder, once for all ranks; the run itself may be trained meanwhile."""
    evaluations = folder / EVALUATIONS_FOLDER
    if ranks.rank == 0:
        with translate_os_errors(evaluations):
            evaluations.mkdir(exist_ok=True)
    with lock.lock_folder(evaluations) if ranks.rank == 0 else nullcontext():
        ranks.all_gather(None)  # the others wait for the lock
        yield


def evaluate_seed(
    request: ReasoningRequest, run: LoadedRun, name: str
) -> Iterator[tuple[QuestionSet, EvalCondition, ReasoningResult]]:
    """Evaluate one run on every set under every condition."""
    for questions in load_question_sets(request, run):
        for condition in list_conditions(request, run):
            decoding = decoding_for(run, questions, with_cot=condition.with_cot)
            label = f"{name} {questions.name} {condition.name}".rstrip()
            with progress(label) if request.ranks.rank == 0 else nullcontext() as report:
                result = evaluate_run(
                    run,
                    questions,
                    decoding,
                    with_cot=condition.with_cot,
                    iterations=condition.iterations,
                    limit=request.limit,
                    batch_size=request.batch_size,
                    ranks=request.ranks,
                    stop=request.stop,
                    progress=report,
                )
            yield questions, condition, result


def load_question_sets(request: ReasoningRequest, run: LoadedRun) -> list[QuestionSet]:
    """Load the requested sets for a run, each once."""
    protocol = request.choose_protocol(run.recipe)
    sets = [load_question_set(run, name, protocol, root=request.root, limit=request.limit) for name in request.datasets]
    return list({questions.name: questions for questions in sets}.values())


def list_conditions(request: ReasoningRequest, run: LoadedRun) -> Iterator[EvalCondition]:
    """Return the requested conditions that a run's method has."""
    yield EvalCondition()
    if request.with_cot and run.recipe.method in COT_TEACHER_METHODS:
        yield EvalCondition(with_cot=True)
    for iterations in request.iterations:
        yield EvalCondition(iterations=iterations)


def build_rows(request: ReasoningRequest, group: RunGroup) -> Iterator[ReasoningRow]:
    """Return the table rows of a run; the changed questions of GSM-Hard follow the whole set."""
    recipe = group.recipe
    assert recipe is not None
    for (name, condition), results in group.results.items():
        is_comparable = request.limit is None and not condition
        papers = find_paper_figures(recipe.paper_table, recipe.table_row, name) if is_comparable else None
        row = ReasoningRow(name, group.name, condition, tuple(group.seeds), tuple(results), paper_figures=papers)
        yield row
        examples = group.datasets[name].examples
        if subset := changed_subset(row, [not example.metadata.get(UNCHANGED_FLAG, False) for example in examples]):
            yield subset


def add_timings(
    request: ReasoningRequest, rows: Sequence[ReasoningRow], groups: Mapping[str, RunGroup]
) -> list[ReasoningRow]:
    """Time the first seed of every run; all runs take turns at each question."""
    runs = {name: load_at_checkpoint(request, seed_runs(group.path)[0]) for name, group in groups.items()}
    timed = list(rows)
    device = str(request.device)
    for dataset in dict.fromkeys(row.dataset for row in rows if not row.is_subset):
        indices = [i for i, row in enumerate(rows) if row.dataset == dataset]
        systems = [
            greedy_answer_function(request, runs[rows[i].run], groups[rows[i].run].datasets[dataset], rows[i].condition)
            for i in indices
        ]
        total = len(rows[indices[0]].results[0].records)
        try:
            with flush_denormals(request.device):
                latencies = measure_latencies(systems, request.num_timed, total, device)
                throughputs = [
                    measure_throughput(answer, source, request.num_timed, total, device) for answer, source in systems
                ]
        except SignalInterruptError:
            name = request.stop.signal_name
            raise PreemptedError(f"{name}: interrupted while timing {dataset}; the answers are stored") from None
        for i, latency, throughput in zip(indices, latencies, throughputs, strict=True):
            timed[i] = replace(rows[i], latency=latency, throughput=throughput)
    return timed


def greedy_answer_function(
    request: ReasoningRequest, run: LoadedRun, questions: QuestionSet, condition_name: str
) -> tuple[AnswerFunction, TrainingData]:
    """Return a function that answers greedily under a condition, and the questions."""
    condition = next(candidate for candidate in list_conditions(request, run) if candidate.name == condition_name)
    decoding = decoding_for(run, questions, with_cot=condition.with_cot)
    decoding = replace(decoding, sampling=answer_matching.GREEDY)
    answer = answer_function(run, decoding, with_cot=condition.with_cot, stop=request.stop)

    def answer_with_iterations(batch: Any) -> Any:
        with with_iterations(run, condition.iterations):
            return answer(batch)

    return answer_with_iterations, questions.source


def group_notes(request: ReasoningRequest, group: RunGroup) -> Iterator[str]:
    """Return what has to be said beside the figures of a run."""
    recipe = group.recipe
    assert recipe is not None
    for questions in group.datasets.values():
        yield from questions.notes
    yield from group.notes
    if request.with_cot and recipe.method not in COT_TEACHER_METHODS:
        yield f"{group.name}: method {recipe.method} is evaluated as trained only, not {COT_CONDITION}"
    if request.num_timed and request.choose_protocol(recipe).sampling != answer_matching.GREEDY:
        yield f"{group.name}: timings are of greedy decoding, accuracy of sampled answers"
    if keys := recipe_differences(recipe):
        yield f"{group.name} differs from {recipe.paper_table}, {recipe.table_row}, in {', '.join(keys)}"


def describe_group(group: RunGroup) -> str:
    """Return the method, the dtype and the checkpoints of a run."""
    assert group.recipe is not None
    seeds = ", ".join(f"seed {seed} at step {step}" for seed, step in zip(group.seeds, group.steps, strict=True))
    return f"{group.recipe.method}, {group.recipe.model.dtype}; {seeds}"


def environment_facts(device: torch.device) -> list[tuple[str, str]]:
    """Return the device and the versions of the libraries."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    versions = ", ".join(f"{package} {version(package)}" for package in ("laconic", "torch", "tokenizers"))
    return [("device", f"{device}, {name}; {platform.platform()}"), ("versions", versions)]
