"""The time that answers take: one question alone, and many at once."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.core.contract import Source
from laconic.evaluation.evaluate import Answer


class Latency(NamedTuple):
    """Milliseconds a question takes when it is asked alone, greedy: median and 90 % point of `questions`."""

    median: float
    p90: float
    questions: int


def latencies(
    asked: Sequence[tuple[Answer, Source]], rows: Sequence[int], warm: int = 10, device: str = "cpu"
) -> list[Latency]:
    """One question at a time, after `warm` that do not count; each is put to all in turn, so that none is favoured."""
    seconds = [
        [timed(answer, source.batch([i], 0, 0), device) for answer, source in asked] for i in [*rows[:warm], *rows]
    ]
    kept = 1000 * np.array(seconds[min(warm, len(rows)) :]).reshape(len(rows), len(asked))
    return [Latency(float(np.median(each)), float(np.quantile(each, 0.9)), len(each)) for each in kept.T]


def throughput(answer: Answer, source: Source, rows: Sequence[int], batch: int = 64, device: str = "cpu") -> float:
    """Questions a second in batches of `batch`, the first batch asked once before."""
    batches = [source.batch(rows[at : at + batch], 0, 0) for at in range(0, len(rows), batch)]
    timed(answer, batches[0], device)
    return len(rows) / sum(timed(answer, one, device) for one in batches)


def timed(answer: Answer, batch: Any, device: str) -> float:
    """Seconds of one call, the device's queue empty before and after."""
    settle = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    settle()
    start = time.perf_counter()
    answer(batch)
    settle()
    return time.perf_counter() - start
