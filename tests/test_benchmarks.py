"""Every benchmark runs at a tiny size, which tests its code but not its figures."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import core, demo_figure, gpu_session, learning, measure, real
from benchmarks.measure import TINY, Elapsed
from tests.conftest import REPO, needs


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# more than three seconds each, even at a tiny size
SLOW = (
    "delta_rule",
    "optimizers",
    "titans",
    "answering",
    "activations",
    "mask",
    "cache",
    "linear",
    "loading",
    "parity",
    "training",
    "lora",
    "start",
    "decoding",
    "prefill",
    "reading",
    "memories",
    "streams",
    "ranks",
)


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in core.SECTIONS]
)
def test_benchmark_section_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs("transformers")
    core.PAGE.run(["--only", name], TINY)
    page = capsys.readouterr().out
    assert page.startswith(f"<!-- {name} -->\n## ")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 2, "a header, a rule and at least one row"
    assert len({row.count(" | ") for row in rows}) == 1, "every row has as many cells as the header"
    assert f"`python benchmarks/core.py --only {name}`" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", list(real.PAGE.sections))
def test_real_section_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    needs("transformers")
    monkeypatch.setattr(real, "MODEL", REPO / "src/laconic/checkpoints/stories260k")
    real.PAGE.run(["--only", name], TINY)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 2
    assert len({row.count(" | ") for row in rows}) == 1


@pytest.mark.slow
def test_decoding_row_compares_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    needs("transformers")
    core.PAGE.run(["--only", "decoding"], TINY)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| random Llama")]
    assert len(rows) == 2
    assert all(row.endswith("| yes |") for row in rows)


@pytest.mark.slow
def test_gpu_table_runs_on_cpu() -> None:
    """Runs in a child process, because the shape checks of the tests prevent compilation."""
    needs("transformers")
    flags = "--device cpu --size tiny --batch 1 2 --prompt 3 --new 4 --rounds 1 --backend eager --copy 1"
    process = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *flags.split()], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.count("laconic, step compiled") == 2
    assert process.stdout.count("transformers, dynamic cache, eager") == 2


def test_verdict_reports_missed_targets() -> None:
    assert measure.verdict(1.6, least=1.5) == "≥ 1.5: met"
    assert measure.verdict(1.3, least=1.25, goal=1.5) == "≥ 1.25: met; goal 1.5: missed"
    assert measure.verdict(1.2, most=1.15) == "≤ 1.15: missed"


def test_peak_allocated_counts_simultaneous_tensors() -> None:
    def work() -> None:
        a = torch.empty(1000, 1000)
        del a
        b, c = torch.empty(500, 1000), torch.empty(1000, 1000)
        del b, c

    assert measure.peak_allocated(work) == 6_000_000


@pytest.mark.medium
def test_time_interleaved_alternates_order() -> None:
    seen: list[str] = []
    times = measure.time_interleaved({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, warm=0)
    assert seen == ["a", "b", "b", "a"]
    assert [len(times) for times in times.values()] == [2, 2]


def test_clock_uses_cpu_time_with_one_thread_else_wall_time() -> None:
    times = [Elapsed(3.0, 2.0), Elapsed(4.0, 1.0)]
    torch.set_num_threads(1)
    assert measure.clock(times) == 1.0
    torch.set_num_threads(2)
    assert measure.clock(times) == 3.0


def test_merge_page_keeps_tables_that_were_not_measured() -> None:
    old = core.PAGE.merge("", {name: f"<!-- {name} -->\nold {name}\n<!-- end -->\n" for name in core.SECTIONS})
    new = core.PAGE.merge(old, {"mask": "<!-- mask -->\nnew\n<!-- end -->\n"})
    assert new == old.replace("old mask", "new")
    assert list(core.SECTIONS) == [
        line[5:-4] for line in new.splitlines() if line.startswith("<!--") and "end" not in line
    ]


@pytest.mark.slow
def test_learning_prints_a_row_for_every_reading(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("peft")
    monkeypatch.setattr(learning, "MODEL", REPO / "src/laconic/checkpoints/stories260k")
    monkeypatch.setattr(sys, "argv", ["learning.py", "--book", learning.BOOKS[0], "--tokens", "256", "--window", "256"])
    learning.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(learning.DESCRIPTIONS)
    gains = {row.split(" | ")[0]: float(row.split(" | ")[3]) for row in rows[2:]}
    assert gains["| without learning"] == 0
    assert gains["| " + learning.DESCRIPTIONS["levels"]] > 0


def test_demo_figure_shows_the_numbers_of_the_results_page() -> None:
    rows, majority = demo_figure.parse_demo_table((REPO / "docs" / "results.md").read_text(encoding="utf-8"))
    numbers = demo_figure.describe(rows, majority)
    assert numbers.encode() in (REPO / "docs" / "demo.png").read_bytes(), "run python benchmarks/demo_figure.py"


@pytest.mark.medium
def test_demo_figure_draws_a_table_and_names_a_missing_row(tmp_path: Path) -> None:
    page = (REPO / "docs" / "results.md").read_text(encoding="utf-8")
    rows, majority = demo_figure.parse_demo_table(page)
    assert [row.passes for row in rows] == [27, 5, 5, 5, 2, 2]
    assert majority == 19.1
    with pytest.raises(ValueError, match="no row 'Pause tokens'"):
        demo_figure.parse_demo_table(page.replace("\nPause tokens ", "\nOther tokens "))
    needs("matplotlib")
    demo_figure.draw(rows, 20.0, tmp_path / "demo.png")
    assert demo_figure.describe(rows, 20.0).encode() in (tmp_path / "demo.png").read_bytes()


@pytest.mark.medium
def test_gpu_session_runs_jobs_in_order_and_stops_at_the_deadline(tmp_path: Path) -> None:
    say = "print(open('first').read())"
    jobs = [
        gpu_session.Job("first", [sys.executable, "-c", "open('first', 'w').write('done')"]),
        gpu_session.Job("second", [sys.executable, "-c", say], after=("first",)),
        gpu_session.Job("fails", [sys.executable, "-c", "raise SystemExit(3)"]),
        gpu_session.Job("hangs", [sys.executable, "-c", "import time; time.sleep(600)"], after=("second", "fails")),
        gpu_session.Job("never", [sys.executable, "-c", say], after=("hangs",)),
    ]
    (tmp_path / "logs").mkdir()
    deadline = gpu_session.time.monotonic() + 8
    gpu_session.Queue(jobs, tmp_path, tmp_path / "logs", 2, deadline, dict(os.environ)).run()
    assert [job.state for job in jobs] == ["done", "done", "failed", "stopped", "waiting"]
    assert (tmp_path / "logs" / "second.log").read_text().endswith("done\n")


def test_gpu_session_trains_before_it_evaluates() -> None:
    jobs = gpu_session.training_jobs("full", "cuda", "smollm2", seeds=2)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert all(set(job.after) <= set(names[:i]) for i, job in enumerate(jobs))
    assert {job.evaluates for job in jobs if job.evaluates} == {job.name for job in jobs if job.is_training}
