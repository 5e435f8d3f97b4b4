"""One table of all promises: what the other tables of the page count for each, and the tests beside them."""

import re
import subprocess
import sys
from typing import NamedTuple

from benchmarks.measure import REPO, Table

TOTAL = "**laconic, all**"
HEADER = ("id", "what is tried", "attempted", "survived", "peers survived", "tests (cases)")
ROW = re.compile(r"^\| (.*) \|$", re.MULTILINE)
PROMISES = "promises"
TESTS = "not slow and not real and not vllm"  # those that CI runs
TITLE, TEXT = (
    "All promises",
    "Each line sums up a table below, or says which tests cover it; a test with hundreds of trials counts as one case. "
    "Adapters and GGUF files have no checksums, so they are counted as peers, also where laconic reads them. The ids "
    "are those of the rows in the tables below.",
)


class Line(NamedTuple):
    """A promise: its id, what is tried, the section that counts it ("" if none does), and its tests.

    Tests are files below tests/, or the beginning of the name of tests in a file.
    """

    id: str
    words: str
    section: str
    tests: tuple[str, ...]


LINES = (
    Line("R1, R4", "SIGKILL; the repeated command ends with the same bytes", "kills",
         ("trust/test_kill.py", "trust/test_resume.py", "serving/test_http_kill.py")),
    Line("R2", "full disks, failing calls", "disks", ("trust/test_disk.py", "trust/test_steps_disk.py")),
    Line("R3", "signals", "signals", ("trust/test_stop.py",)),
    Line("R4b", "ranks, micro-batches", "", ("training/test_distributed.py", "training/test_ranks_sharded.py")),
    Line("R5", "damaged files", "damage",
         ("trust/test_damage.py", "trust/test_export_damage.py", "trust/test_steps.py", "models/test_gguf_damage.py",
          "compression/test_memory_file_damage.py")),
    Line("R6", "NaN and infinity", PROMISES, ("trust/test_nonfinite.py",)),
    Line("R7", "little memory", PROMISES, ("trust/test_memory.py",)),
    Line("R8", "malformed rows", PROMISES, ("data/test_strict_jsonl.py",)),
    Line("R9", "too few or too long rows", PROMISES, ("data/test_reasoning_dataset.py::test_reasoning_dataset",)),
    Line("R10", "another tokenizer or chat template", PROMISES,
         ("cli/test_train.py::test_train_refuses_another_tokenizer", "cli/test_compress_kv.py::test_generate_refuses",
          "compression/test_kv_memory.py::test_kv_memory_load")),
    Line("R11", "other weights", PROMISES,
         ("models/test_weights.py", "models/test_contradictory_checkpoints.py")),
    Line("R12", "unknown and mistyped keys", PROMISES, ("config/test_load.py",)),
    Line("R13", "two writers", "writers", ("trust/test_steps.py::test_lock", "storage/test_run_dir.py::test_lock")),
    Line("R14", "Unicode in texts and names", PROMISES,
         ("cli/test_main.py::test_arguments_and_file_names_are_utf8",
          "data/test_tokenizer_limits.py::test_load_tokenizer_in_a_folder")),
    Line("R15", "umask and other environments", "surroundings",
         ("trust/test_steps.py::test_run_directory", "cli/test_main.py::test_closed")),
    Line("S1", "pickles", PROMISES, ("house/test_layers.py::test_no_pickle", "house/test_layers.py::test_find_unsafe")),
    Line("S2", "hostile weights and configurations", PROMISES, ("trust/test_hostile.py",)),
    Line("S3", "names that lead out of a folder", PROMISES, ("trust/test_names.py",)),
    Line("S4", "network", PROMISES, ("serving/test_http_guard.py",)),
    Line("S5", "fuzzed files and requests", PROMISES, ("trust/test_fuzz.py", "serving/test_http_hostile.py")),
    Line("S6", "hostile chat templates", PROMISES, ("data/test_tokenizer.py::test_render_chat_template",)),
    Line("S7", "release: `make release-check`", "", ("house/test_requirements.py",)),
    Line("S8", "deleted memories, logs", PROMISES, ("serving/test_http_memories.py::test_deleted",)),
)  # fmt: skip


def read_rows(page: str, section: str) -> list[dict[str, str]]:
    """Return the rows of a section's table by its header."""
    match = re.search(rf"<!-- {section} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    lines = [row.split(" | ") for row in ROW.findall(match[1])] if match else []
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def count_cases(tests: set[str]) -> dict[str, int]:
    """Return how many cases pytest collects whose names begin like each of these."""
    files = sorted({f"tests/{test.partition('::')[0]}" for test in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", TESTS, *files]
    lines = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()
    return {test: sum(line.startswith(f"tests/{test}") and "::" in line for line in lines) for test in tests}


def sum_up(page: str) -> Table:
    """Return the table of all promises, from the other tables of a page."""
    cases = count_cases({test for line in LINES for test in line.tests})
    lines = list[tuple[str, ...]]()
    for line in LINES:
        rows, peers = read_rows(page, line.section), list[str]()
        if line.section == PROMISES:
            rows = [row for row in rows if row["command"].startswith(f"{line.id} ")]
            peers = [row["peer"] for row in rows if row["peer"] != "–"]
        else:
            place = next((n for n, row in enumerate(rows) if row["command"] == TOTAL), 0)
            peers = [f"{row['command']}: {row['survived']} of {row['attempted']}" for row in rows[place + 1 :]]
            rows = rows[place:]
        counts = (rows[0]["attempted"], rows[0]["survived"]) if rows else ("–", "–")
        tests = ", ".join(f"{test} ({cases[test]:,})" for test in line.tests)
        lines.append((line.id, line.words, *counts, "; ".join(peers) or "–", tests))
    return Table(TITLE, TEXT, HEADER, lines)
