"""Four checks of RoPE for docs/mutations.md: loops over an independent formula, and three that miss some mistakes.

Each check returns True if it detects a mistake.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.models import rope
from laconic.models.config import RopeConfig

E, THETA, START, T = 16, 10000.0, 90, 12


def vectors(seed: int) -> Tensor:
    """Return random vectors [1, 2, T, E]."""
    return torch.randn(1, 2, T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotate_in_loops(x: Tensor, start: int) -> Tensor:
    """Rotate the pair (i, i + E/2) of the vector at position p by p theta^(-2i/E), in loops, with math alone."""
    out = x.clone()
    for n in range(x.shape[1]):
        for t in range(x.shape[2]):
            for i in range(E // 2):
                angle = (start + t) * THETA ** (-2 * i / E)
                a, b = float(x[0, n, t, i]), float(x[0, n, t, i + E // 2])
                out[0, n, t, i] = a * math.cos(angle) - b * math.sin(angle)
                out[0, n, t, i + E // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotate the same vectors with `laconic.models.rope`."""
    p = start + torch.arange(x.shape[2])[None]
    omega, a = rope.default_frequencies(RopeConfig(theta=THETA), E, torch.tensor([start + x.shape[2]]))
    cos, sin = rope.cos_sin_tables(p, omega, a, torch.float64)
    return rope.rotate_pairs(x, cos, sin)


def differs(x: Tensor, y: Tensor) -> bool:
    return float((x - y).norm() / y.norm()) > 1e-4


def by_values() -> bool:
    """Compare values with the loops, from the first position and from a later one."""
    return any(differs(rotate(vectors(0), start), rotate_in_loops(vectors(0), start)) for start in (0, START))


def by_products() -> bool:
    """Compare products q·k within a pass, from the first position and from a later one."""
    q, k = vectors(1), vectors(2)
    return any(
        differs(rotate(q, s) @ rotate(k, s).mT, rotate_in_loops(q, s) @ rotate_in_loops(k, s).mT) for s in (0, START)
    )


def by_position_0() -> bool:
    """Compare values at position 0 alone."""
    x = vectors(3)
    return differs(rotate(x, 0)[:, :, :1], rotate_in_loops(x, 0)[:, :, :1])


def by_properties() -> bool:
    """Check properties of a rotation, without any expected values."""
    x, q, k = vectors(4), vectors(5), vectors(6)
    changes_norms = differs(rotate(x, START).norm(dim=-1), x.norm(dim=-1))
    changes_position_0 = differs(rotate(x, 0)[:, :, 0], x[:, :, 0])
    depends_on_start = differs(rotate(q, START) @ rotate(k, START).mT, rotate(q, 0) @ rotate(k, 0).mT)
    same = x[:, :, :1].expand(-1, -1, T, -1)
    ignores_positions = not differs(rotate(same, 0)[:, :, 1:], same[:, :, 1:])
    return changes_norms or changes_position_0 or depends_on_start or ignores_positions


CHECKS: dict[str, Callable[[], bool]] = {
    "golden values": by_values,
    "q·k": by_products,
    "position 0": by_position_0,
    "properties": by_properties,
}
