"""Metrics of stream items: recall by pairs and gap, copied values, translations, strings, needles, NLL.

A metric is a sum of scores and their number, so that metrics of several items can be added. Functions score row `b` of
a batch; `correct` is given for every target of the row, and is False where none was computed.
"""

from collections.abc import Mapping

from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.data.synthetic.continual_translation import language_of_word

MetricSums = Mapping[str, tuple[float, float]]
TokenHits = Bool[Tensor, " T"]
OVERALL, PER_BYTE = "all", "per byte"
LENGTH_BIN = 10  # string lengths in one metric
FIRST_BUCKET = 256  # positions in the first bucket; each further bucket is as wide as all before it


def add_score(sums: dict[str, tuple[float, float]], name: str, score: float, n: float = 1) -> None:
    total, count = sums.get(name, (0.0, 0))
    sums[name] = (total + score, count + n)


def score_mqar(batch: DocumentBatch, b: int, correct: TokenHits) -> MetricSums:
    """Return the share of queries answered: overall, by number of pairs, and by gap in powers of two.

    The gap is the distance from a key to its query. An answer is a run of targets; the query before it has the same
    length and ends where the answer begins.
    """
    assert batch.num_facts is not None
    sums: dict[str, tuple[float, float]] = {}
    ids = batch.input_ids[b]
    pairs = int(batch.num_facts[b])
    for answer in contiguous_slices(batch.targets[b] != IGNORE_INDEX):
        width = answer.stop - answer.start
        query = answer.start - width + 1
        key = ids[query : query + width]
        gap = next(query - t for t in range(0, query, 2 * width) if ids[t : t + width].equal(key))
        low = 1 << (gap.bit_length() - 1)
        for name in (OVERALL, f"{pairs} pairs", f"{pairs} pairs, gap {low}-{2 * low - 1}"):
            add_score(sums, name, float(correct[answer].all()))
    return sums


def score_copying(batch: DocumentBatch, b: int, correct: TokenHits) -> MetricSums:
    """Return the share of values copied, overall and by their number, and of documents copied without an error."""
    n = int((batch.targets[b] != IGNORE_INDEX).sum())
    hits = float(correct.sum())
    return {OVERALL: (hits, n), f"{n} values": (hits, n), "whole documents": (float(hits == n), 1)}


def score_translation(batch: DocumentBatch, b: int, correct: TokenHits) -> MetricSums:
    """Return the share of words translated, overall and by language in the order in which they were taught."""
    sums: dict[str, tuple[float, float]] = {}
    for t in (batch.targets[b] != IGNORE_INDEX).nonzero()[:, 0].tolist():
        for name in (OVERALL, f"language {language_of_word(int(batch.input_ids[b, t]))}"):
            add_score(sums, name, float(correct[t]))
    return sums


def score_languages(batch: DocumentBatch, b: int, correct: TokenHits) -> MetricSums:
    """Return whether all sets of a string are correct, overall and by length, and the share of sets."""
    n = int((batch.targets[b] != IGNORE_INDEX).sum())
    hits = int(correct.sum())
    low = LENGTH_BIN * ((n - 2) // LENGTH_BIN) + 1
    is_correct = float(hits == n)
    return {OVERALL: (is_correct, 1), f"length {low}-{low + LENGTH_BIN - 1}": (is_correct, 1), "positions": (hits, n)}


def score_needle(batch: DocumentBatch, b: int, correct: TokenHits) -> MetricSums:
    """Return the share of values retrieved: overall, by kind, by length and by depth.

    Documents are named KIND@LENGTH@DEPTH#N. A value is a run of targets.
    """
    kind, length, depth = batch.document_ids[b].partition("#")[0].split("@")
    hits = [bool(correct[value].all()) for value in contiguous_slices(batch.targets[b] != IGNORE_INDEX)]
    names = (OVERALL, kind, f"{kind}, {length} tokens", f"{kind}, depth {depth}")
    return dict.fromkeys(names, (float(sum(hits)), len(hits)))


def contiguous_slices(mask: Bool[Tensor, " T"]) -> list[slice]:
    """Return the runs of columns without a gap."""
    slices: list[slice] = []
    for t in mask.nonzero()[:, 0].tolist():
        start = slices.pop().start if slices and slices[-1].stop == t else t
        slices.append(slice(start, t + 1))
    return slices


def score_passage(
    targets: Int[Tensor, " T"], nll: Float[Tensor, " T"], start: int, bytes_per_token: Int[Tensor, " V"] | None
) -> MetricSums:
    """Return the NLL of a passage: per token, per byte if known, and by the tokens read before, `start` at first."""
    sums: dict[str, tuple[float, float]] = {}
    columns = (targets != IGNORE_INDEX).nonzero()[:, 0]
    nll = nll[columns.cpu()]
    position = columns.cpu() + start + 1
    add_score(sums, OVERALL, float(nll.sum()), len(columns))
    if bytes_per_token is not None:
        add_score(sums, PER_BYTE, float(nll.sum()), float(bytes_per_token[targets[columns].cpu()].sum()))
    low, high = 0, FIRST_BUCKET
    while len(position) and low <= int(position.max()):
        inside = (position >= low) & (position < high)
        if bool(inside.any()):
            add_score(sums, f"{low}-{high}", float(nll[inside].sum()), int(inside.sum()))
        low = high
        high = 2 * high
    return sums


def merge_sums(parts: list[MetricSums]) -> MetricSums:
    sums: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (score, n) in part.items():
            add_score(sums, name, score, n)
    return sums
