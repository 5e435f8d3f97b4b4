"""Measure latency (one question at a time) and throughput (batches) of answer functions."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.evaluation.reasoning.evaluate import AnswerFunction
from laconic.interfaces import TrainingData

WARMUP_QUESTIONS = 10
THROUGHPUT_BATCH = 64


class Latency(NamedTuple):
    """Milliseconds per question asked alone with greedy decoding: median and 90th percentile."""

    median: float
    p90: float
    num_questions: int


class Throughput(NamedTuple):
    """Questions per second in batches of `batch_size`."""

    questions_per_second: float
    batch_size: int


def measure_latencies(
    systems: Sequence[tuple[AnswerFunction, TrainingData]], count: int, num_rows: int, device: str = "cpu"
) -> list[Latency]:
    """Measure the latency of several systems on the first `count` of `num_rows` questions, after ten for warm-up.

    The systems take turns at every question, so that none is favoured by the machine's load.
    """
    count = min(count, num_rows)
    rows = [*warmup_rows(count, num_rows, WARMUP_QUESTIONS), *range(count)]
    seconds = [[time_call(answer, source.batch([i], 0, 0), device) for answer, source in systems] for i in rows]
    milliseconds = 1000 * np.array(seconds[WARMUP_QUESTIONS:]).reshape(count, len(systems))
    return [
        Latency(float(np.median(column)), float(np.quantile(column, 0.9)), len(column)) for column in milliseconds.T
    ]


def measure_throughput(
    answer: AnswerFunction, source: TrainingData, count: int, num_rows: int, device: str = "cpu"
) -> Throughput:
    """Measure throughput in whole batches, after one warm-up batch.

    `count` questions are timed, rounded down to whole batches, at least one; fewer than a batch make one smaller batch.
    """
    batch_size = min(THROUGHPUT_BATCH, num_rows)
    total = batch_size * max(1, min(count, num_rows) // batch_size)
    time_call(answer, source.batch(warmup_rows(total, num_rows, batch_size), 0, 0), device)
    batches = (source.batch(range(start, start + batch_size), 0, 0) for start in range(0, total, batch_size))
    return Throughput(total / sum(time_call(answer, batch, device) for batch in batches), batch_size)


def warmup_rows(count: int, num_rows: int, num_warmup: int) -> list[int]:
    """Return the rows after the first `count`, starting again at the first where there are no more."""
    return [(count + i) % num_rows for i in range(num_warmup)]


def timing_caveats(num_rows: int, latency: Latency, throughput: Throughput) -> list[str]:
    """Return what has to be said about timings on a set with few questions."""
    total = throughput.batch_size * max(1, latency.num_questions // throughput.batch_size)
    caveats: list[str] = []
    if throughput.batch_size < THROUGHPUT_BATCH:
        caveats.append(
            f"throughput is for batches of {throughput.batch_size}: it has fewer than {THROUGHPUT_BATCH} questions"
        )
    if num_rows < max(latency.num_questions + WARMUP_QUESTIONS, total + throughput.batch_size):
        caveats.append("some timed questions were also warm-up questions: it has too few others")
    return caveats


def time_call(answer: AnswerFunction, batch: Any, device: str) -> float:
    """Return the seconds that a call takes, with the device synchronized before and after."""
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    answer(batch)
    synchronize()
    return time.perf_counter() - start
