"""Compare speed and memory with the installed peer libraries: `python benchmarks/core.py [--only NAME] [--quick]`.

A full run writes docs/benchmarks.md, `--only` replaces single tables in it, and `--quick` only prints. Each table
states its command, versions, threads and load average.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import cache, decoding, generating, loading, memories, reading, start, thinking, training
from benchmarks.measure import FULL, QUICK, REPO, Scale, Table, describe_machine, load_average

PAGE = REPO / "docs" / "benchmarks.md"
SECTIONS: dict[str, Callable[[Scale], Table]] = {
    "decoding": decoding.decoding,
    "prefill": decoding.prefill,
    "training": training.training,
    "recompute": training.recompute,
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
    "reading": reading.reading,
}
INTRODUCTION = """# Benchmarks

Written by `make bench` (`python benchmarks/core.py`; `--only NAME` replaces one table, `--quick` only prints).
Compare the ratios: both sides run alternately in one process. Absolute figures depend on the machine named below each
table. With one thread, times are CPU time, which other processes affect little; with more threads, wall time. "missed"
marks a target that was not reached, "not measured" what could not run.
"""
GPU = """## GPU

Not measured: no GPU was available. `python benchmarks/gpu.py` prints the decoding speed of a random Llama with 1B
parameters in bfloat16, eager and with `torch.compile`, and compares the time per token with the time the device needs
to read the weights once. `--size` and `--device` select another model and device.
"""


def render_section(name: str, scale: Scale, command: str) -> str:
    """Measure one table and render it with the conditions of the measurement."""
    before, start = load_average(), time.perf_counter()
    text = SECTIONS[name](scale).markdown()
    seconds = time.perf_counter() - start
    threads = torch.get_num_threads()
    caption = (
        f"`{command}` · {datetime.now(UTC):%Y-%m-%d} · {threads} thread{'s' * (threads > 1)} · {describe_machine()} · "
        f"load average {before} before, {load_average()} after · {seconds:.0f} s"
    )
    return f"<!-- {name} -->\n{text}\n\n<sub>{caption}</sub>\n<!-- end -->\n"


def merge_page(page: str, sections: dict[str, str]) -> str:
    """Return the page with these tables replaced; the other tables stay as they are."""
    old = {m[1]: m[0] for m in re.finditer(r"<!-- (\w+) -->\n.*?<!-- end -->\n", page, re.DOTALL)}
    parts = [sections.get(name) or old.get(name) or "" for name in SECTIONS]
    return "\n".join([INTRODUCTION, *filter(None, parts), GPU])


def main(arguments: list[str] | None = None, scale: Scale | None = None) -> None:
    """Measure and print the tables; write the page unless the run is quick."""
    parser = argparse.ArgumentParser(description="Compare speed and memory with the installed peer libraries.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and no large model; only print")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for both sides (default 1)")
    arguments_ = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments_)
    torch.set_num_threads(options.threads)
    scale = scale or (QUICK if options.quick else FULL)
    command = " ".join(["python benchmarks/core.py", *arguments_])
    sections: dict[str, str] = {}
    for name in options.only:
        print(f"[{name}]", file=sys.stderr, flush=True)
        sections[name] = render_section(name, scale, command)
        print(sections[name], flush=True)
    if not options.quick and scale is FULL:
        page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        PAGE.write_text(merge_page(page, sections), encoding="utf-8")


if __name__ == "__main__":
    main()
