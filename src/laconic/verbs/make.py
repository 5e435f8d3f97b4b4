"""`laconic data make`: rows that are generated, as JSONL."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic.console import note, progress, say
from laconic.core.errors import BadInput, Usage

if TYPE_CHECKING:
    from laconic.core.contract import Example

SOURCES = ("gsm8k-aug/train-subset.jsonl", "gsm8k/train.jsonl")
HELD_OUT = (
    "gsm8k-aug/valid.jsonl", "gsm8k-aug/test.jsonl", "gsm8k/test.jsonl", "svamp/test.jsonl", "multiarith/test.jsonl",
    "gsm-hard/test.jsonl",
)  # fmt: skip


@dataclass(frozen=True)
class Make:
    """Writes generated rows as JSONL, one object a line; the same arguments write the same bytes.

    Example: laconic data make gsm-variants --rows 200000 --out variants.jsonl --root ../shared/data
    """

    what: Annotated[Positional[Literal["gsm-variants"]], arg(metavar="WHAT")]
    """gsm-variants: questions of GSM8K-Aug and GSM8K with other numbers, and chains worked out anew"""
    rows: int
    """how many rows are written"""
    out: Path
    """the file to write; one that is there is kept if it is equal, else refused"""
    root: Path | None = None
    """folder of the data sets' files, as gsm8k/train.jsonl"""
    seed: int = 0
    """other numbers are drawn with another seed; which templates are held out does not depend on it"""
    held: float = 0.05
    """gsm-variants: share of the templates held out; as many rows in a hundred of them go to OUT.held.jsonl"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Generates, writes, counts."""
        if self.rows < 1:
            raise Usage(f"--rows {self.rows}: give at least 1")
        if not 0 <= self.held < 1:
            raise Usage(f"--held {self.held:g}: a share from 0 up to, but not, 1")
        if not self.out.absolute().parent.is_dir():
            raise BadInput(f"{self.out}: no folder {self.out.parent} to write into; make it first")
        made = self.variants()
        if self.format == "json":
            print(json.dumps({"schema": 1, "what": self.what, "seed": self.seed, **made}))
        else:
            print("\n".join(f"{value:>10,}  {name}" if isinstance(value, int) else "" for name, value in made.items()))
        return 0

    def variants(self) -> dict[str, Any]:
        """New numbers for the training questions of GSM8K-Aug and GSM8K."""
        from laconic.data.variants import is_held, masked, rounds, templates

        if self.root is None:
            raise Usage("gsm-variants: no --root; name the folder of the sets' files")
        with note("reading"):
            sources = [example for example in merged(self.root) if example.flags.get("icot_split") != "valid"]
            asked = {example.question for name in HELD_OUT for example in rows_of(self.root / name)}
            texts = {masked(question) for question in asked}
            found = templates(sources)
            kept = [template for template in found if template.masked not in texts]
        parts = [[t for t in kept if is_held(t, self.held) is held] for held in (False, True)]
        taken = asked | {example.question for example in sources}
        names = (self.out, self.out.with_suffix(f".held{self.out.suffix}"))
        counts = {
            "rows read": len(sources),
            "templates": len(found),
            "templates that ask a held-out question": len(found) - len(kept),
        }
        for path, part, rows in [(names[1], parts[1], round(self.rows * self.held)), (names[0], parts[0], self.rows)]:
            if rows:
                self.write(path, islice(rounds(part, self.seed, taken), rows), rows)
                counts[f"rows of {len(part):,} templates in {path}"] = rows
        return counts

    def write(self, path: Path, examples: "Iterable[Example]", rows: int) -> None:
        """One file, its rows counted."""
        from laconic.data.jsonl import row, write_rows

        with progress("writing") as show:
            written = write_rows(path, (row(example) for example in shown(examples, path.name, rows, show)))
        if written < rows:
            raise BadInput(f"{path}: {rows:,} rows asked, there are {written:,}; ask for fewer")
        say(f"wrote {path}")


def shown(examples: "Iterable[Example]", name: str, rows: int, show: Any) -> "Iterator[Example]":
    """The examples, with what is done and to come."""
    for done, example in enumerate(examples):
        if done % 1000 == 0:
            show(name, done, rows)
        yield example


def rows_of(path: Path) -> "tuple[Example, ...]":
    """The rows of a file."""
    from laconic.data.examples import read_examples
    from laconic.data.settings import Data

    return read_examples(path, Data(path=str(path))).examples


def merged(root: Path) -> "Iterator[Example]":
    """The training rows, each question once."""

    seen: set[str] = set()
    for name in SOURCES:
        for example in rows_of(root / name):
            question = " ".join("".join(c if c.isalnum() else " " for c in example.question.lower()).split())
            if question not in seen:
                seen.add(question)
                yield example
