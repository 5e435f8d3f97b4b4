"""Results of compressors on documents: gains over no context as a table and as JSON; recall by the number of facts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.fact_recall import length_fact_correlation, recall_by_facts, soft_hard_gap
from laconic.evaluation.compression.perplexity import FULL_TUNED, UNTRAINED, ContextGain, context_gains, nll_by_position
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import (
    Column,
    Table,
    build_table,
    figures_to_json,
    format_mean,
    format_percent,
    format_with_error,
)

LEGEND = (
    "documents: held-out documents, or stretches of them, that were scored. vectors: per segment. before: vectors or "
    "tokens before the tail. none: no context; shown once for the same tails after contexts of other lengths. "
    "truncated: as many last tokens as vectors. other text: vectors of another document. gain: nats per token saved "
    "against no context, paired by document (untrained: against the untrained model). share: of the whole text's gain; "
    "– where the whole text was not read, or its gain is not significant. Lengths are hard except in soft. full-tuned: "
    "the language-model baseline reads the whole text. oracle length: the cheapest length of each segment, found by "
    "trial; an upper bound, not a method."
)


CONDITION_TITLES = {
    "none": "no context",
    "full": "whole text",
    FULL_TUNED: "whole text, full-tuned",
    f"{UNTRAINED} none": f"no context, {UNTRAINED}",
}


class GainRow(NamedTuple):
    """The gain of one condition of a run: a row of the table."""

    result: RunResult
    gain: ContextGain


COLUMNS = (
    Column("data set", lambda row: row.result.task, is_text=True),
    Column("run", lambda row: row.result.run, is_text=True),
    Column("condition", lambda row: row.gain.condition, is_text=True),
    Column("documents", lambda row: f"{len(row.result.items_by_seed[0]):,}"),
    Column("vectors", lambda row: "–" if row.gain.mean_vectors is None else f"{row.gain.mean_vectors:.2f}"),
    Column("before", lambda row: f"{row.gain.context_size:.1f}"),
    Column("nats/token", lambda row: format_mean(row.gain.nll)),
    Column("perplexity", lambda row: f"{math.exp(row.gain.nll.mean):.2f}"),
    Column("accuracy", lambda row: f"{format_percent(row.gain.accuracy.mean)} %"),
    Column("gain", lambda row: f"{row.gain.gain.mean:+.4f}"),
    Column("± s.e.", lambda row: "–" if math.isnan(row.gain.se) else f"{row.gain.se:.4f}"),
    Column(
        "share", lambda row: "–" if row.gain.share_of_full is None else f"{format_percent(row.gain.share_of_full)} %"
    ),
)


def condition_title(condition: str) -> str:
    return CONDITION_TITLES.get(condition, condition)


def gain_rows(result: RunResult) -> list[GainRow]:
    return [GainRow(result, gain) for gain in context_gains(result.items_by_seed, result.conditions)]


def document_keys(result: RunResult) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
    """Return id, number of facts and scored tokens of each document."""
    shared = [(item.id, item.shared) for item in result.items_by_seed[0]]
    return tuple((name, metrics["num_facts"], tuple(metrics["scored_tokens"])) for name, metrics in shared)


def is_recall(result: RunResult) -> bool:
    return result.items_by_seed[0][0].shared["num_facts"] is not None


def add_controls(results: Sequence[RunResult]) -> list[RunResult]:
    """Add to each compressor the first language-model baseline that read the same documents, as a control."""
    baselines = [result for result in results if result.info.get("method") == "lm" and "full" in result.conditions]
    with_controls: list[RunResult] = []
    for result in results:
        key = (result.task, document_keys(result))
        control = next((other for other in baselines if (other.task, document_keys(other)) == key), None)
        if control is not None and result.info.get("method") != "lm":
            seeds = zip(result.items_by_seed, cycle(control.items_by_seed), strict=False)  # a control may have fewer
            pairs = [zip(items, others, strict=True) for items, others in seeds]
            new = [[EvalItem(a.id, {**a.conditions, FULL_TUNED: b.conditions["full"]}) for a, b in x] for x in pairs]
            result = replace(result, items_by_seed=new)
        with_controls.append(result)
    return with_controls


def result_to_json(result: RunResult) -> dict[str, Any]:
    seeds, items, conditions = result.items_by_seed, result.pooled_items, result.conditions
    data: dict[str, Any] = {
        "dataset": result.task,
        "run": result.run,
        **result.info,
        "seeds": list(result.seeds),
        "documents": len(seeds[0]),
        "conditions": [gain._asdict() | {"perplexity": math.exp(gain.nll.mean)} for _, gain in gain_rows(result)],
        "bucket_tokens": BUCKET_TOKENS,
        "nll_by_position": {name: nll_by_position(seeds, name) for name in conditions},
        "gap": soft_hard_gap(items),
    }
    if is_recall(result):
        with_vectors = [name for name in conditions if items[0].conditions[name]["vectors_per_segment"]]
        by_facts = {name: recall_by_facts(items, name) for name in with_vectors}
        correlation = {name: length_fact_correlation(items, name) for name in with_vectors}
        data["recall"] = {"by_facts": by_facts, "correlation": correlation}
    return figures_to_json(data)


def build_gain_table(results: Sequence[RunResult]) -> Table:
    """Return the table for a terminal. What no context gives is shown once for all contexts of the same documents."""
    rows, baselines = list[GainRow](), set[Any]()
    for row in (row for result in results for row in gain_rows(result)):
        if row.gain.condition.endswith("none"):
            key = (row.result.run, row.gain.condition, document_keys(row.result), format_mean(row.gain.nll))
            if key in baselines:
                continue
            baselines.add(key)
        rows.append(row)
    return build_table(COLUMNS, rows)


def format_recall(results: Sequence[RunResult]) -> list[str]:
    """Format the recall of runs by the number of facts for the lengths that they choose, and soft against hard."""
    lines: list[str] = []
    for result in results:
        items = result.pooled_items
        for name in ("compressed", "sampled") if is_recall(result) else ():
            if name in result.conditions:
                correlation = length_fact_correlation(items, name)
                cells = "; ".join(
                    f"F={group.num_facts} {format_percent(group.accuracy)} % correct, N {group.mean_vectors:.2f}"
                    for group in recall_by_facts(items, name)
                )
                text = "–" if correlation is None else f"{correlation:.3f}"
                lines.append(f"{result.run}, {name}: {cells}; correlation of N with F {text}")
        if gap := soft_hard_gap(items):
            sampled = format_with_error(f"{gap.sampled_length:.3f}", gap.sampled_se, 3)
            lines.append(
                f"{result.run}, soft minus hard: {gap.nll:+.4f} nats per token, {100 * gap.accuracy:+.1f} points of "
                f"accuracy, {gap.num_vectors:+.2f} vectors; E[N] {gap.expected_length:.3f}, mean of sampled N {sampled}"
            )
    return lines
