"""Rotary position embeddings (RoPE, arXiv:2104.09864): frequencies, cos/sin tables, and the rotation.

Scalings for longer contexts are in `rope_scaling`, settings in `config.RopeConfig`.

Symbols: theta base; omega frequency of a pair; a factor on cos and sin; E head size.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.models.config import RopeConfig

ScaledFrequencies = tuple[Float[Tensor, "*rows half"], float]


def frequencies(theta: float | Tensor, E: int, device: torch.device | None = None) -> Float[Tensor, "*rows half"]:
    """Eq. C3: omega_i = theta^(-2i/E), i = 0 .. E/2 - 1, in float32; `theta` may be a tensor [B, 1], one per row."""
    return 1.0 / theta ** (torch.arange(0, E, 2, device=device).float() / E)


def default_frequencies(rope: RopeConfig, E: int, longest: Int[Tensor, " B"]) -> ScaledFrequencies:
    """Eq. C4a: unscaled omega; a = 1."""
    return frequencies(rope.theta, E, longest.device), 1.0


def cos_sin_tables(
    p: Int[Tensor, "B T"], omega: Float[Tensor, "*rows half"], a: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "B 1 T E"], Float[Tensor, "B 1 T E"]]:
    """Eq. C5: a cos(p omega) and a sin(p omega), repeated to size E; angles are float32 even if `dtype` is wider."""
    angle = p[:, :, None].float() * omega.reshape(-1, 1, omega.shape[-1])
    angle = torch.cat([angle, angle], -1)[:, None]
    return (angle.cos() * a).to(dtype), (angle.sin() * a).to(dtype)


def rotate_pairs(
    x: Float[Tensor, "B N T E"], cos: Float[Tensor, "#B 1 T E"], sin: Float[Tensor, "#B 1 T E"]
) -> Float[Tensor, "B N T E"]:
    """Eq. C6: y = x cos + [-x_hi, x_lo] sin, pairs (i, i + E/2)."""
    lo, hi = x.chunk(2, -1)
    return x * cos + torch.cat([-hi, lo], -1) * sin
