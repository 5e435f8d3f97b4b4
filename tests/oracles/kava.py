"""Oracles of KaVa 4, 5 and 5a, 5b: keys and values at the slots, and the sums, as loops, and misreadings of them.

`kept` are targets (K, V), each a list over layers of [B, G, M, E]; `state` and `earlier` the student's keys and values
[B, G, 1 + M + 1, E] of bot, slots and eot in the last pass over the slots, and in the pass before it. The loops stay
differentiable, so that gradients are compared too.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.oracles.codi import DISTANCES, std, with_gradient

Sides = tuple[list[Tensor], list[Tensor]]


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def side(target: list[Tensor], student: list[Tensor], live: Tensor, config: dict[str, Any]) -> Tensor:
    """Return the loss on keys or on values with the given reduction."""
    B, G, M, E = target[0].shape
    L, slots = len(target), [(b, g, m) for b in range(B) for g in range(G) for m in range(M) if live[b, g, m]]
    norm, power = config.get("scale", "none"), config.get("scale_power", 1)
    spread = lambda x: std([value for at in slots for value in x[at]])  # noqa: E731
    everything = std([value for x in target for at in slots for value in x[at]])
    rows = [zero() for _ in range(B)]
    for t, s in zip(target, student, strict=True):
        sigma = {
            "none": lambda: 1.0,
            "each_side": lambda: 1.0,
            "layer": lambda: spread(t),  # noqa: B023
            "global": lambda: everything,
        }
        by = sigma[norm]() ** power
        by_t, by_s = (spread(t) ** power, spread(s) ** power) if norm == "each_side" else (1.0, 1.0)
        for b, g, m in slots:
            losses = DISTANCES[config.get("distance", "smooth_l1")](s[b, g, m] / by_s - t[b, g, m] / by_t)
            rows[b] = rows[b] + losses.sum() / by
    reduction = config.get("reduction", "mean")
    if reduction == "mean":
        return sum(rows) / (max(len(slots), 1) * L * E)
    if reduction == "paper_sum":
        return sum(rows) / (B * M)
    num_slots = [sum(at[0] == b for at in slots) for b in range(B)]
    return sum(row / (max(n, 1) * L * E) for row, n in zip(rows, num_slots, strict=True)) / B


def kv_loss(
    selected: Sides,
    state: Sides,
    earlier: Sides,
    live: Tensor,
    config: dict[str, Any],
    *,
    first: int = 1,
    detach: bool = True,
) -> Tensor:
    M, sums = selected[0][0].shape[2], []
    for target, student in zip(selected, state, strict=True):
        slots = [x[:, :, first : first + M] for x in student]
        sums.append(side([x.detach() if detach else x for x in target], slots, live, config))
    return 0.5 * (sums[0] + sums[1])


def differentiated(function: Any) -> Any:
    """Return the loss and its gradients to targets and student; an unused input has gradient 0."""

    def run(selected: Sides, state: Sides, earlier: Sides, *rest: Any) -> tuple[Tensor, ...]:
        sides = [tuple([x.detach().requires_grad_() for x in xs] for xs in side) for side in (selected, state, earlier)]
        leaves = [x for side in sides for xs in side for x in xs]
        loss = function(*sides, *rest)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return loss, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))

    return run


def misread(**changes: Any) -> Any:
    return differentiated(lambda *arguments: kv_loss(*arguments, **changes))


def normed(selected: Sides, state: Sides, earlier: Sides, live: Tensor, config: dict[str, Any], norm: str) -> Tensor:
    return kv_loss(selected, state, earlier, live, {**config, "scale": norm})


def over_width(selected: Sides, state: Sides, earlier: Sides, live: Tensor, config: dict[str, Any]) -> Tensor:
    """Use a standard deviation per vector, over its entries."""
    by = [[x.std(-1, keepdim=True) for x in xs] for xs in selected]
    scaled = lambda side: tuple([x / s for x, s in zip(xs, ss, strict=True)] for xs, ss in zip(side, by, strict=True))  # noqa: E731
    M = selected[0][0].shape[2]
    slots: Any = tuple([x[:, :, 1 : 1 + M] for x in xs] for xs in state)
    return kv_loss(scaled(selected), scaled(slots), earlier, live, {**config, "scale": "none"}, first=0)


def keys_alone(selected: Sides, state: Sides, earlier: Sides, live: Tensor, config: dict[str, Any]) -> Tensor:
    M = selected[0][0].shape[2]
    return side([x.detach() for x in selected[0]], [x[:, :, 1 : 1 + M] for x in state[0]], live, config)


def repeated(selected: Sides, state: Sides, earlier: Sides, live: Tensor, config: dict[str, Any]) -> Tensor:
    """Sum over the two query heads of a group, but divide by the number of key heads."""
    twice = lambda sides: tuple([x.repeat_interleave(2, 1) for x in xs] for xs in sides)  # noqa: E731
    return 2 * kv_loss(twice(selected), twice(state), earlier, live.repeat_interleave(2, 1), config)


def total(student: Tensor, teacher: Tensor, kd: Tensor, kv: Tensor, config: Any, alpha2: float) -> Tensor:
    return (
        config.student_ce_weight * student
        + config.teacher_ce_weight * teacher
        + config.hidden_weight * kd
        + alpha2 * kv
    )


Grid = tuple[Tensor, Tensor]  # ids and which are live


def nll(
    logits: Tensor, question: Grid, chain: Grid, answer: Grid, reduction: str = "token", *, first: str = "chain"
) -> Tensor:
    """Return the mean -log p of chain and answer tokens, each predicted at the unpadded token before it.

    `logits` [B, Nq + Nc + Na, V]; with an empty chain this is the student's (`question` then ends with eot).
    """
    rows: list[list[Tensor]] = []
    for b in range(len(logits)):
        live = torch.cat([part[1][b] for part in (question, chain, answer)]).tolist()
        ids = torch.cat([part[0][b] for part in (question, chain, answer)]).tolist()
        columns = [t for t, alive in enumerate(live) if alive]
        begin = {"chain": question[0].shape[1], "question": 1, "answer": question[0].shape[1] + chain[0].shape[1]}[
            first
        ]
        pairs = [(s, t) for s, t in pairwise(columns) if t >= begin]
        rows.append([-(logits[b, s, ids[t]] - logits[b, s].exp().sum().log()) for s, t in pairs])
    if reduction == "row":
        return sum(sum(row) / len(row) for row in rows if row) / max(sum(bool(row) for row in rows), 1)
    return sum(sum(row) for row in rows) / max(sum(map(len, rows)), 1)


def tokens(question: Grid, chain: Grid, answer: Grid, *rest: Any) -> int:
    return int(chain[1].sum() + answer[1].sum())


def by_column(logits: Tensor, question: Grid, chain: Grid, answer: Grid, reduction: str = "token") -> Tensor:
    """Let every unpadded column predict the id of the next column if that is unpadded."""
    ids, live = (torch.cat([part[i] for part in (question, chain, answer)], 1) for i in (0, 1))
    begin = question[0].shape[1]
    losses = [
        -logits[b, t - 1].log_softmax(-1)[ids[b, t]]
        for b in range(len(logits))
        for t in range(begin, ids.shape[1])
        if live[b, t]
    ]
    return sum(losses) / len(losses)


def pads_masked(logits: Tensor, question: Grid, chain: Grid, answer: Grid, reduction: str = "token") -> Tensor:
    """Skip targets equal to the pad id, which is eos, so that each row loses its eos."""
    pad = int(answer[0][0, -1])
    selected = (answer[0], answer[1] & (answer[0] != pad))
    return nll(logits, question, chain, selected, reduction)


def flowing(function: Any) -> Any:
    """Return the loss and its gradient to the logits."""

    def run(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = function(leaf, *rest)
        (grads,) = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else (None,)
        return loss, torch.zeros_like(leaf) if grads is None else grads

    return run


kv_loss_with_gradients = differentiated(kv_loss)
nll_with_gradients = flowing(nll)
total_with_gradients = with_gradient(total)

ORACLE = {
    "4": kv_loss_with_gradients,
    "5a,5b": nll_with_gradients,
    "5": total_with_gradients,
}

MISREAD = {
    "4": {
        "sum for mean": differentiated(lambda *a: kv_loss(*a[:4], {**a[4], "reduction": "paper_sum"})),
        "mean of row means": differentiated(lambda *a: kv_loss(*a[:4], {**a[4], "reduction": "row_mean"})),
        "teacher not detached": misread(detach=False),
        "both divided by their own sigma": differentiated(lambda *a: normed(*a, "each_side")),
        "divided by sigma where none is asked": differentiated(lambda *a: normed(*a, "layer")),
        "sigma over the head width": differentiated(over_width),
        "K and V of another pass": differentiated(
            lambda selected, state, earlier, *rest: kv_loss(selected, earlier, earlier, *rest)
        ),
        "bot in, last slot out": misread(first=0),
        "first slot out, eot in": misread(first=2),
        "zero targets in empty slots": differentiated(
            lambda selected, state, earlier, live, config: kv_loss(
                tuple([x * live[..., None] for x in xs] for xs in selected),
                state,
                earlier,
                torch.ones_like(live),
                config,
            )
        ),
        "keys alone": differentiated(keys_alone),
        "not halved": differentiated(lambda *a: 2 * kv_loss(*a)),
        "every vector for each query head": differentiated(repeated),
        "keys drawn to values": differentiated(lambda selected, *rest: kv_loss((selected[1], selected[0]), *rest)),
    },
    "5a,5b": {
        "the question scored too": flowing(lambda *a: nll(*a, first="question")),
        "the answer alone": flowing(lambda *a: nll(*a, first="answer")),
        "teacher under no_grad": flowing(lambda logits, *rest: nll(logits.detach(), *rest)),
        "pads masked by id, the eos with them": flowing(pads_masked),
        "targets by column across pads": flowing(by_column),
        "the other reduction": flowing(lambda *a: nll(*a[:4], "row" if a[4:] in ((), ("token",)) else "token")),
        "a mean over rows of sums": flowing(lambda logits, *a: nll(logits, *a) * tokens(*a) / len(logits)),
    },
    "5": {
        "teacher under no_grad": with_gradient(lambda s, t, c, k, *rest: total(s, t.detach(), c, k, *rest)),
        "alpha1 and alpha2 exchanged": with_gradient(lambda s, t, c, k, *rest: total(s, t, k, c, *rest)),
        "no L_CODI": with_gradient(lambda s, t, c, k, *rest: total(s, t, 0 * c, k, *rest)),
        "mean of the terms": with_gradient(lambda *a: total(*a) / 4),
    },
}
