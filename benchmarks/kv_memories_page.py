"""The page of `kv_memories.py`: a table, and plots of quality against positions and against bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation.report.plots import STYLE_SHEET
from laconic.evaluation.statistics import NUM_RESAMPLES, percentile_interval, resample_weights

Row = Mapping[str, Any]
TASKS = {"copied": "copied passages", "answer": "answers", "following": "text that follows"}
INTRODUCTION = """# KV memories: quality against size

Memories of documents for an unchanged model, compared at equal numbers of positions and at equal bytes. Each document
is the beginning of a book chapter with four invented facts inserted. Measured on top of every memory: nats per token on
64 tokens that follow the document, on passages copied from it, and on the answers to one question about each fact.

**Share**: what a memory gains over no context, as a part of what the full text gains, from the means over documents;
in brackets the 95 % bootstrap interval over documents (none for a single document). **Right**: questions whose answer
is the model's greedy choice. **Positions**: kept per layer and KV head, on average. **Kept**: their keys and values.
**Cache**: keys and values that attention reads, where all heads are padded to the largest one. **Bold**: of the rows
measured on all documents, none has a larger share with a cache of the same size or a smaller one. `last tokens` reads
only the end of the text; `window` keeps the first 4 and the last positions of the cache of the full text. `fit` is a
cartridge. The rows `kvpress` are its selections, read by the same decoder.
"""


class Measurement(NamedTuple):
    """A method at one size: its rows, one per document, and per task the share with the ends of its interval."""

    method: str
    divisor: int
    rows: list[Row]
    shares: dict[str, tuple[float, float, float]]

    def mean(self, field: str) -> float:
        """Return the mean of a field over documents."""
        return float(np.mean([row[field] for row in self.rows]))


def estimate_share(none: Sequence[float], memory: Sequence[float], full: Sequence[float]) -> tuple[float, float, float]:
    """Return the gain of a memory over no context as a part of the full text's, and its 95 % interval."""
    gains, whole = np.array(none) - np.array(memory), np.array(none) - np.array(full)
    share = float(gains.sum() / whole.sum())
    if len(gains) == 1:
        return share, share, share
    counts = 1.0 + resample_weights(len(gains), NUM_RESAMPLES, 0)
    return share, *percentile_interval((counts @ gains) / (counts @ whole))


def summarize_rows(rows: Sequence[Row]) -> list[Measurement]:
    """Return the measurements in the order of the rows; a method is compared on the documents that it has."""
    groups = dict[tuple[str, int], dict[tuple[int, int], Row]]()
    for row in rows:
        if "following" in row:
            groups.setdefault((row["method"], row["divisor"]), {})[row["tokens"], row["document"]] = row
    none, full = groups["no context", 0], groups["full text", 1]
    measurements = list[Measurement]()
    for (method, divisor), by_document in groups.items():
        documents = [document for document in by_document if document in none]
        shares = {
            task: estimate_share(*([group[d][task] for d in documents] for group in (none, by_document, full)))
            for task in TASKS
        }
        measurements.append(Measurement(method, divisor, [by_document[d] for d in documents], shares))
    return measurements


def is_on_front(point: Measurement, points: Sequence[Measurement], task: str) -> bool:
    """Return whether a measurement on all documents is on the Pareto front of bytes in use and share."""
    if len(point.rows) < max(len(p.rows) for p in points):
        return False
    size, share = point.mean("cache_bytes"), point.shares[task][0]
    others = [(p.mean("cache_bytes"), p.shares[task][0]) for p in points if len(p.rows) == len(point.rows)]
    return not any((a < size and b >= share) or (a <= size and b > share) for a, b in others)


def format_table(points: Sequence[Measurement]) -> str:
    """Return the table in Markdown."""
    head = ["memory", "documents", "positions", "kept, MB", "cache, MB", *TASKS.values(), "right"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for point in points:
        sizes = [f"{point.mean(field) / 1e6:.2f}" for field in ("bytes", "cache_bytes")]
        cells = [describe_method(point), str(len(point.rows)), f"{point.mean('positions'):.0f}", *sizes]
        for task in TASKS:
            share, low, high = (f"{100 * x:.0f}" for x in point.shares[task])
            interval = f" [{low}, {high}]" if low != high else ""
            cell = f"{point.mean(task):.2f} · {share} %{interval}"
            cells.append(f"**{cell}**" if is_on_front(point, points, task) else cell)
        lines.append("| " + " | ".join([*cells, f"{100 * point.mean('right'):.0f} %"]) + " |")
    return "\n".join(lines)


def describe_method(point: Measurement) -> str:
    """Return the name of a method, with the tokens per position."""
    return point.method + (f", {point.divisor}×" if point.divisor > 1 else "")


def plot_measurements(points: Sequence[Measurement], path: Path) -> None:
    """Plot shares against positions and against the bytes of the cache; `full text` is at 100 %."""
    from matplotlib import pyplot, style

    methods = list(dict.fromkeys(p.method for p in points if p.divisor > 1))
    colors = [pyplot.get_cmap("tab10")(i % 10) for i in range(len(methods))]
    with style.context(str(STYLE_SHEET)):
        figure, panels = pyplot.subplots(2, len(TASKS), figsize=(12, 7.5), layout="constrained", sharey="col")
        for line, (field, scale, x_label) in zip(
            panels, (("positions", 1, "positions per head"), ("cache_bytes", 1e6, "cache in use, MB")), strict=True
        ):
            for axes, (task, title) in zip(line, TASKS.items(), strict=True):
                for method, color in zip(methods, colors, strict=True):
                    chosen = sorted((p for p in points if p.method == method), key=lambda p: p.mean(field))
                    x = [p.mean(field) / scale for p in chosen]
                    shares = 100 * np.array([p.shares[task] for p in chosen])
                    marker = "*" if method == "fit" else "x" if method.startswith("kvpress") else "o"
                    axes.plot(x, shares[:, 0], marker=marker, color=color, label=method)
                    axes.fill_between(x, shares[:, 1], shares[:, 2], color=color, alpha=0.08, linewidth=0)
                axes.axhline(100, color="gray", linestyle=":", linewidth=1)
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:g}")
                axes.set(title=title, xlabel=x_label, ylabel="share of the full text's gain, %")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def format_notes(rows: Sequence[Row]) -> str:
    """Return what the fits and the first token took."""
    notes = list[str]()
    for row in rows:
        if row["method"] == "fit":
            notes.append(
                f"- `fit`, document {row['document'] + 1}: {row['steps']} steps on {row['rows']} rows of up to "
                f"{row['max_tokens']} tokens, best step {row['best']}, {row['seconds']:.0f} s of processor time."
            )
        elif row["method"] == "first token":
            notes.append(
                f"- First token of an answer about a document of {row['tokens']:,} tokens: {row['text']:.2f} s of "
                f"processor time from the text, {row['memory']:.2f} s from a memory at {row['divisor']}× "
                f"with equal heads, {row['text'] / row['memory']:.1f} times sooner (one measurement)."
            )
    return "\n".join(notes)


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Write the page, and its plot beside it."""
    points = summarize_rows(rows)
    plot = path.with_suffix(".svg")
    plot_measurements(points, plot)
    tokens = " and ".join(f"{n:,}" for n in sorted({row["tokens"] for row in rows if "following" in row}))
    models = ", ".join(sorted({row["model"] for row in rows}))
    caption = f"Model: {models}. Documents of {tokens} tokens. Keys and values in float32."
    parts = [
        INTRODUCTION.strip(),
        caption,
        f"![Share of the full text's gain against positions and bytes]({plot.name})",
        format_table(points),
        format_notes(rows),
        f"Written by `python benchmarks/kv_memories.py --results FILE --page docs/{path.name}`; the beginning of the "
        "program names the commands that measure.",
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
