"""One Titans memory token by token, every matrix stored whole: the definition of `chunk_update`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.nested.recurrence.gated_delta_rule import Gates, norm_clip_factor
from laconic.nested.recurrence.memory_cells import MLPStart, Start, silu_derivative
from laconic.nested.titans.equations import loss_gradient


def recurrent_step(
    M: Tensor, S: Tensor | None, gradient: Tensor, decay: Tensor, step_size: Tensor, momentum: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Eq. 13,14: S_t = momentum S_{t-1} - step_size gradient; M_t = decay M_{t-1} + S_t. Returns M_t and S_t."""
    write, S_t = -step_size[..., None, None] * gradient, None
    if S is not None and momentum is not None:
        write = S_t = momentum[..., None, None] * S + write
    return decay[..., None, None] * M + write, S_t


def recurrent_titans(
    start: Start | MLPStart,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    gates: Gates,
    chunk_size: int,
    *,
    factor: int = 1,
    read: str = "after",
    max_norm: float | None = None,
) -> Tensor:
    """Return what the queries read, from the memory's start."""
    starts = start if isinstance(start, MLPStart) else (start,)
    Ms = [x.expand(len(k), *x.shape) for x in starts if x is not None]
    Ss = [None if gates.momentum is None else torch.zeros_like(M) for M in Ms]
    outputs: list[Tensor] = []
    at_boundary = Ms
    for t in range(k.shape[2]):
        key, value, query = (x[:, :, t, :, None] for x in (k, v, q))
        if t % chunk_size == 0:
            Ms = at_boundary = Ms if max_norm is None or t == 0 else [M * norm_clip_factor(max_norm, M) for M in Ms]
        before, momentum = Ms, None if gates.momentum is None else gates.momentum[:, :, t]
        gradients = loss_gradients(at_boundary, key, value, factor)
        steps = [
            recurrent_step(M, S, g, gates.decay[:, :, t], gates.step_size[:, :, t], momentum)
            for M, S, g in zip(Ms, Ss, gradients, strict=True)
        ]
        Ms, Ss = [M for M, _ in steps], [S for _, S in steps]
        outputs.append(memory_output({"after": Ms, "before": before, "boundary": at_boundary}[read], query)[..., 0])
    return torch.stack(outputs, 2)


def memory_output(Ms: list[Tensor], x: Tensor) -> Tensor:
    """Return M x, or x + W1 σ(W2 x), of one column."""
    return Ms[0] @ x if len(Ms) == 1 else x + Ms[0] @ F.silu(Ms[1] @ x)


def loss_gradients(Ms: list[Tensor], k: Tensor, v: Tensor, factor: int) -> list[Tensor]:
    """Return the gradients of the inner loss at one pair, one outer product for each matrix."""
    e = loss_gradient(memory_output(Ms, k), v, factor)
    if len(Ms) == 1:
        return [e @ k.mT]
    a = Ms[1] @ k
    return [e @ F.silu(a).mT, ((Ms[0].mT @ e) * silu_derivative(a)) @ k.mT]
