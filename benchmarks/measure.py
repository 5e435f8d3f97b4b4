"""Ways raced side by side in one process, bytes counted, child processes that say what they used, and tables."""

import gc
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

REPO = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("LACONIC_DATA") or REPO.parent / "shared")
STORIES = CORPUS / "models" / "stories260k"
PEERS = find_spec("transformers") is not None
ABSENT = "not measured"
Way = Callable[[], object]


class Seconds(NamedTuple):
    """What one call took: on the clock of the wall, and on this process's processors."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Scale:
    """How large a run of the benchmarks is; `rounds` a way, `patience` seconds after which three are enough."""

    rounds: int = 5
    patience: float = 30.0
    prompt: int = 32
    new: int = 128
    prefill: int = 512
    batch: int = 8
    length: int = 256
    layers: int = 8
    width: int = 512
    words: int = 32_000
    few_words: int = 1_024
    large: tuple[int, int] | None = (12, 768)  # layers and width of the model of 110 M parameters and more
    cache_lengths: tuple[int, ...] = (100, 1_000, 10_000)
    mask: int = 512
    children: int = 5
    parity: str = "all"
    peers_alone: bool = True  # transformers in child processes too, where its import alone takes seconds
    checkpoints: int = 4
    thinkers: int = 16  # rows of a KaVa step
    question: int = 64
    chain: int = 32
    thoughts: int = 24
    iterations: int = 3
    written: int = 65  # tokens of a chain that thoughts are measured beside
    generated_rows: int = 20_000  # rows generated
    streams: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192, 16_384)  # tokens read by a memory


FULL = Scale()
QUICK = Scale(rounds=2, large=None, children=2)
TINY = Scale(
    rounds=1, prompt=4, new=3, prefill=8, batch=2, length=8, layers=2, width=32, words=64, few_words=64, large=None,
    cache_lengths=(4,), mask=8, children=1, parity="I17", peers_alone=False, checkpoints=1, thinkers=2, question=5,
    chain=4, thoughts=3, iterations=1, written=4, generated_rows=20, streams=(8, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One section of the page."""

    title: str
    text: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    after: str = ""

    def markdown(self) -> str:
        lines = [self.head, tuple("---" for _ in self.head), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(part for part in (f"## {self.title}", self.text, table, self.after) if part)


def timed(way: Way) -> Seconds:
    """One call, the garbage of earlier ones swept up before."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def race(ways: Mapping[str, Way], rounds: int, patience: float = 45.0, warm: int = 1) -> dict[str, list[Seconds]]:
    """Each way once a round, in an order that turns; after `patience` seconds three rounds are enough."""
    for _ in range(warm):
        for way in ways.values():
            way()
    times: dict[str, list[Seconds]] = {name: [] for name in ways}
    start, order = time.perf_counter(), list(ways)
    gc.collect()
    gc.freeze()  # what is there already is not looked through again by every sweep
    for n in range(rounds):
        if n >= 3 and time.perf_counter() - start > patience:
            break
        for name in order if n % 2 == 0 else reversed(order):
            times[name].append(timed(ways[name]))
    gc.unfreeze()
    return times


def clock(times: Sequence[Seconds], of: Callable[[list[float]], float] = min) -> float:
    """One number for several calls: processor seconds with one thread, which neighbours cannot lengthen, else wall."""
    return of([s.cpu if torch.get_num_threads() == 1 else s.wall for s in times])


def clock_name() -> str:
    """What `clock` looks at now."""
    return "CPU seconds of the process" if torch.get_num_threads() == 1 else "wall seconds"


def seconds_per_call(
    ways: Mapping[str, Way], rounds: int, least: float = 0.02, of: Callable[[list[float]], float] = median
) -> dict[str, float]:
    """Seconds of one call of each way, the median of rounds of as many calls as last `least` seconds."""

    def many(way: Way, n: int) -> Way:
        def run() -> None:
            for _ in range(n):
                way()

        return run

    counts = {}
    for name, way in ways.items():
        way()
        counts[name] = max(1, int(least / max(timed(way).wall, 1e-7)))
    times = race({name: many(way, counts[name]) for name, way in ways.items()}, rounds)
    return {name: clock(times[name], of) / counts[name] for name in ways}


def peak_allocated(work: Way) -> int:
    """The most bytes of tensors that `work` held at once above what was held before, by torch's own allocator."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events: list[Any] = seen.profiler.kineto_results.events()
    allocated = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def resident() -> int:
    """Bytes of this process in memory now, mapped files included; the high-water mark starts anew from here."""
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if os.access(marks, os.W_OK):
        marks.write_text("5")
    return kibibytes("VmRSS")


def resident_peak() -> int:
    """The high-water mark since `resident`."""
    if Path("/proc/self/status").exists():
        return kibibytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def kibibytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Child(NamedTuple):
    """What a child process printed, its exit code, and what it used."""

    out: str
    code: int
    took: Seconds

    def json(self) -> Any:
        """The last line it printed."""
        return json.loads(self.out.strip().splitlines()[-1])


def child(*arguments: str, threads: int | None = None) -> Child:
    """`python ARGUMENTS` from the repository's root, without network."""
    path = os.pathsep.join([str(REPO), str(REPO / "src"), os.environ.get("PYTHONPATH", "")])
    threads = threads or torch.get_num_threads()
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "NO_COLOR": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=REPO, env=env, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode and not done.stdout:
        raise RuntimeError(f"python {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    return Child(done.stdout, done.returncode, Seconds(time.perf_counter() - start, cpu))


def verdict(
    value: float, least: float | None = None, most: float | None = None, goal: float | None = None, digits: int = 2
) -> str:
    """The target and whether it was met, in words, at the precision that is printed; `goal` is a further wish."""
    value = round(value, digits)
    met = value >= least if least is not None else value <= (most if most is not None else value)
    text = f"{'≥' if least is not None else '≤'} {least if least is not None else most:g}: {'met' if met else 'missed'}"
    if goal is not None:
        beyond = value >= goal if least is not None else value <= goal
        text += f"; goal {goal:g}: {'met' if beyond else 'missed'}"
    return text


def load() -> str:
    """How many processes wanted a processor in the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def machine() -> str:
    """Processor, cores and versions, in one line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    parts = [f"{name}, {os.cpu_count()} cores", f"{platform.system()}, CPython {platform.python_version()}"]
    for package in ("torch", "transformers"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed")
    return " · ".join(parts)
