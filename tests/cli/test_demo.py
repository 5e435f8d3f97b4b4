"""The demo on a tiny scale: order of the runs, failures, interrupts, and what it prints, writes and resumes."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from filelock import FileLock

from laconic.cli import demo_report, demo_run
from laconic.cli.commands import demo
from laconic.cli.commands.demo import DemoEntry, DemoRun, DemoRunError, train_all
from laconic.errors import UsageError
from tests.conftest import REPO, needs
from tests.evaluation.pages import check_page, leave_out_images

pytestmark = pytest.mark.medium

TINY = (
    "data.digits.num_operations=2",
    "data.digits.test_rows=20",
    "data.digits.valid_rows=20",
    "data.digits.train_rows=200",
    "validation.max_rows=20",
    "train.batch_size=16",
    "train.steps=4",
    "train.warmup_steps=2",
    "train.validate_every=2",
    "train.save_every=2",
)
ITERATIONS = 3  # of demo-kava
ENTRIES = [entry for entry in demo.ENTRIES if entry.name in ("short", "chain", "teacher", "kava", "nodistil")]


class Output(NamedTuple):
    """The run directories of a demo, and what it printed."""

    folder: Path
    out: str
    err: str


def program_run(folder: Path, name: str, code: str = "", base: str | None = None) -> DemoRun:
    """A run whose subprocess executes `code` instead of training."""
    entry = DemoEntry(name, name, "", "recipe")
    base_name = None if base is None else f"{base} of seed 0"
    return DemoRun(entry, 0, folder / name / "seed-0", base_name, cast(Any, None), (code,))


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Run programs in place of trainings, in the tests of `train_all`."""
    if request.function.__name__.startswith("test_train_all"):
        monkeypatch.setattr(demo, "is_finished", lambda run: False)
        monkeypatch.setattr(demo, "check_teacher", lambda run: "inaccurate" if run.entry.name == "bad" else None)
        monkeypatch.setattr(demo, "RUN_COMMAND", ("-S", "-c"))


def ignore_progress(*_: object) -> None:
    pass


def test_train_all_starts_runs_after_their_base(tmp_path: Path) -> None:
    order = f"open({str(tmp_path / 'order')!r}, 'a').write"
    runs = [
        program_run(tmp_path, "last", f"{order}('last ')", base="first"),
        program_run(tmp_path, "first", f"{order}('first ')"),
        program_run(tmp_path, "other"),
    ]
    assert train_all(runs, ignore_progress) == dict.fromkeys(run.name for run in runs)
    assert (tmp_path / "order").read_text() == "first last "


def test_train_all_runs_two_at_a_time(tmp_path: Path) -> None:
    """Each program waits for the other, so that one after the other would never end."""
    wait = "import pathlib, time\npathlib.Path({mine!r}).touch()\n"
    wait += "while not pathlib.Path({theirs!r}).exists(): time.sleep(.01)"
    a, b = str(tmp_path / "a.started"), str(tmp_path / "b.started")
    programs = (("a", wait.format(mine=a, theirs=b)), ("b", wait.format(mine=b, theirs=a)))
    train_all([program_run(tmp_path, name, code) for name, code in programs], ignore_progress)


def test_train_all_leaves_out_runs_of_a_bad_teacher(tmp_path: Path) -> None:
    runs = [
        program_run(tmp_path, "bad"),
        program_run(tmp_path, "student", "raise SystemExit(3)", base="bad"),
        program_run(tmp_path, "other"),
    ]
    problems = train_all(runs, ignore_progress)
    assert problems == dict.fromkeys(("bad of seed 0", "student of seed 0"), "inaccurate") | {"other of seed 0": None}


@pytest.mark.parametrize(
    ("code", "exit_code", "message"),
    [
        ("import sys; print('laconic: no rows', file=sys.stderr); sys.exit(66)", 66, "exited with 66: no rows"),
        ("raise SystemExit(1)", 70, "no output"),
        ("import os; os.kill(os.getpid(), 9)", 137, "no output"),
    ],
)
def test_train_all_failure_stops_the_others(tmp_path: Path, code: str, exit_code: int, message: str) -> None:
    slow = program_run(tmp_path, "slow", "import time; time.sleep(60)")
    with pytest.raises(DemoRunError, match=message) as error:
        train_all([slow, program_run(tmp_path, "failing", code)], ignore_progress)
    assert error.value.exit_code == exit_code


def test_train_all_interrupt_terminates_then_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STOP_SECONDS", 1.0)
    ready = f"open({str(tmp_path)!r} + '/' + name, 'w').close(); time.sleep(60)"
    polite = (
        "import signal, sys, time; name = 'polite'\n"
        f"on_term = lambda *_: (open({str(tmp_path / 'terminated')!r}, 'a').write('once '), sys.exit(75))\n"
        f"signal.signal(signal.SIGTERM, on_term)\n{ready}"
    )
    deaf = f"import signal, time; name = 'deaf'\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{ready}"
    processes: list[subprocess.Popen[bytes]] = []
    stop_processes = demo.stop_processes
    monkeypatch.setattr(demo, "stop_processes", lambda running: (processes.extend(running), stop_processes(running)))

    def interrupt(*_: object) -> None:
        if (tmp_path / "polite").exists() and (tmp_path / "deaf").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_all([program_run(tmp_path, "p", polite), program_run(tmp_path, "d", deaf)], interrupt)
    assert (tmp_path / "terminated").read_text() == "once "
    assert {process.returncode for process in processes} == {75, -signal.SIGKILL}


def test_stop_processes_kills_at_a_second_sigterm() -> None:
    calls, errors = list[str](), [SystemExit(143), None]

    class Process:
        def terminate(self) -> None:
            calls.append("terminate")

        def kill(self) -> None:
            calls.append("kill")

        def wait(self, timeout: float | None = None) -> None:
            if error := errors.pop(0):
                raise error

    demo.stop_processes(cast(Any, [Process()]))
    assert calls == ["terminate", "kill"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """A tiny demo; one worker of the test run makes it for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo"
    output = folder.with_suffix(".json")
    with FileLock(folder.with_suffix(".lock")):
        if not output.exists():
            output.write_text(json.dumps(run_tiny_demo(folder)), encoding="utf-8")
    return Output(folder, *json.loads(output.read_text(encoding="utf-8")))


class EndedProcess:
    """A run that ended in this process."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int:
        return self.returncode


def start_process(command: list[str], **options: Any) -> Any:
    """Start the first run as the demo does, and run the others here, where everything is imported."""
    if "demo-short" in command:
        return subprocess.Popen(command, **options)
    return EndedProcess(demo_run.main(command[1 + len(demo.RUN_COMMAND) :]))


def run_tiny_demo(folder: Path) -> tuple[str, str]:
    """Run the demo; return standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": start_process})
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        leave_out_images(patch, only_dark=True)
        patch.setattr(demo, "subprocess", stand_in)
        patch.setattr(demo, "MIN_TEACHER_ACCURACY", 0.0)
        patch.setattr(demo_report, "NUM_TIMED_QUESTIONS", 2)
        assert demo.run_demo(ENTRIES, folder, range(1), TINY) == 0
    return out.getvalue(), err.getvalue()


def test_demo_prints_a_table(finished: Output) -> None:
    for text in ("Chain of thought", "KaVa", "no distillation", "20 unseen problems, 1 seed", "Not shown"):
        assert text in finished.out, text
    assert "5 runs, 2 at a time" in finished.err
    assert "report.html" in finished.err


def test_demo_page_is_self_contained(finished: Output) -> None:
    page = check_page((finished.folder / "report.html").read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    for title in ("time of the last command", "(control)"):
        assert title.lower() in text.lower(), title


@pytest.mark.slow
def test_demo_resume_trains_nothing(
    finished: Output, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished.folder
    monkeypatch.setattr(demo, "MIN_TEACHER_ACCURACY", 0.0)
    monkeypatch.setattr(demo_report, "NUM_TIMED_QUESTIONS", 2)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    assert demo.run_demo(ENTRIES, folder, [0], TINY, "json") == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["rows"]] == ["chain", "kava", "nodistil"]
    kava = report["rows"][1]
    assert (kava["passes"]["latent_setup"], kava["passes"]["latent"]) == (1, ITERATIONS)
    assert list(kava["iteration_sweep"]) == [str(n) for n in range(ITERATIONS + 3)]


def test_demo_refuses_runs_of_another_recipe(finished: Output) -> None:
    with pytest.raises(UsageError, match="started with another recipe"):
        demo.run_demo(ENTRIES, finished.folder, [0], [*TINY, "train.batch_size=32"])


def test_demo_leaves_out_seeds_with_a_bad_teacher(
    finished: Output, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MIN_TEACHER_ACCURACY", 1.1)
    assert demo.run_demo(ENTRIES, finished.folder, [0], TINY) == 1
    assert "the teacher of seed 0 solves" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_stopped_resumes(tmp_path: Path) -> None:
    needs("matplotlib")
    code = (
        "from pathlib import Path; from laconic.cli import demo_report; from laconic.cli.commands import demo\n"
        "demo.MIN_TEACHER_ACCURACY = 0.0; demo_report.NUM_TIMED_QUESTIONS = 2\n"
        f"entries = [e for e in demo.ENTRIES if e.name in {[e.name for e in ENTRIES]!r}]\n"
        f"raise SystemExit(demo.run_demo(entries, Path({str(tmp_path)!r}), range(1), {TINY!r}))"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO)
    metrics = tmp_path / "chain" / "seed-0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert b"stopped; re-run the same command to resume" in err
    assert subprocess.run(command, capture_output=True, cwd=REPO, check=False).returncode == 0


@pytest.mark.parametrize("titles", [["KaVa"], ["KaVa", "R-KV selection"]])
def test_demo_caveats_name_only_rows_of_the_table(titles: list[str]) -> None:
    run: Any = SimpleNamespace(
        parts=SimpleNamespace(decoder=SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2)))
    )
    text = " ".join(demo_report.describe_caveats(run, titles))
    assert ("row R-KV selection" in text) == ("R-KV selection" in titles)


def test_demo_entries() -> None:
    with pytest.raises(UsageError, match="--num-seeds 0"):
        demo.DemoCommand(num_seeds=0).run()
    names = [entry.name for entry in demo.ENTRIES]
    assert {e.name for e in demo.ENTRIES if e.fast_overrides is not None} >= {
        demo_run.TEACHER_ENTRY,
        demo_run.FOCUS_ENTRY,
    }
    assert len(names) == len(set(names))


@pytest.mark.parametrize("is_fast", [False, True])
def test_demo_entries_have_valid_recipes_and_overrides(is_fast: bool, tmp_path: Path) -> None:
    entries = demo.FAST_ENTRIES if is_fast else list(demo.ENTRIES)
    for entry in entries:
        run = demo.plan_run(entry, 0, tmp_path, demo.FAST_OVERRIDES if is_fast else (), entries)
        assert run.recipe.method in ("cot", "nocot", "kava", "pccot", "codi")
