"""Oracles of C5 to C7: tables of angles, rotation and pairing as loops over indices, and misreadings of them."""

import math
from typing import Any

import torch
from torch import Tensor


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def tables(p: Tensor, omega: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """Compute the tables in float64, so that the float32 frequencies are checked too; one row of omega per row of p."""
    cos, sin = [], []
    for row, frequency in zip(p.tolist(), omega.tolist(), strict=True):
        angles = [[position * w for w in frequency] * 2 for position in row]
        cos.append([[[a * math.cos(x) for x in angle] for angle in angles]])
        sin.append([[[a * math.sin(x) for x in angle] for angle in angles]])
    return tensor(cos), tensor(sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, N, T, E = x.shape
    out = torch.empty_like(x)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                for i in range(E // 2):
                    j = i + E // 2
                    out[b, n, t, i] = x[b, n, t, i] * cos[b, 0, t, i] - x[b, n, t, j] * sin[b, 0, t, i]
                    out[b, n, t, j] = x[b, n, t, j] * cos[b, 0, t, j] + x[b, n, t, i] * sin[b, 0, t, j]
    return out


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) by frequency i, as Meta's and GGUF's weights need."""
    out = torch.empty_like(x)
    for i in range(x.shape[-1] // 2):
        c, s = cos[..., i], sin[..., i]
        out[..., 2 * i] = x[..., 2 * i] * c - x[..., 2 * i + 1] * s
        out[..., 2 * i + 1] = x[..., 2 * i + 1] * c + x[..., 2 * i] * s
    return out


def half_split(w: Tensor, heads: int) -> Tensor:
    E, out = w.shape[0] // heads, torch.empty_like(w)
    for h in range(heads):
        for j in range(2):
            for i in range(E // 2):
                out[h * E + j * E // 2 + i] = w[h * E + 2 * i + j]
    return out


def interleaved(w: Tensor, heads: int) -> Tensor:
    E, out = w.shape[0] // heads, torch.empty_like(w)
    for h in range(heads):
        for j in range(2):
            for i in range(E // 2):
                out[h * E + 2 * i + j] = w[h * E + j * E // 2 + i]
    return out


def bf16(angle: Tensor) -> Tensor:
    return angle.bfloat16().double()


def misread_tables(place: Any = None, angle: Any = None, double: Any = None, power: int = 1, swap: bool = False) -> Any:
    """Misread the table with one step changed: positions, angles, E/2 to E, the power of a, sin for cos."""

    def misread(p: Tensor, omega: Tensor, a: float) -> tuple[Tensor, Tensor]:
        p = place(p) if place else p
        x = p[:, :, None].double() * omega[:, None, :]
        x = angle(x) if angle else x
        x = (double(x) if double else torch.cat([x, x], -1))[:, None]
        both = x.cos() * a**power, x.sin() * a**power
        return both[::-1] if swap else both

    return misread


def swapped(x: Tensor) -> Tensor:
    lo, hi = x.chunk(2, -1)
    return torch.cat([hi, lo], -1)


def turned(x: Tensor, sign: float = 1.0) -> Tensor:
    lo, hi = x.chunk(2, -1)
    return torch.cat([-hi, sign * lo], -1)


def shear(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lo, hi = (x * cos).chunk(2, -1)
    half = x.shape[-1] // 2
    lo = lo - x[..., half:] * sin[..., :half]
    return torch.cat([lo, hi + lo * sin[..., half:]], -1)


def half_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    y = x[..., :half]
    return torch.cat([y * cos[..., :half] + turned(y) * sin[..., :half], x[..., half:]], -1)


ORACLE = {"C5": tables, "C6": rotate, "C7": half_split}

MISREAD = {
    "C5": {
        "sin and cos swapped": misread_tables(swap=True),
        "each frequency twice in a row": misread_tables(double=lambda x: x.repeat_interleave(2, -1)),
        "angle negated": misread_tables(angle=lambda x: -x),
        "position off by one": misread_tables(place=lambda p: p + 1),
        "start ignored": misread_tables(place=lambda p: p - p[:, :1]),
        "slot for position": misread_tables(place=lambda p: torch.arange(p.shape[1]).expand_as(p)),
        "angle in bfloat16": misread_tables(angle=bf16),
        "a left out": misread_tables(power=0),
        "a twice": misread_tables(power=2),
    },
    "C6": {
        "neighbours paired": neighbours,
        "angle negated": lambda x, cos, sin: x * cos - turned(x) * sin,
        "reflection": lambda x, cos, sin: x * cos + turned(x, -1.0) * sin,
        "halves exchanged, no sign": lambda x, cos, sin: x * cos + swapped(x) * sin,
        "sin and cos swapped": lambda x, cos, sin: x * sin + turned(x) * cos,
        "shear: updated half reused": shear,
        "half of the dims rotated": half_rotated,
        "not rotated": lambda x, cos, sin: x,
    },
    "C7": {
        "the inverse": interleaved,
        "one head for all": lambda w, heads: half_split(w, 1),
        "query heads for keys": lambda w, heads: half_split(w, 2 * heads),
        "second of each pair first": lambda w, heads: swapped(
            half_split(w, heads).unflatten(0, (heads, -1)).mT
        ).mT.flatten(0, 1),
        "as it is": lambda w, heads: w,
    },
}
