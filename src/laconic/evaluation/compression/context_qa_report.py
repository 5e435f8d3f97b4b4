"""Context question answering and in-context classification: one table for terminal and page, and JSON."""

from collections.abc import Sequence
from typing import Any

from laconic.console import pluralize
from laconic.evaluation.compression.context_qa import (
    METRICS,
    ConditionScores,
    compute_icl_score,
    count_test_texts,
    majority_accuracy,
    score_answers,
)
from laconic.evaluation.compression.table import condition_title
from laconic.evaluation.example_answers import (
    NUM_EXAMPLES,
    ExampleAnswer,
    ExampleQuestion,
    build_examples_table,
    format_examples,
)
from laconic.evaluation.report.page import PageSection, render_table
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import (
    Column,
    Table,
    build_table,
    figures_to_json,
    format_count,
    format_percent,
    format_signed,
    format_with_error,
)


def score_conditions(result: RunResult) -> Sequence[Any]:
    """Return `ConditionScores` of context questions, or `ICLScore` of in-context classification."""
    score = score_answers if result.variant["kind"] == "answers" else compute_icl_score
    return [score(result.items_by_seed, name) for name in result.conditions]


def list_examples(result: RunResult) -> list[ExampleQuestion]:
    """Return the first questions of a file with the answers of every condition; of several seeds, the first."""
    examples: list[ExampleQuestion] = []
    for item in result.items_by_seed[0][:NUM_EXAMPLES]:
        outputs = [(name, str(item.conditions[name]["output"])) for name in result.conditions]
        gold = item.shared["answers"]
        answers = tuple(
            ExampleAnswer(f"{result.run}, {condition_title(name)}", text, METRICS["match"](text, gold) == 1)
            for name, text in outputs
        )
        examples.append(ExampleQuestion(result.task, item.shared["question"], " or ".join(gold), answers))
    return examples


def count_items(result: RunResult) -> dict[str, Any]:
    """Return the number of questions and of their contexts; or of texts and labels, and the majority baseline."""
    items = result.items_by_seed[0]
    if result.variant["kind"] == "answers":
        return {"items": len(items), "contexts": len({item.shared["context"] for item in items})}
    num_labels = len(items[0].shared["label_tokens"])
    return {"items": count_test_texts(items), "majority_accuracy": majority_accuracy(items), "num_labels": num_labels}


def result_to_json(result: RunResult) -> dict[str, Any]:
    data = {
        "run": result.run,
        "file": result.task,
        "kind": result.variant["kind"],
        "seeds": result.seeds,
        **count_items(result),
        "conditions": score_conditions(result),
    }
    return figures_to_json(data)


def metric_columns(name: str) -> tuple[Column, Column]:
    def format_gain(score: ConditionScores) -> str:
        x = score.metrics[name]
        gain = format_with_error(format_signed(100 * x.gain, 1), 100 * x.gain_se, 1)
        return "–" if score.condition == "none" else gain

    def format_metric(score: ConditionScores) -> str:
        x = score.metrics[name]
        return format_with_error(format_percent(x.mean.mean), 100 * x.se, 1)

    return Column(f"{name}, %", format_metric), Column("gain", format_gain)


ANSWER_COLUMNS = (
    Column("context", lambda score: condition_title(score.condition), is_text=True),
    Column("before", lambda score: format_count(score.context_size)),
    *(column for name in METRICS for column in metric_columns(name)),
)
LABEL_COLUMNS = (
    Column("demonstrations", lambda score: score.condition, is_text=True),
    Column("before", lambda score: format_count(score.context_size)),
    Column(
        "accuracy, %",
        lambda score: format_percent(score.accuracy) + ("" if score.std is None else f" ± {format_percent(score.std)}"),
    ),
    Column("chosen on validation", lambda score: ", ".join(dict.fromkeys(score.variants))),
)
NOTES = {
    "answers": "before: vectors or tokens before the question. ±: standard error over contexts. gain: over no context, "
    "paired. truncated: as many last tokens of the context as there are vectors. match: normalized words equal those "
    "of an answer. F1: of words. substring match: share of the answers that occur in the output.",
    "labels": "The label with the least mean nats per token is chosen. before: vectors or tokens of demonstrations. ±: "
    "standard deviation over orders of demonstrations and seeds. last tokens: as many of the demonstrations' text as "
    "they have vectors. Whether demonstrations are balanced by label and scores are calibrated is chosen on validation "
    "texts. A condition at or below the majority baseline shows no in-context learning.",
}


def build_score_table(result: RunResult) -> Table:
    """Return a row for each condition."""
    counts, title = count_items(result), f"{result.run}, {result.task}"
    if result.variant["kind"] == "answers":
        questions = pluralize(counts["items"], "question")
        caption = f"{title}: {questions} about {pluralize(counts['contexts'], 'context')}"
        return build_table(ANSWER_COLUMNS, score_conditions(result), caption)
    majority = f"majority baseline {format_percent(counts['majority_accuracy'])} %"
    caption = f"{title}: {pluralize(counts['items'], 'text')}, {counts['num_labels']} labels; {majority}"
    return build_table(LABEL_COLUMNS, score_conditions(result), caption)


def list_blocks(result: RunResult) -> list[Table | str]:
    """Return what a terminal shows of a result: the table, its legend, and the first answers."""
    examples = list_examples(result) if result.variant["kind"] == "answers" else []
    return [build_score_table(result), NOTES[result.variant["kind"]], *format_examples(examples)]


def build_file_section(result: RunResult) -> PageSection:
    """Return the section of a page about a run on a file."""
    kind, table = result.variant["kind"], render_table(build_score_table(result))
    if kind == "labels":
        return PageSection(f"In-context classification: {result.task}", [table, NOTES[kind]])
    examples = render_table(build_examples_table(list_examples(result)))
    return PageSection(f"Context question answering: {result.task}", [table, NOTES[kind], examples])
