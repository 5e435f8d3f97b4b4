"""Named activations of a forward pass: the table behind `Decoder.forward(capture=…)` and `laconic verify parity`.

Each activation has a function that computes it from other activations, so that a stage can be run on its own with
inputs from elsewhere (for instance from transformers).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# The arguments of the lambdas are described by their row of the table.

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from laconic.models import attention
from laconic.models.block import Block, ForwardContext, PastKeyValues, concat_past
from laconic.models.config import DecoderConfig
from laconic.models.next_token import last_valid, next_token, next_token_probabilities
from laconic.models.ops import attention_backends as backends


class BlockContext(NamedTuple):
    """What computing a layer's activation needs beside its inputs."""

    block: Block
    context: ForwardContext
    past: PastKeyValues | None

    @property
    def mask(self) -> attention.AttentionMask:
        return self.context.masks[self.block.index]


class Activation(NamedTuple):
    """One row of the table. The input named `x` is the block's input, `hidden.l`.

    `function(at, *inputs)` computes the activation; `at` is a BlockContext for a layer, the decoder for the model.
    `bitwise`: the function only copies or selects, so it must agree to the bit with other implementations.
    """

    name: str
    group: str
    equation: str
    inputs: tuple[str, ...]
    shape: str
    function: Callable[..., Tensor]
    bitwise: bool = False


def masked_scores(at: BlockContext, a: Tensor) -> Tensor:
    assert at.mask.visible is not None
    return backends.apply_bias_and_mask(a, at.mask.visible, at.mask.bias)


def scaled_scores(at: BlockContext, q: Tensor, k: Tensor) -> Tensor:
    return backends.attention_scores(q, k, at.block.config.attention_scales[at.block.index])


A = Activation
LAYER_ACTIVATIONS: tuple[Activation, ...] = (
    A("norm1", "norm", "C1, C2", ("x",), "B T D", lambda at, x: at.block.submodule("norm1")(x)),
    A("q_raw", "QKV", "C9", ("norm1",), "B H T E", lambda at, y: at.block.project_qkv(y)[0]),
    A("k_raw", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project_qkv(y)[1]),
    A("q", "QKV", "C9, C10", ("q_raw",), "B H T E", lambda at, x: at.block.normalize_heads(x, "q_norm")),
    A("k", "QKV", "C9, C10", ("k_raw",), "B G T E", lambda at, x: at.block.normalize_heads(x, "k_norm")),
    A("v", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project_qkv(y)[2]),
    A("q_rot", "RoPE", "C3–C6", ("q",), "B H T E", lambda at, q: at.block.apply_rope(q, at.context)),
    A("k_rot", "RoPE", "C3–C6", ("k",), "B G T E", lambda at, k: at.block.apply_rope(k, at.context)),
    A("k_cache", "KV cache", "–", ("k_rot",), "B G P E", lambda at, k: concat_past(k, at.past, 0), True),
    A("v_cache", "KV cache", "–", ("v",), "B G P E", lambda at, v: concat_past(v, at.past, 1), True),
    A("scores", "scores", "C11", ("q_rot", "k_cache"), "B H T P", scaled_scores),
    A("scores_seen", "scores", "C12, C13", ("scores",), "B H T P", masked_scores),
    A("probs", "attention", "C14", ("scores_seen",), "B H T P", lambda at, a: backends.attention_probabilities(a)),
    A("context", "attention", "C15", ("probs", "v_cache"), "B T HE", lambda at, p, v: backends.weighted_values(p, v)),
    A("attn_out", "attention", "C16", ("context",), "B T D", lambda at, c: at.block.project_output(c)),
    A("resid1", "block", "C19", ("x", "attn_out"), "B T D", lambda at, x, out: x + out),
    A("norm2", "norm", "C1, C2", ("resid1",), "B T D", lambda at, r: at.block.submodule("norm2")(r)),
    A("gate", "FFN", "C17", ("norm2",), "B T F", lambda at, y: at.block.submodule("gate")(y)),
    A("up", "FFN", "C17, C18", ("norm2",), "B T F", lambda at, y: at.block.submodule("up")(y)),
    A("mid", "FFN", "C17, C18", ("up", "gate"), "B T F", lambda at, *hidden: at.block.mlp_hidden(*hidden)),
    A("mlp_out", "FFN", "C17, C18", ("mid",), "B T D", lambda at, m: at.block.submodule("down")(m)),
    A("resid2", "block", "C19", ("resid1", "mlp_out"), "B T D", lambda at, r, out: r + out),
)
"""Activations of every layer, in order of computation."""

MODEL_ACTIVATIONS: tuple[Activation, ...] = (
    A("embed", "foundation", "C8", ("inputs_embeds", "position_ids"), "B T D", lambda m, x, p: m.add_positions(x, p)),
    A("final_norm", "norm", "C1, C2", ("x",), "B T D", lambda m, x: m.final_norm(x)),
    A("logits", "logits", "C20", ("final_norm",), "B T V", lambda m, h: m.logits(h)),
    A("last_logits", "next token", "C21", ("logits", "attention_mask"), "B V", lambda m, a, p: last_valid(a, p), True),
    A("token", "next token", "C21", ("last_logits",), "B", lambda m, a: next_token(a), True),
    A("next_probs", "next token", "C21", ("last_logits",), "B V", lambda m, a: next_token_probabilities(a)),
)
"""Activations computed once per pass: `embed` before the layers, the others after them."""


def layer_activations(config: DecoderConfig) -> tuple[Activation, ...]:
    """Return the activations of a layer for a model family, with their inputs in that family."""
    rows = {activation.name: activation for activation in LAYER_ACTIVATIONS}
    if not config.qk_norm:
        rows |= {name: rows.pop(f"{name}_raw")._replace(name=name) for name in ("q", "k")}
    if not config.gated_mlp:
        del rows["gate"]
        rows["mid"] = rows["mid"]._replace(inputs=("up",))
    return tuple(rows.values())


def list_activation_places(config: DecoderConfig) -> dict[str, tuple[tuple[int, str], ...]]:
    """Return where each name that `capture` accepts is captured: pairs of a layer and an activation of it.

    `k` is captured in every layer, `k.3` in layer 3. `hidden.l` is the input of layer l; `hidden.L` and the activations
    of the model belong to place L, after the last layer.
    """
    L = config.num_hidden_layers
    names = [activation.name for activation in layer_activations(config)]
    layers = {name: tuple((l, name) for l in range(L)) for name in names}
    layers["hidden"] = tuple((l, "hidden") for l in range(L + 1))
    single = {f"{name}.{place[0]}": (place,) for name, places in layers.items() for place in places}
    return layers | single | {activation.name: ((L, activation.name),) for activation in MODEL_ACTIVATIONS}


def capture_model(
    decoder: Any, names: frozenset[str], hidden_states: Tensor, attention_mask: Tensor
) -> dict[str, Tensor]:
    values = {"final_norm": hidden_states, "attention_mask": attention_mask}
    for activation in MODEL_ACTIVATIONS[2:]:
        if not names - values.keys():
            break
        values[activation.name] = activation.function(decoder, *(values[name] for name in activation.inputs))
    return {name: values[name] for name in names if name in values}
