"""Tails behind contexts: what is scored, what stands before it in each way, and what is kept on disk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression.memory import SummaryMemory
from laconic.errors import BusyError, InputError
from laconic.evaluation.compression import evaluate as compression_evaluate
from laconic.evaluation.compression.evaluate import (
    ALL_TOKENS,
    CompressedContext,
    ContextCondition,
    ContextTail,
    DocumentResult,
)

CPU, V = torch.device("cpu"), 11


class Counts:
    """A reader whose next word depends on the sum of all live ids before it, and on the vectors of its memory."""

    def states(self, text: Tensor, live: Tensor, memory: SummaryMemory | None) -> Tensor:
        before = 0 if memory is None else memory.vectors.sum((1, 2))[:, None]
        return ((text * live).cumsum(1).double() + before)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.sin(hidden * torch.arange(1, V + 1))


@dataclass
class Made:
    """Documents of drawn ids: two segments of context, a tail; `calls` counts the batches asked for."""

    rows: int = 5
    calls: int = 0
    fingerprint: str = "made"

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        self.calls += 1
        drawn = torch.Generator().manual_seed(3)
        text = torch.randint(1, V, (self.rows, 46), generator=drawn)[list(rows)]
        live = torch.ones_like(text, dtype=torch.bool)
        index = torch.as_tensor(rows)
        return DocumentBatch(text, live, live.clone(), (2, 6, 46), index, tuple(f"row {i}" for i in rows))


def compress(split: ContextTail) -> CompressedContext:
    """Of each segment as many vectors as its row's number says, at most two; each is the sum of the segment."""
    memory = SummaryMemory.empty(len(split.tail), 1, torch.float64)
    for columns in split.segments:
        total = split.context[:, columns].sum(1).double()
        live = torch.arange(2) < (1 + split.row_index % 2)[:, None]
        memory = memory.append(total[:, None, None].expand(-1, 2, 1), live, torch.ones_like(split.row_index)).compact()
    return CompressedContext(memory, memory.vectors_per_segment, None)


def ways() -> list[ContextCondition]:
    reader = Counts()
    return [
        ContextCondition("none", reader), ContextCondition("compressed", reader, compress), ContextCondition("truncated", reader, end_tokens="compressed"),
        ContextCondition("end 3", reader, end_tokens=3), ContextCondition("full", reader, end_tokens=ALL_TOKENS),
    ]  # fmt: skip


def loop(found: DocumentBatch, b: int, before: float, start: int) -> tuple[list[float], int]:
    """Nats of each scored token of a row's tail, by the formula alone; `start` is where its text begins."""
    ids = found.input_ids[b].tolist()
    nats, right = [], 0
    for t in range(7, 46):
        total = before + sum(ids[start:t])
        logits = [math.sin(total * v) for v in range(1, V + 1)]
        nats.append(math.log(sum(math.exp(x) for x in logits)) - logits[ids[t]])
        right += max(range(V), key=logits.__getitem__) == ids[t]
    return nats, right


def test_each_way_scores_the_same_tokens_behind_what_it_says() -> None:
    source = Made()
    rows = compression_evaluate.evaluate_batch(compression_evaluate.split_context(source.batch(range(5), 0, 0)), ways())
    found = source.batch(range(5), 0, 0)
    for b, row in enumerate(rows):
        n = 1 + b % 2
        first, second = sum(found.input_ids[b, :2].tolist()), sum(found.input_ids[b, 2:6].tolist())
        asked = {"none": (0, 6, 0), "compressed": (n * (first + second), 6, 2 * n), "truncated": (0, 6 - 2 * n, 2 * n),
                 "end 3": (0, 3, 3), "full": (0, 0, 6)}  # fmt: skip
        assert list(row.conditions) == list(asked)
        assert row.scored_tokens == (31, 8)
        for name, (before, start, held) in asked.items():
            nats, right = loop(found, b, before, start)
            said = row.conditions[name]
            assert said.nll == pytest.approx((sum(nats[:31]), sum(nats[31:])), rel=1e-5)
            assert (said.num_correct, said.context_size) == (right, held)
        assert row.conditions["compressed"].vectors_per_segment == (n, n)
        assert compression_evaluate.parse_result(row.to_json_line()) == row


def test_rows_are_kept_gone_on_with_and_read_again(tmp_path: Path) -> None:
    source, folder = Made(), tmp_path / "test"

    def evaluate(source: Made, key: str = "a") -> list[DocumentResult]:
        return compression_evaluate.evaluate_conditions(
            source, ways(), CPU, batch_size=2, folder=folder, key={"step": key}
        )

    whole = compression_evaluate.evaluate_conditions(Made(), ways(), CPU, batch_size=5)
    part = tmp_path / ".part-test"
    with pytest.raises(ZeroDivisionError):
        compression_evaluate.evaluate_conditions(
            source, ways(), CPU, batch_size=2, folder=folder, key={"step": "a"}, progress=lambda *_: 1 // 0
        )
    assert len((part / "answers.jsonl").read_text().splitlines()) == 2
    with pytest.raises(BusyError, match="holds answers to other questions or of another step"):
        evaluate(Made(), "b")
    source = Made()
    assert evaluate(source) == whole
    assert source.calls == 2
    source = Made()
    assert evaluate(source) == whole
    assert source.calls == 0
    with pytest.raises(BusyError, match="is the evaluation of other questions or of another step"):
        evaluate(Made(), "b")


def test_documents_cut_short_are_no_split() -> None:
    found = Made().batch(range(2), 0, 0)
    found.attention_mask[0, 0] = False
    with pytest.raises(InputError, match="some of them cut short; give whole ones, two at least"):
        compression_evaluate.split_context(found)
