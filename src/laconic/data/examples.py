"""A file of question, steps and answer as examples: JSONL line by line, every fault at its line and column; Parquet."""

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from laconic.core.contract import Example
from laconic.core.errors import BadInput, on_disk
from laconic.data.columns import COLUMNS, columns_of, cut, icot
from laconic.data.lines import LINE, Fault, decoded, members, place, record
from laconic.data.problems import Problem, excerpt, report, within_skips
from laconic.data.settings import Data
from laconic.data.tables import parquet

CHAINS = ("steps", "cot", "rationale")  # of a row that has several, the first
OTHERS = ({"messages"}, {"prompt", "completion"}, {"text"})
ACCEPTED = "accepted are question, answer (texts) and steps (a list of texts), or cot or rationale (a text)"


@dataclass(frozen=True)
class Read:
    """The rows of a file, SHA-256 of its bytes, where each row begins, notes for the user, lines left out.

    Of a table, the hash is that of its rows as JSON, and a row begins at its number from 0.
    """

    examples: tuple[Example, ...]
    sha256: str
    offsets: tuple[int, ...]
    notes: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def read_examples(path: str | Path, how: Data, rows: int | None = None) -> Read:
    """The examples of a file, the first `rows` of them if given: JSONL, Parquet, or iCoT's lines (.txt).

    Raises `BadInput` with the first twenty faults of the whole file and a count of the others, or where
    `on_bad = "skip"` and more than one row in a thousand has a fault.
    """
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"no file {file}; in a recipe a path is relative to it")
    return scanned(file, how, rows).result()


def scanned(file: Path, how: Data, rows: int | None = None) -> "Reader":
    """A file read to its end, with every fault kept."""
    reader = Reader(file.name, how, rows, icot if file.suffix == ".txt" else record)
    with unswept(), on_disk(file), file.open("rb") as stream:
        if file.suffix == ".parquet":
            reader.table(parquet(file).rows)
            reader.hash = hashlib.file_digest(stream, "sha256")
        else:
            reader.read(iter(lambda: stream.readline(LINE + 2), b""))
    return reader


@contextmanager
def unswept() -> Generator[None]:
    """Every row stays, so looking for rubbish among them only takes time: two fifths of it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Reader:
    """One pass over the lines of a file, or the rows of a table; `columns` are whose, by the first row if not given."""

    def __init__(
        self,
        name: str,
        how: Data,
        rows: int | None = None,
        parse: Callable[[str], dict[str, Any]] = record,
        columns: str | None = None,
    ) -> None:
        self.name, self.how, self.limit, self.parse, self.columns = name, how, rows, parse, columns
        self.hash = hashlib.sha256()
        self.examples: list[Example] = []
        self.offsets: list[int] = []
        self.problems: list[Problem] = []
        self.notes: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.shape: Shape | None = None
        self.blank = 0  # the first blank line after the last row

    def read(self, lines: Iterable[bytes]) -> None:
        """Every line; hashing goes on to the end when enough rows are read."""
        at, number, whole = 0, 1, True
        last = b"\n"
        for line in lines:
            self.hash.update(line)
            if whole and not self._enough():
                self._line(line, at, number)
            # A line over the bound comes in parts; the first says so, the others are passed over.
            whole = line.endswith(b"\n")
            at, number, last = at + len(line), number + whole, line
        if not last.endswith(b"\n"):
            self.notes["no line end after the last row"] += 1

    def table(self, rows: Iterable[dict[str, Any]]) -> None:
        """Every row, as strictly as if it stood in a file of JSON; where it is bad, by its number and field."""
        for number, row in enumerate(rows, 1):
            if self._enough():
                return
            text = json.dumps(row, ensure_ascii=False, default=str)
            self.hash.update(text.encode("utf-8", "surrogatepass") + b"\n")
            try:
                self._take(text, number, number - 1)
            except Fault as fault:
                field = next((key for key, start, _ in reversed(members(text)) if start <= fault.column), "")
                self.problems.append(Problem(0, 0, fault.kind, f"{self.name}:row {number}:{field}: {fault.text}"))

    def _enough(self) -> bool:
        return self.limit is not None and len(self.examples) >= self.limit

    def _line(self, line: bytes, at: int, number: int) -> None:
        try:
            text = decoded(line, first=number == 1, notes=self.notes)
            if not text.strip():
                self.blank = self.blank or number
                return
            if self.blank:
                blank, self.blank = self.blank, 0
                self.problems.append(
                    Problem(
                        blank, 1, "blank lines", "a blank line between rows; delete it, one row stands on each line"
                    )
                )
            self._take(text, number, at)
        except Fault as fault:
            self.problems.append(Problem(number, fault.column, fault.kind, fault.text))

    def _take(self, text: str, number: int, at: int) -> None:
        """The example of a row, unless it has no answer in a set known for that. Raises `Fault`."""
        row = self.parse(text)
        self.columns = self.columns or columns_of(row)
        try:
            row = COLUMNS[self.columns](row)
        except KeyError as missing:
            field = str(missing.args[0])
            raise Fault(
                1, "missing fields", f"{field}: no such field in {excerpt(text)}; the first row has it"
            ) from None
        if row is None:
            self.notes["rows left out, whose answer is null"] += 1
            return
        self.shape = self.shape or shape_of(row, text, self.how)
        example = self.shape.example(row, text, f"{self.name}:{number}")
        if example.id in self.ids:
            raise Fault(place(text, "id")[1], "ids twice", f"id {example.id[:60]!r} stands twice; rows need their own")
        self.ids.add(example.id)
        self.examples.append(example)
        self.offsets.append(at)

    def result(self) -> Read:
        """What was read, or its faults as `BadInput`."""
        bad, rows = len(self.problems), len(self.problems) + len(self.examples)
        if bad and not (self.how.on_bad == "skip" and within_skips(bad, rows)):
            few = f"\n{bad:,} of {rows:,} rows are bad; at most 0.1 % are skipped" if self.how.on_bad == "skip" else ""
            raise BadInput(report(self.problems, self.name) + few)
        if not self.examples:
            raise BadInput(f"{self.name}: no row in it; {ACCEPTED}, one object a line")
        notes = [f"{self.name}: {text}" + (f" ({n:,} lines)" if n > 1 else "") for text, n in self.notes.items()]
        if self.blank:
            notes.append(f"{self.name}: blank lines at the end")
        twice = len(self.examples) - len({example.question for example in self.examples})
        if twice:
            notes.append(f"{self.name}: {twice:,} questions stand there more than once")
        skipped = tuple(f"{self.name}:{p.line}:{p.column}: {p.text}" for p in self.problems)
        notes += [f"left out: {text}" for text in skipped]
        return Read(tuple(self.examples), self.hash.hexdigest(), tuple(self.offsets), tuple(notes), skipped)


@dataclass(frozen=True)
class Shape:
    """Which fields a row has, as the first row of its file has them: the chain's field, and how it is cut."""

    chain: str | None
    split: str
    closed: bool

    @cached_property
    def used(self) -> frozenset[str]:
        """Fields that are read; the others are marks."""
        return frozenset({"id", "question", "answer"} | ({self.chain} if self.chain else set()))

    def example(self, row: dict[str, Any], text: str, name: str) -> Example:
        """The example of a row. Raises `Fault`."""
        for field in ("question", "answer"):
            self._text(row, field, text)
        if "id" in row:
            self._text(row, "id", text)
        marks = {key: value for key, value in row.items() if key not in self.used}
        if self.closed and marks:
            key = next(iter(marks))
            raise Fault(place(text, key)[0], "unknown fields", f"{key[:60]}: no such field; {ACCEPTED}")
        return Example(row.get("id", name), row["question"], self._steps(row, text), row["answer"], marks)

    def _text(self, row: dict[str, Any], field: str, text: str) -> None:
        if field not in row:
            raise Fault(1, "missing fields", f"{field}: no such field in {excerpt(text)}; {ACCEPTED}")
        value = row[field]
        if not isinstance(value, str):
            advice = "put it in quotes" if type(value) in (int, float) else f"give a text; {ACCEPTED}"
            raise wrong(field, value, "text", text, advice)
        if not value.strip():
            column = place(text, field)[1]
            raise Fault(column, "empty fields", f"{field}: empty: {excerpt(text, column)}; give a text")

    def _steps(self, row: dict[str, Any], text: str) -> tuple[str, ...]:
        if self.chain is None:
            chains = [field for field in CHAINS if field in row]
            if chains and not self.closed:
                column = place(text, chains[0])[0]
                raise Fault(column, "other shapes", f"{chains[0]}: a chain, where the first row has none; {ACCEPTED}")
            return ()
        if self.chain not in row:
            raise Fault(1, "missing fields", f"{self.chain}: no such field in {excerpt(text)}; the first row has it")
        value = row[self.chain]
        if self.chain != "steps":
            self._text(row, self.chain, text)
            return cut(value, self.split)
        if not isinstance(value, list):
            raise wrong("steps", value, "a list of texts", text, 'write ["<<3+4=7>>"], or [] for none')
        for step in value:
            if not isinstance(step, str) or not step.strip():
                raise wrong("steps", step, "a text of its own for each step", text, "put each step in quotes")
        return tuple(value)


def shape_of(row: dict[str, Any], text: str, how: Data) -> Shape:
    """The shape of the first row, or the one the recipe names."""
    other = next((fields for fields in OTHERS if fields <= row.keys() and "question" not in row), None)
    if other:
        found = " and ".join(sorted(other))
        column = place(text, min(other))[0]
        raise Fault(column, "other shapes", f"rows of {found} are not read to reason with; {ACCEPTED}")
    chain = how.field or next((field for field in CHAINS if field in row), None)
    return Shape(chain, how.split, how.closed)


def wrong(field: str, value: Any, asked: str, text: str, advice: str) -> Fault:
    """A value of another type than asked."""
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    found = "empty text" if value == "" else names.get(type(value), "number")
    column = place(text, field)[1]
    return Fault(column, "wrong types", f"{field}: {found} where {asked} is asked: {excerpt(text, column)}; {advice}")


def majority(examples: Sequence[Example]) -> tuple[str, float]:
    """The commonest answer and its share: what a model is right in that knows the answers but no question."""
    if not examples:
        raise BadInput("majority: no examples; give at least one")
    answer, count = Counter(example.answer for example in examples).most_common(1)[0]
    return answer, count / len(examples)
