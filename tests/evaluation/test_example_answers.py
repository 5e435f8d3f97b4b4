"""Example answers: one line on the terminal, the whole text on the page."""

from laconic.evaluation.example_answers import ExampleAnswer, ExampleQuestion, build_examples_table, format_examples
from laconic.evaluation.report.page import PageSection, render_page

CHAIN = "First, " + "add one. " * 40 + "The answer is 41."
EXAMPLE = ExampleQuestion(
    "gsm8k", "How\nmany?", "41", (ExampleAnswer("kava", CHAIN, True), ExampleAnswer("a", "", False))
)


def test_format_examples_shortens_the_middle_of_long_answers() -> None:
    question, expected, answer, empty = format_examples([EXAMPLE])
    assert question == "gsm8k, example: How many?"
    assert expected == "  expected: 41"
    assert answer.startswith("  kava, correct: First, add one.")
    assert answer.endswith(" … " + CHAIN[-68:])
    assert len(answer) <= len("  kava, correct: ") + 140
    assert empty == "  a, wrong: (empty)"


def test_build_examples_table_has_whole_texts() -> None:
    assert build_examples_table([EXAMPLE]).rows[0] == ["gsm8k", "How\nmany?", "41", "kava", CHAIN, "correct"]


def test_build_examples_table_does_not_break_the_outcome() -> None:
    """Cells of text are broken within words where others are long; those of class n are not."""
    page = render_page("Answers", [PageSection("Examples", [build_examples_table([EXAMPLE])])])
    assert '<td class="n">correct</td>' in page
    assert f"<td>{CHAIN}</td>" in page
