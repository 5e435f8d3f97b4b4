"""What each way of a context is worth: perplexity by context (E1), and of excerpts copied from it (E1x).

Symbols: R seeds, N documents; nats are per scored token of a document, and documents count alike.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.compression.evaluate import BUCKET_TOKENS, DocumentResult
from laconic.evaluation.statistics import Estimate, ScoreMatrix

SeedResults = Sequence[Sequence[DocumentResult]]
SIGNIFICANT_ERRORS = 2  # standard errors by which something has to be more than nothing
MIN_TEXT_GROUPS = 10  # of which documents are stretches, from which on errors are over texts
FULL_TUNED = "full-tuned"  # the whole text, read by a plain model that was trained as long, beside
UNTRAINED = "untrained"  # ways of the method before a step, which are measured against each other


class ContextGain(NamedTuple):
    """A way over its seeds: nats per scored token, what it saves against no context, paired, and its standard error.

    `share` is that of what the whole text saves, None where that is not shown to save anything; `late` the same saving
    without a tail's first `WIDTH` positions. `vectors` are the mean of a segment (None where the context is text),
    `held` those, or tokens, that stand before a tail.
    """

    condition: str
    nll: Estimate
    accuracy: Estimate
    gain: Estimate
    se: float
    share_of_full: float | None
    late_gain: Estimate | None
    mean_vectors: float | None
    context_size: float


def nll_per_document(seeds: SeedResults, condition: str, first_bucket: int = 0) -> ScoreMatrix:
    """Nats per scored token of each document, [R, N], from the `start`-th `WIDTH` positions of a tail on."""
    return np.array(
        [
            [sum(r.conditions[condition].nll[first_bucket:]) / sum(r.scored_tokens[first_bucket:]) for r in rows]
            for rows in seeds
        ]
    )


def accuracy_per_document(seeds: SeedResults, condition: str) -> ScoreMatrix:
    """Share of the scored tokens that came out right, [R, N]."""
    return np.array(
        [[row.conditions[condition].num_correct / sum(row.scored_tokens) for row in rows] for rows in seeds]
    )


def mean_vectors(rows: Sequence[DocumentResult], condition: str) -> float | None:
    """Mean vectors of a segment; None where there are none."""
    written = [n for row in rows for n in row.conditions[condition].vectors_per_segment]
    return sum(written) / len(written) if written else None


def group_by_text(names: Sequence[str]) -> list[str] | None:
    """The text that each document is a stretch of; None, each by itself, where there are too few texts for errors."""
    found = [name.split("@")[0] for name in names]
    return found if len(set(found)) >= MIN_TEXT_GROUPS else None


def clustered_standard_error(differences: ScoreMatrix, groups: Sequence[str] | None = None) -> float:
    """Of the mean over documents of what is first averaged over seeds; documents of one group are not independent.

    Of groups g with sums d_g of deviations from the mean it is sqrt(G / (G - 1) sum over g of d_g^2) / N.
    """
    each = differences.mean(0)
    _, at = np.unique(np.arange(len(each)) if groups is None else np.array(groups), return_inverse=True)
    sums = np.bincount(at, each - each.mean())
    G = len(sums)
    return float(np.sqrt(G / (G - 1) * (sums**2).sum()) / len(each)) if G > 1 else float("nan")


def context_gain(seeds: SeedResults, condition: str, full_condition: str | None) -> ContextGain:
    """What a way is worth; `whole` is the way in which all of the text is read."""
    base = f"{UNTRAINED} none" if condition.startswith(UNTRAINED) else "none"
    nothing, here = nll_per_document(seeds, base), nll_per_document(seeds, condition)
    apart = nothing - here
    texts = group_by_text([row.id for row in seeds[0]])
    most = None if full_condition is None or base != "none" else nothing - nll_per_document(seeds, full_condition)
    there = most is not None and float(most.mean()) > SIGNIFICANT_ERRORS * clustered_standard_error(most, texts)
    late = all(sum(row.scored_tokens[1:]) for row in seeds[0])
    counts = [n for n in (mean_vectors(rows, condition) for rows in seeds) if n is not None]
    return ContextGain(
        condition,
        statistics.estimate_mean(here),
        statistics.estimate_proportion(accuracy_per_document(seeds, condition)),
        statistics.estimate_mean(apart),
        clustered_standard_error(apart, texts),
        float(apart.mean() / most.mean()) if most is not None and there else None,
        statistics.estimate_mean(nll_per_document(seeds, base, 1) - nll_per_document(seeds, condition, 1))
        if late
        else None,
        float(np.mean(counts)) if counts else None,
        float(np.mean([[row.conditions[condition].context_size for row in rows] for rows in seeds])),
    )


def add_control(seeds: SeedResults, control: SeedResults) -> list[list[DocumentResult]]:
    """The same documents, each with the way in which a plain model reads all of its text behind those of the run.

    Where the control has fewer seeds, they stand for all.
    """
    return [
        [
            row._replace(conditions={**row.conditions, FULL_TUNED: beside.conditions["full"]})
            for row, beside in zip(rows, there, strict=True)
        ]
        for rows, there in zip(seeds, cycle(control), strict=False)
    ]


def nll_by_position(seeds: SeedResults, condition: str) -> list[float]:
    """Nats per token of each `WIDTH` positions of the tail."""
    nats = np.array([[row.conditions[condition].nll for row in rows] for rows in seeds]).sum((0, 1))
    counts = np.array([[row.scored_tokens for row in rows] for rows in seeds]).sum((0, 1))
    return (nats / np.maximum(counts, 1)).tolist()


def common_conditions(seeds: SeedResults) -> list[str]:
    """The ways that every document of every seed was read in, in their order."""
    first = seeds[0][0].conditions
    return [name for name in first if all(name in row.conditions for rows in seeds for row in rows)]


def context_gains(seeds: SeedResults) -> list[ContextGain]:
    """Every way; of recall without shares, since facts as text are what no reader of vectors was taught to read."""
    ways = common_conditions(seeds)
    whole = "full" if "full" in ways and seeds[0][0].num_facts is None else None
    return [context_gain(seeds, way, whole) for way in ways]


def gain_to_json(gain: ContextGain) -> dict[str, Any]:
    """A way's figures as JSON holds them."""
    held = gain._asdict()
    return {k: v._asdict() if isinstance(v, Estimate) else v for k, v in held.items()} | {
        "perplexity": float(np.exp(gain.nll.mean)),
        "curve_width": BUCKET_TOKENS,
    }


def nan_to_none(value: Any) -> Any:
    """Figures as JSON can hold them: None for what is no number, as the standard error of one document alone."""
    if isinstance(value, dict):
        return {key: nan_to_none(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(x) for x in value]
    return None if isinstance(value, float) and np.isnan(value) else value
