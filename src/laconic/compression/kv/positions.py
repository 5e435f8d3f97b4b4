"""Rotate keys on to other positions, which RoPE allows without error beyond rounding."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.models import rope
from laconic.models.config import DecoderConfig
from laconic.models.ops.rope_scaling import ROPE_SCALINGS, get_movable_rope


def rotate_keys(
    config: DecoderConfig, keys: Sequence[Float[Tensor, "_ E"]], offsets: Sequence[Int[Tensor, " _"]]
) -> tuple[Float[Tensor, "_ E"], ...]:
    """Rotate the keys of every layer; `offsets` is the new position of each key minus the old one."""
    scaling = get_movable_rope(config.rope, config.family, "use one memory at a time")
    rotated = list[Tensor]()
    for layer, (k, offset) in enumerate(zip(keys, offsets, strict=True)):
        if layer in config.nope_layers:
            rotated.append(k)
            continue
        omega, _ = ROPE_SCALINGS[scaling.kind](scaling, config.head_dim, offset[:1])
        cos, sin = rope.cos_sin_tables(offset[None], omega, 1.0, torch.float32)
        rotated.append(rope.rotate_pairs(k.float()[None, None], cos, sin)[0, 0].to(k.dtype))
    return tuple(rotated)
