"""Reference implementation of DGD: one training step of a model's linear maps and embeddings.

Nested Learning arXiv:2512.24695 (56, 57). Start reading here: `dgd.py` takes the same step from the statistics that
`input_recording.py` gathers, and a test holds it to this file in float64. Here the inputs and output gradients of every
map are recorded with hooks, and the objective of Eq. 56 is minimised by solving its normal equations.

Symbols: W weight [o, i]; X inputs and D gradients of the loss at W x, a row per position; N positions; eta step size.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn


def dgd_training_step(model: nn.Module, compute_loss: Callable[[], Tensor], eta: float) -> None:
    """Run forward and backward of a loss that is a mean over positions, then update all linear maps and embeddings.

    Inputs are scaled to length 1, and a bias counts as the weight of an input 1. Other parameters are left as they are.
    Each map is called once.
    """
    maps = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        calls.append((module, inputs[0], output))

    handles = [m.register_forward_hook(hook) for m in maps]
    torch.autograd.backward(compute_loss())
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for module, x, y in calls:
            assert y.grad is not None
            update_map(module, *inputs_and_gradients(module, x, y.grad), eta)


def inputs_and_gradients(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return X and D of the positions that have a gradient; the input of an embedding is one-hot."""
    d = gradient.flatten(0, -2)
    if isinstance(module, nn.Embedding):
        inputs = torch.eye(module.num_embeddings, dtype=d.dtype)[x.flatten()]
    else:
        inputs = x.detach().flatten(0, -2)
        if has_bias(module):
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    has_gradient = (d != 0).any(1)
    inputs, d = inputs[has_gradient], d[has_gradient]
    length = inputs.square().sum(1, keepdim=True).sqrt()
    return inputs / length, d * length


def has_bias(module: nn.Module) -> bool:
    return "bias" in dict(module.named_parameters(recurse=False))


def update_map(module: nn.Module, X: Tensor, D: Tensor, eta: float) -> None:
    """Set a map to the minimiser of Eq. 56 around its weight."""
    if isinstance(module, nn.Embedding):
        module.weight.copy_(minimize_objective(module.weight.T, X, D, eta).T)
    elif isinstance(module, nn.Linear):
        columns = [module.weight, module.bias[:, None]] if has_bias(module) else [module.weight]
        new = minimize_objective(torch.cat(columns, 1), X, D, eta)
        module.weight.copy_(new[:, : module.in_features])
        if has_bias(module):
            module.bias.copy_(new[:, -1])


def minimize_objective(W: Tensor, X: Tensor, D: Tensor, eta: float) -> Tensor:
    """Minimise Eq. 56 by its normal equations.

    The objective is (1/N) sum over n of 1/2 |V x_n + delta_n|^2 + |V - W|^2 / (2 eta), with the sum of the delta_n
    equal to the loss's gradient: D holds gradients of a mean, so that delta_n = N D_n.
    """
    N, i = X.shape
    A = X.T @ X / N + torch.eye(i, dtype=X.dtype) / eta  # V A = W / eta - D'X
    solve = cast(Callable[[Tensor, Tensor], Tensor], torch.linalg.solve)  # pyright: ignore[reportUnknownMemberType]
    return solve(A, (W / eta - D.T @ X).T).T
