"""Oracle of Coconut 1: latents and loss of whole rows, recomputed for every latent, and misreadings of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """`read` gives the hidden states of a row from its beginning, `raw` those before the final norm; `head` [V, D].

    A row is (question ids, steps of ids, answer ids); k steps go and n latents come, for all rows alike.
    """

    read: Callable[[list[Tensor]], list[Tensor]]
    raw: Callable[[list[Tensor]], list[Tensor]]
    words: Tensor
    head: Tensor
    bot: Tensor
    end: Tensor
    rows: list[tuple[list[int], list[list[int]], list[int]]]
    k: int
    n: int


def nll(h: Tensor, head: Tensor, target: int) -> Tensor:
    logits = [(row * h).sum() for row in head]
    top = max(float(x.detach()) for x in logits)
    return top + sum(torch.exp(x - top) for x in logits).log() - logits[target]


def loss(
    case: Case,
    *,
    k: Callable[[int], int] = lambda k: k,
    n: Callable[[int], int] = lambda n: n,
    from_right: bool = False,
    detach: bool = False,
    raw: bool = False,
    question: bool = False,
    first: bool = True,
    by_row: bool = False,
    bot_again: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the mean loss over all tokens after `end`, and the last latent of each row."""
    rows, latents = [], []
    for target_id, steps, answer in case.rows:
        vectors = [*(case.words[i] for i in target_id), case.bot]
        for _ in range(n(case.n)):
            z = (case.raw if raw else case.read)(vectors[: len(target_id) + 1] if bot_again else vectors)[-1]
            vectors.append(z.detach() if detach else z)
        latents.append(vectors[-1])
        left = steps[: max(len(steps) - k(case.k), 0)] if from_right else steps[k(case.k) :]
        rest = [*(i for step in left for i in step), *answer]
        start = len(vectors)
        h = case.read([*vectors, case.end, *(case.words[i] for i in rest)])
        scored = [nll(h[start + j], case.head, i) for j, i in enumerate(rest) if first or j]
        if question:
            scored += [nll(h[j], case.head, i) for j, i in enumerate(target_id[1:])]
        rows.append(scored)
    means = [sum(row) / len(row) for row in rows]
    flat = [x for row in rows for x in row]
    return sum(means) / len(means) if by_row else sum(flat) / len(flat), torch.stack(latents)


def differentiated(function: Callable[[Case], tuple[Tensor, Tensor]]) -> Callable[[Case], tuple[Tensor, ...]]:
    """Return loss, latents and the gradients of the loss to the token embeddings, bot and end."""

    def run(case: Case) -> tuple[Tensor, ...]:
        number, latents = function(case)
        return number, latents, *torch.autograd.grad(number, [case.words, case.bot, case.end])

    return run


def misread(**changes: Any) -> Callable[[Case], tuple[Tensor, ...]]:
    return differentiated(lambda case: loss(case, **changes))


whole = differentiated(loss)

ORACLE = {"1": whole}

MISREAD = {
    "1": {
        "one latent for a step, whatever c": misread(n=lambda n: n // 2),
        "a latent more": misread(n=lambda n: n + 1),
        "steps removed from the right": misread(from_right=True),
        "one step fewer removed": misread(k=lambda k: k - 1),
        "latents detached": misread(detach=True),
        "the residual stream before the final norm": misread(raw=True),
        "every latent out of bot": misread(bot_again=True),
        "the question scored": misread(question=True),
        "what end predicts not scored": misread(first=False),
        "a mean over rows": misread(by_row=True),
    }
}
