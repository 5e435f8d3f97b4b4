"""Measure the latency of answer functions, one question at a time."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.evaluation.reasoning.evaluate import AnswerFunction
from laconic.interfaces import TrainingData

WARMUP_QUESTIONS = 10


class Latency(NamedTuple):
    """Milliseconds per question asked alone with greedy decoding."""

    median: float
    num_questions: int


def measure_latencies(
    systems: Sequence[tuple[AnswerFunction, TrainingData]], count: int, num_rows: int, device: str = "cpu"
) -> list[Latency]:
    """Measure the latency of several systems on the first `count` of `num_rows` questions, after ten for warm-up.

    The systems take turns at every question, so that none is favoured by the machine's load.
    """
    count = min(count, num_rows)
    rows = [*((count + i) % num_rows for i in range(WARMUP_QUESTIONS)), *range(count)]
    seconds = [[time_call(answer, source.batch([i], 0, 0), device) for answer, source in systems] for i in rows]
    milliseconds = 1000 * np.array(seconds[WARMUP_QUESTIONS:]).reshape(count, len(systems))
    return [Latency(float(np.median(column)), count) for column in milliseconds.T]


def time_call(answer: AnswerFunction, batch: Any, device: str) -> float:
    """Return the seconds that a call takes, with the device synchronized before and after."""
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    answer(batch)
    synchronize()
    return time.perf_counter() - start
