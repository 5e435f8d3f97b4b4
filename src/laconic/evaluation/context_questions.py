"""Rows of questions about contexts, as kvpress's data sets have them; a row may name a document instead of a text."""

from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.strict_jsonl import RowError, read_rows, require_text

ROW_FORMAT = (
    "a row has context (a text) or document (name of a document), question and answer, and optionally answer_prefix "
    "and max_new_tokens"
)


class ContextQuestion(NamedTuple):
    """A question about a context: a text, or the name of a document.

    `answer_prefix` begins the answer as a sentence. Some tasks ask for all of the `answers`, others accept each.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    answer_prefix: str = ""
    max_new_tokens: int = 32
    is_document_name: bool = False


def parse_question(row: dict[str, Any], name: str) -> ContextQuestion:
    is_document_name = row.get("context") is None and row.get("document") is not None
    context, question = (
        require_text(row, field, ROW_FORMAT) for field in ("document" if is_document_name else "context", "question")
    )
    answers = row.get("answer")
    prefix = row.get("answer_prefix")
    max_new_tokens = row.get("max_new_tokens", 32)
    if not isinstance(answers, list):
        answers = [require_text(row, "answer", ROW_FORMAT)]
    elif not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise RowError("wrong types", "expected a list of strings", field="answer")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RowError("wrong types", "expected an integer of at least 1", ROW_FORMAT, field="max_new_tokens")
    if prefix is not None and not isinstance(prefix, str):
        raise RowError("wrong types", "expected a string", field="answer_prefix")
    return ContextQuestion(context, question, tuple(answers), prefix or "", max_new_tokens, is_document_name)


def load_questions(path: str | Path) -> list[ContextQuestion]:
    """Load the rows of a JSONL or Parquet file. Raises `InputError` for invalid rows."""
    return read_rows(path, parse_question)
