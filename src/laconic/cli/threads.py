"""Limit torch's threads to the CPU quota of a container."""

import math
import os
from pathlib import Path

CGROUP, CPUS = Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu")


def read_cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many CPUs the cgroup (version 2 or 1) may use, or None without a quota."""
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def count_cores(cpus: Path = CPUS) -> int:
    """Return the number of physical cores that this process may run on: torch's default number of threads."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed]
    return len({file.read_text() if file.is_file() else str(file) for file in files})


def apply_cpu_quota(cgroup: Path = CGROUP) -> None:
    """Set OMP_NUM_THREADS to the CPU quota if torch would start more threads; call it before importing torch."""
    quota = read_cpu_quota(cgroup)
    if quota is not None and "OMP_NUM_THREADS" not in os.environ and quota < count_cores():
        os.environ["OMP_NUM_THREADS"] = str(max(1, math.ceil(quota)))
