"""Answers to questions: matched with the gold ones, with the passes, cache positions and time that they took."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.batches import AnswerBatch, ReasoningExample
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.interfaces import TrainingData

AnswerFunction = Callable[[Any], AnswerBatch]
WARMUP_QUESTIONS = 10


class AnswerRecord(NamedTuple):
    """The answer to one question, as it is stored: the generated text, and the prediction found in it, if any.

    Passes are forward passes of the decoder by part; cache positions those when the answer began and at its end.
    """

    question: str
    gold: str
    output: str
    prediction: str | None
    is_correct: bool
    passes: Mapping[str, int]
    cache_positions: tuple[int, int]


def match_answers(
    answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: AnswerProtocol
) -> list[AnswerRecord]:
    records: list[AnswerRecord] = []
    rows = zip(examples, answers.texts, answers.passes, answers.cache_positions, strict=True)
    for example, text, passes, positions in rows:
        prediction = protocol.extract(text)
        is_correct = prediction is not None and protocol.is_correct(prediction, example.answer)
        question = example.question, example.answer, text
        records.append(AnswerRecord(*question, prediction, is_correct, passes._asdict(), positions))
    return records


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
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    answer(batch)
    synchronize()
    return time.perf_counter() - start
