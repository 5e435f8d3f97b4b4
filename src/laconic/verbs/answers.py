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

from laconic.console import note, progress
from laconic.core import lock
from laconic.core.errors import Preempted, Usage, on_disk
from laconic.evaluation import protocols
from laconic.evaluation.evaluate import Answer, Result
from laconic.evaluation.reported import reported
from laconic.evaluation.table import CHAIN, UNCHANGED, Line, Table, apart
from laconic.evaluation.timing import latencies, throughput
from laconic.recipe import asking
from laconic.recipe.differences import differences
from laconic.recipe.opened import RECIPE, Opened, opened
from laconic.recipe.questions import QuestionSet, check_titles, question_set
from laconic.recipe.read import read
from laconic.recipe.validation import TEACHERS
from laconic.training.ranks import Ranks
from laconic.training.signals import Interrupted, Stop
from laconic.verbs.arguments import names, run_name


@dataclass(frozen=True)
class Asking:
    """What is asked of which runs, and with what: the device, the ranks that share it, the signal that ends it."""

    runs: Sequence[str]
    against: str | None
    sets: Sequence[str]
    protocol: str | None
    tol: Decimal | None
    root: str | None
    rows: int | None
    teacher: bool
    rounds: Sequence[int]
    step: str
    batch: int
    timed: int
    device: torch.device
    ranks: Ranks
    stop: Stop

    def judge(self, recipe: Any) -> protocols.Protocol:
        """The protocol of a run."""
        return asking.chosen(recipe, self.protocol, self.tol)


@dataclass
class Group:
    """A run, or the runs of several seeds: what came of each set in each way, by seed."""

    name: str
    recipe: Any = None
    seeds: list[int] = field(default_factory=list[int])
    steps: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])
    sets: dict[str, QuestionSet] = field(default_factory=dict[str, QuestionSet])
    results: dict[tuple[str, str], list[Result]] = field(default_factory=dict[tuple[str, str], list[Result]])


def gathered(how: Asking) -> Table:
    """Every run on every set, in every way. Raises `Usage` (2) for runs that are not judged by one protocol."""
    paths = list(dict.fromkeys((*how.runs, how.against or how.runs[0])))
    checked(how, paths)
    titles = dict(zip(paths, names(paths), strict=True))
    groups = [asked_group(how, path, titles[path]) for path in paths]
    lines = [line for group in groups for line in lines_of(how, group)]
    sets = list(dict.fromkeys(line.set for line in lines))
    lines.sort(key=lambda line: sets.index(line.set))
    if how.timed:
        lines = timed(how, lines, dict(zip(paths, groups, strict=True)))
    notes = dict.fromkeys(text for group in groups for text in notes_of(how, group))
    facts = [(group.name, described(group)) for group in groups]
    return Table(lines, titles[how.against] if how.against else None, [*facts, *about(how.device)], tuple(notes))


def checked(how: Asking, paths: Sequence[str]) -> None:
    """Refuses, before anything is asked, what no run could be asked."""
    recipes = {folder: read(folder / RECIPE)[0] for path in paths for folder in asking.seeds(path)}
    protocols.same([how.judge(recipe).name for recipe in recipes.values()])
    for folder, recipe in recipes.items():
        protocols.check_format(how.judge(recipe), recipe.data.format, str(folder))
        for rounds in how.rounds:
            asking.check_rounds(recipe, rounds, str(folder))
    if how.teacher and not any(recipe.method in TEACHERS for recipe in recipes.values()):
        methods = ", ".join(sorted({recipe.method for recipe in recipes.values()}))
        raise Usage(f"--teacher: {methods} learned no chain beside its answers; give a run of {', '.join(TEACHERS)}")
    for folder, recipe in recipes.items():
        check_titles(recipe, how.sets, str(folder))


def asked_group(how: Asking, path: str, name: str) -> Group:
    """A run, or the runs of several seeds, on every set."""
    group = Group(name)
    for folder in asking.seeds(path):
        run = opened_at(how, folder)
        group.recipe = run.recipe
        group.seeds.append(run.recipe.seed)
        group.steps.append(run.step)
        with locked(folder, how.ranks):
            for asked, way, result in evaluations(how, run, run_name(name, path, folder)):
                group.notes += asking.cut_short(run, asked, name, teacher=way == CHAIN)
                group.sets.setdefault(asked.name, asked)
                group.results.setdefault((asked.name, way), []).append(result)
    return group


def opened_at(how: Asking, folder: Path) -> Opened:
    """A run at the step asked for."""
    with note(f"loading {folder}"):
        return opened(folder, how.device, asking.step_of(folder, how.step))


@contextmanager
def locked(folder: Path, ranks: Ranks) -> Iterator[None]:
    """One writer of a run's evaluations, which rank 0 is for all; the run itself may be trained meanwhile."""
    place = folder / asking.FOLDER
    if ranks.rank == 0:
        with on_disk(place):
            place.mkdir(exist_ok=True)
    with lock.held(place) if ranks.rank == 0 else nullcontext():
        ranks.exchange(None)
        yield


def evaluations(how: Asking, run: Opened, name: str) -> Iterator[tuple[QuestionSet, str, Result]]:
    """One run on every set, in every way."""
    for asked in questions(how, run):
        for way, teacher, rounds in ways(how, run):
            writing = asking.writing_for(run, asked, teacher=teacher)
            folder = asking.folder_name(asked, run.step, rows=how.rows, teacher=teacher, rounds=rounds)
            key = {"gold": asking.gold(asked), "tokens": str(writing.max_tokens), "seed": str(run.recipe.seed)}
            with progress(f"{name} {asked.name} {way}".rstrip()) if how.ranks.rank == 0 else nullcontext() as show:
                yield asked, way, asking.answered(
                    run, asked, writing, folder, teacher=teacher, rounds=rounds, batch=how.batch, key=key,
                    ranks=how.ranks, stop=how.stop, show=show,
                )  # fmt: skip


def questions(how: Asking, run: Opened) -> list[QuestionSet]:
    """The sets as a run reads them, each once."""
    found = [question_set(run, name, how.judge(run.recipe), root=how.root, rows=how.rows) for name in how.sets]
    return list({asked.name: asked for asked in found}.values())


def ways(how: Asking, run: Opened) -> Iterator[tuple[str, bool, int | None]]:
    """As trained, by written chain, in other numbers of rounds: what it is called, and what is told to the run."""
    yield "", False, None
    if how.teacher and run.recipe.method in TEACHERS:
        yield CHAIN, True, None
    for rounds in how.rounds:
        yield f"{rounds} rounds", False, rounds


def lines_of(how: Asking, group: Group) -> Iterator[Line]:
    """The lines of a group: each set in each way, and the changed questions of GSM-Hard behind it."""
    recipe = group.recipe
    for (name, way), results in group.results.items():
        asked = group.sets[name]
        whole = how.rows is None and not way
        paper = reported(recipe.source, recipe.row, name) if whole else None
        line = Line(name, group.name, way, tuple(group.seeds), tuple(results), paper=paper)
        yield line
        changed = apart(line, [not example.flags.get(UNCHANGED, False) for example in asked.examples])
        if changed:
            yield changed


def timed(how: Asking, lines: Sequence[Line], groups: dict[str, Group]) -> list[Line]:
    """The lines with the time of each first run, one question put to all of them in turn."""
    runs = {group.name: opened_at(how, asking.seeds(path)[0]) for path, group in groups.items()}
    sets = {group.name: group.sets for group in groups.values()}
    found = list(lines)
    for name in dict.fromkeys(line.set for line in lines if not line.part):
        at = [i for i, line in enumerate(lines) if line.set == name]
        puts = [put(how, runs[lines[i].run], sets[lines[i].run][name], lines[i].way) for i in at]
        total = len(lines[at[0]].results[0].rows)
        device = str(how.device)
        try:
            with asking.flushed(how.device):
                took = latencies(puts, how.timed, total, device)
                many = [throughput(answer, source, how.timed, total, device) for answer, source in puts]
        except Interrupted:
            raise Preempted(f"{how.stop.name}: while {name} was timed; the answers are kept, time it again") from None
        for i, latency, each in zip(at, took, many, strict=True):
            found[i] = replace(lines[i], latency=latency, throughput=each)
    return found


def put(how: Asking, run: Opened, asked: QuestionSet, way: str) -> tuple[Answer, Any]:
    """How one way of a run answers a set greedily, and the set."""
    teacher, rounds = next((teacher, rounds) for called, teacher, rounds in ways(how, run) if called == way)
    writing = replace(asking.writing_for(run, asked, teacher=teacher), how=protocols.GREEDY)
    answer = asking.answering(run, writing, teacher=teacher, stop=how.stop)

    def answered(batch: Any) -> Any:
        with asking.in_rounds(run, rounds):
            return answer(batch)

    return answered, asked.source


def notes_of(how: Asking, group: Group) -> Iterator[str]:
    """What has to be said of a group's figures."""
    recipe = group.recipe
    for asked in group.sets.values():
        yield from asked.notes
    yield from group.notes
    if how.teacher and recipe.method not in TEACHERS:
        yield f"{group.name}: method {recipe.method} has no chain beside its answers"
    if how.timed and how.judge(recipe).sampling != protocols.GREEDY:
        yield f"{group.name}: time is taken of greedy answers, accuracy of drawn ones"
    if keys := differences(recipe):
        yield f"{group.name} differs from {recipe.source}, {recipe.row}, in {', '.join(keys)}"


def described(group: Group) -> str:
    """What a group's runs are."""
    recipe = group.recipe
    seeds = ", ".join(f"seed {seed} at step {step}" for seed, step in zip(group.seeds, group.steps, strict=True))
    return f"{recipe.method}, {recipe.model.dtype}; {seeds}"


def about(device: torch.device) -> list[tuple[str, str]]:
    """Where the figures were made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    versions = ", ".join(f"{package} {version(package)}" for package in ("laconic", "torch", "tokenizers"))
    return [("device", f"{device}, {name}; {platform.platform()}"), ("versions", versions)]
