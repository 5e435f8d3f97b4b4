"""Read files of question, chain and answer as reasoning examples: JSONL, Parquet, iCoT's text format."""

import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.parquet_and_hub import read_parquet
from laconic.data.reasoning.catalog import refuse_csv
from laconic.data.reasoning.chat import CHAIN_FIELDS, extract_thinking, get_role, split_thinking
from laconic.data.reasoning.columns import (
    COLUMN_CONVERTERS,
    FORM_FIELDS,
    detect_columns,
    normalise_number,
    parse_icot_line,
    rename_columns,
    split_chain,
    unbox_answer,
)
from laconic.data.reasoning.row_notes import iter_notes
from laconic.data.strict_jsonl import (
    NumberedRow,
    RowError,
    RowProblem,
    check_data_file,
    convert_each,
    format_notes,
    format_problems,
    is_within_skip_limit,
    iter_lines,
    locate_problem,
    make_excerpt,
    number_table_rows,
    parse_lines,
    parse_row,
    require_text,
)
from laconic.errors import InputError, translate_os_errors

CONVERSATIONS = ("messages", "prompt-completion", "conversations")  # forms whose messages are the prompt
UNKNOWN_COLUMNS = "unknown columns"  # kind of a problem of the whole file, which is reported once
ACCEPTED_FIELDS = (
    "expected messages, or prompt and completion, or instruction and output, or question, answer (text or number) and "
    "steps (a list of strings), or cot or rationale (a string), and optionally document (a string)"
)


@dataclass(frozen=True)
class ExamplesFile:
    """The examples of a file."""

    examples: tuple[ReasoningExample, ...]
    sha256: str  # SHA-256 of the file; of a Hub table, of its rows as JSON
    notes: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # problems of the rows that `on_invalid_row = "skip"` dropped


def read_examples(path: str | Path, config: DataConfig, max_rows: int | None = None) -> ExamplesFile:
    """Read the first `max_rows` examples of JSONL, Parquet, or iCoT's lines (`.txt`); the SHA-256 is of the whole file.

    Raises `InputError` with the first 20 problems and a count of the others; with `on_invalid_row = "skip"`, if more
    than one row in a thousand is invalid.
    """
    file = Path(path)
    check_data_file(file)
    return scan_examples(file, config, max_rows).result()


def scan_examples(file: Path, config: DataConfig, max_rows: int | None = None) -> "ExampleReader":
    """Read a file to its end and collect its problems instead of raising them."""
    refuse_csv(file)
    reader = ExampleReader(file.name, config, max_rows)
    with gc_disabled(), translate_os_errors(file), file.open("rb") as stream:
        if file.suffix.lower() == ".parquet":
            reader.read_table(read_parquet(file).rows)
            reader.hash = hashlib.file_digest(stream, "sha256")
        else:
            reader.read_lines(iter_lines(stream), parse_icot_line if file.suffix == ".txt" else parse_row)
    return reader


@contextmanager
def gc_disabled() -> Generator[None]:
    """Pause garbage collection, which takes two fifths of the reading time and finds nothing to free."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ExampleReader:
    """One pass over the lines of a file or the rows of a table, for at most `max_rows` examples.

    `columns` is a key of `COLUMN_CONVERTERS`, by default detected from the first row.
    """

    def __init__(self, name: str, config: DataConfig, max_rows: int | None = None, columns: str | None = None) -> None:
        self.name, self.config, self.max_rows, self.columns = name, config, max_rows, columns
        self.hash = hashlib.sha256()
        self.examples: list[ReasoningExample] = []
        self.problems: list[RowProblem] = []
        self.notes: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.chain_field, self.is_first = config.chain_field, True
        self.unseen_columns = dict(config.columns)

    def read_lines(self, lines: Iterable[bytes], parse: Callable[[str], dict[str, Any]] = parse_row) -> None:
        lines = self._hash_lines(lines)
        self._read(parse_lines(lines, self.notes, parse), is_table=False)
        for _ in lines:
            pass
        self._note_unseen_columns()

    def read_table(self, rows: Iterable[dict[str, Any]]) -> None:
        """Read the rows of a table as strictly as those of a JSONL file."""
        self._read(self._reparse(number_table_rows(rows)), is_table=True)
        self._note_unseen_columns()

    def _note_unseen_columns(self) -> None:
        """Note names of `data.columns` that no row has; a held-out file may have our names, or no chains."""
        for ours, theirs in self.unseen_columns.items():
            self.notes[f"no row has the field {theirs!r}, which data.columns names for {ours}"] += 1

    def _hash_lines(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        line = b"\n"
        for line in lines:
            self.hash.update(line)
            yield line
        if not line.endswith(b"\n"):
            self.notes["no line end after the last row"] += 1

    def _reparse(self, rows: Iterable[NumberedRow]) -> Iterator[NumberedRow | RowProblem]:
        for row in rows:
            self.hash.update(row.text.encode("utf-8", "surrogatepass") + b"\n")
            try:
                yield row._replace(row=parse_row(row.text))
            except RowError as error:
                yield locate_problem(error, row, self.name)

    def _read(self, rows: Iterable[NumberedRow | RowProblem], *, is_table: bool) -> None:
        for result in convert_each(self.name, rows, self._convert, is_table=is_table):
            if isinstance(result, RowProblem):
                self.problems.append(result)
                if result.kind == UNKNOWN_COLUMNS:  # which every row would report
                    return
            elif result is not None:
                self.examples.append(result)
            if self.max_rows is not None and len(self.examples) >= self.max_rows:
                return

    def _convert(self, read: dict[str, Any], name: str) -> ReasoningExample | None:
        """Return the example of a row; None for a row without an answer, which is noted."""
        renamed = rename_columns(read, self.config.columns) if self.config.columns else read
        if self.unseen_columns:
            self.unseen_columns = {ours: name for ours, name in self.unseen_columns.items() if ours not in renamed}
        self.columns = self.columns or detect_columns(renamed)
        if self.columns == "standard" and not {"question", "answer"} & renamed.keys():
            check_form(renamed)
        try:
            row = COLUMN_CONVERTERS[self.columns](renamed)
        except KeyError as missing:
            raise RowError("missing fields", f"{missing.args[0]}: no such field", "the first row has it") from None
        if row is None:
            self.notes["rows dropped because they have no answer"] += 1
            return None
        if self.columns == "conversations" and get_role(renamed["conversations"][-1]) == "user":
            self.notes["conversations: turns of the user after the last answer are left out"] += 1
        row = split_thinking(row)
        if self.columns in ("standard", "math") or self.config.answer_type == "number":
            row = unbox_answer(row)
        if self.is_first:
            check_columns(row)
            self.chain_field = self.chain_field or next((field for field in CHAIN_FIELDS if field in row), None)
            self.is_first = False
        if "messages" in row and self.columns not in CONVERSATIONS:
            row = {key: value for key, value in row.items() if key != "messages"}
            self.notes["messages: not read beside a question and an answer; remove answer, so that they are read"] += 1
        example = parse_example(row, name, self.chain_field, self.config)
        if example.id in self.ids:
            raise RowError("duplicate ids", f"duplicate id {example.id[:60]!r}", "ids must be unique", field="id")
        self.ids.add(example.id)
        self.notes.update(iter_notes(example, self.config, self.columns, self.chain_field))
        return example

    def result(self) -> ExamplesFile:
        """Return what was read. Raises `InputError` with the problems."""
        num_invalid, num_rows = len(self.problems), len(self.problems) + len(self.examples)
        should_skip = self.config.on_invalid_row == "skip"
        if num_invalid and not (should_skip and is_within_skip_limit(num_invalid, num_rows)):
            limit = f"\n{num_invalid:,} of {num_rows:,} rows are invalid; at most 0.1 % may be skipped"
            raise InputError(format_problems(self.problems, self.name) + (limit if should_skip else ""))
        if not self.examples:
            reasons = "".join(f": {note}" for note in list(self.notes)[:1])
            raise InputError(f"{self.name}: contains no row{reasons}; {ACCEPTED_FIELDS}, one object per line")
        notes = format_notes(self.name, self.notes)
        repeated = len(self.examples) - len(
            {(e.question, e.document, str(e.metadata.get("messages"))) for e in self.examples}
        )
        if repeated:
            notes.append(f"{self.name}: {repeated:,} questions are repeated")
        skipped = tuple(f"{self.name}:{p.line}:{p.column}: {p.message}" for p in self.problems)
        notes += [f"skipped: {problem}" for problem in skipped]
        return ExamplesFile(tuple(self.examples), self.hash.hexdigest(), tuple(notes), skipped)


def check_form(row: dict[str, Any]) -> None:
    """Raise `RowError` for a row of another form than question and answer, which the first row has."""
    form = detect_columns(row)
    if form != "standard":
        fields = " and ".join(sorted(row.keys() & FORM_FIELDS))
        raise RowError("other formats", f"has {fields}, the first row question and answer", "give a file for each")


def parse_example(row: dict[str, Any], name: str, chain_field: str | None, config: DataConfig) -> ReasoningExample:
    numbers = {key: row[key] for key in ("id", "answer") if type(row.get(key)) in (int, float)}
    row = row | {key: normalise_number(number) for key, number in numbers.items()}
    for field in ("question", "answer", *(["id"] if row.get("id") is not None else [])):
        check_text(row, field)
    metadata = {key: value for key, value in row.items() if key not in ("id", "question", "answer", chain_field)}
    document = metadata.pop("document", None)
    if not isinstance(document, str | None):
        raise type_error("document", document, "a string", "join its parts into one text")
    known = ("messages", "tools") if "messages" in metadata else ()
    unknown = [key for key in metadata if key not in known]
    if config.forbid_unknown_fields and unknown:
        raise RowError("unknown fields", "unknown field", ACCEPTED_FIELDS, field=unknown[0])
    steps = parse_steps(row, chain_field, config)
    return ReasoningExample(row.get("id") or name, row["question"], steps, row["answer"], metadata, document)


def parse_steps(row: dict[str, Any], chain_field: str | None, config: DataConfig) -> tuple[str, ...]:
    others = [field for field in CHAIN_FIELDS if field != chain_field and row.get(field)]
    if chain_field is None:
        if others and not config.forbid_unknown_fields:
            remedy = 'if some have none, write "steps": []'
            raise RowError("other formats", "has a chain, but the first row has none", remedy, field=others[0])
        return ()
    if chain_field not in row:
        remedy = f"the first row has it; give all rows the field {others[0] if others else chain_field}"
        raise RowError("missing fields", f"{chain_field}: no such field", remedy)
    value = row[chain_field]
    if value is None or (isinstance(value, str) and chain_field != "steps" and not value.strip()):
        if not others:
            return ()  # as GSM8K-Aug has for some rows
        problem = f"has a chain, but {chain_field} is read"
        raise RowError("other formats", problem, f'set data.chain_field = "{others[0]}"', field=others[0])
    if chain_field != "steps":
        check_text(row, chain_field)
        return split_chain(extract_thinking(value), config.chain_split)
    if not isinstance(value, list):
        remedy = 'write ["<<3+4=7>>"], or [] for none; a chain that is one text belongs in the field cot'
        raise type_error("steps", value, "a list of strings", remedy)
    for step in value:
        if not isinstance(step, str) or not step.strip():
            raise type_error("steps", step, "a non-empty string per step", "put each step in quotes")
    return tuple(value)


def check_text(row: dict[str, Any], field: str) -> None:
    value = row.get(field, "")
    if not isinstance(value, str):
        hint = {int: "put it in quotes", float: "put it in quotes", bool: 'write a text, as "yes" or "no"'}
        raise type_error(field, value, "a string", hint.get(type(value), ACCEPTED_FIELDS))
    require_text(row, field, ACCEPTED_FIELDS)


def check_columns(row: dict[str, Any]) -> None:
    """Raise `RowError` for a first row that is no question and answer."""
    if "text" in row and "question" not in row:
        raise RowError(UNKNOWN_COLUMNS, "rows with text are not reasoning examples", ACCEPTED_FIELDS, field="text")
    missing = [field for field in ("question", "answer") if field not in row]
    if missing:
        names = ", ".join(f'{field} = "FIELD"' for field in missing)
        problem = f"no {' and no '.join(missing)}; the fields are {make_excerpt(', '.join(row)) or 'none'}"
        raise RowError(UNKNOWN_COLUMNS, problem, f"rename them, or set data.columns = {{ {names} }}")


def type_error(field: str, value: Any, expected: str, remedy: str) -> RowError:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    actual = "empty string" if value == "" else names.get(type(value), "number")
    return RowError("wrong types", f"expected {expected}, got {actual}", remedy, field=field)


def most_common_answer(examples: Sequence[ReasoningExample]) -> tuple[str, float]:
    """Return the most common answer and its share: the accuracy of a model that ignores the question."""
    if not examples:
        raise InputError("most_common_answer needs at least one example")
    answer, count = Counter(example.answer for example in examples).most_common(1)[0]
    return answer, count / len(examples)
