"""KaVa 4, 5 and 5a, 5b against their oracles: distillation of keys and values, and the sums."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.config.methods import DistillationConfig, KVDistillationConfig
from laconic.latent import kava
from laconic.latent.kava import kv_loss
from laconic.losses import masked_cross_entropy
from tests.latent.batches import reasoning_batch
from tests.oracles import kava as oracle
from tests.oracles.codi import with_gradient
from tests.oracles.compare import agree
from tests.oracles.kava import MISREAD, ORACLE, Sides, differentiated, flowing

L, B, G, M, E = 2, 3, 2, 3, 4
TARGET_MASK = torch.tensor([[True] * 3, [True, True, False], [False] * 3])[:, None].expand(B, G, M)


def sides(columns: int) -> Sides:
    """Keys and values of L layers, each of its own size."""
    return tuple([torch.randn(B, G, columns, E, dtype=torch.float64) * (1 + l) for l in range(L)] for _ in "kv")  # type: ignore[return-value]


def ours(targets_kv: Sides, state: Sides, earlier: Sides, mask: Tensor, options: dict[str, Any]) -> Tensor:
    slots = ([x[:, :, 1 : 1 + M] for x in xs] for xs in state)
    return kv_loss(*targets_kv, *slots, mask, KVDistillationConfig(**options))  # type: ignore[arg-type]


@pytest.mark.medium
@pytest.mark.equation("kava", "4")
def test_kv_loss_equation() -> None:
    """The value, and its gradient to the student's slots alone."""
    agree(differentiated(ours), ORACLE["4"], MISREAD["4"], sides(M), sides(M + 2), sides(M + 2), TARGET_MASK, {})
    (k_target, v_target), (k_s, v_s) = sides(M), sides(M)
    leaves = [x.requires_grad_() for x in (*k_s, *v_s)]
    assert gradcheck(lambda *x: kv_loss(k_target, v_target, x[:L], x[L:], TARGET_MASK), leaves)
    for x in (*k_target, *v_target):
        x.requires_grad_()
    assert not kv_loss(
        k_target, v_target, [k.detach() for k in k_s], [v.detach() for v in v_s], TARGET_MASK, KVDistillationConfig()
    ).requires_grad


@pytest.mark.equation("kava", "4")
@pytest.mark.parametrize("distance", ["smooth_l1", "l1", "mse"])
@pytest.mark.parametrize(("scale", "power"), [("none", 1), ("layer", 1), ("layer", 2), ("global", 1)])
def test_kv_loss_every_option(distance: str, scale: str, power: int) -> None:
    options = {"distance": distance, "scale": scale, "scale_power": power}
    changes = ({"distance": "l1" if distance != "l1" else "mse"}, {"scale": "none" if scale != "none" else "layer"},
               {"scale_power": 3 - power})  # fmt: skip
    differing = [change for change in changes if scale != "none" or "scale_power" not in change]
    misread = {str(c): differentiated(lambda *a, c=c: oracle.kv_loss(*a[:4], {**options, **c})) for c in differing}
    arguments = sides(M), sides(M + 2), sides(M + 2), TARGET_MASK, options
    agree(differentiated(ours), ORACLE["4"], misread, *arguments)


def test_kv_loss_without_targets_is_zero() -> None:
    targets_kv, state = sides(M), sides(M)
    leaves = [x.requires_grad_() for xs in state for x in xs]
    for scale in ("none", "layer", "global"):
        config = KVDistillationConfig(scale=scale)
        loss = kv_loss(*targets_kv, *state, torch.zeros(B, G, M).bool(), config, denominator=0.0)
        assert float(loss.detach()) == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.equation("kava", "5a,5b")
def test_masked_cross_entropy_equation() -> None:
    """Over logits of a whole grid with pads before, between and behind; the eos of every row is the pad's id."""
    V, batch = 11, reasoning_batch(((3, 3, 3), (2, 1, 4), (3, 0, 2)), pads=1, V=11)
    parts = (
        (batch.question_ids, batch.question_mask),
        (batch.chain_ids, batch.chain_mask),
        (batch.answer_ids, batch.answer_mask),
    )
    Nq, Nc, Na = (part[0].shape[1] for part in parts)

    def ours(logits: Tensor, question: Any, chain: Any, answer: Any) -> Tensor:
        targets = torch.cat([batch.question_target[:, None], batch.chain_targets, batch.answer_targets], 1)
        return masked_cross_entropy(lambda h: h, logits[:, Nq - 1 :], targets).loss

    logits = torch.randn(3, Nq + Nc + Na, V, dtype=torch.float64)
    agree(flowing(ours), ORACLE["5a,5b"], MISREAD["5a,5b"], logits, *parts)
    targets = torch.tensor([[1, -100, 3]])
    assert gradcheck(
        lambda x: masked_cross_entropy(lambda h: h, x, targets).loss, logits[:1, :3].clone().requires_grad_()
    )


@pytest.mark.equation("kava", "5")
def test_kava_combine_losses_equation() -> None:
    options = DistillationConfig(student_ce_weight=0.8, teacher_ce_weight=1.3, hidden_weight=10.0)
    terms = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, 3.0, 0.25, 0.5)]
    agree(with_gradient(kava.combine_losses), ORACLE["5"], MISREAD["5"], *terms, options, 2.0)
    assert gradcheck(lambda *x: kava.combine_losses(*x, options, 2.0), terms)
