"""Every benchmark runs once at a tiny size, so that its code cannot rot; its figures mean nothing here."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import core, measure
from benchmarks.measure import TINY, Seconds
from tests.conftest import REPO, needs


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# over five seconds each, even at a tiny size
LONG = (
    "answering",
    "want",
    "mask",
    "cache",
    "loading",
    "parity",
    "training",
    "start",
    "decoding",
    "prefill",
    "reading",
    "memories",
    "streams",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in core.SECTIONS]
)
def test_a_section_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs("transformers")
    core.main(["--only", name], TINY)
    page = capsys.readouterr().out
    assert page.startswith(f"<!-- {name} -->\n## ")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 2, "a head, a rule and one row at least"
    assert len({row.count(" | ") for row in rows}) == 1, "every row has the cells of the head"
    assert f"`python benchmarks/core.py --only {name}`" in page


@pytest.mark.slow
def test_a_decoding_row_checks_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    needs("transformers")
    core.main(["--only", "decoding"], TINY)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| random Llama")]
    assert len(rows) == 2
    assert all(row.endswith("| yes |") for row in rows)


@pytest.mark.slow
def test_the_gpu_table_runs_on_a_cpu() -> None:
    """In a process of its own: under the shape checks of the test run the step cannot be compiled."""
    needs("transformers")
    flags = "--device cpu --size tiny --batch 1 2 --prompt 3 --new 4 --rounds 1 --backend eager --copy 1"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *flags.split()], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("laconic, step compiled") == 2
    assert done.stdout.count("transformers, dynamic cache, eager") == 2


def test_a_missed_target_says_so() -> None:
    assert measure.verdict(1.6, least=1.5) == "≥ 1.5: met"
    assert measure.verdict(1.3, least=1.25, goal=1.5) == "≥ 1.25: met; goal 1.5: missed"
    assert measure.verdict(1.2, most=1.15) == "≤ 1.15: missed"


def test_the_peak_is_what_is_held_at_once() -> None:
    def work() -> None:
        a = torch.empty(1000, 1000)
        del a
        b, c = torch.empty(500, 1000), torch.empty(1000, 1000)
        del b, c

    assert measure.peak_allocated(work) == 6_000_000


def test_rounds_are_interleaved_and_turn() -> None:
    seen: list[str] = []
    found = measure.race({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, warm=0)
    assert seen == ["a", "b", "b", "a"]
    assert [len(times) for times in found.values()] == [2, 2]


def test_one_thread_is_timed_by_the_processor_more_by_the_wall() -> None:
    found = [Seconds(3.0, 2.0), Seconds(4.0, 1.0)]
    torch.set_num_threads(1)
    assert measure.clock(found) == 1.0
    torch.set_num_threads(2)
    assert measure.clock(found) == 3.0


def test_a_page_keeps_the_tables_that_were_not_measured_anew() -> None:
    old = core.written("", {name: f"<!-- {name} -->\nold {name}\n<!-- end -->\n" for name in core.SECTIONS})
    new = core.written(old, {"mask": "<!-- mask -->\nnew\n<!-- end -->\n"})
    assert new == old.replace("old mask", "new")
    assert list(core.SECTIONS) == [
        line[5:-4] for line in new.splitlines() if line.startswith("<!--") and "end" not in line
    ]
