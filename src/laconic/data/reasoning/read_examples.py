"""Read files of question, chain and answer as reasoning examples: JSONL, Parquet, iCoT's text format."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.parquet_and_hub import read_parquet
from laconic.data.reasoning.catalog import refuse_csv
from laconic.data.reasoning.chat import CHAIN_FIELDS, extract_thinking, iter_strings, split_thinking
from laconic.data.reasoning.columns import (
    COLUMN_CONVERTERS,
    FORM_COLUMNS,
    detect_columns,
    normalise_number,
    parse_icot_line,
    rename_columns,
    split_chain,
    unbox_answer,
)
from laconic.data.strict_jsonl import (
    RowError,
    RowParser,
    RowProblem,
    check_data_file,
    convert_each,
    format_problems,
    is_within_skip_limit,
    iter_lines,
    make_excerpt,
    parse_lines,
    require_text,
)
from laconic.errors import InputError, translate_os_errors

CONVERSATIONS = ("messages", "prompt-completion", "conversations")  # forms whose messages are the prompt
UNKNOWN_COLUMNS = "unknown columns"  # kind of a problem of the whole file, which is reported once
ACCEPTED_FIELDS = (
    "expected messages, or prompt and completion, or instruction and output, or question, answer (text or number) and "
    "steps (a list of strings), or cot or rationale (a string), and optionally document (a string)"
)
# Usual names of fields that hold a chain or belong to a question; they are not read, but noted.
CHAINS = "generated_solution deepseek_reasoning complex_cot chain_of_thought explanation reasoning thinking solution"
TEXTS = "input context system system_prompt history passage article paragraphs body story query options choices"
UNREAD_CHAINS, UNREAD_TEXTS = CHAINS.split(), TEXTS.split()
UNCLEAR_CHAINS = (
    'steps: data.format "pccot" joins them without a separator, as in 3+4=77+1=8; write <<3+4=7>>, end a step with ; '
    'or a line end, or set data.format = "codi" (spaces) or "chat" (lines)'
)


@dataclass(frozen=True)
class ExamplesFile:
    examples: tuple[ReasoningExample, ...]
    sha256: str  # SHA-256 of the file; of a Hub table, of its rows as JSON
    notes: tuple[str, ...]
    problems: tuple[RowProblem, ...] = ()  # of invalid rows, which `on_invalid_row = "skip"` drops


def read_examples(path: str | Path, config: DataConfig, max_rows: int | None = None) -> ExamplesFile:
    """Read the first `max_rows` examples of JSONL, Parquet, or iCoT's lines (`.txt`). Raises `InputError`."""
    file = Path(path)
    check_data_file(file)
    return check_problems(scan_examples(file, config, max_rows), file.name, config)


def scan_examples(path: Path, config: DataConfig, max_rows: int | None = None) -> ExamplesFile:
    """Read a file and collect its problems instead of raising them."""
    refuse_csv(path)
    with translate_os_errors(path), path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.seek(0)
        is_table = path.suffix.lower() == ".parquet"
        lines = to_json_lines(read_parquet(path)) if is_table else iter_lines(stream)
        converter = ExampleConverter(config)
        parse = parse_icot_line if path.suffix == ".txt" else None
        return replace(collect_examples(path.name, lines, converter, max_rows, parse), sha256=sha256)


def to_json_lines(rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the rows of a table as lines of JSON, which are read as strictly as those of a file."""
    for row in rows:
        yield json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


def collect_examples(
    name: str,
    lines: Iterable[bytes],
    converter: "ExampleConverter",
    max_rows: int | None = None,
    parse: RowParser | None = None,
) -> ExamplesFile:
    """Return at most `max_rows` examples, the problems of other rows, and the SHA-256 of the lines that were read."""
    digest = hashlib.sha256()

    def hash_lines() -> Iterator[bytes]:
        for line in lines:
            digest.update(line)
            yield line

    examples: list[ReasoningExample] = []
    problems: list[RowProblem] = []
    notes = converter.notes
    for result in convert_each(name, parse_lines(hash_lines(), parse), converter.convert):
        if isinstance(result, RowProblem):
            problems.append(result)
        elif result is not None:
            examples.append(result)
        is_unknown = bool(problems) and problems[-1].kind == UNKNOWN_COLUMNS  # which every row would report
        if is_unknown or (max_rows is not None and len(examples) >= max_rows):
            break
    for ours, theirs in converter.unseen_columns.items():  # a held-out file may have our names, or no chains
        notes[f"no row has the field {theirs!r}, which data.columns names for {ours}"] += 1
    lines_of_notes = (f"{name}: {note}" + (f" ({n:,} lines)" if n > 1 else "") for note, n in notes.items())
    return ExamplesFile(tuple(examples), digest.hexdigest(), tuple(lines_of_notes), tuple(problems))


def check_problems(file: ExamplesFile, name: str, config: DataConfig) -> ExamplesFile:
    """Return a file with notes on repeated and skipped rows. Raises `InputError` for problems or without examples."""
    num_invalid = len(file.problems)
    num_rows = num_invalid + len(file.examples)
    should_skip = config.on_invalid_row == "skip"
    if num_invalid and not (should_skip and is_within_skip_limit(num_invalid, num_rows)):
        limit = f"\n{num_invalid:,} of {num_rows:,} rows are invalid; at most 0.1 % may be skipped"
        raise InputError(format_problems(file.problems, name) + (limit if should_skip else ""))
    if not file.examples:
        reasons = "".join(f" ({note})" for note in file.notes[:1])
        raise InputError(f"{name}: contains no row{reasons}; {ACCEPTED_FIELDS}, one object per line")
    questions = {(e.question, e.document, str(e.metadata.get("messages"))) for e in file.examples}
    repeated = len(file.examples) - len(questions)
    notes = [f"{name}: {repeated:,} questions are repeated"] if repeated else []
    notes += [f"skipped: {name}:{p.line}: {p.message}" for p in file.problems]
    return replace(file, notes=(*file.notes, *notes))


class ExampleConverter:
    """Converts the rows of a file, the first of which decides on the columns and the field of the chain.

    `columns` is a key of `COLUMN_CONVERTERS`, by default detected from the first row.
    """

    def __init__(self, config: DataConfig, columns: str | None = None) -> None:
        self.config, self.columns = config, columns
        self.notes: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.chain_field, self.is_first = config.chain_field, True
        self.unseen_columns = dict(config.columns)

    def convert(self, read: dict[str, Any], name: str) -> ReasoningExample | None:
        """Return the example of a row; None for a row without an answer, which is noted."""
        renamed = rename_columns(read, self.config.columns) if self.config.columns else read
        if self.unseen_columns:
            self.unseen_columns = {ours: name for ours, name in self.unseen_columns.items() if ours not in renamed}
        self.columns = self.columns or detect_columns(renamed)
        try:
            row = COLUMN_CONVERTERS[self.columns](renamed)
        except KeyError as missing:
            raise RowError("missing fields", f"no field {missing.args[0]}", "the first row has it") from None
        if row is None:
            self.notes["rows dropped because they have no answer"] += 1
            return None
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
        first_chain = next((field for field in CHAIN_FIELDS if row.get(field)), None)
        if self.chain_field is None and first_chain is not None:
            if self.config.on_invalid_row == "error":
                self.chain_field = first_chain  # so that the rows after it, which have it too, are no problems
            remedy = 'write "steps": [] in rows without one'
            raise RowError("other formats", "has a chain, but the first row has none", remedy, field=first_chain)
        example = parse_example(row, name, self.chain_field, self.config)
        if example.id in self.ids:
            raise RowError("duplicate ids", f"duplicate id {example.id[:60]!r}", "ids must be unique", field="id")
        self.ids.add(example.id)
        self.notes.update(iter_notes(example, self.config, self.columns))
        return example


def parse_example(row: dict[str, Any], name: str, chain_field: str | None, config: DataConfig) -> ReasoningExample:
    numbers = {key: row[key] for key in ("id", "answer") if type(row.get(key)) in (int, float)}
    row = row | {key: normalise_number(number) for key, number in numbers.items()}
    for field in ("question", "answer", *(["id"] if row.get("id") is not None else [])):
        require_text(row, field, ACCEPTED_FIELDS)
    metadata = {key: value for key, value in row.items() if key not in ("id", "question", "answer", chain_field)}
    document = metadata.pop("document", None)
    if not isinstance(document, str | None):
        raise RowError("wrong types", "not a string", "join its parts into one text", field="document")
    steps = parse_steps(row, chain_field, config)
    return ReasoningExample(
        id=row.get("id") or name,
        question=row["question"],
        steps=steps,
        answer=row["answer"],
        metadata=metadata,
        document=document,
        place=name,
    )


def parse_steps(row: dict[str, Any], chain_field: str | None, config: DataConfig) -> tuple[str, ...]:
    if chain_field is None:
        return ()
    others = [field for field in CHAIN_FIELDS if field != chain_field and row.get(field)]
    if chain_field not in row:
        remedy = f"a row before has it; give all rows the field {others[0] if others else chain_field}"
        raise RowError("missing fields", f"no field {chain_field}", remedy)
    value = row[chain_field]
    if value is None or (isinstance(value, str) and chain_field != "steps" and not value.strip()):
        if not others:
            return ()  # as GSM8K-Aug has for some rows
        problem = f"has a chain, but {chain_field} is read"
        raise RowError("other formats", problem, f'set data.chain_field = "{others[0]}"', field=others[0])
    if chain_field != "steps":
        require_text(row, chain_field, ACCEPTED_FIELDS)
        return split_chain(extract_thinking(value), config.chain_split)
    if not isinstance(value, list) or not all(isinstance(step, str) and step.strip() for step in value):
        remedy = 'write ["<<3+4=7>>"], or [] for none; a chain that is one text belongs in the field cot'
        raise RowError("wrong types", "not a list of non-empty strings", remedy, field="steps")
    return tuple(value)


def check_columns(row: dict[str, Any]) -> None:
    missing = [field for field in ("question", "answer") if field not in row]
    if missing:
        names = ", ".join(f'{field} = "FIELD"' for field in (*missing, "cot"))
        problem = f"no {' and no '.join(missing)}; the fields are {make_excerpt(', '.join(row)) or 'none'}"
        raise RowError(UNKNOWN_COLUMNS, problem, f"rename them, or set data.columns = {{ {names} }}")


def iter_notes(example: ReasoningExample, config: DataConfig, columns: str) -> Iterator[str]:
    """Yield a note for each part of a row that training would leave out or write unclearly."""
    for field, value in example.metadata.items() if columns in FORM_COLUMNS else ():
        if field.lower() in UNREAD_TEXTS and any(text not in example.question for text in iter_strings(value)):
            yield f"{make_excerpt(field)}: has a value, which is not part of the question; add it there"
    if not example.steps:
        field = next((x for x in UNREAD_CHAINS if isinstance(example.metadata.get(x), str)), None)
        if field is not None:
            yield f'{field}: not read; if it is the chain of thought, set data.columns = {{ cot = "{field}" }}'
    if config.format == "pccot" and joins_unclearly(example.steps):
        yield UNCLEAR_CHAINS


def joins_unclearly(steps: Sequence[str]) -> bool:
    """Return whether nothing separates two steps that follow one another; steps of one character need nothing."""
    if max(map(len, steps), default=0) < 2:
        return False
    return any(a[-1:].isalnum() and b[:1].isalnum() for a, b in pairwise(steps))


def most_common_answer(examples: Sequence[ReasoningExample]) -> tuple[str, float]:
    """Return the most common answer and its share: the accuracy of a model that ignores the question."""
    answer, count = Counter(example.answer for example in examples).most_common(1)[0]
    return answer, count / len(examples)
