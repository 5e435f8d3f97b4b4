"""What an item of a stream is counted in: accuracy by pair and gap, copies, strings, needles by length and depth, nats.

A cell is a sum of scores and of how many; items of a cell count alike. Of B items and T columns `nats` and `right` are
those of the targets, 0 where there is none.
"""

from collections.abc import Mapping

from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core.contract import UNSCORED, Documents

Cells = Mapping[str, tuple[float, float]]
Scores = Float[Tensor, "B T"]
Hits = Bool[Tensor, "B T"]
ALL = "all"
BIN = 10  # lengths of strings that stand together
FIRST = 256  # positions of the first bucket; each further one is as wide as all before it


def add(cells: dict[str, tuple[float, float]], cell: str, score: float, n: float = 1) -> None:
    """Counts a score."""
    total, count = cells.get(cell, (0.0, 0))
    cells[cell] = (total + score, count + n)


def mqar(found: Documents, nats: Scores, right: Hits) -> list[Cells]:
    """Share of the queries answered: all, and by pairs and by the gap from a key to its query, in powers of two.

    An answer is a run of targets, as long as the key whose last token it begins at.
    """
    cells: list[Cells] = []
    assert found.facts is not None
    for b, pairs in enumerate(found.facts.tolist()):
        mine: dict[str, tuple[float, float]] = {}
        for answer in runs(found.targets[b] != UNSCORED):
            w = answer.stop - answer.start
            query = answer.start - w + 1
            key = found.text[b, query : query + w]
            gap = next(query - t for t in range(0, query, 2 * w) if found.text[b, t : t + w].equal(key))
            low, hit = 1 << (gap.bit_length() - 1), float(right[b, answer].all())
            for cell in (ALL, f"{pairs} pairs", f"{pairs} pairs, gap {low}-{2 * low - 1}"):
                add(mine, cell, hit)
        cells.append(mine)
    return cells


def copying(found: Documents, nats: Scores, right: Hits) -> list[Cells]:
    """Share of the values said again: all, and by how many there are; and of documents said wholly right."""
    cells: list[Cells] = []
    for b in range(found.B):
        n, hits = int((found.targets[b] != UNSCORED).sum()), float(right[b].sum())
        cells.append({ALL: (hits, n), f"{n} values": (hits, n), "whole": (float(hits == n), 1)})
    return cells


def languages(found: Documents, nats: Scores, right: Hits) -> list[Cells]:
    """Whether all sets of a string are right: all, and by length; and the share of the sets."""
    at = found.targets != UNSCORED
    cells: list[Cells] = []
    for b in range(found.B):
        n, hits = int(at[b].sum()), int(right[b].sum())
        low, whole = BIN * ((n - 2) // BIN) + 1, float(hits == n)
        cells.append({ALL: (whole, 1), f"length {low}-{low + BIN - 1}": (whole, 1), "positions": (hits, n)})
    return cells


def needle(found: Documents, nats: Scores, right: Hits) -> list[Cells]:
    """Share of the values told: all, by kind, by length, by depth; a value is a run of scored tokens.

    Items are named KIND@LENGTH@DEPTH#N, as `data.needles` names them.
    """
    cells: list[Cells] = []
    for b in range(found.B):
        kind, length, depth = found.names[b].partition("#")[0].split("@")
        values = [bool(right[b, value].all()) for value in runs(found.targets[b] != UNSCORED)]
        told = (float(sum(values)), len(values))
        cells.append({ALL: told, kind: told, f"{kind}, {length} tokens": told, f"{kind}, depth {depth}": told})
    return cells


def runs(at: Bool[Tensor, " T"]) -> list[slice]:
    """The stretches of columns without a gap."""
    found: list[slice] = []
    for t in at.nonzero()[:, 0].tolist():
        begin = found.pop().start if found and found[-1].stop == t else t
        found.append(slice(begin, t + 1))
    return found


def passage(
    found: Documents, nats: Scores, first: Int[Tensor, " B"], bytes_of: Int[Tensor, " V"] | None
) -> list[Cells]:
    """Nats: per token of all, per byte where the bytes of ids are known, and by how much the state has read.

    `first` is how much each had read before; the first token of a stretch is nobody's target.
    """
    targets, cells = found.targets, list[Cells]()
    for b in range(found.B):
        mine: dict[str, tuple[float, float]] = {}
        at = (targets[b] != UNSCORED).nonzero()[:, 0]
        said, read = nats[b, at.cpu()], at.cpu() + int(first[b]) + 1
        add(mine, ALL, float(said.sum()), len(at))
        if bytes_of is not None:
            add(mine, "a byte", float(said.sum()), float(bytes_of[targets[b, at].cpu()].sum()))
        low, high = 0, FIRST
        while len(read) and low <= int(read.max()):
            inside = (read >= low) & (read < high)
            if bool(inside.any()):
                add(mine, f"{low}-{high}", float(said[inside].sum()), int(inside.sum()))
            low, high = high, 2 * high
        cells.append(mine)
    return cells


def joined(many: list[Cells]) -> Cells:
    """The cells of several stretches together."""
    cells: dict[str, tuple[float, float]] = {}
    for each in many:
        for cell, (score, n) in each.items():
            add(cells, cell, score, n)
    return cells
