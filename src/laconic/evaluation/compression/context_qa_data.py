"""Questions about a context (E4), in the rows that kvpress publishes: context, question, answer_prefix, answer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.strict_jsonl import RowError, locate_field, make_excerpt, read_rows, require_text

ROW_FIELDS = "context, question, answer_prefix, answer, max_new_tokens"
ROW_FORMAT = f"a row has {ROW_FIELDS}"


class ContextQuestion(NamedTuple):
    """A question about a context; any of `answers` may be right, or all of them asked for, as its task has it.

    `prefix` begins the answer and may be empty, `tokens` are the most that an answer may have, `task` what the row
    says it belongs to.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    task: str | None = None


def parse_question(row: dict[str, Any], text: str, name: str) -> ContextQuestion:
    """A row. Raises `Fault`."""
    context, question = (require_text(row, field, text, ROW_FORMAT) for field in ("context", "question"))
    task = row.get("task")
    return ContextQuestion(
        context,
        question,
        parse_answer_prefix(row, text),
        parse_answers(row, text),
        parse_max_new_tokens(row, text),
        None if task is None else str(task),
    )


def parse_answer_prefix(row: dict[str, Any], text: str) -> str:
    """How the answer begins; nothing if that is empty or absent. Raises `Fault`."""
    found = row.get("answer_prefix")
    if found is not None and not isinstance(found, str):
        column = locate_field(text, "answer_prefix")[1]
        raise RowError(column, "wrong types", f"answer_prefix: no text: {make_excerpt(text, column)}; put it in quotes")
    return found or ""


def parse_answers(row: dict[str, Any], text: str) -> tuple[str, ...]:
    """The answer, or each of a list. Raises `Fault`."""
    found = row.get("answer")
    if not isinstance(found, list):
        return (require_text(row, "answer", text, ROW_FORMAT),)
    if not found or not all(isinstance(each, str) and each.strip() for each in found):
        column = locate_field(text, "answer")[1]
        raise RowError(
            column, "wrong types", f"answer: no list of texts: {make_excerpt(text, column)}; put each in quotes"
        )
    return tuple(found)


def parse_max_new_tokens(row: dict[str, Any], text: str) -> int:
    """The most tokens of an answer. Raises `Fault`."""
    found = row.get("max_new_tokens")
    if type(found) is not int or found < 1:
        column = locate_field(text, "max_new_tokens")[1]
        raise RowError(
            column, "wrong types", f"max_new_tokens: no number from 1: {make_excerpt(text, column)}; {ROW_FORMAT}"
        )
    return found


def load_context_questions(path: str | Path) -> list[ContextQuestion]:
    """The rows of a file, JSONL or Parquet. Raises `BadInput`."""
    return read_rows(path, parse_question)[0]


def group_by_context(rows: Iterable[ContextQuestion]) -> dict[str, list[int]]:
    """The places of the questions about each context, which so is compressed once."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.context, []).append(i)
    return found
