"""`laconic demo`: train small models with a chain of thought, without one, and with latent thoughts; compare them.

The runs are subprocesses, two at a time. A run starts when the run whose weights it starts from is finished.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.arguments import OptionalPath, OutputFormat, check_minimum, command_line
from laconic.cli.demo_run import TEACHER_ENTRY
from laconic.cli.files import print_json, write_file
from laconic.console import log_message, progress, status
from laconic.errors import LaconicError, UsageError

if TYPE_CHECKING:
    from laconic.config.recipe import Recipe

MIN_TEACHER_ACCURACY = 0.99  # on unseen problems, before anything is distilled from the chain
NUM_WORKERS = 2
RUN_COMMAND = ("-m", "laconic.cli.demo_run")  # arguments of Python before those of a run
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0  # that a run has to commit a step after SIGTERM
EXIT_UNEXPECTED = 70  # Python itself exits with 1 after an exception that nothing caught


class DemoRunError(LaconicError):
    """A run of the demo that failed; `exit_code` is that of the subprocess."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


@dataclass(frozen=True)
class DemoEntry:
    """A shipped recipe with some keys changed, and its row in the table.

    `--fast` leaves out entries whose `fast_overrides` is None.
    """

    name: str
    title: str
    description: str
    recipe: str
    overrides: tuple[str, ...] = ()
    is_control: bool = False
    fast_overrides: tuple[str, ...] | None = None


PAUSE_OVERRIDES = ("latents.jacobi_iterations=0", 'latents.projection="none"')
PARALLEL = "{M} latents in parallel, {T} Jacobi iterations; targets: "


def control(policy: str, title: str, description: str) -> DemoEntry:
    """Return KaVa with another rule for the tokens it selects."""
    return DemoEntry(policy, title, description, "demo-kava", (f'kv_selection.policy="{policy}"',), True)


ENTRIES = (
    DemoEntry("short", "Short chain", "where the chain's weights start", "demo-short", fast_overrides=()),
    DemoEntry("chain", "Chain of thought", "writes every step, then the answer", "demo-cot", fast_overrides=()),
    DemoEntry(
        "teacher", "Teacher", "omits the last step; where latent methods start", "demo-teacher", fast_overrides=()
    ),
    DemoEntry(
        "kava",
        "KaVa",
        f"{PARALLEL}keys and values of the chain's results",
        "demo-kava",
        fast_overrides=("train.steps=250",),
    ),
    DemoEntry("nochain", "No chain", "answers directly", "demo-nocot", fast_overrides=("train.steps=400",)),
    DemoEntry("pccot", "PCCoT", f"{PARALLEL}hidden states", "demo-pccot"),
    DemoEntry("codi", "CODI", "{M} sequential latents; targets: hidden states", "demo-codi"),
    DemoEntry("pause", "Pause tokens", "{M} placeholder tokens, no iterations", "demo-pccot", PAUSE_OVERRIDES),
    control("rkv", "R-KV selection", "KaVa with the tokens that R-KV selects, as in the paper"),
    control("random", "random selection", "KaVa with randomly selected tokens"),
    control("uniform", "uniform selection", "KaVa with evenly spaced tokens"),
    control("crop", "first tokens", "KaVa with the first tokens"),
    DemoEntry(
        "nodistil", "no distillation", "PCCoT without targets", "demo-pccot", ("distillation.hidden_weight=0.0",), True
    ),
)
TABLE_ORDER = ("chain", "nochain", "pause", "codi", "pccot", "kava")  # controls follow in the order of ENTRIES
FAST_OVERRIDES = ("data.digits.test_rows=1000", "validation.max_rows=200")


@dataclass(frozen=True)
class DemoCommand:
    """Train small models on arithmetic with a chain of thought, without one, and with latent thoughts; compare them.

    Runs offline, two processes at a time. Re-run the same command to resume.

    Example: laconic demo --fast
    """

    fast: bool = False
    """finish in about two minutes: fewer methods, no control runs"""
    num_seeds: int = 1
    """number of runs of each method; three or more give a mean with its standard deviation"""
    out: OptionalPath = None
    """directory to write the runs and report.html to (default: runs/demo, or runs/demo-fast)"""
    format: OutputFormat = "human"

    def run(self) -> int:
        """Return 0 when every run is trained and evaluated, 1 if no chain was learned well enough to distil from."""
        check_minimum(1, num_seeds=self.num_seeds)
        entries = [fast_entry(entry) for entry in ENTRIES if entry.fast_overrides is not None] if self.fast else ENTRIES
        out = self.out or Path("runs") / ("demo-fast" if self.fast else "demo")
        return run_demo(entries, out, range(self.num_seeds), FAST_OVERRIDES if self.fast else (), self.format)


def fast_entry(entry: DemoEntry) -> DemoEntry:
    return replace(entry, overrides=(*entry.overrides, *(entry.fast_overrides or ())))


@dataclass(frozen=True)
class DemoRun:
    """One entry with one seed: the command that trains and evaluates it, and the run its weights start from."""

    entry: DemoEntry
    seed: int
    path: Path
    base: str | None
    recipe: "Recipe"
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name by which others find the run that they start from."""
        return f"{self.entry.name} of seed {self.seed}"

    @property
    def log(self) -> Path:
        """File with the output of the subprocess."""
        return self.path.parents[1] / "logs" / f"{self.entry.name}-seed-{self.seed}.log"


def plan_run(entry: DemoEntry, seed: int, out: Path, overrides: Sequence[str], entries: Sequence[DemoEntry]) -> DemoRun:
    """Return a run; raise `UsageError` (2) if its directory holds a run of another recipe.

    It starts from the run of the entry whose recipe `model.init_from_run` names.
    """
    from laconic.config.load import load_recipe
    from laconic.config.recipe_keys import explicit_values

    path, source = out / entry.name / f"seed-{seed}", load_recipe(entry.recipe)[0].model.init_from_run
    base = source and next(e.name for e in entries if e.recipe == Path(str(source)).name)
    start = [f"model.init_from_run={out / base / f'seed-{seed}'}"] if base else []
    changes = (*entry.overrides, *overrides, f"seed={seed}", *start)
    recipe, file = load_recipe(entry.recipe, changes)[0], path / "recipe.toml"
    if file.exists() and explicit_values(load_recipe(file)[0]) != explicit_values(recipe):
        raise UsageError(f"{path} was started with another recipe; choose another --out, or remove it")
    base = base and f"{base} of seed {seed}"
    return DemoRun(entry, seed, path, base, recipe, (entry.recipe, str(path), *changes))


def is_finished(run: DemoRun) -> bool:
    from laconic.cli.demo_run import planned_conditions
    from laconic.config.load import load_recipe
    from laconic.evaluation.reasoning.run import load_result

    if not (run.path / "recipe.toml").exists():
        return False
    if any(load_result(run.path, "test", condition) is None for condition in planned_conditions(run.recipe)):
        return False
    return load_recipe(run.path / "recipe.toml")[0].train.steps == run.recipe.train.steps


def check_teacher(run: DemoRun) -> str | None:
    """Return why nothing can be distilled from a chain, or None if it is accurate enough (or no teacher)."""
    if run.entry.name != TEACHER_ENTRY:
        return None
    from laconic.evaluation.reasoning.run import load_result

    answers = load_result(run.path, "test") or ()
    accuracy = sum(item.shared["is_correct"] for item in answers) / max(1, len(answers))
    if accuracy >= MIN_TEACHER_ACCURACY:
        return None
    return (
        f"the teacher of seed {run.seed} solves {100 * accuracy:.1f} % of unseen problems; distillation needs "
        f"{100 * MIN_TEACHER_ACCURACY:.0f} %; this seed is left out"
    )


class DemoScheduler:
    """Runs subprocesses, `NUM_WORKERS` at a time, each after the run it starts from."""

    def __init__(self, runs: Sequence[DemoRun]) -> None:
        self.waiting = list(runs)
        self.finished: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.processes: dict[subprocess.Popen[bytes], DemoRun] = {}

    def run_all(self, report_progress: Callable[[str, int, int], None]) -> None:
        """Run to the end; on an error or an interrupt stop all subprocesses. Raises `DemoRunError`."""
        total = len(self.waiting)
        try:
            while self.waiting or self.processes:
                for run in self.take_ready():
                    self.start(run)
                names = " and ".join(run.name for run in self.processes.values())
                report_progress(names, total - len(self.processes) - len(self.waiting), total)
                time.sleep(POLL_SECONDS)
                for process in [process for process in self.processes if process.poll() is not None]:
                    self.finish(self.processes.pop(process), process.returncode)
        finally:
            self.stop()

    def take_ready(self) -> Iterator[DemoRun]:
        """Remove and yield waiting runs whose base is finished, while there are workers; skip those without a base."""
        for run in list(self.waiting):
            if run.base in self.skipped:
                self.skipped[run.name] = self.skipped[run.base]
                self.waiting.remove(run)
            elif (run.base is None or run.base in self.finished) and len(self.processes) < NUM_WORKERS:
                self.waiting.remove(run)
                yield run

    def start(self, run: DemoRun) -> None:
        """Start the subprocess that trains and evaluates a run, unless it is finished."""
        if is_finished(run):
            self.finish(run)
            return
        run.log.parent.mkdir(parents=True, exist_ok=True)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"), "1")
        with run.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *RUN_COMMAND, *run.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C reaches the subprocess once, through `stop`
            )  # fmt: skip
        self.processes[process] = run

    def finish(self, run: DemoRun, code: int = 0) -> None:
        """Mark a run as finished, or as skipped if nothing can start from it; raise `DemoRunError` if it failed."""
        if code:
            exit_code = EXIT_UNEXPECTED if code == 1 else code if code > 0 else 128 - code
            raise DemoRunError(f"{run.name} exited with {code}: {last_line(run.log)}; see {run.log}", exit_code)
        problem = check_teacher(run)
        if problem is None:
            self.finished.add(run.name)
        else:
            self.skipped[run.name] = problem

    def stop(self) -> None:
        """Terminate the subprocesses, which then commit a step; kill those that do not exit in time."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
                process.kill()
                process.wait()


def last_line(log: Path) -> str:
    """Return the last line that a subprocess printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.removeprefix("laconic: ").strip() for line in reversed(lines) if line.strip()), "no output")


def run_demo(
    entries: Sequence[DemoEntry], out: Path, seeds: Sequence[int], overrides: Sequence[str] = (), format: str = "human"
) -> int:
    """Train, evaluate and report every entry with every seed; return 1 if no seed has a chain to distil from, or 0."""
    start = time.monotonic()
    runs = [plan_run(entry, seed, out, overrides, entries) for seed in seeds for entry in entries]
    scheduler = DemoScheduler(runs)
    log_message(f"laconic demo: {len(runs)} runs, {NUM_WORKERS} at a time; logs in {out / 'logs'}")
    with progress("training") as show:
        try:
            scheduler.run_all(show)
        except (KeyboardInterrupt, SystemExit):  # the latter on SIGTERM
            log_message("laconic demo: stopped; re-run the same command to resume")
            raise
    for problem in sorted(set(scheduler.skipped.values())):
        log_message(f"laconic demo: {problem}")
    complete = [seed for seed in seeds if all(run.name in scheduler.finished for run in runs if run.seed == seed)]
    if not complete:
        return 1
    print_report(entries, out, complete, time.monotonic() - start, format)
    return 0


def print_report(entries: Sequence[DemoEntry], out: Path, seeds: Sequence[int], seconds: float, format: str) -> None:
    """Measure the time per answer, write report.html, and print the table and its footnotes (or JSON)."""
    from laconic.cli.demo_report import build_demo_report
    from laconic.evaluation.report import runs_table
    from laconic.evaluation.tables import print_table

    rank = {name: index for index, name in enumerate(TABLE_ORDER)}
    table_entries = [entry for entry in entries if entry.is_control or entry.name in rank]
    table_entries.sort(key=lambda entry: rank.get(entry.name, len(rank)))
    with status("measuring the time per answer, and writing the report"):
        report = build_demo_report(table_entries, out, seeds, seconds, command_line())
        write_file(out / "report.html", runs_table.render_report(report))
    if format == "json":
        print_json(runs_table.report_to_json(report))
        return
    print_table(runs_table.build_terminal_table(report))
    print(runs_table.format_footnotes(report))
