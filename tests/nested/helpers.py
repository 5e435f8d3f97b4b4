"""Helpers for tests of nested-learning layers: perturbed weights, and comparison of tensors and states."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.nested.state import bit_equal
from laconic.storage.tensor_tree import named_tensors
from tests.models.fixtures import noise
from tests.tolerances import MEMORY


def assert_close(actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = MEMORY) -> None:
    """Compare tensors relative to the largest magnitude of each, or of all for one that is nearly zero."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(actual, expected, strict=True)]
    scale = max((y.abs().max().item() for _, y in pairs if y.numel()), default=1.0)
    for n, (x, y) in enumerate(pairs):
        assert x.shape == y.shape
        if y.numel():
            error, size = (x - y).abs().max().item(), max(y.abs().max().item(), 1e-2 * scale)
            assert error <= tolerance * size, f"tensor {n}: error {error / size:.2e}, allowed {tolerance:.0e}"


def states_equal(one: object, other: object) -> bool:
    """Return whether two trees have the same tensor names and the same bits."""
    left, right = dict(named_tensors(one)), dict(named_tensors(other))
    return left.keys() == right.keys() and all(bit_equal(left[name], right[name]) for name in left)


def assert_states_close(actual: object, expected: object) -> None:
    """Compare two states: counts must be equal, everything else close."""
    left, right = dict(named_tensors(actual)), dict(named_tensors(expected))
    assert left.keys() == right.keys()
    floating = [name for name in left if left[name].is_floating_point()]
    assert all(torch.equal(left[name], right[name]) for name in left.keys() - set(floating))
    assert_close([left[name] for name in floating], [right[name] for name in floating])


def perturb(layer: nn.Module, size: float = 0.4) -> nn.Module:
    """Convert a layer to float64 and add noise to every weight, so that each one matters."""
    layer = layer.double()
    with torch.no_grad():
        for n, p in enumerate(layer.parameters()):
            p.add_(size * noise(n, *p.shape))
    return layer


def gradients(y: Tensor, layer: nn.Module) -> list[Tensor]:
    """Return the gradient of every parameter for one fixed loss of y, zeros where none flows."""
    parameters = list(layer.parameters())
    grads = torch.autograd.grad((y * noise(99, *y.shape)).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
