"""Runs that read, on sets of documents: what is kept of each, the table on a terminal, and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from laconic.evaluation.compression import fact_recall
from laconic.evaluation.compression.evaluate import BUCKET_TOKENS, DocumentResult
from laconic.evaluation.compression.perplexity import (
    ContextGain,
    add_control,
    common_conditions,
    context_gains,
    gain_to_json,
    nan_to_none,
    nll_by_position,
)
from laconic.evaluation.report.runs_table import format_percent


@dataclass(frozen=True)
class CompressionResult:
    """A run on a set, of one seed or several: the rows of each. `about` is what the run is, `length` its kind."""

    dataset: str
    run: str
    seeds: tuple[int, ...]
    documents_by_seed: Sequence[Sequence[DocumentResult]]
    run_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def gains(self) -> list[ContextGain]:
        """What each way is worth."""
        return context_gains(self.documents_by_seed)

    @property
    def document_keys(self) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
        """Names, facts and scored tokens of the documents."""
        return tuple((row.id, row.num_facts, row.scored_tokens) for row in self.documents_by_seed[0])

    @property
    def is_recall(self) -> bool:
        """Whether the documents are of the recall task."""
        return self.documents_by_seed[0][0].num_facts is not None

    @property
    def pooled_documents(self) -> list[DocumentResult]:
        """The rows of all seeds."""
        return [row for rows in self.documents_by_seed for row in rows]


def add_controls(results: Sequence[CompressionResult]) -> list[CompressionResult]:
    """The lines; those of runs that compress know the first plain run that read the same documents as a control."""
    plain = [line for line in results if line.run_info.get("method") == "lm"]
    found: list[CompressionResult] = []
    for line in results:
        control = next(
            (each for each in plain if (each.dataset, each.document_keys) == (line.dataset, line.document_keys)), None
        )
        compresses = line.run_info.get("method") != "lm"
        rows = (
            add_control(line.documents_by_seed, control.documents_by_seed)
            if control is not None and compresses
            else line.documents_by_seed
        )
        found.append(replace(line, documents_by_seed=rows))
    return found


def result_to_json(result: CompressionResult) -> dict[str, Any]:
    """A run on a set as JSON holds it."""
    found: dict[str, Any] = {
        "set": result.dataset,
        "run": result.run,
        **result.run_info,
        "seeds": list(result.seeds),
        "documents": len(result.documents_by_seed[0]),
        "ways": [gain_to_json(each) for each in result.gains],
        "positions": BUCKET_TOKENS,
        "curves": {
            way: nll_by_position(result.documents_by_seed, way) for way in common_conditions(result.documents_by_seed)
        },
        "lengths": {
            way: {str(n): count for n, count in fact_recall.length_histogram(result.pooled_documents, way).items()}
            for way in common_conditions(result.documents_by_seed)
            if result.documents_by_seed[0][0].conditions[way].vectors_per_segment
        },
    }
    gap = fact_recall.soft_hard_gap(result.pooled_documents)
    found["gap"] = None if gap is None else gap._asdict()
    return nan_to_none(
        found | ({"recall": fact_recall.recall_summary(result.pooled_documents)} if result.is_recall else {})
    )


def build_table(results: Sequence[CompressionResult]) -> Any:
    """The table of a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="")
    for name in ("set", "run", "way"):
        made.add_column(name, no_wrap=True)
    for name in ("vectors", "before", "nats a token", "perplexity", "right", "saved", "± s.e.", "share"):
        made.add_column(name, justify="right", no_wrap=True)
    for line in results:
        for w in line.gains:
            spread = "" if w.nll.sd is None else f" ± {w.nll.sd:.4f}"
            made.add_row(
                line.dataset, line.run, w.condition, "–" if w.mean_vectors is None else f"{w.mean_vectors:.2f}", f"{w.context_size:.1f}",
                f"{w.nll.mean:.4f}{spread}", f"{np.exp(w.nll.mean):.2f}", f"{format_percent(w.accuracy.mean)} %",
                f"{w.gain.mean:+.4f}", f"{w.se:.4f}", "–" if w.share_of_full is None else f"{format_percent(w.share_of_full)} %",
            )  # fmt: skip
    return made


def table_footnotes(results: Sequence[CompressionResult]) -> str:
    """What stands under the table: how it is to be read, and recall by the number of facts."""
    said = [
        "vectors: of a segment; before: vectors, or tokens of text, that stand before the tail; saved: nats a token "
        "less than with no context (untrained: than untrained without), paired by document; share: of what the whole "
        "text saves. Hard lengths, but for soft. full-tuned: the whole text, read by the plain run beside. oracle "
        "length: of each segment that with the least nats of what follows and price, by trial: a bound, no method."
    ]
    for line in results:
        if line.is_recall:
            said += format_recall(line)
    return "\n".join(said)


def format_recall(result: CompressionResult) -> list[str]:
    """Recall of a run by the number of facts."""
    rows, found = result.pooled_documents, list[str]()
    for way in ("compressed", "sampled"):
        if way in common_conditions(result.documents_by_seed):
            each = fact_recall.recall_by_facts(rows, way)
            cells = "; ".join(
                f"F={x.num_facts} {format_percent(x.accuracy)} % right, N {x.mean_vectors:.2f}" for x in each
            )
            r = fact_recall.length_fact_correlation(rows, way)
            found.append(f"{result.run}, {way}: {cells}; correlation of N with F " + ("–" if r is None else f"{r:.3f}"))
    if gap := fact_recall.soft_hard_gap(rows):
        found.append(
            f"{result.run}, soft less hard: {gap.nll:+.4f} nats a token, {100 * gap.accuracy:+.1f} points right, "
            f"{gap.num_vectors:+.2f} vectors; E[N] {gap.expected_length:.3f}, mean of drawn N {gap.sampled_length:.3f} ± "
            f"{gap.sampled_se:.3f}"
        )
    return found
