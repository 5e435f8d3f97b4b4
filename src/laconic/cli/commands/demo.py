"""`laconic demo`: train small models with a chain of thought, without one, and with latent thoughts; compare them.

The runs are subprocesses, two at a time. A run starts when the run whose weights it starts from is finished.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.arguments import OptionalPath, OutputFormat, check_minimum, command_line
from laconic.cli.commands.evaluate import print_report
from laconic.cli.demo_progress import DemoProgress
from laconic.cli.demo_run import TEACHER_ENTRY
from laconic.cli.files import write_file
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
    """A run of the demo that failed, with the last line of its log; `exit_code` is that of the subprocess."""

    def __init__(self, run: "DemoRun", code: int) -> None:
        lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n") if run.log.exists() else []
        last = next((line.removeprefix("laconic: ").strip() for line in reversed(lines) if line.strip()), "no output")
        super().__init__(f"{run.name} exited with {code}: {last}; see {run.log}")
        self.exit_code = EXIT_UNEXPECTED if code == 1 else code if code > 0 else 128 - code


@dataclass(frozen=True)
class DemoEntry:
    """A shipped recipe with some keys changed, and its row in the table; an entry without a title has none.

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


# In the order of the table. Latent methods start from the teacher, which omits the last step; the teacher from the
# chain, the chain from the short one.
ENTRIES = (
    DemoEntry("short", "", "", "demo-short", fast_overrides=()),
    DemoEntry("chain", "Chain of thought", "writes every step, then the answer", "demo-cot", fast_overrides=()),
    DemoEntry("teacher", "", "", "demo-teacher", fast_overrides=()),
    DemoEntry("nochain", "No chain", "answers directly", "demo-nocot", fast_overrides=("train.steps=400",)),
    DemoEntry("pause", "Pause tokens", "{M} placeholder tokens, no iterations", "demo-pccot", PAUSE_OVERRIDES),
    DemoEntry("codi", "CODI", "{M} sequential latents; targets: hidden states", "demo-codi"),
    DemoEntry("pccot", "PCCoT", f"{PARALLEL}hidden states", "demo-pccot"),
    DemoEntry(
        "kava",
        "KaVa",
        f"{PARALLEL}keys and values of the chain's results",
        "demo-kava",
        fast_overrides=("train.steps=250",),
    ),
    control("rkv", "R-KV selection", "KaVa with the tokens that R-KV selects, as in the paper"),
    control("random", "random selection", "KaVa with randomly selected tokens"),
    control("uniform", "uniform selection", "KaVa with evenly spaced tokens"),
    control("crop", "first tokens", "KaVa with the first tokens"),
    DemoEntry(
        "nodistil", "no distillation", "PCCoT without targets", "demo-pccot", ("distillation.hidden_weight=0.0",), True
    ),
)
FAST_ENTRIES = [
    replace(entry, overrides=(*entry.overrides, *entry.fast_overrides))
    for entry in ENTRIES
    if entry.fast_overrides is not None
]
FAST_OVERRIDES = ("data.digits.test_rows=1000", "validation.max_rows=200")


@dataclass(frozen=True)
class DemoCommand:
    """Train small models on arithmetic with a chain of thought, without one, and with latent thoughts; compare them.

    Runs offline, two processes at a time. Re-run the same command to resume. The time left follows the pace so far.

    Example: laconic demo --fast
    """

    fast: bool = False
    """finish in about two minutes on two idle cores: fewer methods, no control runs"""
    num_seeds: int = 1
    """number of runs of each method; three or more give a mean with its standard deviation"""
    out: OptionalPath = None
    """directory to write the runs and report.html to (default: runs/demo, or runs/demo-fast)"""
    format: OutputFormat = "human"

    def run(self) -> int:
        """Return 0 when every run is trained and evaluated, 1 if no chain was learned well enough to distil from."""
        check_minimum(1, num_seeds=self.num_seeds)
        out = self.out or Path("runs") / ("demo-fast" if self.fast else "demo")
        entries = FAST_ENTRIES if self.fast else ENTRIES
        return run_demo(entries, out, range(self.num_seeds), FAST_OVERRIDES if self.fast else (), self.format)


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
        return f"{self.entry.name} of seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.path.parents[1] / "logs" / f"{self.entry.name}-seed-{self.seed}.log"


def plan_run(entry: DemoEntry, seed: int, out: Path, overrides: Sequence[str], entries: Sequence[DemoEntry]) -> DemoRun:
    """Return a run, which starts from that of the entry whose recipe `model.init_from_run` names."""
    from laconic.config.load import load_recipe
    from laconic.config.recipe_keys import explicit_values

    path = out / entry.name / f"seed-{seed}"
    source = load_recipe(entry.recipe)[0].model.init_from_run
    base = source and next(e.name for e in entries if e.recipe == Path(str(source)).name)
    start = [f"model.init_from_run={out / base / f'seed-{seed}'}"] if base else []
    changes = (*entry.overrides, *overrides, f"seed={seed}", *start)
    recipe = load_recipe(entry.recipe, changes)[0]
    file = path / "recipe.toml"
    if file.exists() and explicit_values(load_recipe(file)[0]) != explicit_values(recipe):
        raise UsageError(f"{path} was started with another recipe; choose another --out, or remove it")
    base = base and f"{base} of seed {seed}"
    return DemoRun(entry, seed, path, base, recipe, (entry.recipe, str(path), *changes))


def is_finished(run: DemoRun) -> bool:
    """Return whether a run is evaluated, which it is after training."""
    from laconic.cli.demo_run import planned_conditions
    from laconic.evaluation.reasoning.run import load_result

    results = (load_result(run.path, "test", condition) for condition in planned_conditions(run.recipe))
    return (run.path / "recipe.toml").exists() and None not in results


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


def train_all(
    runs: Sequence[DemoRun], show: Callable[[Sequence[DemoRun], Collection[str | None]], None]
) -> dict[str, str | None]:
    """Train and evaluate runs in subprocesses, `NUM_WORKERS` at a time, each after the run that it starts from.

    Returns why each run was left out, by name; None for one that is finished. `show` gets the runs that are running,
    and the names of finished ones. On an error, such as `DemoRunError`, or an interrupt all subprocesses are stopped.
    """
    waiting = list(runs)
    processes: dict[subprocess.Popen[bytes], DemoRun] = {}
    problems: dict[str | None, str | None] = {None: None}  # None: no run to start from
    try:
        while waiting or processes:
            for run in [run for run in waiting if run.base in problems]:
                if problem := problems[run.base]:
                    problems[run.name] = problem
                elif is_finished(run):
                    problems[run.name] = check_teacher(run)
                elif len(processes) < NUM_WORKERS:
                    processes[start_process(run)] = run
                else:
                    continue
                waiting.remove(run)
            show(list(processes.values()), problems)
            time.sleep(POLL_SECONDS)
            for process in [process for process in processes if process.poll() is not None]:
                run = processes.pop(process)
                if process.returncode:
                    raise DemoRunError(run, process.returncode)
                problems[run.name] = check_teacher(run)
    finally:
        stop_processes(list(processes))
    return {run.name: problems[run.name] for run in runs}


def start_process(run: DemoRun) -> "subprocess.Popen[bytes]":
    run.log.parent.mkdir(parents=True, exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"), "1")
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *RUN_COMMAND, *run.arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **threads},
            start_new_session=True,  # Ctrl-C reaches the subprocess once, through `stop_processes`
        )  # fmt: skip


def stop_processes(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Terminate subprocesses, which then commit a step; kill those that do not exit in time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            process.kill()
            process.wait()


def run_demo(
    entries: Sequence[DemoEntry],
    out: Path,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    format: OutputFormat = "human",
) -> int:
    """Train, evaluate and report every entry with every seed; return 1 if no seed has a chain to distil from, or 0."""
    start = time.monotonic()
    runs = [plan_run(entry, seed, out, overrides, entries) for seed in seeds for entry in entries]
    log_message(f"laconic demo: {len(runs)} runs, {NUM_WORKERS} at a time; logs in {out / 'logs'}")
    with progress("training") as show:
        try:
            problems = train_all(runs, DemoProgress(runs, show, NUM_WORKERS).update)
        except (KeyboardInterrupt, SystemExit):  # the latter on SIGTERM
            log_message("laconic demo: stopped; re-run the same command to resume")
            raise
    for problem in sorted(set(filter(None, problems.values()))):
        log_message(f"laconic demo: {problem}")
    complete = [seed for seed in seeds if not any(problems[run.name] for run in runs if run.seed == seed)]
    if not complete:
        return 1
    from laconic.cli.demo_report import build_demo_report
    from laconic.evaluation.report import runs_table
    from laconic.evaluation.suite import EvalReport

    titled = [entry for entry in entries if entry.title]
    with status("measuring the time per answer, and writing the report"):
        report = build_demo_report(titled, out, complete, time.monotonic() - start, command_line())
        write_file(out / "report.html", runs_table.render_report(report))
    blocks = [runs_table.build_terminal_table(report), runs_table.format_footnotes(report)]
    print_report(EvalReport(blocks, runs_table.report_to_json(report)), format)
    return 0
