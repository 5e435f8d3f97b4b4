"""Latent rollouts as loops, for the oracles of PCCoT 1 and 2, CODI 1 and Coconut 1, without a KV cache.

`read(vectors, positions)` gives the hidden states of a row that is read from its beginning, nothing held, no padding.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Read = Callable[[list[Tensor], list[int]], list[Tensor]]


def dense(x: list[Tensor], weight: Tensor, bias: Tensor) -> list[Tensor]:
    return [sum((weight[o, i] * x[i] for i in range(len(x))), bias[o]) for o in range(len(weight))]


def prj(h: Tensor, w: Weights, norm: bool = True) -> Tensor:
    """Linear, GELU (erf), Linear, LayerNorm."""
    inner = [0.5 * x * (1 + torch.erf(x / math.sqrt(2))) for x in dense(list(h), w["inner.weight"], w["inner.bias"])]
    outer = dense(inner, w["outer.weight"], w["outer.bias"])
    if not norm:
        return torch.stack(outer)
    mean = sum(outer) / len(outer)
    var = sum((x - mean) ** 2 for x in outer) / len(outer)
    scaled = [(x - mean) / (var + 1e-5).sqrt() for x in outer]
    return torch.stack([x * g + b for x, g, b in zip(scaled, w["norm.weight"], w["norm.bias"], strict=True)])


class Case(NamedTuple):
    """Inputs of a rollout; the question of a row is its unpadded vectors."""

    read: Read
    question: Tensor
    live: Tensor
    bot: Tensor
    slot: Tensor
    M: int
    rounds: int
    weights: Weights


def before(case: Case, b: int, *, pads: bool = False, columns: bool = False) -> tuple[list[Tensor], list[int]]:
    """Return question and bot of a row with their positions, or with padding included or counted."""
    valid = [t for t in range(case.question.shape[1]) if case.live[b, t] or pads]
    vectors = [*(case.question[b, t] for t in valid), case.bot]
    return vectors, [*valid, case.question.shape[1]] if columns else list(range(len(vectors)))


def read_on(case: Case, start: tuple[list[Tensor], list[int]], z: list[Tensor]) -> list[Tensor]:
    """Return the hidden states from bot on."""
    vectors, positions = start
    last = positions[-1] + 1
    return case.read([*vectors, *z], [*positions, *range(last, last + len(z))])[len(vectors) - 1 :]


def jacobi(
    case: Case,
    *,
    source: Callable[[int], int] = lambda m: m,
    start: Callable[[int], int] = lambda m: m,
    residual: bool = False,
    keep: bool = True,
    detach: bool = False,
    norm: bool = True,
    fewer: int = 0,
    **padding: bool,
) -> tuple[Tensor, Tensor]:
    """Return the latents read in the last iteration and the hidden states, whose entry 0 is at bot."""
    rows = []
    for b in range(len(case.question)):
        first, z = before(case, b, **padding), [case.slot] * case.M
        h = read_on(case, first, z)
        for t in range(1, case.rounds + 1 - fewer):
            latents = [prj(h[(start if t == 1 else source)(m)], case.weights, norm) for m in range(case.M)]
            latents = [x + y for x, y in zip(z, latents, strict=True)] if residual else latents
            if t > 1:
                latents[0] = z[0] if keep else prj(h[1], case.weights, norm)
            z = [x.detach() for x in latents] if detach and t > 1 else latents
            h = read_on(case, first, z)
        rows.append((torch.stack(z), torch.stack(h[1:])))
    return torch.stack([z for z, _ in rows]), torch.stack([h for _, h in rows])


def sequential(
    case: Case, *, residual: bool = False, detach: bool = False, norm: bool = True, back: int = 0, **padding: bool
) -> tuple[Tensor, Tensor]:
    """Return the same for the sequential schedule."""
    rows = []
    for b in range(len(case.question)):
        first, z = before(case, b, **padding), []
        for m in range(case.M):
            if m == 0 and back:
                vectors, positions = first
                h = case.read(vectors, positions)[-1 - back]
            else:
                h = read_on(case, first, z)[-1]
            latents = prj(h.detach() if detach else h, case.weights, norm)
            z.append(latents + (z[-1] if z else case.bot) if residual else latents)
        rows.append((torch.stack(z), torch.stack(read_on(case, first, z)[1:])))
    return torch.stack([z for z, _ in rows]), torch.stack([h for _, h in rows])


def differentiated(function: Callable[[Case], tuple[Tensor, Tensor]]) -> Callable[[Case], tuple[Tensor, ...]]:
    """Return latents, hidden states, and the gradients of a weighted sum of both to all parameters and inputs."""

    def run(case: Case) -> tuple[Tensor, ...]:
        z, h = function(case)
        weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape)
        leaves = [case.question, case.bot, case.slot, *case.weights.values()]
        grads = torch.autograd.grad(((z + 2 * h) * weights).sum(), leaves, allow_unused=True)
        return z, h, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))

    return run


def misread(function: Any, **changes: Any) -> Callable[[Case], tuple[Tensor, ...]]:
    return differentiated(lambda case: function(case, **changes))
