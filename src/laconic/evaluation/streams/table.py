"""Stream results over seeds: means with spread and interval, as JSON and as a table on a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.statistics import Estimate, ScoreMatrix
from laconic.evaluation.streams.evaluate import StreamItem
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.tables import build_terminal_table, format_percent

NLL_STREAMS = ("ppl", "books", "levels")  # scored by NLL; all others by shares
HEADER = ("stream", "run", "condition", "metric", "score", "95 %", "items", "updates", "state")
LEGEND = (
    "score: NLL in nats (ppl, books, levels) or percent; every item of a metric counts the same; updates: of each "
    "level per item, fastest first; state: bytes per sequence at its end. learn: fast weights are updated; frozen: "
    "they are not."
)


@dataclass(frozen=True)
class StreamTaskResult:
    """A run on a stream.

    Attributes:
        task: Name of the task.
        stream: Which stream it is.
        run: Title of the run.
        seeds: Training seeds.
        items: The items of each seed.
        run_info: Properties of the run.
    """

    task: str
    stream: str
    run: str
    seeds: tuple[int, ...]
    items: Sequence[Sequence[StreamItem]]
    run_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def title(self) -> str:
        """The stream, and the task where that has another name."""
        return self.stream if self.task == self.stream else f"{self.stream} ({self.task})"

    @property
    def is_nll(self) -> bool:
        """Whether scores are NLL."""
        return self.stream in NLL_STREAMS

    @property
    def conditions(self) -> list[str]:
        """Names of the conditions."""
        return list(self.items[0][0].conditions)


class MetricEstimate(NamedTuple):
    """The mean of a metric over items and seeds."""

    metric: str
    estimate: Estimate


def metric_scores(items: Sequence[Sequence[StreamItem]], condition: str, metric: str) -> ScoreMatrix:
    """Return the score of every item that has the metric, [R, N]."""
    sums = [[item.conditions[condition].sums.get(metric) for item in seed] for seed in items]
    return np.array([[score / n for score, n in filter(None, seed)] for seed in sums], dtype=np.float64)


def estimate_metrics(result: StreamTaskResult, condition: str) -> list[MetricEstimate]:
    """Return every metric of a condition: the overall one first, then in natural order of names."""
    names = {metric for item in result.items[0] for metric in item.conditions[condition].sums}
    estimate = statistics.estimate_mean if result.is_nll else statistics.estimate_proportion
    order = sorted(names, key=lambda metric: (metric != OVERALL, natural_sort_key(metric)))
    return [MetricEstimate(name, estimate(metric_scores(result.items, condition, name))) for name in order]


def natural_sort_key(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts 8 before 16."""
    parts = "".join(c if c.isdigit() else f" {c} " for c in text).split()
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def updates_per_level(result: StreamTaskResult, condition: str) -> list[float]:
    """Return the updates of each level per item, mean over items, layers and seeds."""
    updates = [item.conditions[condition].level_updates for seed in result.items for item in seed]
    return np.mean(updates, axis=0).tolist()


def mean_state_bytes(result: StreamTaskResult, condition: str) -> int:
    """Return the mean bytes of an item's state at its end."""
    return round(float(np.mean([item.conditions[condition].state_bytes for seed in result.items for item in seed])))


def result_to_json(result: StreamTaskResult) -> dict[str, Any]:
    """Return all figures as JSON."""
    conditions = {
        condition: {
            "metrics": {entry.metric: entry.estimate._asdict() for entry in estimate_metrics(result, condition)},
            "level_updates": updates_per_level(result, condition),
            "state_bytes": mean_state_bytes(result, condition),
        }
        for condition in result.conditions
    }
    return {
        "task": result.task,
        "stream": result.stream,
        "run": result.run,
        **result.run_info,
        "seeds": list(result.seeds),
        "items": len(result.items[0]),
        "unit": "nats" if result.is_nll else "share",
        "conditions": conditions,
    }


def result_rows(result: StreamTaskResult) -> list[tuple[str, ...]]:
    """Return the table rows of a result: condition, metric, score, interval, items, updates, state."""
    rows: list[tuple[str, ...]] = []
    for condition in result.conditions:
        updates = ", ".join(f"{n:.4g}" for n in updates_per_level(result, condition)) or "–"
        state = f"{mean_state_bytes(result, condition):,}"
        for metric, estimate in estimate_metrics(result, condition):
            low, high = format_bounds(result, estimate)
            score = format_mean(result, estimate)
            rows.append((condition, metric, score, f"{low} to {high}", f"{estimate.num_items:,}", updates, state))
    return rows


def build_stream_table(results: Sequence[StreamTaskResult]) -> Any:
    """Return the table for a terminal."""
    rows = [(result.title, result.run, *row) for result in results for row in result_rows(result)]
    return build_terminal_table(HEADER, rows, num_text_columns=4)


def format_mean(result: StreamTaskResult, estimate: Estimate) -> str:
    """Format a mean with its standard deviation over seeds."""
    if result.is_nll:
        return f"{estimate.mean:.4f}" + ("" if estimate.sd is None else f" ± {estimate.sd:.4f}")
    return f"{format_percent(estimate.mean)} %" + ("" if estimate.sd is None else f" ± {100 * estimate.sd:.1f}")


def format_bounds(result: StreamTaskResult, estimate: Estimate) -> tuple[str, str]:
    """Format the ends of an interval."""
    if result.is_nll:
        return f"{estimate.low:.4f}", f"{estimate.high:.4f}"
    return format_percent(estimate.low), format_percent(estimate.high)
