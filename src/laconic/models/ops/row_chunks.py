"""A loss of each row of hidden states, computed in chunks, so that the logits of all rows never exist at once.

Symbols: N rows; the decoder's D, V.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

MAX_CHUNK_LOGITS = 2**23  # on a CPU; in float32 they fit its caches
MAX_CHUNK_LOGITS_GPU = 2**27
TRAINED_HEAD_FACTOR = 4  # larger chunks where logits are computed twice
Scores = tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]
RowFn = Callable[[Tensor, Tensor], Scores]


def get_chunk_size(logits: Float[Tensor, "1 V"]) -> int:
    """Return the number of rows in a chunk, from the logits of one row of detached hidden states.

    These logits require a gradient only if the head is trained.
    """
    max_logits = MAX_CHUNK_LOGITS if logits.device.type == "cpu" else MAX_CHUNK_LOGITS_GPU
    factor = TRAINED_HEAD_FACTOR if logits.requires_grad else 1
    return max(1, max_logits // logits.shape[-1] * factor)


def run_in_chunks(
    function: RowFn, hidden_states: Float[Tensor, "N D"], labels: Int[Tensor, " N"], size: int, *, is_trained: bool
) -> Scores:
    """Compute a function of rows with `size` rows at a time, also in the backward pass.

    If `is_trained`, the head has trainable parameters, and each chunk is computed again in the backward pass. If not,
    the gradient of the hidden states is computed with the loss.
    """
    if hidden_states.requires_grad and torch.is_grad_enabled() and not is_trained:
        return cast(Scores, cast(Any, GradientWithLoss).apply(function, hidden_states, labels, size))
    chunks = [
        cast(Scores, checkpoint(function, rows, ids, use_reentrant=False, determinism_check="none"))
        for rows, ids in zip(torch.split(hidden_states, size), torch.split(labels, size), strict=True)
    ]
    nats, is_correct = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return nats, is_correct


class GradientWithLoss(torch.autograd.Function):
    """A row function in chunks; the forward pass also computes the gradient of each row's loss."""

    @staticmethod
    def forward(ctx: Any, function: RowFn, hidden_states: Tensor, labels: Tensor, size: int) -> Scores:
        gradient = torch.empty_like(hidden_states)
        nats: list[Tensor] = []
        is_correct: list[Tensor] = []
        for start in range(0, len(labels), size):
            chunk = slice(start, start + size)
            with torch.enable_grad():
                rows = hidden_states[chunk].detach().requires_grad_()
                # a view, as the hooks of FlopCounterMode on the head cannot take a leaf of autograd.grad
                chunk_nats, chunk_correct = function(rows.view_as(rows), labels[chunk])
                (gradient[chunk],) = torch.autograd.grad(chunk_nats.sum(), rows)
            nats.append(chunk_nats.detach())
            is_correct.append(chunk_correct)
        ctx.save_for_backward(gradient)
        all_correct = torch.cat(is_correct)
        ctx.mark_non_differentiable(all_correct)
        return torch.cat(nats), all_correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return None, gradient * gradients[0][:, None].to(gradient.dtype), None, None
