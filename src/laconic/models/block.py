"""One block of the decoder: norms, feed-forward maps, and the module that composes them with attention.

RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450), gated units (arXiv:2002.05202), GELU (arXiv:1606.08415).

Symbols: x residual stream; y its norm; u x in wide precision; W maps; act activation.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laconic.models import attention, rope
from laconic.models.attention import AttentionMask, CaptureFn, accumulation_dtype, capture, capture_nothing
from laconic.models.config import WEIGHT_NAMES, DecoderConfig


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*rows D"]:
    """Eq. C1: u (mean(u^2) + eps)^(-1/2) in wide precision, cast back to x's type, and only then times weight."""
    if x.dtype == accumulation_dtype(x.dtype) and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    u = x.to(accumulation_dtype(x.dtype))
    return weight * (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], bias: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "*rows D"]:
    """Eq. C2: (x - mean) / sqrt(var + eps) weight + bias, var with 1/D."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def head_norm(x: Float[Tensor, "B N T E"], weight: Float[Tensor, " E"], eps: float) -> Float[Tensor, "B N T E"]:
    """Eq. C10: RMSNorm over the width of a head, one weight for all heads, before rotation."""
    return rms_norm(x, weight, eps)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def gated_mlp_hidden(
    gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"], activation: str
) -> Float[Tensor, "*rows F"]:
    """Eq. C17: act(W_g y) * W_u y, which W_d reads."""
    return ACTIVATIONS[activation](gate) * up


def mlp_hidden(up: Float[Tensor, "*rows F"], activation: str) -> Float[Tensor, "*rows F"]:
    """Eq. C18: act(W_1 y + b_1), which W_2 reads."""
    return ACTIVATIONS[activation](up)


class RMSNorm(nn.Module):
    """Eq. C1 with its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Eq. C2 with its weight and bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(config: DecoderConfig) -> nn.Module:
    """The norm of a family over the width D."""
    return (RMSNorm if config.norm_type == "rms" else LayerNorm)(config.hidden_size, config.norm_eps)


class Namespace(nn.Module):
    """A name in the module tree that only holds others."""


def add_submodule(root: nn.Module, path: str | None, module: nn.Module) -> None:
    """Puts `module` at a dotted path, growing branches on the way; without a path the family has no such part."""
    if path is None:
        return
    *way, last = path.split(".")
    for name in way:
        if not hasattr(root, name):
            root.add_module(name, Namespace())
        root = root.get_submodule(name)
    root.add_module(last, module)


def empty_embedding(n: int, width: int) -> nn.Embedding:
    """A table whose rows are not drawn: on meta, drawing them imports what takes torch a second."""
    return nn.Embedding(n, width, _weight=torch.empty(n, width))


class ForwardContext(NamedTuple):
    """What all blocks of one forward pass share: the table of angles, the masks per layer, the attention back end."""

    cos: Float[Tensor, "#B 1 T E"] | None
    sin: Float[Tensor, "#B 1 T E"] | None
    masks: tuple[AttentionMask, ...]
    backend: str


PastKeyValues = tuple[Float[Tensor, "B G S E"], Float[Tensor, "B G S E"]]
EAGER_ACTIVATIONS = frozenset({"scores", "scores_seen", "probs"})


def apply_rope(x: Float[Tensor, "B N T E"], context: ForwardContext) -> Float[Tensor, "B N T E"]:
    """Queries or keys after rotation, as they are where a family has none."""
    return x if context.cos is None or context.sin is None else rope.rotate_pairs(x, context.cos, context.sin)


def concat_past(x: Float[Tensor, "B G T E"], past: PastKeyValues | None, index: int) -> Float[Tensor, "B G P E"]:
    """Keys (0) or values (1) of the past, then the new ones."""
    return x if past is None else torch.cat([past[index], x], 2)


class Block(nn.Module):
    """Layer `index`, its parts under the names of the family's checkpoint.

    Parts are looked up in the tree on every call, so that a replacement (an adapter, another MLP) is what runs.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config, self.index, self.weight_names = config, index, WEIGHT_NAMES[config.family]
        D, H, G, E, F = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
        )
        names = self.weight_names
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
        """The module that plays a role (`norm1`, `q`, `down`, …) now."""
        module: nn.Module = self
        for name in getattr(self.weight_names, role).split("."):  # as get_submodule does, in a third of its time
            module = getattr(module, name)
        return module

    def project_qkv(self, y: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. C9: queries [B, H, T, E], keys and values [B, G, T, E], each with its own number of heads."""
        H, G, E = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        if self.weight_names.qkv:
            q, k, v = self.submodule("qkv")(y).split([H * E, G * E, G * E], -1)
        else:
            q, k, v = self.submodule("q")(y), self.submodule("k")(y), self.submodule("v")(y)
        return attention.split_heads(q, H), attention.split_heads(k, G), attention.split_heads(v, G)

    def normalize_heads(self, x: Float[Tensor, "B N T E"], role: str) -> Float[Tensor, "B N T E"]:
        """Queries or keys after Qwen3's norm (`role` q_norm or k_norm), as they are in the other families."""
        if not self.config.qk_norm:
            return x
        weight = self.submodule(role).weight
        assert isinstance(weight, Tensor)
        return head_norm(x, weight, self.config.norm_eps)

    def qkv_heads(
        self, y: Float[Tensor, "B T D"], capture: CaptureFn = capture_nothing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as they enter rotation."""
        q, k, v = self.project_qkv(y)
        if self.config.qk_norm:
            q, k = capture("q_raw", q), capture("k_raw", k)
        return (
            capture("q", self.normalize_heads(q, "q_norm")),
            capture("k", self.normalize_heads(k, "k_norm")),
            capture("v", v),
        )

    def self_attention(
        self,
        y: Float[Tensor, "B T D"],
        past: PastKeyValues | None,
        context: ForwardContext,
        capture: CaptureFn = capture_nothing,
        capture_scores: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], Tensor, Tensor]:
        """Attention of one layer on its past: the output, and the keys and values of past and present."""
        q, k, v = self.qkv_heads(y, capture)
        q, k = capture("q_rot", apply_rope(q, context)), capture("k_rot", apply_rope(k, context))
        k, v = capture("k_cache", concat_past(k, past, 0)), capture("v_cache", concat_past(v, past, 1))
        return capture("attn_out", self.project_output(self.attend(q, k, v, context, capture, capture_scores))), k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, capture: CaptureFn, capture_scores: bool
    ) -> Tensor:
        """What the heads gather, by the back end asked for; `wants` makes the eager stages beside it."""
        scale, sight = self.config.attention_scales[self.index], context.masks[self.index]
        if capture_scores:
            attention.eager_attention(q, k, v, scale, sight, 0.0, capture)
        dropout = self.config.dropout.attention if self.training else 0.0
        return capture("context", attention.ATTENTION_BACKENDS[context.backend](q, k, v, scale, sight, dropout))

    def project_output(self, c: Float[Tensor, "B T HE"]) -> Float[Tensor, "B T D"]:
        """Eq. C16: c W_o^T + b_o."""
        return self.submodule("o")(c)

    def mlp_forward(self, y: Float[Tensor, "B T D"], capture: CaptureFn = capture_nothing) -> Float[Tensor, "B T D"]:
        """C17 or C18 with the output map, or whatever module stands in the place of the MLP."""
        mlp = self._modules.get("mlp")
        if mlp is not None and not isinstance(mlp, Namespace):
            return capture("mlp_out", mlp(y))
        gate = capture("gate", self.submodule("gate")(y)) if self.config.gated_mlp else None
        mid = self.mlp_hidden(capture("up", self.submodule("up")(y)), gate)
        return capture("mlp_out", self.submodule("down")(capture("mid", mid)))

    def mlp_hidden(
        self, up: Float[Tensor, "B T F"], gate: Float[Tensor, "B T F"] | None = None
    ) -> Float[Tensor, "B T F"]:
        """What the output map of the MLP reads, from up and, in gated families, gate."""
        return (
            mlp_hidden(up, self.config.activation)
            if gate is None
            else gated_mlp_hidden(gate, up, self.config.activation)
        )

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: PastKeyValues | None,
        context: ForwardContext,
        capture_names: frozenset[str] = frozenset(),
    ) -> tuple[Float[Tensor, "B T D"], Tensor, Tensor, dict[str, Tensor]]:
        """Eq. C19: r = x + attention(norm1(x)); y = r + MLP(norm2(r)); with keys, values and the stages wanted."""
        stages: dict[str, Tensor] = {}
        note = partial(capture, stages, self.index, capture_names) if capture_names else capture_nothing
        dropout = self.config.dropout.residual if self.training else 0.0
        drop: Callable[[Tensor], Tensor] = (lambda z: F.dropout(z, dropout)) if dropout else (lambda z: z)
        out, k, v = self.self_attention(
            note("norm1", self.submodule("norm1")(x)),
            past,
            context,
            note,
            not capture_names.isdisjoint(EAGER_ACTIVATIONS),
        )
        r = note("resid1", x + drop(out))
        y = note("resid2", r + drop(self.mlp_forward(note("norm2", self.submodule("norm2")(r)), note)))
        return y, k, v, stages
