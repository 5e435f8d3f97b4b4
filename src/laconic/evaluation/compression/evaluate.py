"""Score the tails of documents under several context conditions: no context, vectors, or text.

Symbols: B documents, C columns of context, T of a tail, n segments of a context, D width. Losses are in nats.
"""

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
from laconic.evaluation.results_store import EvalMetadata, EvalRecord, ProgressCallback, run_resumable
from laconic.interfaces import TrainingData

BUCKET_TOKENS = 32  # positions of a tail whose loss is stored as one number
MAX_LOGITS = 1 << 22  # logits computed at once
ALL_TOKENS = 1 << 40  # as `ContextCondition.end_tokens`: the whole context


@dataclass(frozen=True)
class ContextTail:
    """Documents split into a context and the tail that is scored after it.

    Attributes:
        context: Token ids of the contexts.
        segment_ends: Exclusive ends of the context's segments; the last is C.
        tail: Token ids of the tails.
        loss_mask: Scored tokens of the tail. The first token is never scored, so that every scored token is predicted
            from inside the tail.
        row_index: Index of each document in its data set.
        names: Ids of the documents.
        num_facts: Number of facts in each document of fact recall.
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
        """Move to a device."""
        return replace(
            self,
            context=self.context.to(device),
            tail=self.tail.to(device),
            loss_mask=self.loss_mask.to(device),
            row_index=self.row_index.to(device),
            num_facts=None if self.num_facts is None else self.num_facts.to(device),
        )


def split_context(batch: Any) -> ContextTail:
    """Split documents into context and tail; the tail is the last segment.

    Raises:
        InputError: If there is only one segment, or if a segment is padded.
    """
    assert isinstance(batch, DocumentBatch)
    *segment_ends, _ = batch.segment_ends
    if not segment_ends or not bool(batch.attention_mask.all()):
        raise InputError(f"{batch.document_ids[0]}: expected at least two segments without padding")
    C = segment_ends[-1]
    loss_mask = batch.loss_mask[:, C:].clone()
    loss_mask[:, 0] = False
    return ContextTail(
        batch.input_ids[:, :C],
        tuple(segment_ends),
        batch.input_ids[:, C:],
        loss_mask,
        batch.row_index,
        batch.document_ids,
        batch.num_facts,
    )


class CompressedContext(NamedTuple):
    """A compressed context; the number of vectors of each segment, and E[N] of each if lengths are learned."""

    memory: SummaryMemory
    vectors_per_segment: Int[Tensor, "B n"]
    expected_lengths: Float[Tensor, "B n"] | None


class SegmentReader(Protocol):
    """Reads texts, after a memory or alone."""

    def hidden_states(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], memory: SummaryMemory | None
    ) -> Float[Tensor, "B T D"]: ...
    def logits(self, hidden_states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]: ...


@dataclass(frozen=True)
class ContextCondition:
    """What precedes a tail.

    Attributes:
        name: Name of the condition.
        reader: Reads the tail.
        compress: Compresses the context; None if the context is text.
        end_tokens: Number of last tokens of the context (`ALL_TOKENS` for the whole), or the name of an earlier
            condition whose number of vectors is used.
    """

    name: str
    reader: SegmentReader
    compress: Callable[[ContextTail], CompressedContext] | None = None
    end_tokens: int | str = 0


class ConditionResult(NamedTuple):
    """One document under one condition.

    Attributes:
        nll: Summed nats of each `BUCKET_TOKENS` positions of the tail.
        num_correct: Scored tokens predicted correctly.
        context_size: Number of vectors or tokens before the tail.
        vectors_per_segment: Number of vectors of each segment.
        expected_lengths: E[N] of each segment, if known.
    """

    nll: tuple[float, ...]
    num_correct: int
    context_size: int
    vectors_per_segment: tuple[int, ...] = ()
    expected_lengths: tuple[float, ...] = ()


class DocumentResult(NamedTuple):
    """One document under every condition; `scored_tokens` counts them for each `BUCKET_TOKENS` positions."""

    id: str
    num_facts: int | None
    scored_tokens: tuple[int, ...]
    conditions: Mapping[str, ConditionResult]

    def to_records(self, metadata: EvalMetadata) -> list[EvalRecord]:
        """Return one record per condition."""
        shared = {"num_facts": self.num_facts, "scored_tokens": self.scored_tokens}
        return [
            metadata.new_record(self.id, name, {**shared, **result._asdict()})
            for name, result in self.conditions.items()
        ]


def group_records(records: Sequence[EvalRecord]) -> list[DocumentResult]:
    """Return the documents that `DocumentResult.to_records` stored."""
    documents: dict[str, DocumentResult] = {}
    for record in records:
        m = record.metrics
        document = documents.setdefault(
            record.item, DocumentResult(record.item, m["num_facts"], tuple(m["scored_tokens"]), {})
        )
        result = ConditionResult(
            tuple(m["nll"]),
            m["num_correct"],
            m["context_size"],
            tuple(m["vectors_per_segment"]),
            tuple(m["expected_lengths"]),
        )
        documents[record.item] = document._replace(conditions={**document.conditions, record.condition: result})
    return [*documents.values()]


class ConditionTensors(NamedTuple):
    """A condition on a batch: nats and correctness at each position of the tail, and the sizes of the contexts."""

    nll: Float[Tensor, "B T"]
    is_correct: Bool[Tensor, "B T"]
    context_sizes: Int[Tensor, " B"]
    vectors_per_segment: Int[Tensor, "B n"] | None = None
    expected_lengths: Float[Tensor, "B n"] | None = None


@torch.inference_mode()
def evaluate_batch(split: ContextTail, conditions: Sequence[ContextCondition]) -> list[DocumentResult]:
    """Evaluate every document of a batch under every condition."""
    tensors: dict[str, ConditionTensors] = {}
    for condition in conditions:
        tensors[condition.name] = run_condition(split, condition, tensors)
    counts = sum_buckets(split.loss_mask.long()).tolist()
    results = {name: to_results(values) for name, values in tensors.items()}
    num_facts = [None] * len(counts) if split.num_facts is None else split.num_facts.tolist()
    return [
        DocumentResult(
            split.names[b], num_facts[b], tuple(counts[b]), {name: values[b] for name, values in results.items()}
        )
        for b in range(len(counts))
    ]


def run_condition(
    split: ContextTail, condition: ContextCondition, earlier: Mapping[str, ConditionTensors]
) -> ConditionTensors:
    """Score the tails of a batch under one condition; a text may be as long as the vectors of an `earlier` one."""
    reader, T = condition.reader, split.tail.shape[1]
    if condition.compress is not None:
        compressed = condition.compress(split)
        mask = torch.ones_like(split.tail, dtype=torch.bool)
        hidden_states = reader.hidden_states(split.tail, mask, compressed.memory)
        return ConditionTensors(
            *score_tail(reader, hidden_states, split),
            compressed.memory.num_vectors,
            compressed.vectors_per_segment,
            compressed.expected_lengths,
        )
    if isinstance(condition.end_tokens, str):
        sizes = earlier[condition.end_tokens].context_sizes
    else:
        sizes = torch.full_like(split.row_index, condition.end_tokens)
    sizes = sizes.clamp(max=split.context.shape[1])
    input_ids, mask = build_text_context(split, sizes)
    hidden_states = reader.hidden_states(input_ids, mask, None)[:, input_ids.shape[1] - T :]
    return ConditionTensors(*score_tail(reader, hidden_states, split), sizes)


def build_text_context(split: ContextTail, counts: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """Return ids and mask of the last `counts` tokens of each context, followed by the tail."""
    m, C = int(counts.max()), split.context.shape[1]
    mask = torch.arange(m, device=counts.device) >= m - counts[:, None]
    input_ids = torch.cat([split.context[:, C - m :], split.tail], 1)
    return input_ids, torch.cat([mask, torch.ones_like(split.tail, dtype=torch.bool)], 1)


def score_tail(
    reader: SegmentReader, hidden_states: Float[Tensor, "B T D"], split: ContextTail
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return nats and correctness of each scored token, predicted from the one before it; 0 and False elsewhere."""
    is_scored = split.loss_mask[:, 1:]
    states, targets = hidden_states[:, :-1][is_scored], split.tail[:, 1:][is_scored]
    nll = states.new_zeros(len(targets), dtype=torch.float32)
    is_correct = torch.zeros_like(targets, dtype=torch.bool)
    step = max(MAX_LOGITS // reader.logits(states[:1]).shape[-1], 1)
    for i in range(0, len(targets), step):
        logits, chunk = reader.logits(states[i : i + step]).float(), targets[i : i + step]
        nll[i : i + step] = F.cross_entropy(logits, chunk, reduction="none")
        is_correct[i : i + step] = logits.argmax(-1) == chunk
    nll_grid = hidden_states.new_zeros(split.tail.shape, dtype=torch.float32)
    correct_grid = torch.zeros_like(split.loss_mask)
    nll_grid[:, 1:][is_scored], correct_grid[:, 1:][is_scored] = nll, is_correct
    return nll_grid, correct_grid


def sum_buckets(x: Tensor) -> Tensor:
    """Sum over each `BUCKET_TOKENS` positions: [B, T] to [B, ceil(T / BUCKET_TOKENS)]."""
    return F.pad(x, (0, -x.shape[1] % BUCKET_TOKENS)).unflatten(1, (-1, BUCKET_TOKENS)).sum(-1)


def to_results(tensors: ConditionTensors) -> list[ConditionResult]:
    """Convert a condition on a batch to one result per document."""
    nll, num_correct = sum_buckets(tensors.nll.double()).tolist(), tensors.is_correct.sum(1).tolist()
    sizes = tensors.context_sizes.tolist()
    none: list[list[Any]] = [[]] * len(sizes)
    vectors = none if tensors.vectors_per_segment is None else tensors.vectors_per_segment.tolist()
    expected = none if tensors.expected_lengths is None else tensors.expected_lengths.double().tolist()
    rows = zip(nll, num_correct, sizes, vectors, expected, strict=True)
    return [ConditionResult(tuple(a), b, c, tuple(d), tuple(e)) for a, b, c, d, e in rows]


def evaluate_conditions(
    source: TrainingData,
    conditions: Sequence[ContextCondition],
    device: torch.device,
    metadata: EvalMetadata,
    *,
    batch_size: int,
    folder: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    summarize: Callable[[Sequence[DocumentResult]], Mapping[str, Any]] | None = None,
    progress: ProgressCallback | None = None,
) -> list[DocumentResult]:
    """Evaluate every document of a data set under every condition; stored results are loaded, partial ones resumed.

    Args:
        source: The documents.
        conditions: What precedes the tails.
        device: Device of the model.
        metadata: Identifies the evaluation; data and conditions are added to its key.
        batch_size: Documents per batch.
        folder: The run's `evaluations` folder; None stores nothing.
        extra_files: Text files stored with the results.
        summarize: Returns the figures stored with the results.
        progress: Called after each batch.

    Raises:
        BusyError: If the folder holds an evaluation of something else.
    """
    key = {"data": source.fingerprint, "conditions": ",".join(condition.name for condition in conditions)}
    metadata = replace(metadata, key={**metadata.key, **key})

    def evaluate(indices: Sequence[int]) -> list[list[EvalRecord]]:
        split = split_context(source.batch(indices, 0, 0)).to(device)
        return [document.to_records(metadata) for document in evaluate_batch(split, conditions)]

    records = run_resumable(
        folder,
        metadata,
        len(source),
        evaluate,
        batch_size=batch_size,
        summarize=None if summarize is None else lambda records: summarize(group_records(records)),
        extra_files=extra_files,
        progress=progress,
    )
    return group_records(records)
