"""The named stages of a forward pass: a table that serves `want`, the local errors of `verify parity`, and the docs.

Each stage has the function that makes it from other stages, so that it can be fed with somebody else's inputs.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# The lambdas of the table take what their row says.

import difflib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from laconic.core import attention, places
from laconic.core.block import Block, Frame, Past, joined, rotated
from laconic.core.families import DecoderConfig


class At(NamedTuple):
    """Where a stage of a layer is computed: the block, what the whole pass shares, and the layer's past."""

    block: Block
    frame: Frame
    past: Past | None

    @property
    def sight(self) -> attention.Sight:
        return self.frame.sights[self.block.index]


class Stage(NamedTuple):
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


def seen_scores(at: At, a: Tensor) -> Tensor:
    """Scores after bias and visibility."""
    assert at.sight.seen is not None
    return attention.biased(a, at.sight.seen, at.sight.bias)


LAYER: tuple[Stage, ...] = (
    Stage("norm1", "norm", "C1, C2", ("x",), "B T D", lambda at, x: at.block.part("norm1")(x)),
    Stage("q_raw", "QKV", "C9", ("norm1",), "B H T E", lambda at, y: at.block.project(y)[0]),
    Stage("k_raw", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project(y)[1]),
    Stage("q", "QKV", "C9, C10", ("q_raw",), "B H T E", lambda at, x: at.block.normed(x, "q_norm")),
    Stage("k", "QKV", "C9, C10", ("k_raw",), "B G T E", lambda at, x: at.block.normed(x, "k_norm")),
    Stage("v", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project(y)[2]),
    Stage("q_rot", "RoPE", "C3–C6", ("q",), "B H T E", lambda at, q: rotated(q, at.frame)),
    Stage("k_rot", "RoPE", "C3–C6", ("k",), "B G T E", lambda at, k: rotated(k, at.frame)),
    Stage("k_cache", "KV cache", "–", ("k_rot",), "B G P E", lambda at, k: joined(k, at.past, 0), True),
    Stage("v_cache", "KV cache", "–", ("v",), "B G P E", lambda at, v: joined(v, at.past, 1), True),
    Stage(
        "scores",
        "scores",
        "C11",
        ("q_rot", "k_cache"),
        "B H T P",
        lambda at, q, k: attention.scores(q, k, at.block.config.score_scale[at.block.index]),
    ),
    Stage("scores_seen", "scores", "C12, C13", ("scores",), "B H T P", seen_scores),
    Stage("probs", "attention", "C14", ("scores_seen",), "B H T P", lambda at, a: attention.probabilities(a)),
    Stage("context", "attention", "C15", ("probs", "v_cache"), "B T HE", lambda at, p, v: attention.context(p, v)),
    Stage("attn_out", "attention", "C16", ("context",), "B T D", lambda at, c: at.block.output(c)),
    Stage("resid1", "block", "C19", ("x", "attn_out"), "B T D", lambda at, x, out: x + out),
    Stage("norm2", "norm", "C1, C2", ("resid1",), "B T D", lambda at, r: at.block.part("norm2")(r)),
    Stage("gate", "FFN", "C17", ("norm2",), "B T F", lambda at, y: at.block.part("gate")(y)),
    Stage("up", "FFN", "C17, C18", ("norm2",), "B T F", lambda at, y: at.block.part("up")(y)),
    Stage("mid", "FFN", "C17, C18", ("up", "gate"), "B T F", lambda at, up, gate: at.block.mid(up, gate)),
    Stage("mlp_out", "FFN", "C17, C18", ("mid",), "B T D", lambda at, m: at.block.part("down")(m)),
    Stage("resid2", "block", "C19", ("resid1", "mlp_out"), "B T D", lambda at, r, out: r + out),
)
"""What every layer makes, in order of computation."""

MODEL: tuple[Stage, ...] = (
    Stage("embed", "foundation", "C8", ("vectors", "positions"), "B T D", lambda model, x, p: model.placed(x, p)),
    Stage("final_norm", "norm", "C1, C2", ("x",), "B T D", lambda model, x: model.final_norm(x)),
    Stage("logits", "logits", "C20", ("final_norm",), "B T V", lambda model, h: model.logits(h)),
    Stage(
        "last_logits",
        "next token",
        "C21",
        ("logits", "live"),
        "B V",
        lambda model, a, live: places.last_live(a, live),
        True,
    ),
    Stage("token", "next token", "C21", ("last_logits",), "B", lambda model, a: places.next_token(a), True),
    Stage("next_probs", "next token", "C21", ("last_logits",), "B V", lambda model, a: places.next_probs(a)),
)
"""What a pass makes once: `embed` before the layers, the others after them."""


PLAIN_MID = Stage("mid", "FFN", "C17, C18", ("up",), "B T F", lambda at, up: at.block.mid(up))
UNNORMED: dict[str, Stage] = {
    "q": Stage("q", "QKV", "C9", ("norm1",), "B H T E", lambda at, y: at.block.project(y)[0]),
    "k": Stage("k", "QKV", "C9", ("norm1",), "B G T E", lambda at, y: at.block.project(y)[1]),
}


def layer_stages(config: DecoderConfig) -> tuple[Stage, ...]:
    """The stages of a layer of this family, each with the inputs it has there."""
    rows = {stage.name: stage for stage in LAYER}
    if not config.qk_norm:
        rows = {name: row for name, row in (rows | UNNORMED).items() if name not in ("q_raw", "k_raw")}
    if not config.gated:
        rows = {name: row for name, row in (rows | {"mid": PLAIN_MID}).items() if name != "gate"}
    return tuple(rows.values())


class Wanted(NamedTuple):
    """Stages asked for: of each layer, of the model, and the layers whose input `hidden.l` is to be kept."""

    layers: tuple[frozenset[str], ...]
    model: frozenset[str]
    hidden: frozenset[int]


def wanted(want: tuple[str, ...], config: DecoderConfig) -> Wanted:
    """`k` is every layer's, `k.3` one layer's, `hidden` the list hidden.0 … hidden.L. Raises on an unknown name."""
    L = config.num_hidden_layers
    if not want:
        return Wanted((frozenset(),) * L, frozenset(), frozenset())
    layers: list[set[str]] = [set() for _ in range(L)]
    model: set[str] = set()
    hidden: set[int] = set()
    names = {stage.name for stage in layer_stages(config)}
    for name in want:
        stem, _, index = name.partition(".")
        inside = not index or (index.isdecimal() and int(index) < L + (stem == "hidden"))
        if stem in names and inside:
            for layer in layers if not index else [layers[int(index)]]:
                layer.add(stem)
        elif stem == "hidden" and inside:
            hidden |= set(range(L + 1)) if not index else {int(index)}
        elif name in {stage.name for stage in MODEL}:
            model.add(name)
        else:
            raise ValueError(unknown(name, sorted(names | {"hidden"} | {stage.name for stage in MODEL}), L))
    return Wanted(tuple(map(frozenset, layers)), frozenset(model), frozenset(hidden))


def unknown(name: str, names: list[str], L: int) -> str:
    """What to say of a stage that does not exist."""
    stem = name.partition(".")[0]
    if stem in names:
        return f"stage {name}: the decoder has layers 0 to {L - 1}"
    near = difflib.get_close_matches(stem, names, 1, 0.0)
    return f"stage {name}: no such stage; did you mean {near[0]}?"
