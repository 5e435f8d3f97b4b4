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

from laconic.verification.traces import LayerActivations, ParityCase


class ModulePaths(NamedTuple):
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


LLAMA_PATHS = ModulePaths(
    "model.layers", "model.norm", "input_layernorm", "post_attention_layernorm", "self_attn", "q_proj", "k_proj",
    "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
MODULE_PATHS = {
    "llama": LLAMA_PATHS,
    "mistral": LLAMA_PATHS,
    "qwen2": LLAMA_PATHS,
    "qwen3": LLAMA_PATHS,
    "gpt2": ModulePaths(
        "transformer.h", "transformer.ln_f", "ln_1", "ln_2", "attn", "c_attn", "", "", "c_proj", "", "mlp.c_fc",
        "mlp.c_proj", True,
    ),
    "opt": ModulePaths(
        "model.decoder.layers", "model.decoder.final_layer_norm", "self_attn_layer_norm", "final_layer_norm",
        "self_attn", "q_proj", "k_proj", "v_proj", "out_proj", "", "fc1", "fc2",
    ),
}  # fmt: skip

ATTENTION_HOOKS: "WeakKeyDictionary[nn.Module, Callable[..., Any]]" = WeakKeyDictionary()
"""Attention module -> who wants to know what it computes."""


def hooked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """The model's own eager attention, after the tap of the module has seen (and perhaps biased) what goes in."""
    act = ATTENTION_HOOKS.get(module) or eager_attention_of(module)
    return act(module, query, key, value, mask, **kwargs)


def eager_attention_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention that the model's own file defines."""
    return sys.modules[type(module).__module__].eager_attention_forward


def split_heads(x: Tensor, E: int) -> Tensor:
    """[B, T, N E] -> [B, N, T, E]."""
    return x.unflatten(-1, (-1, E)).transpose(1, 2)


def repeat_kv_heads(k: Tensor, H: int) -> Tensor:
    """[B, G, P, E] -> [B, H, P, E], each head for its neighbours."""
    B, G, P, E = k.shape
    return k[:, :, None].expand(B, G, H // G, P, E).reshape(B, H, P, E)


class HookRecorder:
    """Hooks on one model while one case runs; layers are handed over as they are done."""

    def __init__(self, model: Any, case: ParityCase, emit: Callable[[LayerActivations], None]) -> None:
        self.model, self.case, self.emit = model, case, emit
        self.paths = MODULE_PATHS[model.config.model_type]
        self.layers: list[Any] = list(model.get_submodule(self.paths.layers))
        self.current, self.final, self.T, self.S = LayerActivations(0, -1), LayerActivations(0, -1), 0, 0
        self.handles: list[Any] = []

    def start_piece(self, piece: int, S: int, T: int) -> None:
        """The next pass reads this piece."""
        self.current, self.S, self.T = LayerActivations(piece, -1), S, T

    def record(self, name: str, value: Tensor) -> None:
        """A stage of the layer that runs; OPT flattens rows and slots in its MLP."""
        B = self.case.shape[0]
        self.current.activations[name] = value if value.shape[0] == B and value.ndim > 2 else value.view(B, self.T, -1)

    def __enter__(self) -> None:
        at = self.paths
        for l, layer in enumerate(self.layers):
            module = layer.get_submodule(at.attention)
            ATTENTION_HOOKS[module] = self.attention_hook
            self.hook_input(layer, self.layer_start_hook(l))
            for stage, name in (
                ("norm1", at.norm1), ("norm2", at.norm2), ("attn_out", f"{at.attention}.{at.output}"),
                ("gate", at.gate), ("up", at.up), ("mlp_out", at.down),
            ):  # fmt: skip
                if name:
                    self.hook_output(layer.get_submodule(name), lambda out, stage=stage: self.record(stage, out))
            self.hook_input(layer.get_submodule(at.norm2), lambda x: self.record("resid1", x))
            self.hook_input(layer.get_submodule(at.down), lambda x: self.record("mid", x))
            self.hook_projections(module, module.head_dim)
            self.hook_output(layer, self.finish_layer)
        self.hook_output(self.model.get_submodule(at.final_norm), lambda x: self.record_final("final_norm", x))

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        for layer in self.layers:
            ATTENTION_HOOKS.pop(layer.get_submodule(self.paths.attention), None)

    def hook_input(self, module: nn.Module, callback: Callable[[Tensor], None]) -> None:
        """What a module is given, by place or by name."""

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            callback(args[0] if args else named["hidden_states"])

        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def hook_output(self, module: nn.Module, callback: Callable[[Tensor], None]) -> None:
        """What a module makes."""

        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            callback(out[0] if isinstance(out, tuple) else out)

        self.handles.append(module.register_forward_hook(hook))

    def hook_projections(self, module: Any, E: int) -> None:
        """q, k, v as heads; Qwen3's before and after their norm."""
        at = self.paths
        if at.fused:

            def split(x: Tensor) -> None:
                for name, part in zip("qkv", x.chunk(3, -1), strict=True):
                    self.record(name, split_heads(part, E))

            self.hook_output(module.get_submodule(at.queries), split)
            return
        normed = hasattr(module, "q_norm")
        raw = ("q_raw", "k_raw") if normed else ("q", "k")
        for stage, name in ((raw[0], at.queries), (raw[1], at.keys), ("v", at.values)):
            self.hook_output(module.get_submodule(name), lambda x, stage=stage: self.record(stage, split_heads(x, E)))
        if normed:
            for stage in "qk":
                part = module.get_submodule(f"{stage}_norm")
                self.hook_output(part, lambda x, stage=stage: self.record(stage, x.transpose(1, 2)))

    def layer_start_hook(self, l: int) -> Callable[[Tensor], None]:
        """What to do when layer `l` begins."""

        def note(x: Tensor) -> None:
            if l == 0:
                self.emit(LayerActivations(self.current.piece, -1, {"embed": x}))
            self.current = LayerActivations(self.current.piece, l, {"x": x})

        return note

    def finish_layer(self, x: Tensor) -> None:
        """Hands a layer over."""
        self.current.activations["resid2"] = x
        self.final = LayerActivations(self.current.piece, len(self.layers), {"x": x})
        self.emit(self.current)
        self.current = LayerActivations(self.current.piece, self.current.layer)

    def record_final(self, name: str, x: Tensor) -> None:
        """A stage after the layers."""
        self.final.activations[name] = x

    def attention_hook(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        """Rotated queries, the cache, scores under mask and bias, and what the model's own function makes of them.

        OPT scales the queries before it hands them over and says scale 1: undone here, in `q_rot` only.
        """
        P, scale = self.S + self.T, kwargs["scaling"]
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if self.case.bias is not None:
            mask = mask + self.case.bias[:, self.S : P, :P].to(mask.dtype)[:, None]
        out, probs = eager_attention_of(module)(module, q, k, v, mask, **kwargs)
        a = (q @ repeat_kv_heads(k, q.shape[1]).transpose(2, 3)) * scale
        own_scale = getattr(module, "scaling", scale)
        self.record("q_rot", q if own_scale == scale else q / own_scale)
        self.record("k_rot", k[:, :, self.S :])
        self.record("k_cache", k)
        self.record("v_cache", v)
        self.record("scores", a)
        a = (a + mask).masked_fill(hidden, -math.inf)
        self.record("scores_seen", a)
        self.record("probs", probs)
        self.record("context", out.flatten(2))
        live = self.case.valid_mask[:, self.S : P]
        gap = (a.softmax(-1, torch.float32) - probs.float()).abs().amax((1, 3))[live]
        if gap.numel() and gap.max() > (1e-5 if mask.dtype == torch.float32 else 1e-2):
            raise RuntimeError(f"{type(module).__name__} does not attend as this adapter believes; it needs an update")
        return out, probs

    def finish_piece(self, logits: Tensor, valid: Tensor) -> LayerActivations:
        """What comes after the layers; the next token is that of each row's last live slot."""
        rows = [max((t for t, alive in enumerate(row) if alive), default=0) for row in valid.tolist()]
        last = torch.stack([logits[b, t] for b, t in enumerate(rows)])
        found = {"logits": logits, "last_logits": last, "token": last.argmax(-1)}
        self.final.activations |= found | {"next_probs": last.float().softmax(-1)}
        return self.final
