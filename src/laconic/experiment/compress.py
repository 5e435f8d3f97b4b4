"""Texts of any length compressed side by side, a segment of each at a time; of a memory all vectors are held."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import RuleName, StopRule, default_rule
from laconic.compression.halting.stop_distribution import draw_uniforms
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import SourceDocument
from laconic.errors import UsageError
from laconic.experiment.resumable_stream import PaddedIds, ResumableReading


@dataclass(frozen=True)
class LengthRule:
    """How many vectors a segment becomes: by a stop's rule, `n` of each, or a `budget` shared out over a whole text.

    `seed` is of the draws of stop sample, which depend on it, the text's number and the segment's alone.
    """

    stop_rule: RuleName
    quantile: float = 0.5
    threshold: float = 0.5
    num_vectors: int | None = None
    total_vectors: int | None = None
    seed: int = 0


def resolve_length_rule(
    method: AutoCompressor,
    *,
    stop_rule: RuleName | None = None,
    quantile: float | None = None,
    threshold: float | None = None,
    num_vectors: int | None = None,
    total_vectors: int | None = None,
    seed: int = 0,
) -> LengthRule:
    """What was asked, and where nothing was what the run's own settings say.

    Raises `Usage` (2) for two answers to one question; what a model has not learned is refused when it compresses.
    """
    asked = {"stop": stop_rule, "n": num_vectors, "budget": total_vectors, "q": quantile, "tau": threshold}
    given = [name for name, value in asked.items() if value is not None]
    rules = {"quantile": ["q"], "threshold": ["tau"]}.get(str(stop_rule), [])
    if len(given) > 1 and given != ["stop", *rules]:
        raise UsageError(f"{' and '.join(given)} given; one of them says how many vectors a segment becomes")
    own = default_rule(method.segment_model)
    if num_vectors is not None:
        return LengthRule("fixed", num_vectors=num_vectors)
    if total_vectors is not None:
        if total_vectors < 1:
            raise UsageError(f"budget {total_vectors}: give 1 vector or more")
        return LengthRule("soft", total_vectors=total_vectors)
    rule = stop_rule or ("quantile" if quantile is not None else "threshold" if threshold is not None else own.name)
    return LengthRule(
        rule,
        own.quantile if quantile is None else quantile,
        own.threshold if threshold is None else threshold,
        own.num_vectors,
        seed=seed,
    )


class CompressionJob(ResumableReading[SummaryMemory]):
    """Texts on their way to vectors, a segment at a time; `spent` positions went through the decoder."""

    kind = "compressing"  # "compression" was of another form
    counts = (*ResumableReading.counters, "spent")

    def __init__(self, method: AutoCompressor, length_rule: LengthRule) -> None:
        super().__init__(method.decoder.token_embedding.weight.device)
        self.method, self.length_rule, self.positions_spent = method, length_rule, 0

    @property
    def documents(self) -> list[tuple[SourceDocument, ...]]:
        """What each row that is done stands for."""
        return [(text.to_document,) for text in self.texts]

    @torch.no_grad()
    def advance(self, segment: PaddedIds) -> SummaryMemory:
        """The memory after one more segment of every text that still has one."""
        B, method = len(segment.input_ids), self.method
        tokens = segment.attention_mask.sum(1)
        before = method.segment_model.empty_memory(B) if self.current is None else self.current
        after = method.compress(segment.input_ids, segment.attention_mask, before, self.length_decision(B))
        self.tokens += int(tokens.sum())
        self.positions_spent += int((self.extra_positions(before, after) + tokens)[tokens > 0].sum())
        return after

    def extra_positions(self, before: SummaryMemory, after: SummaryMemory) -> Int[Tensor, " B"]:
        """Positions beside the text's own that compressing a segment put through the decoder, of each row."""
        reading, N = self.method.config, after.vectors_per_segment[:, -1]
        none, loop = torch.zeros_like(N), reading.summary == "autoregressive"
        lead = (
            none
            + self.method.segment_model.prefix_length * (reading.bos == "sink")
            + (before.num_tokens == 0) * (reading.bos == "first")
        )
        before_text = lead + (before.num_vectors if reading.reread_memory else none)
        behind = (
            N
            if loop
            else none + (self.length_rule.num_vectors or reading.fixed_length) * (reading.summary == "parallel")
        )
        trigger = int(loop and reading.trigger_placement == "insert")
        found = before_text + behind + trigger
        if reading.memory_policy == "budgeted" and reading.max_memory_vectors is not None:
            condensed = (before.num_vectors > 0) & (before.num_vectors + N > reading.max_memory_vectors)
            found = found + condensed * (before_text + reading.fixed_length + trigger)
        return found

    def length_decision(self, B: int) -> StopRule:
        """The rule of a segment, with its draws where there are any."""
        how, K, drawn = self.length_rule, self.method.config.fixed_length, None
        if how.stop_rule == "sample":
            rows = torch.arange(B) + len(self.texts)
            drawn = draw_uniforms("length", how.seed, 0, rows, self.next_piece - 1, K).to(self.device)
        return StopRule(how.stop_rule, how.quantile, how.threshold, how.num_vectors, drawn)

    def append_rows(self, before: SummaryMemory | None, done: SummaryMemory) -> SummaryMemory:
        """All rows, hard and of no more vectors than a budget says."""
        fitted = (
            done if self.length_rule.total_vectors is None else done.keep_top_vectors(self.length_rule.total_vectors)
        )
        hard = replace(fitted, log_s=None).compact()
        return hard if before is None else SummaryMemory.concat_rows(before, hard)

    def to_tensors(self, held: SummaryMemory, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """By the names of its parts."""
        return {f"{prefix}{name}": x for name, x in held.tensors().items()}, None

    def from_tensors(self, form: Any, tensors: Mapping[str, Tensor], prefix: str) -> SummaryMemory:
        """From the parts that are there."""
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        return SummaryMemory(**{"log_s": None, **own}).to(self.device)
