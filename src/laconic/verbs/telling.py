"""Runs that read, on files of questions about contexts (E4) or of labelled texts (E3), for `laconic evaluate`."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.console import progress
from laconic.core import lock
from laconic.core.artifact import canonical
from laconic.core.errors import BadInput, Preempted, Usage
from laconic.data.contexts import read_contexts
from laconic.data.labelled import read_labelled
from laconic.evaluation import kept, told
from laconic.recipe import asking
from laconic.recipe.opened import RECIPE, Opened
from laconic.recipe.reader import reader_of
from laconic.recipe.telling import Contexts, Labels, parts
from laconic.training.signals import Interrupted, Stop
from laconic.verbs.arguments import run_name

ROWS = 100  # rows that are given a label, of validation and of test
FILES = (".jsonl", ".parquet")
OWN = ("test", "valid", "excerpt")  # sets that a recipe itself holds out


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
) -> Iterator[dict[str, Any]]:
    """Every run of every seed on every file; `paths` are titles of runs by their paths."""
    for path, title in paths.items():
        for folder in asking.seeds(path):
            run = open_(folder)
            if run.recipe.method == "plain":
                raise Usage(f"{folder}: a plain model has no memory to be asked; give runs of autocompressor")
            with lock.held(folder / asking.FOLDER):
                for file in files:
                    yield finding(run, run_name(title, path, folder), Path(file), rows, aware, stop)


def finding(run: Opened, name: str, file: Path, rows: int | None, aware: bool, stop: Stop) -> dict[str, Any]:
    """A run on a file. Raises `Preempted` (75) after a signal: what is asked is kept."""
    if not file.is_file():
        raise BadInput(f"--on {file}: no such file; give one of rows, or {', '.join(OWN)}")
    reader, kind = reader_of(run), kind_of(file)
    if kind == "answers":
        asked = read_contexts(file)[:rows]
        work, count, batch = Contexts(reader, asked, aware), len(asked), 1
        figures: Callable[[Sequence[str]], Mapping[str, Any]] = answers
    else:
        shown, some = parts(lambda part: read_labelled(file, part), rows or ROWS)  # pyright: ignore[reportArgumentType]
        work, batch, figures = Labels(reader, shown, some), 8, told.labels
        count = len(work.turns)
    extra = ("-query-aware" if aware and kind == "answers" else "") + ("" if rows is None else f"-first-{rows}")
    folder = run.folder / asking.FOLDER / f"{file.stem}-{kind}-step-{run.step}{extra}"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    key = {"step": asking.step_hash(run.folder, run.step), "file": digest, "rows": str(rows), "aware": str(aware)}
    try:
        with (
            progress(f"{name} {file.name}") as show,
            asking.flushed(reader.decoder.words.weight.device),
            stop.leaving(),
        ):
            lines = kept.lines(
                folder, canonical(key), count, work.lines, batch=batch, result=figures, show=show,
                texts={RECIPE: (run.folder / RECIPE).read_text(encoding="utf-8")},
            )  # fmt: skip
    except Interrupted:
        rest = "what is asked is kept; the same command goes on"
        raise Preempted(f"{stop.name}: {run.folder}, {file.name}: {rest}") from None
    return {"run": name, "file": file.name, "kind": kind, "query_aware": aware, **figures(lines)}


def kind_of(file: Path) -> str:
    """What the rows of a file are, by the first one: questions about contexts, or labelled texts."""
    if file.suffix == ".parquet":
        from laconic.data.tables import parquet

        first = set(next(iter(parquet(file).rows)))
    else:
        with file.open(encoding="utf-8") as stream:
            first = {field for field in ("context", "text") if f'"{field}"' in stream.readline()}
    return "answers" if "context" in first else "labels"


def answers(lines: Sequence[str]) -> dict[str, Any]:
    """The scores of each way as JSON holds them."""
    found = told.answers(lines)
    ways = {way: {k: {**x._asdict(), "se": se} for k, (x, se) in each.items()} for way, each in found.items()}
    return {"ways": ways, "rows": len(lines)}


def said(found: Mapping[str, Any]) -> list[str]:
    """A finding in lines."""
    head = f"{found['run']}, {found['file']}: {found['rows']} rows"
    if found["kind"] == "answers":
        head += ", the question stood before the context" if found["query_aware"] else ""
        return [head] + [
            f"  {way:<12}" + "  ".join(f"{k} {100 * x['mean']:.1f} ± {100 * x['se']:.1f} %" for k, x in each.items())
            for way, each in found["ways"].items()
        ]
    floor = found["floor"]
    lines = [f"{head}; majority floor {100 * floor['share']:.1f} %"]
    for way, x in found["ways"].items():
        spread = "" if x["sd"] is None else f" ± {100 * x['sd']:.1f}"
        how = ", ".join(name for name in ("balanced", "calibrated") if x[name]) or "plain"
        lines.append(f"  {way:<12}{100 * x['accuracy']:.1f}{spread} % right ({how}, by validation)")
    return lines
