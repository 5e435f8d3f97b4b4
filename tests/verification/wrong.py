"""Wrong forms of the decoder's functions, each a mistake that has been captured somewhere."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.models import attention, block, rope
from laconic.models.attention import AttentionMask, capture_nothing
from laconic.models.cache import KVCache
from laconic.models.config import RopeConfig
from laconic.models.ops import attention_backends, rope_scaling
from laconic.models.ops.activation_functions import ACTIVATIONS

# Norms


def centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, None, eps)


def late_cast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    u = x.to(attention.accumulation_dtype(x.dtype))
    return (weight * (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def part_of(wrong: dict[str, str]) -> Any:
    right = block.Block.submodule
    return lambda self, role: right(self, str(wrong.get(role, role)))


def exchanged_normed(self: Any, x: Tensor, role: str) -> Tensor:
    part = self.submodule({"q_norm": "k_norm", "k_norm": "q_norm"}[role])
    return block.rms_norm(x, part.weight, self.config.norm_eps)


# Rotation

rotate_right, tables_right = rope.rotate_pairs, rope.cos_sin_tables


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    c, s, a, b = cos[..., :half], sin[..., :half], x[..., ::2], x[..., 1::2]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)


def negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_right(x, cos, -sin)


def reflection(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lo, hi = rotate_right(x, cos, sin).chunk(2, -1)
    return torch.cat([lo, -hi], -1)


def one_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lo, hi = x.chunk(2, -1)
    return x * cos + torch.cat([hi, lo], -1) * sin


def shear(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lo, hi = x.chunk(2, -1)
    half = lo.shape[-1]
    first = lo * cos[..., :half] - hi * sin[..., :half]
    return torch.cat([first, hi * cos[..., half:] + first * sin[..., half:]], -1)


def keys_one_off(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Distinguish keys from queries by the number of heads of the test models."""
    if (x.shape[1], x.shape[3]) not in ((2, 16), (4, 8)):
        return rotate_right(x, cos, sin)
    omega = rope.frequencies(10000.0, x.shape[-1]).to(x.dtype).repeat(2)
    c, s = omega.cos(), omega.sin()
    return rotate_right(x, cos * c - sin * s, sin * c + cos * s)


def halves_of_dims(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    still = torch.arange(x.shape[-1]) % (x.shape[-1] // 2) >= x.shape[-1] // 4
    return torch.where(still, x, rotate_right(x, cos, sin))


def tables_bf16(p: Tensor, omega: Tensor, a: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = tables_right(p, omega, a, torch.bfloat16)
    return cos.to(dtype), sin.to(dtype)


def angles_bf16(p: Tensor, omega: Tensor, a: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = (p[:, :, None].float() * omega.reshape(-1, 1, omega.shape[-1])).bfloat16().float()
    angle = torch.cat([angle, angle], -1)[:, None]
    return (angle.cos() * a).to(dtype), (angle.sin() * a).to(dtype)


def off_by_one(p: Tensor, omega: Tensor, a: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tables_right(p + 1, omega, a, dtype)


def start_ignored(p: Tensor, omega: Tensor, a: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tables_right(p - p[:, :1], omega, a, dtype)


def swapped_tables(p: Tensor, omega: Tensor, a: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = tables_right(p, omega, a, dtype)
    return sin, cos


def lengthened(p: Tensor, omega: Tensor, a: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tables_right(p, omega, 1.2 * a, dtype)


def law(power: float = 1.0, base: float | None = None, flip: bool = False) -> Any:
    """Frequencies of another exponent, base or order."""

    def frequencies(theta: Any, E: int, device: Any = None) -> Tensor:
        omega = 1.0 / (base or theta) ** (torch.arange(0, E, 2, device=device).float() * power / E)
        return omega.flip(-1) if flip else omega

    return frequencies


# Scalings


def yarn_inverted(config: RopeConfig, E: int, longest: Tensor) -> Any:
    omega, a = rope_scaling.yarn_frequencies(config, E, longest)
    plain = rope.frequencies(config.theta, E)
    return plain + plain / config.scaling_factor - omega, a


def llama3_inverted(config: RopeConfig, E: int, longest: Tensor) -> Any:
    omega, a = rope_scaling.llama3_frequencies(config, E, longest)
    plain = rope.frequencies(config.theta, E)
    ratio = config.pretrained_positions * plain / (2 * math.pi)
    between = (ratio > config.low_freq_factor) & (ratio < config.high_freq_factor)
    return torch.where(between, plain + plain / config.scaling_factor - omega, omega), a


def dynamic_exponent(config: RopeConfig, E: int, longest: Tensor) -> Any:
    n = longest.clamp(min=config.max_position_embeddings)[:, None]
    growth = (config.scaling_factor * n / config.max_position_embeddings) - (config.scaling_factor - 1)
    return rope.frequencies(config.theta * growth ** (E / (E - 1)), E), 1.0


# Scores, sight, softmax


def tiled(x: Tensor, H: int) -> Tensor:
    return x.repeat(1, H // x.shape[1], 1, 1)


def scaled_twice(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return scale * scale * (q @ attention.repeat_heads(k, q.shape[1]).mT)


seen_right = attention.visibility_mask


def one_ahead(valid: Tensor, S: int, window: int | None) -> Tensor:
    slot = torch.arange(valid.shape[1])
    return valid[:, None, :] & (slot <= slot[S:, None] + 1)


def hides_self(valid: Tensor, S: int, window: int | None) -> Tensor:
    slot = torch.arange(valid.shape[1])
    return valid[:, None, :] & (slot < slot[S:, None])


def windowed(W: int) -> Any:
    return lambda valid, S, window: seen_right(valid, S, W)


def dead_seen(valid: Tensor, S: int, window: int | None) -> Tensor:
    return seen_right(torch.ones_like(valid), S, window)


def upper_left(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: AttentionMask, dropout: float) -> Tensor:
    if q.shape[2] == 1:
        return sdpa_right(q, k, v, scale, sight, dropout)
    return sdpa_right(q, k, v, scale, AttentionMask(True, None, None, None), dropout)


sdpa_right = attention.sdpa_attention


def minus_ten(a: Tensor, seen: Tensor, bias: Tensor | None) -> Tensor:
    a = a if bias is None else a + bias.to(a.dtype)[:, None]
    return a.masked_fill(~seen[:, None], -10.0)


def bias_times(factor: float) -> Any:
    right = attention_backends.apply_bias_and_mask
    return lambda a, seen, bias: right(a, seen, None if bias is None else bias * factor)


def softmax_bf16(a: Tensor) -> Tensor:
    blind = (a == -math.inf).all(-1, keepdim=True)
    return a.masked_fill(blind, 0.0).bfloat16().softmax(-1).masked_fill(blind, 0.0).to(a.dtype)


def unmerged(p: Tensor, v: Tensor) -> Tensor:
    c = p @ attention.repeat_heads(v, p.shape[1])
    return c.reshape(c.shape[0], c.shape[2], -1)


context_right = block.Block.attend


def values_rotated(self: Any, q: Tensor, k: Tensor, v: Tensor, frame: Any, *rest: Any) -> Tensor:
    new = rope.rotate_pairs(v[:, :, -q.shape[2] :], frame.cos, frame.sin)
    return context_right(self, q, k, torch.cat([v[:, :, : -q.shape[2]], new], 2), frame, *rest)


# Blocks

attention_right = block.Block.self_attention


def one_layer_unrotated(self: Any, y: Tensor, past: Any, frame: Any, *rest: Any) -> Any:
    return attention_right(self, y, past, frame._replace(cos=None, sin=None) if self.index == 1 else frame, *rest)


def new_before_old(
    self: Any, y: Tensor, past: Any, frame: Any, note: Any = capture_nothing, wants: bool = False
) -> Any:
    q, k, v = self.qkv_heads(y, note)
    q, k = (
        note("q_rot", rope.rotate_pairs(q, frame.cos, frame.sin)),
        note("k_rot", rope.rotate_pairs(k, frame.cos, frame.sin)),
    )
    if past is not None:
        k, v = torch.cat([k, past[0]], 2), torch.cat([v, past[1]], 2)
    k, v = note("k_cache", k), note("v_cache", v)
    return note("attn_out", self.project_output(self.attend(q, k, v, frame, note, wants))), k, v


def normed_after_rotation(
    self: Any, y: Tensor, past: Any, frame: Any, note: Any = capture_nothing, wants: bool = False
) -> Any:
    q, k, v = self.project_qkv(y)
    q, k, v = note("q", note("q_raw", q)), note("k", note("k_raw", k)), note("v", v)
    q, k = (
        self.normalize_heads(rope.rotate_pairs(x, frame.cos, frame.sin), role)
        for x, role in ((q, "q_norm"), (k, "k_norm"))
    )
    q, k = note("q_rot", q), note("k_rot", k)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    k, v = note("k_cache", k), note("v_cache", v)
    return note("attn_out", self.project_output(self.attend(q, k, v, frame, note, wants))), k, v


def residual_dropped(self: Any, x: Tensor, past: Any, frame: Any, want: frozenset[str] = frozenset()) -> Any:
    captured: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> Tensor:
        if name in want:
            captured[f"{name}.{self.index}"] = value
        return value

    wants = not want.isdisjoint(block.EAGER_ACTIVATIONS)
    r, k, v = self.self_attention(note("norm1", self.submodule("norm1")(x)), past, frame, note, wants)
    r = note("resid1", r)
    return note("resid2", r + self.mlp_forward(note("norm2", self.submodule("norm2")(r)), note)), k, v, captured


def up_before_gate(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return ACTIVATIONS[act](up) * gate


def keys_first(self: Any, y: Tensor) -> Any:
    H = self.config.num_attention_heads
    k, q, v = self.submodule("qkv")(y).chunk(3, -1)
    return attention.split_heads(q, H), attention.split_heads(k, H), attention.split_heads(v, H)


# Ends and state


def counting_padding(valid: Tensor, past: Tensor, past_valid: Tensor, prefix: Tensor | None = None) -> Tensor:
    return (past.shape[1] + torch.arange(valid.shape[1])).expand(valid.shape) * valid


def row_p(look_up: Callable[[Tensor], Tensor], p: Tensor, offset: int) -> Tensor:
    return look_up(p.clamp(min=0))


def last_column(x: Tensor, valid: Tensor) -> Tensor:
    return x[:, -1]


def unnormed(self: Any, x: Tensor) -> Tensor:
    return x


def stale(self: KVCache, n: int) -> KVCache:
    """Keep the positions of the first n slots but the values of the last n."""
    keys, values = tuple(k[:, :, -n:] for k in self.keys), tuple(v[:, :, -n:] for v in self.values)
    return KVCache(keys, values, self.positions[:, :n], self.valid[:, :n])
