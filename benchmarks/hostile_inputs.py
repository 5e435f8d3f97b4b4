"""Fuzz every parser with 10,000 files and print a table: how many load, how many are refused, and what breaks.

python benchmarks/hostile_inputs.py [INPUTS [PARSER ...]]    needs stories260k in ../shared/models or in LACONIC_DATA

The peak in a line is that of the process so far, the parsers above it included.
"""

import argparse
import random
import resource
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

from tests.trust.fuzz import build_targets, try_input  # noqa: E402

MAX_BYTES = 8 * 2**30  # address space of the process, torch's libraries included
MAX_PEAK = 2_000  # MB of resident memory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "inputs", nargs="?", type=int, default=10_000, help="files for all parsers together (default: 10,000)"
    )
    parser.add_argument("parsers", nargs="*", help="fuzz only these, each with its share; names are those in the table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base, broken = Path(folder) / "base", 0
        base.mkdir()
        targets = build_targets(base, stack)
        if unknown := set(arguments.parsers) - set(targets):
            parser.error(f"no parser {', '.join(sorted(unknown))}; expected {', '.join(targets)}")
        share = arguments.inputs // len(targets)
        if not share:
            parser.error(f"{arguments.inputs} files are too few for {len(targets)} parsers")
        print("| parser | inputs | loaded | refused | broken | slowest, s | peak, MB |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name in arguments.parsers or targets:
            rngs = (random.Random(f"{name} {n}") for n in range(share))
            outcomes = [try_input(targets[name], base, Path(folder) / "place", rng) for rng in rngs]
            bad = Counter(outcome.result for outcome in outcomes if outcome.is_broken)
            loaded = sum(outcome.result == "ok" for outcome in outcomes)
            refused, slowest = len(outcomes) - loaded - bad.total(), max(outcome.seconds for outcome in outcomes)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"| {name} | {len(outcomes):,} | {loaded:,} | {refused:,} | {bad.total()} | {slowest:.1f} | {peak:,} |",
                flush=True,
            )
            for result, count in bad.most_common(12):
                print(f"{name}: {count} × {result}", file=sys.stderr, flush=True)
            broken += bad.total()
            if peak > MAX_PEAK:
                print(f"{name}: {peak:,} MB; the limit is {MAX_PEAK:,}", file=sys.stderr, flush=True)
                broken += 1
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
