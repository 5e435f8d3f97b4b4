"""One token a row and step, fast: keys and values in a slab filled in place, maps fused and laid out for one row.

The second path of generation; `tests/core/test_slab.py` holds it to the first, which is the decoder itself.

Shapes: L layers, B rows, H query heads in G groups of R, E width of a head, P slots held, `room` slots more.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from laconic.models import rope
from laconic.models.block import Block, LayerNorm, Namespace, RMSNorm, gated_mlp_hidden, mlp_hidden
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.positions import default_position_ids

MIN_NEW_SLOTS = 1024  # slots of room at least, where as many steps are left; a full slab is made anew, twice as large
MAX_COPY_BYTES = 256 * 2**20  # bytes; above this the modules' own weights are read
MIN_PACKED_NUMEL = (
    2**18
)  # numbers in a map from which oneDNN's layout, two to three times as fast, pays for its dearer call
ONEDNN: Any = torch.ops.mkldnn
STOCK_MODULES = (Decoder, nn.ModuleList, Namespace, Block, nn.Linear, nn.Embedding, RMSNorm, LayerNorm)
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks")

LinearFn = Callable[[Tensor], Tensor]


def is_stock_decoder(decoder: Decoder) -> bool:
    """Whether every part is what the constructor made, so that its weights say all it does."""
    if decoder.training or decoder.attn_implementation != "sdpa":
        return False
    if any(
        type(m) not in STOCK_MODULES or any(getattr(m, hooks) for hooks in HOOK_ATTRIBUTES) for m in decoder.modules()
    ):
        return False
    home = decoder.token_embedding.weight
    return (
        not torch.is_autocast_enabled(home.device.type)
        and all(isinstance(getattr(block, "mlp", Namespace()), Namespace) for block in decoder.layers)
        and all(p.dtype == home.dtype and p.device == home.device for p in decoder.parameters())
    )


class FusedLayer(NamedTuple):
    """What one block computes, as functions of [B, …] rows."""

    norm1: LinearFn
    qkv: LinearFn
    q_norm: LinearFn | None
    k_norm: LinearFn | None
    o: LinearFn
    norm2: LinearFn
    up: LinearFn
    down: LinearFn
    scale: float
    window: int | None


class FusedWeights(NamedTuple):
    """What a plain decoder computes in one step; made once a generation, because weights may change between two."""

    config: DecoderConfig
    token_embedding: Tensor
    position_embedding: Tensor | None
    layers: list[FusedLayer]
    final_norm: LinearFn
    lm_head: LinearFn


def fuse_weights(decoder: Decoder, max_copy_bytes: int = MAX_COPY_BYTES) -> FusedWeights:
    """The maps of a plain decoder, the first of them as copies: as many as fit into `copies` bytes."""
    config, names = decoder.config, decoder.weight_names
    words = decoder.token_embedding.weight
    left = max_copy_bytes

    def map_of(maps: Sequence[tuple[Tensor, Tensor | None]]) -> LinearFn:
        nonlocal left
        size = sum(w.nbytes for w, _ in maps)
        copy = size <= left
        left -= size if copy else 0
        return fuse_linear(maps, copy)

    def joined(block: Block, *roles: str) -> LinearFn:
        modules = [block.submodule(role) for role in roles]
        return map_of([(m.weight, m.bias) for m in modules if isinstance(m, nn.Linear)])

    def layer(i: int, block: Block) -> FusedLayer:
        return FusedLayer(
            block.submodule("norm1"),
            joined(block, "qkv") if names.qkv else joined(block, "q", "k", "v"),
            block.submodule("q_norm") if config.qk_norm else None,
            block.submodule("k_norm") if config.qk_norm else None,
            joined(block, "o"),
            block.submodule("norm2"),
            joined(block, "gate", "up") if config.gated_mlp else joined(block, "up"),
            joined(block, "down"),
            config.attention_scales[i],
            config.sliding_windows[i],
        )

    layers = [layer(i, block) for i, block in enumerate(decoder.layers) if isinstance(block, Block)]
    head = words if config.tie_word_embeddings else decoder.get_parameter(f"{names.head}.weight")
    places = decoder.get_parameter(f"{names.position_embedding}.weight") if names.position_embedding else None
    return FusedWeights(config, words, places, layers, decoder.get_submodule(names.final_norm), map_of([(head, None)]))


def fuse_linear(weights_and_biases: Sequence[tuple[Tensor, Tensor | None]], copy: bool) -> LinearFn:
    """Several linear maps of one input as one copy in the layout that is fastest for a few rows, or as they are."""
    if not copy:
        one = [partial(F.linear, weight=w, bias=b) for w, b in weights_and_biases]
        return one[0] if len(one) == 1 else lambda x: torch.cat([f(x) for f in one], -1)
    weight = torch.cat([w for w, _ in weights_and_biases])
    bias = (
        None
        if all(b is None for _, b in weights_and_biases)
        else torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in weights_and_biases])
    )
    if weight.numel() >= MIN_PACKED_NUMEL and weight.dtype == torch.float32 and has_onednn_packing(weight.device):
        return onednn_linear(weight, bias)
    weight = weight.t().contiguous()
    return partial(torch.mm, mat2=weight) if bias is None else partial(torch.addmm, bias, mat2=weight)


def has_onednn_packing(device: torch.device) -> bool:
    """Whether this torch has oneDNN and its operators for weights laid out beforehand, which are not public."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and all(hasattr(ONEDNN, n) for n in names)


def onednn_linear(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """One linear map in the layout that oneDNN asks for."""
    held, linear = ONEDNN._reorder_linear_weight(weight, None), ONEDNN._linear_pointwise.default
    return lambda x: linear(x, held, bias, "none", [], "")


class StaticCacheDecoder:
    """A cache with room for more, and the step that fills it; never handed out: `cache` gives views to copy from."""

    def __init__(self, weights: FusedWeights, cache: KVCache, steps: int) -> None:
        config, self.weights, self.remaining_steps = weights.config, weights, steps
        self.head_shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.windows = tuple(dict.fromkeys(config.sliding_windows))
        self.allocate(cache)

    def allocate(self, cache: KVCache) -> None:
        """Makes the slab anew: what is in `cache`, and room for more of the steps that are left."""
        config, (_, G, E), S = self.weights.config, self.head_shape, cache.S
        room = min(self.remaining_steps, max(MIN_NEW_SLOTS, S))
        self.first_new_slot, self.num_filled, self.capacity = S, S, S + room
        self.buffer = cache.keys[0].new_empty(2 * len(cache.keys), cache.B, G, self.capacity, E)
        for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
            self.buffer[2 * i, :, :, :S], self.buffer[2 * i + 1, :, :, :S] = k, v
        new = torch.ones(cache.B, room, dtype=torch.long, device=self.buffer.device)
        new = default_position_ids(new.bool(), cache.positions, cache.valid)
        self.positions = torch.cat([cache.positions, new], 1)
        self.valid = torch.cat([cache.valid, torch.ones_like(new, dtype=torch.bool)], 1)
        self.all_valid = bool(cache.valid.all())
        self.valid_count = self.valid.cumsum(1)
        self.invalid_bias = torch.zeros_like(self.valid, dtype=self.buffer.dtype).masked_fill(~self.valid, -math.inf)[
            :, None, None
        ]
        if self.weights.position_embedding is not None:
            self.position_vectors = F.embedding(new.t() + config.position_offset, self.weights.position_embedding)
        if config.rope is not None:
            self.cos, self.sin = rope_for_steps(config.rope, new, E, self.buffer.dtype)

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Reads one id a row: the hidden states after the final norm, and their logits."""
        if self.num_filled == self.capacity:
            self.allocate(self.to_cache())
        (H, G, E), t = self.head_shape, self.num_filled - self.first_new_slot
        B, R = len(ids), H // G
        x = F.embedding(ids, self.weights.token_embedding)
        if self.weights.position_embedding is not None:
            x = x + self.position_vectors[t]
        slots = self.buffer.select(3, self.num_filled).unbind(0)
        sights = {window: self.attention_window(window) for window in self.windows}
        for i, layer in enumerate(self.weights.layers):
            z = layer.qkv(layer.norm1(x)).view(B, H + 2 * G, E)
            if layer.q_norm is not None and layer.k_norm is not None:
                turning = torch.cat([layer.q_norm(z[:, :H]), layer.k_norm(z[:, H : H + G])], 1)
            else:
                turning = z[:, : H + G]
            if self.weights.config.rope is not None:
                turning = torch.addcmul(turning * self.cos[t], turning.roll(E // 2, -1), self.sin[t])
            slots[2 * i].copy_(turning[:, H:])
            slots[2 * i + 1].copy_(z[:, H + G :])
            held, mask = sights[layer.window]
            c = F.scaled_dot_product_attention(
                turning[:, :H].view(B, G, R, E), held[2 * i], held[2 * i + 1], mask, scale=layer.scale
            )
            x = x + layer.o(c.view(B, H * E))
            x = x + layer.down(self.mlp_hidden(layer.up(layer.norm2(x))))
        self.num_filled, self.remaining_steps = self.num_filled + 1, self.remaining_steps - 1
        hidden = self.weights.final_norm(x)
        return hidden, self.weights.lm_head(hidden)

    def mlp_hidden(self, u: Float[Tensor, "B NF"]) -> Float[Tensor, "B F"]:
        """What the output map of the MLP reads, from gate and up side by side, or from up alone."""
        if not self.weights.config.gated_mlp:
            return mlp_hidden(u, self.weights.config.activation)
        gate, up = u.chunk(2, -1)
        return gated_mlp_hidden(gate, up, self.weights.config.activation)

    def attention_window(self, window: int | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The slots that the layers of a window look at, keys and values by turns, and their mask if one is needed."""
        end = self.num_filled + 1
        if self.all_valid:
            start = 0 if window is None else max(0, end - window)
            return self.buffer[:, :, :, start:end].unbind(0), None
        mask = self.invalid_bias[..., :end]
        if window is not None:
            far = self.valid_count[:, self.num_filled, None] - self.valid_count[:, :end] >= window
            mask = mask.masked_fill(far[:, None, None], -math.inf)
        return self.buffer[:, :, :, :end].unbind(0), mask

    def to_cache(self) -> KVCache:
        """What is held now, as views of the slab."""
        held = self.buffer[:, :, :, : self.num_filled].unbind(0)
        return KVCache(held[::2], held[1::2], self.positions[:, : self.num_filled], self.valid[:, : self.num_filled])

    def select_rows(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        self.allocate(self.to_cache().select_rows(rows))


def rope_for_steps(
    config: rope.RopeConfig, p: Int[Tensor, "B N"], E: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "N B 1 E"], Float[Tensor, "N B 1 E"]]:
    """cos, and sin with the sign of its half, of N steps to come; each position is then the longest of its row."""
    B, N = p.shape
    late = p.t().reshape(-1)
    omega, a = rope.ROPE_SCALINGS[config.kind](config, E, 1 + late)
    cos, sin = rope.cos_sin_tables(late[:, None], omega, a, dtype)
    sin = torch.cat([-sin[..., : E // 2], sin[..., E // 2 :]], -1)
    return cos.view(N, B, 1, E), sin.view(N, B, 1, E)
