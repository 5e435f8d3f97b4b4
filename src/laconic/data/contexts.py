"""Questions about a context (E4), in the rows that kvpress publishes: context, question, answer_prefix, answer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.lines import Fault, place
from laconic.data.problems import excerpt
from laconic.data.records import read_records, text_of

FIELDS = "context, question, answer_prefix, answer, max_new_tokens"
ACCEPTED = f"a row has {FIELDS}"


class Asked(NamedTuple):
    """A question about a context; any of `answers` may be right, or all of them asked for, as its task has it.

    `prefix` begins the answer and may be empty, `tokens` are the most that an answer may have, `task` what the row
    says it belongs to.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    tokens: int
    task: str | None = None


def asked(row: dict[str, Any], text: str, name: str) -> Asked:
    """A row. Raises `Fault`."""
    context, question = (text_of(row, field, text, ACCEPTED) for field in ("context", "question"))
    task = row.get("task")
    return Asked(
        context, question, prefix(row, text), answers(row, text), tokens(row, text), None if task is None else str(task)
    )


def prefix(row: dict[str, Any], text: str) -> str:
    """How the answer begins; nothing if that is empty or absent. Raises `Fault`."""
    found = row.get("answer_prefix")
    if found is not None and not isinstance(found, str):
        column = place(text, "answer_prefix")[1]
        raise Fault(column, "wrong types", f"answer_prefix: no text: {excerpt(text, column)}; put it in quotes")
    return found or ""


def answers(row: dict[str, Any], text: str) -> tuple[str, ...]:
    """The answer, or each of a list. Raises `Fault`."""
    found = row.get("answer")
    if not isinstance(found, list):
        return (text_of(row, "answer", text, ACCEPTED),)
    if not found or not all(isinstance(each, str) and each.strip() for each in found):
        column = place(text, "answer")[1]
        raise Fault(column, "wrong types", f"answer: no list of texts: {excerpt(text, column)}; put each in quotes")
    return tuple(found)


def tokens(row: dict[str, Any], text: str) -> int:
    """The most tokens of an answer. Raises `Fault`."""
    found = row.get("max_new_tokens")
    if type(found) is not int or found < 1:
        column = place(text, "max_new_tokens")[1]
        raise Fault(column, "wrong types", f"max_new_tokens: no number from 1: {excerpt(text, column)}; {ACCEPTED}")
    return found


def read_contexts(path: str | Path) -> list[Asked]:
    """The rows of a file, JSONL or Parquet. Raises `BadInput`."""
    return read_records(path, asked)[0]


def by_context(rows: Iterable[Asked]) -> dict[str, list[int]]:
    """The places of the questions about each context, which so is compressed once."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.context, []).append(i)
    return found
