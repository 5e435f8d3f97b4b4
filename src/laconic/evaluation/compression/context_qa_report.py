"""Context question answering and in-context classification: one table for terminal and page, and JSON."""

from typing import Any

from laconic.console import pluralize
from laconic.evaluation.compression.context_qa import (
    METRICS,
    ConditionScores,
    ICLScore,
    compute_icl_score,
    count_test_texts,
    majority_accuracy,
    score_answers,
)
from laconic.evaluation.compression.plots import condition_title
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


def answer_scores(result: RunResult) -> list[ConditionScores]:
    """Return the scores of each condition of context questions."""
    return [score_answers(result.items_by_seed, name) for name in result.conditions]


def label_scores(result: RunResult) -> list[ICLScore]:
    """Return the scores of each condition of in-context classification."""
    return [compute_icl_score(result.items_by_seed, name) for name in result.conditions]


def list_examples(result: RunResult) -> list[ExampleQuestion]:
    """Return the first questions of a file with the answers of every condition; of several seeds, the first.

    An answer counts as correct if it matches.
    """
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


def count_contexts(result: RunResult) -> int:
    """Return the number of contexts that questions are about."""
    return len({item.shared["context"] for item in result.items_by_seed[0]})


def result_to_json(result: RunResult) -> dict[str, Any]:
    """Return the scores as a JSON object."""
    items, kind = result.items_by_seed[0], result.variant["kind"]
    data: dict[str, Any] = {
        "run": result.run,
        "file": result.task,
        "kind": kind,
        "seeds": list(result.seeds),
        "items": len(items) if kind == "answers" else count_test_texts(items),
    }
    if kind == "labels":
        data |= {"majority_accuracy": majority_accuracy(items), "num_labels": len(items[0].shared["label_tokens"])}
        return figures_to_json(data | {"conditions": label_scores(result)})
    return figures_to_json(data | {"contexts": count_contexts(result), "conditions": answer_scores(result)})


def metric_columns(name: str) -> tuple[Column, Column]:
    """Return the columns of a metric and of its gain over no context."""

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
    items, title = result.items_by_seed[0], f"{result.run}, {result.task}"
    if result.variant["kind"] == "answers":
        questions = pluralize(len(items), "question")
        caption = f"{title}: {questions} about {pluralize(count_contexts(result), 'context')}"
        return build_table(ANSWER_COLUMNS, answer_scores(result), caption)
    majority = f"majority baseline {format_percent(majority_accuracy(items))} %"
    texts, num_labels = pluralize(count_test_texts(items), "text"), len(items[0].shared["label_tokens"])
    caption = f"{title}: {texts}, {num_labels} labels; {majority}"
    return build_table(LABEL_COLUMNS, label_scores(result), caption)


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
