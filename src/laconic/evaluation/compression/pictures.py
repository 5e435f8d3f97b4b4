"""What is drawn on the page on runs that read: quality against vectors, and nats along the tail."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.pareto import FIXED_LENGTH, LEARNED_LENGTH, ORACLE_LENGTH, TEXT_END, ParetoPoint
from laconic.evaluation.compression.perplexity import (
    FULL_TUNED,
    UNTRAINED,
    common_conditions,
    nll_by_position,
    nll_per_document,
)
from laconic.evaluation.compression.table import CompressionResult
from laconic.evaluation.report.old_plots import new_axes, series_color, to_svg

SERIES_KINDS = (FIXED_LENGTH, LEARNED_LENGTH, TEXT_END, ORACLE_LENGTH)
CONDITION_TITLES = {
    "none": "no context",
    "full": "whole text",
    FULL_TUNED: "whole text, full-tuned",
    f"{UNTRAINED} none": f"no context, {UNTRAINED}",
}
MARKERS = {FIXED_LENGTH: ("o", "-"), LEARNED_LENGTH: ("D", "none"), TEXT_END: (".", ":"), ORACLE_LENGTH: (".", "--")}
LEVEL_STYLES = {"full": (0, (6, 3)), FULL_TUNED: (0, (6, 2, 1, 2))}


class LegendEntry(NamedTuple):
    """A series of a picture, for its legend."""

    title: str
    color_index: int
    kind: str


def condition_title(condition: str) -> str:
    """What a way is called on the page."""
    return CONDITION_TITLES.get(condition, condition)


def build_legend(
    points: Sequence[ParetoPoint], runs: Sequence[str], results: Sequence[CompressionResult]
) -> list[LegendEntry]:
    """The series of the picture."""
    keys = [
        LegendEntry(f"{run}: {kind}", runs.index(run), kind)
        for run in runs
        for kind in SERIES_KINDS
        if any(p.run == run and p.kind == kind for p in points)
    ]
    keys += [
        LegendEntry(f"{line.run}: {condition_title(way)}", runs.index(line.run), way)
        for line in results
        for way, _ in full_text_levels(line)
    ]
    return keys


def full_text_levels(result: CompressionResult) -> list[tuple[str, float]]:
    """What the whole text is worth to a run, and to the plain model beside it: lines across the picture."""
    there = (
        []
        if result.is_recall
        else [way for way in (FULL_TUNED, "full") if way in common_conditions(result.documents_by_seed)]
    )
    return [(way, float(nll_per_document(result.documents_by_seed, way).mean())) for way in there]


def plot_pareto(
    points: Sequence[ParetoPoint], runs: Sequence[str], results: Sequence[CompressionResult], i: int
) -> Markup:
    """Quality against vectors; up is better."""
    facts = results[0].is_recall
    figure, axes = new_axes("vectors of a segment, mean", "right, %" if facts else "nats a token, down is worse")
    told: list[str] = []
    for run in runs:
        for kind in SERIES_KINDS:
            some = sorted((p for p in points if p.run == run and p.kind == kind), key=lambda p: p.mean_point)
            if not some:
                continue
            x = [p.mean_point[0] for p in some]
            y = [100 * p.mean_point[1] if facts else -p.mean_point[1] for p in some]
            marker, line = MARKERS[kind]
            axes.plot(
                x, y, marker=marker, linestyle=line, markersize=7 if kind == LEARNED_LENGTH else 4, linewidth=1.4,
                color=series_color(runs.index(run)), markerfacecolor="none" if kind == LEARNED_LENGTH else series_color(runs.index(run)),
                markeredgecolor=series_color(runs.index(run)),
            )  # fmt: skip
            told.append(f"{run}, {kind}: " + ", ".join(f"{a:.1f} vectors {b:.3g}" for a, b in zip(x, y, strict=True)))
    for line in results:
        for way, y in full_text_levels(line):
            axes.axhline(y, color=series_color(runs.index(line.run)), linestyle=LEVEL_STYLES[way], linewidth=1)
            told.append(f"{line.run}, {condition_title(way)}: {y:.3g}")
    if not facts:
        axes.invert_yaxis()
    return to_svg(figure, "Quality by vectors of a segment. " + "; ".join(told), f"pareto-{i}")


def plot_positions(results: Sequence[CompressionResult], number: int) -> Markup:
    """Nats a token along the tail, with no context, compressed, and as the whole text."""
    figure, axes = new_axes("tokens of the tail", "nats a token")
    styles = {"none": ":", "compressed": "-", "full": "--"}
    for i, line in enumerate(results):
        for way, style in styles.items():
            if way in common_conditions(line.documents_by_seed):
                y = nll_by_position(line.documents_by_seed, way)
                axes.plot(
                    [BUCKET_TOKENS * (k + 0.5) for k in range(len(y))],
                    y,
                    linestyle=style,
                    linewidth=1.5,
                    color=series_color(i),
                )
    return to_svg(
        figure,
        "Nats a token by position in the tail: dotted without context, solid compressed, dashed whole text",
        f"along-{number}",
    )
