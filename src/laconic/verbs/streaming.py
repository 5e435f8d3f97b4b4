"""Runs that learn while they read, and plain ones beside them, on streams: for `laconic evaluate` and its report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from laconic.console import progress, say
from laconic.core import lock
from laconic.core.artifact import canonical
from laconic.core.errors import BadInput, Preempted, Usage
from laconic.data.intents import SETS
from laconic.evaluation import classes_shown, kept, learning, stream_table, streaming_books, streams
from laconic.evaluation.listening import Row, row_of
from laconic.evaluation.stream_table import Measured
from laconic.recipe import asking, listening
from laconic.recipe.incremental import figures, planned
from laconic.recipe.opened import RECIPE, Opened
from laconic.recipe.questions import kept_as
from laconic.recipe.read import read
from laconic.recipe.schema import Recipe
from laconic.training.signals import Interrupted
from laconic.verbs import reading
from laconic.verbs.arguments import names, run_name

METHOD = "hope"
KNOWN = (*listening.OWN, *listening.STREAMS, *SETS)
KEPT = "-stream-"  # stands in the name of a folder of evaluations between the set's name and the step
BOOKS = {"books": streaming_books.FRESH, "levels": "all levels"}  # and the way that others are compared with


class Classes(NamedTuple):
    """Figures of a run on a set of classes, as `recipe.incremental` gives them."""

    run: str
    seed: int
    found: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """All that was measured: streams, and sets of classes."""

    streams: Sequence[Measured]
    classes: Sequence[Classes]

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return bool(self.streams or self.classes)


def wanted(runs: Sequence[str], sets: Sequence[str]) -> bool:
    """Whether streams are asked for: of a run of method hope, or by a name that only they have."""
    recipes = [read(folder / RECIPE)[0] for path in runs for folder in asking.seeds(path)]
    only = set(sets) & {*listening.STREAMS, *SETS}
    return any(recipe.method == METHOD for recipe in recipes) or bool(only and all(map(reads, recipes)))


def reads(recipe: Recipe) -> bool:
    """Whether a run is a language model that streams may ask."""
    return recipe.method in (METHOD, "plain")


def gathered(how: reading.Asking, root: str | None, examples: int | None) -> Found:
    """Every run on every set; of a class so many examples are learned. Raises `Usage` (2) for a name that is none, and
    for a run of another method.
    """
    odd = next((name for name in how.sets if name not in KNOWN), None)
    if odd is not None:
        raise Usage(f"--on {odd}: of runs that learn while they read the sets are {', '.join(KNOWN)}")
    measured, classes = list[Measured](), list[Classes]()
    for path, title in zip(how.runs, names(how.runs), strict=True):
        seeds, rows = list[int](), dict[tuple[str, str], list[Sequence[Row]]]()
        about: dict[str, Any] = {}
        for folder in asking.seeds(path):
            run = how.opened(folder)
            if not reads(run.recipe):
                raise Usage(f"{folder}: method {run.recipe.method} is no language model of streams; evaluate it alone")
            seeds.append(run.recipe.seed)
            about = described(run.recipe)
            with lock.held(folder / asking.FOLDER):
                for name in how.sets:
                    if name in SETS:
                        classes.append(
                            Classes(title, run.recipe.seed, of_classes(how, run, title, name, root, examples))
                        )
                        continue
                    for each in listening.asked(run, name, how.rows):
                        got = measured_on(how, run, each, run_name(title, path, folder))
                        rows.setdefault((each.name, name if name in BOOKS else each.stream), []).append(got)
        measured += [Measured(stream_name(*key), title, tuple(seeds), found, about) for key, found in rows.items()]
    order = list(dict.fromkeys(line.stream for line in measured))
    return Found(sorted(measured, key=lambda line: order.index(line.stream)), classes)


def stream_name(name: str, stream: str) -> str:
    """What a line is called: the stream, and the set where that is another."""
    return stream if name == stream else f"{stream} ({name})"


def described(recipe: Recipe) -> dict[str, Any]:
    """What a run is, as far as its figures depend on it."""
    memory, levels, learning = recipe.memory, recipe.levels, recipe.learning
    found: dict[str, Any] = {"method": recipe.method, "kind": recipe.data.kind, "row": recipe.row}
    if recipe.method != METHOD:
        return found
    return found | {
        "mixer": None if memory is None else memory.mixer,
        "chunks": None if levels is None else list(levels.chunks),
        "learn": learning is None or learning.learn,
    }


def measured_on(how: reading.Asking, run: Opened, asked: listening.Asked, name: str) -> list[Row]:
    """A run on a stream. Raises `Preempted` (75) after a signal: what is read is kept."""
    folder = run.folder / asking.FOLDER / folder_name(asked.name, run.step, how.rows)
    more: dict[str, Any] = {
        "folder": folder,
        "key": {"step": asking.step_hash(run.folder, run.step), "rows": str(how.rows)},
        "texts": {RECIPE: (run.folder / RECIPE).read_text(encoding="utf-8")},
    }
    try:
        with progress(f"{name} {asked.name}") as show, asking.flushed(how.device), how.stop.leaving():
            more["show"] = show
            if asked.name == "books":
                model = listening.learner_of(run)
                return streaming_books.books(model, asked.source, how.device, bytes_of=asked.bytes_of, **more)
            if asked.name == "levels":
                return streaming_books.levels(
                    listening.variants(run), asked.source, how.device, bytes_of=asked.bytes_of, **more
                )
            return streams.measure(
                listening.learner_of(run), asked.stream, asked.source, how.device, batch=asked.batch,
                bytes_of=asked.bytes_of, **more,
            )  # fmt: skip
    except Interrupted:
        rest = "what is read is kept; run the same command again to go on"
        raise Preempted(f"{how.stop.name}: {run.folder}, {asked.name}: {rest}") from None


def of_classes(
    how: reading.Asking, run: Opened, title: str, name: str, root: str | None, examples: int | None
) -> dict[str, Any]:
    """A run on a set of classes. Raises `Preempted` (75) after a signal: whole courses are kept."""
    folder = run.folder / asking.FOLDER / folder_name(name, run.step, how.rows, examples)
    key = {"step": asking.step_hash(run.folder, run.step), "rows": str(how.rows), "set": name, "lines": "courses"}
    key |= {} if examples is None else {"examples": str(examples)}
    where = root or (run.recipe.data.root and str(run.recipe.data.root))
    plan = planned(run.parts.decoder, run.parts.tokenizer, name, where, rows=how.rows, examples=examples)
    texts = {RECIPE: (run.folder / RECIPE).read_text(encoding="utf-8")}
    try:
        with progress(f"{title} {name}, courses") as show, asking.flushed(how.device), how.stop.leaving():
            lines = kept.lines(
                folder, canonical(key), len(plan), lambda places: plan.lines(places, lambda x: say(f"{title}: {x}")),
                batch=1, result=plan.found, texts=texts, show=show,
            )  # fmt: skip
    except Interrupted:
        rest = "whole courses are kept; run the same command again to go on"
        raise Preempted(f"{how.stop.name}: {run.folder}, {name}: {rest}") from None
    return plan.found(lines)


def folder_name(name: str, step: int, rows: int | None, examples: int | None = None) -> str:
    """Where in evaluations/ the rows lie."""
    learned = "" if examples is None else f"-learned-{examples}"
    return f"{kept_as(name)}{KEPT}step-{step}" + ("" if rows is None else f"-first-{rows}") + learned


def told(found: Found, as_json: bool) -> None:
    """The figures on standard output."""
    if as_json:
        print(json.dumps(plain(found), ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    wide = Console(highlight=False)
    wide = wide if wide.is_terminal else Console(highlight=False, width=240)
    if found.streams:
        wide.print(stream_table.shown(found.streams))
        print("\n".join([*saved(found.streams), stream_table.LEGEND]))
    for each in found.classes:
        header, *rows = classes_shown.lines(each.found)
        made = Table(*header, box=None, pad_edge=False, header_style="", title=f"{each.run}, {each.found['set']}")
        for row in rows:
            made.add_row(*row)
        wide.print(made)
    if found.classes:
        print(classes_shown.LEGEND)


def plain(found: Found) -> dict[str, Any]:
    """As JSON has it."""
    lines = [stream_table.plain(line) | {"gains": [told_gain(x) for x in gains(line)]} for line in found.streams]
    classes = [{"run": each.run, "seed": each.seed, **each.found} for each in found.classes]
    return {"schema": 1, "streams": lines, "classes": classes}


def gains(line: Measured) -> list[streaming_books.Gain]:
    """What ways save against the one they are compared with: the fresh state, all levels, learning anew every time."""
    against = {"books": "fresh", "levels": "all levels"}.get(line.stream)
    if against is None:
        against = next((way for way in ("learn, reset", "still") if way in line.ways), None)
    if against is None or not (line.stream in BOOKS or line.stream.startswith("ppl")):
        return []
    return streaming_books.gains(line.rows, against)


def told_gain(found: streaming_books.Gain) -> dict[str, Any]:
    """As JSON has it, which has no word for the error of a single item."""
    return found._asdict() | {"se": found.se if found.items > 1 else None}


def saved(lines: Sequence[Measured]) -> list[str]:
    """Differences in nats, paired, in lines."""
    found: list[str] = []
    for line in lines:
        each = gains(line)
        loses = line.stream == "levels"
        found += [
            f"{line.run}, {line.stream}: {x.way} {'loses' if loses else 'saves'} "
            f"{-x.saved if loses else x.saved:+.4f} nats a token against {x.against}"
            + (f" ± {x.se:.4f} over {x.items} items" if x.items > 1 else " on one item")
            for x in each
        ]
        if (share := streaming_books.left(each)) is not None:
            found.append(f"{line.run}, {line.stream}: after another book {100 * share:.0f} % of that is left")
    return found


def kept_found(paths: Sequence[str]) -> Found:
    """What the evaluations of runs hold, of each stream the newest step's with the most rows."""
    measured, classes = list[Measured](), list[Classes]()
    for path, title in zip(paths, names(paths), strict=True):
        folders = asking.seeds(path)
        recipes = [read(folder / RECIPE)[0] for folder in folders]
        by_seed = [newest(folder / asking.FOLDER) for folder in folders]
        for name in by_seed[0]:
            places = [there[name] for there in by_seed if name in there]
            seeds = [r.seed for r, there in zip(recipes, by_seed, strict=True) if name in there]
            if name in SETS:
                classes += [Classes(title, seed, figures(each)) for seed, each in zip(seeds, places, strict=True)]
                continue
            lines = [kept.lines_of(place) for place in places]
            read_rows = streaming_books.rows_of if name == "books" else lambda line: [row_of(line)]
            rows = [[row for line in each for row in read_rows(line)] for each in lines]
            if len({tuple(row.id for row in each) for each in rows}) > 1:
                raise BadInput(f"{path}: its seeds read other items of {name}; evaluate them in one command")
            stream = stream_name(name, stream_of(name, recipes[0]))
            measured.append(Measured(stream, title, tuple(seeds), rows, described(recipes[0])))
    return Found(sorted(measured, key=lambda line: line.stream), classes)


def stream_of(name: str, recipe: Recipe) -> str:
    """The stream of a kept set."""
    if name in listening.STREAMS:
        return name
    return {"text": "ppl"}.get(recipe.data.kind, recipe.data.kind)


def newest(folder: Path) -> dict[str, Path]:
    """Of each set the folder of its newest step with the most rows, and of those with the most that was learned."""
    found: dict[str, tuple[tuple[int, float, float], Path]] = {}
    for each in sorted(folder.glob(f"*{KEPT}step-*")):
        name, _, rest = each.name.partition(f"{KEPT}step-")
        step, *limits = rest.split("-")
        said = dict(zip(limits[::2], map(float, limits[1::2]), strict=True))
        rank = (int(step), said.get("first", inf), said.get("learned", inf))
        if not each.name.startswith(".") and (name not in found or rank > found[name][0]):
            found[name] = (rank, each)
    return {name: place for name, (_, place) in found.items()}


def page(paths: Sequence[str], found: Found) -> str:
    """The page of a report."""
    courses = [(run_name(title, path, folder), course(folder)) for path, title in zip(paths, names(paths), strict=True)
               for folder in asking.seeds(path)]  # fmt: skip
    classes = [(f"{each.run}, seed {each.seed}", each.found) for each in found.classes]
    said = {line.run: {**line.about, "seeds": ", ".join(map(str, line.seeds))} for line in found.streams}
    facts = [(run, ", ".join(f"{k} {v}" for k, v in about.items() if v is not None)) for run, about in said.items()]
    return learning.page(found.streams, saved(found.streams), classes, courses, facts)


def course(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """What the metrics of a run say of its levels and memories, step by step."""
    found: dict[str, list[tuple[float, float]]] = {}
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        for name in (name for name in row if learning.is_course(name) and isinstance(row[name], float)):
            found.setdefault(name, []).append((float(row["step"]), row[name]))
    return found
