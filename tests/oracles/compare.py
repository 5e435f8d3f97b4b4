"""Compare a function with its oracle, and the oracle with misreadings, which must differ."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests import tolerances

Function = Callable[..., Any]


def scaled(x: Tensor, y: Tensor) -> float:
    """Return the largest difference relative to the largest entry of `y`; infinite if shapes or infinities differ."""
    x, y = x.detach(), y.detach()
    if x.shape != y.shape or not torch.equal(x.isfinite(), y.isfinite()) or x.isnan().any():
        return math.inf
    if not torch.equal(x[~x.isfinite()], y[~y.isfinite()]):
        return math.inf
    x, y = x[x.isfinite()].double(), y[y.isfinite()].double()
    return float((x - y).abs().max() / max(float(y.abs().max()), 1e-30)) if y.numel() else 0.0


def relative(x: Tensor, y: Tensor) -> float:
    """Return the largest relative difference of an entry, for numbers that span decades."""
    return float(((x.double() - y).abs() / y.abs()).max()) if x.shape == y.shape else math.inf


def distance(x: Any, y: Any, measure: Callable[[Tensor, Tensor], float] = scaled) -> float:
    """Return the largest difference of tensors, numbers, or tuples of these."""
    if isinstance(y, tuple):
        return max(distance(a, b, measure) for a, b in zip(x, y, strict=True))
    return measure(torch.as_tensor(x), torch.as_tensor(y))


def agree(
    function: Function,
    oracle: Function,
    misread: Mapping[str, Function],
    *arguments: Any,
    tolerance: float = tolerances.ORACLE,
    margin: float = 1e-3,
    measure: Callable[[Tensor, Tensor], float] = scaled,
) -> None:
    """Assert that `function` equals the oracle within `tolerance` and misreadings differ by more than `margin`."""
    expected = oracle(*arguments)
    error = distance(function(*arguments), expected, measure)
    assert error <= tolerance, f"{error:.3g} from the oracle, allowed {tolerance:.3g}"
    for name, wrong in misread.items():
        error = distance(wrong(*arguments), expected, measure)
        assert error > margin, (
            f"the misreading {name!r} differs by only {error:.3g}: these inputs do not distinguish it"
        )
