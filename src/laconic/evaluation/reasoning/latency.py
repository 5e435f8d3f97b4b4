"""The time that answers take: one question alone, and many at once."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.evaluation.reasoning.evaluate import AnswerFunction
from laconic.interfaces import TrainingData

WARMUP_QUESTIONS = 10  # questions asked before time counts
THROUGHPUT_BATCH = 64  # questions at once, where throughput is taken


class Latency(NamedTuple):
    """Milliseconds a question takes when it is asked alone, greedy: median and 90 % point of `questions`."""

    median: float
    p90: float
    num_questions: int


class Throughput(NamedTuple):
    """Questions a second, in batches of so many."""

    questions_per_second: float
    batch_size: int


def measure_latencies(
    systems: Sequence[tuple[AnswerFunction, TrainingData]], count: int, num_rows: int, device: str = "cpu"
) -> list[Latency]:
    """The first `count` rows of sets of `total`, one at a time, after ten others that do not count; each is put to all
    in turn, so that none is favoured."""
    count = min(count, num_rows)
    rows = [*warmup_rows(count, num_rows, WARMUP_QUESTIONS), *range(count)]
    seconds = [[time_call(answer, source.batch([i], 0, 0), device) for answer, source in systems] for i in rows]
    kept = 1000 * np.array(seconds[WARMUP_QUESTIONS:]).reshape(count, len(systems))
    return [Latency(float(np.median(each)), float(np.quantile(each, 0.9)), len(each)) for each in kept.T]


def measure_throughput(
    answer: AnswerFunction, source: TrainingData, count: int, num_rows: int, device: str = "cpu"
) -> Throughput:
    """The first rows of a set of `total` in whole batches, as many as `count` fills but one at least; after a batch
    of others that does not count. Where a set has fewer rows than a batch, it is one batch."""
    batch = min(THROUGHPUT_BATCH, num_rows)
    whole = batch * max(1, min(count, num_rows) // batch)
    time_call(answer, source.batch(warmup_rows(whole, num_rows, batch), 0, 0), device)
    batches = (source.batch(range(at, at + batch), 0, 0) for at in range(0, whole, batch))
    return Throughput(whole / sum(time_call(answer, one, device) for one in batches), batch)


def warmup_rows(count: int, num_rows: int, num_warmup: int) -> list[int]:
    """The rows behind the first `count` of `total`, to warm up with; where there are no more, the first ones again."""
    return [(count + i) % num_rows for i in range(num_warmup)]


def timing_caveats(num_rows: int, latency: Latency, throughput: Throughput) -> list[str]:
    """What has to be said of the time of a set of few questions."""
    whole = throughput.batch_size * max(1, latency.num_questions // throughput.batch_size)
    again = num_rows < max(latency.num_questions + WARMUP_QUESTIONS, whole + throughput.batch_size)
    found = (
        [f"timed {throughput.batch_size} at once, it has no {THROUGHPUT_BATCH} questions"]
        if throughput.batch_size < THROUGHPUT_BATCH
        else []
    )
    return [*found, "some timed questions were asked before, it has too few others to warm up with"] if again else found


def time_call(answer: AnswerFunction, batch: Any, device: str) -> float:
    """Seconds of one call, the device's queue empty before and after."""
    settle = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    settle()
    start = time.perf_counter()
    answer(batch)
    settle()
    return time.perf_counter() - start
