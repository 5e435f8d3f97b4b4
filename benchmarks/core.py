"""Compare speed and memory with the installed peer libraries: `python benchmarks/core.py [--only NAME] [--quick]`.

A full run writes docs/benchmarks.md, `--only` replaces single tables in it, and `--quick` only prints. Each table
states its command, versions, threads and load average.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    cache,
    decoding,
    delta_rule,
    generating,
    linear,
    loading,
    lora,
    memories,
    optimizers,
    ranks,
    reading,
    start,
    thinking,
    training,
)
from benchmarks.measure import REPO, Scale, Table
from benchmarks.page import Page

SECTIONS: dict[str, Callable[[Scale], Table]] = {
    "decoding": decoding.decoding,
    "prefill": decoding.prefill,
    "training": training.training,
    "recompute": training.recompute,
    "lora": lora.lora,
    "linear": linear.linear,
    "optimizers": optimizers.optimizers,
    "ranks": ranks.ranks,
    "loading": loading.loading,
    "cache": cache.cache,
    "mask": cache.mask,
    "activations": cache.activations,
    "start": start.start,
    "parity": start.parity,
    "thinking": thinking.thinking,
    "answering": thinking.answering,
    "generating": generating.generating,
    "memories": memories.memories,
    "streams": memories.streams,
    "titans": memories.titans,
    "delta_rule": delta_rule.delta_rule,
    "reading": reading.reading,
}
INTRODUCTION = """# Benchmarks

Written by `make bench` (`python benchmarks/core.py`; `--only NAME` replaces one table, `--quick` only prints).
Compare the ratios: both sides run alternately in one process. Absolute figures depend on the machine named below each
table. With one thread, times are CPU time, which other processes affect little; with more threads, wall time. "missed"
marks a target that was not reached, "not measured" what could not run.
"""
PAGE = Page(REPO / "docs" / "benchmarks.md", "benchmarks/core.py", INTRODUCTION, SECTIONS)


if __name__ == "__main__":
    PAGE.run()
