"""`laconic data list` and `check`: the sets known by name, and rows looked over."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic.console import note, progress
from laconic.core.errors import BadInput, Usage

if TYPE_CHECKING:
    from laconic.data.checking import Checked, Documents, Lengths, Scan
    from laconic.data.maths import Set

SHOWN = 3  # ids named as examples
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class List:
    """Lists the data sets known by name: their rows, where they are read from, their licences.

    Example: laconic data list
    """

    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Prints them."""
        from laconic.data.maths import SETS

        if self.format == "json":
            print(json.dumps({"schema": 1, "sets": [about(found) for found in SETS.values()]}, ensure_ascii=False))
            return 0
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table("set", *PARTS, "from", "licence", box=SIMPLE_HEAD)
        for found in SETS.values():
            rows = {part: split.rows for part, split in found.splits.items()}
            places = [name for name, there in (("files", files_of(found)), ("hub", found.repo)) if there]
            counts = [f"{count:,}" if (count := rows.get(part)) else "" for part in PARTS]
            table.add_row(found.name, *counts, ", ".join(places or ["sets"]), found.licence)
        Console().print(table)
        for found in SETS.values():
            hub = f"; hub: {found.repo}" if found.repo else ""
            more = f"; laconic data make {found.made} writes training rows" if found.made else ""
            print(f"{found.name}: {found.about}{hub}{more}")
        return 0


def files_of(found: "Set") -> dict[str, str]:
    """The file of each split that has one."""
    return {part: split.file.path for part, split in found.splits.items() if split.file}


def about(found: "Set") -> dict[str, Any]:
    """A set as JSON."""
    return {
        "name": found.name,
        "about": found.about,
        "licence": found.licence,
        "rows": {part: split.rows for part, split in found.splits.items()},
        "files": files_of(found),
        "rows_in_files": {part: split.file.rows for part, split in found.splits.items() if split.file},
        "hub": found.repo,
        "members": list(found.members),
        "chain": found.chain,
        "answers": found.answer,
    }


@dataclass(frozen=True)
class Check:
    """Looks rows over: faults, what stands twice, lengths in tokens, rows that would be cut.

    Example: laconic data check train.jsonl --tokenizer meta-llama/Llama-3.2-1B --context 256
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """a file of rows (.jsonl, .parquet, iCoT's .txt), or a set by name, as gsm8k-aug:valid"""
    tokenizer: str | None = None
    """folder or hub name of a tokenizer, whose tokens are counted"""
    context: int | None = None
    """tokens of question, chain and answer; longer rows would be cut. Of texts: tokens of a row"""
    text: bool = False
    """the file holds documents: a text, or rows of .jsonl or .parquet whose field text is one"""
    root: Path | None = None
    """folder of the sets' files, for a set by name; without it they come by the hub"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """66 if there are faults, else 0."""
        from laconic.core.weights import find
        from laconic.data.checking import look, look_documents
        from laconic.data.tokens import load_tokenizer

        if self.context is not None and self.tokenizer is None:
            raise Usage(f"--context {self.context}: counted in tokens; name a --tokenizer")
        with note("loading the tokenizer"):
            tokenizer = None if self.tokenizer is None else load_tokenizer(find(self.tokenizer))
        if self.text:
            with progress("checking") as show:
                return self.tell_documents(look_documents(Path(self.file), tokenizer, self.context, show))
        with note(f"reading {self.file}"):
            scan = self.scan()
        with progress("checking") as show:
            found = look(scan, tokenizer, self.context, show)
        if self.format == "json":
            print(json.dumps(self.told(scan, found), ensure_ascii=False))
        else:
            self.tell(scan, found)
        return BadInput.code if found.faults else 0

    def scan(self) -> "Scan":
        """The rows of the file or set."""
        from laconic.data import maths
        from laconic.data.checking import Scan, scan
        from laconic.data.settings import Data, is_file

        if is_file(self.file) or Path(self.file).is_file():
            return scan(Path(self.file))
        how = Data(kind="maths", name=(self.file,), root=None if self.root is None else str(self.root))
        read = maths.load(self.file, "train", how)
        return Scan(read.examples, read.sha256, (), read.notes)

    def told(self, scan: "Scan", found: "Checked") -> dict[str, Any]:
        """What was found as JSON."""
        return {
            "schema": 1,
            "file": self.file,
            "sha256": scan.sha256,
            "rows": found.rows,
            "faults": [problem._asdict() for problem in found.faults],
            "notes": list(scan.notes),
            "rows_without_chain": found.chainless,
            "answers_without_number": found.wordless,
            "commonest_answer": {"answer": found.answer[0], "share": found.answer[1]},
            "questions_twice": [list(pair) for pair in found.twice],
            "tokens": {part: lengths._asdict() for part, lengths in found.lengths.items()},
            "unknown_tokens": found.unknown,
            "context": self.context,
            "rows_over_context": list(found.over),
        }

    def tell(self, scan: "Scan", found: "Checked") -> None:
        """What was found, for people."""
        from laconic.data.problems import report

        if found.faults:
            print(report(found.faults, Path(self.file).name))
        counts = {
            "faults": len(found.faults),
            "rows": found.rows,
            "rows without a chain": found.chainless,
            'answers without a number, which data.answers = "text" takes': found.wordless,
            f"questions that stood before{named(b for _, b in found.twice)}": len(found.twice),
        }
        if found.lengths:
            counts["tokens of questions and chains that the tokenizer has no word for"] = found.unknown
        if self.context is not None:
            counts[f"rows over {self.context:,} tokens, which would be cut{named(found.over)}"] = len(found.over)
        for text, n in counts.items():
            print(f"{n:>10,}  {text}")
        if found.rows:
            print(f"{found.answer[1]:>10.1%}  of the answers are {found.answer[0]!r}, the commonest")
        print("\n".join([*(f"note: {text}" for text in scan.notes), f"sha256 {scan.sha256}"]))
        if found.lengths:
            self.table(found.lengths)

    def tell_documents(self, found: "Documents") -> int:
        """What was found of documents."""
        if self.format == "json":
            about = {"schema": 1, "file": self.file, "context": self.context}
            tokens = None if found.tokens is None else found.tokens._asdict()
            print(json.dumps(about | asdict(found) | {"tokens": tokens}, ensure_ascii=False))
            return 0
        counts = {"documents" if part == "unsaid" else f"documents, part {part}": n for part, n in found.parts.items()}
        counts |= {"sections of documents": found.sections, "sections that stood before": found.twice}
        counts |= {} if found.rows is None else {f"rows of {self.context:,} tokens": found.rows}
        for text, n in counts.items():
            print(f"{n:>10,}  {text}")
        print("\n".join([*(f"note: {text}" for text in found.notes), f"sha256 {found.sha256}"]))
        if found.tokens:
            self.table({"document": found.tokens})
        return 0

    def table(self, found: "Mapping[str, Lengths]") -> None:
        """Lengths by part."""
        from rich.console import Console
        from rich.table import Table

        table = Table("tokens", "p50", "p90", "p99", "max")
        for part, lengths in found.items():
            table.add_row(part, *(f"{n:,}" for n in lengths))
        Console().print(table)


def named(ids: Iterable[str]) -> str:
    """The first of some ids, in brackets."""
    shown = list(islice(ids, SHOWN + 1))
    more = ", …" if len(shown) > SHOWN else ""
    return f" ({', '.join(shown[:SHOWN])}{more})" if shown else ""
