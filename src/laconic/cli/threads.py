"""Limit torch's threads to the CPU quota of a container, and how long they wait without sleeping."""

import math
import os
from pathlib import Path

QUOTA, CPUS = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/devices/system/cpu")


def count_cores() -> int:
    """Return the number of physical cores that this process may run on: torch's default number of threads."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed]
    return len({file.read_text() if file.is_file() else str(file) for file in files})


def limit_spinning() -> None:
    """Let threads sleep that wait for others for over about 0.2 ms; call it before torch starts.

    By default they wait awake for about 15 ms (300,000 rounds in libgomp) and keep the others from the cores where
    these are busy: with two threads on two cores at a load of 12 to 17, two texts were not compressed after 150 s, and
    take 16 s each with this. Numbers do not depend on it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def apply_cpu_quota(file: Path = QUOTA) -> None:
    """Set OMP_NUM_THREADS to the quota of the cgroup if torch would start more threads; call it before torch starts."""
    try:
        quota, period = map(int, file.read_text().split())
    except (OSError, ValueError):  # no quota: "max 100000"
        return
    if "OMP_NUM_THREADS" not in os.environ and quota < count_cores() * period:
        os.environ["OMP_NUM_THREADS"] = str(max(1, math.ceil(quota / period)))
