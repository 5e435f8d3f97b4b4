"""The comparison of compressed memories: share of the full text's gain, sizes, and the Pareto front."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation.memories.contexts import FULL_TEXT, LAST_TOKENS, NO_CONTEXT
from laconic.evaluation.report.plots import render_plot
from laconic.evaluation.statistics import percentile_interval, resample_weights
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import Column, Table, build_table

TASK_TITLES = {
    "continuation": "continuation",
    "passages": "copied passages",
    "needles": "needles",
    "questions": "questions",
}
ANSWER_TASKS = ("needles", "questions")  # whose right answers are counted
LEGEND = (
    "Of each task: nats per token, and the share: what a context gains over no context as a part of what the full "
    "text gains, from means over documents, with the 95 % bootstrap interval over documents. Right: answers that "
    "greedy decoding gives word for word. Positions: per layer and KV head, on average. File: keys and values with "
    "their positions and ranks, or summary vectors. In use: the KV cache that attention reads. *: of the contexts "
    "measured on all documents, none has a larger share with a cache in use of the same size or a smaller one."
)
PLOT_SIZE = (13.0, 7.0)
ContextMetrics = dict[str, dict[str, list[Mapping[str, Any]]]]  # of each seed, by context and document
LOWEST_SHARE = -30  # in percent, that is plotted


class Share(NamedTuple):
    """A part of the full text's gain, with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


class TaskScore(NamedTuple):
    """Nats per token, the share of right answers, and that of the full text's gain; None if the text gains nothing."""

    nats: float
    right: float
    share: Share | None


class MemoryPoint(NamedTuple):
    """A context on the documents that it was evaluated on: means over all documents and seeds."""

    run: str
    name: str
    documents: int
    positions: float
    file_bytes: float
    used_bytes: float
    tasks: Mapping[str, TaskScore]

    @property
    def method(self) -> str:
        """The name without the size."""
        return self.name.rstrip("0123456789.").rstrip()

    def share(self, task: str) -> Share | None:
        return self.tasks[task].share if task in self.tasks else None


class Comparison(NamedTuple):
    """Contexts of one model or several, on the same documents."""

    title: str
    contexts: Sequence[MemoryPoint]

    def list_tasks(self, *, with_shares: bool = False) -> list[str]:
        """Return the tasks that some context has, or has a share of."""
        points = self.contexts
        return [name for name in TASK_TITLES if any(p.share(name) if with_shares else name in p.tasks for p in points)]


def estimate_share(none: Sequence[float], memory: Sequence[float], full: Sequence[float]) -> Share | None:
    """Return the gain of a context as a part of the full text's, over resampled documents; None without such a gain."""
    gains, whole = np.array(none) - np.array(memory), np.array(none) - np.array(full)
    if whole.sum() <= 0:
        return None
    share = float(gains.sum() / whole.sum())
    if len(gains) == 1:
        return Share(share, share, share)
    counts = 1.0 + resample_weights(len(gains), 0)
    resampled_gains, resampled_whole = counts @ gains, counts @ whole
    has_share = resampled_whole > 0
    return Share(share, *percentile_interval(resampled_gains[has_share] / resampled_whole[has_share]))


def compare_results(results: Sequence[RunResult]) -> list[Comparison]:
    """Group results by their documents; the results of a run's methods are put together.

    Runs whose baselines are not finished are left out.
    """
    groups: dict[tuple[str, str], dict[str, ContextMetrics]] = {}
    for result in results:
        contexts = groups.setdefault((result.variant["data"], result.variant["tokens"]), {}).setdefault(result.run, {})
        for item in result.pooled_items:
            for name, metrics in item.conditions.items():
                contexts.setdefault(name, {}).setdefault(item.id, []).append(metrics)
    return [
        Comparison(
            f"Compressed memories: {data}, documents of up to {int(tokens):,} tokens",
            [p for run, contexts in runs.items() if NO_CONTEXT in contexts for p in build_points(run, contexts)],
        )
        for (data, tokens), runs in groups.items()
    ]


def build_points(run: str, contexts: ContextMetrics) -> list[MemoryPoint]:
    """Return the points of a run: the baselines first, then methods by name and size.

    A context is compared with the baselines on the documents that it has; a document counts with its mean over seeds.
    """
    none, full = contexts[NO_CONTEXT], contexts[FULL_TEXT]
    order = {NO_CONTEXT: 0, FULL_TEXT: 1, LAST_TOKENS: 2}
    points: list[MemoryPoint] = []
    for name, by_document in contexts.items():
        metrics = [x for of_document in by_document.values() for x in of_document]
        tasks: dict[str, TaskScore] = {}
        for task in TASK_TITLES:
            scores = [x[task] for x in metrics if task in x]
            if scores:
                documents = [d for d, of_document in by_document.items() if task in of_document[0] and d in none]
                nats = (mean_nats(context, documents, task) for context in (none, by_document, full))
                tasks[task] = TaskScore(
                    nats=fmean(score["nats"] for score in scores),
                    right=fmean(score["right"] for score in scores),
                    share=estimate_share(*nats),
                )
        sizes = {field: fmean(x[field] for x in metrics) for field in ("positions", "file_bytes", "used_bytes")}
        points.append(MemoryPoint(run, name, len(by_document), **sizes, tasks=tasks))
    return sorted(points, key=lambda point: (order.get(point.method, 3), point.method, point.positions))


def mean_nats(context: Mapping[str, Sequence[Mapping[str, Any]]], documents: Sequence[str], task: str) -> list[float]:
    """Return the nats of a task on each document, the mean over seeds."""
    return [fmean(metrics[task]["nats"] for metrics in context[name]) for name in documents]


def is_on_front(point: MemoryPoint, points: Sequence[MemoryPoint], share: float, task: str) -> bool:
    """Return whether a context of this share is on the Pareto front of bytes in use and share, on all documents.

    Contexts of a model whose full text gains nothing have no share, and do not count.
    """
    most = max(p.documents for p in points)
    if point.documents != most:
        return False
    for other in points:
        other_share = other.share(task)
        if other.documents == most and other_share is not None:
            is_as_good = other.used_bytes <= point.used_bytes and other_share.mean >= share
            if is_as_good and (other.used_bytes, other_share.mean) != (point.used_bytes, share):
                return False
    return True


def build_comparison_table(comparison: Comparison) -> Table:
    points = comparison.contexts
    runs = {point.run for point in comparison.contexts}

    def format_task(point: MemoryPoint, task: str) -> str:
        if task not in point.tasks:
            return "–"
        nats = f"{point.tasks[task].nats:.2f}"
        share = point.share(task)
        if share is None:
            return nats
        mean, low, high = (f"{100 * x:z.0f}" for x in share)
        interval = f" [{low}, {high}]" if low != high else ""
        return f"{'*' if is_on_front(point, points, share.mean, task) else ''}{nats} · {mean} %{interval}"

    def format_right(point: MemoryPoint, task: str) -> str:
        return f"{100 * point.tasks[task].right:.0f}" if task in point.tasks else "–"

    columns = [
        *([Column("model", lambda p: p.run, is_text=True)] if len(runs) > 1 else []),
        Column("memory", lambda p: p.name, is_text=True),
        Column("documents", lambda p: str(p.documents)),
        Column("positions", lambda p: f"{p.positions:.0f}"),
        Column("file, MB", lambda p: f"{p.file_bytes / 1e6:.2f}"),
        Column("in use, MB", lambda p: f"{p.used_bytes / 1e6:.2f}"),
    ]
    for task in comparison.list_tasks():
        columns.append(Column(TASK_TITLES[task], lambda p, task=task: format_task(p, task)))
        if task in ANSWER_TASKS:
            columns.append(Column(f"{TASK_TITLES[task]} right, %", lambda p, task=task: format_right(p, task)))
    return build_table(columns, points)


def draw_comparison(figure: Any, comparison: Comparison) -> None:
    tasks = comparison.list_tasks(with_shares=True)
    points = comparison.contexts
    panels = figure.subplots(2, len(tasks), sharey="col", squeeze=False)
    methods = list(dict.fromkeys((p.run, p.method) for p in points if p.method not in (NO_CONTEXT, FULL_TEXT)))
    runs = {run for run, _ in methods}
    markers = "osD^vP"
    sizes = (("positions", 1, "positions per head"), ("used_bytes", 1e6, "cache in use, MB"))
    for line, (field, scale, x_label) in zip(panels, sizes, strict=True):
        for axes, task in zip(line, tasks, strict=True):
            for i, (run, method) in enumerate(methods):
                same = [p for p in points if (p.run, p.method) == (run, method) and p.share(task)]
                x = [getattr(p, field) / scale for p in same]
                shares = 100 * np.array([p.share(task) for p in same]).reshape(-1, 3)
                label = method if len(runs) == 1 else f"{run}: {method}"
                axes.plot(x, shares[:, 0], marker=markers[i // 8 % len(markers)], color=f"C{i % 8}", label=label)
                axes.vlines(x, shares[:, 1], shares[:, 2], color=f"C{i % 8}", alpha=0.35, linewidth=1.2)
            axes.axhline(100, color="gray", linestyle=":", linewidth=1)
            axes.set_ylim(bottom=max(LOWEST_SHARE, axes.get_ylim()[0]))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set(title=TASK_TITLES[task], xlabel=x_label)
        line[0].set_ylabel("share of the full text's gain, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def plot_comparison(comparison: Comparison) -> str:
    if not comparison.list_tasks(with_shares=True):
        return "The full text gains nothing over no context, so that there are no shares to plot."
    alt_text = "Share of the full text's gain against positions and against bytes of the cache in use"
    return render_plot(lambda figure: draw_comparison(figure, comparison), alt_text, PLOT_SIZE)
