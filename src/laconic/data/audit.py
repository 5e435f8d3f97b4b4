"""Audit a data file: invalid rows, repeated questions, token lengths, rows over a limit."""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, TextConfig
from laconic.console import ProgressFn
from laconic.data.documents.load import read_documents
from laconic.data.documents.tokenize import tokenize_texts
from laconic.data.reasoning.answer_matching import CODI
from laconic.data.reasoning.chat import has_history
from laconic.data.reasoning.contamination import identify_question
from laconic.data.reasoning.encode import NUMBER_PATTERN, EncodedExample, ReasoningEncoder, find_number
from laconic.data.reasoning.read_examples import ACCEPTED_FIELDS, ExamplesFile, most_common_answer, scan_examples
from laconic.data.strict_jsonl import RowProblem, check_data_file
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

PART_NAMES = ("question", "chain", "chain without its last step", "answer with its prompt", "row")
AUDIT_CONFIG = DataConfig(path="", chain_steps="all")  # whole chains
HISTORY_NOTE = 'conversations of several messages are read only with data.format = "chat", here and in a recipe'


@dataclass(frozen=True)
class RowsAudit:
    """Audit of reasoning examples; the names are those of `laconic data check --format json`."""

    sha256: str
    rows: int  # number of valid rows
    problems: Sequence[Mapping[str, Any]]  # of rows that cannot be read or encoded
    notes: Sequence[str]
    rows_without_chain: int
    answer_type: str  # "number", or "text" if most answers have no number
    # ids of rows whose answer contains a number but is not a plain one, which cannot be judged
    unclear_answers: Sequence[str]
    majority_answer: Mapping[str, str | float]
    duplicates: Sequence[tuple[str, str]]  # pairs of ids that have the same question
    tokens: Mapping[str, Mapping[str, int]]  # quantiles of token lengths by part; empty without a tokenizer
    unknown_tokens: int  # in questions and chains
    too_long: Sequence[str]  # ids of rows over the token limit


@dataclass(frozen=True)
class DocumentAudit:
    documents_by_part: Mapping[str, int]  # documents of each split, "unspecified" for those whose rows name none
    num_sections: int
    num_duplicate_sections: int  # sections that repeat an earlier one
    sha256: str
    notes: Sequence[str] = ()
    token_lengths: Mapping[str, int] | None = None  # quantiles of the tokens of a document, if a tokenizer was given
    num_rows: int | None = None  # training rows that the documents give, if a row length was given


def audit_documents(
    path: Path, tokenizer: Tokenizer | None, row_tokens: int | None, progress: ProgressFn, text_field: str = "text"
) -> DocumentAudit:
    """Audit a text file or rows of texts. Raises `InputError` with all problems."""
    documents, notes = read_documents(str(path), TextConfig(text_field=text_field))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sections = [section for document in documents for section in document.sections]
    counts = {part: sum(doc.part == part for doc in documents) for part in ("train", "valid", "test", None)}
    by_part = {part or "unspecified": n for part, n in counts.items() if n}
    result = DocumentAudit(by_part, len(sections), len(sections) - len(set(sections)), digest, notes)
    if tokenizer is None:
        return result
    lengths = [len(ids) for ids in tokenize_texts([document.text for document in documents], tokenizer, progress)]
    num_rows = sum(n // row_tokens + (n % row_tokens > 1) for n in lengths) if row_tokens else None
    return replace(result, token_lengths=compute_quantiles(lengths), num_rows=num_rows)


def scan_file(path: Path, config: DataConfig = AUDIT_CONFIG) -> ExamplesFile:
    """Read the rows of a file, with its problems as values. Raises `InputError` if it does not exist."""
    check_data_file(path)
    file = scan_examples(path, config)
    empty = RowProblem(0, "empty files", f"{path.name}: contains no row; {ACCEPTED_FIELDS}")
    return file if file.examples or file.problems else replace(file, problems=(empty,))


def audit_examples(
    file: ExamplesFile,
    tokenizer: Tokenizer | None,
    max_tokens: int | None,
    progress: ProgressFn,
    config: DataConfig = AUDIT_CONFIG,
) -> RowsAudit:
    """Audit reasoning examples as training reads them; without a tokenizer, token lengths are left out.

    Unless `config` says it, answers are numbers, and others are problems, or texts if most of them have no number.
    """
    problems = list(file.problems)
    rows: list[ReasoningExample] = []
    num_texts = sum(NUMBER_PATTERN.search(example.answer) is None for example in file.examples)
    is_text = 2 * num_texts > len(file.examples)
    if "answer_type" in config.model_fields_set:
        is_text = config.answer_type == "text"
    config = config.model_copy(update={"answer_type": "text" if is_text else "number"})
    for example in file.examples:
        try:
            find_number(example.answer, config)
            rows.append(example)
        except InputError as error:
            problems.append(RowProblem(0, "without a number", f"row {example.label}: {error}"))
    counts: list[tuple[int, ...]] = []
    too_long: list[str] = []
    num_unknown = 0
    for row in [] if tokenizer is None else encode_rows(rows, tokenizer, config, problems, progress):
        steps = row.chain_step_index  # ascending
        without_last = bisect_left(steps, steps[-1]) if steps else 0
        counts.append((len(row.question_ids), len(row.chain_ids), without_last, len(row.answer_ids), len(row)))
        num_unknown += row.num_unknown
        if max_tokens is not None and len(row) > max_tokens:
            too_long.append(row.id)
    answer, share = most_common_answer(rows) if rows else ("", 0.0)
    ignores_history = config.format != "chat" and any(map(has_history, rows))
    return RowsAudit(
        sha256=file.sha256,
        rows=len(rows),
        problems=[problem._asdict() for problem in problems],
        notes=[*file.notes, HISTORY_NOTE] if ignores_history else list(file.notes),
        rows_without_chain=sum(not example.steps for example in rows),
        answer_type=config.answer_type,
        unclear_answers=[] if is_text else [row.id for row in rows if not CODI.is_valid_gold(row.answer)],
        majority_answer={"answer": answer, "share": share},
        duplicates=find_duplicates(rows),
        tokens=dict(zip(PART_NAMES, map(compute_quantiles, zip(*counts, strict=True)), strict=False)),
        unknown_tokens=num_unknown,
        too_long=too_long,
    )


def encode_rows(
    examples: Sequence[ReasoningExample],
    tokenizer: Tokenizer,
    config: DataConfig,
    problems: list[RowProblem],
    progress: ProgressFn,
) -> Iterator[EncodedExample]:
    """Yield encoded rows, and add the problems of others; conversations need the chat template."""
    values: dict[str, str | None] = {}
    if tokenizer.chat_template and any(map(has_history, examples)):
        values["format"] = "chat"
    if tokenizer.eos_token_id is None:  # then any special token, since lengths do not depend on which
        added = tokenizer.backend.get_added_tokens_decoder().values()
        values["eos_token"] = next((token.content for token in added if token.special), None)
    encoder = ReasoningEncoder(tokenizer, config.model_copy(update=values))
    for done, example in enumerate(examples):
        if done % 100 == 0:
            progress("rows", done, len(examples))
        try:
            row = encoder.encode_example(example)
        except InputError as error:
            problems.append(RowProblem(0, "that cannot be encoded", str(error)))
        else:
            yield row


def find_duplicates(examples: Sequence[ReasoningExample]) -> list[tuple[str, str]]:
    """Return pairs of ids (the first row, a later row) with the same question, up to case, spaces and punctuation."""
    questions = [identify_question(example, with_document=False) for example in examples]
    counts = Counter(questions)
    first_ids: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for question, example in zip(questions, examples, strict=True):
        if counts[question] > 1:  # only then compare documents, which are long
            first = first_ids.setdefault(identify_question(example), example.id)
            if first != example.id:
                pairs.append((first, example.id))
    return pairs


def compute_quantiles(counts: Sequence[int]) -> dict[str, int]:
    """Return the median, the 90th and 99th percentile, and the maximum, by nearest rank."""
    quantiles = np.percentile(counts, (50, 90, 99, 100), method="inverted_cdf").tolist()
    return dict(zip(("p50", "p90", "p99", "maximum"), quantiles, strict=True))
