"""Metrics of stream items: recall by pairs and gap, copied values, translations, strings, needles, NLL.

A metric is a sum of scores and their number, so that metrics of several items can be added. `correct` is given for
every target, and is False where there is none.
"""

from collections.abc import Mapping

from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.data.synthetic.continual_translation import language_of_word

MetricSums = Mapping[str, tuple[float, float]]
TokenHits = Bool[Tensor, "B T"]
OVERALL, PER_BYTE = "all", "per byte"
LENGTH_BIN = 10  # string lengths in one metric
FIRST_BUCKET = 256  # positions in the first bucket; each further bucket is as wide as all before it


def add_score(sums: dict[str, tuple[float, float]], name: str, score: float, n: float = 1) -> None:
    """Add a score to a metric."""
    total, count = sums.get(name, (0.0, 0))
    sums[name] = (total + score, count + n)


def score_mqar(batch: DocumentBatch, correct: TokenHits) -> list[MetricSums]:
    """Return the share of queries answered: overall, by number of pairs, and by gap in powers of two.

    The gap is the distance from a key to its query. An answer is a run of targets; the query before it has the same
    length and ends where the answer begins.
    """
    metrics: list[MetricSums] = []
    assert batch.num_facts is not None
    for b, pairs in enumerate(batch.num_facts.tolist()):
        sums: dict[str, tuple[float, float]] = {}
        for answer in contiguous_slices(batch.targets[b] != IGNORE_INDEX):
            width = answer.stop - answer.start
            query = answer.start - width + 1
            key = batch.input_ids[b, query : query + width]
            gap = next(query - t for t in range(0, query, 2 * width) if batch.input_ids[b, t : t + width].equal(key))
            low, hit = 1 << (gap.bit_length() - 1), float(correct[b, answer].all())
            for name in (OVERALL, f"{pairs} pairs", f"{pairs} pairs, gap {low}-{2 * low - 1}"):
                add_score(sums, name, hit)
        metrics.append(sums)
    return metrics


def score_copying(batch: DocumentBatch, correct: TokenHits) -> list[MetricSums]:
    """Return the share of values copied, overall and by their number, and of documents copied without an error."""
    metrics: list[MetricSums] = []
    for b in range(batch.B):
        n, hits = int((batch.targets[b] != IGNORE_INDEX).sum()), float(correct[b].sum())
        metrics.append({OVERALL: (hits, n), f"{n} values": (hits, n), "whole documents": (float(hits == n), 1)})
    return metrics


def score_translation(batch: DocumentBatch, correct: TokenHits) -> list[MetricSums]:
    """Return the share of words translated, overall and by language in the order in which they were taught."""
    metrics: list[MetricSums] = []
    for b in range(batch.B):
        sums: dict[str, tuple[float, float]] = {}
        for t in (batch.targets[b] != IGNORE_INDEX).nonzero()[:, 0].tolist():
            for name in (OVERALL, f"language {language_of_word(int(batch.input_ids[b, t]))}"):
                add_score(sums, name, float(correct[b, t]))
        metrics.append(sums)
    return metrics


def score_languages(batch: DocumentBatch, correct: TokenHits) -> list[MetricSums]:
    """Return whether all sets of a string are correct, overall and by length, and the share of sets."""
    has_target = batch.targets != IGNORE_INDEX
    metrics: list[MetricSums] = []
    for b in range(batch.B):
        n, hits = int(has_target[b].sum()), int(correct[b].sum())
        low, is_correct = LENGTH_BIN * ((n - 2) // LENGTH_BIN) + 1, float(hits == n)
        length = f"length {low}-{low + LENGTH_BIN - 1}"
        metrics.append({OVERALL: (is_correct, 1), length: (is_correct, 1), "positions": (hits, n)})
    return metrics


def score_needle(batch: DocumentBatch, correct: TokenHits) -> list[MetricSums]:
    """Return the share of values retrieved: overall, by kind, by length and by depth.

    Documents are named KIND@LENGTH@DEPTH#N. A value is a run of targets.
    """
    metrics: list[MetricSums] = []
    for b in range(batch.B):
        kind, length, depth = batch.document_ids[b].partition("#")[0].split("@")
        hits = [bool(correct[b, value].all()) for value in contiguous_slices(batch.targets[b] != IGNORE_INDEX)]
        score = (float(sum(hits)), len(hits))
        metrics.append(
            {OVERALL: score, kind: score, f"{kind}, {length} tokens": score, f"{kind}, depth {depth}": score}
        )
    return metrics


def contiguous_slices(mask: Bool[Tensor, " T"]) -> list[slice]:
    """Return the runs of columns without a gap."""
    slices: list[slice] = []
    for t in mask.nonzero()[:, 0].tolist():
        start = slices.pop().start if slices and slices[-1].stop == t else t
        slices.append(slice(start, t + 1))
    return slices


def score_passage(
    batch: DocumentBatch,
    nll: Float[Tensor, "B T"],
    start_positions: Int[Tensor, " B"],
    bytes_per_token: Int[Tensor, " V"] | None,
) -> list[MetricSums]:
    """Return the NLL of each passage: per token, per byte if known, and by the number of tokens read before.

    Args:
        batch: One passage per row.
        nll: NLL of its targets.
        start_positions: Tokens that each row had read before its passage.
        bytes_per_token: Bytes of each token id.
    """
    metrics: list[MetricSums] = []
    for b in range(batch.B):
        sums: dict[str, tuple[float, float]] = {}
        columns = (batch.targets[b] != IGNORE_INDEX).nonzero()[:, 0]
        row_nll, position = nll[b, columns.cpu()], columns.cpu() + int(start_positions[b]) + 1
        add_score(sums, OVERALL, float(row_nll.sum()), len(columns))
        if bytes_per_token is not None:
            num_bytes = float(bytes_per_token[batch.targets[b, columns].cpu()].sum())
            add_score(sums, PER_BYTE, float(row_nll.sum()), num_bytes)
        low, high = 0, FIRST_BUCKET
        while len(position) and low <= int(position.max()):
            inside = (position >= low) & (position < high)
            if bool(inside.any()):
                add_score(sums, f"{low}-{high}", float(row_nll[inside].sum()), int(inside.sum()))
            low, high = high, 2 * high
        metrics.append(sums)
    return metrics


def merge_sums(parts: list[MetricSums]) -> MetricSums:
    """Add up the metrics of several passages."""
    sums: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (score, n) in part.items():
            add_score(sums, name, score, n)
    return sums
