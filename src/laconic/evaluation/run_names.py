"""Short names of runs for tables and pages."""

from collections.abc import Sequence
from pathlib import Path


def short_run_names(paths: Sequence[str | Path]) -> list[str]:
    """Return short unique names of runs: the last parts of their paths; `seed-0` alone is not a name."""
    for n in (1, 2, 3):
        names = ["/".join(Path(path).resolve().parts[-n:]) for path in paths]
        if len(set(names)) == len(names) and not any(name.startswith("seed-") for name in names):
            return names
    return list(map(str, paths))


def seed_run_name(name: str, path: str | Path, run_dir: Path) -> str:
    """Return the name of one run of a directory with several seeds; `name` is the directory's."""
    return name if run_dir == Path(path) else f"{name}/{run_dir.name}"
