"""The cache as a value, masks, and stages: what each costs."""

import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import ABSENT, PEERS, Scale, Table, clock_name, seconds_per_call, verdict
from benchmarks.models import llama, middling
from laconic import Decoder, KVCache
from laconic.models import activations as models_activations
from laconic.models import rope
from laconic.models.attention import build_attention_mask
from laconic.models.block import EAGER_ACTIVATIONS, Block, ForwardContext, PastKeyValues


def filled(decoder: Decoder, batch: int, S: int) -> KVCache:
    """A cache of S slots with random content."""
    c = decoder.config
    shape = (batch, c.num_key_value_heads, S, c.head_dim)
    layers = tuple(torch.randn(shape) for _ in range(c.num_hidden_layers))
    places = torch.arange(S).expand(batch, -1)
    return KVCache(layers, tuple(x.clone() for x in layers), places, torch.ones(batch, S, dtype=torch.bool))


def theirs_filled(cache: KVCache) -> Any:
    """The same in transformers' dynamic cache."""
    from transformers import DynamicCache

    filled_cache = DynamicCache()
    for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        filled_cache.update(k, v, i)
    return filled_cache


def cache(scale: Scale) -> Table:
    """Append and fork by what is held."""
    decoder = Decoder(middling(scale, scale.few_words))
    rows: list[tuple[str, ...]] = []
    for S in scale.cache_lengths:
        filled_cache, two, one = filled(decoder, 1, S), filled(decoder, 2, S), filled(decoder, 1, 1)
        ways = {
            "append": lambda filled_cache=filled_cache, one=one: filled_cache.append(one),
            "fork": lambda filled_cache=filled_cache: filled_cache.repeat_rows(8),
            "fork2": lambda two=two: two.repeat_rows(4),
        }
        if PEERS:
            ways |= peers(filled_cache, two, one)
        took = {name: f"{1e6 * s:,.0f}" for name, s in seconds_per_call(ways, scale.rounds).items()}
        rows.append((
            f"{S:,}", took["append"], took.get("their append", ABSENT), took["fork"], took.get("their fork", ABSENT),
            took["fork2"], took.get("their fork2", ABSENT),
        ))  # fmt: skip
    text = (
        f"Microseconds for all {scale.layers} layers of the random Llama {scale.layers} × {scale.width}, float32, by "
        f"{clock_name()}, median of {scale.rounds}: one position appended to S held at batch 1; one row forked to 8 (a "
        "view); two rows forked to 4 each (a copy). transformers: `DynamicCache.update` of every layer (the cache is "
        "put back after it by `crop`); `deepcopy` and `batch_repeat_interleave`, as the old cache must stay usable. "
        "A value keeps the old keys and values beside the new ones; `update` lets go of each layer's as it goes."
    )
    head = ("S", "append 1", "transformers", "fork 1 → 8", "transformers", "fork 2 → 8", "transformers")
    return Table("The cache: append and fork", text, head, rows)


def peers(filled_cache: KVCache, two: KVCache, one: KVCache) -> dict[str, Any]:
    """The same by transformers."""
    theirs, theirs_two = theirs_filled(filled_cache), theirs_filled(two)

    def append() -> None:
        for i, (k, v) in enumerate(zip(one.keys, one.values, strict=True)):
            theirs.update(k, v, i)
        theirs.crop(-1)

    def fork(source: Any, n: int) -> None:
        copy.deepcopy(source).batch_repeat_interleave(n)

    return {
        "their append": append,
        "their fork": lambda: fork(theirs, 8),
        "their fork2": lambda: fork(theirs_two, 4),
    }


def mask(scale: Scale) -> Table:
    """What a pass spends on masks."""
    T, B = scale.mask, scale.batch
    whole = torch.ones(B, T, dtype=torch.bool)
    padded = whole.clone()
    padded[0, : T // 8] = False
    cases = {"all live": (whole, None), "left padding": (padded, None), "left padding, window": (padded, T // 4)}
    rows: list[tuple[str, ...]] = []
    for name, (live, window) in cases.items():
        ways: dict[str, Any] = {
            "ours": lambda live=live, window=window: build_attention_mask(
                live, 0, all_valid=bool(live.all()), window=window, bias=None, sdpa_only=True, dtype=torch.float32
            )
        }
        if PEERS:
            ways["theirs"] = their_mask(live, window)
        took = {side: 1e3 * s for side, s in seconds_per_call(ways, scale.rounds).items()}
        theirs = f"{took['theirs']:.3f}" if PEERS else ABSENT
        rows.append((name, f"{took['ours']:.3f}", theirs))
    text = (
        f"Milliseconds of making the mask of one window, batch {B}, T {T}, on nothing held, by {clock_name()}, median "
        f"of {scale.rounds}. It is made once a forward pass for all layers of a window. transformers: "
        "`create_causal_mask` and `create_sliding_window_causal_mask` for SDPA."
    )
    return Table("Masks", text, ("rows", "laconic ms", "transformers ms"), rows)


def their_mask(live: Tensor, window: int | None) -> Any:
    """transformers' function for the same mask."""
    from transformers import MistralConfig
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = MistralConfig(num_hidden_layers=1, sliding_window=window)
    config._attn_implementation = "sdpa"
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    vectors, attention = torch.zeros(*live.shape, 1), live.long()
    return lambda: make(config=config, inputs_embeds=vectors, attention_mask=attention, past_key_values=None)


class Bare(Block):
    """A block that knows nothing of stages: what `want` would cost nothing against."""

    def forward(
        self, x: Tensor, past: PastKeyValues | None, frame: ForwardContext, want: frozenset[str] = frozenset()
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        q, k, v = self.project_qkv(self.submodule("norm1")(x))
        if frame.cos is not None and frame.sin is not None:
            q, k = rope.rotate_pairs(q, frame.cos, frame.sin), rope.rotate_pairs(k, frame.cos, frame.sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        r = x + self.project_output(self.attend(q, k, v, frame, lambda name, value: value, False))
        y = self.submodule("norm2")(r)
        return r + self.submodule("down")(self.mlp_hidden(self.submodule("up")(y), self.submodule("gate")(y))), k, v, {}


def want(scale: Scale) -> Table:
    """What stages cost, off and on."""
    big = middling(scale, scale.few_words)
    small = llama(5, 64, 512, heads=8, groups=4, feed=172)
    layered = {stage.name for stage in models_activations.LAYER_ACTIVATIONS}
    rows: list[tuple[str, ...]] = []
    cases = ((f"{scale.layers} × {scale.width}", big, scale.length, 3), ("5 × 64", small, 1, 12))
    for name, config, T, times in cases:
        decoder, bare = Decoder(config).eval(), Decoder(config).eval()
        for block in bare.layers:
            block.__class__ = Bare
        vectors = torch.randn(1, T, config.hidden_size)
        calm = tuple(sorted(layered - EAGER_ACTIVATIONS - {"q_raw", "k_raw"}))
        wants = {
            "off": (),
            "`hidden`": ("hidden",),
            "`resid2` of one layer": ("resid2.0",),
            "all but scores, one layer": tuple(f"{stage}.0" for stage in calm),
            "all but scores, every layer": calm,
            "`scores`, `scores_seen`, `probs`, one layer": tuple(f"{stage}.0" for stage in sorted(EAGER_ACTIVATIONS)),
            "`scores`, `scores_seen`, `probs`, every layer": tuple(sorted(EAGER_ACTIVATIONS)),
        }

        def reads(model: Decoder, names: tuple[str, ...], vectors: Tensor = vectors) -> Any:
            def run() -> None:
                with torch.inference_mode():
                    model(vectors, capture=names)

            return run

        ways = {"bare": reads(bare, ())} | {what: reads(decoder, names) for what, names in wants.items()}
        took = {what: 1e3 * s for what, s in seconds_per_call(ways, times * scale.rounds, least=5e-3, of=min).items()}
        off = took["off"]
        rows.append((f"{name}, T {T}", "no stages in the code", f"{took['bare']:.3f}", "–", "–"))
        rows.append(
            (
                f"{name}, T {T}",
                "off",
                f"{off:.3f}",
                f"{off / took['bare']:.3f}",
                verdict(off / took["bare"], most=1.02, digits=3),
            )
        )
        rows += [
            (f"{name}, T {T}", what, f"{took[what]:.3f}", f"{took[what] / off:.3f}", f"{took[what] - off:+.3f}")
            for what in wants
            if what != "off"
        ]
    text = (
        f"Milliseconds of one forward pass at batch 1 by {clock_name()}, best of {3 * scale.rounds} (the "
        f"small model: {12 * scale.rounds}), rounds interleaved. The line *off* is over the "
        "same decoder with blocks in which no stage is named; the others are over *off*. "
        "`scores`, `scores_seen` and `probs` run eager attention in the layers they name."
    )
    return Table("Stages: `want` off and on", text, ("model", "want", "ms", "ratio", "target, or ms more"), rows)
