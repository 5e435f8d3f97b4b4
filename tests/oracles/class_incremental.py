"""Oracles of class-incremental learning: loops written from the definitions, and common misreadings."""

import math
from collections.abc import Callable, Sequence

Matrix = Sequence[Sequence[float]]
Logits = Callable[[Sequence[int]], Sequence[Sequence[float]]]


def average_accuracy(A: Matrix) -> float:
    total = 0.0
    for j in range(len(A)):
        total += A[len(A) - 1][j]
    return total / len(A)


def backward_transfer(A: Matrix) -> float:
    n, total = len(A), 0.0
    for j in range(n):
        if j < n - 1:
            total += A[n - 1][j] - A[j][j]
    return total / (n - 1)


def forgetting(A: Matrix, *, last_row: bool = False) -> float:
    n, total = len(A), 0.0
    for j in range(n - 1):
        best = -math.inf
        for i in range(j, n if last_row else n - 1):
            best = max(best, A[i][j])
        total += best - A[n - 1][j]
    return total / (n - 1)


def plasticity(A: Matrix) -> float:
    total = 0.0
    for j in range(len(A)):
        total += A[j][j]
    return total / len(A)


def log_probability(logits: Sequence[float], word: int) -> float:
    most = max(logits)
    return logits[word] - most - math.log(sum(math.exp(x - most) for x in logits))


def label_score(logits: Logits, before: Sequence[int], words: Sequence[int], *, mean: bool = True) -> float:
    """Return the score of a label; `logits` maps ids to the logits after each."""
    total = 0.0
    for t, word in enumerate(words):
        total += log_probability(logits([*before, *words[:t]])[-1], word)
    return total / len(words) if mean else total


def best_class(scores: Sequence[float], among: Sequence[int]) -> int:
    best = None
    for k in sorted(among):
        if best is None or scores[k] > scores[best]:
            best = k
    assert best is not None
    return best


def accuracy(
    scores: Sequence[Sequence[float]],
    labels: Sequence[int],
    tasks: Sequence[Sequence[int]],
    i: int,
    j: int,
    candidates: str = "seen",
) -> float:
    """Return A[i, j] from the scores of the items of task j after task i; other `candidates` are misreadings."""
    seen: list[int] = []
    for task in tasks[: i + 1]:
        seen += task
    among = {"seen": seen, "current": tasks[i], "own": tasks[j], "all": [k for task in tasks for k in task]}[candidates]
    hits = 0
    for row, label in zip(scores, labels, strict=True):
        hits += best_class(row, among) == label
    return hits / len(labels)


def nearest_mean(train: Sequence[tuple[Sequence[float], int]], x: Sequence[float], K: int) -> list[float]:
    scores: list[float] = []
    for k in range(K):
        members = [v for v, label in train if label == k]
        mean = [sum(v[d] for v in members) / len(members) for d in range(len(x))] if members else None
        scores.append(-math.inf if mean is None else -sum((x[d] - mean[d]) ** 2 for d in range(len(x))))
    return scores


def within_class_covariance(train: Sequence[tuple[Sequence[float], int]], K: int, D: int) -> list[list[float]]:
    """Return the within-class covariance, with n - K in the denominator."""
    S = [[0.0] * D for _ in range(D)]
    classes = 0
    for k in range(K):
        members = [v for v, label in train if label == k]
        classes += bool(members)
        for v in members:
            for a in range(D):
                for b in range(D):
                    means = [sum(u[d] for u in members) / len(members) for d in (a, b)]
                    S[a][b] += (v[a] - means[0]) * (v[b] - means[1])
    return [[S[a][b] / (len(train) - classes) for b in range(D)] for a in range(D)]
