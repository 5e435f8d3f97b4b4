"""CODI 2 and 3, PCCoT 3 and 4 against their oracles: distillation of hidden states, and the sums."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.config.methods import DistillationConfig, ScaleKind
from laconic.latent import codi
from laconic.models.decoder import DecoderOutput
from tests.oracles import codi as oracle
from tests.oracles import pccot as blocks
from tests.oracles.codi import MISREAD, ORACLE, differentiated, with_gradient
from tests.oracles.compare import agree

L, B, D, Nc, Na = 3, 4, 5, 4, 5
COLUMN, HAS_TARGET = torch.tensor([1, 2, 0, 1]), torch.tensor([True, True, False, True])
SIGMA: dict[bool, ScaleKind] = {True: "layer", False: "global"}  # the flag of PCCoT's code
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def hidden() -> tuple[Tensor, Tensor]:
    """States of l = 0 … L for teacher and student; each layer has a spread of its own."""
    sizes = torch.tensor([0.3, 1.0, 2.0, 4.0], dtype=torch.float64)[:, None, None, None]
    h_t, h_s = (torch.randn(L + 1, B, n, D, dtype=torch.float64) * sizes for n in (Nc + Na, 1 + Na))
    return h_t, h_s


def gathered(loss: Loss) -> Callable[..., Tensor]:
    """The loss on whole passes: the token is found as the methods find it."""

    def run(h_t: Tensor, h_s: Tensor, at: oracle.Places, *rest: Any) -> Tensor:
        column, has, Nc = at
        names = tuple(map(str, range(len(h_t))))
        seen = [DecoderOutput(h[0], None, dict(zip(names, h, strict=True))) for h in (h_t, h_s)]  # type: ignore[arg-type]
        t, s = codi.gather_column(seen[0], names, Nc + column), codi.gather_column(seen[1], names, 1 + column)
        return loss(t, s, has)

    return run


@pytest.mark.equation("codi", "2")
def test_hidden_loss_equation() -> None:
    """The value, and its gradient to the student; the teacher has none."""
    ours = differentiated(gathered(codi.hidden_loss))
    agree(ours, ORACLE["2"], MISREAD["2"], *hidden(), (COLUMN, HAS_TARGET, Nc))
    h_t, h_s = (h[:, :, 0] for h in hidden())
    assert gradcheck(lambda h_s: codi.hidden_loss(h_t, h_s, HAS_TARGET), h_s.requires_grad_())
    assert not codi.hidden_loss(h_t.requires_grad_(), h_s.detach(), HAS_TARGET).requires_grad


@pytest.mark.equation("codi", "2")
@pytest.mark.parametrize("loss", ["smooth_l1", "l1", "mse"])
@pytest.mark.parametrize("norm", ["layer", "global", "none"])
def test_hidden_loss_every_option(loss: Any, norm: Any) -> None:
    h_t, h_s = hidden()
    ours = gathered(partial(codi.hidden_loss, distance=loss, scale=norm))
    others = [(x, y, z) for x, y, z in FORMS if (x, y, z) != (loss, norm, 1)]
    misread = {str(form): lambda *a, form=form: oracle.hidden_loss(*a[:3], *form) for form in others}
    agree(ours, oracle.hidden_loss, misread, h_t, h_s, (COLUMN, HAS_TARGET, Nc), loss, norm, 1)


FORMS: list[tuple[str, str, int]] = [
    (loss, norm, power)
    for loss in ("smooth_l1", "l1", "mse")
    for norm, power in (("layer", 1), ("layer", 2), ("global", 1), ("none", 1))
]


@pytest.mark.equation("codi", "3")
def test_codi_combine_losses_equation() -> None:
    weights = DistillationConfig(student_ce_weight=0.8, teacher_ce_weight=1.3, hidden_weight=20.0)
    terms = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, 3.0, 0.25)]
    agree(with_gradient(codi.combine_losses), ORACLE["3"], MISREAD["3"], *terms, weights)
    assert gradcheck(lambda *x: codi.combine_losses(*x, weights), terms)


@pytest.mark.equation("pccot", "3")
@pytest.mark.parametrize("sigma", [True, False])
def test_pccot_hidden_loss_equation(sigma: bool) -> None:
    def ours(h_t: Tensor, h_s: Tensor, at: oracle.Places, sigma: bool) -> Tensor:
        return gathered(partial(codi.hidden_loss, scale=SIGMA[sigma]))(h_t[1:], h_s[1:], at)

    agree(differentiated(ours), blocks.ORACLE["3"], blocks.MISREAD["3"], *hidden(), (COLUMN, HAS_TARGET, Nc), sigma)
    h_t, h_s = (h[:, :, 0] for h in hidden())
    assert gradcheck(lambda h_s: codi.hidden_loss(h_t, h_s, HAS_TARGET, scale=SIGMA[sigma]), h_s.requires_grad_())
    assert not codi.hidden_loss(h_t.requires_grad_(), h_s.detach(), HAS_TARGET, scale=SIGMA[sigma]).requires_grad


@pytest.mark.equation("pccot", "4")
def test_pccot_combine_losses_equation() -> None:
    weights = DistillationConfig(student_ce_weight=0.8, teacher_ce_weight=1.3, hidden_weight=20.0)
    terms = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, 3.0, 0.25)]
    agree(with_gradient(codi.combine_losses), blocks.ORACLE["4"], blocks.MISREAD["4"], *terms, weights)
    assert gradcheck(lambda *x: codi.combine_losses(*x, weights), terms)


@pytest.mark.parametrize("rows", [0, 1])
def test_hidden_loss_of_few_rows(rows: int) -> None:
    """Without rows loss and gradient are 0; one element is divided by 1, equal elements by the smallest scale."""
    h_t, h_s = torch.ones(2, B, 1, dtype=torch.float64), torch.zeros(2, B, 1, dtype=torch.float64, requires_grad=True)
    loss = codi.hidden_loss(h_t, h_s, torch.arange(B) < rows)
    (grad,) = torch.autograd.grad(loss, h_s)
    assert float(loss.detach()) == 0.5 * rows
    assert grad.isfinite().all()
    assert bool(grad.any()) == bool(rows)
    same = codi.hidden_loss(torch.ones(1, B, 2), torch.zeros(1, B, 2), torch.ones(B).bool())
    assert float(same) == pytest.approx(0.5 / codi.MIN_STD)
