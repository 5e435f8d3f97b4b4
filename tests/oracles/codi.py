"""Oracles of CODI 2 and 3 and PCCoT 3 and 4: hidden states at one token, as loops in float64, and misreadings.

The teacher's hidden states are [n, B, Nc + Na, D], the student's [n, B, 1 + Na, D]; `column` is the distillation
token's in the answer, `has` the rows that have one. The loops stay differentiable, so that gradients are compared too.
"""

from typing import Any

import torch
from torch import Tensor

Places = tuple[Tensor, Tensor, int]  # column, has, Nc


def smooth_l1(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1, 0.5 * x * x, x.abs() - 0.5)


DISTANCES = {"smooth_l1": smooth_l1, "l1": torch.abs, "mse": torch.square}


def std(values: list[Tensor]) -> Tensor:
    """Return the standard deviation with divisor n - 1: at least 1e-6, and 1 for fewer than two entries."""
    if len(values) < 2:
        return torch.ones((), dtype=torch.float64)
    mean = sum(values) / len(values)
    var = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return max(var, torch.tensor(1e-12, dtype=torch.float64)).sqrt()


def picked(h_t: Tensor, h_s: Tensor, at: Places, t_at: Any, s_at: Any) -> list[list[tuple[Tensor, Tensor]]]:
    """Return pairs (teacher, student) of vectors by layer and row."""
    column, has, Nc = at
    rows = [b for b in range(h_t.shape[1]) if has[b]]
    pick = lambda b: (t_at(int(column[b]), Nc), s_at(int(column[b]), Nc))  # noqa: E731
    return [[(h_t[l, b, pick(b)[0]], h_s[l, b, pick(b)[1]]) for b in rows] for l in range(len(h_t))]


def hidden_loss(
    h_t: Tensor,
    h_s: Tensor,
    at: Places,
    loss: str = "smooth_l1",
    norm: str = "layer",
    power: int = 1,
    *,
    detach: bool = True,
    of_student: bool = False,
    t_at: Any = lambda c, Nc: Nc + c,
    s_at: Any = lambda c, Nc: 1 + c,
) -> Tensor:
    layers = picked(h_t.detach() if detach else h_t, h_s, at, t_at, s_at)
    spread = lambda pairs: std([x for t, s in pairs for x in (s if of_student else t).detach()])  # noqa: E731
    total = torch.zeros((), dtype=torch.float64)
    for pairs in layers:
        sigma = spread(pairs) if norm == "layer" else spread([p for all in layers for p in all])
        sigma = torch.ones((), dtype=torch.float64) if norm == "none" else sigma
        losses = [DISTANCES[loss](s - t).sum() / len(t) for t, s in pairs]
        total = total + sum(losses) / max(len(losses), 1) / sigma**power
    return total / len(layers)


def differentiated(function: Any) -> Any:
    """Return the loss and its gradients to teacher and student; an unused input has gradient 0."""

    def run(h_t: Tensor, h_s: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        h_t, h_s = (h.detach().requires_grad_() for h in (h_t, h_s))
        loss = function(h_t, h_s, *rest)
        grads = torch.autograd.grad(loss, (h_t, h_s), allow_unused=True)
        return loss, *(torch.zeros_like(h) if g is None else g for h, g in zip((h_t, h_s), grads, strict=True))

    return run


def misread(**changes: Any) -> Any:
    return differentiated(lambda *arguments: hidden_loss(*arguments, **changes))


def from_the_end(h_t: Tensor, h_s: Tensor, at: Places, *rest: Any) -> Tensor:
    """Take the token before a one-token number and eos, counted from the right end, padding included."""
    return hidden_loss(h_t, h_s, at, *rest, t_at=lambda c, Nc: h_t.shape[2] - 3, s_at=lambda c, Nc: h_s.shape[2] - 3)


def raw_last(h_t: Tensor, h_s: Tensor, at: Places, *rest: Any) -> Tensor:
    """Take the last layer before the final norm, which here is a doubling."""
    return hidden_loss(*(torch.cat([h[:-1], h[-1:] / 2]) for h in (h_t, h_s)), at, *rest)


def per_width(h_t: Tensor, h_s: Tensor, at: Places, *rest: Any) -> Tensor:
    """Use a standard deviation per entry of the hidden state, over rows."""
    layers = picked(h_t.detach(), h_s, at, lambda c, Nc: Nc + c, lambda c, Nc: 1 + c)
    total = torch.zeros((), dtype=torch.float64)
    for pairs in layers:
        t, s = (torch.stack(side) for side in zip(*pairs, strict=True))
        total = total + (smooth_l1(s - t) / t.std(0)).mean()
    return total / len(layers)


def total(
    student: Tensor, teacher: Tensor, codi: Tensor, config: Any, *, weights: tuple[float, float, float] | None = None
) -> Tensor:
    by = weights or (config.student_ce_weight, config.teacher_ce_weight, config.hidden_weight)
    return by[0] * student + by[1] * teacher + by[2] * codi


def with_gradient(function: Any) -> Any:
    """Return the sum and its gradient to each term."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        terms = [x.detach().requires_grad_() for x in arguments if isinstance(x, Tensor)]
        loss = function(*terms, *(x for x in arguments if not isinstance(x, Tensor)))
        grads = torch.autograd.grad(loss, terms, allow_unused=True)
        return loss, *(torch.zeros_like(x) if g is None else g for x, g in zip(terms, grads, strict=True))

    return run


hidden_loss_with_gradients = differentiated(hidden_loss)
total_with_gradients = with_gradient(total)

ORACLE = {
    "2": hidden_loss_with_gradients,
    "3": total_with_gradients,
}

MISREAD = {
    "2": {
        "token counted from the end": differentiated(from_the_end),
        "the same absolute column for both": misread(s_at=lambda c, Nc: c),
        "the number's own token": misread(t_at=lambda c, Nc: Nc + c + 1, s_at=lambda c, Nc: c + 2),
        "raw residual for l = L": differentiated(raw_last),
        "no sigma": differentiated(lambda h_t, h_s, at, *rest: hidden_loss(h_t, h_s, at, norm="none")),
        "one sigma for all layers": differentiated(
            lambda h_t, h_s, at, *rest: hidden_loss(h_t, h_s, at, norm="global")
        ),
        "sigma of the student": misread(of_student=True),
        "sigma over rows alone": differentiated(per_width),
        "teacher not detached": misread(detach=False),
        "sum over layers": differentiated(lambda h_t, *rest: len(h_t) * hidden_loss(h_t, *rest)),
        "rows without the token counted": differentiated(
            lambda h_t, h_s, at, *rest: hidden_loss(h_t, h_s, (at[0], torch.ones_like(at[1]), at[2]), *rest)
        ),
    },
    "3": {
        "no cross-entropy of the teacher": with_gradient(
            lambda s, t, c, config: config.student_ce_weight * s + config.hidden_weight * c
        ),
        "teacher under no_grad": with_gradient(lambda s, t, c, config: total(s, t.detach(), c, config)),
        "weights of student and teacher exchanged": with_gradient(lambda s, t, c, config: total(t, s, c, config)),
        "gamma 1": with_gradient(
            lambda s, t, c, config: total(
                s, t, c, config, weights=(config.student_ce_weight, config.teacher_ce_weight, 1.0)
            )
        ),
        "mean of the terms": with_gradient(lambda s, t, c, config: total(s, t, c, config) / 3),
    },
}
