"""The commands that the probes interrupt: what they read and write, and how far an interrupted one came."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.probes.processes import Action, Ending, run_command_line, run_forked
from laconic.storage import manifest
from laconic.storage.run_dir import RunDirectory
from laconic.storage.safetensors_header import read_safetensors_header
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE, TINY_RECIPE
from tests.training.toy_runs import read_metrics, step_hashes

STEPS = 8
BUSY = 73  # exit code: another process writes, or the output is complete
THINK = TINY_RECIPE.replace("steps = 4", "steps = 8").replace("save_every = 2", "save_every = 1\nvalidate_every = 4")
DOCUMENTS = TINY_DOCUMENT_RECIPE.replace("steps = 1", "steps = 8\nsave_every = 1")
RECIPES = {
    "kava": THINK,
    "cot": THINK.replace('"kava"', '"cot"').partition("[latents]")[0] + "[data]" + THINK.partition("[data]")[2],
    "autocompressor": DOCUMENTS.replace('"lm"', '"autocompressor"').partition("[cms]")[0]
    + "[data]"
    + DOCUMENTS.partition("[data]")[2],
    "hope": DOCUMENTS.replace('"lm"', '"hope"').partition("[compression]")[0]
    + "[cms]"
    + DOCUMENTS.partition("[cms]")[2],
}
LORA = (
    RECIPES["autocompressor"].replace('"autocompressor"', '"lm"').partition("[model]")[0] + '[model]\nname = "model"\n'
)
LORA += "[data]" + RECIPES["autocompressor"].partition("[data]")[2].replace(
    "steps = 8", 'trainable = "lora"\nsteps = 2'
)
EVALUATED = "runs/evaluated"
FINISHED = 1 << 30  # progress of a command whose output is complete


@dataclass(frozen=True)
class Work:
    """A command that a probe interrupts and repeats.

    Attributes:
        name: Its row in the tables.
        run: Runs it in the current directory, in a child process; the same call resumes it, or returns `BUSY` if it is
            finished.
        take_snapshot: Returns hashes of all results in a folder, which must equal those of an uninterrupted command.
        measure_progress: Returns how much of the work in a folder is committed.
        setup: Fills the folder in which it runs.
        begin: Runs it from the beginning, where `run` resumes by a flag.
        exit_codes: Exit codes of commands that fail in an orderly way, beside the documented ones; a peer may print a
            traceback (70).
    """

    name: str
    run: Action
    take_snapshot: Callable[[Path], Mapping[str, Any]]
    measure_progress: Callable[[Path], int]
    setup: Callable[[Path], object] = lambda folder: None
    begin: Action | None = None
    exit_codes: tuple[int, ...] = ()

    def prepare_folder(self, folder: Path) -> Path:
        """Replace the folder by an empty one and set it up."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.setup(folder)
        return folder


def write_inputs(base: Path) -> None:
    """Write recipes, texts and prompts."""
    for name, text in RECIPES.items():
        (base / f"{name}.toml").write_text(text)
    books = [{"text": f"Book {b}. " + "A sentence of a book. " * 12} for b in range(4)]
    (base / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in books))
    (base / "book.txt").write_text("A sentence of a book about nothing. " * 7)
    prompts = [{"prompt": f"Once upon {n} times"} for n in range(6)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


def train_inputs(base: Path) -> None:
    """Train the runs that other commands read."""
    for name in RECIPES:
        check(run_forked(partial(run_command_line, "train", base / f"{name}.toml", "--out", f"runs/{name}"), base))
    shutil.copytree(base / "runs/kava", base / EVALUATED)
    check(run_forked(partial(run_command_line, "evaluate", EVALUATED, "--tasks", "valid"), base))


def check(ending: Ending) -> Ending:
    """Return the ending of a command that has to succeed."""
    if ending.code:
        raise RuntimeError(f"exit code {ending.code}: {ending.err.strip()[-500:]}")
    return ending


def hash_files(folder: Path, *names: str) -> dict[str, str]:
    """Return the hashes of files, and of all files of folders, but for locks."""
    paths = [p for name in names for p in ((folder / name).rglob("*") if (folder / name).is_dir() else [folder / name])]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.is_file() and not path.name.startswith("lock")
    }


def find_leftovers(folder: Path) -> list[str]:
    """Return the temporary files and folders that killed commands left, but for empty folders."""
    paths = [p for p in folder.rglob(".*") if p.name.startswith((".tmp-", ".trash-", ".bad-"))]
    outer = [p for p in paths if not any(parent in paths for parent in p.parents)]
    return [str(p.relative_to(folder)) for p in outer if not p.is_dir() or any(p.iterdir())]


def snapshot_run(folder: Path) -> dict[str, Any]:
    """Return the hashes of the last step of a run, its metrics, and its validations."""
    run = folder / "run"
    validations = hash_files(run, "validations.json")
    return {**step_hashes(run, STEPS), "metrics": read_metrics(run), **validations}


def newest_step(folder: Path) -> int:
    """Return the number of the newest step, after checking that it is complete."""
    run = RunDirectory(folder / "run")
    numbers = run.step_numbers()
    if numbers:
        manifest.verify_folder(run.step_path(numbers[-1]), "step", numbers[-1])
    return max(numbers, default=0)


def build_training(base: Path, method: str) -> Work:
    """`laconic train` of a method, which commits every step."""
    return Work(
        f"train {method}",
        partial(run_command_line, "train", base / f"{method}.toml", "--out", "run"),
        snapshot_run,
        newest_step,
    )


def build_compression(base: Path, name: str, model: Path | str, *flags: str) -> Work:
    """`laconic compress`, which saves its progress after every segment if `flags` say so."""

    begin = partial(run_command_line, "compress", model, base / "book.txt", "--out", "out.safetensors", *flags)

    def run() -> int:
        return begin(*(("--resume",) if Path("out.safetensors.part").exists() else ()))

    def measure_progress(folder: Path) -> int:
        if (folder / "out.safetensors").exists():
            return FINISHED
        part = folder / "out.safetensors.part"
        if not part.exists():
            return 0
        return int(json.loads(read_safetensors_header(part).metadata["laconic"])["tokens"])

    return Work(
        f"compress {name}", run, lambda folder: hash_files(folder, "out.safetensors"), measure_progress, begin=begin
    )


def build_evaluation(base: Path) -> Work:
    """`laconic evaluate` of a run, which appends each batch to a partial result."""

    def snapshot(folder: Path) -> dict[str, str]:
        return hash_files(next((folder / "run/evaluations").glob("reasoning-*")), "records.jsonl", "result.json")

    def measure_progress(folder: Path) -> int:
        if list((folder / "run/evaluations").glob("reasoning-*")):
            return FINISHED
        return sum(path.read_bytes().count(b"\n") for path in folder.rglob("units.jsonl"))

    return Work(
        "evaluate kava",
        partial(run_command_line, "evaluate", "run", "--tasks", "valid", "--batch-size", 2),
        snapshot,
        measure_progress,
        lambda folder: shutil.copytree(base / "runs/kava", folder / "run"),
    )


def build_export(base: Path, name: str, source: Path, *flags: str) -> Work:
    """`laconic export`; a folder that is complete is not written again."""

    return Work(
        f"export {name}",
        partial(run_command_line, "export", source, "--out", "exported", *flags),
        lambda folder: hash_files(folder, "exported"),
        lambda folder: FINISHED * (folder / "exported").exists(),
    )


def build_answers(base: Path, model: Path | str) -> Work:
    """`laconic generate` on a file of prompts, which appends each batch to a partial output."""

    flags = ("--output", "answers.jsonl", "--batch-size", 1, "--max-tokens", 4)
    run = partial(run_command_line, "generate", model, "--input", base / "prompts.jsonl", *flags)

    def measure_progress(folder: Path) -> int:
        part = folder / "answers.jsonl.part"
        return FINISHED if (folder / "answers.jsonl").exists() else part.exists() and part.read_bytes().count(b"\n")

    return Work("generate --output", run, lambda folder: hash_files(folder, "answers.jsonl"), measure_progress)


def build_works(base: Path) -> dict[str, Work]:
    """Return all commands by their names."""
    runs = base / "runs"
    works = [
        *(build_training(base, method) for method in RECIPES),
        build_compression(base, "to keys and values", "stories260k"),
        build_compression(base, "to summary vectors", runs / "autocompressor", "--save-every", "1"),
        build_compression(base, "to fast weights", runs / "hope", "--save-every", "1"),
        build_evaluation(base),
        build_export(base, "kava", runs / "kava"),
        build_export(base, "kava --to vllm", runs / "kava", "--to", "vllm"),
        build_answers(base, "stories260k"),
    ]
    return {work.name: work for work in works}
