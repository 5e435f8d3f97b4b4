"""Masked cross-entropy: micro-batches, scored positions, dtype."""

import torch
from torch import Tensor

from laconic.losses import count_scored, masked_cross_entropy

V, D = 7, 5


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    head, hidden = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((V, D), (3, 4, D)))
    targets = torch.tensor([[1, -100, 3, -100], [-100] * 4, [2, 0, 6, 5]])
    return head, hidden, targets


def test_cross_entropy_micro_batches_equal_one_batch() -> None:
    total = 6.0
    head, hidden, targets = batch()
    assert count_scored(targets) == total
    whole = masked_cross_entropy(lambda h: h @ head.mT, hidden, targets)
    parts = [
        masked_cross_entropy(lambda h: h @ head.mT, hidden[i : i + 1], targets[i : i + 1], total) for i in range(3)
    ]
    for name in ("loss", "accuracy"):
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), getattr(whole, name))


def test_cross_entropy_computes_logits_of_scored_positions_only() -> None:
    head, hidden, targets = batch()
    sizes: list[int] = []
    masked_cross_entropy(lambda h: sizes.append(len(h)) or h @ head.mT, hidden, targets)
    assert sizes == [6]


def test_cross_entropy_without_targets_is_zero() -> None:
    head, hidden, _ = batch()
    hidden.requires_grad_()
    for total in (None, 0.0, 3.0):
        got = masked_cross_entropy(lambda h: h @ head.mT, hidden, torch.full((3, 4), -100), total)
        (grad,) = torch.autograd.grad(got.loss, hidden)
        assert got.loss == got.accuracy == 0
        assert not grad.any()


def test_cross_entropy_is_at_least_float32() -> None:
    head, hidden, targets = (x.bfloat16() if x.is_floating_point() else x for x in batch())
    assert masked_cross_entropy(lambda h: h @ head.mT, hidden, targets).loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert masked_cross_entropy(lambda h: h.float() @ head.float().mT, hidden, targets).loss.dtype == torch.float32
