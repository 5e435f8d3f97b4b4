"""Fast decoding of one token per row and step: a preallocated KV cache filled in place, and fused weights.

`laconic.generate` uses it for unmodified decoders. A test checks that it computes the same as the decoder.

Shapes: L layers, B rows, H query heads in G groups of R, E head size.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from laconic.models import rope
from laconic.models.block import Block, RMSNorm, plain_mlp_hidden
from laconic.models.cache import KVCache
from laconic.models.checkpoints.weight_memory import stack_rows
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.init import Namespace
from laconic.models.ops.activation_functions import ACTIVATIONS
from laconic.models.ops.int8_linear import Int8Linear
from laconic.models.ops.linear import ONEDNN, is_unmodified
from laconic.models.ops.packed_linear import PackedLinear, has_onednn_packing
from laconic.models.ops.prefix_attention import attend_by_head
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from laconic.models.quantize import PLAIN_MODULES

MIN_NEW_SLOTS = 1024  # slots allocated at once if as many steps remain; a full buffer is replaced by a doubled one
MAX_COPY_BYTES = 256 * 2**20  # weights beyond this are used in place instead of copied, see `copy_budget`
# Share of the weights that is copied from a model larger than MAX_COPY_BYTES; the tied head of SmolLM2-135M fits.
MAX_COPY_SHARE = 0.22
# For batches oneDNN's packed layout makes decoding 1.2 to 1.4 times as fast (benchmarks/decoding.py misses a target
# without it), for a single row a plain copy is faster.
MIN_PACKED_ROWS = 4
MIN_PACKED_NUMEL = 2**18
MIN_STEPS_TO_PACK, MIN_STEPS_TO_COPY = 16, 64  # for fewer steps, copying the weights costs more than it saves
STOCK_MODULES = (Decoder, Int8Linear, *PLAIN_MODULES)

TensorFn = Callable[[Tensor], Tensor]
ResidualFn = Callable[[Tensor, Tensor], Tensor]


def is_stock_decoder(decoder: Decoder) -> bool:
    """Return whether all modules are those that the constructor builds, so that the weights determine the result."""
    if decoder.training or decoder.attn_implementation != "sdpa":
        return False
    for module in decoder.modules():
        if type(module) not in STOCK_MODULES or not is_unmodified(module):
            return False
    device, dtype = decoder.device, decoder.dtype
    return (
        not torch.is_autocast_enabled(device.type)
        and all(isinstance(getattr(block, "mlp", Namespace()), Namespace) for block in decoder.layers)
        and all(p.dtype == dtype and p.device == device for p in decoder.parameters())
    )


class FusedLayer(NamedTuple):
    """One block as functions of [B, …] tensors, one row per sequence."""

    norm1: TensorFn
    qkv: TensorFn  # queries, keys and values, concatenated
    q_norm: TensorFn | None
    k_norm: TensorFn | None
    add_o: ResidualFn  # residual stream plus the output projection of attention
    norm2: TensorFn
    mlp_hidden: TensorFn  # input of the MLP's output projection
    add_down: ResidualFn  # residual stream plus that projection
    scale: float
    window: int | None  # None for full attention


class FusedWeights(NamedTuple):
    """A stock decoder as functions, built for each call of `generate` because weights may change between calls."""

    config: DecoderConfig
    token_embedding: Tensor
    position_embedding: Tensor | None
    layers: list[FusedLayer]
    final_norm: TensorFn
    lm_head: TensorFn


def fuse_weights(decoder: Decoder, max_copy_bytes: int = MAX_COPY_BYTES, num_rows: int = 1) -> FusedWeights:
    """Fuse the linear layers of a stock decoder that share an input.

    `max_copy_bytes` of weights are copied into the layout that is faster for `num_rows`, the head first; the rest is
    used in place.
    """
    config, names = decoder.config, decoder.weight_names
    remaining = max_copy_bytes

    def fuse(modules: Sequence[nn.Module]) -> list[TensorFn]:
        nonlocal remaining
        if num_rows >= MIN_PACKED_ROWS and all(isinstance(m, PackedLinear) and m.is_current() for m in modules):
            return list(cast(Sequence[TensorFn], modules))
        size = sum(m.weight.nbytes for m in modules if isinstance(m.weight, Tensor))
        int8_layers = [m for m in modules if isinstance(m, Int8Linear)]
        should_copy = size <= remaining
        if should_copy:
            remaining -= size
        if int8_layers:
            if should_copy or stack_rows([layer.weight for layer in int8_layers]) is not None:
                int8_layers = [Int8Linear.concat(int8_layers)]
            return [layer.multiply for layer in int8_layers]
        weights = [(m.weight, m.bias if isinstance(m, nn.Linear) else None) for m in modules]
        return fuse_linear(cast(Any, weights), should_copy=should_copy, should_pack=num_rows >= MIN_PACKED_ROWS)

    def fuse_roles(block: Block, *roles: str) -> list[TensorFn]:
        return fuse([block.submodule(role) for role in roles])

    def fuse_layer(i: int, block: Block) -> FusedLayer:
        return FusedLayer(
            norm1=fuse_norm(block.submodule("norm1")),
            qkv=concat_layers(fuse_roles(block, "qkv") if names.qkv else fuse_roles(block, "q", "k", "v")),
            q_norm=block.submodule("q_norm") if config.qk_norm else None,
            k_norm=block.submodule("k_norm") if config.qk_norm else None,
            add_o=fuse_residual(*fuse_roles(block, "o")),
            norm2=fuse_norm(block.submodule("norm2")),
            mlp_hidden=fuse_mlp(
                fuse_roles(block, "gate", "up") if config.gated_mlp else fuse_roles(block, "up"), config
            ),
            add_down=fuse_residual(*fuse_roles(block, "down")),
            scale=config.attention_scales[i],
            window=config.sliding_windows[i],
        )

    (lm_head,) = fuse([decoder.token_embedding if config.tie_word_embeddings else decoder.get_submodule(names.head)])
    layers = [fuse_layer(i, block) for i, block in enumerate(decoder.layers) if isinstance(block, Block)]
    positions = decoder.get_parameter(f"{names.position_embedding}.weight") if names.position_embedding else None
    final_norm = fuse_norm(decoder.get_submodule(names.final_norm))
    return FusedWeights(config, decoder.token_embedding.weight, positions, layers, final_norm, lm_head)


def fuse_norm(norm: nn.Module) -> TensorFn:
    """Return a norm as a function.

    Float32 RMSNorm on a CPU becomes weight sqrt(D) x / sqrt(|x|^2 + D eps), which takes only four kernels.
    """
    if not isinstance(norm, RMSNorm) or norm.weight.dtype != torch.float32 or norm.weight.device.type != "cpu":
        return norm
    D = len(norm.weight)
    vector_norm = cast(Any, torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]
    weight = norm.weight.detach() * D**0.5
    offset = torch.tensor((D * norm.eps) ** 0.5)
    return lambda x: (x / torch.hypot(vector_norm(x, 2, -1, True), offset)).mul_(weight)


def fuse_residual(linear: TensorFn) -> ResidualFn:
    """Return a function that adds the layer's output to the residual stream, in one operation where torch has one."""
    if isinstance(linear, partial) and linear.func is torch.mm:
        return cast(ResidualFn, partial(torch.addmm, mat2=linear.keywords["mat2"]))

    return lambda x, y: x + cast(Tensor, linear(y))


def copy_budget(decoder: Decoder, num_rows: int, steps: int) -> int:
    """Return how many bytes of weights to copy: all of a small model, a part of a large one for batches, else 0."""
    is_batch = num_rows >= MIN_PACKED_ROWS
    if steps < (MIN_STEPS_TO_PACK if is_batch else MIN_STEPS_TO_COPY):
        return 0
    num_bytes = sum(x.nbytes for x in (*decoder.parameters(), *decoder.buffers()))
    if num_bytes <= MAX_COPY_BYTES:
        return num_bytes
    return min(MAX_COPY_BYTES, int(MAX_COPY_SHARE * num_bytes)) if is_batch else 0


def concat_layers(layers: Sequence[TensorFn]) -> TensorFn:
    """Return a function that applies all layers to one input and concatenates their outputs."""
    return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], -1)


def fuse_mlp(layers: Sequence[TensorFn], config: DecoderConfig) -> TensorFn:
    """Return a function that computes the input of the MLP's output projection from up, or from gate and up."""

    def hidden(x: Float[Tensor, "B D"]) -> Float[Tensor, "B F"]:
        outputs = [layer(x) for layer in layers]
        if not config.gated_mlp:
            return plain_mlp_hidden(outputs[0], config.activation)
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
        return ACTIVATIONS[config.activation](gate).mul_(up)

    return hidden


def build_linear(weight: Float[Tensor, "D N"], bias: Tensor | None) -> TensorFn:
    """Return x W + b as a function of x."""
    return partial(torch.mm, mat2=weight) if bias is None else partial(torch.addmm, bias, mat2=weight)


def fuse_linear(
    weights_and_biases: Sequence[tuple[Tensor, Tensor | None]], *, should_copy: bool, should_pack: bool
) -> list[TensorFn]:
    """Return functions for linear layers that share an input.

    With `should_copy` they become one function of a transposed copy, or for batches (`should_pack`) of a packed one.
    Without, the weights are used in place: as one function if they are adjacent in memory, as in a loaded checkpoint,
    but not for batches, where MKL is faster on separate weights.
    """
    weights = [w for w, _ in weights_and_biases]
    weight = stack_rows(weights) if should_copy or not should_pack else None
    if weight is None:
        if not should_copy:
            return [build_linear(w.t(), b) for w, b in weights_and_biases]
        weight = torch.cat(weights)
    bias = None
    if any(b is not None for _, b in weights_and_biases):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in weights_and_biases])
    if not should_copy:
        return [build_linear(weight.t(), bias)]
    is_large = weight.numel() >= MIN_PACKED_NUMEL and weight.dtype == torch.float32
    if should_pack and is_large and has_onednn_packing(weight.device):
        packed = ONEDNN._reorder_linear_weight(weight, None)
        linear = ONEDNN._linear_pointwise.default
        return [lambda x: linear(x, packed, bias, "none", [], "")]
    return [build_linear(weight.t().contiguous(), bias)]


class StaticCacheDecoder:
    """A preallocated KV cache, which continues that of prefill by at most `steps`, and the step that fills it."""

    def __init__(self, weights: FusedWeights, cache: KVCache, steps: int) -> None:
        config = weights.config
        self.weights, self.remaining_steps = weights, steps
        self.head_shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.windows = tuple(dict.fromkeys(config.sliding_windows))
        self.allocate(cache)

    def allocate(self, cache: KVCache) -> None:
        """Allocate a buffer, copy `cache` into it, and precompute positions and masks of the steps it has room for."""
        config = self.weights.config
        _, G, E = self.head_shape
        S = cache.S
        new_slots = min(self.remaining_steps, max(MIN_NEW_SLOTS, S))
        self.first_new_slot = S
        self.num_filled: int = S
        self.capacity = S + new_slots
        self.buffer = cache.keys[0].new_empty(2 * len(cache.keys), cache.B, G, self.capacity, E)
        for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
            self.buffer[2 * i, :, :, :S] = k
            self.buffer[2 * i + 1, :, :, :S] = v
        valid = torch.ones(cache.B, new_slots, dtype=torch.bool, device=self.buffer.device)
        positions = cache.continue_positions(valid)
        self.positions = torch.cat([cache.positions, positions], 1)
        self.valid = torch.cat([cache.valid, valid], 1)
        self.all_valid = bool(cache.valid.all())
        self.valid_count = self.valid.cumsum(1)
        no_bias = torch.zeros_like(self.valid, dtype=self.buffer.dtype)
        self.invalid_bias = no_bias.masked_fill(~self.valid, -math.inf)[:, None, None]
        self.prefix = cache.prefix
        if self.weights.position_embedding is not None:
            self.position_vectors = F.embedding(positions.t() + config.position_offset, self.weights.position_embedding)
        if config.rope is not None:
            p = positions.t().reshape(-1)  # each step is the last position of its row
            tables = build_rope_tables(config.rope, p, 1 + p, E, self.buffer.dtype)
            self.cos, self.sin = (x.view(new_slots, cache.B, 1, E) for x in tables)

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Read one id per row; return the hidden states after the final norm, and their logits."""
        if self.num_filled == self.capacity:
            self.allocate(self.to_cache())
        H, G, E = self.head_shape
        B, R = len(ids), H // G
        t = self.num_filled - self.first_new_slot
        x = F.embedding(ids, self.weights.token_embedding)
        if self.weights.position_embedding is not None:
            x = x + self.position_vectors[t]
        slots = self.buffer.select(3, self.num_filled).unbind(0)
        rotation = None if self.weights.config.rope is None else self.rotation_matrix(t)
        windows = {window: self.attention_window(window) for window in self.windows}
        for i, layer in enumerate(self.weights.layers):
            z = layer.qkv(layer.norm1(x)).view(B, H + 2 * G, E).to(x.dtype)  # int8 layers return bfloat16
            qk, v = z.split_with_sizes([H + G, G], 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat([layer.q_norm(z[:, :H]), layer.k_norm(z[:, H : H + G])], 1)
            if rotation is not None and i not in self.weights.config.nope_layers:
                qk = torch.bmm(qk, rotation)
            q, k = qk.split_with_sizes([H, G], 1)
            slots[2 * i].copy_(k)
            slots[2 * i + 1].copy_(v)
            kv, mask = windows[layer.window]
            q = q.view(B, G, R, E)
            if self.prefix is None:
                c = F.scaled_dot_product_attention(q, kv[2 * i], kv[2 * i + 1], mask, scale=layer.scale)
            else:
                c = attend_by_head(q, kv[2 * i], kv[2 * i + 1], mask, layer.scale, self.prefix.heads(i))
            x = layer.add_o(x, c.reshape(B, H * E))  # on a GPU, attention may return another memory layout
            x = layer.add_down(x, layer.mlp_hidden(layer.norm2(x)))
        self.num_filled += 1
        self.remaining_steps -= 1
        hidden = self.weights.final_norm(x)
        return hidden, self.weights.lm_head(hidden).to(x.dtype)

    def rotation_matrix(self, t: int) -> Float[Tensor, "B E E"]:
        """Return RoPE of step t as a matrix: one product per layer is faster than products with cos and sin."""
        E = self.cos.shape[-1]
        identity = torch.eye(E, dtype=self.cos.dtype, device=self.cos.device)
        return torch.addcmul(identity * self.cos[t], identity.roll(E // 2, 0), self.sin[t])

    def attention_window(self, window: int | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the visible keys and values, alternating by layer, and their mask if one is needed."""
        end = self.num_filled + 1
        if self.all_valid:
            start = 0 if window is None else max(0, end - window)
            return self.buffer[:, :, :, start:end].unbind(0), None
        mask = self.invalid_bias[..., :end]
        if window is not None:
            is_outside = self.valid_count[:, self.num_filled, None] - self.valid_count[:, :end] >= window
            mask = mask.masked_fill(is_outside[:, None, None], -math.inf)
        return self.buffer[:, :, :, :end].unbind(0), mask

    def to_cache(self) -> KVCache:
        filled = self.buffer[:, :, :, : self.num_filled].unbind(0)
        return KVCache(
            filled[::2],
            filled[1::2],
            self.positions[:, : self.num_filled],
            self.valid[:, : self.num_filled],
            self.prefix,
        )

    def select_rows(self, rows: list[int]) -> None:
        self.allocate(self.to_cache().select_rows(rows))


def build_rope_tables(
    config: rope.RopeConfig, positions: Int[Tensor, " n"], longest: Int[Tensor, " n"], E: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "n 1 E"], Float[Tensor, "n 1 E"]]:
    """Return cos, and sin with its first half negated, as in rotate_half; `longest` is the length of each row."""
    omega, a = ROPE_SCALINGS[config.kind](config, E, longest)
    cos, sin = rope.cos_sin_tables(positions[:, None], omega, a, dtype)
    return cos.view(-1, 1, E), torch.cat([-sin[..., : E // 2], sin[..., E // 2 :]], -1).view(-1, 1, E)
