"""Context question answering and in-context classification as lines of text, as JSON, and as sections of a page."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from laconic.evaluation.compression.context_qa import (
    METRICS,
    ConditionScores,
    ICLScore,
    count_test_texts,
    majority_accuracy,
    score_answers,
    score_labels,
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
from laconic.evaluation.tables import Column, build_table, figures_to_json, format_count, format_percent, format_signed


def answer_scores(result: RunResult) -> list[ConditionScores]:
    """Return the scores of each condition of context questions."""
    return [score_answers(result.items_by_seed, name) for name in result.conditions]


def label_scores(result: RunResult) -> list[ICLScore]:
    """Return the scores of each condition of in-context classification."""
    return [score_labels(result.items_by_seed, name) for name in result.conditions]


def list_examples(result: RunResult) -> list[ExampleQuestion]:
    """Return the first questions of a file with the answers of every condition; of several seeds, the first.

    An answer counts as correct if it matches.
    """
    examples: list[ExampleQuestion] = []
    for item in result.items_by_seed[0][:NUM_EXAMPLES]:
        outputs = [(name, str(item.conditions[name]["output"])) for name in result.conditions]
        gold, question = item.shared["answers"], item.shared.get("question", f"question {item.id}")
        answers = tuple(
            ExampleAnswer(f"{result.run}, {condition_title(name)}", text, METRICS["match"](text, gold) == 1)
            for name, text in outputs
        )
        examples.append(ExampleQuestion(result.task, question, " or ".join(gold), answers))
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


def format_result(result: RunResult) -> list[str]:
    items = result.items_by_seed[0]
    if result.variant["kind"] == "answers":
        lines = [f"{result.run}, {result.task}: {len(items)} items"]
        for score in answer_scores(result):
            metrics = "  ".join(
                f"{name} {100 * x.mean.mean:.1f} ± {100 * x.se:.1f} %" for name, x in score.metrics.items()
            )
            lines.append(f"  {score.condition:<12}{score.context_size:7.1f} before  {metrics}")
        return [*lines, *format_examples(list_examples(result))]
    num_labels, majority = len(items[0].shared["label_tokens"]), format_percent(majority_accuracy(items))
    head = f"{result.run}, {result.task}: {count_test_texts(items)} items of {num_labels} labels"
    lines = [f"{head}; majority baseline {majority} %"]
    for score in label_scores(result):
        std = "" if score.std is None else f" ± {100 * score.std:.1f}"
        variants = ", ".join(dict.fromkeys(score.variants))
        accuracy = f"{100 * score.accuracy:.1f}{std} % correct ({variants}, chosen on validation)"
        lines.append(f"  {score.condition:<26}{score.context_size:7.1f} before  {accuracy}")
    return lines


def group_by_file(results: Sequence[RunResult], kind: str) -> list[list[RunResult]]:
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        if result.variant["kind"] == kind:
            groups.setdefault(result.task, []).append(result)
    return [*groups.values()]


LABEL_COLUMNS = (
    Column("run", lambda row: row[0].run, is_text=True),
    Column("demonstrations", lambda row: row[1].condition, is_text=True),
    Column("before the text", lambda row: format_count(row[1].context_size)),
    Column(
        "accuracy, %",
        lambda row: (
            format_percent(row[1].accuracy) + ("" if row[1].std is None else f" ± {format_percent(row[1].std)}")
        ),
    ),
    Column("chosen on validation", lambda row: ", ".join(dict.fromkeys(row[1].variants))),
)


def labels_section(group: Sequence[RunResult], papers: Sequence[Markup]) -> PageSection:
    """Build the section of a file of labelled texts."""
    first, items = group[0], group[0].items_by_seed[0]
    lead = (
        f"{count_test_texts(items)} texts, {len(items[0].shared['label_tokens'])} labels. The label with the least "
        "mean nats per token is chosen, after demonstrations as vectors, as text, or none; the majority baseline is "
        f"{format_percent(majority_accuracy(items))} %."
    )
    rows = [(result, score) for result in group for score in label_scores(result)]
    note = (
        f"±: standard deviation over {len(rows[0][1].accuracies)} orders of demonstrations"
        f"{' and seeds' if len(first.seeds) > 1 else ''}. Before: vectors or tokens. Last tokens: as many of the "
        "demonstrations’ text as they have vectors. Whether demonstrations are balanced by label and scores are "
        "calibrated is chosen on validation texts only. A condition at or below the majority baseline shows no "
        "in-context learning."
    )
    table = render_table(build_table(LABEL_COLUMNS, rows))
    return PageSection(f"In-context classification: {first.task}", [lead, table, note, *papers])


def metric_columns(name: str) -> tuple[Column, Column]:
    """Return the columns of a metric and of its gain over no context."""

    def format_gain(row: tuple[RunResult, ConditionScores]) -> str:
        x = row[1].metrics[name]
        gain = f"{format_signed(100 * x.gain, 1)} ± {format_percent(x.gain_se)}"
        return "–" if row[1].condition == "none" else gain

    def format_metric(row: tuple[RunResult, ConditionScores]) -> str:
        x = row[1].metrics[name]
        return f"{format_percent(x.mean.mean)} ± {format_percent(x.se)}"

    return Column(f"{name}, %", format_metric), Column("gain over no context", format_gain)


ANSWER_COLUMNS = (
    Column("run", lambda row: row[0].run, is_text=True),
    Column("context", lambda row: condition_title(row[1].condition), is_text=True),
    Column("before the question", lambda row: format_count(row[1].context_size)),
    *(column for name in METRICS for column in metric_columns(name)),
)


def answers_section(group: Sequence[RunResult]) -> PageSection:
    """Build the section of a file of context questions."""
    first = group[0]
    lead = f"{len(first.items_by_seed[0])} questions about {count_contexts(first)} contexts, answered greedily."
    note = (
        "±: standard error over contexts, paired for differences. Truncated: as many last tokens of the context as "
        "there are vectors. Match: normalized words equal those of an answer. F1: of words. Substring match: "
        "share of the answers that occur in the output."
    )
    rows = [(result, score) for result in group for score in answer_scores(result)]
    table = render_table(build_table(ANSWER_COLUMNS, rows))
    examples = build_examples_table([example for result in group for example in list_examples(result)])
    return PageSection(f"Context question answering: {first.task}", [lead, table, note, render_table(examples)])
