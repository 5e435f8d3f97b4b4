"""Cross-entropy in chunks gives the loss and gradients of whole logits, in less memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import peak_allocated
from laconic.losses import LogitsFn, score_rows, score_rows_in_chunks
from laconic.models.ops import row_chunks
from laconic.models.ops.row_chunks import Scores
from tests.tolerances import ORACLE, error, largest

N, D, V = 300, 6, 50
ScoreFn = Callable[[LogitsFn, Tensor, Tensor], Scores]


def build_head(dtype: torch.dtype = torch.float64, *, trained: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=False, dtype=dtype).requires_grad_(trained)


def build_rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, labels, and a weight of each row's loss."""
    generator = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((N, D), (N,)))
    return hidden.to(dtype).requires_grad_(), torch.randint(V, (N,), generator=generator), weights


def count_logits(head: nn.Linear) -> list[int]:
    counts: list[int] = []
    head.register_forward_hook(lambda module, args, output: counts.append(output.shape[0]))
    return counts


@pytest.mark.parametrize(("trained", "chunks"), [(False, 8), (True, 2)])
def test_score_rows_in_chunks_equals_whole_logits(trained: bool, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "MAX_CHUNK_LOGITS", 40 * V)
    head, (hidden, labels, weights) = build_head(trained=trained), build_rows()
    inputs = [hidden, *(p for p in head.parameters() if trained)]
    counts = count_logits(head)
    results: list[tuple[Tensor, ...]] = []
    for score in (score_rows_in_chunks, score_rows):
        nats, is_correct = score(head, hidden, labels)
        results.append((nats, is_correct, *torch.autograd.grad((nats * weights).sum(), inputs)))
    (nats, is_correct, *gradients), (expected, expected_correct, *expected_gradients) = results
    assert largest(nats, expected) <= ORACLE
    assert is_correct.any()
    assert torch.equal(is_correct, expected_correct)
    assert all(largest(x, y) <= ORACLE for x, y in zip(gradients, expected_gradients, strict=True))
    assert counts.count(N) == 1  # of the comparison
    assert len(counts) == (1 + 2 * chunks if trained else 1 + chunks) + 1


@pytest.mark.parametrize("trained", [False, True])
def test_score_rows_in_chunks_under_flop_counter(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "MAX_CHUNK_LOGITS", 40 * V)
    head, (hidden, labels, _) = build_head(trained=trained), build_rows()
    with FlopCounterMode(display=False) as counter:  # its hooks on the head see the rows of each chunk
        score_rows_in_chunks(head, hidden, labels)[0].sum().backward()
    products = 4 if trained else 2  # logits once more and the gradient of the head
    assert counter.get_total_flops() == products * 2 * N * D * V + 2 * D * V  # and the logits of one row as a probe


def test_score_rows_in_chunks_without_gradient_equals_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "MAX_CHUNK_LOGITS", 40 * V)
    head, (hidden, labels, _) = build_head(trained=True), build_rows()
    with torch.no_grad():
        assert largest(score_rows_in_chunks(head, hidden, labels)[0], score_rows(head, hidden, labels)[0]) <= ORACLE


def test_score_rows_in_chunks_is_as_exact_as_whole_logits_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "MAX_CHUNK_LOGITS", 40 * V)
    exact, (hidden, labels, weights) = build_head(trained=False).bfloat16().double(), build_rows(torch.bfloat16)

    def gradient(score: ScoreFn, head: nn.Linear, hidden: Tensor) -> Tensor:
        nats, _ = score(head, hidden, labels)
        assert nats.dtype == (torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        return torch.autograd.grad((nats * weights).sum(), hidden)[0]

    expected = gradient(score_rows, exact, hidden.detach().double().requires_grad_())
    low = build_head(trained=False).bfloat16()
    chunked, whole = (error(gradient(score, low, hidden), expected) for score in (score_rows_in_chunks, score_rows))
    assert chunked <= 1.5 * whole


def test_score_rows_in_chunks_peak_is_far_below_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "MAX_CHUNK_LOGITS", 20 * V)
    head, (hidden, labels, _) = build_head(trained=False), build_rows()

    def work(score: ScoreFn) -> None:
        score(head, hidden, labels)[0].sum().backward()

    assert peak_allocated(lambda: work(score_rows)) > 2 * N * V * 8
    assert peak_allocated(lambda: work(score_rows_in_chunks)) < N * V * 8 / 2
