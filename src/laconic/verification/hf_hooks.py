"""Record the activations of a transformers model with hooks on its modules and a registered attention function.

Shapes: B rows, T new positions, S cached positions, P = S + T, H query heads, G key heads, E head size, D width.
"""

import math
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from laconic.models.config import WEIGHT_NAMES, WeightNames
from laconic.verification.traces import ParityCase, stage_key

# The recording function of each attention module.
ATTENTION_HOOKS: "WeakKeyDictionary[nn.Module, Callable[..., Any]]" = WeakKeyDictionary()


def hooked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    function = ATTENTION_HOOKS.get(module) or eager_attention_of(module)
    return function(module, query, key, value, mask, **kwargs)


def eager_attention_of(module: nn.Module) -> Callable[..., Any]:
    return sys.modules[type(module).__module__].eager_attention_forward


def split_heads(x: Tensor, E: int) -> Tensor:
    return x.unflatten(-1, (-1, E)).transpose(1, 2)


def find_attention(layer: nn.Module, names: WeightNames) -> nn.Module:
    """Return the attention of a layer, which holds its output projection."""
    return layer.get_submodule(names.o.rpartition(".")[0])


class HookRecorder:
    """Hooks on one model while a case runs. They record the activations of its pieces in `stages`, by key.

    `layer` is the current layer; None outside the layers.
    """

    def __init__(self, model: Any, case: ParityCase) -> None:
        self.model, self.case = model, case
        self.names = WEIGHT_NAMES[model.config.model_type]
        self.layers: list[Any] = list(model.get_submodule(self.names.layers))
        self.stages: dict[str, Tensor] = {}
        self.piece, self.S, self.T = 0, 0, 0
        self.layer: int | None = None
        self.handles: list[Any] = []

    def start_piece(self, piece: int, S: int, T: int) -> None:
        self.piece, self.S, self.T = piece, S, T

    def store(self, **stages: Tensor) -> None:
        n = len(self.case.pieces())
        self.stages |= {stage_key(name, self.layer, self.piece, n): value for name, value in stages.items()}

    def record(self, name: str, value: Tensor) -> None:
        """Store an activation of the current layer; OPT flattens rows and positions in its MLP."""
        B = self.case.shape[0]
        is_batched = value.shape[0] == B and value.ndim > 2
        self.store(**{name: value if is_batched else value.view(B, self.T, -1)})

    def __enter__(self) -> None:
        names = self.names
        for l, layer in enumerate(self.layers):
            attention: Any = find_attention(layer, names)
            ATTENTION_HOOKS[attention] = self.attention_hook
            self.hook_input(layer, lambda x, l=l: self.start_layer(l, x))
            outputs = {
                "norm1": names.norm1, "norm2": names.norm2, "attn_out": names.o, "gate": names.gate, "up": names.up,
                "mlp_out": names.down,
            }  # fmt: skip
            for stage, name in outputs.items():
                if name:
                    self.hook_output(layer.get_submodule(name), lambda out, stage=stage: self.record(stage, out))
            self.hook_input(layer.get_submodule(names.norm2), lambda x: self.record("resid1", x))
            self.hook_input(layer.get_submodule(names.down), lambda x: self.record("mid", x))
            self.hook_projections(layer, attention.head_dim)
            self.hook_output(layer, self.finish_layer)
        final_norm = self.model.get_submodule(names.final_norm)
        self.hook_output(final_norm, lambda x: self.store(final_norm=x))

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        for layer in self.layers:
            ATTENTION_HOOKS.pop(find_attention(layer, self.names), None)

    def hook_input(self, module: nn.Module, callback: Callable[[Tensor], None]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            callback(args[0] if args else kwargs["hidden_states"])

        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def hook_output(self, module: nn.Module, callback: Callable[[Tensor], None]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            callback(out[0] if isinstance(out, tuple) else out)

        self.handles.append(module.register_forward_hook(hook))

    def hook_projections(self, layer: nn.Module, E: int) -> None:
        """Record q, k, v split into heads; with a q/k norm both before and after it."""
        names = self.names
        if names.qkv:

            def split(x: Tensor) -> None:
                for name, part in zip("qkv", x.chunk(3, -1), strict=True):
                    self.record(name, split_heads(part, E))

            self.hook_output(layer.get_submodule(names.qkv), split)
            return
        q, k = ("q_raw", "k_raw") if names.q_norm else ("q", "k")
        for stage, path in ((q, names.q), (k, names.k), ("v", names.v)):
            assert path
            self.hook_output(layer.get_submodule(path), lambda x, stage=stage: self.record(stage, split_heads(x, E)))
        for stage, path in (("q", names.q_norm), ("k", names.k_norm)):
            if path:
                self.hook_output(
                    layer.get_submodule(path), lambda x, stage=stage: self.record(stage, x.transpose(1, 2))
                )

    def start_layer(self, l: int, x: Tensor) -> None:
        if l == 0:
            self.store(embed=x)
        self.layer = l

    def finish_layer(self, x: Tensor) -> None:
        self.store(resid2=x)
        self.layer = None

    def attention_hook(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        """Record rotated queries, the KV cache and the scores, and run the model's own eager attention.

        OPT scales the queries first and passes scale 1; that is undone in `q_rot` only. Raises RuntimeError if the
        recorded scores do not give the model's probabilities.
        """
        P = self.S + self.T
        scale = kwargs["scaling"]
        is_masked = mask <= torch.finfo(mask.dtype).min / 2
        if self.case.bias is not None:
            mask = mask + self.case.bias[:, self.S : P, :P].to(mask.dtype)[:, None]
        out, probs = eager_attention_of(module)(module, q, k, v, mask, **kwargs)
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)) * scale
        layer_scale = getattr(module, "scaling", scale)
        q_rot = q if layer_scale == scale else q / layer_scale
        seen = (scores + mask).masked_fill(is_masked, -math.inf)
        self.store(q_rot=q_rot, k_rot=k[:, :, self.S :], k_cache=k, v_cache=v)
        self.store(scores=scores, scores_seen=seen, probs=probs, context=out.flatten(2))
        valid = self.case.valid_mask[:, self.S : P]
        difference = (seen.softmax(-1, torch.float32) - probs.float()).abs().amax((1, 3))[valid]
        if difference.numel() and difference.max() > (1e-5 if mask.dtype == torch.float32 else 1e-2):
            raise RuntimeError(
                f"the recorded scores do not give the probabilities of {type(module).__name__}; "
                "this adapter needs an update for this version of transformers"
            )
        return out, probs

    def finish_piece(self, logits: Tensor, valid: Tensor) -> None:
        """Store the logits, and the next token after each row's last valid position."""
        columns = [max((t for t, is_valid in enumerate(row) if is_valid), default=0) for row in valid.tolist()]
        last = torch.stack([logits[b, t] for b, t in enumerate(columns)])
        next_probs = last.float().softmax(-1)
        self.store(logits=logits, last_logits=last, token=last.argmax(-1), next_probs=next_probs)
