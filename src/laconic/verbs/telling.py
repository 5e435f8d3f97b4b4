"""Runs that read, on files of questions about contexts (E4) or of labelled texts (E3): asked, kept, said."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from laconic.console import progress
from laconic.core import lock
from laconic.core.artifact import canonical
from laconic.core.errors import BadInput, Preempted, Usage
from laconic.data.contexts import read_contexts
from laconic.data.labelled import read_labelled
from laconic.evaluation import kept
from laconic.evaluation.told import Told
from laconic.recipe import asking
from laconic.recipe.opened import RECIPE, Opened
from laconic.recipe.read import read
from laconic.recipe.reader import reader_of
from laconic.recipe.telling import Contexts, Labels, parts
from laconic.training.signals import Interrupted, Stop
from laconic.verbs.arguments import run_name

Kind = Literal["answers", "labels"]
ROWS = 100  # rows that are given a label, of validation and of test
FILES = (".jsonl", ".parquet")
OWN = ("test", "valid", "excerpt")  # sets that a recipe itself holds out
AWARE = "-query-aware"
FOLDER = re.compile(
    rf"(?P<file>.+)-(?P<kind>answers|labels)-step-(?P<step>\d+)(?P<aware>{AWARE})?(-first-(?P<rows>\d+))?"
)


def is_file(name: str) -> bool:
    """Whether a set is a file of rows."""
    return name.endswith(FILES)


def findings(
    paths: Mapping[str, str],
    files: Sequence[str],
    rows: int | None,
    aware: bool,
    stop: Stop,
    open_: Callable[..., Opened],
) -> list[Told]:
    """Every run on every file, the lines of its seeds side by side; `paths` are titles of runs by their paths."""
    found: list[Told] = []
    for path, title in paths.items():
        seeds, lines = list[int](), dict[str, list[list[str]]]()
        for folder in asking.seeds(path):
            run = open_(folder)
            if run.recipe.method == "plain":
                raise Usage(f"{folder}: a plain model has no memory to be asked; give runs of autocompressor")
            seeds.append(run.recipe.seed)
            with lock.held(folder / asking.FOLDER):
                for file in files:
                    said = asked(run, run_name(title, path, folder), Path(file), rows, aware, stop)
                    lines.setdefault(file, []).append(said)
        for file, each in lines.items():
            kind = kind_of(Path(file))
            found.append(Told(title, Path(file).stem, kind, aware and kind == "answers", tuple(seeds), each))
    return found


def asked(run: Opened, name: str, file: Path, rows: int | None, aware: bool, stop: Stop) -> list[str]:
    """The lines of a run on a file. Raises `Preempted` (75) after a signal: what is asked is kept."""
    if not file.is_file():
        raise BadInput(f"--on {file}: no such file; give one of rows, or {', '.join(OWN)}")
    reader, kind = reader_of(run), kind_of(file)
    if kind == "answers":
        questions = read_contexts(file)[:rows]
        work, count, batch = Contexts(reader, questions, aware), len(questions), 1
    else:
        work, batch = Labels(reader, *parts(read_labelled(file), rows or ROWS)), 8
        count = len(work.turns)
    extra = (AWARE if aware and kind == "answers" else "") + ("" if rows is None else f"-first-{rows}")
    folder = run.folder / asking.FOLDER / f"{file.stem}-{kind}-step-{run.step}{extra}"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    key = {"step": asking.step_hash(run.folder, run.step), "file": digest, "rows": str(rows), "aware": str(aware)}

    def figures(lines: Sequence[str]) -> Mapping[str, Any]:
        return {"schema": 1, **Told(name, file.stem, kind, aware, (run.recipe.seed,), [lines]).plain()}

    try:
        with (
            progress(f"{name} {file.name}") as show,
            asking.flushed(reader.decoder.words.weight.device),
            stop.leaving(),
        ):
            return kept.lines(
                folder, canonical(key), count, work.lines, batch=batch, result=figures, show=show,
                texts={RECIPE: (run.folder / RECIPE).read_text(encoding="utf-8")},
            )  # fmt: skip
    except Interrupted:
        rest = "what is asked is kept; the same command goes on"
        raise Preempted(f"{stop.name}: {run.folder}, {file.name}: {rest}") from None


def kind_of(file: Path) -> Kind:
    """What the rows of a file are, by the first one: questions about contexts, or labelled texts."""
    if file.suffix == ".parquet":
        from laconic.data.tables import parquet

        first = set(next(iter(parquet(file).rows)))
    else:
        with file.open(encoding="utf-8") as stream:
            first = {field for field in ("context", "text") if f'"{field}"' in stream.readline()}
    return "answers" if "context" in first else "labels"


def kept_findings(paths: Mapping[str, str]) -> list[Told]:
    """What the evaluations of runs hold of files, of each the newest step's, and of those the most rows.

    Raises `BadInput` (66) for seeds that were asked other rows.
    """
    found: list[Told] = []
    for path, title in paths.items():
        folders = asking.seeds(path)
        by_seed = [newest(folder / asking.FOLDER) for folder in folders]
        for (file, kind, aware), _ in sorted(by_seed[0].items()):
            places = [(folder, there[(file, kind, aware)]) for folder, there in zip(folders, by_seed, strict=True)
                      if (file, kind, aware) in there]  # fmt: skip
            keys = {json.loads((place / kept.KEY).read_text(encoding="utf-8"))["file"] for _, place in places}
            lines = [kept.lines_of(place) for _, place in places]
            if len(keys) > 1 or len({len(each) for each in lines}) > 1:
                raise BadInput(f"{path}: its seeds were asked other rows of {file}; evaluate them in one command")
            recipes = [read(folder / RECIPE)[0] for folder, _ in places]
            seeds = tuple(recipe.seed for recipe in recipes)
            found.append(Told(title, file, cast(Kind, kind), aware, seeds, lines, recipes[0].row))
    return sorted(found, key=lambda each: (each.kind, each.file, each.aware))


def newest(folder: Path) -> dict[tuple[str, str, bool], Path]:
    """Of each file, kind and order of reading the folder of its newest step with the most rows."""
    found: dict[tuple[str, str, bool], tuple[tuple[int, float], Path]] = {}
    for each in sorted(folder.glob("*-step-*")):
        said = FOLDER.fullmatch(each.name)
        if said is None or each.name.startswith("."):
            continue
        key = (said["file"], said["kind"], said["aware"] is not None)
        rank = (int(said["step"]), float(said["rows"] or "inf"))
        if key not in found or rank > found[key][0]:
            found[key] = (rank, each)
    return {key: place for key, (_, place) in found.items()}


def said(found: Told) -> list[str]:
    """A finding in lines."""
    head = f"{found.run}, {found.file}: {found.count} rows"
    if found.kind == "answers":
        head += ", the question stood before the context" if found.aware else ""
        return [head, *(
            f"  {w.way:<12}{w.held:7.1f} before  "
            + "  ".join(f"{name} {100 * x.mean.mean:.1f} ± {100 * x.se:.1f} %" for name, x in w.scores.items())
            for w in found.answered
        )]  # fmt: skip
    lines = [f"{head} of {found.options} labels; majority floor {100 * found.floor:.1f} %"]
    for w in found.labelled:
        spread = "" if w.sd is None else f" ± {100 * w.sd:.1f}"
        how = ", ".join(dict.fromkeys(w.how))
        lines.append(
            f"  {w.way:<26}{w.held:7.1f} before  {100 * w.accuracy:.1f}{spread} % right ({how}, by validation)"
        )
    return lines
