"""`laconic demo`: models that write a chain, write none, or think in vectors, trained side by side and compared."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from laconic.console import lively, say, write
from laconic.core.errors import Usage
from laconic.verbs.jobs import Job, Jobs, State, terminated

if TYPE_CHECKING:
    from rich.progress import TaskID

    from laconic.recipe.schema import Recipe

LEAST = 0.99  # of its own problems a teacher must get right before anything is distilled from it
CHAIN, FOCUS = "chain", "kava"
ASKING = 0.2  # share of a job that is not training
SILENCE = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class Entry:
    """A recipe of ours with some keys changed, its row in the table, and its cost in seconds of an idle core."""

    name: str
    title: str
    about: str
    recipe: str
    changed: tuple[str, ...] = ()
    control: bool = False
    fast: tuple[str, ...] | None = None
    cost: float = 60.0
    shown: bool = True

    @property
    def tint(self) -> int:
        """Its colour on the page."""
        return ORDER.index(self.name) if self.name in ORDER else 0


PAUSE = ("thinking.rounds=0", 'thinking.project="none"')


def selected(how: str) -> tuple[str, ...]:
    """KaVa with another selector."""
    return (f'keeping.select="{how}"',)


IN_ROUNDS = "{M} thoughts at once, in {T} rounds; targets: "
ROSTER = (
    Entry("short", "Short chain", "what the chain is learned from", "demo-short", fast=(), cost=25, shown=False),
    Entry("chain", "Chain written out", "writes every step, then the answer", "demo-cot", fast=(), cost=40),
    Entry(
        "kava",
        "KaVa",
        f"{IN_ROUNDS}keys and values of the chain",
        "demo-kava",
        fast=("train.steps=250",),
    ),
    Entry("nochain", "No chain", "answers at once", "demo-nocot", fast=("train.steps=400",), cost=35),
    Entry("pccot", "PCCoT", f"{IN_ROUNDS}hidden states", "demo-pccot"),
    Entry("codi", "CODI", "{M} thoughts one after another; targets: hidden states", "demo-codi", cost=50),
    Entry("pause", "Pause tokens", "{M} placeholders, no rounds", "demo-pccot", PAUSE, cost=40),
    Entry("random", "random selection", "KaVa, kept tokens drawn", "demo-kava", selected("random"), True),
    Entry(
        "uniform", "uniform selection", "KaVa, tokens at even distances kept", "demo-kava", selected("uniform"), True
    ),
    Entry("crop", "first tokens", "KaVa, the first tokens kept", "demo-kava", selected("crop"), True),
    Entry("nodistil", "no distillation", "PCCoT without targets", "demo-pccot", ("distilling.alpha1=0.0",), True),
)
ORDER = ("chain", "nochain", "pause", "codi", "pccot", "kava")  # in the table; controls follow as they stand
FAST = ("data.digits.test_rows=1000", "validation.rows=200")


@dataclass(frozen=True)
class Demo:
    """Trains small models on arithmetic, with a chain, without, and with latent thoughts, and compares them.

    It runs offline, two processes side by side; the same command goes on where it was stopped.

    Example: laconic demo --fast
    """

    fast: bool = False
    """two minutes: fewer methods, no controls"""
    seeds: int = 1
    """so many runs of each; three or more give a mean with its spread"""
    out: Path | None = None
    """folder of the runs and of report.html; by default runs/demo, or runs/demo-fast"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """0 when everything is trained, asked and written; 1 where no chain was learned well enough to distil from."""
        if self.seeds < 1:
            raise Usage(f"--seeds {self.seeds}: give at least one")
        roster = [quick(entry) for entry in ROSTER if entry.fast is not None] if self.fast else ROSTER
        out = self.out or Path("runs") / ("demo-fast" if self.fast else "demo")
        return compare(roster, out, range(self.seeds), FAST if self.fast else (), self.format)


def quick(entry: Entry) -> Entry:
    """An entry as --fast runs it."""
    return replace(entry, changed=(*entry.changed, *(entry.fast or ())))


def compare(
    roster: Sequence[Entry], out: Path, seeds: Sequence[int], changed: Sequence[str] = (), format: str = "human"
) -> int:
    """Trains and asks every entry with every seed, then prints the table and writes the page."""
    began = time.monotonic()
    with terminated(), Jobs([job(entry, seed, out, changed, roster) for seed in seeds for entry in roster]) as jobs:
        planned = f"{len(jobs.all)} runs, {duration(jobs.left(began))} on two idle cores"
        say(f"laconic demo: {planned}; logs in {out / 'logs'}")
        try:
            with shown() as show:
                jobs.go(show)
        except KeyboardInterrupt:
            jobs.stop()
            say("laconic demo: stopped; the same command goes on where it was")
            raise
    for problem in sorted(set(jobs.refused.values())):
        say(f"laconic demo: {problem}")
    good = [seed for seed in seeds if not any(f"{entry.name}, seed {seed}" in jobs.refused for entry in roster)]
    if not good:
        return 1
    told(roster, out, good, time.monotonic() - began, format)
    return 0


def told(roster: Sequence[Entry], out: Path, seeds: Sequence[int], seconds: float, format: str) -> None:
    """The table, what it does not show, and the page."""
    from laconic.evaluation import report
    from laconic.verbs.gather import gathered

    ranked = sorted(
        (entry for entry in roster if entry.shown),
        key=lambda entry: ORDER.index(entry.name) if entry.name in ORDER else len(ORDER),
    )
    found = gathered(ranked, out, seeds, seconds, shlex.join(["laconic", *sys.argv[1:]]))
    write(out / "report.html", report.page(found))
    if format == "json":
        print(json.dumps(report.plain(found), ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console

    Console(highlight=False).print(report.table(found))
    print(report.words(found))


def folder(out: Path, name: str, seed: int) -> Path:
    """The run of an entry."""
    return out / name / f"seed-{seed}"


def first(recipe: "Recipe", roster: Sequence[Entry]) -> str | None:
    """The entry that a recipe starts from: the one whose recipe its `model.start` is named for."""
    if recipe.model.start is None:
        return None
    return next(entry.name for entry in roster if entry.recipe == Path(str(recipe.model.start)).name)


def job(entry: Entry, seed: int, out: Path, changed: Sequence[str], roster: Sequence[Entry]) -> Job:
    """The process that trains an entry with a seed and asks it."""
    from laconic.recipe.read import read

    run, base = folder(out, entry.name, seed), first(read(entry.recipe)[0], roster)
    start = [f"model.start={folder(out, base, seed)}"] if base else []
    over = [*entry.changed, *changed, f"seed={seed}", *start]
    recipe, _ = read(entry.recipe, over)
    ask_same(run, recipe)
    steps = recipe.train.length(recipe.data.digits.rows)
    return Job(
        name=f"{entry.name}, seed {seed}",
        command=[sys.executable, "-m", "laconic.verbs.trial", entry.recipe, str(run), *over],
        log=out / "logs" / f"{entry.name}-seed-{seed}.log",
        cost=entry.cost,
        after=(f"{base}, seed {seed}",) if base else (),
        progress=lambda: done_of(run, recipe, steps),
        done=lambda: finished(run, recipe),
        check=(lambda: taught(run, seed)) if entry.name == CHAIN else lambda: None,
    )


def done_of(run: Path, recipe: "Recipe", steps: int) -> float:
    """How much of a run and of its evaluations is done."""
    asked = names(recipe)
    there = sum((run / "evaluations" / name).is_dir() for name in asked)
    trained = 1.0 if (run / "evaluations").is_dir() else steps_done(run) / steps
    return (1 - ASKING) * trained + ASKING * there / len(asked)


def names(recipe: "Recipe") -> list[str]:
    """The evaluations of a run."""
    from laconic.verbs.trial import evaluations

    return [name for name, _, _ in evaluations(recipe)]


def steps_done(run: Path) -> int:
    """The last step in a run's metrics."""
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        whole = file.read().rpartition(b"\n")[0].splitlines()
    return int(json.loads(whole[-1])["step"]) if whole and whole[-1].startswith(b"{") else 0


def ask_same(run: Path, recipe: "Recipe") -> None:
    """Raises `Usage` (2) where a run was begun by another recipe."""
    from laconic.recipe.read import read
    from laconic.recipe.schema import said

    path = run / "recipe.toml"
    if path.exists() and said(read(path)[0]) != said(recipe):
        raise Usage(f"{run} was begun by another recipe; choose another --out, or remove it")


def finished(run: Path, recipe: "Recipe") -> bool:
    """Whether a run of this recipe is trained and asked already."""
    from laconic.recipe.read import read

    if not all((run / "evaluations" / name).is_dir() for name in names(recipe)):
        return False
    return read(run / "recipe.toml")[0].train.steps == recipe.train.steps


def taught(run: Path, seed: int) -> str | None:
    """Why nothing can be distilled from a chain; None where it is good enough."""
    found = json.loads((run / "evaluations" / "test" / "result.json").read_text(encoding="utf-8"))["accuracy"]
    if found >= LEAST:
        return None
    asked = f"{100 * LEAST:.0f} % are asked before anything is distilled from it"
    return f"the chain of seed {seed} is right on {100 * found:.1f} % of unseen problems, {asked}; the seed is left out"


@contextmanager
def shown() -> Iterator[Callable[[State], None]]:
    """Progress of all jobs: bars on a terminal, elsewhere one line in ten seconds."""
    if not lively():
        yield lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:<18}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        whole = bars.add_task("all", total=1.0, note="")
        tasks: dict[str, TaskID] = {}

        def show(state: State) -> None:
            bars.update(
                whole, total=state.all, completed=state.done + sum(state.running.values()), note=remaining(state)
            )
            for name in tasks.keys() - state.running.keys():
                bars.remove_task(tasks.pop(name))
            for name, share in state.running.items():
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=1.0, note="")
                bars.update(tasks[name], completed=share)

        yield show


def lines() -> Callable[[State], None]:
    """Progress where there is no terminal."""
    spoken = time.monotonic()

    def show(state: State) -> None:
        nonlocal spoken
        if time.monotonic() - spoken >= SILENCE:
            spoken = time.monotonic()
            running = ", ".join(f"{name} {100 * share:.0f} %" for name, share in state.running.items())
            say(f"demo: {state.done} of {state.all} done; {running}; {remaining(state)}")

    return show


def remaining(state: State) -> str:
    """The time left, in words."""
    return f"{duration(state.left)} left"


def duration(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
