"""What a model of transformers computes, noted while it runs: hooks on its modules, a tap on its attention.

Shapes: B rows, T new slots, S slots held, P = S + T, H query heads, G key heads, E per head, D width.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from laconic.verify.traces import Case, Made


class Places(NamedTuple):
    """Where a model of transformers keeps what; from `norm1` on relative to a layer."""

    layers: str
    final_norm: str
    norm1: str
    norm2: str
    attention: str
    queries: str
    keys: str
    values: str
    output: str
    gate: str
    up: str
    down: str
    fused: bool = False


LLAMA = Places(
    "model.layers", "model.norm", "input_layernorm", "post_attention_layernorm", "self_attn", "q_proj", "k_proj",
    "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
PLACES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt2": Places(
        "transformer.h", "transformer.ln_f", "ln_1", "ln_2", "attn", "c_attn", "", "", "c_proj", "", "mlp.c_fc",
        "mlp.c_proj", True,
    ),
    "opt": Places(
        "model.decoder.layers", "model.decoder.final_layer_norm", "self_attn_layer_norm", "final_layer_norm",
        "self_attn", "q_proj", "k_proj", "v_proj", "out_proj", "", "fc1", "fc2",
    ),
}  # fmt: skip

TAPS: "WeakKeyDictionary[nn.Module, Callable[..., Any]]" = WeakKeyDictionary()
"""Attention module -> who wants to know what it computes."""


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: Any) -> Any:
    """The model's own eager attention, after the tap of the module has seen (and perhaps biased) what goes in."""
    act = TAPS.get(module) or eager_of(module)
    return act(module, query, key, value, mask, **told)


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention that the model's own file defines."""
    return sys.modules[type(module).__module__].eager_attention_forward


def heads(x: Tensor, E: int) -> Tensor:
    """[B, T, N E] -> [B, N, T, E]."""
    return x.unflatten(-1, (-1, E)).transpose(1, 2)


def grown(k: Tensor, H: int) -> Tensor:
    """[B, G, P, E] -> [B, H, P, E], each head for its neighbours."""
    B, G, P, E = k.shape
    return k[:, :, None].expand(B, G, H // G, P, E).reshape(B, H, P, E)


class Record:
    """Hooks on one model while one case runs; layers are handed over as they are done."""

    def __init__(self, model: Any, case: Case, give: Callable[[Made], None]) -> None:
        self.model, self.case, self.give = model, case, give
        self.places = PLACES[model.config.model_type]
        self.layers: list[Any] = list(model.get_submodule(self.places.layers))
        self.made, self.last, self.T, self.S = Made(0, -1), Made(0, -1), 0, 0
        self.handles: list[Any] = []

    def begin(self, piece: int, S: int, T: int) -> None:
        """The next pass reads this piece."""
        self.made, self.S, self.T = Made(piece, -1), S, T

    def note(self, name: str, value: Tensor) -> None:
        """A stage of the layer that runs; OPT flattens rows and slots in its MLP."""
        B = self.case.shape[0]
        self.made.stages[name] = value if value.shape[0] == B and value.ndim > 2 else value.view(B, self.T, -1)

    def __enter__(self) -> None:
        at = self.places
        for l, layer in enumerate(self.layers):
            module = layer.get_submodule(at.attention)
            TAPS[module] = self.tap
            self.before(layer, self.start(l))
            for stage, name in (
                ("norm1", at.norm1), ("norm2", at.norm2), ("attn_out", f"{at.attention}.{at.output}"),
                ("gate", at.gate), ("up", at.up), ("mlp_out", at.down),
            ):  # fmt: skip
                if name:
                    self.after(layer.get_submodule(name), lambda out, stage=stage: self.note(stage, out))
            self.before(layer.get_submodule(at.norm2), lambda x: self.note("resid1", x))
            self.before(layer.get_submodule(at.down), lambda x: self.note("mid", x))
            self.projections(module, module.head_dim)
            self.after(layer, self.done)
        self.after(self.model.get_submodule(at.final_norm), lambda x: self.ending("final_norm", x))

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        for layer in self.layers:
            TAPS.pop(layer.get_submodule(self.places.attention), None)

    def before(self, module: nn.Module, note: Callable[[Tensor], None]) -> None:
        """What a module is given, by place or by name."""

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            note(args[0] if args else named["hidden_states"])

        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, note: Callable[[Tensor], None]) -> None:
        """What a module makes."""

        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            note(out[0] if isinstance(out, tuple) else out)

        self.handles.append(module.register_forward_hook(hook))

    def projections(self, module: Any, E: int) -> None:
        """q, k, v as heads; Qwen3's before and after their norm."""
        at = self.places
        if at.fused:

            def split(x: Tensor) -> None:
                for name, part in zip("qkv", x.chunk(3, -1), strict=True):
                    self.note(name, heads(part, E))

            self.after(module.get_submodule(at.queries), split)
            return
        normed = hasattr(module, "q_norm")
        raw = ("q_raw", "k_raw") if normed else ("q", "k")
        for stage, name in ((raw[0], at.queries), (raw[1], at.keys), ("v", at.values)):
            self.after(module.get_submodule(name), lambda x, stage=stage: self.note(stage, heads(x, E)))
        if normed:
            for stage in "qk":
                part = module.get_submodule(f"{stage}_norm")
                self.after(part, lambda x, stage=stage: self.note(stage, x.transpose(1, 2)))

    def start(self, l: int) -> Callable[[Tensor], None]:
        """What to do when layer `l` begins."""

        def note(x: Tensor) -> None:
            if l == 0:
                self.give(Made(self.made.piece, -1, {"embed": x}))
            self.made = Made(self.made.piece, l, {"x": x})

        return note

    def done(self, x: Tensor) -> None:
        """Hands a layer over."""
        self.made.stages["resid2"] = x
        self.last = Made(self.made.piece, len(self.layers), {"x": x})
        self.give(self.made)
        self.made = Made(self.made.piece, self.made.layer)

    def ending(self, name: str, x: Tensor) -> None:
        """A stage after the layers."""
        self.last.stages[name] = x

    def tap(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **told: Any) -> Any:
        """Rotated queries, the cache, scores under mask and bias, and what the model's own function makes of them.

        OPT scales the queries before it hands them over and says scale 1: undone here, in `q_rot` only.
        """
        P, scale = self.S + self.T, told["scaling"]
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if self.case.bias is not None:
            mask = mask + self.case.bias[:, self.S : P, :P].to(mask.dtype)[:, None]
        out, probs = eager_of(module)(module, q, k, v, mask, **told)
        a = (q @ grown(k, q.shape[1]).transpose(2, 3)) * scale
        own_scale = getattr(module, "scaling", scale)
        self.note("q_rot", q if own_scale == scale else q / own_scale)
        self.note("k_rot", k[:, :, self.S :])
        self.note("k_cache", k)
        self.note("v_cache", v)
        self.note("scores", a)
        a = (a + mask).masked_fill(hidden, -math.inf)
        self.note("scores_seen", a)
        self.note("probs", probs)
        self.note("context", out.flatten(2))
        live = self.case.alive[:, self.S : P]
        gap = (a.softmax(-1, torch.float32) - probs.float()).abs().amax((1, 3))[live]
        if gap.numel() and gap.max() > (1e-5 if mask.dtype == torch.float32 else 1e-2):
            raise RuntimeError(f"{type(module).__name__} does not attend as this adapter believes; it needs an update")
        return out, probs

    def endings(self, logits: Tensor, live: Tensor) -> Made:
        """What comes after the layers; the next token is that of each row's last live slot."""
        rows = [max((t for t, alive in enumerate(row) if alive), default=0) for row in live.tolist()]
        last = torch.stack([logits[b, t] for b, t in enumerate(rows)])
        found = {"logits": logits, "last_logits": last, "token": last.argmax(-1)}
        self.last.stages |= found | {"next_probs": last.float().softmax(-1)}
        return self.last
