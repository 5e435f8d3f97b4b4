"""Rows of a batch that stand at different places: live tokens packed left, convolved, cut at chunk boundaries.

Symbols: W tokens of a convolution's window; a tail is the W - 1 vectors before the first.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class PackedTokens(NamedTuple):
    """Live tokens of each row on its left; `lengths` how many they are, None where every token is live."""

    x: Float[Tensor, "B T D"]
    order: Int[Tensor, "B T"] | None
    lengths: tuple[int, ...] | None


def pack_left(x: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None) -> PackedTokens:
    """Live tokens moved left, in their order; what lies behind them is zero."""
    if valid is None or bool(valid.all()):
        return PackedTokens(x, None, None)
    order = torch.sort((~valid).to(torch.uint8), stable=True, dim=1).indices
    moved = x.gather(1, order[..., None].expand_as(x))
    return PackedTokens(moved * valid.gather(1, order)[..., None], order, to_ints(valid.sum(1)))


def to_ints(x: Int[Tensor, " N"]) -> tuple[int, ...]:
    """As Python has them."""
    return tuple(cast(list[int], x.tolist()))  # pyright: ignore[reportUnknownMemberType]


def unpack(y: Float[Tensor, "B T D"], order: Int[Tensor, "B T"] | None, valid: Tensor | None) -> Float[Tensor, "B T D"]:
    """Back in their places, zeros where nothing is live."""
    if order is None or valid is None:
        return y
    back = order.argsort(1)
    return y.gather(1, back[..., None].expand_as(y)) * valid[..., None]


def build_valid_mask(lengths: tuple[int, ...] | None, T: int, device: torch.device) -> Bool[Tensor, "B T"] | None:
    """Which packed tokens are live; None where all are."""
    if lengths is None:
        return None
    return torch.arange(T, device=device) < torch.tensor(lengths, device=device)[:, None]


def causal_conv(
    x: Float[Tensor, "B T D"],
    tail: Float[Tensor, "B W1 D"],
    weight: Float[Tensor, "D W"],
    lengths: tuple[int, ...] | None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B W1 D"]]:
    """Each channel's causal sum over its last W vectors, and the tail for what comes next."""
    D, W = weight.shape
    whole = torch.cat([tail.to(x.dtype), x], 1)
    taps, T = weight.to(x.dtype), x.shape[1]
    y = whole[:, :T] * taps[:, 0]
    for j in range(1, W):
        y = torch.addcmul(y, whole[:, j : j + T], taps[:, j])
    if lengths is None:
        return y, whole[:, whole.shape[1] - (W - 1) :]
    at = torch.tensor(lengths, device=x.device)[:, None] + torch.arange(W - 1, device=x.device)
    return y, whole.gather(1, at[..., None].expand(-1, -1, D))


def group_rows_by_offset(num_tokens: Int[Tensor, " B"], period: int) -> dict[int, list[int]]:
    """Rows by how far they are into the current period."""
    found: dict[int, list[int]] = {}
    for row, n in enumerate(to_ints(num_tokens)):
        found.setdefault(n % period, []).append(row)
    return found


def split_at_boundaries(offset: int, T: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Cuts of T tokens that begin `offset` tokens after a boundary, none across a boundary."""
    start, end = 0, chunk_size - offset % chunk_size
    while start < T:
        yield start, min(end, T)
        start, end = end, end + chunk_size


def first_of_chunks(
    x: Float[Tensor, "B T D"],
    tail: Float[Tensor, "B 1 D"],
    num_tokens: Int[Tensor, " B"],
    chunk_size: int,
    lengths: tuple[int, ...] | None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B 1 D"]]:
    """For every token the first of its chunk, and that of the chunk left open; `tail` is the one open until now."""
    B, T, D = x.shape
    whole = torch.cat([tail.to(x.dtype), x], 1)
    into = (num_tokens[:, None] + torch.arange(T + 1)) % chunk_size
    at = (torch.arange(T + 1) - into + 1).clamp(min=0).to(x.device)  # place 0 is the tail
    ends = torch.full((B,), T) if lengths is None else torch.tensor(lengths)
    last = (ends - (num_tokens + ends) % chunk_size + 1).clamp(min=0)
    last = torch.where(((num_tokens + ends) % chunk_size) == 0, torch.zeros_like(last), last).to(x.device)
    found = whole.gather(1, at[:, :T, None].expand(-1, -1, D))
    return found, whole.gather(1, last[:, None, None].expand(-1, -1, D))
