"""Transformer block: norms, gated and plain MLPs, and the module that combines them with attention.

RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450), gated units (arXiv:2002.05202).

Symbols: x residual stream; y its norm; u x in accumulation precision; W weight matrices; act activation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.models import attention, rope
from laconic.models.attention import AttentionMask, CaptureFn, accumulation_dtype, capture_nothing
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import Namespace, add_submodule
from laconic.models.kv_prefix import KVPrefix
from laconic.models.ops import attention_backends
from laconic.models.ops.activation_functions import ACTIVATIONS
from laconic.models.ops.linear import call_linear
from laconic.models.ops.prefix_attention import attend_with_prefix
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from laconic.models.ops.unpadding import RealTokens


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*rows D"]:
    """Eq. C1: u (mean(u^2) + eps)^(-1/2) in accumulation precision, cast to x's dtype, then times weight."""
    if x.dtype == accumulation_dtype(x.dtype) and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    u = x.to(accumulation_dtype(x.dtype))
    return weight * (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(x: Float[Tensor, "*rows D"], weight: Tensor, bias: Tensor, eps: float) -> Float[Tensor, "*rows D"]:
    """Eq. C2: (x - mean) / sqrt(var + eps) weight + bias, with the variance over D (not D - 1)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def gated_mlp_hidden(gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"], activation: str) -> Tensor:
    """Eq. C17: act(W_g y) * W_u y, the input of W_d."""
    gate = ACTIVATIONS[activation](gate)
    return gate * up if torch.is_grad_enabled() else gate.mul_(up)  # a third buffer of this width takes time


def plain_mlp_hidden(up: Float[Tensor, "*rows F"], activation: str) -> Float[Tensor, "*rows F"]:
    """Eq. C18: act(W_1 y + b_1), the input of W_2."""
    return ACTIVATIONS[activation](up)


class RMSNorm(nn.Module):
    """RMSNorm, Eq. C1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm, Eq. C2."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


def build_norm(config: DecoderConfig) -> nn.Module:
    return (RMSNorm if config.norm_type == "rms" else LayerNorm)(config.hidden_size, config.norm_eps)


class ForwardContext(NamedTuple):
    """Inputs shared by all blocks of one forward pass: RoPE tables, masks per layer, attention backend, KV prefix.

    With `real_tokens`, blocks read and return [1, N, D]. With `num_outputs`, the last block returns so many positions.
    """

    cos: Float[Tensor, "#B 1 T E"] | None
    sin: Float[Tensor, "#B 1 T E"] | None
    masks: tuple[AttentionMask, ...]
    backend: str
    prefix: KVPrefix | None = None
    real_tokens: RealTokens | None = None
    num_outputs: int | None = None


def build_context(
    config: DecoderConfig,
    position_ids: Int[Tensor, "#B P"],
    valid: Bool[Tensor, "B P"],
    S: int,
    attention_bias: Tensor | None,
    dtype: torch.dtype,
    *,
    backend: str,
    all_valid: bool,
    needs_visible: bool,
) -> ForwardContext:
    """Compute the RoPE tables of the new positions and each layer's mask, once per pass.

    `position_ids` has one row if all rows have the same positions, so that their tables are computed once. With
    `needs_visible` the masks have `AttentionMask.visible` whatever the backend.
    """
    cos = sin = None
    if config.rope is not None:
        longest = 1 + position_ids.masked_fill(~valid[: len(position_ids)], -1).amax(1)
        omega, a = ROPE_SCALINGS[config.rope.kind](config.rope, config.head_dim, longest)
        cos, sin = rope.cos_sin_tables(position_ids[:, S:], omega, a, dtype)
    sdpa_only = backend == "sdpa" and not needs_visible
    masks = {
        window: attention.build_attention_mask(
            valid, S, all_valid=all_valid, window=window, bias=attention_bias, sdpa_only=sdpa_only, dtype=dtype
        )
        for window in dict.fromkeys(config.sliding_windows)
    }
    return ForwardContext(cos, sin, tuple(masks[window] for window in config.sliding_windows), backend)


PastKeyValues = tuple[Float[Tensor, "rows G S E"], Float[Tensor, "rows G S E"]]  # tokens may be packed into one row
EAGER_ACTIVATIONS = frozenset({"scores", "scores_seen", "probs"})  # only the eager backend computes these


def concat_past(x: Float[Tensor, "B G T E"], past: PastKeyValues | None, index: int) -> Float[Tensor, "B G P E"]:
    """Concatenate cached keys (index 0) or values (index 1) with the new ones."""
    return x if past is None else torch.cat([past[index], x], 2)


class Block(nn.Module):
    """Decoder layer `index`, with submodules named as in the family's checkpoints.

    Submodules are looked up on every call, so that a replacement (an adapter, another MLP) takes effect.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        names = self.weight_names = WEIGHT_NAMES[config.family]
        D, F, E = config.hidden_size, config.intermediate_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        add_submodule(self, names.norm1, build_norm(config))
        heads = {names.qkv: H + 2 * G} if names.qkv else {names.q: H, names.k: G, names.v: G}
        for path, count in heads.items():
            add_submodule(self, path, nn.Linear(D, count * E, config.qkv_bias))
        if config.qk_norm:
            add_submodule(self, names.q_norm, RMSNorm(E, config.norm_eps))
            add_submodule(self, names.k_norm, RMSNorm(E, config.norm_eps))
        add_submodule(self, names.o, nn.Linear(H * E, D, config.o_bias))
        add_submodule(self, names.norm2, build_norm(config))
        if config.gated_mlp:
            add_submodule(self, names.gate, nn.Linear(D, F, config.mlp_bias))
        add_submodule(self, names.up, nn.Linear(D, F, config.mlp_bias))
        add_submodule(self, names.down, nn.Linear(F, D, config.mlp_bias))

    def submodule(self, role: str) -> nn.Module:
        """Return the current submodule for a role of WeightNames: `norm1`, `q`, `down`, …"""
        module: nn.Module = self
        for name in getattr(self.weight_names, role).split("."):  # three times as fast as get_submodule
            module = getattr(module, name)
        return module

    def project_qkv(self, y: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. C9: queries [B, H, T, E], keys and values [B, G, T, E]."""
        H, G, E = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        if self.weight_names.qkv:
            q, k, v = cast(Any, call_linear(self.submodule("qkv"), y)).split([H * E, G * E, G * E], -1)
        else:
            q, k, v = (call_linear(self.submodule(role), y) for role in ("q", "k", "v"))
        return attention.split_heads(q, H), attention.split_heads(k, G), attention.split_heads(v, G)

    def normalize_heads(self, x: Float[Tensor, "B N T E"], role: str) -> Float[Tensor, "B N T E"]:
        """Eq. C10: apply Qwen3's norm (`role` "q_norm" or "k_norm") over the head size; other families have none."""
        return self.submodule(role)(x) if self.config.qk_norm else x

    def qkv_heads(
        self, y: Float[Tensor, "B T D"], capture: CaptureFn = capture_nothing
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project_qkv(y)
        if self.config.qk_norm:
            q, k = capture("q_raw", q), capture("k_raw", k)
        q, k = self.normalize_heads(q, "q_norm"), self.normalize_heads(k, "k_norm")
        return capture("q", q), capture("k", k), capture("v", v)

    def apply_rope(self, x: Float[Tensor, "B N T E"], context: ForwardContext) -> Float[Tensor, "B N T E"]:
        """Rotate queries or keys; return them unchanged in layers without RoPE."""
        if context.cos is None or context.sin is None or self.index in self.config.nope_layers:
            return x
        return rope.rotate_pairs(x, context.cos, context.sin)

    def self_attention(
        self,
        y: Float[Tensor, "B T D"],
        past: PastKeyValues | None,
        context: ForwardContext,
        capture: CaptureFn = capture_nothing,
        capture_scores: bool = False,
    ) -> tuple[Float[Tensor, "B n D"], Tensor, Tensor]:
        """Return the attention output, and the keys and values including the past ones."""
        q, k, v = self.qkv_heads(y, capture)
        if context.real_tokens:
            q, k, v = map(context.real_tokens.scatter_heads, (q, k, v))
        q = capture("q_rot", self.apply_rope(q, context))
        k = capture("k_rot", self.apply_rope(k, context))
        k = capture("k_cache", concat_past(k, past, 0))
        v = capture("v_cache", concat_past(v, past, 1))
        if context.num_outputs is not None and self.index == self.config.num_hidden_layers - 1:
            q = q[:, :, -context.num_outputs :]
            mask = context.masks[-1].of_last_queries(q.shape[2], k.shape[2], q.device)
            context = context._replace(masks=(*context.masks[:-1], mask))
        c = self.attend(q, k, v, context, capture, capture_scores)
        c = context.real_tokens.gather(c) if context.real_tokens else c
        return capture("attn_out", self.project_output(c)), k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, capture: CaptureFn, capture_scores: bool
    ) -> Float[Tensor, "B T HE"]:
        """Run the attention backend; with `capture_scores` also the eager one, for the activations only it has."""
        scale = self.config.attention_scales[self.index]
        mask = context.masks[self.index]
        backend = attention_backends.ATTENTION_BACKENDS[context.backend]
        dropout = self.config.dropout.attention if self.training else 0.0
        if context.prefix is not None:
            if capture_scores:
                raise ValueError("scores and probs cannot be captured after a KV prefix, whose heads differ in length")
            c = attend_with_prefix(backend, q, k, v, scale, mask, dropout, context.prefix.heads(self.index))
            return capture("context", c)
        if capture_scores:
            attention_backends.eager_attention(q, k, v, scale, mask, 0.0, capture)
        return capture("context", backend(q, k, v, scale, mask, dropout))

    def project_output(self, c: Float[Tensor, "B T HE"]) -> Float[Tensor, "B T D"]:
        """Eq. C16: c W_o^T + b_o."""
        return call_linear(self.submodule("o"), c)

    def mlp_forward(self, y: Float[Tensor, "B T D"], capture: CaptureFn = capture_nothing) -> Float[Tensor, "B T D"]:
        """Apply the MLP (equations C17, C18) with its output projection, or the module that replaces it."""
        mlp = self._modules.get("mlp")
        if mlp is not None and not isinstance(mlp, Namespace):
            return capture("mlp_out", mlp(y))
        gate = capture("gate", call_linear(self.submodule("gate"), y)) if self.config.gated_mlp else None
        hidden = self.mlp_hidden(capture("up", call_linear(self.submodule("up"), y)), gate)
        return capture("mlp_out", call_linear(self.submodule("down"), capture("mid", hidden)))

    def mlp_hidden(
        self, up: Float[Tensor, "B T F"], gate: Float[Tensor, "B T F"] | None = None
    ) -> Float[Tensor, "B T F"]:
        """Compute the input of the output projection: gated (C17), or not (C18)."""
        activation = self.config.activation
        return plain_mlp_hidden(up, activation) if gate is None else gated_mlp_hidden(gate, up, activation)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: PastKeyValues | None,
        context: ForwardContext,
        capture_names: frozenset[str] = frozenset(),
    ) -> tuple[Float[Tensor, "B n D"], Tensor, Tensor, dict[str, Tensor]]:
        """Eq. C19: r = x + attention(norm1(x)); y = r + MLP(norm2(r)).

        Returns:
            y, keys and values including the past ones, and the captured activations by name.
        """
        activations: dict[str, Tensor] = {}
        capture = capture_nothing
        if capture_names:
            capture = partial(attention.capture, activations, self.index, capture_names)
        dropout = self.config.dropout.residual if self.training else 0.0
        drop: Callable[[Tensor], Tensor] = (lambda z: F.dropout(z, dropout)) if dropout else (lambda z: z)
        capture_scores = not capture_names.isdisjoint(EAGER_ACTIVATIONS)
        y1 = capture("norm1", self.submodule("norm1")(x))
        out, k, v = self.self_attention(y1, past, context, capture, capture_scores)
        r = capture("resid1", (x if context.num_outputs is None else x[:, -out.shape[1] :]) + drop(out))
        y2 = capture("norm2", self.submodule("norm2")(r))
        return capture("resid2", r + drop(self.mlp_forward(y2, capture))), k, v, activations
