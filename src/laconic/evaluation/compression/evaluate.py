"""Tails scored after contexts that come to them as nothing, as vectors, as text, or as the end of that text.

Symbols: B documents, C columns of context, T of a tail, n segments of a context, D width. Nats are natural logarithms.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression.memory import SummaryMemory
from laconic.errors import InputError
from laconic.evaluation import line_store as results_store
from laconic.interfaces import TrainingData
from laconic.storage.strict_json import to_canonical_json

BUCKET_TOKENS = 32  # positions of a tail whose nats are kept as one number
MAX_LOGITS = 1 << 22  # logits computed at once
ALL_TOKENS = 1 << 40  # tokens of an end that is all of a context
ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ContextTail:
    """Documents parted into a context and the tail that is scored after it.

    `cuts` are the exclusive ends of the context's segments, the last is C. The first token of a tail is never scored,
    so that every scored token is predicted from inside the tail. `facts` as in `Documents`.
    """

    context: Int[Tensor, "B C"]
    segment_ends: tuple[int, ...]
    tail: Int[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    row_index: Int[Tensor, " B"]
    names: tuple[str, ...]
    num_facts: Int[Tensor, " B"] | None = None

    @property
    def segments(self) -> tuple[slice, ...]:
        """Columns of each segment of the context."""
        return tuple(slice(a, b) for a, b in zip((0, *self.segment_ends), self.segment_ends, strict=False))

    def to(self, device: torch.device) -> "ContextTail":
        """The same elsewhere."""
        facts = None if self.num_facts is None else self.num_facts.to(device)
        moved = (x.to(device) for x in (self.context, self.tail, self.loss_mask, self.row_index))
        context, tail, scored, index = moved
        return replace(self, context=context, tail=tail, loss_mask=scored, row_index=index, num_facts=facts)


def split_context(batch: Any) -> ContextTail:
    """Documents whose last segment is the tail. Raises `BadInput` (66) where not all of them is text."""
    assert isinstance(batch, DocumentBatch)
    *cuts, _ = batch.segment_ends
    if not cuts or not bool(batch.attention_mask.all()):
        raise InputError(
            f"{batch.document_ids[0]}: {len(batch.segment_ends)} segments, some of them cut short; give whole ones, two at least"
        )
    C = cuts[-1]
    scored = batch.loss_mask[:, C:].clone()
    scored[:, 0] = False
    return ContextTail(
        batch.input_ids[:, :C],
        tuple(cuts),
        batch.input_ids[:, C:],
        scored,
        batch.row_index,
        batch.document_ids,
        batch.num_facts,
    )


class CompressedContext(NamedTuple):
    """A context as vectors; how many each segment became, and where lengths are learned E[N] of each."""

    memory: SummaryMemory
    vectors_per_segment: Int[Tensor, "B n"]
    expected_lengths: Float[Tensor, "B n"] | None


class SegmentReader(Protocol):
    """What reads texts, behind a memory or alone."""

    def hidden_states(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], memory: SummaryMemory | None
    ) -> Float[Tensor, "B T D"]: ...
    def logits(self, hidden_states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]: ...


@dataclass(frozen=True)
class ContextCondition:
    """How a context comes to a tail: as the vectors that `compress` makes of it, else as the end of its text.

    `end` is how many tokens that has (`WHOLE`: all of them), or the name of an earlier way that had as many vectors.
    """

    name: str
    reader: SegmentReader
    compress: Callable[[ContextTail], CompressedContext] | None = None
    end_tokens: int | str = 0


class ConditionResult(NamedTuple):
    """One document in one way: nats of each `WIDTH` positions of the tail, and how many scored tokens came out right.

    `written` are vectors of each segment, `expected` E[N] of each where it is known; `held` vectors, or tokens of
    context, stood before the tail.
    """

    nll: tuple[float, ...]
    num_correct: int
    context_size: int
    vectors_per_segment: tuple[int, ...] = ()
    expected_lengths: tuple[float, ...] = ()


class DocumentResult(NamedTuple):
    """One document in every way; `scored` are the scored tokens of each `WIDTH` positions."""

    id: str
    num_facts: int | None
    scored_tokens: tuple[int, ...]
    conditions: Mapping[str, ConditionResult]

    def to_json_line(self) -> str:
        """The row as one line of JSON."""
        ways = [{"way": name, **said._asdict()} for name, said in self.conditions.items()]
        return to_canonical_json(self._asdict() | {"ways": ways}) + "\n"


def parse_result(line: str) -> DocumentResult:
    """The row that `line` wrote."""
    found, ways = json.loads(line), dict[str, ConditionResult]()
    for x in found["ways"]:
        ways[x["way"]] = ConditionResult(
            tuple(x["nats"]), x["right"], x["held"], tuple(x["written"]), tuple(x["expected"])
        )
    return DocumentResult(found["id"], found["facts"], tuple(found["scored"]), ways)


class ConditionTensors(NamedTuple):
    """A way on a batch: nats and right answers per position of the tail, and what stood before it."""

    nll: Float[Tensor, "B T"]
    is_correct: Bool[Tensor, "B T"]
    context_sizes: Int[Tensor, " B"]
    vectors_per_segment: Int[Tensor, "B n"] | None = None
    expected_lengths: Float[Tensor, "B n"] | None = None


@torch.inference_mode()
def evaluate_batch(split: ContextTail, conditions: Sequence[ContextCondition]) -> list[DocumentResult]:
    """Every document of a batch in every way."""
    found: dict[str, ConditionTensors] = {}
    for way in conditions:
        found[way.name] = run_condition(split, way, found)
    counts = sum_buckets(split.loss_mask.long()).tolist()
    said = {name: to_results(each) for name, each in found.items()}
    facts = [None] * len(counts) if split.num_facts is None else split.num_facts.tolist()
    return [
        DocumentResult(split.names[b], facts[b], tuple(counts[b]), {name: each[b] for name, each in said.items()})
        for b in range(len(counts))
    ]


def run_condition(
    split: ContextTail, condition: ContextCondition, earlier: Mapping[str, ConditionTensors]
) -> ConditionTensors:
    """One way; an end may be as long as the vectors of a way `before` it."""
    B, C = split.context.shape
    if condition.compress is not None:
        made = condition.compress(split)
        hidden = condition.reader.hidden_states(split.tail, torch.ones_like(split.tail, dtype=torch.bool), made.memory)
        return ConditionTensors(
            *score_tail(condition.reader, hidden, split),
            made.memory.num_vectors,
            made.vectors_per_segment,
            made.expected_lengths,
        )
    asked = (
        earlier[condition.end_tokens].context_sizes
        if isinstance(condition.end_tokens, str)
        else split.row_index.new_full((B,), condition.end_tokens)
    )
    held = asked.clamp(max=C)
    text, live = build_text_context(split, held)
    hidden = condition.reader.hidden_states(text, live, None)[:, text.shape[1] - split.tail.shape[1] :]
    return ConditionTensors(*score_tail(condition.reader, hidden, split), held)


def build_text_context(split: ContextTail, counts: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """The last `counts` tokens of each context, then the tail."""
    m, C = int(counts.max()), split.context.shape[1]
    at = torch.arange(m, device=counts.device) >= m - counts[:, None]
    text = torch.cat([split.context[:, C - m :], split.tail], 1)
    return text, torch.cat([at, torch.ones_like(split.tail, dtype=torch.bool)], 1)


def score_tail(
    reader: SegmentReader, hidden_states: Float[Tensor, "B T D"], split: ContextTail
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Nats of each scored token of the tails, each predicted from the one before it, and whether it was the likeliest.

    What is not scored has 0 and False.
    """
    at = split.loss_mask[:, 1:]
    states, targets = hidden_states[:, :-1][at], split.tail[:, 1:][at]
    nats, right = states.new_zeros(len(targets), dtype=torch.float32), torch.zeros_like(targets, dtype=torch.bool)
    step = max(MAX_LOGITS // reader.logits(states[:1]).shape[-1], 1)
    for i in range(0, len(targets), step):
        rows, asked = reader.logits(states[i : i + step]).float(), targets[i : i + step]
        nats[i : i + step] = F.cross_entropy(rows, asked, reduction="none")
        right[i : i + step] = rows.argmax(-1) == asked
    wide, hit = hidden_states.new_zeros(split.tail.shape, dtype=torch.float32), torch.zeros_like(split.loss_mask)
    wide[:, 1:][at], hit[:, 1:][at] = nats, right
    return wide, hit


def sum_buckets(x: Tensor) -> Tensor:
    """Sums over each `WIDTH` positions, [B, T] to [B, ceil(T / WIDTH)]."""
    return F.pad(x, (0, -x.shape[1] % BUCKET_TOKENS)).unflatten(1, (-1, BUCKET_TOKENS)).sum(-1)


def to_results(tensors: ConditionTensors) -> list[ConditionResult]:
    """A way on a batch as numbers, document by document."""
    nats, right, held = (
        sum_buckets(tensors.nll.double()).tolist(),
        tensors.is_correct.sum(1).tolist(),
        tensors.context_sizes.tolist(),
    )
    none: list[list[Any]] = [[]] * len(held)
    written = none if tensors.vectors_per_segment is None else tensors.vectors_per_segment.tolist()
    expected = none if tensors.expected_lengths is None else tensors.expected_lengths.double().tolist()
    each = zip(nats, right, held, written, expected, strict=True)
    return [ConditionResult(tuple(a), b, c, tuple(d), tuple(e)) for a, b, c, d, e in each]


def evaluate_conditions(
    source: TrainingData,
    conditions: Sequence[ContextCondition],
    device: torch.device,
    *,
    batch_size: int,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    summarise: Callable[[Sequence[DocumentResult]], Mapping[str, Any]] | None = None,
    progress: ProgressCallback | None = None,
) -> list[DocumentResult]:
    """Every document of a set in every way, `batch` at once.

    With a `folder`, rows are kept as `evaluation.kept` says: a folder that is there is read, one that was begun is gone
    on with. `result` are the figures that lie beside them. Raises `Busy` (73) for a folder of another key.
    """
    mark = to_canonical_json(
        {**(key or {}), "data": source.fingerprint, "ways": ",".join(way.name for way in conditions)}
    )

    def made(places: range) -> list[str]:
        return [
            row.to_json_line()
            for row in evaluate_batch(split_context(source.batch(places, 0, 0)).to(device), conditions)
        ]

    def figures(lines: Sequence[str]) -> Mapping[str, Any]:
        return summarise([parse_result(line) for line in lines]) if summarise else {}

    found = results_store.run_resumable(
        folder, mark, len(source), made, batch_size=batch_size, summarize=figures, extra_files=texts, progress=progress
    )
    return [parse_result(line) for line in found]
