"""Scalings of RoPE frequencies for contexts longer than those of the pretraining.

YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), Llama 3 (arXiv:2407.21783).

Symbols: theta base; omega frequency of a pair; a factor on cos and sin; f scaling factor; P0 positions of the
pretraining; Pmax positions of the model; n length of the longest row so far; E head size.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.config import RopeConfig
from laconic.models.rope import ScaledFrequencies, default_frequencies, frequencies


def linear_frequencies(rope: RopeConfig, E: int, longest: Int[Tensor, " B"]) -> ScaledFrequencies:
    """Eq. C4b: omega / f; a = 1."""
    return frequencies(rope.theta, E, longest.device) / rope.scaling_factor, 1.0


def dynamic_frequencies(rope: RopeConfig, E: int, longest: Int[Tensor, " B"]) -> ScaledFrequencies:
    """Eq. C4c: theta <- theta (f n / Pmax - (f - 1))^(E/(E-2)), n = max(longest, Pmax), per row; a = 1."""
    n = longest.clamp(min=rope.max_position_embeddings)[:, None]
    growth = (rope.scaling_factor * n / rope.max_position_embeddings) - (rope.scaling_factor - 1)
    growth = torch.where(n > rope.max_position_embeddings, growth, 1.0)
    return frequencies(rope.theta * growth ** (E / (E - 2)), E, longest.device), 1.0


def llama3_frequencies(rope: RopeConfig, E: int, longest: Int[Tensor, " B"]) -> ScaledFrequencies:
    """Eq. C4d: divide low frequencies by f, keep high ones, interpolate between the two; a = 1."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    omega = frequencies(rope.theta, E, longest.device)
    wave = 2 * math.pi / omega
    s = (rope.pretrained_positions / wave - low) / (high - low)
    between = (1 - s) * omega / rope.scaling_factor + s * omega
    scaled = torch.where(wave > rope.pretrained_positions / low, omega / rope.scaling_factor, between)
    return torch.where(wave < rope.pretrained_positions / high, omega, scaled), 1.0


def yarn_frequencies(rope: RopeConfig, E: int, longest: Int[Tensor, " B"]) -> ScaledFrequencies:
    """Eq. C4e: omega' = (omega / f) ramp + omega (1 - ramp); a = `attention_factor`, else from f and the mscales."""

    def dim(rotations: float) -> float:
        return E * math.log(rope.pretrained_positions / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))

    lo, hi = dim(rope.beta_fast), dim(rope.beta_slow)
    if rope.truncate:
        lo, hi = math.floor(lo), math.ceil(hi)
    lo, hi = max(lo, 0), min(hi, E - 1)
    hi = hi + 0.001 if lo == hi else hi  # as in transformers: no division by 0
    ramp = ((torch.arange(E // 2, device=longest.device).float() - lo) / (hi - lo)).clamp(0, 1)
    wave = rope.theta ** (torch.arange(0, E, 2, device=longest.device).float() / E)
    extrapolated = 1 - ramp  # same order of operations as transformers, for bit equality
    omega = (1.0 / (rope.scaling_factor * wave)) * (1 - extrapolated) + (1.0 / wave) * extrapolated
    return omega, yarn_attention_factor(rope)


def yarn_attention_factor(rope: RopeConfig) -> float:
    """Return a of C4e: m(f, mscale) / m(f, mscale_all_dim) if both are set, else m(f, 1); m(f, c) = 0.1 c ln f + 1."""

    def m(c: float) -> float:
        return 0.1 * c * math.log(rope.scaling_factor) + 1.0 if rope.scaling_factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return m(rope.mscale) / m(rope.mscale_all_dim)
    return m(1.0)


def longrope_frequencies(rope: RopeConfig, E: int, longest: Int[Tensor, " B"]) -> ScaledFrequencies:
    """Eq. C4f: omega_i / g_i, g = `long_factor` for rows longer than P0, else `short_factor`; a grows with ln f."""
    short, long = (torch.tensor(g, device=longest.device).float() for g in (rope.short_factor, rope.long_factor))
    g = torch.where(longest[:, None] > rope.pretrained_positions, long, short)
    omega = 1.0 / (g * rope.theta ** (torch.arange(0, E, 2, device=longest.device).float() / E))
    if rope.attention_factor is not None:
        return omega, rope.attention_factor
    if rope.scaling_factor <= 1:
        return omega, 1.0
    return omega, math.sqrt(1 + math.log(rope.scaling_factor) / math.log(rope.pretrained_positions))


ROPE_SCALINGS: dict[str, Callable[[RopeConfig, int, Tensor], ScaledFrequencies]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
}
FIXED_FREQUENCIES = ("default", "linear", "llama3", "yarn")  # scalings that do not depend on the text's length


def has_fixed_frequencies(rope: RopeConfig | None, length: int) -> bool:
    """Return whether the frequencies of a row are the same at every length up to `length`."""
    if rope is None or rope.kind in FIXED_FREQUENCIES:
        return True
    return length <= (rope.max_position_embeddings if rope.kind == "dynamic" else rope.pretrained_positions)


def get_movable_rope(rope: RopeConfig | None, family: str, hint: str) -> RopeConfig:
    """Return the rotation of a model whose cached keys can be rotated on to other positions; UsageError for others."""
    if rope is None or rope.kind not in FIXED_FREQUENCIES:
        scheme = "learned positions" if rope is None else f"{rope.kind} RoPE"
        raise UsageError(f"cached keys of {family} with {scheme} cannot be moved to other positions; {hint}")
    return rope
