"""Runs on sets of questions, for `laconic evaluate`: each run of each seed opened, asked in every way, and timed."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from laconic.config.load import load_recipe
from laconic.console import progress, status
from laconic.data.reasoning import answer_matching
from laconic.errors import PreemptedError, UsageError, translate_os_errors
from laconic.evaluation.reasoning import run as reasoning_run
from laconic.evaluation.reasoning.evaluate import AnswerFunction, ReasoningResult
from laconic.evaluation.reasoning.latency import measure_latencies, measure_throughput
from laconic.evaluation.reasoning.question_sets import QuestionSet, check_unique_titles, load_question_set
from laconic.evaluation.reasoning.table import (
    COT_CONDITION,
    UNCHANGED_FLAG,
    ReasoningRow,
    ReasoningTable,
    changed_subset,
)
from laconic.evaluation.report.paper_figures import find_paper_figures
from laconic.evaluation.report.recipe_diff import recipe_differences
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.evaluation.validation import COT_TEACHER_METHODS
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, load_run
from laconic.storage import lock
from laconic.training.ranks import Ranks
from laconic.training.signals import SignalInterruptError, StopSignal


@dataclass(frozen=True)
class ReasoningRequest:
    """What is asked of which runs, and with what: the device, the ranks that share it, the signal that ends it."""

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

    def choose_protocol(self, recipe: Any) -> answer_matching.AnswerProtocol:
        """The protocol of a run."""
        return reasoning_run.choose_protocol(recipe, self.protocol, self.tolerance)


@dataclass
class RunGroup:
    """A run, or the runs of several seeds: what came of each set in each way, by seed."""

    name: str
    recipe: Any = None
    seeds: list[int] = field(default_factory=list[int])
    steps: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])
    datasets: dict[str, QuestionSet] = field(default_factory=dict[str, QuestionSet])
    results: dict[tuple[str, str], list[ReasoningResult]] = field(
        default_factory=dict[tuple[str, str], list[ReasoningResult]]
    )


def run_evaluations(request: ReasoningRequest) -> ReasoningTable:
    """Every run on every set, in every way. Raises `Usage` (2) for runs that are not judged by one protocol."""
    paths = list(dict.fromkeys((*request.runs, request.baseline or request.runs[0])))
    check_request(request, paths)
    titles = dict(zip(paths, short_run_names(paths), strict=True))
    groups = [evaluate_group(request, path, titles[path]) for path in paths]
    lines = [line for group in groups for line in build_rows(request, group)]
    sets = list(dict.fromkeys(line.dataset for line in lines))
    lines.sort(key=lambda line: sets.index(line.dataset))
    if request.num_timed:
        lines = add_timings(request, lines, dict(zip(paths, groups, strict=True)))
    notes = dict.fromkeys(text for group in groups for text in group_notes(request, group))
    facts = [(group.name, describe_group(group)) for group in groups]
    return ReasoningTable(
        lines,
        titles[request.baseline] if request.baseline else None,
        [*facts, *environment_facts(request.device)],
        tuple(notes),
    )


def check_request(request: ReasoningRequest, paths: Sequence[str]) -> None:
    """Refuses, before anything is asked, what no run could be asked."""
    recipes = {
        folder: load_recipe(folder / RECIPE_FILE)[0] for path in paths for folder in reasoning_run.seed_runs(path)
    }
    answer_matching.require_one_protocol([request.choose_protocol(recipe).name for recipe in recipes.values()])
    for folder, recipe in recipes.items():
        answer_matching.check_format(request.choose_protocol(recipe), recipe.data.format, str(folder))
        for rounds in request.iterations:
            reasoning_run.check_iterations(recipe, rounds, str(folder))
    if request.with_cot and not any(recipe.method in COT_TEACHER_METHODS for recipe in recipes.values()):
        methods = ", ".join(sorted({recipe.method for recipe in recipes.values()}))
        raise UsageError(
            f"--with-cot: {methods} learned no chain beside its answers; give a run of {', '.join(COT_TEACHER_METHODS)}"
        )
    for folder, recipe in recipes.items():
        check_unique_titles(recipe, request.datasets, str(folder))


def evaluate_group(request: ReasoningRequest, path: str, name: str) -> RunGroup:
    """A run, or the runs of several seeds, on every set."""
    group = RunGroup(name)
    for folder in reasoning_run.seed_runs(path):
        run = load_at_checkpoint(request, folder)
        group.recipe = run.recipe
        group.seeds.append(run.recipe.seed)
        group.steps.append(run.step)
        with lock_evaluations(folder, request.ranks):
            for asked, way, result in evaluate_seed(request, run, seed_run_name(name, path, folder)):
                group.notes += reasoning_run.budget_warnings(run, asked, name, with_cot=way == COT_CONDITION)
                group.datasets.setdefault(asked.name, asked)
                group.results.setdefault((asked.name, way), []).append(result)
    return group


def load_at_checkpoint(request: ReasoningRequest, folder: Path) -> LoadedRun:
    """A run at the step asked for."""
    with status(f"loading {folder}"):
        return load_run(folder, request.device, reasoning_run.resolve_step(folder, request.checkpoint))


@contextmanager
def lock_evaluations(folder: Path, ranks: Ranks) -> Iterator[None]:
    """One writer of a run's evaluations, which rank 0 is for all; the run itself may be trained meanwhile."""
    place = folder / reasoning_run.EVALUATIONS_FOLDER
    if ranks.rank == 0:
        with translate_os_errors(place):
            place.mkdir(exist_ok=True)
    with lock.lock_folder(place) if ranks.rank == 0 else nullcontext():
        ranks.all_gather(None)
        yield


def evaluate_seed(
    request: ReasoningRequest, run: LoadedRun, name: str
) -> Iterator[tuple[QuestionSet, str, ReasoningResult]]:
    """One run on every set, in every way."""
    for asked in load_question_sets(request, run):
        for way, teacher, rounds in list_conditions(request, run):
            writing = reasoning_run.decoding_for(run, asked, with_cot=teacher)
            folder = reasoning_run.results_folder_name(
                asked, run.step, limit=request.limit, with_cot=teacher, iterations=rounds
            )
            key = {
                "gold": reasoning_run.gold_hash(asked),
                "tokens": str(writing.max_tokens),
                "seed": str(run.recipe.seed),
            }
            with progress(f"{name} {asked.name} {way}".rstrip()) if request.ranks.rank == 0 else nullcontext() as show:
                yield asked, way, reasoning_run.evaluate_run(
                    run, asked, writing, folder, with_cot=teacher, iterations=rounds, batch_size=request.batch_size, key=key,
                    ranks=request.ranks, stop=request.stop, progress=show,
                )  # fmt: skip


def load_question_sets(request: ReasoningRequest, run: LoadedRun) -> list[QuestionSet]:
    """The sets as a run reads them, each once."""
    found = [
        load_question_set(run, name, request.choose_protocol(run.recipe), root=request.root, limit=request.limit)
        for name in request.datasets
    ]
    return list({asked.name: asked for asked in found}.values())


def list_conditions(request: ReasoningRequest, run: LoadedRun) -> Iterator[tuple[str, bool, int | None]]:
    """As trained, by written chain, in other numbers of rounds: what it is called, and what is told to the run."""
    yield "", False, None
    if request.with_cot and run.recipe.method in COT_TEACHER_METHODS:
        yield COT_CONDITION, True, None
    for rounds in request.iterations:
        yield f"{rounds} rounds", False, rounds


def build_rows(request: ReasoningRequest, group: RunGroup) -> Iterator[ReasoningRow]:
    """The lines of a group: each set in each way, and the changed questions of GSM-Hard behind it."""
    recipe = group.recipe
    for (name, way), results in group.results.items():
        asked = group.datasets[name]
        whole = request.limit is None and not way
        paper = find_paper_figures(recipe.source, recipe.row, name) if whole else None
        line = ReasoningRow(name, group.name, way, tuple(group.seeds), tuple(results), paper_figures=paper)
        yield line
        changed = changed_subset(line, [not example.metadata.get(UNCHANGED_FLAG, False) for example in asked.examples])
        if changed:
            yield changed


def add_timings(
    request: ReasoningRequest, rows: Sequence[ReasoningRow], groups: dict[str, RunGroup]
) -> list[ReasoningRow]:
    """The lines with the time of each first run, one question put to all of them in turn."""
    runs = {group.name: load_at_checkpoint(request, reasoning_run.seed_runs(path)[0]) for path, group in groups.items()}
    sets = {group.name: group.datasets for group in groups.values()}
    found = list(rows)
    for name in dict.fromkeys(line.dataset for line in rows if not line.is_subset):
        at = [i for i, line in enumerate(rows) if line.dataset == name]
        puts = [
            greedy_answer_function(request, runs[rows[i].run], sets[rows[i].run][name], rows[i].condition) for i in at
        ]
        total = len(rows[at[0]].results[0].records)
        device = str(request.device)
        try:
            with reasoning_run.flush_denormals(request.device):
                took = measure_latencies(puts, request.num_timed, total, device)
                many = [measure_throughput(answer, source, request.num_timed, total, device) for answer, source in puts]
        except SignalInterruptError:
            raise PreemptedError(
                f"{request.stop.signal_name}: while {name} was timed; the answers are kept, time it again"
            ) from None
        for i, latency, each in zip(at, took, many, strict=True):
            found[i] = replace(rows[i], latency=latency, throughput=each)
    return found


def greedy_answer_function(
    request: ReasoningRequest, run: LoadedRun, questions: QuestionSet, condition: str
) -> tuple[AnswerFunction, Any]:
    """How one way of a run answers a set greedily, and the set."""
    teacher, rounds = next(
        (teacher, rounds) for called, teacher, rounds in list_conditions(request, run) if called == condition
    )
    writing = replace(reasoning_run.decoding_for(run, questions, with_cot=teacher), sampling=answer_matching.GREEDY)
    answer = reasoning_run.answer_function(run, writing, with_cot=teacher, stop=request.stop)

    def answered(batch: Any) -> Any:
        with reasoning_run.with_iterations(run, rounds):
            return answer(batch)

    return answered, questions.source


def group_notes(request: ReasoningRequest, group: RunGroup) -> Iterator[str]:
    """What has to be said of a group's figures."""
    recipe = group.recipe
    for asked in group.datasets.values():
        yield from asked.notes
    yield from group.notes
    if request.with_cot and recipe.method not in COT_TEACHER_METHODS:
        yield f"{group.name}: method {recipe.method} has no chain beside its answers"
    if request.num_timed and request.choose_protocol(recipe).sampling != answer_matching.GREEDY:
        yield f"{group.name}: time is taken of greedy answers, accuracy of drawn ones"
    if keys := recipe_differences(recipe):
        yield f"{group.name} differs from {recipe.source}, {recipe.row}, in {', '.join(keys)}"


def describe_group(group: RunGroup) -> str:
    """What a group's runs are."""
    recipe = group.recipe
    seeds = ", ".join(f"seed {seed} at step {step}" for seed, step in zip(group.seeds, group.steps, strict=True))
    return f"{recipe.method}, {recipe.model.dtype}; {seeds}"


def environment_facts(device: torch.device) -> list[tuple[str, str]]:
    """Where the figures were made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    versions = ", ".join(f"{package} {version(package)}" for package in ("laconic", "torch", "tokenizers"))
    return [("device", f"{device}, {name}; {platform.platform()}"), ("versions", versions)]
