"""Score the tails of documents under several context conditions: no context, vectors, or text.

Symbols: B documents, C columns of context, T of a tail, n segments of a context, D width. Losses are in nats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.compression.memory import SummaryMemory
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.text_loss import score_grid

BUCKET_TOKENS = 32  # positions of a tail whose loss is stored as one number
ALL_TOKENS = 1 << 40  # as `ContextCondition.end_tokens`: the whole context


@dataclass(frozen=True)
class ContextTail:
    """Documents split into a context and the tail that is scored after it.

    `segment_ends` are the exclusive ends of the context's segments; the last is C. The first token of a tail is never
    scored, so that every scored token is predicted from inside the tail. `num_facts` are those of each document of fact
    recall.
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
        return tuple(slice(a, b) for a, b in zip((0, *self.segment_ends), self.segment_ends, strict=False))


def split_context(batch: Any) -> ContextTail:
    """Split documents into context and tail, the last segment. Raises `InputError` for one segment or padding."""
    assert isinstance(batch, DocumentBatch)
    *segment_ends, _ = batch.segment_ends
    if not segment_ends or not bool(batch.attention_mask.all()):
        raise InputError(f"{batch.document_ids[0]}: expected at least two segments without padding")
    C = segment_ends[-1]
    loss_mask = batch.loss_mask[:, C:].clone()
    loss_mask[:, 0] = False
    return ContextTail(
        context=batch.input_ids[:, :C],
        segment_ends=tuple(segment_ends),
        tail=batch.input_ids[:, C:],
        loss_mask=loss_mask,
        row_index=batch.row_index,
        names=batch.document_ids,
        num_facts=batch.num_facts,
    )


class CompressedContext(NamedTuple):
    """A compressed context; the number of vectors of each segment, and E[N] of each if lengths are learned."""

    memory: SummaryMemory
    vectors_per_segment: Int[Tensor, "B n"]
    expected_lengths: Float[Tensor, "B n"] | None


@dataclass(frozen=True)
class ContextCondition:
    """What precedes a tail that `reader` reads: a context that `compress` compresses, or text.

    `end_tokens` is the number of last tokens of the context (`ALL_TOKENS` for the whole), or the name of an earlier
    condition whose number of vectors is used.
    """

    name: str
    reader: AutoCompressor | LanguageModelBaseline
    compress: Callable[[ContextTail], CompressedContext] | None = None
    end_tokens: int | str = 0


@torch.inference_mode()
def evaluate_batch(split: ContextTail, conditions: Sequence[ContextCondition]) -> list[EvalItem]:
    """Evaluate every document of a batch under every condition.

    The metrics of a document are its number of facts, if it has any; the scored tokens and the summed nats of each
    `BUCKET_TOKENS` positions of the tail; the scored tokens predicted correctly; the number of vectors or tokens before
    the tail; the number of vectors of each segment; and E[N] of each segment, if known.
    """
    rows: list[dict[str, dict[str, Any]]] = [{} for _ in split.names]
    no_lengths: list[list[Any]] = [[] for _ in rows]
    num_facts = [None] * len(rows) if split.num_facts is None else split.num_facts.tolist()
    scored = sum_buckets(split.loss_mask.long()).tolist()
    for condition in conditions:
        compressed = None if condition.compress is None else condition.compress(split)
        end = condition.end_tokens
        sizes = [row[end]["context_size"] if isinstance(end, str) else end for row in rows]
        counts = split.row_index.new_tensor(sizes).clamp(max=split.context.shape[1])
        input_ids, mask = build_text_context(split, counts)
        memory, expected = (None, None) if compressed is None else (compressed.memory, compressed.expected_lengths)
        hidden_states = condition.reader.read_text(input_ids, mask, memory)[:, -split.tail.shape[1] :]
        # Each token is predicted from the one before it; nats and correctness are 0 and False where nothing is scored.
        targets = split.tail.masked_fill(~split.loss_mask, IGNORE_INDEX)[:, 1:]
        nll, is_correct = score_grid(condition.reader.decoder.logits, hidden_states[:, :-1], targets)
        columns: dict[str, list[Any]] = {
            "num_facts": num_facts,
            "scored_tokens": scored,
            "nll": sum_buckets(F.pad(nll, (1, 0)).double()).tolist(),
            "num_correct": is_correct.sum(1).tolist(),
            "context_size": (counts if memory is None else memory.num_vectors).tolist(),
            "vectors_per_segment": no_lengths if compressed is None else compressed.vectors_per_segment.tolist(),
            "expected_lengths": no_lengths if expected is None else expected.double().tolist(),
        }
        for b, row in enumerate(rows):
            row[condition.name] = {name: values[b] for name, values in columns.items()}
    return [EvalItem(name, row) for name, row in zip(split.names, rows, strict=True)]


def build_text_context(split: ContextTail, counts: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """Return ids and mask of the last `counts` tokens of each context, followed by the tail."""
    m = int(counts.max())
    C = split.context.shape[1]
    mask = torch.arange(m, device=counts.device) >= m - counts[:, None]
    input_ids = torch.cat([split.context[:, C - m :], split.tail], 1)
    return input_ids, torch.cat([mask, torch.ones_like(split.tail, dtype=torch.bool)], 1)


def sum_buckets(x: Tensor) -> Tensor:
    """Sum over each `BUCKET_TOKENS` positions: [B, T] to [B, ceil(T / BUCKET_TOKENS)]."""
    return F.pad(x, (0, -x.shape[1] % BUCKET_TOKENS)).unflatten(1, (-1, BUCKET_TOKENS)).sum(-1)
