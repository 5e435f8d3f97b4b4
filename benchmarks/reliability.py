"""Kill commands, damage their files, fill their disks, and count what is lost; write docs/reliability.md.

python benchmarks/reliability.py [--kills N] [--flips N] [--only PROBE[:ROW] …] [--trial N] [--quick]

A full run takes about half an hour of one core. Probes and rows can be run one by one; a probe replaces its own table
in the page. A trial that fails prints the command that repeats it.
"""

import argparse
import resource
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from benchmarks.measure import Table, describe_machine  # noqa: E402
from benchmarks.page import merge_sections  # noqa: E402
from benchmarks.probes import (  # noqa: E402
    artifacts,
    damage,
    disks,
    hostile,
    inputs,
    kills,
    peers,
    promises,
    servers,
    signals,
    summary,
    surroundings,
    writers,
)
from benchmarks.probes.counts import ABSENT, HEADER, Counts, add_up  # noqa: E402
from benchmarks.probes.processes import warm_up  # noqa: E402
from benchmarks.probes.works import build_works, train_inputs, write_inputs  # noqa: E402

SCRIPT = "benchmarks/reliability.py"
PAGE = REPO / "docs/reliability.md"
KILLS, FLIPS = 1_000, 1_000
DISKS, SIGNALS, RACES = 8, 12, 4  # trials per row
SERVER_SHARE = 0.04  # of the kills; each takes two starts of a server
PEER_KILLS = 40


@dataclass(frozen=True)
class Amounts:
    """Numbers of trials: kills and damaged files in all, the rest for each row."""

    kills: int = KILLS
    flips: int = FLIPS
    disks: int = DISKS
    signals: int = SIGNALS
    races: int = RACES
    peer_kills: int = PEER_KILLS
    surroundings: int = len(surroundings.SURROUNDINGS)  # of each command
    checks: int = 1_000  # of each promise, at most


INTRODUCTION = """# Reliability

This page counts what happens to laconic's commands when they are killed, when their files are damaged, when disks are
full, when they are started in unusual environments, and when they get wrong or hostile input. Beside them are the same
counts for transformers' `Trainer`, `torch.save` and others. Every number counts random trials with a fixed seed.

    python benchmarks/reliability.py [--kills N] [--flips N] [--only PROBE[:ROW] …] [--trial N] [--quick]

The commands are real command lines with tiny models: KaVa and a chain of thought (`train kava`, `train cot`), an
AutoCompressor, Hope, and the shipped stories260k. They run in processes that are forked from one in which laconic is
already imported, so that a start takes a tenth of a second; only the table of environments starts new interpreters. A
failing trial prints the command that repeats it, except for the exact time of a kill that was not tied to a write.

The peers for comparison are a `Trainer` on a tiny Llama with `save_steps=1` and `save_total_limit=2`, resumed by
`get_last_checkpoint`, and a process that saves 1 MB to the same file with `torch.save` again and again. They do less
than laconic's commands, and nothing here is configured against them.
"""
QUICK = Amounts(kills=12, flips=14, disks=1, signals=1, races=1, peer_kills=2, surroundings=1, checks=2)
TEXTS = {
    "kills": (
        "SIGKILL",
        "Each command is killed several times and repeated until it ends: in two trials of five just before it changes"
        " a file (opens it for writing, renames, deletes, …), in two at most 4 ms after that, and in one at any time."
        " *Survived*: what was on disk was complete, and the last repetition ended with the same bytes as a command "
        "that was never killed (weights, optimizer, random states, metrics; files; records), without temporary files."
        " *Committed work lost*: a step that already had its final name, or progress that was already saved, was gone"
        " after the kill. The server is killed while three clients put and delete memories; everything that it had "
        "confirmed must still be there. The peers that did not survive ended with an exception when they were run "
        "again: the Trainer's newest checkpoint lacked a file, or the file of torch.save was incomplete.",
    ),
    "damage": (
        "Damaged files",
        "A bit is flipped, the file is cut at a random place, or it is exchanged with that of another model or run. "
        "Then a command reads it. *Found*: the file is refused in one line with a documented exit code (a peer: with "
        "an exception), or skipped with a warning that names it. *Harmless*: not reported, and the result is the "
        "same, log probabilities included. *Silent*: not reported, and the result differs. *Survived*: found or "
        "harmless. Exports have checksums of every file that affects the numbers. Files in them that users edit "
        "(tokenizer_config.json, generation_config.json, the chat template) and files in the formats of other programs "
        "(adapters of peft, GGUF) have no checksums, so damage there that can still be parsed is silent; beside them, "
        "what peft and transformers make of the same.",
    ),
    "disks": (
        "Full disks",
        "Every second trial runs on a tmpfs that is too small, the others with a limit on the size of files. "
        "*Survived*: exit code 74 and one line, or success if the output fits. With enough space, the same command "
        "must then give the same results as if the disk had never been full. A peer may fail with an exception.",
    ),
    "writers": (
        "Two writers",
        "The same command runs twice in the same folder, the second a little later. *Found*: one of them is refused "
        "(73). *Harmless*: both succeed, and the results are those of one. *Silent*: both succeed, and the results "
        "are not those of one. In the remaining races one of the writers failed in another way.",
    ),
    "signals": (
        "Signals",
        "SIGTERM, SIGINT, SIGUSR1 or SIGHUP arrives at any time, in a third of the trials twice. *Survived*: the "
        "command ends with exit code 75, 130 or 128 plus the signal (a peer: with any), and its repetition ends as if"
        " it had never been interrupted.",
    ),
    "surroundings": (
        "Unusual environments",
        "New interpreters are started in these environments: "
        f"{', '.join(case.name for case in surroundings.SURROUNDINGS)}. *Survived*: "
        "the command writes the same bytes as always. A closed output pipe may end it with 141, and a read-only "
        "folder ends it with 74.",
    ),
    "promises": (
        "Wrong and hostile input",
        "Each number counts command lines that are given something wrong, or for S3 also requests to a server. "
        "*Survived*: the documented exit code and one line, no code run, and nothing written outside the folder; for "
        "R6 also that no saved tensor is NaN or infinite and `--replay` repeats the update, for R7 also that the "
        "command ends as always when it is repeated with enough memory. What did not survive died in native code of "
        "torch or safetensors, where an allocation failed. A peer survives if it raises an exception, within the same "
        "limits of time and memory.",
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of a table: a probe, the command or file that it is for, and the number of its trials."""

    probe: Callable[[Any, Path, int, int | None, str], Counts]
    subject: Any
    number: int

    def run(self, place: Path, trial: int | None, command: str) -> Counts:
        """Run all trials, or one, in a folder."""
        place.mkdir(exist_ok=True)
        return self.probe(self.subject, place, self.number, trial, command)


def build_rows(probe: str, base: Path, amounts: Amounts) -> dict[str, Row]:
    """Return the rows of a probe, after writing the files that they need."""
    has_peers = peers.is_installed()
    works = build_works(base)
    all_works = {**works, **(peers.PEERS if has_peers else {})}
    if probe == "surroundings":
        tours = surroundings.build_tours(base)
        return {tour.name: Row(surroundings.tour_surroundings, tour, amounts.surroundings) for tour in tours}
    if probe == "promises":
        rows = [*inputs.build_promises(base), *hostile.build_promises(base)]
        rows = rows if has_peers else [replace(row, peer_checks={}) for row in rows]
        return {row.name.split()[0]: Row(promises.keep_promises, row, amounts.checks) for row in rows}
    if probe == "damage":
        files = artifacts.build_artifacts(base)
        others = {**artifacts.build_foreign(base), **peers.build_peer_artifacts(base)} if has_peers else {}
        number = max(1, round(amounts.flips / len(files)))
        return {name: Row(damage.spoil_repeatedly, file, number) for name, file in (files | others).items()}
    if probe == "kills":
        of_server = max(1, round(amounts.kills * SERVER_SHARE))
        number = max(1, round((amounts.kills - of_server) / len(works)))
        rows = {name: Row(kills.storm, work, number) for name, work in works.items()}
        rows[servers.NAME] = Row(servers.storm_server, servers.MODEL, of_server)
        others = peers.PEERS if has_peers else {}
        return rows | {name: Row(kills.storm, work, amounts.peer_kills) for name, work in others.items()}
    function, number = {
        "disks": (disks.fill_disks, amounts.disks),
        "writers": (writers.race, amounts.races),
        "signals": (signals.interrupt_repeatedly, amounts.signals),
    }[probe]
    return {name: Row(function, work, number) for name, work in all_works.items()}


def run_probe(probe: str, rows: Mapping[str, Row], only: str, trial: int | None, base: Path) -> Table:
    """Run the rows of a probe, or one of them, and return the table."""
    results = list[Counts]()
    for name, row in rows.items():
        if not only or name == only:
            command = f"python {SCRIPT} --only {shlex.quote(f'{probe}:{name}')}"
            results.append(row.run(base / probe, trial, command))
            print(f"{probe}: {' | '.join(results[-1].cells())}", file=sys.stderr, flush=True)
    peer_names = {*peers.PEERS, *peers.ARTIFACT_NAMES, *artifacts.FOREIGN}
    ours = [counts for counts in results if counts.name not in peer_names]
    lines = [counts.cells() for counts in results if counts.name not in peer_names]
    lines += [add_up(ours, summary.TOTAL).cells()] if len(ours) > 1 else []
    lines += [counts.cells() for counts in results if counts.name in peer_names]
    title, text = TEXTS[probe]
    filled = [i for i, _ in enumerate(HEADER) if i == 0 or any(line[i] != ABSENT for line in lines)]
    failures = "\n".join(f"- {line}" for counts in ours for line in counts.failures)
    return Table(
        title,
        text,
        tuple(HEADER[i] for i in filled),
        [tuple(line[i] for i in filled) for line in lines],
        failures and f"Not survived:\n\n{failures}",
    )


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def render_section(probe: str, table: Table, command: str, start: float) -> str:
    """Return the section of a page with its table and the conditions."""
    caption = (
        f"`{command}` · {datetime.now(UTC):%Y-%m-%d} · {describe_machine()} · {cpu_seconds() - start:.0f} s of CPU"
    )
    return f"<!-- {probe} -->\n{table.markdown()}\n\n<sub>{caption}</sub>\n<!-- end -->\n"


def write_page(sections: Mapping[str, str]) -> None:
    """Replace sections of the page, and the table that sums them up."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    names = ("summary", *TEXTS)
    page = merge_sections(page, sections, names, INTRODUCTION)
    table = f"<!-- summary -->\n{summary.sum_up(page).markdown()}\n<!-- end -->\n"
    PAGE.write_text(merge_sections(page, {"summary": table}, names, INTRODUCTION), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Kill commands, damage files, fill disks, and count what is lost.")
    parser.add_argument("--kills", type=int, help=f"kills of laconic's commands in all (default {KILLS:,})")
    parser.add_argument("--flips", type=int, help=f"damaged files of laconic in all (default {FLIPS:,})")
    parser.add_argument("--only", nargs="+", default=list(TEXTS), metavar="PROBE[:ROW]", help=", ".join(TEXTS))
    parser.add_argument("--trial", type=int, help="repeat one trial of a row")
    parser.add_argument("--quick", action="store_true", help="one or two trials of each row; only print")
    options = parser.parse_args()
    if unknown := {name.partition(":")[0] for name in options.only} - set(TEXTS):
        parser.error(f"--only {', '.join(unknown)}: expected {', '.join(TEXTS)}")
    return options


def main() -> None:
    """Run the probes and write the page; exit with 1 if a trial of laconic was not survived."""
    options = parse_arguments()
    amounts = QUICK if options.quick else Amounts()
    numbers = {name: n for name in ("kills", "flips") if (n := getattr(options, name)) is not None}
    amounts = replace(amounts, **numbers)
    torch.set_num_threads(1)
    warm_up()
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        base = Path(folder) / "inputs"  # messages of commands in it go beside it
        base.mkdir()
        write_inputs(base)
        train_inputs(base)
        built: dict[str, dict[str, Row]] = {}
        for selection in options.only:
            probe, _, only = selection.partition(":")
            start = cpu_seconds()
            if probe not in built:  # several rows of a probe share their files
                built[probe] = build_rows(probe, base, amounts)
            rows = built[probe]
            if only and only not in rows:
                sys.exit(f"--only {selection}: the rows of {probe} are {', '.join(rows)}")
            table = run_probe(probe, rows, only, options.trial, base)
            has_failed |= bool(table.footnote)
            section = render_section(probe, table, shlex.join(["python", SCRIPT, *sys.argv[1:]]), start)
            print(section, flush=True)
            if not (only or options.quick):
                write_page({probe: section})
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
