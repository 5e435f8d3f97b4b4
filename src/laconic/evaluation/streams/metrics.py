"""What an item of a stream is counted in: accuracy by pair and gap, copies, strings, needles by length and depth, nats.

A cell is a sum of scores and of how many; items of a cell count alike. Of B items and T columns `nats` and `right` are
those of the targets, 0 where there is none.
"""

from collections.abc import Mapping

from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch

MetricSums = Mapping[str, tuple[float, float]]
TokenNll = Float[Tensor, "B T"]
TokenHits = Bool[Tensor, "B T"]
OVERALL = "all"
LENGTH_BIN = 10  # lengths of strings that stand together
FIRST_BUCKET = 256  # positions of the first bucket; each further one is as wide as all before it


def add_score(sums: dict[str, tuple[float, float]], name: str, score: float, n: float = 1) -> None:
    """Counts a score."""
    total, count = sums.get(name, (0.0, 0))
    sums[name] = (total + score, count + n)


def score_mqar(batch: DocumentBatch, nll: TokenNll, correct: TokenHits) -> list[MetricSums]:
    """Share of the queries answered: all, and by pairs and by the gap from a key to its query, in powers of two.

    An answer is a run of targets, as long as the key whose last token it begins at.
    """
    cells: list[MetricSums] = []
    assert batch.num_facts is not None
    for b, pairs in enumerate(batch.num_facts.tolist()):
        mine: dict[str, tuple[float, float]] = {}
        for answer in contiguous_slices(batch.targets[b] != IGNORE_INDEX):
            w = answer.stop - answer.start
            query = answer.start - w + 1
            key = batch.input_ids[b, query : query + w]
            gap = next(query - t for t in range(0, query, 2 * w) if batch.input_ids[b, t : t + w].equal(key))
            low, hit = 1 << (gap.bit_length() - 1), float(correct[b, answer].all())
            for cell in (OVERALL, f"{pairs} pairs", f"{pairs} pairs, gap {low}-{2 * low - 1}"):
                add_score(mine, cell, hit)
        cells.append(mine)
    return cells


def score_copying(batch: DocumentBatch, nll: TokenNll, correct: TokenHits) -> list[MetricSums]:
    """Share of the values said again: all, and by how many there are; and of documents said wholly right."""
    cells: list[MetricSums] = []
    for b in range(batch.B):
        n, hits = int((batch.targets[b] != IGNORE_INDEX).sum()), float(correct[b].sum())
        cells.append({OVERALL: (hits, n), f"{n} values": (hits, n), "whole": (float(hits == n), 1)})
    return cells


def score_languages(batch: DocumentBatch, nll: TokenNll, correct: TokenHits) -> list[MetricSums]:
    """Whether all sets of a string are right: all, and by length; and the share of the sets."""
    at = batch.targets != IGNORE_INDEX
    cells: list[MetricSums] = []
    for b in range(batch.B):
        n, hits = int(at[b].sum()), int(correct[b].sum())
        low, whole = LENGTH_BIN * ((n - 2) // LENGTH_BIN) + 1, float(hits == n)
        cells.append({OVERALL: (whole, 1), f"length {low}-{low + LENGTH_BIN - 1}": (whole, 1), "positions": (hits, n)})
    return cells


def score_needle(batch: DocumentBatch, nll: TokenNll, correct: TokenHits) -> list[MetricSums]:
    """Share of the values told: all, by kind, by length, by depth; a value is a run of scored tokens.

    Items are named KIND@LENGTH@DEPTH#N, as `data.needles` names them.
    """
    cells: list[MetricSums] = []
    for b in range(batch.B):
        kind, length, depth = batch.document_ids[b].partition("#")[0].split("@")
        values = [bool(correct[b, value].all()) for value in contiguous_slices(batch.targets[b] != IGNORE_INDEX)]
        told = (float(sum(values)), len(values))
        cells.append({OVERALL: told, kind: told, f"{kind}, {length} tokens": told, f"{kind}, depth {depth}": told})
    return cells


def contiguous_slices(mask: Bool[Tensor, " T"]) -> list[slice]:
    """The stretches of columns without a gap."""
    found: list[slice] = []
    for t in mask.nonzero()[:, 0].tolist():
        begin = found.pop().start if found and found[-1].stop == t else t
        found.append(slice(begin, t + 1))
    return found


def score_passage(
    batch: DocumentBatch, nll: TokenNll, start_positions: Int[Tensor, " B"], bytes_per_token: Int[Tensor, " V"] | None
) -> list[MetricSums]:
    """Nats: per token of all, per byte where the bytes of ids are known, and by how much the state has read.

    `first` is how much each had read before; the first token of a stretch is nobody's target.
    """
    targets, cells = batch.targets, list[MetricSums]()
    for b in range(batch.B):
        mine: dict[str, tuple[float, float]] = {}
        at = (targets[b] != IGNORE_INDEX).nonzero()[:, 0]
        said, read = nll[b, at.cpu()], at.cpu() + int(start_positions[b]) + 1
        add_score(mine, OVERALL, float(said.sum()), len(at))
        if bytes_per_token is not None:
            add_score(mine, "a byte", float(said.sum()), float(bytes_per_token[targets[b, at].cpu()].sum()))
        low, high = 0, FIRST_BUCKET
        while len(read) and low <= int(read.max()):
            inside = (read >= low) & (read < high)
            if bool(inside.any()):
                add_score(mine, f"{low}-{high}", float(said[inside].sum()), int(inside.sum()))
            low, high = high, 2 * high
        cells.append(mine)
    return cells


def merge_sums(parts: list[MetricSums]) -> MetricSums:
    """The cells of several stretches together."""
    cells: dict[str, tuple[float, float]] = {}
    for each in parts:
        for cell, (score, n) in each.items():
            add_score(cells, cell, score, n)
    return cells
