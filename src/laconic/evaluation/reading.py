"""Runs that read, on sets of documents: what is kept of each, the table on a terminal, and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from laconic.evaluation import recalled
from laconic.evaluation.contexts import Worth, curve, plain, stated, table, ways_of, with_control
from laconic.evaluation.report import percent
from laconic.evaluation.scored import WIDTH, Row


@dataclass(frozen=True)
class Line:
    """A run on a set, of one seed or several: the rows of each. `about` is what the run is, `length` its kind."""

    set: str
    run: str
    seeds: tuple[int, ...]
    rows: Sequence[Sequence[Row]]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def worths(self) -> list[Worth]:
        """What each way is worth."""
        return table(self.rows)

    @property
    def documents(self) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
        """Names, facts and scored tokens of the documents."""
        return tuple((row.id, row.facts, row.scored) for row in self.rows[0])

    @property
    def facts(self) -> bool:
        """Whether the documents are of the recall task."""
        return self.rows[0][0].facts is not None

    @property
    def together(self) -> list[Row]:
        """The rows of all seeds."""
        return [row for rows in self.rows for row in rows]


def beside(lines: Sequence[Line]) -> list[Line]:
    """The lines; those of runs that compress know the first plain run that read the same documents as a control."""
    plain = [line for line in lines if line.about.get("method") == "plain"]
    found: list[Line] = []
    for line in lines:
        control = next((each for each in plain if (each.set, each.documents) == (line.set, line.documents)), None)
        compresses = line.about.get("method") != "plain"
        rows = with_control(line.rows, control.rows) if control is not None and compresses else line.rows
        found.append(replace(line, rows=rows))
    return found


def plain_line(line: Line) -> dict[str, Any]:
    """A run on a set as JSON holds it."""
    found: dict[str, Any] = {
        "set": line.set,
        "run": line.run,
        **line.about,
        "seeds": list(line.seeds),
        "documents": len(line.rows[0]),
        "ways": [plain(each) for each in line.worths],
        "positions": WIDTH,
        "curves": {way: curve(line.rows, way) for way in ways_of(line.rows)},
        "lengths": {
            way: {str(n): count for n, count in recalled.histogram(line.together, way).items()}
            for way in ways_of(line.rows)
            if line.rows[0][0].ways[way].written
        },
    }
    gap = recalled.gap(line.together)
    found["gap"] = None if gap is None else gap._asdict()
    return stated(found | ({"recall": recalled.figures(line.together)} if line.facts else {}))


def shown(lines: Sequence[Line]) -> Any:
    """The table of a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="")
    for name in ("set", "run", "way"):
        made.add_column(name, no_wrap=True)
    for name in ("vectors", "before", "nats a token", "perplexity", "right", "saved", "± s.e.", "share"):
        made.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        for w in line.worths:
            spread = "" if w.nats.sd is None else f" ± {w.nats.sd:.4f}"
            made.add_row(
                line.set, line.run, w.way, "–" if w.vectors is None else f"{w.vectors:.2f}", f"{w.held:.1f}",
                f"{w.nats.mean:.4f}{spread}", f"{np.exp(w.nats.mean):.2f}", f"{percent(w.right.mean)} %",
                f"{w.gain.mean:+.4f}", f"{w.se:.4f}", "–" if w.share is None else f"{percent(w.share)} %",
            )  # fmt: skip
    return made


def footnotes(lines: Sequence[Line]) -> str:
    """What stands under the table: how it is to be read, and recall by the number of facts."""
    said = [
        "vectors: of a segment; before: vectors, or tokens of text, that stand before the tail; saved: nats a token "
        "less than with no context (untrained: than untrained without), paired by document; share: of what the whole "
        "text saves. Hard lengths, but for soft. full-tuned: the whole text, read by the plain run beside. oracle "
        "length: of each segment that with the least nats of what follows and price, by trial: a bound, no method."
    ]
    for line in lines:
        if line.facts:
            said += recall_lines(line)
    return "\n".join(said)


def recall_lines(line: Line) -> list[str]:
    """Recall of a run by the number of facts."""
    rows, found = line.together, list[str]()
    for way in ("compressed", "sampled"):
        if way in ways_of(line.rows):
            each = recalled.by_facts(rows, way)
            cells = "; ".join(f"F={x.facts} {percent(x.accuracy)} % right, N {x.hard:.2f}" for x in each)
            r = recalled.correlation(rows, way)
            found.append(f"{line.run}, {way}: {cells}; correlation of N with F " + ("–" if r is None else f"{r:.3f}"))
    if gap := recalled.gap(rows):
        found.append(
            f"{line.run}, soft less hard: {gap.nats:+.4f} nats a token, {100 * gap.accuracy:+.1f} points right, "
            f"{gap.vectors:+.2f} vectors; E[N] {gap.expected:.3f}, mean of drawn N {gap.sampled:.3f} ± "
            f"{gap.sampled_se:.3f}"
        )
    return found
