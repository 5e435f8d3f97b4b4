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

from laconic.core import rope
from laconic.core.block import Block, Branch, LayerNorm, RMSNorm, gated_mid, plain_mid
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig
from laconic.core.places import default_positions

ROOM = 1024  # slots of room at least, where as many steps are left; a full slab is made anew, twice as large
COPIES = 256 * 2**20  # bytes; above this the modules' own weights are read
PACKED = 2**18  # numbers in a map from which oneDNN's layout, two to three times as fast, pays for its dearer call
ONEDNN: Any = torch.ops.mkldnn
PLAIN = (Decoder, nn.ModuleList, Branch, Block, nn.Linear, nn.Embedding, RMSNorm, LayerNorm)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Map = Callable[[Tensor], Tensor]


def plain(decoder: Decoder) -> bool:
    """Whether every part is what the constructor made, so that its weights say all it does."""
    if decoder.training or decoder.attention != "sdpa":
        return False
    if any(type(m) not in PLAIN or any(getattr(m, hooks) for hooks in HOOKS) for m in decoder.modules()):
        return False
    home = decoder.words.weight
    return (
        not torch.is_autocast_enabled(home.device.type)
        and all(isinstance(getattr(block, "mlp", Branch()), Branch) for block in decoder.blocks)
        and all(p.dtype == home.dtype and p.device == home.device for p in decoder.parameters())
    )


class Layer(NamedTuple):
    """What one block computes, as functions of [B, …] rows."""

    norm1: Map
    qkv: Map
    q_norm: Map | None
    k_norm: Map | None
    o: Map
    norm2: Map
    up: Map
    down: Map
    scale: float
    window: int | None


class Parts(NamedTuple):
    """What a plain decoder computes in one step; made once a generation, because weights may change between two."""

    config: DecoderConfig
    words: Tensor
    places: Tensor | None
    layers: list[Layer]
    final_norm: Map
    head: Map


def parts(decoder: Decoder, copies: int = COPIES) -> Parts:
    """The maps of a plain decoder, the first of them as copies: as many as fit into `copies` bytes."""
    config, names = decoder.config, decoder.names
    words = decoder.words.weight
    left = copies

    def map_of(maps: Sequence[tuple[Tensor, Tensor | None]]) -> Map:
        nonlocal left
        size = sum(w.nbytes for w, _ in maps)
        copy = size <= left
        left -= size if copy else 0
        return fused(maps, copy)

    def joined(block: Block, *roles: str) -> Map:
        modules = [block.part(role) for role in roles]
        return map_of([(m.weight, m.bias) for m in modules if isinstance(m, nn.Linear)])

    def layer(i: int, block: Block) -> Layer:
        return Layer(
            block.part("norm1"),
            joined(block, "qkv") if names.qkv else joined(block, "q", "k", "v"),
            block.part("q_norm") if config.qk_norm else None,
            block.part("k_norm") if config.qk_norm else None,
            joined(block, "o"),
            block.part("norm2"),
            joined(block, "gate", "up") if config.gated else joined(block, "up"),
            joined(block, "down"),
            config.score_scale[i],
            config.windows[i],
        )

    layers = [layer(i, block) for i, block in enumerate(decoder.blocks) if isinstance(block, Block)]
    head = words if config.tie_word_embeddings else decoder.get_parameter(f"{names.head}.weight")
    places = decoder.get_parameter(f"{names.places}.weight") if names.places else None
    return Parts(config, words, places, layers, decoder.get_submodule(names.final_norm), map_of([(head, None)]))


def fused(maps: Sequence[tuple[Tensor, Tensor | None]], copy: bool) -> Map:
    """Several linear maps of one input as one copy in the layout that is fastest for a few rows, or as they are."""
    if not copy:
        one = [partial(F.linear, weight=w, bias=b) for w, b in maps]
        return one[0] if len(one) == 1 else lambda x: torch.cat([f(x) for f in one], -1)
    weight = torch.cat([w for w, _ in maps])
    bias = (
        None
        if all(b is None for _, b in maps)
        else torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in maps])
    )
    if weight.numel() >= PACKED and weight.dtype == torch.float32 and has_packed(weight.device):
        return packed(weight, bias)
    weight = weight.t().contiguous()
    return partial(torch.mm, mat2=weight) if bias is None else partial(torch.addmm, bias, mat2=weight)


def has_packed(device: torch.device) -> bool:
    """Whether this torch has oneDNN and its operators for weights laid out beforehand, which are not public."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and all(hasattr(ONEDNN, n) for n in names)


def packed(weight: Tensor, bias: Tensor | None) -> Map:
    """One linear map in the layout that oneDNN asks for."""
    held, linear = ONEDNN._reorder_linear_weight(weight, None), ONEDNN._linear_pointwise.default
    return lambda x: linear(x, held, bias, "none", [], "")


class Slab:
    """A cache with room for more, and the step that fills it; never handed out: `cache` gives views to copy from."""

    def __init__(self, parts: Parts, cache: Cache, steps: int) -> None:
        config, self.parts, self.steps = parts.config, parts, steps
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.windows = tuple(dict.fromkeys(config.windows))
        self.fill(cache)

    def fill(self, cache: Cache) -> None:
        """Makes the slab anew: what is in `cache`, and room for more of the steps that are left."""
        config, (_, G, E), S = self.parts.config, self.heads, cache.S
        room = min(self.steps, max(ROOM, S))
        self.start, self.filled, self.capacity = S, S, S + room
        self.held = cache.keys[0].new_empty(2 * len(cache.keys), cache.B, G, self.capacity, E)
        for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
            self.held[2 * i, :, :, :S], self.held[2 * i + 1, :, :, :S] = k, v
        new = torch.ones(cache.B, room, dtype=torch.long, device=self.held.device)
        new = default_positions(new.bool(), cache.positions, cache.live)
        self.positions = torch.cat([cache.positions, new], 1)
        self.live = torch.cat([cache.live, torch.ones_like(new, dtype=torch.bool)], 1)
        self.whole = bool(cache.live.all())
        self.count = self.live.cumsum(1)
        self.dead = torch.zeros_like(self.live, dtype=self.held.dtype).masked_fill(~self.live, -math.inf)[:, None, None]
        if self.parts.places is not None:
            self.places = F.embedding(new.t() + config.offset, self.parts.places)
        if config.rope is not None:
            self.cos, self.sin = turns(config.rope, new, E, self.held.dtype)

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Reads one id a row: the hidden states after the final norm, and their logits."""
        if self.filled == self.capacity:
            self.fill(self.cache())
        (H, G, E), t = self.heads, self.filled - self.start
        B, R = len(ids), H // G
        x = F.embedding(ids, self.parts.words)
        if self.parts.places is not None:
            x = x + self.places[t]
        slots = self.held.select(3, self.filled).unbind(0)
        sights = {window: self.sight(window) for window in self.windows}
        for i, layer in enumerate(self.parts.layers):
            z = layer.qkv(layer.norm1(x)).view(B, H + 2 * G, E)
            if layer.q_norm is not None and layer.k_norm is not None:
                turning = torch.cat([layer.q_norm(z[:, :H]), layer.k_norm(z[:, H : H + G])], 1)
            else:
                turning = z[:, : H + G]
            if self.parts.config.rope is not None:
                turning = torch.addcmul(turning * self.cos[t], turning.roll(E // 2, -1), self.sin[t])
            slots[2 * i].copy_(turning[:, H:])
            slots[2 * i + 1].copy_(z[:, H + G :])
            held, mask = sights[layer.window]
            c = F.scaled_dot_product_attention(
                turning[:, :H].view(B, G, R, E), held[2 * i], held[2 * i + 1], mask, scale=layer.scale
            )
            x = x + layer.o(c.view(B, H * E))
            x = x + layer.down(self.mid(layer.up(layer.norm2(x))))
        self.filled, self.steps = self.filled + 1, self.steps - 1
        hidden = self.parts.final_norm(x)
        return hidden, self.parts.head(hidden)

    def mid(self, u: Float[Tensor, "B NF"]) -> Float[Tensor, "B F"]:
        """What the output map of the MLP reads, from gate and up side by side, or from up alone."""
        if not self.parts.config.gated:
            return plain_mid(u, self.parts.config.act)
        gate, up = u.chunk(2, -1)
        return gated_mid(gate, up, self.parts.config.act)

    def sight(self, window: int | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The slots that the layers of a window look at, keys and values by turns, and their mask if one is needed."""
        end = self.filled + 1
        if self.whole:
            start = 0 if window is None else max(0, end - window)
            return self.held[:, :, :, start:end].unbind(0), None
        mask = self.dead[..., :end]
        if window is not None:
            far = self.count[:, self.filled, None] - self.count[:, :end] >= window
            mask = mask.masked_fill(far[:, None, None], -math.inf)
        return self.held[:, :, :, :end].unbind(0), mask

    def cache(self) -> Cache:
        """What is held now, as views of the slab."""
        held = self.held[:, :, :, : self.filled].unbind(0)
        return Cache(held[::2], held[1::2], self.positions[:, : self.filled], self.live[:, : self.filled])

    def take(self, places: list[int]) -> None:
        """Goes on with these rows only."""
        self.fill(self.cache().take(places))


def turns(
    how: rope.Rope, p: Int[Tensor, "B N"], E: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "N B 1 E"], Float[Tensor, "N B 1 E"]]:
    """cos, and sin with the sign of its half, of N steps to come; each position is then the longest of its row."""
    B, N = p.shape
    late = p.t().reshape(-1)
    omega, a = rope.SCALINGS[how.kind](how, E, 1 + late)
    cos, sin = rope.tables(late[:, None], omega, a, dtype)
    sin = torch.cat([-sin[..., : E // 2], sin[..., E // 2 :]], -1)
    return cos.view(N, B, 1, E), sin.view(N, B, 1, E)
