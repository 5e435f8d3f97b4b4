"""The stop head's gradient in the whole method, weighted over all outcomes, is that of the expectation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch, next_token_targets
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory import SummaryMemory
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.halting.stop_distribution import length_probs
from tests import tolerances
from tests.models.fixtures import fresh
from tests.oracles.compare import distance

BETA, TOKENS = 0.7, 4
GENERATOR = pytest.mark.parametrize("generator", ["parallel", "autoregressive"])
INDEX = pytest.mark.parametrize("index", ["after", "before"])


def method(generator: str, K: int, **halting: Any) -> AutoCompressor:
    """Build a compressor in float64 whose stop head distinguishes states."""
    reading = CompressionConfig(summary=generator, length_policy="stop_head", max_vectors=K, summary_init="normal")  # type: ignore[arg-type]
    config, decoder = StopHeadConfig(length_cost=BETA, **halting), fresh("llama").double()
    summaries = SummaryParameters(decoder, reading, config, eos_token_id=None).double()
    assert summaries.u is not None
    assert summaries.b is not None
    noise = torch.randn(48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        summaries.u.copy_(noise * 0.05)
        summaries.b.fill_(1.0)
    return AutoCompressor(decoder, summaries, reading, config, total_steps=100)


def documents(w: int) -> DocumentBatch:
    """Two documents of one window at full price; the second is one segment shorter if there are three."""
    text = torch.randint(3, 97, (2, w * TOKENS), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, w * TOKENS, dtype=torch.bool)
    mask[1, max(2 * TOKENS, (w - 1) * TOKENS) :] = False
    scored = mask.clone()
    scored[:, 0] = False
    cuts = tuple(TOKENS * i for i in range(1, w + 1))
    return DocumentBatch(text, mask, scored, cuts, torch.arange(2), ("a", "b"), step=99, windows=(w, 0))


def outcomes(
    reader: AutoCompressor, row: DocumentBatch, memory: SummaryMemory, i: int, lengths: tuple[int, ...], p: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Yield (lengths, probability, cost) of every outcome from segment `i` on; the last segment is not compressed."""
    at = row.segment_slices[i]
    text, mask = row.input_ids[:, at], row.attention_mask[:, at]
    targets = next_token_targets(row.input_ids, row.attention_mask, row.loss_mask)[:, at]
    nats = reader.segment_model.segment_loss(reader.segment_model.read_segment(memory, text, mask), targets).nll[0]
    if i == len(row.segment_ends) - 1 or not row.attention_mask[:, row.segment_slices[i + 1]].any():
        yield lengths, p, nats.detach()
        return
    K, index = reader.config.max_vectors, reader.summaries.stop_position
    written = reader.segment_model.compress_segment(memory, text, mask, K)
    P = length_probs(reader.summaries.stop_logits(reader.decoder, written.summary_states), index)[0]
    for n in range(index == "after", K + 1):
        selected = reader.segment_model.select_vectors(written, mask, torch.tensor([n]))
        after = reader.segment_model.update_memory(memory, selected, mask.sum(1))
        for result, chance, cost in outcomes(reader, row, after, i + 1, (*lengths, n), p * P[n - (index == "after")]):
            yield result, chance, cost + nats.detach() + BETA * n


def exact(
    reader: AutoCompressor, batch: DocumentBatch
) -> tuple[tuple[Tensor, ...], list[dict[tuple[int, ...], float]]]:
    """Return the gradient of the expected cost, and the probability of every outcome of each row."""
    total, chances = torch.zeros(()).double(), []
    for row in range(batch.B):
        result = list(
            outcomes(
                reader, batch.select_rows([row]), reader.segment_model.empty_memory(1), 0, (), torch.ones(()).double()
            )
        )
        total = total + torch.stack([chance * cost for _, chance, cost in result]).sum()
        chances.append({lengths: float(chance.detach()) for lengths, chance, _ in result})
    return head(reader, total / batch.loss_mask.sum()), chances


def head(reader: AutoCompressor, loss: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of u and b."""
    assert reader.summaries.u is not None
    assert reader.summaries.b is not None
    return torch.autograd.grad(loss, (reader.summaries.u, reader.summaries.b))


@GENERATOR
@INDEX
def test_ponder_is_exact(generator: str, index: str) -> None:
    """w = 2: the head's gradient is exact."""
    reader, batch = method(generator, 3, estimator="ponder", stop_position=index), documents(2)
    expected, _ = exact(reader, batch)
    assert distance(head(reader, reader(batch).loss), expected) < tolerances.ORACLE


def test_rows_that_have_ended_have_no_price() -> None:
    """The second row has two of three segments, so nothing reads its second compression."""
    reader, batch = method("parallel", 3, estimator="ponder"), documents(3)
    whole = head(reader, reader(batch).loss * batch.loss_mask.sum())
    parts = [
        head(reader, reader(row).loss * row.loss_mask.sum()) for row in (batch.select_rows([0]), batch.select_rows([1]))
    ]
    summed = tuple(a + b for a, b in zip(*parts, strict=True))
    assert distance(whole, summed) < tolerances.ORACLE
    expected, _ = exact(reader, batch.select_rows([1]))
    assert distance(tuple(x / batch.select_rows([1]).loss_mask.sum() for x in parts[1]), expected) < tolerances.ORACLE
