"""Draw the figure of the README from the table of `laconic demo` in docs/results.md.

`python benchmarks/demo_figure.py` writes docs/demo.png (matplotlib: extra `report`). The PNG's description holds the
numbers that it shows, and tests/test_benchmarks.py compares them with the table.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
TITLE = "laconic demo: four operations on single digits, Llama with 114 thousand parameters"
X_LABEL = "accuracy on 2,000 unseen problems, % (mean of three seeds; line: 95 % interval)"
BARS = {  # row of the table: label and colour, from the top
    "Chain of thought": ("Chain of thought (24 tokens)", "#1b1f24"),
    "KaVa": ("KaVa (3 latent thoughts)", "#1f5fd0"),
    "CODI": ("CODI (3 latent thoughts)", "#22738b"),
    "PCCoT": ("PCCoT (3 latent thoughts)", "#9a3f8f"),
    "No chain": ("No chain", "#845a1f"),
    "Pause tokens": ("Pause tokens", "#6f7783"),
}
GREY, DARK_GREY = "#555555", "#444444"
ROW = re.compile(r"^(.+?) +([\d.]+) ± [\d.]+ % +([\d.]+) – ([\d.]+) +(\d+) = ", re.MULTILINE)
MAJORITY = re.compile(r"^majority baseline ([\d.]+) %", re.MULTILINE)


@dataclass(frozen=True)
class DemoRow:
    """One method of the demo: accuracy and its 95 % interval in percent, and forward passes per answer."""

    name: str
    accuracy: float
    low: float
    high: float
    passes: int


def parse_demo_table(page: str) -> tuple[list[DemoRow], float]:
    """Return the rows that the figure shows, from the top, and the accuracy of the majority baseline in percent."""
    _, _, section = page.partition("\n## Demo: latent thoughts on arithmetic\n")
    table = section.partition("```\n")[2].partition("```")[0]
    rows = {
        name: DemoRow(name, float(mean), float(low), float(high), int(passes))
        for name, mean, low, high, passes in ROW.findall(table)
    }
    majority = MAJORITY.search(table)
    if missing := [name for name in BARS if name not in rows]:
        raise ValueError(f"the demo's table has no row {missing[0]!r}; it has {sorted(rows)}")
    if majority is None:
        raise ValueError("the demo's table has no line 'majority baseline N %'")
    return [rows[name] for name in BARS], float(majority[1])


def describe(rows: Sequence[DemoRow], majority: float) -> str:
    """Return the numbers of the figure as one line, which the PNG stores."""
    bars = (f"{row.name} {row.accuracy} % ({row.low} to {row.high}), {row.passes} passes" for row in rows)
    return "; ".join([*bars, f"most common answer {majority} %"])


def draw(rows: Sequence[DemoRow], majority: float, path: Path) -> None:
    """Write the figure: one bar per method, its accuracy and its forward passes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.subplots()
    for y, row in enumerate(reversed(rows)):
        color = BARS[row.name][1]
        axes.barh(y, row.accuracy, 0.6, color=color)
        axes.plot([row.low, row.high], [y, y], color=DARK_GREY, linewidth=2.2, solid_capstyle="projecting")
        axes.text(103, y, f"{row.accuracy:.1f} %", va="center", size=10.5)
        axes.text(118, y, f"{row.passes} passes", va="center", size=10.5, color=GREY)
    axes.axvline(majority, color=GREY, linewidth=1, linestyle=":")
    axes.text(majority + 0.8, len(rows) - 0.4, "most common answer", va="center", size=8.5, color=GREY)
    axes.set_yticks(range(len(rows)), [BARS[row.name][0] for row in reversed(rows)], size=10.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks(range(0, 101, 20))
    axes.set(xlim=(0, 134), ylim=(-0.6, len(rows) - 0.1))
    axes.set_title(TITLE, loc="left", size=11)
    axes.set_xlabel(X_LABEL, size=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, metadata={"Description": describe(rows, majority), "Software": None})


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=DOCS / "results.md", help="page with the table")
    parser.add_argument("--out", type=Path, default=DOCS / "demo.png", help="PNG file to write")
    options = parser.parse_args(arguments)
    draw(*parse_demo_table(options.results.read_text(encoding="utf-8")), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
