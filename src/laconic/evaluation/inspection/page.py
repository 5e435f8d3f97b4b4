"""What inspection found as one HTML page that asks for nothing, and is read without script."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.evaluation import statistics
from laconic.evaluation.inspection.dataset import AnswerLog, DatasetInspection
from laconic.evaluation.inspection.kv_similarity import KV_SPACES, SimilarityMap
from laconic.evaluation.inspection.question import ChangedAnswer, QuestionInspection
from laconic.evaluation.inspection.summary import (
    BASELINE_LABELS,
    DatasetSummary,
    QuestionSummary,
    chain_word_rates,
    compute_effects,
    correctness_suffix,
    estimate_map_statistics,
    list_caveats,
    name_passes,
)
from laconic.evaluation.report import grids
from laconic.evaluation.report.html import load_template
from laconic.evaluation.report.runs_table import format_interval, format_percent
from laconic.evaluation.statistics import Estimate

ValueRange = tuple[float, float]
INTERVENTION_LABELS = {
    "zero": "zeros in their place",
    "mean": "each slot's mean over other questions",
    "shuffle": "the slots of the question change places",
    "swap": "the thoughts on another question",
    "noise": "Gaussian vectors of equal norm",
}


def render_inspection_page(summary: QuestionSummary | DatasetSummary) -> str:
    """The whole file."""
    filters = {"percent": format_percent, "points": statistics.format_points, "shown": grids.show_whitespace}
    one = isinstance(summary, QuestionSummary)
    return load_template("inspected.html", **filters).render(
        one=one, f=summary, about=INTERVENTION_LABELS, interval=format_interval, notes=summary.notes if one else list_caveats(summary),
        **(question_page_context(summary) if one else dataset_page_context(summary)),
    )  # fmt: skip


def question_page_context(summary: QuestionSummary) -> dict[str, Any]:
    """What the page shows of one question, beside its facts."""
    return {
        "passes": [list(zip(name_passes(side), side.lens.passes, strict=True)) for side in summary.runs],
        "verdicts": [correctness_suffix(side.answer, summary) for side in summary.runs],
        "maps": [
            (
                what,
                BASELINE_LABELS[against],
                plot_maps([(side, side.find_map(what, against)) for side in summary.runs], summary.chain),
            )
            for against in BASELINE_LABELS
            for what in KV_SPACES
            if any(side.find_map(what, against) for side in summary.runs)
        ],
        "kept": [plot_selection(side, summary.chain) for side in summary.runs if side.selections],
        "alone": [(side, group_by_kind(side.slot_effects)) for side in summary.runs],
    }


class MapFigure(NamedTuple):
    """A map of one run as drawn: the mean over layers, and each layer."""

    name: str
    map: SimilarityMap
    mean_plot: Any
    layer_plots: list[tuple[int, bool, Any]]


def plot_maps(
    maps: Sequence[tuple[QuestionInspection, SimilarityMap | None]], chain: Sequence[str]
) -> tuple[list[MapFigure], ValueRange]:
    """The same map of several runs on one scale, and that scale."""
    there = [(side, map) for side, map in maps if map is not None]
    scale = grids.find_value_range([map.mean for _, map in there])
    figures_: list[MapFigure] = []
    for side, map in there:
        columns = chain if map.baseline == "chain" else [str(i + 1) for i in range(len(map.mean[0]))]
        down = [str(m + 1) for m in range(len(map.mean))]
        text = f"{side.name}: cosines of slots (down) with {map.baseline} (across), {describe_row_maxima(map.mean, columns)}"
        mean = grids.plot_heat_map(map.mean, down, columns, scale, text, mark_max=True)
        layers = [
            (
                l,
                l in side.matched_layers,
                grids.plot_heat_map(layer, down, columns, grids.find_value_range([layer]), f"{side.name}, layer {l}"),
            )
            for l, layer in enumerate(map.layers)
        ]
        figures_.append(MapFigure(side.name, map, mean, layers))
    return figures_, scale


def describe_row_maxima(map: Sequence[Sequence[float]], columns: Sequence[str]) -> str:
    """The likest column of every slot, in words."""
    best = [max(range(len(row)), key=row.__getitem__) for row in map]
    return "likest: " + ", ".join(f"{m + 1} {columns[i]} {map[m][i]:.2f}" for m, i in enumerate(best))


class SelectionFigure(NamedTuple):
    """What selectors keep of one chain, as drawn."""

    run: QuestionInspection
    keeps_whole_chain: bool
    share_plot: Any
    class_shares: list[tuple[str, list[float]]]
    token_classes: list[str]
    head_plots: list[tuple[str, Any]]
    score_plots: list[tuple[str, Any]]


def plot_selection(run: QuestionInspection, chain: Sequence[str]) -> SelectionFigure:
    """The shares of layers and heads that keep each token; each head; and the scores behind the run's own choice."""
    heads = [f"{l}.{g}" for l in run.matched_layers for g in range(run.selections[0].mask.shape[1])]
    names = [each.name for each in run.selections]
    shares = [each.token_shares for each in run.selections]
    text = "share of layers and heads that keep each chain token, by selector"
    kinds, tokens = list(dict.fromkeys(run.token_classes)), np.array(run.token_classes)
    return SelectionFigure(
        run,
        bool(run.selections[0].mask.all()),
        grids.plot_heat_map(shares, names, chain, (0.0, 1.0), text),
        [(each.name, [float(each.mask[..., tokens == kind].mean()) for kind in kinds]) for each in run.selections],
        kinds,
        [
            (
                each.name,
                grids.plot_heat_map(
                    flatten_heads(each.mask), heads, chain, (0.0, 1.0), f"kept by {each.name}, layer.head by token"
                ),
            )
            for each in run.selections
        ],
        [
            (
                name,
                grids.plot_heat_map(
                    rows, heads, chain, grids.find_value_range([rows]), f"{name} of each token, layer.head by token"
                ),
            )
            for name, rows in zip("IRS", run.scores or (), strict=False)
        ],
    )


def flatten_heads(mask: NDArray[np.bool_]) -> list[list[float]]:
    """Layers and heads as rows."""
    return mask.reshape(-1, mask.shape[2]).astype(float).tolist()


def group_by_kind(effects: Sequence[ChangedAnswer]) -> Mapping[str, list[ChangedAnswer]]:
    """Effects on single slots by what was done."""
    return {kind: each for kind in INTERVENTION_LABELS if (each := [e for e in effects if e.spec.kind == kind])}


def dataset_page_context(summary: DatasetSummary) -> dict[str, Any]:
    """What the page shows of a set, beside its facts."""
    first = summary.runs[0]
    rows = [compute_effects(side, None if side is first else first, summary.protocol) for side in summary.runs]
    near = sorted({key for side in summary.runs for key in side.mean_maps}, key=lambda key: KV_SPACES.index(key[0]))
    return {
        "base": [statistics.estimate_proportion(side.baseline.correct) for side in summary.runs],
        "rows": rows,
        "swaps": [next((c for c in each if c.spec[:2] == ("swap", "vectors")), None) for each in rows],
        "swept": [estimate_sweep(side.by_iterations) for side in summary.runs],
        "tried": sorted({n for side in summary.runs for n in side.by_iterations}),
        "read": [chain_word_rates(side) for side in summary.runs],
        "likeness": [estimate_map_statistics(side) for side in summary.runs],
        "near": [(what, *plot_mean_maps(summary.runs, (what, against))) for what, against in near],
    }


def estimate_sweep(answered: Mapping[int, AnswerLog]) -> dict[int, Estimate]:
    """Accuracy by test-time rounds."""
    return {n: statistics.estimate_proportion(each.correct) for n, each in answered.items()}


def plot_mean_maps(runs: Sequence[DatasetInspection], key: tuple[str, str]) -> tuple[list[tuple[str, Any]], ValueRange]:
    """A mean map of every run that has it, on one scale."""
    there = [(side, side.mean_maps[key].tolist()) for side in runs if key in side.mean_maps]
    scale = grids.find_value_range([map for _, map in there])
    drawn: list[tuple[str, Any]] = []
    for side, map in there:
        labels = [str(m + 1) for m in range(len(map))]
        text = (
            f"{side.name}: mean cosines of slots (down) with kept tokens (across), {describe_row_maxima(map, labels)}"
        )
        drawn.append((side.name, grids.plot_heat_map(map, labels, labels, scale, text, mark_max=True)))
    return drawn, scale
