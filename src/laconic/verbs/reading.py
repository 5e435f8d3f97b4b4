"""Runs that read, for `laconic evaluate` and `laconic report`: each run of each seed opened, read and kept."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.console import note, progress
from laconic.core import lock
from laconic.core.errors import BadInput, Preempted, Usage, on_disk
from laconic.evaluation import kept, reading, scored
from laconic.evaluation.reading import Line
from laconic.evaluation.told import Told
from laconic.recipe import asking
from laconic.recipe.measuring import Set, sets
from laconic.recipe.opened import RECIPE, Opened, opened
from laconic.recipe.read import read
from laconic.recipe.schema import READERS, Recipe
from laconic.training.signals import Interrupted, Stop
from laconic.verbs import telling
from laconic.verbs.arguments import names, run_name


@dataclass(frozen=True)
class Asking:
    """What is asked of which runs; the signal that ends it."""

    runs: Sequence[str]
    sets: Sequence[str]
    rows: int | None
    step: str
    aware: bool
    device: torch.device
    stop: Stop

    def opened(self, folder: Path) -> Opened:
        """A run at the step asked for, with a place for what is kept."""
        with note(f"loading {folder}"):
            run = opened(folder, self.device, asking.step_of(folder, self.step))
        with on_disk(folder / asking.FOLDER):
            (folder / asking.FOLDER).mkdir(exist_ok=True)
        return run


def readers(runs: Sequence[str]) -> bool:
    """Whether the runs read documents. Raises `Usage` (2) for some that do beside some that answer questions."""
    recipes = {folder: read(folder / RECIPE)[0] for path in runs for folder in asking.seeds(path)}
    kinds = {folder: recipe.method in READERS for folder, recipe in recipes.items()}
    if len(set(kinds.values())) > 1:
        one, other = (next(folder for folder, kind in kinds.items() if kind is wanted) for wanted in (True, False))
        raise Usage(f"{one} reads documents, {other} answers questions; evaluate them by themselves")
    return all(kinds.values())


def gathered(how: Asking) -> list[Line]:
    """Every run on every set. Raises `Usage` (2) for a set that is none of documents."""
    for name in how.sets:
        if name not in telling.OWN and not telling.is_file(name):
            raise Usage(
                f"--on {name}: of runs that read documents the sets are {', '.join(telling.OWN)}, and files of rows"
            )
    titles = names(how.runs)
    found = [line for path, title in zip(how.runs, titles, strict=True) for line in lines_of(how, path, title)]
    order = list(dict.fromkeys(line.set for line in found))
    return reading.beside(sorted(found, key=lambda line: order.index(line.set)))


def told_of(how: Asking) -> list[Told]:
    """What every run says to the files among the sets."""
    files = [name for name in how.sets if telling.is_file(name)]
    paths = dict(zip(how.runs, names(how.runs), strict=True)) if files else {}
    return telling.findings(paths, files, how.rows, how.aware, how.stop, how.opened)


def lines_of(how: Asking, path: str, title: str) -> list[Line]:
    """A run, or the runs of several seeds, on every set."""
    rows, seeds, about = dict[str, list[Any]](), list[int](), dict[str, Any]()
    for folder in asking.seeds(path):
        run = how.opened(folder)
        seeds.append(run.recipe.seed)
        about = described(run.recipe)
        with lock.held(folder / asking.FOLDER):
            for each, found in measured(how, run, run_name(title, path, folder)):
                rows.setdefault(each.name, []).append(found)
    return [Line(name, title, tuple(seeds), found, about) for name, found in rows.items()]


def measured(how: Asking, run: Opened, name: str) -> Iterator[tuple[Set, list[scored.Row]]]:
    """One run on every set, in every way; what is kept already is read."""
    for asked in (name for name in how.sets if name in telling.OWN):
        for each in sets(run, asked, how.rows):
            folder = run.folder / asking.FOLDER / folder_name(each.name, run.step, how.rows)
            with progress(f"{name} {each.name}") as show:
                yield each, measured_on(how, run, each, folder, show)


def folder_name(name: str, step: int, rows: int | None) -> str:
    """Where in evaluations/ the rows lie."""
    return f"{name}-reading-step-{step}" + (f"-first-{rows}" if rows is not None else "")


def measured_on(how: Asking, run: Opened, asked: Set, folder: Path, show: scored.Show) -> list[scored.Row]:
    """A run on a set. Raises `Preempted` (75) after a signal: what is read is kept."""
    key = {"step": asking.step_hash(run.folder, run.step), "rows": str(how.rows), "seed": str(run.recipe.seed)}
    about = {"set": asked.name, "step": run.step, "seed": run.recipe.seed, **described(run.recipe)}

    def figures(rows: Sequence[scored.Row]) -> dict[str, Any]:
        return {"schema": 1, **reading.plain_line(Line(asked.name, folder.name, (run.recipe.seed,), [rows], about))}

    try:
        with asking.flushed(how.device), how.stop.leaving():
            return scored.evaluate(
                asked.source, asked.ways, how.device, batch=asked.batch, folder=folder, key=key,
                texts={RECIPE: (run.folder / RECIPE).read_text(encoding="utf-8")}, result=figures, show=show,
            )  # fmt: skip
    except Interrupted:
        rest = "what is read is kept; run the same command again to go on"
        raise Preempted(f"{how.stop.name}: {run.folder}, {asked.name}: {rest}") from None


def described(recipe: Recipe) -> dict[str, Any]:
    """What a run is, as far as its figures depend on it."""
    how = recipe.reading
    found: dict[str, Any] = {"method": recipe.method, "kind": recipe.data.kind, "row": recipe.row}
    if how is None or recipe.method == "plain":
        return found | {"length": None}
    cell = {"generator": how.generator, "length": how.length, "memory": how.memory, "cap": how.fixed}
    if how.length != "stop" or recipe.halting is None:
        return found | cell
    halting = recipe.halting
    return found | cell | {"estimator": halting.estimator, "gate": halting.gate, "stop_head": halting.stop_head,
                           "price": halting.price}  # fmt: skip


def told(lines: Sequence[Line], files: Sequence[Told], as_json: bool) -> None:
    """The figures on standard output."""
    if as_json:
        made = {"schema": 1, "lines": [reading.plain_line(line) for line in lines],
                "files": [each.plain() for each in files]}  # fmt: skip
        print(json.dumps(made, ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console

    print("\n".join(text for each in files for text in telling.said(each)), end="\n" if files else "")
    if not lines:
        return
    wide = Console(highlight=False)
    (wide if wide.is_terminal else Console(highlight=False, width=240)).print(reading.shown(lines))
    print(reading.footnotes(lines))


def kept_lines(paths: Sequence[str]) -> list[Line]:
    """What the evaluations of runs hold, of each set the newest step's, and of those the most rows.

    Raises `BadInput` (66) for seeds that read other documents.
    """
    found: list[Line] = []
    for path, title in zip(paths, names(paths), strict=True):
        folders = asking.seeds(path)
        recipes = [read(folder / RECIPE)[0] for folder in folders]
        by_seed = [newest(folder) for folder in folders]
        for name in by_seed[0]:
            rows = [[scored.row_of(text) for text in kept.lines_of(each[name])] for each in by_seed if name in each]
            same(path, name, rows)
            seeds = [r.seed for r, each in zip(recipes, by_seed, strict=True) if name in each]
            about = {**described(recipes[0]), "step": by_seed[0][name].name.split("-step-")[1].split("-")[0]}
            found.append(Line(name, title, tuple(seeds), rows, about))
    order = sorted({line.set for line in found}, key=lambda name: ("excerpt" in name, len(name), name))
    return reading.beside(sorted(found, key=lambda line: order.index(line.set)))


def newest(run: Path) -> dict[str, Path]:
    """Of each set the folder of its newest step with the most rows."""
    found: dict[str, tuple[tuple[int, float], Path]] = {}
    for folder in sorted((run / asking.FOLDER).glob("*-reading-step-*")):
        name, _, rest = folder.name.partition("-reading-step-")
        step, _, first = rest.partition("-first-")
        rank = (int(step), float(first) if first else float("inf"))
        if not folder.name.startswith(".") and (name not in found or rank > found[name][0]):
            found[name] = (rank, folder)
    return {name: folder for name, (_, folder) in found.items()}


def same(path: str, name: str, rows: Sequence[Sequence[scored.Row]]) -> None:
    """Raises `BadInput` (66) unless the seeds of a run read the same documents."""
    if len({tuple(row.id for row in each) for each in rows}) > 1:
        raise BadInput(f"{path}: its seeds read other documents of {name}; evaluate them in one command")


def facts(paths: Sequence[str]) -> list[tuple[str, str]]:
    """What each run is."""
    found: list[tuple[str, str]] = []
    for path, title in zip(paths, names(paths), strict=True):
        recipes = [read(folder / RECIPE)[0] for folder in asking.seeds(path)]
        about = {**described(recipes[0]), "seeds": ", ".join(str(recipe.seed) for recipe in recipes)}
        found.append((title, ", ".join(f"{k} {v}" for k, v in about.items() if v is not None)))
    return found
