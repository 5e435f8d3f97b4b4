"""The time that answers take: one question alone, and many at once."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.core.contract import Source
from laconic.evaluation.evaluate import Answer

WARM = 10  # questions asked before time counts
MANY = 64  # questions at once, where throughput is taken


class Latency(NamedTuple):
    """Milliseconds a question takes when it is asked alone, greedy: median and 90 % point of `questions`."""

    median: float
    p90: float
    questions: int


class Throughput(NamedTuple):
    """Questions a second, in batches of so many."""

    per_second: float
    batch: int


def latencies(asked: Sequence[tuple[Answer, Source]], count: int, total: int, device: str = "cpu") -> list[Latency]:
    """The first `count` rows of sets of `total`, one at a time, after ten others that do not count; each is put to all
    in turn, so that none is favoured."""
    count = min(count, total)
    rows = [*behind(count, total, WARM), *range(count)]
    seconds = [[timed(answer, source.batch([i], 0, 0), device) for answer, source in asked] for i in rows]
    kept = 1000 * np.array(seconds[WARM:]).reshape(count, len(asked))
    return [Latency(float(np.median(each)), float(np.quantile(each, 0.9)), len(each)) for each in kept.T]


def throughput(answer: Answer, source: Source, count: int, total: int, device: str = "cpu") -> Throughput:
    """The first rows of a set of `total` in whole batches, as many as `count` fills but one at least; after a batch
    of others that does not count. Where a set has fewer rows than a batch, it is one batch."""
    batch = min(MANY, total)
    whole = batch * max(1, min(count, total) // batch)
    timed(answer, source.batch(behind(whole, total, batch), 0, 0), device)
    batches = (source.batch(range(at, at + batch), 0, 0) for at in range(0, whole, batch))
    return Throughput(whole / sum(timed(answer, one, device) for one in batches), batch)


def behind(count: int, total: int, wanted: int) -> list[int]:
    """The rows behind the first `count` of `total`, to warm up with; where there are no more, the first ones again."""
    return [(count + i) % total for i in range(wanted)]


def caveats(total: int, latency: Latency, many: Throughput) -> list[str]:
    """What has to be said of the time of a set of few questions."""
    whole = many.batch * max(1, latency.questions // many.batch)
    again = total < max(latency.questions + WARM, whole + many.batch)
    found = [f"timed {many.batch} at once, it has no {MANY} questions"] if many.batch < MANY else []
    return [*found, "some timed questions were asked before, it has too few others to warm up with"] if again else found


def timed(answer: Answer, batch: Any, device: str) -> float:
    """Seconds of one call, the device's queue empty before and after."""
    settle = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    settle()
    start = time.perf_counter()
    answer(batch)
    settle()
    return time.perf_counter() - start
