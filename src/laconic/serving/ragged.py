"""One forward pass over rows of any lengths: decoding rows read one position, prefilling rows a chunk of their prompt.

The positions of all rows are one matrix for the linear layers; attention runs row by row on each row's own buffer of
keys and values, so that rows join and leave without copies of others, and no row is padded to the length of another.

Shapes: N new positions of all rows, n of one row, S filled slots, P = S + n, H query heads in G groups, E head size.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.generation.static_cache import MIN_PACKED_ROWS, FusedWeights, build_rope_tables, fuse_weights
from laconic.models import attention
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.ops.prefix_attention import attend_by_head

MAX_PACKED_BYTES = 2**30  # weights copied into the layout that is faster for several positions, the head first
MIN_FREE_SLOTS = 256  # a full buffer is replaced by one of twice the size, with at least as many free slots


class CacheRow:
    """Keys and values of one row in a buffer that is filled in place, with room for `num_tokens` positions for now.

    It continues the valid slots of `cache`, at `first_position` or else after the last cached position.
    """

    def __init__(self, decoder: Decoder, cache: KVCache | None, first_position: int | None, num_tokens: int) -> None:
        config = decoder.config
        if cache is None:
            cache = KVCache.empty(config, 1, decoder.dtype, decoder.device)
        slots = cache.valid[0].nonzero()[:, 0]
        self.prefix = cache.prefix
        self.last_position = int(cache.next_position) - 1
        self.next_position = self.last_position + 1 if first_position is None else first_position
        self.num_filled = S = len(slots)
        shape = (2 * len(cache.keys), config.num_key_value_heads, S + num_tokens, config.head_dim)
        self.buffer = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
            self.buffer[2 * i, :, :S], self.buffer[2 * i + 1, :, :S] = k[0, :, slots], v[0, :, slots]

    @property
    def num_bytes(self) -> int:
        """Size of the buffer and of the KV prefix, which rows may share."""
        return self.buffer.nbytes + (0 if self.prefix is None else self.prefix.num_bytes)

    def reserve(self, num_tokens: int) -> None:
        required = self.num_filled + num_tokens
        capacity = self.buffer.shape[2]
        if required > capacity:
            num_slots = max(required, 2 * capacity, capacity + MIN_FREE_SLOTS)
            new = self.buffer.new_empty((*self.buffer.shape[:2], num_slots, self.buffer.shape[3]))
            new[:, :, : self.num_filled] = self.buffer[:, :, : self.num_filled]
            self.buffer = new

    def copy_slots(self, buffer: Float[Tensor, "2L G S E"], num_slots: int) -> None:
        """Begin an empty row with the first slots of another row's buffer, whose positions are their indices."""
        self.reserve(num_slots)
        self.buffer[:, :, :num_slots] = buffer[:, :, :num_slots]
        self.num_filled = self.next_position = num_slots
        self.last_position = num_slots - 1

    def take_positions(self, num_tokens: int) -> list[int]:
        first = self.next_position
        self.last_position = max(self.last_position, first + num_tokens - 1)
        self.next_position = first + num_tokens
        return list(range(first, first + num_tokens))

    def drop_last(self, num_slots: int) -> None:
        """Remove the last slots; they must hold the last positions."""
        self.num_filled -= num_slots
        self.next_position -= num_slots
        self.last_position = self.next_position - 1

    def end_prompt(self) -> None:
        """Continue after the largest position so far, as `generate` does; a memory may have larger ones than text."""
        self.next_position = self.last_position + 1


class AttentionSpan(NamedTuple):
    """A row's columns among the N new positions, its filled slots before them, and masks by sliding window."""

    row: CacheRow
    columns: slice
    start: int
    masks: dict[int | None, Tensor | None]


class RaggedDecoder:
    """A stock decoder (`static_cache.is_stock_decoder`) that reads segments of several rows in one pass."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.weights_in_place = fuse_weights(decoder, max_copy_bytes=0)
        self.packed_weights = fuse_weights(decoder, MAX_PACKED_BYTES, MIN_PACKED_ROWS)
        self.windows = tuple(dict.fromkeys(self.config.sliding_windows))

    def forward(self, segments: Sequence[tuple[CacheRow, Tensor]]) -> list[Float[Tensor, "n D"]]:
        """Read a segment of ids [n] or embeddings [n, D] per row; return the hidden states after the final norm."""
        config = self.config
        lengths = [len(inputs) for _, inputs in segments]
        weights = self.choose_weights(sum(lengths))
        H, G, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        x = torch.cat([self.embed(inputs) for _, inputs in segments])
        positions = [row.take_positions(len(inputs)) for row, inputs in segments]
        flat = torch.tensor([p for row in positions for p in row], device=x.device)
        if weights.position_embedding is not None:
            x = x + F.embedding(flat + config.position_offset, weights.position_embedding)
        cos = sin = x
        if config.rope is not None:
            longest = torch.tensor([1 + row[-1] for row in positions for _ in row], device=x.device)
            cos, sin = build_rope_tables(config.rope, flat, longest, E, x.dtype)
        spans = self.start_spans(segments)
        N = len(x)
        for i, layer in enumerate(weights.layers):
            z = layer.qkv(layer.norm1(x)).view(N, H + 2 * G, E).to(x.dtype)  # int8 layers return bfloat16
            qk = z[:, : H + G]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat([layer.q_norm(z[:, :H]), layer.k_norm(z[:, H : H + G])], 1)
            if config.rope is not None and i not in config.nope_layers:
                qk = torch.addcmul(qk * cos, qk.roll(E // 2, -1), sin)
            q, k, v = qk[:, :H], qk[:, H:], z[:, H + G :]
            c = torch.cat([attend(span, i, q, k, v, layer.scale, layer.window) for span in spans])
            x = layer.add_o(x, c)
            x = layer.add_down(x, layer.mlp_hidden(layer.norm2(x)))
        for span, n in zip(spans, lengths, strict=True):
            span.row.num_filled += n
        return list(weights.final_norm(x).split(lengths))

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.choose_weights(len(hidden_states)).lm_head(hidden_states).to(hidden_states.dtype)

    def choose_weights(self, num_positions: int) -> FusedWeights:
        """Return the weights in the layout that is faster for as many positions."""
        return self.packed_weights if num_positions >= MIN_PACKED_ROWS else self.weights_in_place

    def embed(self, inputs: Tensor) -> Float[Tensor, "n D"]:
        return inputs if inputs.is_floating_point() else F.embedding(inputs, self.weights_in_place.token_embedding)

    def start_spans(self, segments: Sequence[tuple[CacheRow, Tensor]]) -> list[AttentionSpan]:
        """Make room in the rows' buffers, and build the masks of rows with several new positions."""
        R = self.config.num_attention_heads // self.config.num_key_value_heads
        spans = list[AttentionSpan]()
        first = 0
        for row, inputs in segments:
            n = len(inputs)
            row.reserve(n)
            masks = {window: build_mask(row, n, window, R) for window in self.windows}
            spans.append(AttentionSpan(row, slice(first, first + n), row.num_filled, masks))
            first += n
        return spans


def build_mask(row: CacheRow, n: int, window: int | None, R: int) -> Float[Tensor, "Rn P"] | None:
    """Return the mask of n new positions for R query heads; None if one position sees all, or if causality is all."""
    S = row.num_filled
    if n == 1 or (S == 0 and row.prefix is None and (window is None or window >= n)):
        return None
    valid = torch.ones(1, S + n, dtype=torch.bool, device=row.buffer.device)
    visible = attention.visibility_mask(valid, S, window)[0]
    return torch.zeros_like(visible, dtype=row.buffer.dtype).masked_fill(~visible, -math.inf).repeat(R, 1)


def attend(
    span: AttentionSpan,
    layer: int,
    q: Float[Tensor, "N H E"],
    k: Float[Tensor, "N G E"],
    v: Float[Tensor, "N G E"],
    scale: float,
    window: int | None,
) -> Float[Tensor, "n HE"]:
    """Write the new keys and values of one row and layer into its buffer, and attend to all of them."""
    row, columns, S = span.row, span.columns, span.start
    n, (H, E), G = columns.stop - columns.start, q.shape[1:], k.shape[1]
    pair = row.buffer[2 * layer : 2 * layer + 2]
    pair[0, :, S : S + n], pair[1, :, S : S + n] = k[columns].transpose(0, 1), v[columns].transpose(0, 1)
    first = max(0, S + 1 - window) if n == 1 and window is not None else 0
    keys = pair[:1, :, first : S + n]
    values = pair[1:, :, first : S + n]
    mask = span.masks[window]
    if n > 1 and mask is None:
        causal = attention.AttentionMask(True, None, None, None)
        return attention.sdpa_attention(q[columns].transpose(0, 1)[None], keys, values, scale, causal, 0.0)[0]
    # the query heads of a group stand in for positions, so that their keys need not be repeated
    grouped = q[columns].view(n, G, H // G, E).permute(1, 2, 0, 3).reshape(1, G, -1, E)
    if row.prefix is None:
        c = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
    else:
        c = attend_by_head(grouped, keys, values, mask, scale, row.prefix.heads(layer))
    return c.view(G, H // G, n, E).permute(2, 0, 1, 3).reshape(n, H * E)
