"""Oracles of PCCoT 3 and 4: those of CODI over the blocks only, with one sigma for all layers if the flag is off."""

from typing import Any

from torch import Tensor

from tests.oracles import codi
from tests.oracles.codi import differentiated, hidden_loss, total, with_gradient


def kd_loss(h_t: Tensor, h_s: Tensor, at: codi.Places, sigma: bool) -> Tensor:
    """Return the loss over l = 1 … L, given states from l = 0 on."""
    return hidden_loss(h_t[1:], h_s[1:], at, norm="layer" if sigma else "global")


def misread(**changes: Any) -> Any:
    return differentiated(lambda h_t, h_s, at, sigma: hidden_loss(h_t[1:], h_s[1:], at, **changes))


kd_loss_with_gradients = differentiated(kd_loss)
total_with_gradients = with_gradient(total)

ORACLE = {
    "3": kd_loss_with_gradients,
    "4": total_with_gradients,
}

MISREAD = {
    "3": {
        "the embeddings counted": differentiated(lambda h_t, h_s, at, sigma: hidden_loss(h_t, h_s, at)),
        "the last layer alone": differentiated(lambda h_t, h_s, at, sigma: hidden_loss(h_t[-1:], h_s[-1:], at)),
        "no sigma": misread(norm="none"),
        "flag exchanged": differentiated(lambda h_t, h_s, at, sigma: kd_loss(h_t, h_s, at, not sigma)),
        "squares": misread(loss="mse"),
        "teacher not detached": misread(detach=False),
        "the same absolute column for both": misread(s_at=lambda c, Nc: c),
    },
    "4": {
        "alpha and beta exchanged": with_gradient(lambda s, t, c, config: total(t, s, c, config)),
        "teacher under no_grad": with_gradient(lambda s, t, c, config: total(s, t.detach(), c, config)),
        "gamma 1": with_gradient(
            lambda s, t, c, config: total(
                s, t, c, config, weights=(config.student_ce_weight, config.teacher_ce_weight, 1.0)
            )
        ),
    },
}
