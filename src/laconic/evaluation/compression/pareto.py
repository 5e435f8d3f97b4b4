"""Quality against the number of vectors: points of fixed and learned lengths, and which learned ones are better.

Quality is accuracy for fact recall, otherwise the negative nats per scored token, so that larger is better.
Symbols: x mean vectors per segment, R seeds, N documents, beta the price of a vector in nats.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from laconic.evaluation.compression.perplexity import (
    SIGNIFICANT_ERRORS,
    accuracy_per_document,
    clustered_standard_error,
    group_by_text,
    mean_vectors,
    nll_per_document,
)
from laconic.evaluation.compression.table import document_keys, is_recall
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import ScoreMatrix
from laconic.evaluation.suite import RunResult

FIXED_LENGTH, LEARNED_LENGTH, TEXT_END, ORACLE_LENGTH = (
    "fixed lengths",
    "learned length",
    "end of the text",
    "best length, by trial",
)
ORACLE_PRICES = tuple(0.01 * 10 ** (i / 5) for i in range(18))


class ParetoPoint(NamedTuple):
    """One condition of a run.

    Attributes:
        documents: Name, number of facts and scored tokens of the documents.
        run: Name of the run.
        condition: Name of the condition.
        kind: The series it belongs to, such as `FIXED_LENGTH`.
        summary: How the run computes vectors.
        seeds: Seeds of the run.
        x: Mean vectors per segment of each seed.
        scores: Quality, [R, N].
    """

    documents: tuple[tuple[str, int | None, tuple[int, ...]], ...]
    run: str
    condition: str
    kind: str
    summary: str | None
    seeds: tuple[int, ...]
    x: tuple[float, ...]
    scores: ScoreMatrix

    @property
    def text_groups(self) -> list[str] | None:
        """The texts that errors are clustered by."""
        return group_by_text([name for name, _, _ in self.documents])

    @property
    def mean_point(self) -> tuple[float, float]:
        """Mean x and mean quality."""
        return float(np.mean(self.x)), float(self.scores.mean())


class LengthComparison(NamedTuple):
    """A learned length against fixed lengths of the same mean.

    Attributes:
        run: Name of the run.
        condition: Rule of the learned length.
        baseline: Whose fixed lengths it is compared with.
        x: Mean vectors per segment.
        quality: Quality of the learned length.
        fixed_quality: Quality on the line through the fixed lengths at x.
        difference: The first minus the second.
        se: Standard error of the difference over documents and seeds.
        is_better: Whether the difference exceeds `SIGNIFICANT_ERRORS` standard errors.
    """

    run: str
    condition: str
    baseline: str
    x: float
    quality: float
    fixed_quality: float
    difference: float
    se: float
    is_better: bool


def condition_quality(result: RunResult, condition: str) -> ScoreMatrix:
    """Return the quality of a condition, [R, N]."""
    if is_recall(result):
        return accuracy_per_document(result.items_by_seed, condition)
    return -nll_per_document(result.items_by_seed, condition)


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
    """Return the points of a run on a data set."""
    points: list[ParetoPoint] = []
    for condition in result.conditions:
        kind = classify_condition(result, condition)
        if kind is None:
            continue
        x = tuple(
            mean_text_tokens(documents, condition) if kind == TEXT_END else mean_vectors(documents, condition) or 0.0
            for documents in result.items_by_seed
        )
        points.append(make_point(result, condition, kind, x, condition_quality(result, condition)))
    return points + oracle_points(result)


def make_point(result: RunResult, condition: str, kind: str, x: tuple[float, ...], scores: ScoreMatrix) -> ParetoPoint:
    """Build a point of a run."""
    summary = result.info.get("summary")
    return ParetoPoint(document_keys(result), result.run, condition, kind, summary, result.seeds, x, scores)


def mean_text_tokens(documents: Sequence[EvalItem], condition: str) -> float:
    """Return the mean number of text tokens before a tail, per segment."""
    segments = max(len(metrics["vectors_per_segment"]) for metrics in documents[0].conditions.values())
    return float(np.mean([item.conditions[condition]["context_size"] for item in documents])) / max(segments, 1)


def oracle_points(result: RunResult) -> list[ParetoPoint]:
    """Choose for each document the fixed length with the least nats + beta N, for several beta: an upper bound.

    Computed from stored results, and only if contexts are single segments, where this is the best length.
    """
    seeds = result.items_by_seed
    conditions = [condition for condition in result.conditions if condition.startswith("n = ")]
    if len(conditions) < 2 or any(len(d.conditions[conditions[0]]["vectors_per_segment"]) > 1 for d in seeds[0]):
        return []
    quality = {condition: condition_quality(result, condition) for condition in conditions}
    points: dict[float, ParetoPoint] = {}
    for beta in ORACLE_PRICES:
        choices = [[cheapest_condition(document, conditions, beta) for document in documents] for documents in seeds]
        x = tuple(mean_chosen_vectors(documents, chosen) for documents, chosen in zip(seeds, choices, strict=True))
        scores = np.array([[quality[c][r, d] for d, c in enumerate(chosen)] for r, chosen in enumerate(choices)])
        point = make_point(result, f"beta {beta:.2g}", ORACLE_LENGTH, x, scores)
        points.setdefault(round(float(np.mean(x)), 2), point)
    return sorted(points.values(), key=lambda point: point.mean_point)


def cheapest_condition(document: EvalItem, conditions: Sequence[str], beta: float) -> str:
    """Return the condition with the least nats + beta N; ties go to the first."""

    def cost(condition: str) -> float:
        metrics = document.conditions[condition]
        return sum(metrics["nll"]) + beta * sum(metrics["vectors_per_segment"])

    return min(conditions, key=cost)


def mean_chosen_vectors(documents: Sequence[EvalItem], chosen: Sequence[str]) -> float:
    """Return the mean vectors per segment if each document has its own condition."""
    pairs = zip(documents, chosen, strict=True)
    counts = [n for document, condition in pairs for n in document.conditions[condition]["vectors_per_segment"]]
    return sum(counts) / len(counts)


def interpolate_quality(fixed: Sequence[ParetoPoint], x: float, seed: int) -> ScoreMatrix | None:
    """Interpolate the quality [N] of fixed lengths at x, document by document.

    Args:
        fixed: Points of fixed lengths.
        x: Mean vectors per segment; beyond the longest length, that length's quality is returned.
        seed: Index of the seed; runs with fewer seeds repeat theirs.

    Returns:
        The quality, or None if x is below the shortest length.
    """
    order = sorted(fixed, key=lambda point: point.x[seed % len(point.x)])
    lengths = [point.x[seed % len(point.x)] for point in order]
    if not lengths or x < lengths[0]:
        return None
    x = min(x, lengths[-1])
    i = min(max(int(np.searchsorted(lengths, x)), 1), len(lengths) - 1) if len(lengths) > 1 else 0
    right = order[i].scores[seed % len(order[i].scores)]
    if i == 0:
        return right
    left = order[i - 1].scores[seed % len(order[i - 1].scores)]
    span = lengths[i] - lengths[i - 1]
    share = 1.0 if span == 0 else (x - lengths[i - 1]) / span
    return (1 - share) * left + share * right


def seed_document_error(differences: ScoreMatrix, texts: Sequence[str] | None = None) -> float:
    """Compute the standard error of a mean over seeds and documents, both of which vary."""
    R = len(differences)
    seed_error = float(differences.mean(1).std(ddof=1)) / math.sqrt(R) if R > 1 else 0.0
    return math.hypot(clustered_standard_error(differences, texts), seed_error)


def compare_learned_lengths(results: Sequence[RunResult]) -> list[LengthComparison]:
    """Compare each learned length with its own run's fixed lengths, and with runs trained with a fixed length."""
    points = [point for result in results for point in pareto_points(result)]
    fixed = [point for point in points if point.kind == FIXED_LENGTH]
    comparisons: list[LengthComparison] = []
    for point in (point for point in points if point.kind == LEARNED_LENGTH):
        same_run = [p for p in fixed if p.run == point.run]
        key = (point.documents, point.summary)
        trained_fixed = [p for p in fixed if p.condition == "compressed" and (p.documents, p.summary) == key]
        for baseline, others in (("its own", same_run), ("runs of fixed length", trained_fixed)):
            line = [interpolate_quality(others, x, seed) for seed, x in enumerate(point.x)]
            known = [scores for scores in line if scores is not None]
            if len(known) < len(line):
                continue
            differences = point.scores - np.stack(known)
            mean, se = float(differences.mean()), seed_document_error(differences, point.text_groups)
            x, quality = point.mean_point
            is_better = bool(mean > SIGNIFICANT_ERRORS * se)
            fixed_quality = float(np.stack(known).mean())
            comparisons.append(
                LengthComparison(point.run, point.condition, baseline, x, quality, fixed_quality, mean, se, is_better)
            )
    return comparisons
