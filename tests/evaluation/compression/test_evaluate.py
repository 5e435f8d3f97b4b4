"""Scoring tails after contexts: the scored tokens, and what precedes them under each condition."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression.memory import SummaryMemory
from laconic.evaluation.compression import run
from laconic.evaluation.compression.evaluate import (
    ALL_TOKENS,
    CompressedContext,
    ContextCondition,
    evaluate_batch,
)

V = 11


class SumReader:
    """A method whose next token depends on the sum of all real ids before it and of its memory's vectors."""

    @property
    def decoder(self) -> "SumReader":
        return self

    def read_text(self, input_ids: Tensor, attention_mask: Tensor, memory: SummaryMemory | None) -> Tensor:
        before = 0 if memory is None else memory.vectors.sum((1, 2))[:, None]
        return ((input_ids * attention_mask).cumsum(1).double() + before)[..., None]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return torch.sin(hidden_states * torch.arange(1, V + 1))


@dataclass
class RandomDocuments:
    """Random ids: two segments of context and a tail; `calls` counts the batches."""

    rows: int = 5
    calls: int = 0
    fingerprint: str = "random"

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        self.calls += 1
        generator = torch.Generator().manual_seed(3)
        input_ids = torch.randint(1, V, (self.rows, 46), generator=generator)[list(rows)]
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        names = tuple(f"row {i}" for i in rows)
        return DocumentBatch(input_ids, mask, mask.clone(), (2, 6, 46), torch.as_tensor(rows), names)


def compress(batch: DocumentBatch) -> CompressedContext:
    """One or two vectors per segment, depending on the row; each is the sum of the segment's ids."""
    memory = SummaryMemory.empty(batch.B, 1, torch.float64)
    for columns in batch.segment_slices[:-1]:
        total = batch.input_ids[:, columns].sum(1).double()
        valid = torch.arange(2) < (1 + batch.row_index % 2)[:, None]
        memory = memory.append(total[:, None, None].expand(-1, 2, 1), valid, torch.ones_like(batch.row_index)).compact()
    return CompressedContext(memory, memory.vectors_per_segment, None)


def make_conditions() -> list[ContextCondition]:
    reader: Any = SumReader()
    return [
        ContextCondition("none", reader),
        ContextCondition("compressed", reader, compress),
        ContextCondition("truncated", reader, end_tokens="compressed"),
        ContextCondition("end 3", reader, end_tokens=3),
        ContextCondition("full", reader, end_tokens=ALL_TOKENS),
    ]


def score_by_loop(batch: DocumentBatch, b: int, before: float, start: int) -> tuple[list[float], int]:
    """Nats of each scored token of a row's tail, by the formula; `start` is where its text begins."""
    ids = batch.input_ids[b].tolist()
    nats, num_correct = [], 0
    for t in range(7, 46):
        total = before + sum(ids[start:t])
        logits = [math.sin(total * v) for v in range(1, V + 1)]
        nats.append(math.log(sum(math.exp(x) for x in logits)) - logits[ids[t]])
        num_correct += max(range(V), key=logits.__getitem__) == ids[t]
    return nats, num_correct


def test_evaluate_batch_scores_the_same_tokens_under_each_condition() -> None:
    source = RandomDocuments()
    batch = source.batch(range(5), 0, 0)
    documents = evaluate_batch(batch, make_conditions())
    for b, document in enumerate(documents):
        n = 1 + b % 2
        first, second = sum(batch.input_ids[b, :2].tolist()), sum(batch.input_ids[b, 2:6].tolist())
        expected = {
            "none": (0, 6, 0),
            "compressed": (n * (first + second), 6, 2 * n),
            "truncated": (0, 6 - 2 * n, 2 * n),
            "end 3": (0, 3, 3),
            "full": (0, 0, 6),
        }
        assert list(document.conditions) == list(expected)
        assert document.shared["scored_tokens"] == [31, 8]
        for name, (before, start, size) in expected.items():
            nats, num_correct = score_by_loop(batch, b, before, start)
            metrics = document.conditions[name]
            assert metrics["nll"] == pytest.approx([sum(nats[:31]), sum(nats[31:])], rel=1e-5)
            assert (metrics["num_correct"], metrics["context_size"]) == (num_correct, size)
        assert document.conditions["compressed"]["vectors_per_segment"] == [n, n]


def test_compress_other_text_takes_the_document_half_the_data_set_further_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "compress_context", lambda _, batch: batch.document_ids)
    source = RandomDocuments()
    names = run.compress_other_text(cast(Any, None), source, source.batch([0, 3, 4], 0, 0))
    assert names == ("row 2", "row 0", "row 1")
