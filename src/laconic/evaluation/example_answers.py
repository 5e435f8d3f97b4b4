"""The first questions of a set with the expected and the generated answers, for the terminal, the page and JSON."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from laconic.evaluation.tables import Column, Table, build_table

NUM_EXAMPLES = 3
MAX_LINE_CHARS = 140  # of a question or an answer on the terminal


class ExampleAnswer(NamedTuple):
    """A generated answer; `title` names the run or the condition."""

    title: str
    text: str
    is_correct: bool


class ExampleQuestion(NamedTuple):
    """A question with its expected answer and the answers of all runs or conditions."""

    dataset: str
    question: str
    expected: str
    answers: tuple[ExampleAnswer, ...]


def format_examples(examples: Sequence[ExampleQuestion]) -> Iterator[str]:
    """Yield the lines for a terminal, where long texts lose their middle: a chain of thought ends with its answer."""
    for example in examples:
        yield f"{example.dataset}, example: {shorten_middle(example.question)}"
        yield f"  expected: {shorten_middle(example.expected)}"
        for answer in example.answers:
            yield f"  {answer.title}, {describe_outcome(answer)}: {shorten_middle(answer.text) or '(empty)'}"


def build_examples_table(examples: Sequence[ExampleQuestion]) -> Table:
    return build_table(COLUMNS, [(example, answer) for example in examples for answer in example.answers])


def describe_outcome(answer: ExampleAnswer) -> str:
    return "correct" if answer.is_correct else "wrong"


def shorten_middle(text: str) -> str:
    line = " ".join(text.split())
    half = (MAX_LINE_CHARS - 3) // 2
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:half]} … {line[-half:]}"


COLUMNS = (
    Column("data set", lambda row: row[0].dataset, is_text=True),
    Column("question", lambda row: row[0].question, is_text=True),
    Column("expected", lambda row: row[0].expected, is_text=True),
    Column("answered by", lambda row: row[1].title, is_text=True),
    Column("answer", lambda row: row[1].text, is_text=True),
    Column("", lambda row: describe_outcome(row[1])),  # not text, which is broken within words beside long texts
)
