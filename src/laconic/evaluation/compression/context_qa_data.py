"""Questions about contexts, in the row format of kvpress: context, question, answer_prefix, answer, max_new_tokens."""

from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.strict_jsonl import RowError, read_rows, require_text

ROW_FORMAT = "a row has context, question, answer_prefix, answer, max_new_tokens"


class ContextQuestion(NamedTuple):
    """A question about a context; some tasks ask for all of the `answers`, others accept each."""

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    task: str | None = None


def parse_question(row: dict[str, Any], name: str) -> ContextQuestion:
    """Parse a row. Raises `RowError`."""
    context, question = (require_text(row, field, ROW_FORMAT) for field in ("context", "question"))
    answers, max_new_tokens, task = row.get("answer"), row.get("max_new_tokens"), row.get("task")
    if not isinstance(answers, list):
        answers = [require_text(row, "answer", ROW_FORMAT)]
    elif not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise RowError("wrong types", "expected a list of strings", field="answer")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RowError("wrong types", "expected an integer of at least 1", ROW_FORMAT, field="max_new_tokens")
    prefix = parse_answer_prefix(row)
    return ContextQuestion(
        context, question, prefix, tuple(answers), max_new_tokens, None if task is None else str(task)
    )


def parse_answer_prefix(row: dict[str, Any]) -> str:
    """Parse the beginning of the answer, empty if absent. Raises `RowError`."""
    prefix = row.get("answer_prefix")
    if prefix is not None and not isinstance(prefix, str):
        raise RowError("wrong types", "expected a string", field="answer_prefix")
    return prefix or ""


def load_context_questions(path: str | Path) -> list[ContextQuestion]:
    """Load the rows of a JSONL or Parquet file. Raises `InputError` for invalid rows."""
    return read_rows(path, parse_question)[0]
