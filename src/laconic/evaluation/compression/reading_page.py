"""Tables and page of the chapter demo (`laconic demo read`)."""

from collections.abc import Sequence
from statistics import median

from laconic.evaluation.compression.reading_demo import ReadingComparison
from laconic.evaluation.report.page import PageSection, render_details, render_facts, render_page, render_table
from laconic.evaluation.tables import Column, Table, build_table
from laconic.experiment.from_recipe.cost import format_bytes

LEAD = (
    "A model answers questions about a chapter: without the text, with the full text, with a memory that keeps an "
    "eighth of the chapter's keys and values, and with the last eighth of its tokens."
)


def build_costs_table(comparison: ReadingComparison) -> Table:
    """Return the results: a row per condition."""
    columns = [
        Column("chapter", lambda row: row.name, is_text=True),
        Column("right answers", lambda row: f"{sum(row.correct)} of {len(row.correct)}"),
        Column("nats per token", lambda row: f"{row.loss:.2f}"),
        Column("positions", lambda row: f"{row.positions:,.0f}"),
        Column("bytes", lambda row: format_bytes(row.num_bytes)),
        Column("first token", lambda row: f"{median(row.first_token_seconds):.2f} s"),
    ]
    return build_table(columns, comparison.results)


def build_answers_table(comparison: ReadingComparison, index: int) -> Table:
    """Return the answers to one question: a row per condition."""
    question = comparison.questions[index]
    columns: list[Column] = [
        Column("chapter", lambda row: row.name, is_text=True),
        Column("right", lambda row: "yes" if row.correct[index] else "no", is_text=True),
        Column("answer", lambda row: row.answers[index] or "–", is_text=True),
    ]
    return build_table(columns, comparison.results, f"{question.text} ({question.answer})")


def list_notes(comparison: ReadingComparison) -> list[str]:
    """Explain the columns, and say what the comparison does not show."""
    return [
        "An answer is right if it contains the words in parentheses. Three questions say little about a model, and "
        "SmolLM2-135M is small: of about twenty questions that were tried with the full text, it answered few right, "
        "and these are among them.",
        "nats per token: loss on four passages of the chapter that the model is asked to repeat. KVzip, which chose "
        "the memory, ranks keys by how much the model attends to them while it repeats the chapter.",
        f"positions: per KV head, on average, with the opening of the message. Heads of the memory differ in size: the "
        f"largest keeps {comparison.largest_head:,}. A memory in use takes as many bytes as its keys and values in the "
        "file.",
        "bytes: keys and values of the text, or the file of the memory.",
        f"first token: median; the text is read or the memory loaded each time. Writing the memory took "
        f"{comparison.compression_seconds:.1f} s, once.",
    ]


def render_reading_page(
    comparison: ReadingComparison, title: str, chapter: str, facts: Sequence[tuple[str, str]]
) -> str:
    """Return the HTML page; `facts` are names and values of the run: model, threads, time."""
    answers = [render_table(build_answers_table(comparison, i)) for i in range(len(comparison.questions))]
    sections = [
        PageSection("Results", [render_table(build_costs_table(comparison)), *list_notes(comparison)]),
        PageSection("Answers", answers),
        PageSection("Run", [render_facts(facts)]),
        PageSection("Chapter", [render_details(title, chapter.strip().split("\n\n"))]),
    ]
    return render_page("Reading a chapter with an eighth of its memory", sections, [LEAD])
