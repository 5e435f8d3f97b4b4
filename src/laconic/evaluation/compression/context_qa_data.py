"""Questions about contexts, in the row format of kvpress: context, question, answer_prefix, answer, max_new_tokens."""

from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.strict_jsonl import RowError, locate_field, make_excerpt, read_rows, require_text

ROW_FORMAT = "a row has context, question, answer_prefix, answer, max_new_tokens"


class ContextQuestion(NamedTuple):
    """A question about a context, which is compressed.

    The answer begins with `answer_prefix`, which may be empty. Some tasks ask for all of the `answers`, others accept
    each.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    task: str | None = None


def parse_question(row: dict[str, Any], text: str, name: str) -> ContextQuestion:
    """Parse a row. Raises `RowError`."""
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


def wrong_type(field: str, expected: str, text: str) -> RowError:
    column = locate_field(text, field)[1]
    return RowError(column, "wrong types", f"{field}: expected {expected}, got {make_excerpt(text, column)}")


def parse_answer_prefix(row: dict[str, Any], text: str) -> str:
    """Parse the beginning of the answer, empty if absent. Raises `RowError`."""
    prefix = row.get("answer_prefix")
    if prefix is not None and not isinstance(prefix, str):
        raise wrong_type("answer_prefix", "a string", text)
    return prefix or ""


def parse_answers(row: dict[str, Any], text: str) -> tuple[str, ...]:
    """Parse the answer or a list of answers. Raises `RowError`."""
    answers = row.get("answer")
    if not isinstance(answers, list):
        return (require_text(row, "answer", text, ROW_FORMAT),)
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise wrong_type("answer", "a list of strings", text)
    return tuple(answers)


def parse_max_new_tokens(row: dict[str, Any], text: str) -> int:
    """Parse the longest answer in tokens. Raises `RowError`."""
    if "max_new_tokens" not in row:
        raise RowError(1, "missing fields", f"max_new_tokens: no such field in {make_excerpt(text)}; {ROW_FORMAT}")
    number = row["max_new_tokens"]
    if type(number) is not int or number < 1:
        raise wrong_type("max_new_tokens", "an integer of at least 1", text)
    return number


def load_context_questions(path: str | Path) -> list[ContextQuestion]:
    """Load the rows of a JSONL or Parquet file. Raises `InputError` for invalid rows."""
    return read_rows(path, parse_question)[0]
