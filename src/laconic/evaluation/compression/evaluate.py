"""Score the tails of documents under several context conditions: no context, vectors, or text.

The tail of a document is its last segment, and the others are its context. There is no padding.

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
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.text_loss import score_grid

BUCKET_TOKENS = 32  # positions of a tail whose loss is stored as one number
ALL_TOKENS = 1 << 40  # as `ContextCondition.end_tokens`: the whole context


def find_scored_tokens(batch: DocumentBatch) -> Bool[Tensor, "B T"]:
    """Return which tokens of the tails are scored; the first one is never, so that each is predicted from inside."""
    scored = batch.loss_mask[:, batch.segment_slices[-1]].clone()
    scored[:, 0] = False
    return scored


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
    compress: Callable[[DocumentBatch], CompressedContext] | None = None
    end_tokens: int | str = 0


@torch.inference_mode()
def evaluate_batch(batch: DocumentBatch, conditions: Sequence[ContextCondition]) -> list[EvalItem]:
    """Evaluate every document of a batch under every condition.

    The metrics of a document are its number of facts, if it has any; the scored tokens and the summed nats of each
    `BUCKET_TOKENS` positions of the tail; the scored tokens predicted correctly; the number of vectors or tokens before
    the tail; the number of vectors of each segment; and E[N] of each segment, if known.
    """
    tail = batch.segment_slices[-1]
    is_scored = find_scored_tokens(batch)
    # Each token is predicted from the one before it; nats and correctness are 0 and False where nothing is scored.
    targets = batch.input_ids[:, tail].masked_fill(~is_scored, IGNORE_INDEX)[:, 1:]
    scored = sum_buckets(is_scored.long()).tolist()
    rows: list[dict[str, dict[str, Any]]] = [{} for _ in batch.document_ids]
    no_lengths: list[list[Any]] = [[] for _ in rows]
    num_facts = [None] * len(rows) if batch.num_facts is None else batch.num_facts.tolist()
    for condition in conditions:
        compressed = None if condition.compress is None else condition.compress(batch)
        end = condition.end_tokens
        sizes = [row[end]["context_size"] if isinstance(end, str) else end for row in rows]
        counts = batch.row_index.new_tensor(sizes).clamp(max=tail.start)
        input_ids, mask = build_text_context(batch, counts)
        memory, expected = (None, None) if compressed is None else (compressed.memory, compressed.expected_lengths)
        hidden_states = condition.reader.read_text(input_ids, mask, memory)[:, tail.start - tail.stop :]
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
    return [EvalItem(name, row) for name, row in zip(batch.document_ids, rows, strict=True)]


def build_text_context(
    batch: DocumentBatch, counts: Int[Tensor, " B"]
) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """Return ids and mask of the last `counts` tokens of each context, followed by the tail."""
    m = int(counts.max())
    C = batch.segment_slices[-1].start
    mask = batch.attention_mask[:, C - m :].clone()
    mask[:, :m] = torch.arange(m, device=counts.device) >= m - counts[:, None]
    return batch.input_ids[:, C - m :], mask


def sum_buckets(x: Tensor) -> Tensor:
    """Sum over each `BUCKET_TOKENS` positions: [B, T] to [B, ceil(T / BUCKET_TOKENS)]."""
    return F.pad(x, (0, -x.shape[1] % BUCKET_TOKENS)).unflatten(1, (-1, BUCKET_TOKENS)).sum(-1)
