"""Perplexity of tails by condition, what each gains over no context, and recall of a variable number of facts.

Nats are per scored token of a document, and every document counts the same. Scores are [R seeds, N documents]. In fact
recall, F is the number of facts of a document, N its number of vectors, and E[N] the mean under the stop distribution.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import Estimate, ScoreMatrix
from laconic.evaluation.suite import RunResult

SIGNIFICANT_ERRORS = 2  # standard errors from which on a difference counts as one
MIN_TEXT_GROUPS = 10  # number of source texts from which on errors are clustered by text
UNTRAINED = "untrained"  # prefix of the conditions of the method before its first step


class ContextGain(NamedTuple):
    """What a condition gains over no context: nats saved per scored token, paired by document, with a standard error.

    `share_of_full` is the gain as a share of the whole text's; None if that is not significant. `mean_vectors` is the
    mean number of vectors per segment, None if the context is text; `context_size` that of vectors or tokens before the
    tail.
    """

    condition: str
    nll: Estimate
    accuracy: Estimate
    gain: Estimate
    se: float
    share_of_full: float | None
    mean_vectors: float | None
    context_size: float


def is_recall(result: RunResult) -> bool:
    """Return whether the documents are of fact recall."""
    return result.items_by_seed[0][0].shared["num_facts"] is not None


def nll_per_token(metrics: Mapping[str, Any]) -> float:
    return sum(metrics["nll"]) / sum(metrics["scored_tokens"])


def share_correct(metrics: Mapping[str, Any]) -> float:
    return metrics["num_correct"] / sum(metrics["scored_tokens"])


def mean_context_size(result: RunResult, condition: str) -> float:
    return float(result.scores(condition, itemgetter("context_size")).mean())


def mean_vectors(items: Sequence[EvalItem], condition: str) -> float | None:
    """Return the mean number of vectors per segment; None if there are none."""
    counts = [n for item in items for n in item.conditions[condition]["vectors_per_segment"]]
    return sum(counts) / len(counts) if counts else None


def group_by_text(result: RunResult) -> list[str] | None:
    """Return the source text of each document TEXT@START; None if there are too few texts to cluster errors by."""
    texts = [item.id.rsplit("@", 1)[0] for item in result.items_by_seed[0]]
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


def context_gains(result: RunResult) -> list[ContextGain]:
    """Compute all gains; without shares for fact recall, as no model is trained to read its facts as text."""
    nll = {condition: result.scores(condition, nll_per_token) for condition in result.conditions}
    texts = group_by_text(result)
    full_gain = None
    if "full" in nll and not is_recall(result):
        full_gain = nll["none"] - nll["full"]
        if not full_gain.mean() > SIGNIFICANT_ERRORS * clustered_standard_error(full_gain, texts):
            full_gain = None
    gains: list[ContextGain] = []
    for condition in result.conditions:
        is_trained = not condition.startswith(UNTRAINED)
        gain = nll["none" if is_trained else f"{UNTRAINED} none"] - nll[condition]
        gains.append(
            ContextGain(
                condition,
                nll=statistics.estimate_mean(nll[condition]),
                accuracy=statistics.estimate_proportion(result.scores(condition, share_correct)),
                gain=statistics.estimate_mean(gain),
                se=clustered_standard_error(gain, texts),
                share_of_full=float(gain.mean() / full_gain.mean()) if is_trained and full_gain is not None else None,
                mean_vectors=mean_vectors(result.pooled_items, condition),
                context_size=mean_context_size(result, condition),
            )
        )
    return gains


def nll_by_position(result: RunResult, condition: str) -> list[float]:
    """Return nats per token of each bucket of `BUCKET_TOKENS` positions of the tail."""
    metrics = [item.conditions[condition] for item in result.pooled_items]
    nll, counts = (np.array([m[name] for m in metrics]).sum(0) for name in ("nll", "scored_tokens"))
    return (nll / np.maximum(counts, 1)).tolist()


class RecallByFacts(NamedTuple):
    """Documents with the same number of facts in one condition; `mean_vectors` is the mean N of a document."""

    num_facts: int
    num_documents: int
    accuracy: float
    mean_vectors: float


def num_vectors(metrics: Mapping[str, Any]) -> float:
    return sum(metrics["vectors_per_segment"])


def recall_by_facts(result: RunResult, condition: str) -> list[RecallByFacts]:
    """Group a condition by the number of facts; documents of several seeds are pooled."""
    facts, correct, vectors = (
        result.scores(condition, score).ravel() for score in (itemgetter("num_facts"), share_correct, num_vectors)
    )
    groups = [(int(n), facts == n) for n in np.unique(facts)]
    return [
        RecallByFacts(n, int(same.sum()), float(correct[same].mean()), float(vectors[same].mean()))
        for n, same in groups
    ]


def length_fact_correlation(result: RunResult, condition: str) -> float | None:
    """Compute Pearson's correlation of N with F over documents; None if either is constant."""
    facts, lengths = (result.scores(condition, score).ravel() for score in (itemgetter("num_facts"), num_vectors))
    return float(np.corrcoef(facts, lengths)[0, 1]) if facts.std() and lengths.std() else None


class SoftHardGap(NamedTuple):
    """Soft reading minus hard reading, per scored token of a document, and the calibration of the stop distribution.

    `num_vectors` is E[N] minus the mean of hard N. E[N] should match the mean of lengths sampled from the distribution.
    """

    nll: float
    accuracy: float
    num_vectors: float
    expected_length: float
    sampled_length: float
    sampled_se: float


def soft_hard_gap(result: RunResult) -> SoftHardGap | None:
    """Compute the gap between soft and hard reading; None if lengths are not learned."""
    if not {"soft", "compressed", "sampled"} <= {*result.conditions}:
        return None
    nll, accuracy = (
        float((result.scores("soft", score) - result.scores("compressed", score)).mean())
        for score in (nll_per_token, share_correct)
    )
    hard, sampled = (result.scores(condition, num_vectors) for condition in ("compressed", "sampled"))
    expected = float(result.scores("soft", lambda metrics: sum(metrics["expected_lengths"])).mean())
    se = float(sampled.std(ddof=1) / np.sqrt(sampled.size)) if sampled.size > 1 else float("nan")
    return SoftHardGap(
        nll=nll,
        accuracy=accuracy,
        num_vectors=expected - float(hard.mean()),
        expected_length=expected,
        sampled_length=float(sampled.mean()),
        sampled_se=se,
    )
