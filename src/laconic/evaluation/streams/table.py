"""Streams measured, of one seed or several: means with their spread and interval, as JSON and on a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.report.runs_table import format_percent
from laconic.evaluation.statistics import Estimate, ScoreMatrix
from laconic.evaluation.streams.evaluate import StreamRecord
from laconic.evaluation.streams.metrics import OVERALL

NLL_STREAMS = (
    "ppl",
    "ppl (test)",
    "ppl (valid)",
    "books",
    "levels",
)  # streams whose scores are nats; of all others they are shares


@dataclass(frozen=True)
class StreamResult:
    """A run on a stream: the rows of each seed. `about` is what the run is."""

    stream: str
    run: str
    seeds: tuple[int, ...]
    records: Sequence[Sequence[StreamRecord]]
    run_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def conditions(self) -> list[str]:
        """The ways that items were read in."""
        return list(self.records[0][0].conditions)


class MetricEstimate(NamedTuple):
    """A cell of a way over the items that have it, which count alike, and over the seeds."""

    metric: str
    estimate: Estimate


def metric_scores(records: Sequence[Sequence[StreamRecord]], condition: str, metric: str) -> ScoreMatrix:
    """The score of every item that has the cell, [R, N]."""
    found = [[row.conditions[condition].sums.get(metric) for row in each] for each in records]
    return np.array([[score / n for score, n in filter(None, each)] for each in found], dtype=np.float64)


def estimate_metrics(result: StreamResult, condition: str) -> list[MetricEstimate]:
    """Every cell of a way: all first, then by name, numbers in their order."""
    names = {cell for row in result.records[0] for cell in row.conditions[condition].sums}
    estimate = statistics.estimate_mean if result.stream in NLL_STREAMS else statistics.estimate_proportion
    order = sorted(names, key=lambda cell: (cell != OVERALL, natural_sort_key(cell)))
    return [MetricEstimate(cell, estimate(metric_scores(result.records, condition, cell))) for cell in order]


def natural_sort_key(text: str) -> list[tuple[bool, int, str]]:
    """A key by which 8 stands before 16."""
    parts = "".join(c if c.isdigit() else f" {c} " for c in text).split()
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def updates_per_level(result: StreamResult, condition: str) -> list[float]:
    """How often each level fired in reading an item, the mean over items, layers and seeds."""
    return np.mean(
        [row.conditions[condition].level_updates for rows in result.records for row in rows], axis=0
    ).tolist()


def mean_state_bytes(result: StreamResult, condition: str) -> int:
    """Bytes of an item's state at its end, the mean."""
    return round(float(np.mean([row.conditions[condition].state_bytes for rows in result.records for row in rows])))


def result_to_json(result: StreamResult) -> dict[str, Any]:
    """All figures as JSON holds them."""
    ways = {
        way: {
            "cells": {each.metric: each.estimate._asdict() for each in estimate_metrics(result, way)},
            "updates": updates_per_level(result, way),
            "state_bytes": mean_state_bytes(result, way),
        }
        for way in result.conditions
    }
    unit = "nats" if result.stream in NLL_STREAMS else "share"
    items = len(result.records[0])
    return {"stream": result.stream, "run": result.run, **result.run_info, "seeds": list(result.seeds), "items": items,
            "unit": unit, "ways": ways}  # fmt: skip


def build_stream_table(results: Sequence[StreamResult]) -> Any:
    """The table of a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="")
    for name in ("stream", "run", "way", "cell"):
        made.add_column(name, no_wrap=True)
    for name in ("score", "95 %", "items", "updates", "state"):
        made.add_column(name, justify="right", no_wrap=True)
    for line in results:
        for way in line.conditions:
            updates = ", ".join(f"{n:.4g}" for n in updates_per_level(line, way)) or "–"
            for each in estimate_metrics(line, way):
                at, (low, high) = format_mean(line, each.estimate), format_bounds(line, each.estimate)
                made.add_row(line.stream, line.run, way, each.metric, at, f"{low} to {high}",
                             str(each.estimate.num_items), updates, f"{mean_state_bytes(line, way):,}")  # fmt: skip
    return made


def format_mean(result: StreamResult, estimate: Estimate) -> str:
    """A mean, and its standard deviation over seeds."""
    if result.stream in NLL_STREAMS:
        return f"{estimate.mean:.4f}" + ("" if estimate.sd is None else f" ± {estimate.sd:.4f}")
    return f"{format_percent(estimate.mean)} %" + ("" if estimate.sd is None else f" ± {100 * estimate.sd:.1f}")


def format_bounds(result: StreamResult, estimate: Estimate) -> tuple[str, str]:
    """The ends of an interval."""
    if result.stream in NLL_STREAMS:
        return f"{estimate.low:.4f}", f"{estimate.high:.4f}"
    return format_percent(estimate.low), format_percent(estimate.high)


LEGEND = (
    "score: nats (ppl) or per cent; items of a cell count alike; updates: of each level while an item was read, the "
    "fastest first; state: bytes of one sequence at its end. learn: fast weights move; still: they do not."
)
