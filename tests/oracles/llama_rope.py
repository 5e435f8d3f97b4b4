"""Oracles of C3 and C4: frequencies of RoPE and their scalings as loops over indices, and misreadings of them.

`rope` is any object with the fields of a Hugging Face `rope_parameters`; nothing of the library is used here.
"""

import math
from typing import Any

import torch
from torch import Tensor


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def frequencies(theta: float, E: int) -> Tensor:
    return tensor([theta ** (-2 * i / E) for i in range(E // 2)])


def original(rope: Any) -> int:
    return rope.original_max_position_embeddings or rope.max_position_embeddings


def stretch(rope: Any) -> float:
    return rope.factor if rope.factor is not None else rope.max_position_embeddings / original(rope)


def default(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
    return tensor([[rope.theta ** (-2 * i / E) for i in range(E // 2)] for _ in longest]), 1.0


def linear(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
    return tensor([[rope.theta ** (-2 * i / E) / rope.factor for i in range(E // 2)] for _ in longest]), 1.0


def dynamic(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
    rows = []
    for length in longest.tolist():
        n = max(length, rope.max_position_embeddings)
        growth = rope.factor * n / rope.max_position_embeddings - (rope.factor - 1)
        base = rope.theta * growth ** (E / (E - 2))
        rows.append([base ** (-2 * i / E) for i in range(E // 2)])
    return tensor(rows), 1.0


def llama3(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
    row = []
    for i in range(E // 2):
        omega = rope.theta ** (-2 * i / E)
        wave = 2 * math.pi / omega
        if wave < original(rope) / rope.high_freq_factor:
            row.append(omega)
        elif wave > original(rope) / rope.low_freq_factor:
            row.append(omega / rope.factor)
        else:
            s = (original(rope) / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            row.append((1 - s) * omega / rope.factor + s * omega)
    return tensor([row for _ in longest]), 1.0


def magnitude(factor: float, c: float) -> float:
    return 0.1 * c * math.log(factor) + 1 if factor > 1 else 1.0


def yarn(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
    f = stretch(rope)
    lo = E * math.log(original(rope) / (2 * math.pi * rope.beta_fast)) / (2 * math.log(rope.theta))
    hi = E * math.log(original(rope) / (2 * math.pi * rope.beta_slow)) / (2 * math.log(rope.theta))
    if rope.truncate:
        lo, hi = math.floor(lo), math.ceil(hi)
    lo, hi = max(lo, 0), min(hi, E - 1)
    if lo == hi:
        hi += 0.001
    row = []
    for i in range(E // 2):
        omega = rope.theta ** (-2 * i / E)
        ramp = min(max((i - lo) / (hi - lo), 0), 1)
        row.append(omega / f * ramp + omega * (1 - ramp))
    if rope.attention_factor is not None:
        a = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        a = magnitude(f, rope.mscale) / magnitude(f, rope.mscale_all_dim)
    else:
        a = magnitude(f, 1)
    return tensor([row for _ in longest]), a


def longrope(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
    rows = []
    for length in longest.tolist():
        g = rope.long_factor if length > original(rope) else rope.short_factor
        rows.append([rope.theta ** (-2 * i / E) / g[i] for i in range(E // 2)])
    if rope.attention_factor is not None:
        return tensor(rows), rope.attention_factor
    f = stretch(rope)
    return tensor(rows), 1.0 if f <= 1 else math.sqrt(1 + math.log(f) / math.log(original(rope)))


def row(function: Any) -> Any:
    """Turn a misread frequency of index i (or of i and the row length) into a scaling with a = 1."""

    def scaling(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
        return tensor([[function(rope, E, i, n) for i in range(E // 2)] for n in longest.tolist()]), 1.0

    return scaling


def plain(rope: Any, E: int, i: float) -> float:
    return rope.theta ** (-2 * i / E)


def grown(rope: Any, E: int, i: int, growth: float, exponent: float) -> float:
    return (rope.theta * growth**exponent) ** (-2 * i / E)


def beyond(rope: Any, n: int) -> float:
    m = rope.max_position_embeddings
    return rope.factor * max(n, m) / m - (rope.factor - 1)


def blended(rope: Any, E: int, i: int, invert: bool = False, turns: float = 2 * math.pi, waves: bool = False) -> float:
    """Misread llama3 with one step changed."""
    omega, low, high, f = plain(rope, E, i), rope.low_freq_factor, rope.high_freq_factor, rope.factor
    r = original(rope) * omega / turns
    s = min(max((r - low) / (high - low), 0), 1)
    s = 1 - s if invert and 0 < s < 1 else s
    return omega / ((1 - s) * f + s) if waves else (1 - s) * omega / f + s * omega


def changed(rope: Any, **fields: Any) -> Any:
    """Replace some fields."""
    return type(rope)(**{**vars(rope), **fields})


def yarn_with(step: Any) -> Any:
    """Change YaRN's frequencies or factor afterwards: step(rope, omega, YaRN's omega, a)."""

    def scaling(rope: Any, E: int, longest: Tensor) -> tuple[Tensor, float]:
        return step(rope, default(rope, E, longest)[0], *yarn(rope, E, longest))

    return scaling


def rotations(rope: Any, E: int, i: int, _: int) -> float:
    """Compute YaRN's ramp as printed in the paper: linear in the rotations of a pair, not in its index."""
    turns = original(rope) * plain(rope, E, i) / (2 * math.pi)
    ramp = 1 - min(max((turns - rope.beta_slow) / (rope.beta_fast - rope.beta_slow), 0), 1)
    return plain(rope, E, i) * (ramp / stretch(rope) + 1 - ramp)


ORACLE = {
    "C3": frequencies,
    "C4a": default,
    "C4b": linear,
    "C4c": dynamic,
    "C4d": llama3,
    "C4e": yarn,
    "C4f": longrope,
}

MISREAD = {
    "C3": {
        "exponent -i/E": lambda theta, E: tensor([theta ** (-i / E) for i in range(E // 2)]),
        "exponent -4i/E": lambda theta, E: tensor([theta ** (-4 * i / E) for i in range(E // 2)]),
        "order reversed": lambda theta, E: frequencies(theta, E).flip(0),
        "i from 1": lambda theta, E: tensor([theta ** (-2 * i / E) for i in range(1, E // 2 + 1)]),
        "from 1e-4 up to 1": lambda theta, E: 1 / (theta * frequencies(theta, E)),
        "base 10000 whatever the file says": lambda theta, E: frequencies(1e4, E),
        "wavelength": lambda theta, E: 2 * math.pi / frequencies(theta, E),
    },
    "C4a": {
        "divided by f": row(lambda rope, E, i, n: plain(rope, E, i) / rope.factor),
        "attention factor where none is": lambda rope, E, n: (default(rope, E, n)[0], magnitude(rope.factor, 1)),
    },
    "C4b": {
        "times f": row(lambda rope, E, i, n: plain(rope, E, i) * rope.factor),
        "base divided": row(lambda rope, E, i, n: (rope.theta / rope.factor) ** (-2 * i / E)),
        "only slow half": row(lambda rope, E, i, n: plain(rope, E, i) / (rope.factor if 4 * i >= E else 1)),
        "attention factor where none is": lambda rope, E, n: (linear(rope, E, n)[0], magnitude(rope.factor, 1)),
    },
    "C4c": {
        "E/(E - 1)": row(lambda rope, E, i, n: grown(rope, E, i, beyond(rope, n), E / (E - 1))),
        "no exponent": row(lambda rope, E, i, n: grown(rope, E, i, beyond(rope, n), 1)),
        "f whatever the length": row(lambda rope, E, i, n: grown(rope, E, i, rope.factor, E / (E - 2))),
        "n/Pmax without f": row(
            lambda rope, E, i, n: grown(rope, E, i, max(1, n / rope.max_position_embeddings), E / (E - 2))
        ),
        "longest of the batch": lambda rope, E, n: dynamic(rope, E, n.max().expand_as(n)),
        "frequencies divided": row(lambda rope, E, i, n: plain(rope, E, i) / beyond(rope, n)),
    },
    "C4d": {
        "s inverted": row(lambda rope, E, i, n: blended(rope, E, i, invert=True)),
        "wavelength without 2 pi": row(lambda rope, E, i, n: blended(rope, E, i, turns=1.0)),
        "wavelengths blended": row(lambda rope, E, i, n: blended(rope, E, i, waves=True)),
        "short waves divided, long kept": row(lambda rope, E, i, n: blended(rope, E, E // 2 - 1 - i)),
        "all divided": linear,
        "none divided": default,
    },
    "C4e": {
        "ramp inverted": yarn_with(lambda rope, w, y, a: (w + w / stretch(rope) - y, a)),
        "factor missing": yarn_with(lambda rope, w, y, a: (w, a)),
        "all divided": yarn_with(lambda rope, w, y, a: (w / stretch(rope), a)),
        "no floor and ceil": lambda rope, E, n: yarn(changed(rope, truncate=not rope.truncate), E, n),
        "ramp over turns": lambda rope, E, n: (row(rotations)(rope, E, n)[0], yarn(rope, E, n)[1]),
        "betas without 2 pi": lambda rope, E, n: yarn(
            changed(rope, beta_fast=rope.beta_fast / 2 / math.pi, beta_slow=rope.beta_slow / 2 / math.pi), E, n
        ),
        "a left out": yarn_with(lambda rope, w, y, a: (y, 1.0)),
        "a squared": yarn_with(lambda rope, w, y, a: (y, a * a)),
        "a by log10": yarn_with(lambda rope, w, y, a: (y, 0.1 * math.log10(stretch(rope)) + 1)),
    },
    "C4f": {
        "lists exchanged": lambda rope, E, n: longrope(
            changed(rope, short_factor=rope.long_factor, long_factor=rope.short_factor), E, n
        ),
        "times g": lambda rope, E, n: (default(rope, E, n)[0] ** 2 / longrope(rope, E, n)[0], longrope(rope, E, n)[1]),
        "long from P0 on": lambda rope, E, n: longrope(rope, E, n + 1),
        "long by Pmax": lambda rope, E, n: (
            longrope(changed(rope, original_max_position_embeddings=rope.max_position_embeddings), E, n)[0],
            longrope(rope, E, n)[1],
        ),
        "longest of the batch": lambda rope, E, n: longrope(rope, E, n.max().expand_as(n)),
        "a left out": lambda rope, E, n: (longrope(rope, E, n)[0], 1.0),
        "a without root": lambda rope, E, n: (longrope(rope, E, n)[0], longrope(rope, E, n)[1] ** 2),
        "a as in YaRN": lambda rope, E, n: (longrope(rope, E, n)[0], magnitude(stretch(rope), 1)),
    },
}
