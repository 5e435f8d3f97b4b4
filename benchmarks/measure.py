"""Measure time and memory of workloads in one process or in child processes, and format tables."""

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
Workload = Callable[[], object]


class Elapsed(NamedTuple):
    """Wall and CPU seconds of one call."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Scale:
    """Sizes of a benchmark run: `rounds` per workload, but only three after `patience` seconds."""

    rounds: int = 5
    patience: float = 30.0
    prompt: int = 32
    new: int = 128
    prefill: int = 512
    batch: int = 8
    length: int = 256
    layers: int = 8
    width: int = 512
    vocab: int = 32_000
    small_vocab: int = 1_024
    large: tuple[int, int] | None = (12, 768)  # layers and width of the model with at least 110 M parameters
    cached: tuple[int, ...] = (100, 1_000, 10_000)
    mask: int = 512
    children: int = 5
    parity: str = "all"
    peers_alone: bool = True  # also run transformers in child processes, where its import takes seconds
    checkpoints: int = 4
    kava_rows: int = 16  # batch size of a KaVa step
    question: int = 64
    chain: int = 32
    latents: int = 24
    iterations: int = 3
    chain_tokens: int = 65  # length of the written chain that latents are compared with
    num_generated: int = 20_000  # number of generated rows
    streams: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192, 16_384)  # lengths of texts that a memory reads
    delta_rule: tuple[tuple[int, int, int], ...] = ((4, 64, 1_024), (8, 64, 4_096), (16, 128, 2_048))  # heads, width, T
    first_token: tuple[int, ...] = (512, 4_000)  # lengths of prompts to a real model
    documents: tuple[int, ...] = (512, 1_024, 2_048)  # lengths of documents whose KV cache is selected
    fitted: int = 1_024  # length of a document that a cartridge is fitted to
    fit_rows: int = 16
    fit_steps: int = 5
    windows: int = 40  # windows of book text for the loss of int8 weights


FULL = Scale()
QUICK = Scale(rounds=2, new=32, large=None, children=2, first_token=(512,), windows=6)
TINY = Scale(
    rounds=1, prompt=4, new=3, prefill=8, batch=2, length=8, layers=2, width=32, vocab=64, small_vocab=64, large=None,
    cached=(4,), mask=8, children=1, parity="I17", peers_alone=False, checkpoints=1, kava_rows=2, question=5, chain=4,
    latents=3, iterations=1, chain_tokens=4, num_generated=20, streams=(8, 16),
    delta_rule=((2, 8, 128),), first_token=(8,), windows=2, documents=(16,), fitted=32, fit_steps=2,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One section of docs/benchmarks.md."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    footnote: str = ""

    def markdown(self) -> str:
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(part for part in (f"## {self.title}", self.text, table, self.footnote) if part)


def timed(workload: Workload) -> Elapsed:
    """Time one call, after collecting the garbage of earlier ones."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    workload()
    return Elapsed(time.perf_counter() - wall, time.process_time() - cpu)


def time_interleaved(
    workloads: Mapping[str, Workload], rounds: int, patience: float = 45.0, warm: int = 1
) -> dict[str, list[Elapsed]]:
    """Time every workload once per round, in alternating order; after `patience` seconds three rounds are enough."""
    for _ in range(warm):
        for workload in workloads.values():
            workload()
    times: dict[str, list[Elapsed]] = {name: [] for name in workloads}
    start, order = time.perf_counter(), list(workloads)
    gc.collect()
    gc.freeze()  # exclude existing objects from later collections
    for n in range(rounds):
        if n >= 3 and time.perf_counter() - start > patience:
            break
        for name in order if n % 2 == 0 else reversed(order):
            times[name].append(timed(workloads[name]))
    gc.unfreeze()
    return times


def clock(times: Sequence[Elapsed], statistic: Callable[[list[float]], float] = min) -> float:
    """Reduce timings to one number: CPU seconds with one thread, which other processes affect little, else wall."""
    return statistic([s.cpu if torch.get_num_threads() == 1 else s.wall for s in times])


def clock_name() -> str:
    """Return which clock `clock` uses now."""
    return "CPU seconds of the process" if torch.get_num_threads() == 1 else "wall seconds"


def time_per_call(
    workloads: Mapping[str, Workload],
    rounds: int,
    least: float = 0.02,
    statistic: Callable[[list[float]], float] = median,
) -> dict[str, float]:
    """Return the median seconds per call of each workload, over rounds that last at least `least` seconds."""

    def many(workload: Workload, n: int) -> Workload:
        def run() -> None:
            for _ in range(n):
                workload()

        return run

    counts = {}
    for name, workload in workloads.items():
        workload()
        counts[name] = max(1, int(least / max(timed(workload).wall, 1e-7)))
    times = time_interleaved({name: many(workload, counts[name]) for name, workload in workloads.items()}, rounds)
    return {name: clock(times[name], statistic) / counts[name] for name in workloads}


def peak_allocated(work: Workload) -> int:
    """Return the peak bytes of tensors during `work`, above those before it, as counted by torch's allocator."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    cached = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        cached += event.nbytes()
        peak = max(peak, cached)
    return peak


def reset_resident_peak() -> int:
    """Return the resident bytes of this process, mapped files included, and reset the peak."""
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if os.access(marks, os.W_OK):
        marks.write_text("5")
    return read_status_bytes("VmRSS")


def read_resident_peak() -> int:
    """Return the peak resident bytes since `reset_resident_peak`."""
    if Path("/proc/self/status").exists():
        return read_status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_status_bytes(key: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class ProcessResult(NamedTuple):
    """Output, exit code and time of a child process."""

    out: str
    code: int
    elapsed: Elapsed

    def json(self) -> Any:
        """Return the last line of the output, parsed."""
        return json.loads(self.out.strip().splitlines()[-1])


def run_python(
    *arguments: str, threads: int | None = None, variables: Mapping[str, str] | None = None
) -> ProcessResult:
    """Run `python ARGUMENTS` from the root of the repository, without network, with more environment variables."""
    path = os.pathsep.join([str(REPO), str(REPO / "src"), os.environ.get("PYTHONPATH", "")])
    threads = threads or torch.get_num_threads()
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "NO_COLOR": "1"}
    env |= variables or {}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.run([sys.executable, *arguments], cwd=REPO, env=env, capture_output=True, text=True)
    footnote = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = footnote.ru_utime + footnote.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode and not process.stdout:
        raise RuntimeError(f"python {' '.join(arguments)}: exit {process.returncode}\n{process.stderr}")
    return ProcessResult(process.stdout, process.returncode, Elapsed(time.perf_counter() - start, cpu))


def verdict(
    value: float, least: float | None = None, most: float | None = None, goal: float | None = None, digits: int = 2
) -> str:
    """Return the target and whether the value, rounded as printed, meets it; `goal` is a second, harder target."""
    value = round(value, digits)
    met = value >= least if least is not None else value <= (most if most is not None else value)
    text = f"{'≥' if least is not None else '≤'} {least if least is not None else most:g}: {'met' if met else 'missed'}"
    if goal is not None:
        beyond = value >= goal if least is not None else value <= goal
        text += f"; goal {goal:g}: {'met' if beyond else 'missed'}"
    return text


def load_average() -> str:
    """Return the load average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def describe_machine() -> str:
    """Return processor, cores and versions in one line."""
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
