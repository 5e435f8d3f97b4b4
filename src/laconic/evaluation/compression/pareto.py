"""Quality against the number of vectors (E5): points, the line through fixed lengths, and what lies above it.

Quality is accuracy where documents hold facts, else nats per scored token with its sign turned, so that more is better.
Symbols: x mean vectors of a segment, R seeds, N documents, beta nats that a vector costs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from laconic.evaluation.compression.evaluate import DocumentResult
from laconic.evaluation.compression.perplexity import (
    SIGNIFICANT_ERRORS,
    accuracy_per_document,
    clustered_standard_error,
    common_conditions,
    group_by_text,
    mean_vectors,
    nll_per_document,
)
from laconic.evaluation.compression.table import CompressionResult
from laconic.evaluation.statistics import ScoreMatrix

FIXED_LENGTH, LEARNED_LENGTH, TEXT_END, ORACLE_LENGTH = (
    "fixed lengths",
    "learned length",
    "end of the text",
    "best length, by trial",
)
ORACLE_PRICES = tuple(0.01 * 10 ** (i / 5) for i in range(18))  # of the best lengths


class ParetoPoint(NamedTuple):
    """A way of a run: x of each seed, quality [R, N]; `documents` are what it was measured on.

    `generator` is how the run's vectors arise.
    """

    documents: tuple[tuple[str, int | None, tuple[int, ...]], ...]
    run: str
    condition: str
    kind: str
    generator: str | None
    seeds: tuple[int, ...]
    x: tuple[float, ...]
    scores: ScoreMatrix

    @property
    def text_groups(self) -> list[str] | None:
        """The texts that errors are taken over."""
        return group_by_text([name for name, _, _ in self.documents])

    @property
    def mean_point(self) -> tuple[float, float]:
        """Mean x, and mean quality."""
        return float(np.mean(self.x)), float(self.scores.mean())


class LengthComparison(NamedTuple):
    """A learned length less the line through fixed lengths at the same mean: `se` over documents and seeds.

    `line` says whose lengths those are; `helps` is above by more than `ERRORS` standard errors.
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


def condition_quality(result: CompressionResult, condition: str) -> ScoreMatrix:
    """[R, N]."""
    return (
        accuracy_per_document(result.documents_by_seed, condition)
        if result.is_recall
        else -nll_per_document(result.documents_by_seed, condition)
    )


def classify_condition(result: CompressionResult, condition: str) -> str | None:
    """Which line of the picture a way belongs to; None: it is no point of it."""
    if condition.startswith("end"):
        return TEXT_END
    if condition == "oracle length":
        return ORACLE_LENGTH
    if condition.startswith("n = ") or (condition == "compressed" and result.run_info.get("length") == "fixed"):
        return FIXED_LENGTH
    learned = condition in ("compressed", "sampled") or condition.startswith("quantile")
    return LEARNED_LENGTH if learned and result.run_info.get("length") in ("stop_head", "classifier") else None


def pareto_points(result: CompressionResult) -> list[ParetoPoint]:
    """The points of a run on a set."""
    found: list[ParetoPoint] = []
    for way in common_conditions(result.documents_by_seed):
        kind = classify_condition(result, way)
        if kind is None:
            continue
        x = [
            mean_text_tokens(rows, way) if kind == TEXT_END else mean_vectors(rows, way) or 0.0
            for rows in result.documents_by_seed
        ]
        made = result.run_info.get("generator")
        found.append(
            ParetoPoint(
                result.document_keys,
                result.run,
                way,
                kind,
                made,
                result.seeds,
                tuple(x),
                condition_quality(result, way),
            )
        )
    return found + oracle_points(result)


def mean_text_tokens(rows: Sequence[DocumentResult], condition: str) -> float:
    """Tokens of text before a tail, of a segment."""
    segments = max((len(said.vectors_per_segment) for said in rows[0].conditions.values()), default=1)
    return float(np.mean([row.conditions[condition].context_size for row in rows])) / max(segments, 1)


def oracle_points(result: CompressionResult) -> list[ParetoPoint]:
    """Of each document the fixed length with the least nats + beta N, for several beta: a bound, not a method.

    Where a context is a single segment, so that this is its oracle length; no document is read again.
    """
    ways = [way for way in common_conditions(result.documents_by_seed) if way.startswith("n = ")]
    if len(ways) < 2 or any(
        len(row.conditions[ways[0]].vectors_per_segment) > 1 for row in result.documents_by_seed[0]
    ):
        return []
    found, made = dict[float, ParetoPoint](), result.run_info.get("generator")
    for beta in ORACLE_PRICES:
        best = [[cheapest_condition(row, ways, beta) for row in rows] for rows in result.documents_by_seed]
        x = tuple(
            mean_chosen_vectors(rows, chosen) for rows, chosen in zip(result.documents_by_seed, best, strict=True)
        )
        every = {way: condition_quality(result, way) for way in ways}
        scores = np.array([[every[way][r, d] for d, way in enumerate(chosen)] for r, chosen in enumerate(best)])
        found.setdefault(
            round(float(np.mean(x)), 2),
            ParetoPoint(
                result.document_keys, result.run, f"beta {beta:.2g}", ORACLE_LENGTH, made, result.seeds, x, scores
            ),
        )
    return sorted(found.values(), key=lambda point: point.mean_point)


def cheapest_condition(row: DocumentResult, conditions: Sequence[str], beta: float) -> str:
    """The way with the least nats + beta N, the first of two alike."""
    return min(
        conditions, key=lambda way: sum(row.conditions[way].nll) + beta * sum(row.conditions[way].vectors_per_segment)
    )


def mean_chosen_vectors(rows: Sequence[DocumentResult], chosen: Sequence[str]) -> float:
    """Mean vectors of a segment where each document has a way of its own."""
    written = [n for row, way in zip(rows, chosen, strict=True) for n in row.conditions[way].vectors_per_segment]
    return sum(written) / len(written)


def interpolate_quality(fixed: Sequence[ParetoPoint], x: float, seed: int) -> ScoreMatrix | None:
    """Quality [N] on the line through fixed lengths at x, document by document; None before the shortest.

    Behind the longest it is that of the longest, which has fewer vectors. `seed` is the place of a seed; runs of fewer
    seeds stand for all.
    """
    order = sorted(fixed, key=lambda point: point.x[seed % len(point.x)])
    places = [point.x[seed % len(point.x)] for point in order]
    if not places or x < places[0]:
        return None
    x = min(x, places[-1])
    i = min(max(int(np.searchsorted(places, x)), 1), len(places) - 1) if len(places) > 1 else 0
    right = order[i].scores[seed % len(order[i].scores)]
    if i == 0:
        return right
    left = order[i - 1].scores[seed % len(order[i - 1].scores)]
    span = places[i] - places[i - 1]
    share = 1.0 if span == 0 else (x - places[i - 1]) / span
    return (1 - share) * left + share * right


def seed_document_error(differences: ScoreMatrix, texts: Sequence[str] | None = None) -> float:
    """Standard error of a mean over seeds and documents: both vary."""
    R = len(differences)
    return math.hypot(
        clustered_standard_error(differences, texts),
        float(differences.mean(1).std(ddof=1)) / math.sqrt(R) if R > 1 else 0.0,
    )


def compare_learned_lengths(results: Sequence[CompressionResult]) -> list[LengthComparison]:
    """Each learned length against its own run's fixed lengths, and against runs of its generator trained with one."""
    every = [point for line in results for point in pareto_points(line)]
    trained = [p for p in every if p.kind == FIXED_LENGTH and p.condition == "compressed"]
    found: list[LengthComparison] = []
    for point in (p for p in every if p.kind == LEARNED_LENGTH):
        own = [p for p in every if p.kind == FIXED_LENGTH and p.run == point.run]
        others = [p for p in trained if (p.documents, p.generator) == (point.documents, point.generator)]
        for name, fixed in (("its own", own), ("runs of fixed length", others)):
            on_line = [interpolate_quality(fixed, x, seed) for seed, x in enumerate(point.x)]
            same = [scores for scores in on_line if scores is not None]
            if len(same) < len(on_line):
                continue
            apart = point.scores - np.stack(same)
            mean, se = float(apart.mean()), seed_document_error(apart, point.text_groups)
            x, at = point.mean_point
            helps = bool(mean > SIGNIFICANT_ERRORS * se)
            found.append(
                LengthComparison(point.run, point.condition, name, x, at, float(np.stack(same).mean()), mean, se, helps)
            )
    return found
