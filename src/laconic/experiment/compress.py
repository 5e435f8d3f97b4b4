"""Compress texts of any length in parallel, segment by segment, with save and resume."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.batches.padding import PaddedIds
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import (
    STOP_HEAD_RULES,
    RuleName,
    StopRule,
    add_uniforms,
    check_rule,
    default_rule,
)
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import SourceDocument
from laconic.errors import UsageError, check_known
from laconic.experiment.resumable_stream import ResumableReading


@dataclass(frozen=True)
class SummaryLength:
    """How many summary vectors texts become; by default as many as the model's settings say.

    Give `num_vectors`, `total_vectors`, `quantile`, `threshold`, or a `stop_rule` with its own number.

    Args:
        stop_rule: Rule of the stop head.
        quantile: Quantile of the rule "quantile".
        threshold: Threshold of the rule "threshold".
        num_vectors: Fixed number of vectors of each segment.
        total_vectors: Number of vectors of each text, chosen by the stop head among those of all its segments, which
            must fit the model together.
        seed: Seed of the rule "sample"; a length also depends on the index of its text and segment.

    Raises:
        UsageError: If the number of vectors is given in two ways, or a value is invalid.

    Examples:
        >>> import laconic
        >>> compressor = laconic.load("runs/autocompressor")
        >>> memory = compressor.compress(["A long text."], length=laconic.SummaryLength(num_vectors=2))
        >>> int(memory.vectors_per_segment.max()) <= 2
        True
    """

    stop_rule: RuleName | None = None
    quantile: float | None = None
    threshold: float | None = None
    num_vectors: int | None = None
    total_vectors: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        names = ("stop_rule", "num_vectors", "total_vectors", "quantile", "threshold")
        present = [name for name in names if getattr(self, name) is not None]
        if len(present) > 1 and (present[0] != "stop_rule" or present[1:] != [self.stop_rule]):
            raise UsageError(f"{' and '.join(present)}: give only one of them, to choose the number of vectors")
        check_known("stop_rule", self.stop_rule, (None, *STOP_HEAD_RULES))
        for name in ("num_vectors", "total_vectors", "seed"):
            value = getattr(self, name)
            if not isinstance(value, SupportsIndex | None):
                raise UsageError(f"{name} {value!r}: give an integer")
        if self.total_vectors is not None and self.total_vectors < 1:
            raise UsageError(f"total_vectors {self.total_vectors}: give 1 or more")


def resolve_stop_rule(method: AutoCompressor, length: SummaryLength) -> StopRule:
    """Return the requested stop rule, or the run's own; one with a total is soft, and cut to it at the end."""
    default = default_rule(method.segment_model)
    if length.num_vectors is not None:
        return StopRule("fixed", num_vectors=length.num_vectors)
    if length.total_vectors is not None:
        return StopRule("soft")
    chosen = {name: getattr(length, name) for name in ("quantile", "threshold") if getattr(length, name) is not None}
    return default._replace(**chosen, name=length.stop_rule or next(iter(chosen), default.name))


class CompressionJob(ResumableReading[SummaryMemory]):
    """Job that compresses texts, by default to the lengths of the run's own rule.

    `positions_spent` counts the positions that went through the decoder. A number of vectors or a rule that the model
    was not trained for raises `UsageError`.
    """

    kind = "compression-job"
    counters = (*ResumableReading.counters, "positions_spent")

    def __init__(self, method: AutoCompressor, length: SummaryLength | None = None) -> None:
        super().__init__(method.decoder.device)
        self.method = method
        self.length = length or SummaryLength()
        self.positions_spent = 0
        self.stop_rule = resolve_stop_rule(method, self.length)
        check_rule(method.segment_model, self.stop_rule)

    @property
    def documents(self) -> list[tuple[SourceDocument, ...]]:
        return [(text.to_document(),) for text in self.texts]

    @torch.no_grad()
    def advance(self, piece: PaddedIds) -> SummaryMemory:
        B = len(piece.input_ids)
        method = self.method
        tokens = piece.attention_mask.sum(1)
        before = method.segment_model.empty_memory(B) if self.current is None else self.current
        rows = torch.arange(B, device=self.device) + len(self.texts)
        K = method.config.fixed_length
        rule = add_uniforms(self.stop_rule, self.length.seed, rows, self.next_piece - 1, K)
        after = method.compress(piece.input_ids, piece.attention_mask, before, rule)
        self.tokens += int(tokens.sum())
        self.positions_spent += int((self.extra_positions(before, after) + tokens)[tokens > 0].sum())
        return after

    def extra_positions(self, before: SummaryMemory, after: SummaryMemory) -> Int[Tensor, " B"]:
        """Return how many positions other than the text's the decoder read to compress a segment, per row."""
        reading = self.method.config
        N = after.vectors_per_segment[:, -1]
        before_text = self.method.segment_model.prefix_length + before.num_vectors
        positions = before_text
        trigger = 0
        if reading.summary == "autoregressive":
            trigger = int(reading.trigger_placement == "insert")
            positions = before_text + N + trigger
        elif reading.summary == "parallel":
            positions = before_text + (self.stop_rule.num_vectors or reading.fixed_length)
        if reading.memory_policy == "budgeted" and reading.max_memory_vectors is not None:
            condensed = (before.num_vectors > 0) & (before.num_vectors + N > reading.max_memory_vectors)
            positions = positions + condensed * (before_text + reading.fixed_length + trigger)
        return positions

    def append_rows(self, before: SummaryMemory | None, done: SummaryMemory) -> SummaryMemory:
        """Return all rows, with hard lengths and at most `total_vectors` each."""
        fitted = done if self.length.total_vectors is None else done.keep_top_vectors(self.length.total_vectors)
        hard = replace(fitted, log_s=None).compact()
        return hard if before is None else SummaryMemory.concat_rows(before, hard)

    def to_tensors(self, value: SummaryMemory, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        return {f"{prefix}{name}": x for name, x in value.tensors().items()}, None

    def from_tensors(self, spec: Any, tensors: Mapping[str, Tensor], prefix: str) -> SummaryMemory:
        parts = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        return SummaryMemory(**{"log_s": None, **parts}).to(self.device)
