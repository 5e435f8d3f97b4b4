"""Perplexity of tails by condition, gains over no context, recall of facts, and quality by the number of vectors.

Nats are per scored token of a document, and every document counts the same. Scores are [R seeds, N documents]. In fact
recall, F is the number of facts of a document, N its number of vectors, and E[N] the mean under the stop distribution.
Quality is accuracy for fact recall, otherwise the negative nats per scored token; it is compared at equal x, the mean
number of vectors per segment.
"""

import math
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


FIXED_LENGTH, LEARNED_LENGTH = "fixed lengths", "learned length"
TEXT_END, ORACLE_LENGTH = "end of the text", "best length, by trial"


class ParetoPoint(NamedTuple):
    """One condition of a run on a data set, and the series it belongs to, such as `FIXED_LENGTH`.

    `x` is the mean number of vectors per segment of each seed; scores are the quality, [R, N].
    """

    result: RunResult
    condition: str
    kind: str
    x: tuple[float, ...]
    scores: ScoreMatrix

    @property
    def mean_point(self) -> tuple[float, float]:
        return float(np.mean(self.x)), float(self.scores.mean())


class LengthComparison(NamedTuple):
    """A learned length against fixed lengths of the same mean.

    `baseline` says whose fixed lengths these are. `fixed_quality` is that on the line through them at the same x; the
    difference is the learned length's quality minus it, with its standard error over documents and seeds.
    """

    point: ParetoPoint
    baseline: str
    fixed_quality: float
    difference: float
    se: float

    @property
    def verdict(self) -> str:
        """Whether the difference exceeds `SIGNIFICANT_ERRORS` standard errors, in words."""
        if self.difference > SIGNIFICANT_ERRORS * self.se:
            return "above the line"
        return "below the line" if self.difference < -SIGNIFICANT_ERRORS * self.se else "no difference shown"


def document_keys(result: RunResult) -> tuple[Any, ...]:
    """Return what results on the same documents have in common."""
    shared = [(item.id, item.shared) for item in result.items_by_seed[0]]
    return tuple((name, metrics["num_facts"], tuple(metrics["scored_tokens"])) for name, metrics in shared)


def classify_condition(result: RunResult, condition: str) -> str | None:
    """Return the series of a condition; None if it is not plotted."""
    if condition.startswith("end"):
        return TEXT_END
    if condition == "oracle length":
        return ORACLE_LENGTH
    length_policy = result.info.get("length_policy")
    if condition.startswith("n = ") or (condition == "compressed" and length_policy == "fixed"):
        return FIXED_LENGTH
    is_learned = condition in ("compressed", "sampled") or condition.startswith("quantile")
    return LEARNED_LENGTH if is_learned and length_policy in ("stop_head", "classifier") else None


def pareto_points(result: RunResult) -> list[ParetoPoint]:
    points: list[ParetoPoint] = []
    sign, quality = (1, share_correct) if is_recall(result) else (-1, nll_per_token)
    for condition in result.conditions:
        kind = classify_condition(result, condition)
        if kind is not None:
            count = mean_text_tokens if kind == TEXT_END else mean_vectors
            x = tuple(count(documents, condition) or 0.0 for documents in result.items_by_seed)
            points.append(ParetoPoint(result, condition, kind, x, sign * result.scores(condition, quality)))
    return points


def mean_text_tokens(documents: Sequence[EvalItem], condition: str) -> float:
    """Return the mean number of text tokens before a tail, per segment."""
    segments = max(len(metrics["vectors_per_segment"]) for metrics in documents[0].conditions.values())
    return float(np.mean([item.conditions[condition]["context_size"] for item in documents])) / max(segments, 1)


def interpolate_quality(fixed: Sequence[ParetoPoint], x: float, seed: int) -> ScoreMatrix | None:
    """Interpolate the quality [N] of fixed lengths at x mean vectors per segment, document by document.

    Beyond the longest length, that length's quality is returned, and None below the shortest one. Runs with fewer seeds
    repeat theirs.
    """
    points = [(point.x[seed % len(point.x)], point.scores[seed % len(point.scores)]) for point in fixed]
    points.sort(key=lambda point: point[0])
    lengths = [length for length, _ in points]
    if not lengths or x < lengths[0]:
        return None
    i, share = divmod(float(np.interp(x, lengths, range(len(points)))), 1)
    left = points[int(i)][1]
    right = points[min(int(i) + 1, len(points) - 1)][1]
    return (1 - share) * left + share * right


def seed_document_error(differences: ScoreMatrix, texts: Sequence[str] | None = None) -> float:
    """Compute the standard error of a mean over seeds and documents, both of which vary."""
    R = len(differences)
    seed_error = float(differences.mean(1).std(ddof=1)) / math.sqrt(R) if R > 1 else 0.0
    return math.hypot(clustered_standard_error(differences, texts), seed_error)


def compare_learned_lengths(points: Sequence[ParetoPoint]) -> list[LengthComparison]:
    """Compare each learned length with its own run's fixed lengths, and with runs trained with a fixed length.

    These runs compute vectors in the same way, and all points are on the same documents.
    """
    fixed = [point for point in points if point.kind == FIXED_LENGTH]
    trained_fixed = [point for point in fixed if point.condition == "compressed"]
    comparisons: list[LengthComparison] = []
    for point in (point for point in points if point.kind == LEARNED_LENGTH):
        run = point.result.run
        summary = point.result.info.get("summary")
        lines = {
            "its own": [p for p in fixed if p.result.run == run],
            "runs of fixed length": [p for p in trained_fixed if p.result.info.get("summary") == summary],
        }
        for baseline, others in lines.items():
            line = [interpolate_quality(others, x, seed) for seed, x in enumerate(point.x)]
            known = [scores for scores in line if scores is not None]
            if len(known) < len(line):
                continue
            differences = point.scores - np.stack(known)
            mean = float(differences.mean())
            se = seed_document_error(differences, group_by_text(point.result))
            comparisons.append(LengthComparison(point, baseline, float(np.stack(known).mean()), mean, se))
    return comparisons
