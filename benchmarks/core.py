"""Speed and memory of core beside the installed peers: `python benchmarks/core.py [--only NAME] [--quick]`.

Each table carries the command, versions, threads and load it was measured with; a full run writes docs/benchmarks.md,
`--only` puts one table anew into it, `--quick` prints and writes nothing.
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
from benchmarks.measure import FULL, QUICK, REPO, Scale, Table, load, machine

PAGE = REPO / "docs" / "benchmarks.md"
SECTIONS: dict[str, Callable[[Scale], Table]] = {
    "decoding": decoding.decoding,
    "prefill": decoding.prefill,
    "training": training.training,
    "recompute": training.recompute,
    "loading": loading.loading,
    "cache": cache.cache,
    "mask": cache.mask,
    "want": cache.want,
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
INTRODUCTION = """# Benchmarks of core

Written by `make bench` (`python benchmarks/core.py`; `--only NAME` measures one table anew, `--quick` only prints).
Compare the ratios: both sides run in one process, by turns. Absolute figures belong to the machine named under each
table. With one thread, times are the processor's, which other work on the machine lengthens little; with more they
are the wall's. A target that was not reached says "missed"; what could not run says "not measured".
"""
GPU = """## GPU

Not measured: no GPU was at hand. `python benchmarks/gpu.py` prints the table of decoding for a random Llama of 1B
parameters in bfloat16, eager and with `torch.compile`, with tokens per second and the time of a token beside the time
in which the device can read the weights once; `--size` and `--device` choose another.
"""


def section(name: str, scale: Scale, command: str) -> str:
    """One table with what it was measured with."""
    before, began = load(), time.perf_counter()
    text = SECTIONS[name](scale).markdown()
    took = time.perf_counter() - began
    threads = torch.get_num_threads()
    about = (
        f"`{command}` · {datetime.now(UTC):%Y-%m-%d} · {threads} thread{'s' * (threads > 1)} · {machine()} · "
        f"load average {before} before, {load()} after · {took:.0f} s"
    )
    return f"<!-- {name} -->\n{text}\n\n<sub>{about}</sub>\n<!-- end -->\n"


def written(page: str, sections: dict[str, str]) -> str:
    """The page with these tables in the place of the old ones, in order; other tables stay as they are."""
    old = {m[1]: m[0] for m in re.finditer(r"<!-- (\w+) -->\n.*?<!-- end -->\n", page, re.DOTALL)}
    parts = [sections.get(name) or old.get(name) or "" for name in SECTIONS]
    return "\n".join([INTRODUCTION, *filter(None, parts), GPU])


def main(arguments: list[str] | None = None, scale: Scale | None = None) -> None:
    """Measures, prints, and writes the page unless the run is a quick one."""
    parser = argparse.ArgumentParser(description="Speed and memory of core beside the installed peers.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no large model; prints only")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for every side (default 1)")
    command_line = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(command_line)
    torch.set_num_threads(options.threads)
    scale = scale or (QUICK if options.quick else FULL)
    command = " ".join(["python benchmarks/core.py", *command_line])
    sections: dict[str, str] = {}
    for name in options.only:
        print(f"[{name}]", file=sys.stderr, flush=True)
        sections[name] = section(name, scale, command)
        print(sections[name], flush=True)
    if not options.quick and scale is FULL:
        page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        PAGE.write_text(written(page, sections), encoding="utf-8")


if __name__ == "__main__":
    main()
