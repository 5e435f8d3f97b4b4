"""Validate the arguments of Decoder.forward."""

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
    """Raise ValueError for arguments whose dtypes or shapes do not fit the decoder."""
    check_inputs_embeds(config, inputs_embeds)
    B, T = inputs_embeds.shape[:2]
    if 0 in (B, T):
        raise ValueError(f"inputs_embeds are {list(inputs_embeds.shape)}; B and T must be at least 1")
    for name, x in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if x is not None and x.shape != (B, T):
            raise ValueError(f"{name}: shape {list(x.shape)} does not match inputs_embeds {[B, T]}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask is {dtype_name(attention_mask)}; did you mean attention_mask.bool()?")
    if position_ids is not None and (position_ids.is_floating_point() or position_ids.dtype == torch.bool):
        raise ValueError(f"position_ids are {dtype_name(position_ids)}; pass integers")
    if cache is not None:
        check_cache(config, cache, B)
    full_shape = (B, T, T + (cache.S if cache is not None else 0))
    if attention_bias is not None:
        shape = attention_bias.shape
        if len(shape) != 3 or any(b not in (1, n) for b, n in zip(shape, full_shape, strict=True)):
            raise ValueError(f"attention_bias {list(shape)} does not broadcast to {list(full_shape)}")
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attn_implementation={backend!r} is unknown; use one of {', '.join(ATTENTION_BACKENDS)}")


def check_inputs_embeds(config: DecoderConfig, inputs_embeds: Tensor) -> None:
    """Raise ValueError unless these are floats [B, T, D]."""
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds are {dtype_name(inputs_embeds)}; did you mean decoder.embed(input_ids)?")
    if inputs_embeds.ndim != 3:
        raise ValueError(f"inputs_embeds are {list(inputs_embeds.shape)}; expected [B, T, D]")
    if inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(f"inputs_embeds have width {inputs_embeds.shape[-1]}, the decoder {config.hidden_size}")


def check_dtype(layers: nn.Module, inputs_embeds: Tensor) -> None:
    """Raise ValueError for embeddings wider than every weight, or of the other half-precision dtype."""
    dtypes = (p.dtype for p in layers.parameters() if p.is_floating_point())
    first = next(dtypes, inputs_embeds.dtype)
    if inputs_embeds.dtype == first:
        return
    if any(torch.promote_types(inputs_embeds.dtype, dtype) == dtype for dtype in (first, *dtypes)):
        return
    device = inputs_embeds.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise ValueError(f"inputs_embeds are {dtype_name(inputs_embeds)}, weights {dtype_name(first)}; convert one")


def dtype_name(x: Tensor | torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def check_cache(config: DecoderConfig, cache: KVCache, batch_size: int) -> None:
    """Raise ValueError for a cache of another shape, or with another number of rows."""
    expected, actual = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim), cache.shape_summary
    if actual != expected:
        raise ValueError(f"the cache has (layers, KV heads, head size) {actual}, the decoder {expected}")
    if batch_size != cache.B:
        raise ValueError(f"the cache has {cache.B} rows, the inputs {batch_size}")


def check_positions(config: DecoderConfig, position_ids: Tensor) -> None:
    """Raise ValueError for a position outside a learned table, or a missing one (-1) with RoPE."""
    low, high = (int(end) for end in position_ids.aminmax())
    if low < -1:
        raise ValueError(f"position {low}: positions must be ≥ -1 (-1 = no position)")
    if low < 0 and config.position_encoding == "rope":
        raise ValueError(f"position -1 (none) needs learned positions; {config.family} uses RoPE")
    if config.position_encoding == "table" and high >= config.max_position_embeddings:
        raise ValueError(f"position {high} exceeds the {config.max_position_embeddings} positions of {config.family}")
