"""The named stages of a forward pass: a table that serves `want`, the local errors of `verify parity`, and the docs.

Each stage has the function that makes it from other stages, so that it can be fed with somebody else's inputs.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# The lambdas of the table take what their row says.

import difflib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from laconic.models import attention
from laconic.models import positions as models_positions
from laconic.models.block import Block, ForwardContext, PastKeyValues, apply_rope, concat_past
from laconic.models.config import DecoderConfig


class BlockContext(NamedTuple):
    """Where a stage of a layer is computed: the block, what the whole pass shares, and the layer's past."""

    block: Block
    context: ForwardContext
    past: PastKeyValues | None

    @property
    def mask(self) -> attention.AttentionMask:
        return self.context.masks[self.block.index]


class Activation(NamedTuple):
    """One row of the table; `x` among the inputs is what the block reads, `hidden.l`.

    `function(where, *inputs)` makes the stage; `where` is an `At` for a layer's, the decoder for the model's.
    """

    name: str
    group: str
    equation: str
    inputs: tuple[str, ...]
    shape: str
    function: Callable[..., Tensor]
    bitwise: bool = False


def masked_scores(where: BlockContext, a: Tensor) -> Tensor:
    """Scores after bias and visibility."""
    assert where.mask.visible is not None
    return attention.apply_bias_and_mask(a, where.mask.visible, where.mask.bias)


LAYER_ACTIVATIONS: tuple[Activation, ...] = (
    Activation("norm1", "norm", "C1, C2", ("x",), "B T D", lambda at, x: at.block.submodule("norm1")(x)),
    Activation("q_raw", "QKV", "C9", ("norm1",), "B H T E", lambda at, y: at.block.project_qkv(y)[0]),
    Activation("k_raw", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project_qkv(y)[1]),
    Activation("q", "QKV", "C9, C10", ("q_raw",), "B H T E", lambda at, x: at.block.normalize_heads(x, "q_norm")),
    Activation("k", "QKV", "C9, C10", ("k_raw",), "B G T E", lambda at, x: at.block.normalize_heads(x, "k_norm")),
    Activation("v", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project_qkv(y)[2]),
    Activation("q_rot", "RoPE", "C3–C6", ("q",), "B H T E", lambda at, q: apply_rope(q, at.context)),
    Activation("k_rot", "RoPE", "C3–C6", ("k",), "B G T E", lambda at, k: apply_rope(k, at.context)),
    Activation("k_cache", "KV cache", "–", ("k_rot",), "B G P E", lambda at, k: concat_past(k, at.past, 0), True),
    Activation("v_cache", "KV cache", "–", ("v",), "B G P E", lambda at, v: concat_past(v, at.past, 1), True),
    Activation(
        "scores",
        "scores",
        "C11",
        ("q_rot", "k_cache"),
        "B H T P",
        lambda at, q, k: attention.attention_scores(q, k, at.block.config.attention_scales[at.block.index]),
    ),
    Activation("scores_seen", "scores", "C12, C13", ("scores",), "B H T P", masked_scores),
    Activation(
        "probs", "attention", "C14", ("scores_seen",), "B H T P", lambda at, a: attention.attention_probabilities(a)
    ),
    Activation(
        "context", "attention", "C15", ("probs", "v_cache"), "B T HE", lambda at, p, v: attention.weighted_values(p, v)
    ),
    Activation("attn_out", "attention", "C16", ("context",), "B T D", lambda at, c: at.block.project_output(c)),
    Activation("resid1", "block", "C19", ("x", "attn_out"), "B T D", lambda at, x, out: x + out),
    Activation("norm2", "norm", "C1, C2", ("resid1",), "B T D", lambda at, r: at.block.submodule("norm2")(r)),
    Activation("gate", "FFN", "C17", ("norm2",), "B T F", lambda at, y: at.block.submodule("gate")(y)),
    Activation("up", "FFN", "C17, C18", ("norm2",), "B T F", lambda at, y: at.block.submodule("up")(y)),
    Activation("mid", "FFN", "C17, C18", ("up", "gate"), "B T F", lambda at, up, gate: at.block.mlp_hidden(up, gate)),
    Activation("mlp_out", "FFN", "C17, C18", ("mid",), "B T D", lambda at, m: at.block.submodule("down")(m)),
    Activation("resid2", "block", "C19", ("resid1", "mlp_out"), "B T D", lambda at, r, out: r + out),
)
"""What every layer makes, in order of computation."""

MODEL_ACTIVATIONS: tuple[Activation, ...] = (
    Activation(
        "embed",
        "foundation",
        "C8",
        ("inputs_embeds", "position_ids"),
        "B T D",
        lambda model, x, p: model.add_positions(x, p),
    ),
    Activation("final_norm", "norm", "C1, C2", ("x",), "B T D", lambda model, x: model.final_norm(x)),
    Activation("logits", "logits", "C20", ("final_norm",), "B T V", lambda model, h: model.logits(h)),
    Activation(
        "last_logits",
        "next token",
        "C21",
        ("logits", "attention_mask"),
        "B V",
        lambda model, a, live: models_positions.last_valid(a, live),
        True,
    ),
    Activation(
        "token", "next token", "C21", ("last_logits",), "B", lambda model, a: models_positions.next_token(a), True
    ),
    Activation(
        "next_probs",
        "next token",
        "C21",
        ("last_logits",),
        "B V",
        lambda model, a: models_positions.next_token_probabilities(a),
    ),
)
"""What a pass makes once: `embed` before the layers, the others after them."""


UNGATED_MLP_HIDDEN = Activation("mid", "FFN", "C17, C18", ("up",), "B T F", lambda at, up: at.block.mlp_hidden(up))
UNNORMED_HEADS: dict[str, Activation] = {
    "q": Activation("q", "QKV", "C9", ("norm1",), "B H T E", lambda at, y: at.block.project_qkv(y)[0]),
    "k": Activation("k", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project_qkv(y)[1]),
}


def layer_activations(config: DecoderConfig) -> tuple[Activation, ...]:
    """The stages of a layer of this family, each with the inputs it has there."""
    rows = {stage.name: stage for stage in LAYER_ACTIVATIONS}
    if not config.qk_norm:
        rows = {name: row for name, row in (rows | UNNORMED_HEADS).items() if name not in ("q_raw", "k_raw")}
    if not config.gated_mlp:
        rows = {name: row for name, row in (rows | {"mid": UNGATED_MLP_HIDDEN}).items() if name != "gate"}
    return tuple(rows.values())


class CaptureRequest(NamedTuple):
    """Stages asked for: of each layer, of the model, and the layers whose input `hidden.l` is to be kept."""

    layers: tuple[frozenset[str], ...]
    model: frozenset[str]
    hidden: frozenset[int]


def parse_capture(want: tuple[str, ...], config: DecoderConfig) -> CaptureRequest:
    """`k` is every layer's, `k.3` one layer's, `hidden` the list hidden.0 … hidden.L. Raises on an unknown name."""
    L = config.num_hidden_layers
    if not want:
        return CaptureRequest((frozenset(),) * L, frozenset(), frozenset())
    layers: list[set[str]] = [set() for _ in range(L)]
    model: set[str] = set()
    hidden: set[int] = set()
    names = {stage.name for stage in layer_activations(config)}
    for name in want:
        stem, _, index = name.partition(".")
        inside = not index or (index.isdecimal() and int(index) < L + (stem == "hidden"))
        if stem in names and inside:
            for layer in layers if not index else [layers[int(index)]]:
                layer.add(stem)
        elif stem == "hidden" and inside:
            hidden |= set(range(L + 1)) if not index else {int(index)}
        elif name in {stage.name for stage in MODEL_ACTIVATIONS}:
            model.add(name)
        else:
            raise ValueError(
                unknown_activation_message(
                    name, sorted(names | {"hidden"} | {stage.name for stage in MODEL_ACTIVATIONS}), L
                )
            )
    return CaptureRequest(tuple(map(frozenset, layers)), frozenset(model), frozenset(hidden))


def unknown_activation_message(name: str, names: list[str], L: int) -> str:
    """What to say of a stage that does not exist."""
    stem = name.partition(".")[0]
    if stem in names:
        return f"stage {name}: the decoder has layers 0 to {L - 1}"
    near = difflib.get_close_matches(stem, names, 1, 0.0)
    return f"stage {name}: no such stage; did you mean {near[0]}?"
