"""Pack the valid tokens of each row to the left, convolve them, and split them at chunk boundaries.

Rows of a batch may have different paddings and may be at different offsets within a chunk.

Symbols: `W` taps of a causal convolution, `C` tokens of a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class PackedTokens(NamedTuple):
    """Tokens with the valid ones of each row moved to the left; the rest is zero.

    `lengths` is the number of valid tokens per row, None if every token is valid; `order` is the permutation applied.
    """

    x: Float[Tensor, "B T D"]
    order: Int[Tensor, "B T"] | None
    lengths: tuple[int, ...] | None


def pack_left(x: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None) -> PackedTokens:
    """Move the valid tokens of each row to the left, in order, and set the rest to zero."""
    if valid is None or bool(valid.all()):
        return PackedTokens(x, None, None)
    order = torch.sort((~valid).to(torch.uint8), stable=True, dim=1).indices
    packed = x.gather(1, order[..., None].expand_as(x))
    return PackedTokens(packed * valid.gather(1, order)[..., None], order, to_ints(valid.sum(1)))


def unpack(
    y: Float[Tensor, "B T D"], order: Int[Tensor, "B T"] | None, valid: Bool[Tensor, "B T"] | None
) -> Float[Tensor, "B T D"]:
    """Undo `pack_left`; positions that are not valid become zero."""
    if order is None or valid is None:
        return y
    inverse = order.argsort(1)
    return y.gather(1, inverse[..., None].expand_as(y)) * valid[..., None]


def to_ints(x: Int[Tensor, " N"]) -> tuple[int, ...]:
    """Convert an integer tensor to a tuple of Python integers."""
    return tuple(cast(list[int], x.tolist()))  # pyright: ignore[reportUnknownMemberType]


def build_valid_mask(lengths: tuple[int, ...] | None, T: int, device: torch.device) -> Bool[Tensor, "B T"] | None:
    """Return the mask of the valid tokens of packed rows, or None if all are valid."""
    if lengths is None:
        return None
    return torch.arange(T, device=device) < torch.tensor(lengths, device=device)[:, None]


def causal_conv(
    x: Float[Tensor, "B T D"],
    tail: Float[Tensor, "B W1 D"],
    weight: Float[Tensor, "D W"],
    lengths: tuple[int, ...] | None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B W1 D"]]:
    """Apply a causal depthwise convolution to packed tokens.

    Args:
        x: packed tokens.
        tail: the W - 1 tokens before the first.
        weight: the taps of each channel, the last for the current token.
        lengths: valid tokens of each row, None if all are valid.

    Returns:
        The convolved tokens, and the last W - 1 valid tokens of each row, which are the next call's `tail`.
    """
    D, W = weight.shape
    padded = torch.cat([tail.to(x.dtype), x], 1)
    taps, T = weight.to(x.dtype), x.shape[1]
    y = padded[:, :T] * taps[:, 0]
    for j in range(1, W):
        y = torch.addcmul(y, padded[:, j : j + T], taps[:, j])
    if lengths is None:
        return y, padded[:, padded.shape[1] - (W - 1) :]
    index = torch.tensor(lengths, device=x.device)[:, None] + torch.arange(W - 1, device=x.device)
    return y, padded.gather(1, index[..., None].expand(-1, -1, D))


def split_at_boundaries(offset: int, T: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) ranges of T tokens that no chunk boundary crosses.

    The first token is `offset` tokens after a boundary.
    """
    start, end = 0, chunk_size - offset % chunk_size
    while start < T:
        yield start, min(end, T)
        start, end = end, end + chunk_size
