"""Perplexity of tails by condition, and what each condition gains over no context.

Symbols: R seeds, N documents. Nats are per scored token of a document, and every document counts the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import Estimate, ScoreMatrix

ItemsBySeed = Sequence[Sequence[EvalItem]]
SIGNIFICANT_ERRORS = 2  # standard errors from which on a difference counts as one
MIN_TEXT_GROUPS = 10  # number of source texts from which on errors are clustered by text
FULL_TUNED = "full-tuned"  # condition: a language-model baseline of equal training reads the whole text
UNTRAINED = "untrained"  # prefix of the conditions of the method before its first step


class ContextGain(NamedTuple):
    """What a condition gains over no context: nats saved per scored token, paired by document, with a standard error.

    `share_of_full` is the gain as a share of the whole text's; None if that is not significant. `late_gain` is the gain
    without the first `BUCKET_TOKENS` of each tail; None if nothing else is scored. `mean_vectors` is the mean number of
    vectors per segment, None if the context is text; `context_size` that of vectors or tokens before the tail.
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


def nll_per_document(seeds: ItemsBySeed, condition: str, first_bucket: int = 0) -> ScoreMatrix:
    """Return nats per scored token of each document, [R, N], from bucket `first_bucket` of the tail on."""
    metrics = [[item.conditions[condition] for item in items] for items in seeds]
    nll, counts = (
        np.array([[sum(m[name][first_bucket:]) for m in row] for row in metrics]) for name in ("nll", "scored_tokens")
    )
    return nll / counts


def accuracy_per_document(seeds: ItemsBySeed, condition: str) -> ScoreMatrix:
    """Return the share of scored tokens predicted correctly, [R, N]."""
    metrics = [[item.conditions[condition] for item in items] for items in seeds]
    return np.array([[m["num_correct"] / sum(m["scored_tokens"]) for m in row] for row in metrics])


def mean_vectors(items: Sequence[EvalItem], condition: str) -> float | None:
    """Return the mean number of vectors per segment; None if there are none."""
    counts = [n for item in items for n in item.conditions[condition]["vectors_per_segment"]]
    return sum(counts) / len(counts) if counts else None


def text_name(name: str) -> str:
    """Return the text that a document named TEXT@START belongs to."""
    return name.rsplit("@", 1)[0]


def group_by_text(names: Sequence[str]) -> list[str] | None:
    """Return the source text of each document; None if there are too few texts to cluster errors by."""
    texts = list(map(text_name, names))
    return texts if len(set(texts)) >= MIN_TEXT_GROUPS else None


def clustered_standard_error(differences: ScoreMatrix, groups: Sequence[str] | None = None) -> float:
    """Compute the standard error of a mean over documents, after averaging over seeds.

    Documents of one group are not independent. With sums d_g of deviations from the mean in each of G groups the
    error is sqrt(G / (G - 1) sum over g of d_g^2) / N.
    """
    means = differences.mean(0)
    labels = np.arange(len(means)) if groups is None else np.array(groups)
    _, group_index = np.unique(labels, return_inverse=True)
    sums = np.bincount(group_index, means - means.mean())
    G = len(sums)
    return float(np.sqrt(G / (G - 1) * (sums**2).sum()) / len(means)) if G > 1 else float("nan")


def context_gain(seeds: ItemsBySeed, condition: str, full_condition: str | None) -> ContextGain:
    """Compute the gain of a condition; `full_condition` is the one that reads the whole text."""
    base = f"{UNTRAINED} none" if condition.startswith(UNTRAINED) else "none"
    without, nll = nll_per_document(seeds, base), nll_per_document(seeds, condition)
    gain, texts = without - nll, group_by_text([item.id for item in seeds[0]])
    share_of_full = None
    if full_condition is not None and base == "none":
        full_gain = without - nll_per_document(seeds, full_condition)
        if full_gain.mean() > SIGNIFICANT_ERRORS * clustered_standard_error(full_gain, texts):
            share_of_full = float(gain.mean() / full_gain.mean())
    late_gain = None
    if all(sum(item.shared["scored_tokens"][1:]) for item in seeds[0]):
        late_gain = statistics.estimate_mean(nll_per_document(seeds, base, 1) - nll_per_document(seeds, condition, 1))
    counts = [n for n in (mean_vectors(items, condition) for items in seeds) if n is not None]
    sizes = [[item.conditions[condition]["context_size"] for item in items] for items in seeds]
    return ContextGain(
        condition,
        statistics.estimate_mean(nll),
        statistics.estimate_proportion(accuracy_per_document(seeds, condition)),
        statistics.estimate_mean(gain),
        clustered_standard_error(gain, texts),
        share_of_full,
        late_gain,
        float(np.mean(counts)) if counts else None,
        float(np.mean(sizes)),
    )


def nll_by_position(seeds: ItemsBySeed, condition: str) -> list[float]:
    """Return nats per token of each bucket of `BUCKET_TOKENS` positions of the tail."""
    metrics = [[item.conditions[condition] for item in items] for items in seeds]
    nll, counts = (
        np.array([[m[name] for m in row] for row in metrics]).sum((0, 1)) for name in ("nll", "scored_tokens")
    )
    return (nll / np.maximum(counts, 1)).tolist()


def context_gains(seeds: ItemsBySeed, conditions: Sequence[str]) -> list[ContextGain]:
    """Compute all gains; without shares for fact recall, as no model is trained to read its facts as text."""
    full_condition = "full" if "full" in conditions and seeds[0][0].shared["num_facts"] is None else None
    return [context_gain(seeds, condition, full_condition) for condition in conditions]
