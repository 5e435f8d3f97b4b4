"""What of a call does not fit a decoder, each said in one line."""

import torch
from torch import Tensor, nn

from laconic.models.attention import ATTENTION_BACKENDS
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig


def check_forward_inputs(
    config: DecoderConfig,
    backend: str,
    inputs_embeds: Tensor,
    cache: KVCache | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    attention_bias: Tensor | None,
) -> None:
    """Raises `ValueError` for arguments whose types or shapes do not fit the decoder."""
    check_inputs_embeds(config, inputs_embeds)
    B, T = inputs_embeds.shape[:2]
    if 0 in (B, T):
        raise ValueError(f"vectors hold no {'position; T' if T == 0 else 'row; B'} must be at least 1")
    for said, given in (("live is", attention_mask), ("positions are", position_ids)):
        if given is not None and given.shape != (B, T):
            raise ValueError(f"{said} {list(given.shape)}, vectors are {[B, T]}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"live is {dtype_name(attention_mask)}; did you mean live.bool()?")
    if position_ids is not None and (position_ids.is_floating_point() or position_ids.dtype == torch.bool):
        raise ValueError(f"positions are {dtype_name(position_ids)}; give integers")
    if cache is not None:
        check_cache(config, cache, B)
    need = (B, T, T + (cache.S if cache is not None else 0))
    if attention_bias is not None and (
        attention_bias.ndim != 3 or any(b not in (1, n) for b, n in zip(attention_bias.shape, need, strict=True))
    ):
        raise ValueError(f"bias {list(attention_bias.shape)} does not fit {list(need)}")
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention {backend!r}: known are {', '.join(ATTENTION_BACKENDS)}")


def check_inputs_embeds(config: DecoderConfig, inputs_embeds: Tensor) -> None:
    """Raises `ValueError` for what are no vectors [B, T, D] of numbers."""
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"vectors are {dtype_name(inputs_embeds)}; did you mean decoder.embed(ids)?")
    if inputs_embeds.ndim != 3:
        raise ValueError(f"vectors are {list(inputs_embeds.shape)}; give [B, T, D]")
    if inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(f"vectors have width {inputs_embeds.shape[-1]}, decoder {config.hidden_size}")


def check_dtype(layers: nn.Module, inputs_embeds: Tensor) -> None:
    """Raises `ValueError` for vectors that no weight of the blocks can meet: wider ones, or the other half type."""
    types = (p.dtype for p in layers.parameters() if p.is_floating_point())
    first = next(types, inputs_embeds.dtype)
    if inputs_embeds.dtype == first or any(torch.promote_types(inputs_embeds.dtype, t) == t for t in (first, *types)):
        return
    device = inputs_embeds.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise ValueError(f"vectors are {dtype_name(inputs_embeds)}, weights {dtype_name(first)}; convert one of them")


def dtype_name(x: Tensor | torch.dtype) -> str:
    """The name of a tensor's type."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def check_cache(config: DecoderConfig, cache: KVCache, batch_size: int) -> None:
    """Raises `ValueError` for a cache of another decoder's shape or of other rows."""
    (L, G, E), asked = cache.shape_summary, (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    if asked != (L, G, E):
        raise ValueError(f"state has {L} layers of {G} heads × {E}, decoder {asked[0]} of {asked[1]} × {asked[2]}")
    if cache.B != batch_size:
        raise ValueError(f"state has {cache.B} rows, vectors {batch_size}")


def check_positions(config: DecoderConfig, position_ids: Tensor) -> None:
    """Raises `ValueError` for a place the table does not have, or a missing place under RoPE."""
    low, high = (int(end) for end in position_ids.aminmax())
    if low < -1:
        raise ValueError(f"position {low}: the least is −1, none")
    if low < 0 and config.position_encoding == "rope":
        raise ValueError(f"position −1 (none) needs a table of positions; {config.family} has RoPE")
    if config.position_encoding == "table" and high >= config.max_position_embeddings:
        raise ValueError(f"position {high} ≥ {config.max_position_embeddings} of {config.family}")
