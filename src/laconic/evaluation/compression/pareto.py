"""Quality against the number of vectors: points of fixed and learned lengths, and which learned ones are better.

Quality is accuracy for fact recall, otherwise the negative nats per scored token, so that larger is better.
Symbols: x mean vectors per segment, R seeds, N documents.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation.compression.scores import (
    SIGNIFICANT_ERRORS,
    clustered_standard_error,
    group_by_text,
    is_recall,
    mean_vectors,
    nll_per_token,
    share_correct,
)
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import ScoreMatrix
from laconic.evaluation.suite import RunResult

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
