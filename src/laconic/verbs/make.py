"""`laconic data make`: rows that are generated, as JSONL."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro.conf import Positional, arg

from laconic.console import note, progress, say
from laconic.core.errors import BadInput, Usage

if TYPE_CHECKING:
    from laconic.core.contract import Example
    from laconic.data.settings import Data
    from laconic.data.variants import Template

Row = Mapping[str, Any]
KINDS = ("gsm-variants", "mult-4", "mult-5", "mult-7", "mult-9", "prosqa")
HELD_OUT = ("gsm8k-aug:valid", "gsm8k-aug:test", "gsm8k:test", "svamp:test", "multiarith:test", "gsm-hard:test")


class File(NamedTuple):
    """A file to write: where, what its rows are of, how many, they."""

    path: Path
    about: str
    count: int
    rows: Iterable[Row]


@dataclass(frozen=True)
class Make:
    """Writes generated rows as JSONL, one object a line; the same arguments write the same bytes.

    Example: laconic data make gsm-variants --rows 200000 --out variants.jsonl --root ../shared/data
    """

    what: Annotated[Positional[str], arg(metavar="WHAT")]
    """gsm-variants: questions of GSM8K with other numbers; mult-4, -5, -7, -9: products as iCoT's; prosqa: graphs"""
    rows: int
    """how many rows to write"""
    out: Path
    """the file to write; one that is there is kept if it is equal, else refused"""
    root: Path | None = None
    """folder of the data sets' files; the rows that they hold out are left out. gsm-variants without it: by the hub"""
    seed: int = 0
    """another seed gives other rows; the same templates are held out"""
    held: float = 0.05
    """gsm-variants: share of the templates held out; their rows, the same share of --rows, go to OUT.held.jsonl"""
    originals: bool = False
    """gsm-variants: the questions as they are come first, but for those of held-out templates; --rows counts them"""
    doubtful: bool = False
    """gsm-variants: take templates, too, whose numbers a word may mean as well (2, twice); some chains are wrong"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Generates, writes, counts."""
        from laconic.core.nearest import closest

        if self.what not in KINDS:
            near = closest(self.what, KINDS)
            raise Usage(
                f"{self.what}: not made here; " + (f"did you mean {near}?" if near else f"there are {', '.join(KINDS)}")
            )
        if self.rows < 1:
            raise Usage(f"--rows {self.rows}: give at least 1")
        if not 0 <= self.held < 1:
            raise Usage(f"--held {self.held:g}: give a share of at least 0 and below 1")
        if not self.out.absolute().parent.is_dir():
            raise BadInput(f"{self.out}: no folder {self.out.parent} to write into; make it first")
        files = self.variants() if self.what == "gsm-variants" else [self.generated()]
        done, total = count(1), sum(file.count for file in files)
        with progress("writing") as show:
            write(files, lambda: None if (n := next(done)) % 100 else show("rows", n, total))
        for file in files:
            say(f"wrote {file.path}")
        if self.format == "json":
            made = [{"file": str(file.path), "rows": file.count, "about": file.about} for file in files]
            print(json.dumps({"schema": 1, "what": self.what, "seed": self.seed, "made": made}))
            return 0
        for file in files:
            print(f"{file.path}: {file.count:,} {file.about}")
        return 0

    def variants(self) -> list[File]:
        """New numbers for the training questions, and for those whose templates are held out."""
        from laconic.data.jsonl import fields
        from laconic.data.variants import is_held, masked, rounds

        sources, found, taken = self.templates()
        held = [template for template in found if is_held(template.masked, self.held)]
        used = [template for template in found if not is_held(template.masked, self.held)]
        first = [replace(e, flags={}) for e in sources if self.originals and not is_held(masked(e.question), self.held)]
        rows = map(fields, chain(first, rounds(used, self.seed, taken)))
        apart = map(fields, rounds(held, self.seed, taken))
        beside, few = self.out.with_suffix(f".held{self.out.suffix}"), round(self.rows * self.held)
        files = [
            File(self.out, self.told(len(first), len(used)), self.rows, islice(rows, self.rows)),
            File(beside, f"rows of {len(held):,} templates that {self.out.name} has none of", few, islice(apart, few)),
        ]
        return [file for file in files if file.count]

    def told(self, originals: int, templates: int) -> str:
        """What the rows are of."""
        if self.rows <= originals:
            return f"of {originals:,} questions as they are, and no variant; ask for more --rows"
        as_they_are = f": {originals:,} questions as they are, then" if originals else ""
        return f"rows{as_they_are} of {templates:,} templates"

    def templates(self) -> "tuple[tuple[Example, ...], list[Template], set[str]]":
        """The training questions, their templates, and the questions that no variant may be."""
        from laconic.data import maths
        from laconic.data.variants import masked, templates

        how = self.how(("gsm8k-aug" if self.root is None else "gsm8k-aug-subset", "gsm8k"))
        with note("reading"):
            sources = maths.training(how).examples
            asked = {example.question for name in HELD_OUT for example in loaded(name, how)}
            texts = {masked(question) for question in asked}
            found = [template for template in templates(sources) if template.masked not in texts]
        kept = [template for template in found if self.doubtful or not template.doubtful]
        left = f", {len(found) - len(kept):,} left out as doubtful" if len(kept) < len(found) else ""
        say(f"{len(sources):,} questions, {len(found):,} templates{left}")
        return sources, kept, asked | {example.question for example in sources}

    def generated(self) -> File:
        """Products or graphs, without those that are held out."""
        from laconic.data.graphs import problems
        from laconic.data.multiplication import products

        if self.what == "prosqa":
            asked = {e.question for e in self.held_out("prosqa")} if self.root else set[str]()
            rows = (row for row in problems(self.seed) if row["question"] not in asked)
            return File(self.out, "graphs", self.rows, islice(rows, self.rows))
        if self.root is None:
            raise Usage(f"{self.what}: no --root; name the folder of the sets' files, whose pairs are left out")
        pairs = [(example.flags["a"], example.flags["b"]) for example in self.held_out(self.what)]
        rows = products(int(self.what[-1]), self.seed, pairs)
        return File(self.out, "products", self.rows, islice(rows, self.rows))

    def held_out(self, name: str) -> "list[Example]":
        """The rows of validation and test of a set."""
        how = self.how((name,))
        return [example for part in ("valid", "test") for example in loaded(f"{name}:{part}", how)]

    def how(self, names: tuple[str, ...]) -> "Data":
        """How sets are read."""
        from laconic.data.settings import Data

        return Data(kind="maths", name=names, root=None if self.root is None else str(self.root))


def loaded(name: str, how: "Data") -> "tuple[Example, ...]":
    """The rows of a set's split."""
    from laconic.data import maths

    return maths.load(name, "test", how).examples


def write(files: list[File], show: Callable[[], object]) -> None:
    """All files or none: each has its name when those after it are written."""
    from laconic.data.jsonl import write_rows

    if files:
        file = files[0]
        write_rows(file.path, shown(file, show), file.count, lambda: write(files[1:], show))


def shown(file: File, show: Callable[[], object]) -> Iterator[Row]:
    """The rows, each of which is shown as done."""
    for row in file.rows:
        yield row
        show()
