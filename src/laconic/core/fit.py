"""What of a call does not fit a decoder, each said in one line."""

import torch
from torch import Tensor, nn

from laconic.core.attention import BACKENDS
from laconic.core.cache import Cache
from laconic.core.families import DecoderConfig


def check_call(
    config: DecoderConfig,
    backend: str,
    vectors: Tensor,
    state: Cache | None,
    live: Tensor | None,
    positions: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Raises `ValueError` for arguments whose types or shapes do not fit the decoder."""
    check_vectors(config, vectors)
    B, T = vectors.shape[:2]
    if 0 in (B, T):
        raise ValueError(f"vectors hold no {'position; T' if T == 0 else 'row; B'} must be at least 1")
    for said, given in (("live is", live), ("positions are", positions)):
        if given is not None and given.shape != (B, T):
            raise ValueError(f"{said} {list(given.shape)}, vectors are {[B, T]}")
    if live is not None and live.dtype != torch.bool:
        raise ValueError(f"live is {kind(live)}; did you mean live.bool()?")
    if positions is not None and (positions.is_floating_point() or positions.dtype == torch.bool):
        raise ValueError(f"positions are {kind(positions)}; give integers")
    if state is not None:
        check_state(config, state, B)
    need = (B, T, T + (state.S if state is not None else 0))
    if bias is not None and (bias.ndim != 3 or any(b not in (1, n) for b, n in zip(bias.shape, need, strict=True))):
        raise ValueError(f"bias {list(bias.shape)} does not fit {list(need)}")
    if backend not in BACKENDS:
        raise ValueError(f"attention {backend!r}: known are {', '.join(BACKENDS)}")


def check_vectors(config: DecoderConfig, vectors: Tensor) -> None:
    """Raises `ValueError` for what are no vectors [B, T, D] of numbers."""
    if not vectors.is_floating_point():
        raise ValueError(f"vectors are {kind(vectors)}; did you mean decoder.embed(ids)?")
    if vectors.ndim != 3:
        raise ValueError(f"vectors are {list(vectors.shape)}; give [B, T, D]")
    if vectors.shape[-1] != config.hidden_size:
        raise ValueError(f"vectors have width {vectors.shape[-1]}, decoder {config.hidden_size}")


def check_type(blocks: nn.Module, vectors: Tensor) -> None:
    """Raises `ValueError` for vectors that no weight of the blocks can meet: wider ones, or the other half type."""
    types = (p.dtype for p in blocks.parameters() if p.is_floating_point())
    first = next(types, vectors.dtype)
    if vectors.dtype == first or any(torch.promote_types(vectors.dtype, t) == t for t in (first, *types)):
        return
    device = vectors.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise ValueError(f"vectors are {kind(vectors)}, weights {kind(first)}; convert one of them")


def kind(x: Tensor | torch.dtype) -> str:
    """The name of a tensor's type."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def check_state(config: DecoderConfig, state: Cache, B: int) -> None:
    """Raises `ValueError` for a cache of another decoder's shape or of other rows."""
    (L, G, E), asked = state.sizes, (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    if asked != (L, G, E):
        raise ValueError(f"state has {L} layers of {G} heads × {E}, decoder {asked[0]} of {asked[1]} × {asked[2]}")
    if state.B != B:
        raise ValueError(f"state has {state.B} rows, vectors {B}")


def check_positions(config: DecoderConfig, positions: Tensor) -> None:
    """Raises `ValueError` for a place the table does not have, or a missing place under RoPE."""
    low, high = (int(end) for end in positions.aminmax())
    if low < -1:
        raise ValueError(f"position {low}: the least is −1, none")
    if low < 0 and config.place == "rope":
        raise ValueError(f"position −1 (none) needs a table of positions; {config.family} has RoPE")
    if config.place == "table" and high >= config.max_position_embeddings:
        raise ValueError(f"position {high} ≥ {config.max_position_embeddings} of {config.family}")
