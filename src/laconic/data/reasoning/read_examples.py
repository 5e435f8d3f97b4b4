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

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.parquet_and_hub import read_parquet
from laconic.data.problems import RowProblem, format_problems, is_within_skip_limit, make_excerpt
from laconic.data.reasoning.columns import COLUMN_CONVERTERS, detect_columns, parse_icot_line, split_chain
from laconic.data.strict_jsonl import MAX_LINE_BYTES, RowError, decode_line, locate_field, locate_fields, parse_row
from laconic.errors import InputError, translate_os_errors

CHAIN_FIELDS = ("steps", "cot", "rationale")  # of a row that has several, the first
OTHER_FORMATS = ({"messages"}, {"prompt", "completion"}, {"text"})
ACCEPTED_FIELDS = "accepted are question, answer (texts) and steps (a list of texts), or cot or rationale (a text)"


@dataclass(frozen=True)
class ExamplesFile:
    """The rows of a file, SHA-256 of its bytes, where each row begins, notes for the user, lines left out.

    Of a table, the hash is that of its rows as JSON, and a row begins at its number from 0.
    """

    examples: tuple[ReasoningExample, ...]
    sha256: str
    offsets: tuple[int, ...]
    notes: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def read_examples(path: str | Path, config: DataConfig, max_rows: int | None = None) -> ExamplesFile:
    """The examples of a file, the first `rows` of them if given: JSONL, Parquet, or iCoT's lines (.txt).

    Raises `BadInput` with the first twenty faults of the whole file and a count of the others, or where
    `on_bad = "skip"` and more than one row in a thousand has a fault.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"no file {file}; in a recipe a path is relative to it")
    return scan_examples(file, config, max_rows).result()


def scan_examples(file: Path, config: DataConfig, max_rows: int | None = None) -> "ExampleReader":
    """A file read to its end, with every fault kept."""
    reader = ExampleReader(file.name, config, max_rows, parse_icot_line if file.suffix == ".txt" else parse_row)
    with gc_disabled(), translate_os_errors(file), file.open("rb") as stream:
        if file.suffix == ".parquet":
            reader.read_table(read_parquet(file).rows)
            reader.hash = hashlib.file_digest(stream, "sha256")
        else:
            reader.read_lines(iter(lambda: stream.readline(MAX_LINE_BYTES + 2), b""))
    return reader


@contextmanager
def gc_disabled() -> Generator[None]:
    """Every row stays, so looking for rubbish among them only takes time: two fifths of it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class ExampleReader:
    """One pass over the lines of a file, or the rows of a table; `columns` are whose, by the first row if not given."""

    def __init__(
        self,
        name: str,
        config: DataConfig,
        max_rows: int | None = None,
        parse: Callable[[str], dict[str, Any]] = parse_row,
        columns: str | None = None,
    ) -> None:
        self.name, self.config, self.max_rows, self.parse, self.columns = name, config, max_rows, parse, columns
        self.hash = hashlib.sha256()
        self.examples: list[ReasoningExample] = []
        self.offsets: list[int] = []
        self.problems: list[RowProblem] = []
        self.notes: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.schema: RowSchema | None = None
        self.first_blank_line = 0  # the first blank line after the last row

    def read_lines(self, lines: Iterable[bytes]) -> None:
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

    def read_table(self, rows: Iterable[dict[str, Any]]) -> None:
        """Every row, as strictly as if it stood in a file of JSON; where it is bad, by its number and field."""
        for number, row in enumerate(rows, 1):
            if self._enough():
                return
            text = json.dumps(row, ensure_ascii=False, default=str)
            self.hash.update(text.encode("utf-8", "surrogatepass") + b"\n")
            try:
                self._take(text, number, number - 1)
            except RowError as fault:
                field = next((key for key, start, _ in reversed(locate_fields(text)) if start <= fault.column), "")
                self.problems.append(RowProblem(0, 0, fault.kind, f"{self.name}:row {number}:{field}: {fault.message}"))

    def _enough(self) -> bool:
        return self.max_rows is not None and len(self.examples) >= self.max_rows

    def _line(self, line: bytes, at: int, number: int) -> None:
        try:
            text = decode_line(line, first=number == 1, notes=self.notes)
            if not text.strip():
                self.first_blank_line = self.first_blank_line or number
                return
            if self.first_blank_line:
                blank, self.first_blank_line = self.first_blank_line, 0
                self.problems.append(
                    RowProblem(
                        blank, 1, "blank lines", "a blank line between rows; delete it, one row stands on each line"
                    )
                )
            self._take(text, number, at)
        except RowError as fault:
            self.problems.append(RowProblem(number, fault.column, fault.kind, fault.message))

    def _take(self, text: str, number: int, at: int) -> None:
        """The example of a row, unless it has no answer in a set known for that. Raises `Fault`."""
        row = self.parse(text)
        self.columns = self.columns or detect_columns(row)
        try:
            row = COLUMN_CONVERTERS[self.columns](row)
        except KeyError as missing:
            field = str(missing.args[0])
            raise RowError(
                1, "missing fields", f"{field}: no such field in {make_excerpt(text)}; the first row has it"
            ) from None
        if row is None:
            self.notes["rows left out, whose answer is null"] += 1
            return
        self.schema = self.schema or infer_schema(row, text, self.config)
        example = self.schema.parse_example(row, text, f"{self.name}:{number}")
        if example.id in self.ids:
            raise RowError(
                locate_field(text, "id")[1], "ids twice", f"id {example.id[:60]!r} stands twice; rows need their own"
            )
        self.ids.add(example.id)
        self.examples.append(example)
        self.offsets.append(at)

    def result(self) -> ExamplesFile:
        """What was read, or its faults as `BadInput`."""
        bad, rows = len(self.problems), len(self.problems) + len(self.examples)
        if bad and not (self.config.on_invalid_row == "skip" and is_within_skip_limit(bad, rows)):
            few = (
                f"\n{bad:,} of {rows:,} rows are bad; at most 0.1 % are skipped"
                if self.config.on_invalid_row == "skip"
                else ""
            )
            raise InputError(format_problems(self.problems, self.name) + few)
        if not self.examples:
            raise InputError(f"{self.name}: no row in it; {ACCEPTED_FIELDS}, one object a line")
        notes = [f"{self.name}: {text}" + (f" ({n:,} lines)" if n > 1 else "") for text, n in self.notes.items()]
        if self.first_blank_line:
            notes.append(f"{self.name}: blank lines at the end")
        twice = len(self.examples) - len({example.question for example in self.examples})
        if twice:
            notes.append(f"{self.name}: {twice:,} questions stand there more than once")
        skipped = tuple(f"{self.name}:{p.line}:{p.column}: {p.message}" for p in self.problems)
        notes += [f"left out: {text}" for text in skipped]
        return ExamplesFile(tuple(self.examples), self.hash.hexdigest(), tuple(self.offsets), tuple(notes), skipped)


@dataclass(frozen=True)
class RowSchema:
    """Which fields a row has, as the first row of its file has them: the chain's field, and how it is cut."""

    chain_field: str | None
    chain_split: str
    forbid_unknown_fields: bool

    @cached_property
    def known_fields(self) -> frozenset[str]:
        """Fields that are read; the others are marks."""
        return frozenset({"id", "question", "answer"} | ({self.chain_field} if self.chain_field else set()))

    def parse_example(self, row: dict[str, Any], text: str, name: str) -> ReasoningExample:
        """The example of a row. Raises `Fault`."""
        for field in ("question", "answer"):
            self._text(row, field, text)
        if "id" in row:
            self._text(row, "id", text)
        marks = {key: value for key, value in row.items() if key not in self.known_fields}
        if self.forbid_unknown_fields and marks:
            key = next(iter(marks))
            raise RowError(
                locate_field(text, key)[0], "unknown fields", f"{key[:60]}: no such field; {ACCEPTED_FIELDS}"
            )
        return ReasoningExample(row.get("id", name), row["question"], self._steps(row, text), row["answer"], marks)

    def _text(self, row: dict[str, Any], field: str, text: str) -> None:
        if field not in row:
            raise RowError(1, "missing fields", f"{field}: no such field in {make_excerpt(text)}; {ACCEPTED_FIELDS}")
        value = row[field]
        if not isinstance(value, str):
            advice = "put it in quotes" if type(value) in (int, float) else f"give a text; {ACCEPTED_FIELDS}"
            raise type_error(field, value, "text", text, advice)
        if not value.strip():
            column = locate_field(text, field)[1]
            raise RowError(column, "empty fields", f"{field}: empty: {make_excerpt(text, column)}; give a text")

    def _steps(self, row: dict[str, Any], text: str) -> tuple[str, ...]:
        if self.chain_field is None:
            chains = [field for field in CHAIN_FIELDS if field in row]
            if chains and not self.forbid_unknown_fields:
                column = locate_field(text, chains[0])[0]
                raise RowError(
                    column, "other shapes", f"{chains[0]}: a chain, where the first row has none; {ACCEPTED_FIELDS}"
                )
            return ()
        if self.chain_field not in row:
            raise RowError(
                1, "missing fields", f"{self.chain_field}: no such field in {make_excerpt(text)}; the first row has it"
            )
        value = row[self.chain_field]
        if self.chain_field != "steps":
            self._text(row, self.chain_field, text)
            return split_chain(value, self.chain_split)
        if not isinstance(value, list):
            raise type_error("steps", value, "a list of texts", text, 'write ["<<3+4=7>>"], or [] for none')
        for step in value:
            if not isinstance(step, str) or not step.strip():
                raise type_error("steps", step, "a text of its own for each step", text, "put each step in quotes")
        return tuple(value)


def infer_schema(row: dict[str, Any], text: str, config: DataConfig) -> RowSchema:
    """The shape of the first row, or the one the recipe names."""
    other = next((fields for fields in OTHER_FORMATS if fields <= row.keys() and "question" not in row), None)
    if other:
        found = " and ".join(sorted(other))
        column = locate_field(text, min(other))[0]
        raise RowError(column, "other shapes", f"rows of {found} are not read to reason with; {ACCEPTED_FIELDS}")
    chain = config.chain_field or next((field for field in CHAIN_FIELDS if field in row), None)
    return RowSchema(chain, config.chain_split, config.forbid_unknown_fields)


def type_error(field: str, value: Any, expected: str, text: str, advice: str) -> RowError:
    """A value of another type than asked."""
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    found = "empty text" if value == "" else names.get(type(value), "number")
    column = locate_field(text, field)[1]
    return RowError(
        column, "wrong types", f"{field}: {found} where {expected} is asked: {make_excerpt(text, column)}; {advice}"
    )


def most_common_answer(examples: Sequence[ReasoningExample]) -> tuple[str, float]:
    """The commonest answer and its share: what a model is right in that knows the answers but no question."""
    if not examples:
        raise InputError("majority: no examples; give at least one")
    answer, count = Counter(example.answer for example in examples).most_common(1)[0]
    return answer, count / len(examples)
