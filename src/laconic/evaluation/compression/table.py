"""Results of compressors on data sets: terminal table, footnotes and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from laconic.evaluation.compression.evaluate import BUCKET_TOKENS, DocumentResult
from laconic.evaluation.compression.fact_recall import (
    length_fact_correlation,
    length_histogram,
    recall_by_facts,
    recall_summary,
    soft_hard_gap,
)
from laconic.evaluation.compression.perplexity import (
    ContextGain,
    add_control,
    common_conditions,
    context_gains,
    gain_to_json,
    nan_to_none,
    nll_by_position,
)
from laconic.evaluation.tables import build_terminal_table, format_percent


@dataclass(frozen=True)
class CompressionResult:
    """A run, of one seed or several, on one data set.

    Attributes:
        dataset: Name of the data set.
        run: Name of the run.
        seeds: Seeds of the run.
        documents_by_seed: Results of each seed.
        run_info: What the run is: method, length_policy, summary and so on.
    """

    dataset: str
    run: str
    seeds: tuple[int, ...]
    documents_by_seed: Sequence[Sequence[DocumentResult]]
    run_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def gains(self) -> list[ContextGain]:
        """The gain of each condition over no context."""
        return context_gains(self.documents_by_seed)

    @property
    def document_keys(self) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
        """Id, number of facts and scored tokens of each document."""
        return tuple((d.id, d.num_facts, d.scored_tokens) for d in self.documents_by_seed[0])

    @property
    def is_recall(self) -> bool:
        """Whether the data set is fact recall."""
        return self.documents_by_seed[0][0].num_facts is not None

    @property
    def pooled_documents(self) -> list[DocumentResult]:
        """The documents of all seeds."""
        return [document for documents in self.documents_by_seed for document in documents]


def add_controls(results: Sequence[CompressionResult]) -> list[CompressionResult]:
    """Add to each compressor the first language-model baseline that read the same documents, as a control."""
    baselines = [result for result in results if result.run_info.get("method") == "lm"]
    with_controls: list[CompressionResult] = []
    for result in results:
        key = (result.dataset, result.document_keys)
        control = next((other for other in baselines if (other.dataset, other.document_keys) == key), None)
        documents = result.documents_by_seed
        if control is not None and result.run_info.get("method") != "lm":
            documents = add_control(documents, control.documents_by_seed)
        with_controls.append(replace(result, documents_by_seed=documents))
    return with_controls


def result_to_json(result: CompressionResult) -> dict[str, Any]:
    """Return a result as a JSON object."""
    seeds, documents = result.documents_by_seed, result.pooled_documents
    conditions, gap = common_conditions(seeds), soft_hard_gap(documents)
    data: dict[str, Any] = {
        "dataset": result.dataset,
        "run": result.run,
        **result.run_info,
        "seeds": list(result.seeds),
        "documents": len(seeds[0]),
        "conditions": [gain_to_json(gain) for gain in result.gains],
        "bucket_tokens": BUCKET_TOKENS,
        "nll_by_position": {name: nll_by_position(seeds, name) for name in conditions},
        "length_histogram": {
            name: {str(n): count for n, count in length_histogram(documents, name).items()}
            for name in conditions
            if seeds[0][0].conditions[name].vectors_per_segment
        },
        "gap": None if gap is None else gap._asdict(),
    }
    return nan_to_none(data | ({"recall": recall_summary(documents)} if result.is_recall else {}))


def build_table(results: Sequence[CompressionResult]) -> Any:
    """Build the terminal table."""
    names = ("vectors", "before", "nats/token", "perplexity", "accuracy", "gain", "± s.e.", "share")
    rows = [
        (
            result.dataset,
            result.run,
            gain.condition,
            "–" if gain.mean_vectors is None else f"{gain.mean_vectors:.2f}",
            f"{gain.context_size:.1f}",
            f"{gain.nll.mean:.4f}" + ("" if gain.nll.sd is None else f" ± {gain.nll.sd:.4f}"),
            f"{np.exp(gain.nll.mean):.2f}",
            f"{format_percent(gain.accuracy.mean)} %",
            f"{gain.gain.mean:+.4f}",
            f"{gain.se:.4f}",
            "–" if gain.share_of_full is None else f"{format_percent(gain.share_of_full)} %",
        )
        for result in results
        for gain in result.gains
    ]
    return build_terminal_table(("data set", "run", "condition", *names), rows, num_text_columns=3)


def table_footnotes(results: Sequence[CompressionResult]) -> str:
    """Return the explanation below the table, and recall by the number of facts."""
    lines = [
        "vectors: per segment. before: vectors or tokens before the tail. gain: nats per token saved against no "
        "context, paired by document (untrained: against the untrained model). share: of the whole text's gain. "
        "Lengths are hard except in soft. full-tuned: the language-model baseline reads the whole text. oracle "
        "length: the cheapest length of each segment, found by trial; an upper bound, not a method."
    ]
    for result in results:
        if result.is_recall:
            lines += format_recall(result)
    return "\n".join(lines)


def format_recall(result: CompressionResult) -> list[str]:
    """Format the recall of a run by the number of facts."""
    documents, lines = result.pooled_documents, list[str]()
    for condition in ("compressed", "sampled"):
        if condition in common_conditions(result.documents_by_seed):
            cells = "; ".join(
                f"F={group.num_facts} {format_percent(group.accuracy)} % correct, N {group.mean_vectors:.2f}"
                for group in recall_by_facts(documents, condition)
            )
            r = length_fact_correlation(documents, condition)
            correlation = "–" if r is None else f"{r:.3f}"
            lines.append(f"{result.run}, {condition}: {cells}; correlation of N with F {correlation}")
    if gap := soft_hard_gap(documents):
        lines.append(
            f"{result.run}, soft minus hard: {gap.nll:+.4f} nats per token, {100 * gap.accuracy:+.1f} points of "
            f"accuracy, {gap.num_vectors:+.2f} vectors; E[N] {gap.expected_length:.3f}, mean of sampled N "
            f"{gap.sampled_length:.3f} ± {gap.sampled_se:.3f}"
        )
    return lines


def format_signed(x: float, digits: int) -> str:
    """Format a difference with its sign, without a negative zero."""
    return f"{round(x, digits) + 0.0:+.{digits}f}"
