"""The demo on a tiny scale: what it trains, prints and writes, how it stops and goes on; and children side by side."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from laconic.cli import demo, demo_report, jobs
from laconic.cli.jobs import Failed, Job, Jobs
from laconic.errors import UsageError
from tests.conftest import REPO, needs
from tests.evaluation.pages import ParsedPage as Page
from tests.evaluation.pages import find_requests as outside

TINY = (
    "data.digits.num_operations=2", "data.digits.test_rows=60", "data.digits.valid_rows=60", "data.digits.train_rows=2000",
    "validation.max_rows=60", "train.steps=8", "train.warmup_steps=2", "train.validate_every=4", "train.save_every=4",
)  # fmt: skip
ROUNDS = 3  # of demo-kava
ROSTER = [entry for entry in demo.ENTRIES if entry.name in ("short", "chain", "kava", "nodistil")]


def child(tmp_path: Path, name: str, code: str, **more: Any) -> Job:
    return Job(name, [sys.executable, "-S", "-c", code], tmp_path / f"{name}.log", more.pop("cost", 1.0), **more)


def test_jobs_start_when_what_they_need_is_done(tmp_path: Path) -> None:
    mark = f"import pathlib, time; f = pathlib.Path({str(tmp_path / 'order')!r}).open('a'); print"
    with Jobs([
        child(tmp_path, "last", f"{mark}('last', file=f)", after=("a", "b")),
        child(tmp_path, "a", f"time = __import__('time'); time.sleep(.3); {mark}('a', file=f)"),
        child(tmp_path, "b", f"{mark}('b', file=f)"),
    ]) as all:  # fmt: skip
        most: list[int] = []
        all.go(lambda state: most.append(len(state.running)))
    assert (tmp_path / "order").read_text().split() == ["b", "a", "last"]
    assert max(most) == 2
    assert all.done == {"a", "b", "last"}


def test_a_job_that_is_done_is_not_repeated(tmp_path: Path) -> None:
    with Jobs([child(tmp_path, "a", "raise SystemExit(3)", done=lambda: True)]) as all:
        all.go()
    assert not (tmp_path / "a.log").exists()


def test_what_starts_from_a_refused_job_is_refused(tmp_path: Path) -> None:
    with Jobs([
        child(tmp_path, "base", "", check=lambda: "not good enough"),
        child(tmp_path, "next", "raise SystemExit(3)", after=("base",)),
        child(tmp_path, "other", ""),
    ]) as all:  # fmt: skip
        all.go()
    assert all.refused == {"base": "not good enough", "next": "not good enough"}
    assert all.done == {"other"}


def test_a_failing_child_is_one_line_with_its_log_and_ends_the_others(tmp_path: Path) -> None:
    bad = child(tmp_path, "bad", "import sys; print('laconic: no rows', file=sys.stderr); sys.exit(66)")
    slow = child(tmp_path, "slow", "import time; time.sleep(60)")
    with pytest.raises(Failed, match=r"bad ended with 66: no rows; see .*bad\.log") as failed, Jobs([slow, bad]) as all:
        all.go()
    assert failed.value.exit_code == 66
    assert not all.running
    for name, code, handed in (
        ("quiet", "raise SystemExit(1)", 70),
        ("killed", "import os; os.kill(os.getpid(), 9)", 137),
    ):
        with pytest.raises(Failed, match=f"{name} ended with .*: it said nothing") as failed:
            Jobs([child(tmp_path, name, code)]).go()
        assert failed.value.exit_code == handed


def test_ctrl_c_asks_children_once_and_kills_those_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PATIENCE", 1.0)
    said = tmp_path / "said"
    ready = f"open({str(tmp_path)!r} + '/' + name, 'w').close(); time.sleep(60)"
    kind = (
        f"import signal, sys, time; name = 'kind'\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(said)!r}, 'a').write('asked '), sys.exit(75)))\n{ready}"
    )
    deaf = f"import signal, time; name = 'deaf'\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{ready}"

    def interrupt(_: jobs.State) -> None:
        if (tmp_path / "kind").exists() and (tmp_path / "deaf").exists():
            raise KeyboardInterrupt

    started: list[subprocess.Popen[bytes]] = []
    all = Jobs([child(tmp_path, "k", kind), child(tmp_path, "d", deaf)])
    with pytest.raises(KeyboardInterrupt), all:
        all.go(lambda state: (started.extend(c.process for c in all.running.values()), interrupt(state))[1])
    assert said.read_text() == "asked "
    assert {process.returncode for process in started} == {75, -signal.SIGKILL}


def running(all: Jobs, name: str, seconds: float, now: float) -> None:
    all.running[name] = jobs.Child(all.all[name], None, now - seconds)  # pyright: ignore


def test_time_left_follows_cost_pace_and_room(tmp_path: Path) -> None:
    share: Callable[[], float] = lambda: 0.5  # noqa: E731
    made = [child(tmp_path, "base", "", cost=10.0, progress=share)]
    made += [child(tmp_path, f"n{i}", "", cost=20.0, after=("base",)) for i in range(3)]
    assert Jobs(made).left(0.0) == pytest.approx(10 + 40)
    all = Jobs(made)
    running(all, "base", 10.0, 100.0)  # half done in ten seconds: half as fast as its cost says
    pace = 10.0 / (10 * all.running["base"].share)
    assert all.left(100.0) == pytest.approx(pace * (10 * (1 - all.running["base"].share) + 40))
    assert demo.remaining(jobs.State(0, 1, {}, 125.4)) == "2 min 05 s left"
    assert demo.remaining(jobs.State(0, 1, {}, 5.4)) == "5 s left"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Three tiny runs, their table and what was said; one worker of the test run makes them for all."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo"
    texts = out.with_suffix(".json")
    with FileLock(out.with_suffix(".lock")):
        if not texts.exists():
            texts.write_text(json.dumps(made(out)), encoding="utf-8")
    told, said = json.loads(texts.read_text(encoding="utf-8"))
    return out, told, said


def made(out: Path) -> tuple[str, str]:
    """The table and what was said."""
    said, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(said):
        patch.setattr(demo, "MIN_TEACHER_ACCURACY", 0.0)
        patch.setattr(demo, "SILENCE", 0.5)
        patch.setattr(demo_report, "NUM_TIMED_QUESTIONS", 2)
        assert demo.run_demo(ROSTER, out, range(1), TINY) == 0
    return told.getvalue(), said.getvalue()


def script(out: Path, format: str) -> list[str]:
    code = (
        f"from pathlib import Path; from laconic.verbs import demo, gather; demo.LEAST = 0.0; demo.SILENCE = 0.5\n"
        f"gather.TIMED = 2\n"
        f"roster = [e for e in demo.ROSTER if e.name in {[e.name for e in ROSTER]!r}]\n"
        f"raise SystemExit(demo.compare(roster, Path({str(out)!r}), range(1), {TINY!r}, {format!r}))"
    )
    return [sys.executable, "-c", code]


def run(out: Path, format: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(script(out, format), capture_output=True, text=True, cwd=REPO, check=False)


def test_the_table_and_what_is_said(done: tuple[Path, str, str]) -> None:
    _, table, said = done
    for text in ("Chain written out", "KaVa", "no distillation", "majority baseline", "60 unseen problems, n=1",
                 "(n=1, interval", "Not shown", "Seeds: one run of each"):  # fmt: skip
        assert text in table, text
    for text in ("4 runs,", "s on two idle cores", "demo: 0 of 4 done; short, seed 0", "report.html"):
        assert text in said, text


def test_the_page_of_real_runs_asks_for_nothing(done: tuple[Path, str, str]) -> None:
    html = (done[0] / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not outside(html)
    assert not page.problems
    text = " ".join(page.text.split())
    for said in (
        "One question inspected", "placeholders", f"iteration {ROUNDS}", "Jacobi iterations at test time", "wall time",
        "weights", "tokens", "(control)",
    ):  # fmt: skip
        assert said in text, said


@pytest.mark.slow
def test_a_second_time_nothing_is_trained_and_the_figures_are_the_same(
    done: tuple[Path, str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = done[0]
    monkeypatch.setattr(demo, "MIN_TEACHER_ACCURACY", 0.0)
    monkeypatch.setattr(demo_report, "NUM_TIMED_QUESTIONS", 2)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert demo.run_demo(ROSTER, out, [0], TINY, "json") == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == ["chain", "kava", "nodistil"]
    kava = told["rows"][1]
    assert kava["passes"]["latent_setup"] == 1
    assert kava["passes"]["latent"] == ROUNDS
    assert list(kava["iteration_sweep"]) == [str(rounds) for rounds in range(ROUNDS + 3)]
    assert kava["accuracy"]["mean"] in [share for shares in kava["iteration_sweep"].values() for share in shares]
    assert len(kava["cot_accuracy"]) == 1
    assert told["against"][0]["other"] == "chain"


def test_a_folder_of_other_runs_is_refused_before_anything_starts(done: tuple[Path, str, str]) -> None:
    with pytest.raises(UsageError, match="was begun by another recipe; choose another --out, or remove it"):
        demo.run_demo(ROSTER, done[0], [0], [*TINY, "train.batch_size=32"])


def test_nothing_is_distilled_from_a_chain_that_was_not_learned(
    done: tuple[Path, str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MIN_TEACHER_ACCURACY", 1.1)
    assert demo.run_demo(ROSTER, done[0], [0], TINY) == 1
    said = capsys.readouterr().err
    assert "the chain of seed 0 is right on" in said
    assert "110 % are asked before anything is distilled from it" in said


@pytest.mark.slow
def test_stopped_it_leaves_no_child_and_goes_on(tmp_path: Path) -> None:
    needs("matplotlib")
    process = subprocess.Popen(script(tmp_path, "human"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO)
    metrics = tmp_path / "chain" / "seed-0" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert b"stopped; the same command goes on where it was" in said
    held = (
        (tmp_path / "chain" / "seed-0" / "lock.json").read_text() if (metrics.parent / "lock.json").exists() else "{}"
    )
    pid = json.loads(held).get("pid")
    assert pid is None or not Path(f"/proc/{pid}").exists() or os.getpgid(pid) != process.pid
    assert run(tmp_path, "human").returncode == 0


def test_flags() -> None:
    with pytest.raises(UsageError, match="--num-seeds 0: give at least one"):
        demo.DemoCommand(num_seeds=0).run()
    names = [entry.name for entry in demo.ENTRIES]
    assert set(demo.TABLE_ORDER) <= set(names)
    assert {entry.name for entry in demo.ENTRIES if entry.fast_overrides is not None} >= {
        demo.TEACHER_ENTRY,
        demo.FOCUS_ENTRY,
    }
    assert len(names) == len(set(names))
