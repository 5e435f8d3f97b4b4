"""Results of compressors on documents: gains over no context as a table and as JSON; recall by the number of facts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.scores import (
    ContextGain,
    context_gains,
    is_recall,
    length_fact_correlation,
    nll_by_position,
    recall_by_facts,
    soft_hard_gap,
)
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
    "tokens before the tail. none: no context. truncated: as many last tokens as vectors. other text: vectors of "
    "another document. gain: nats per token saved against no context, paired by document (untrained: against the "
    "untrained model). share: of the whole text's gain; – where the whole text was not read, or its gain is not "
    "significant. Lengths are hard except in soft. oracle length: the cheapest length of each segment, found by trial; "
    "an upper bound, not a method."
)


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
    Column("gain ± s.e.", lambda row: format_with_error(f"{row.gain.gain.mean:+.4f}", row.gain.se, 4)),
    Column(
        "share", lambda row: "–" if row.gain.share_of_full is None else f"{format_percent(row.gain.share_of_full)} %"
    ),
)


def result_to_json(result: RunResult) -> dict[str, Any]:
    first = result.items_by_seed[0][0]
    conditions = result.conditions
    data: dict[str, Any] = {
        "dataset": result.task,
        "run": result.run,
        **result.info,
        "seeds": list(result.seeds),
        "documents": len(result.items_by_seed[0]),
        "conditions": [gain._asdict() | {"perplexity": math.exp(gain.nll.mean)} for gain in context_gains(result)],
        "bucket_tokens": BUCKET_TOKENS,
        "nll_by_position": {name: nll_by_position(result, name) for name in conditions},
        "gap": soft_hard_gap(result),
    }
    if is_recall(result):
        with_vectors = [name for name in conditions if first.conditions[name]["vectors_per_segment"]]
        by_facts = {name: recall_by_facts(result, name) for name in with_vectors}
        correlation = {name: length_fact_correlation(result, name) for name in with_vectors}
        data["recall"] = {"by_facts": by_facts, "correlation": correlation}
    return figures_to_json(data)


def build_gain_table(results: Sequence[RunResult]) -> Table:
    return build_table(COLUMNS, [GainRow(result, gain) for result in results for gain in context_gains(result)])


def format_recall(results: Sequence[RunResult]) -> list[str]:
    """Format the recall of runs by the number of facts for the lengths that they choose, and soft against hard."""
    lines: list[str] = []
    for result in results:
        for name in ("compressed", "sampled") if is_recall(result) else ():
            if name in result.conditions:
                correlation = length_fact_correlation(result, name)
                cells = "; ".join(
                    f"F={group.num_facts} {format_percent(group.accuracy)} % correct, N {group.mean_vectors:.2f}"
                    for group in recall_by_facts(result, name)
                )
                text = "–" if correlation is None else f"{correlation:.3f}"
                lines.append(f"{result.run}, {name}: {cells}; correlation of N with F {text}")
        if gap := soft_hard_gap(result):
            sampled = format_with_error(f"{gap.sampled_length:.3f}", gap.sampled_se, 3)
            lines.append(
                f"{result.run}, soft minus hard: {gap.nll:+.4f} nats per token, {100 * gap.accuracy:+.1f} points of "
                f"accuracy, {gap.num_vectors:+.2f} vectors; E[N] {gap.expected_length:.3f}, mean of sampled N {sampled}"
            )
    return lines
