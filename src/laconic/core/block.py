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

from laconic.core import attention, rope
from laconic.core.attention import Note, Sight, ignore, kept, wide
from laconic.core.families import NAMES, DecoderConfig


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*rows D"]:
    """Eq. C1: u (mean(u^2) + eps)^(-1/2) in wide precision, cast back to x's type, and only then times weight."""
    if x.dtype == wide(x.dtype) and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    u = x.to(wide(x.dtype))
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


def gated_mid(gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"], act: str) -> Float[Tensor, "*rows F"]:
    """Eq. C17: act(W_g y) * W_u y, which W_d reads."""
    return ACTIVATIONS[act](gate) * up


def plain_mid(up: Float[Tensor, "*rows F"], act: str) -> Float[Tensor, "*rows F"]:
    """Eq. C18: act(W_1 y + b_1), which W_2 reads."""
    return ACTIVATIONS[act](up)


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


def norm(config: DecoderConfig) -> nn.Module:
    """The norm of a family over the width D."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.hidden_size, config.eps)


class Branch(nn.Module):
    """A name in the module tree that only holds others."""


def plant(root: nn.Module, path: str | None, module: nn.Module) -> None:
    """Puts `module` at a dotted path, growing branches on the way; without a path the family has no such part."""
    if path is None:
        return
    *way, last = path.split(".")
    for name in way:
        if not hasattr(root, name):
            root.add_module(name, Branch())
        root = root.get_submodule(name)
    root.add_module(last, module)


def rows(n: int, width: int) -> nn.Embedding:
    """A table whose rows are not drawn: on meta, drawing them imports what takes torch a second."""
    return nn.Embedding(n, width, _weight=torch.empty(n, width))


class Frame(NamedTuple):
    """What all blocks of one forward pass share: the table of angles, the masks per layer, the attention back end."""

    cos: Float[Tensor, "#B 1 T E"] | None
    sin: Float[Tensor, "#B 1 T E"] | None
    sights: tuple[Sight, ...]
    backend: str


Past = tuple[Float[Tensor, "B G S E"], Float[Tensor, "B G S E"]]
ATTENTION_STAGES = frozenset({"scores", "scores_seen", "probs"})


def rotated(x: Float[Tensor, "B N T E"], frame: Frame) -> Float[Tensor, "B N T E"]:
    """Queries or keys after rotation, as they are where a family has none."""
    return x if frame.cos is None or frame.sin is None else rope.rotate(x, frame.cos, frame.sin)


def joined(x: Float[Tensor, "B G T E"], past: Past | None, which: int) -> Float[Tensor, "B G P E"]:
    """Keys (0) or values (1) of the past, then the new ones."""
    return x if past is None else torch.cat([past[which], x], 2)


class Block(nn.Module):
    """Layer `index`, its parts under the names of the family's checkpoint.

    Parts are looked up in the tree on every call, so that a replacement (an adapter, another MLP) is what runs.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config, self.index, self.names = config, index, NAMES[config.family]
        D, H, G, E, F = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
        )
        names = self.names
        plant(self, names.norm1, norm(config))
        heads = {names.qkv: H + 2 * G} if names.qkv else {names.q: H, names.k: G, names.v: G}
        for path, count in heads.items():
            plant(self, path, nn.Linear(D, count * E, config.qkv_bias))
        if config.qk_norm:
            plant(self, names.q_norm, RMSNorm(E, config.eps))
            plant(self, names.k_norm, RMSNorm(E, config.eps))
        plant(self, names.o, nn.Linear(H * E, D, config.o_bias))
        plant(self, names.norm2, norm(config))
        if config.gated:
            plant(self, names.gate, nn.Linear(D, F, config.mlp_bias))
        plant(self, names.up, nn.Linear(D, F, config.mlp_bias))
        plant(self, names.down, nn.Linear(F, D, config.mlp_bias))

    def part(self, role: str) -> nn.Module:
        """The module that plays a role (`norm1`, `q`, `down`, …) now."""
        module: nn.Module = self
        for name in getattr(self.names, role).split("."):  # as get_submodule does, in a third of its time
            module = getattr(module, name)
        return module

    def project(self, y: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. C9: queries [B, H, T, E], keys and values [B, G, T, E], each with its own number of heads."""
        H, G, E = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        if self.names.qkv:
            q, k, v = self.part("qkv")(y).split([H * E, G * E, G * E], -1)
        else:
            q, k, v = self.part("q")(y), self.part("k")(y), self.part("v")(y)
        return attention.split_heads(q, H), attention.split_heads(k, G), attention.split_heads(v, G)

    def normed(self, x: Float[Tensor, "B N T E"], role: str) -> Float[Tensor, "B N T E"]:
        """Queries or keys after Qwen3's norm (`role` q_norm or k_norm), as they are in the other families."""
        if not self.config.qk_norm:
            return x
        weight = self.part(role).weight
        assert isinstance(weight, Tensor)
        return head_norm(x, weight, self.config.eps)

    def heads(self, y: Float[Tensor, "B T D"], note: Note = ignore) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as they enter rotation."""
        q, k, v = self.project(y)
        if self.config.qk_norm:
            q, k = note("q_raw", q), note("k_raw", k)
        return note("q", self.normed(q, "q_norm")), note("k", self.normed(k, "k_norm")), note("v", v)

    def attention(
        self, y: Float[Tensor, "B T D"], past: Past | None, frame: Frame, note: Note = ignore, wants: bool = False
    ) -> tuple[Float[Tensor, "B T D"], Tensor, Tensor]:
        """Attention of one layer on its past: the output, and the keys and values of past and present."""
        q, k, v = self.heads(y, note)
        q, k = note("q_rot", rotated(q, frame)), note("k_rot", rotated(k, frame))
        k, v = note("k_cache", joined(k, past, 0)), note("v_cache", joined(v, past, 1))
        return note("attn_out", self.output(self.context(q, k, v, frame, note, wants))), k, v

    def context(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, note: Note, wants: bool) -> Tensor:
        """What the heads gather, by the back end asked for; `wants` makes the eager stages beside it."""
        scale, sight = self.config.score_scale[self.index], frame.sights[self.index]
        if wants:
            attention.eager(q, k, v, scale, sight, 0.0, note)
        dropout = self.config.dropout.attention if self.training else 0.0
        return note("context", attention.BACKENDS[frame.backend](q, k, v, scale, sight, dropout))

    def output(self, c: Float[Tensor, "B T HE"]) -> Float[Tensor, "B T D"]:
        """Eq. C16: c W_o^T + b_o."""
        return self.part("o")(c)

    def feed(self, y: Float[Tensor, "B T D"], note: Note = ignore) -> Float[Tensor, "B T D"]:
        """C17 or C18 with the output map, or whatever module stands in the place of the MLP."""
        mlp = self._modules.get("mlp")
        if mlp is not None and not isinstance(mlp, Branch):
            return note("mlp_out", mlp(y))
        gate = note("gate", self.part("gate")(y)) if self.config.gated else None
        mid = self.mid(note("up", self.part("up")(y)), gate)
        return note("mlp_out", self.part("down")(note("mid", mid)))

    def mid(self, up: Float[Tensor, "B T F"], gate: Float[Tensor, "B T F"] | None = None) -> Float[Tensor, "B T F"]:
        """What the output map of the MLP reads, from up and, in gated families, gate."""
        return plain_mid(up, self.config.act) if gate is None else gated_mid(gate, up, self.config.act)

    def forward(
        self, x: Float[Tensor, "B T D"], past: Past | None, frame: Frame, want: frozenset[str] = frozenset()
    ) -> tuple[Float[Tensor, "B T D"], Tensor, Tensor, dict[str, Tensor]]:
        """Eq. C19: r = x + attention(norm1(x)); y = r + MLP(norm2(r)); with keys, values and the stages wanted."""
        stages: dict[str, Tensor] = {}
        note = partial(kept, stages, self.index, want) if want else ignore
        dropout = self.config.dropout.residual if self.training else 0.0
        drop: Callable[[Tensor], Tensor] = (lambda z: F.dropout(z, dropout)) if dropout else (lambda z: z)
        out, k, v = self.attention(
            note("norm1", self.part("norm1")(x)), past, frame, note, not want.isdisjoint(ATTENTION_STAGES)
        )
        r = note("resid1", x + drop(out))
        y = note("resid2", r + drop(self.feed(note("norm2", self.part("norm2")(r)), note)))
        return y, k, v, stages
