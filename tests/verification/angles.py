"""Rotated vectors by an independent formula, and the checks of a rotation that are too weak to be the only ones."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.models import rope
from laconic.models.config import RopeConfig

E, THETA, START, T = 16, 10000.0, 90, 12


def vectors(seed: int) -> Tensor:
    """[1, 2, T, E]"""
    return torch.randn(1, 2, T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def golden(x: Tensor, start: int) -> Tensor:
    """Pair (i, i + E/2) of the vector at position p turned by p theta^(-2i/E), in loops, with math alone."""
    out = x.clone()
    for n in range(x.shape[1]):
        for t in range(x.shape[2]):
            for i in range(E // 2):
                angle = (start + t) * THETA ** (-2 * i / E)
                a, b = float(x[0, n, t, i]), float(x[0, n, t, i + E // 2])
                out[0, n, t, i] = a * math.cos(angle) - b * math.sin(angle)
                out[0, n, t, i + E // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def ours(x: Tensor, start: int) -> Tensor:
    """The same by the functions of core."""
    p = start + torch.arange(x.shape[2])[None]
    omega, a = rope.default_frequencies(RopeConfig(theta=THETA), E, torch.tensor([start + x.shape[2]]))
    cos, sin = rope.cos_sin_tables(p, omega, a, torch.float64)
    return rope.rotate_pairs(x, cos, sin)


def products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def far(x: Tensor, y: Tensor) -> bool:
    return float((x - y).norm() / y.norm()) > 1e-4


def by_values() -> bool:
    """Golden values, from the first position and from a later one."""
    return any(far(ours(vectors(0), start), golden(vectors(0), start)) for start in (0, START))


def by_products() -> bool:
    """Products q·k within a pass, from the first position and from a later one."""
    q, k = vectors(1), vectors(2)
    return any(far(products(ours(q, s), ours(k, s)), products(golden(q, s), golden(k, s))) for s in (0, START))


def by_position_0() -> bool:
    """Values at position 0 alone."""
    x = vectors(3)
    return far(ours(x, 0)[:, :, :1], golden(x, 0)[:, :, :1])


def by_properties() -> bool:
    """Length kept, position 0 untouched, products of differences alone, a vector that changes with its position."""
    x, q, k = vectors(4), vectors(5), vectors(6)
    lengths = far(ours(x, START).norm(dim=-1), x.norm(dim=-1))
    still = far(ours(x, 0)[:, :, 0], x[:, :, 0])
    shifted = far(products(ours(q, START), ours(k, START)), products(ours(q, 0), ours(k, 0)))
    same = x[:, :, :1].expand(-1, -1, T, -1)
    constant = not far(ours(same, 0)[:, :, 1:], same[:, :, 1:])
    return lengths or still or shifted or constant


CHECKS: dict[str, Callable[[], bool]] = {
    "golden values": by_values,
    "q·k": by_products,
    "position 0": by_position_0,
    "properties": by_properties,
}
