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

from laconic.cli.jobs import Job, Jobs, State, terminated
from laconic.console import is_interactive, log_message, write_file
from laconic.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from laconic.config.recipe import Recipe

MIN_TEACHER_ACCURACY = 0.99  # of its own problems a teacher must get right before anything is distilled from it
TEACHER_ENTRY, FOCUS_ENTRY = "chain", "kava"
ASKING = 0.2  # share of a job that is not training
SILENCE = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class DemoEntry:
    """A recipe of ours with some keys changed, its row in the table, and its cost in seconds of an idle core."""

    name: str
    title: str
    description: str
    recipe: str
    overrides: tuple[str, ...] = ()
    is_control: bool = False
    fast_overrides: tuple[str, ...] | None = None
    cost: float = 60.0
    is_in_table: bool = True

    @property
    def color_index(self) -> int:
        """Its colour on the page."""
        return TABLE_ORDER.index(self.name) if self.name in TABLE_ORDER else 0


PAUSE_OVERRIDES = ("latents.jacobi_iterations=0", 'latents.projection="none"')


def selection_override(how: str) -> tuple[str, ...]:
    """KaVa with another selector."""
    return (f'kv_selection.policy="{how}"',)


PARALLEL_DESCRIPTION = "{M} thoughts at once, in {T} rounds; targets: "
ENTRIES = (
    DemoEntry(
        "short",
        "Short chain",
        "what the chain is learned from",
        "demo-short",
        fast_overrides=(),
        cost=25,
        is_in_table=False,
    ),
    DemoEntry(
        "chain", "Chain written out", "writes every step, then the answer", "demo-cot", fast_overrides=(), cost=40
    ),
    DemoEntry(
        "kava",
        "KaVa",
        f"{PARALLEL_DESCRIPTION}keys and values of the chain",
        "demo-kava",
        fast_overrides=("train.steps=250",),
    ),
    DemoEntry("nochain", "No chain", "answers at once", "demo-nocot", fast_overrides=("train.steps=400",), cost=35),
    DemoEntry("pccot", "PCCoT", f"{PARALLEL_DESCRIPTION}hidden states", "demo-pccot"),
    DemoEntry("codi", "CODI", "{M} thoughts one after another; targets: hidden states", "demo-codi", cost=50),
    DemoEntry("pause", "Pause tokens", "{M} placeholders, no rounds", "demo-pccot", PAUSE_OVERRIDES, cost=40),
    DemoEntry("random", "random selection", "KaVa, kept tokens drawn", "demo-kava", selection_override("random"), True),
    DemoEntry(
        "uniform",
        "uniform selection",
        "KaVa, tokens at even distances kept",
        "demo-kava",
        selection_override("uniform"),
        True,
    ),
    DemoEntry("crop", "first tokens", "KaVa, the first tokens kept", "demo-kava", selection_override("crop"), True),
    DemoEntry(
        "nodistil", "no distillation", "PCCoT without targets", "demo-pccot", ("distillation.hidden_weight=0.0",), True
    ),
)
TABLE_ORDER = ("chain", "nochain", "pause", "codi", "pccot", "kava")  # in the table; controls follow as they stand
FAST_OVERRIDES = ("data.digits.test_rows=1000", "validation.max_rows=200")


@dataclass(frozen=True)
class DemoCommand:
    """Trains small models on arithmetic, with a chain, without, and with latent thoughts, and compares them.

    It runs offline, two processes side by side; the same command goes on where it was stopped.

    Example: laconic demo --fast
    """

    fast: bool = False
    """two minutes: fewer methods, no controls"""
    num_seeds: int = 1
    """so many runs of each; three or more give a mean with its spread"""
    out: Path | None = None
    """folder of the runs and of report.html; by default runs/demo, or runs/demo-fast"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """0 when everything is trained, asked and written; 1 where no chain was learned well enough to distil from."""
        if self.num_seeds < 1:
            raise UsageError(f"--num-seeds {self.num_seeds}: give at least one")
        roster = [fast_entry(entry) for entry in ENTRIES if entry.fast_overrides is not None] if self.fast else ENTRIES
        out = self.out or Path("runs") / ("demo-fast" if self.fast else "demo")
        return run_demo(roster, out, range(self.num_seeds), FAST_OVERRIDES if self.fast else (), self.format)


def fast_entry(entry: DemoEntry) -> DemoEntry:
    """An entry as --fast runs it."""
    return replace(entry, overrides=(*entry.overrides, *(entry.fast_overrides or ())))


def run_demo(
    entries: Sequence[DemoEntry], out: Path, seeds: Sequence[int], overrides: Sequence[str] = (), format: str = "human"
) -> int:
    """Trains and asks every entry with every seed, then prints the table and writes the page."""
    began = time.monotonic()
    with terminated(), Jobs([job(entry, seed, out, overrides, entries) for seed in seeds for entry in entries]) as jobs:
        planned = f"{len(jobs.all)} runs, {format_duration(jobs.left(began))} on two idle cores"
        log_message(f"laconic demo: {planned}; logs in {out / 'logs'}")
        try:
            with shown() as show:
                jobs.go(show)
        except KeyboardInterrupt:
            jobs.stop()
            log_message("laconic demo: stopped; the same command goes on where it was")
            raise
    for problem in sorted(set(jobs.refused.values())):
        log_message(f"laconic demo: {problem}")
    good = [seed for seed in seeds if not any(f"{entry.name}, seed {seed}" in jobs.refused for entry in entries)]
    if not good:
        return 1
    print_report(entries, out, good, time.monotonic() - began, format)
    return 0


def print_report(roster: Sequence[DemoEntry], out: Path, seeds: Sequence[int], seconds: float, format: str) -> None:
    """The table, what it does not show, and the page."""
    from laconic.cli.demo_report import build_demo_report
    from laconic.evaluation.report import runs_table

    ranked = sorted(
        (entry for entry in roster if entry.is_in_table),
        key=lambda entry: TABLE_ORDER.index(entry.name) if entry.name in TABLE_ORDER else len(TABLE_ORDER),
    )
    found = build_demo_report(ranked, out, seeds, seconds, shlex.join(["laconic", *sys.argv[1:]]))
    write_file(out / "report.html", runs_table.render_report(found))
    if format == "json":
        print(json.dumps(runs_table.report_to_json(found), ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console

    Console(highlight=False).print(runs_table.build_table(found))
    print(runs_table.format_footnotes(found))


def run_path(out: Path, name: str, seed: int) -> Path:
    """The run of an entry."""
    return out / name / f"seed-{seed}"


def base_entry(recipe: "Recipe", roster: Sequence[DemoEntry]) -> str | None:
    """The entry that a recipe starts from: the one whose recipe its `model.init_from_run` is named for."""
    if recipe.model.init_from_run is None:
        return None
    return next(entry.name for entry in roster if entry.recipe == Path(str(recipe.model.init_from_run)).name)


def job(entry: DemoEntry, seed: int, out: Path, changed: Sequence[str], roster: Sequence[DemoEntry]) -> Job:
    """The process that trains an entry with a seed and asks it."""
    from laconic.config.load import load_recipe

    run, base = run_path(out, entry.name, seed), base_entry(load_recipe(entry.recipe)[0], roster)
    start = [f"model.init_from_run={run_path(out, base, seed)}"] if base else []
    over = [*entry.overrides, *changed, f"seed={seed}", *start]
    recipe, _ = load_recipe(entry.recipe, over)
    check_same_recipe(run, recipe)
    steps = recipe.train.total_updates(recipe.data.digits.train_rows)
    return Job(
        name=f"{entry.name}, seed {seed}",
        command=[sys.executable, "-m", "laconic.cli.trial", entry.recipe, str(run), *over],
        log=out / "logs" / f"{entry.name}-seed-{seed}.log",
        cost=entry.cost,
        after=(f"{base}, seed {seed}",) if base else (),
        progress=lambda: done_of(run, recipe, steps),
        done=lambda: is_finished(run, recipe),
        check=(lambda: check_teacher(run, seed)) if entry.name == TEACHER_ENTRY else lambda: None,
    )


def done_of(run: Path, recipe: "Recipe", steps: int) -> float:
    """How much of a run and of its evaluations is done."""
    asked = evaluation_names(recipe)
    there = sum((run / "evaluations" / name).is_dir() for name in asked)
    trained = 1.0 if (run / "evaluations").is_dir() else steps_done(run) / steps
    return (1 - ASKING) * trained + ASKING * there / len(asked)


def evaluation_names(recipe: "Recipe") -> list[str]:
    """The evaluations of a run."""
    from laconic.cli.trial import planned_evaluations

    return [name for name, _, _ in planned_evaluations(recipe)]


def steps_done(run: Path) -> int:
    """The last step in a run's metrics."""
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        whole = file.read().rpartition(b"\n")[0].splitlines()
    return int(json.loads(whole[-1])["step"]) if whole and whole[-1].startswith(b"{") else 0


def check_same_recipe(run: Path, recipe: "Recipe") -> None:
    """Raises `Usage` (2) where a run was begun by another recipe."""
    from laconic.config.load import load_recipe
    from laconic.config.recipe import explicit_values

    path = run / "recipe.toml"
    if path.exists() and explicit_values(load_recipe(path)[0]) != explicit_values(recipe):
        raise UsageError(f"{run} was begun by another recipe; choose another --out, or remove it")


def is_finished(run: Path, recipe: "Recipe") -> bool:
    """Whether a run of this recipe is trained and asked already."""
    from laconic.config.load import load_recipe

    if not all((run / "evaluations" / name).is_dir() for name in evaluation_names(recipe)):
        return False
    return load_recipe(run / "recipe.toml")[0].train.steps == recipe.train.steps


def check_teacher(run: Path, seed: int) -> str | None:
    """Why nothing can be distilled from a chain; None where it is good enough."""
    found = json.loads((run / "evaluations" / "test" / "result.json").read_text(encoding="utf-8"))["accuracy"]
    if found >= MIN_TEACHER_ACCURACY:
        return None
    asked = f"{100 * MIN_TEACHER_ACCURACY:.0f} % are asked before anything is distilled from it"
    return f"the chain of seed {seed} is right on {100 * found:.1f} % of unseen problems, {asked}; the seed is left out"


@contextmanager
def shown() -> Iterator[Callable[[State], None]]:
    """Progress of all jobs: bars on a terminal, elsewhere one line in ten seconds."""
    if not is_interactive():
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
            log_message(f"demo: {state.done} of {state.all} done; {running}; {remaining(state)}")

    return show


def remaining(state: State) -> str:
    """The time left, in words."""
    return f"{format_duration(state.left)} left"


def format_duration(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
