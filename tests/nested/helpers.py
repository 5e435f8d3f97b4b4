"""What the tests of memories share: layers whose every weight matters, and how near two ways must be."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.nested import state as values
from tests.core.readings import noise
from tests.tolerances import MEMORY


def near(got: Iterable[Tensor], asked: Iterable[Tensor], within: float = MEMORY) -> None:
    """Of the largest magnitude of each tensor; one that is nearly zero is measured by the others."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(got, asked, strict=True)]
    scale = max((y.abs().max().item() for _, y in pairs if y.numel()), default=1.0)
    for n, (x, y) in enumerate(pairs):
        assert x.shape == y.shape
        if y.numel():
            far, size = (x - y).abs().max().item(), max(y.abs().max().item(), 1e-2 * scale)
            assert far <= within * size, f"tensor {n}: {far / size:.2e} apart, allowed {within:.0e}"


def same_state(got: object, asked: object) -> None:
    """Counts equal, everything else near."""
    mine, theirs = dict(values.named_tensors(got)), dict(values.named_tensors(asked))
    assert mine.keys() == theirs.keys()
    floating = [name for name in mine if mine[name].is_floating_point()]
    assert all(torch.equal(mine[name], theirs[name]) for name in mine.keys() - set(floating))
    near([mine[name] for name in floating], [theirs[name] for name in floating])


def stirred(layer: nn.Module, size: float = 0.4) -> nn.Module:
    """In float64, noise on every weight."""
    layer = layer.double()
    with torch.no_grad():
        for n, p in enumerate(layer.parameters()):
            p.add_(size * noise(n, *p.shape))
    return layer


def slopes(y: Tensor, layer: nn.Module) -> list[Tensor]:
    """The gradient of every parameter for one loss of y; zeros where none flows."""
    parameters = list(layer.parameters())
    found = torch.autograd.grad((y * noise(99, *y.shape)).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
