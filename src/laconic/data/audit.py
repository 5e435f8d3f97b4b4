"""A file of rows looked over: its faults, what stands twice, how long the parts are, what would be cut."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, TextConfig
from laconic.data.documents.load import read_documents
from laconic.data.documents.tokenize import tokenize_texts
from laconic.data.problems import RowProblem
from laconic.data.reasoning.contamination import normalise_question
from laconic.data.reasoning.encode import NUMBER_PATTERN, EncodedExample, ReasoningEncoder
from laconic.data.reasoning.read_examples import ACCEPTED_FIELDS, most_common_answer, scan_examples
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

PART_NAMES = ("question", "chain", "chain without its last step", "answer with its prompt", "row")
ProgressCallback = Callable[[str, int, int], None]
AUDIT_CONFIG = DataConfig(
    path="", chain_steps="all", answer_type="text"
)  # how rows are encoded: whole chains, any answer


class LengthQuantiles(NamedTuple):
    """Tokens of a part over the rows, by nearest rank."""

    p50: int
    p90: int
    p99: int
    maximum: int


class ScannedFile(NamedTuple):
    """The rows of a file or set, SHA-256 of its bytes, all its faults, and notes."""

    examples: Sequence[ReasoningExample]
    sha256: str
    problems: Sequence[RowProblem] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class AuditResult:
    """What was found. `twice` are pairs of ids, the first and a later row of one question; `over`, ids of rows cut."""

    num_rows: int
    problems: tuple[RowProblem, ...]
    num_without_chain: int
    num_without_number: int
    majority_answer: tuple[str, float]
    duplicates: tuple[tuple[str, str], ...]
    lengths: Mapping[str, LengthQuantiles] = field(default_factory=dict[str, LengthQuantiles])
    too_long: tuple[str, ...] = ()
    num_unknown_tokens: int = 0


@dataclass(frozen=True)
class DocumentAudit:
    """Documents looked over: how many of each part, their sections and those that stood before, SHA-256 of the file.

    With a tokenizer `tokens` are those of a document, and `rows` the stretches of `context` that are made of them.
    """

    documents_by_part: Mapping[str, int]
    num_sections: int
    num_duplicate_sections: int
    sha256: str
    notes: Sequence[str] = ()
    token_lengths: LengthQuantiles | None = None
    num_rows: int | None = None


def audit_documents(
    path: Path, tokenizer: Tokenizer | None, row_tokens: int | None, progress: ProgressCallback
) -> DocumentAudit:
    """A text, or rows of texts, looked over. Raises `BadInput` (66) with all the faults."""
    documents, notes = read_documents(str(path), TextConfig())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sections = [section for each in documents for section in each.sections]
    named = {part: sum(each.part == part for each in documents) for part in ("train", "valid", "test", None)}
    parts = {part or "unsaid": n for part, n in named.items() if n}
    found = DocumentAudit(parts, len(sections), len(sections) - len(set(sections)), digest, notes)
    if tokenizer is None:
        return found
    counts = [len(ids) for ids in tokenize_texts([each.text for each in documents], tokenizer, progress)]
    stretches = None if not row_tokens else sum(n // row_tokens + (n % row_tokens > 1) for n in counts)
    return replace(found, token_lengths=compute_quantiles(counts), num_rows=stretches)


def scan_file(path: Path) -> ScannedFile:
    """The rows of a file, with every fault in place of an error for them."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a file of rows, or a set that laconic data list names")
    reader = scan_examples(path, AUDIT_CONFIG)
    notes = [text + (f" ({n:,} lines)" if n > 1 else "") for text, n in reader.notes.items()]
    notes += ["blank lines at the end"] if reader.first_blank_line else []
    if not reader.examples and not reader.problems:
        reader.problems.append(RowProblem(0, 0, "empty files", f"{path.name}: no row in it; {ACCEPTED_FIELDS}"))
    return ScannedFile(reader.examples, reader.hash.hexdigest(), reader.problems, notes)


def audit_examples(
    scanned: ScannedFile, tokenizer: Tokenizer | None, max_tokens: int | None, progress: ProgressCallback
) -> AuditResult:
    """Rows looked over; lengths by the tokenizer, rows cut where they are longer than `context` tokens."""
    rows = scanned.examples
    checked = AuditResult(
        num_rows=len(rows),
        problems=tuple(scanned.problems),
        num_without_chain=sum(not example.steps for example in rows),
        num_without_number=sum(NUMBER_PATTERN.search(example.answer) is None for example in rows),
        majority_answer=most_common_answer(rows) if rows else ("", 0.0),
        duplicates=find_duplicates(rows),
    )
    return checked if tokenizer is None else add_token_lengths(checked, rows, tokenizer, max_tokens, progress)


def add_token_lengths(
    result: AuditResult,
    examples: Sequence[ReasoningExample],
    tokenizer: Tokenizer,
    max_tokens: int | None,
    progress: ProgressCallback,
) -> AuditResult:
    """The same with lengths, and the faults of rows that cannot be encoded."""
    encoder = ReasoningEncoder(tokenizer, AUDIT_CONFIG.model_copy(update={"eos_token": fallback_eos_token(tokenizer)}))
    counts: dict[str, list[int]] = {part: [] for part in PART_NAMES}
    faults, over, unknown = list(result.problems), [], 0
    for done, example in enumerate(examples):
        progress("rows", done, len(examples))
        try:
            row = encoder.encode_example(example)
        except InputError as error:
            faults.append(RowProblem(0, 0, "that cannot be encoded", str(error)))
            continue
        unknown += row.num_unknown
        for part, n in zip(PART_NAMES, count_part_tokens(row), strict=True):
            counts[part].append(n)
        over += [row.id] if max_tokens is not None and len(row) > max_tokens else []
    lengths = {part: compute_quantiles(all) for part, all in counts.items() if all}
    return replace(result, problems=tuple(faults), lengths=lengths, too_long=tuple(over), num_unknown_tokens=unknown)


def count_part_tokens(row: EncodedExample) -> tuple[int, int, int, int, int]:
    """Tokens of the parts, in the order of PARTS."""
    short = sum(step < row.chain_step_index[-1] for step in row.chain_step_index)
    return len(row.question_ids), len(row.chain_ids), short, len(row.answer_ids), len(row)


def fallback_eos_token(tokenizer: Tokenizer) -> str | None:
    """A token to end answers with where the tokenizer's files name none: lengths do not depend on which."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return (
        None if tokenizer.eos_token_id is not None else next((token.content for token in added if token.special), None)
    )


def find_duplicates(examples: Sequence[ReasoningExample]) -> tuple[tuple[str, str], ...]:
    """Pairs of rows that ask one question, whatever its capitals, spaces and marks."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(normalise_question(e.question), e.id), e.id) for e in examples]
    return tuple((a, b) for a, b in pairs if a != b)


def compute_quantiles(counts: Sequence[int]) -> LengthQuantiles:
    """Median, 90th and 99th hundredth, and the most."""
    ordered = sorted(counts)
    return LengthQuantiles(*(ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99, 1)))
