"""Time of KV cache operations, attention masks and captured activations, compared with transformers."""

import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import ABSENT, PEERS, Scale, Table, clock_name, time_per_call, verdict
from benchmarks.models import llama, medium_llama
from laconic import Decoder, KVCache
from laconic.models import activations as models_activations
from laconic.models import rope
from laconic.models.attention import build_attention_mask
from laconic.models.block import EAGER_ACTIVATIONS, Block, ForwardContext, PastKeyValues


def random_cache(decoder: Decoder, batch: int, S: int) -> KVCache:
    """Return a cache of S random slots."""
    c = decoder.config
    shape = (batch, c.num_key_value_heads, S, c.head_dim)
    layers = tuple(torch.randn(shape) for _ in range(c.num_hidden_layers))
    places = torch.arange(S).expand(batch, -1)
    return KVCache(layers, tuple(x.clone() for x in layers), places, torch.ones(batch, S, dtype=torch.bool))


def to_dynamic_cache(cache: KVCache) -> Any:
    """Copy a cache into transformers' DynamicCache."""
    from transformers import DynamicCache

    past = DynamicCache()
    for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        past.update(k, v, i)
    return past


def cache(scale: Scale) -> Table:
    """Return the table of append and repeat_rows by the length of the cache."""
    decoder = Decoder(medium_llama(scale, scale.small_vocab))
    rows: list[tuple[str, ...]] = []
    for S in scale.cached:
        past, past2, new = random_cache(decoder, 1, S), random_cache(decoder, 2, S), random_cache(decoder, 1, 1)
        workloads = {
            "append": lambda past=past, new=new: past.append(new),
            "fork": lambda past=past: past.repeat_rows(8),
            "fork2": lambda past2=past2: past2.repeat_rows(4),
        }
        if PEERS:
            workloads |= transformers_workloads(past, past2, new)
        seconds = {model_name: f"{1e6 * s:,.0f}" for model_name, s in time_per_call(workloads, scale.rounds).items()}
        rows.append((
            f"{S:,}", seconds["append"], seconds.get("their append", ABSENT), seconds["fork"],
            seconds.get("their fork", ABSENT), seconds["fork2"], seconds.get("their fork2", ABSENT),
        ))  # fmt: skip
    text = (
        f"Microseconds for all {scale.layers} layers of the random Llama {scale.layers} × {scale.width}, float32, by "
        f"{clock_name()}, median of {scale.rounds}: one position appended to S cached ones at batch 1; one row "
        f"repeated to 8 (a "
        "view); two rows repeated to 4 each (a copy). transformers: `DynamicCache.update` of every layer (`crop` "
        "restores "
        "the cache after it); `deepcopy` and `batch_repeat_interleave`, since the old cache must stay usable. "
        "laconic keeps the old keys and values beside the new ones; `update` frees those of each layer."
    )
    head = ("S", "append 1", "transformers", "repeat 1 → 8", "transformers", "repeat 2 → 8", "transformers")
    return Table("KV cache: append and repeat rows", text, head, rows)


def transformers_workloads(past: KVCache, past2: KVCache, new: KVCache) -> dict[str, Any]:
    """Return the same workloads in transformers."""
    theirs, theirs_two = to_dynamic_cache(past), to_dynamic_cache(past2)

    def append() -> None:
        for i, (k, v) in enumerate(zip(new.keys, new.values, strict=True)):
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
    """Return the table of mask construction."""
    T, B = scale.mask, scale.batch
    whole = torch.ones(B, T, dtype=torch.bool)
    padded = whole.clone()
    padded[0, : T // 8] = False
    cases = {"no padding": (whole, None), "left padding": (padded, None), "left padding, window": (padded, T // 4)}
    rows: list[tuple[str, ...]] = []
    for model_name, (attention_mask, window) in cases.items():
        workloads: dict[str, Any] = {
            "ours": lambda attention_mask=attention_mask, window=window: build_attention_mask(
                attention_mask,
                0,
                all_valid=bool(attention_mask.all()),
                window=window,
                bias=None,
                sdpa_only=True,
                dtype=torch.float32,
            )
        }
        if PEERS:
            workloads["theirs"] = their_mask(attention_mask, window)
        seconds = {side: 1e3 * s for side, s in time_per_call(workloads, scale.rounds).items()}
        theirs = f"{seconds['theirs']:.3f}" if PEERS else ABSENT
        rows.append((model_name, f"{seconds['ours']:.3f}", theirs))
    text = (
        f"Milliseconds to build the mask of one pass, batch {B}, T {T}, without a cache, by {clock_name()}, median "
        f"of {scale.rounds}. It is built once per forward pass for all layers with the same window. transformers: "
        "`create_causal_mask` and `create_sliding_window_causal_mask` for SDPA."
    )
    return Table("Masks", text, ("rows", "laconic ms", "transformers ms"), rows)


def their_mask(attention_mask: Tensor, window: int | None) -> Any:
    """Return a call of transformers' function for the same mask."""
    from transformers import MistralConfig
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = MistralConfig(num_hidden_layers=1, sliding_window=window)
    config._attn_implementation = "sdpa"
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    embeds, attention = torch.zeros(*attention_mask.shape, 1), attention_mask.long()
    return lambda: make(config=config, inputs_embeds=embeds, attention_mask=attention, past_key_values=None)


class PlainBlock(Block):
    """A block without support for capturing activations: the baseline of their overhead."""

    def forward(
        self, x: Tensor, past: PastKeyValues | None, frame: ForwardContext, activations: frozenset[str] = frozenset()
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        q, k, v = self.project_qkv(self.submodule("norm1")(x))
        if frame.cos is not None and frame.sin is not None:
            q, k = rope.rotate_pairs(q, frame.cos, frame.sin), rope.rotate_pairs(k, frame.cos, frame.sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        r = x + self.project_output(self.attend(q, k, v, frame, lambda model_name, value: value, False))
        y = self.submodule("norm2")(r)
        return r + self.submodule("down")(self.mlp_hidden(self.submodule("up")(y), self.submodule("gate")(y))), k, v, {}


def activations(scale: Scale) -> Table:
    """Return the table of the cost of capturing activations."""
    big = medium_llama(scale, scale.small_vocab)
    small = llama(5, 64, 512, heads=8, groups=4, mlp_size=172)
    layered = {stage.name for stage in models_activations.LAYER_ACTIVATIONS}
    rows: list[tuple[str, ...]] = []
    cases = ((f"{scale.layers} × {scale.width}", big, scale.length, 3), ("5 × 64", small, 1, 12))
    for model_name, config, T, rounds in cases:
        decoder, plain = Decoder(config).eval(), Decoder(config).eval()
        for block in plain.layers:
            block.__class__ = PlainBlock
        embeds = torch.randn(1, T, config.hidden_size)
        fused = tuple(sorted(layered - EAGER_ACTIVATIONS - {"q_raw", "k_raw"}))
        captures = {
            "off": (),
            "`hidden`": ("hidden",),
            "`resid2` of one layer": ("resid2.0",),
            "all but scores, one layer": tuple(f"{stage}.0" for stage in fused),
            "all but scores, every layer": fused,
            "`scores`, `scores_seen`, `probs`, one layer": tuple(f"{stage}.0" for stage in sorted(EAGER_ACTIVATIONS)),
            "`scores`, `scores_seen`, `probs`, every layer": tuple(sorted(EAGER_ACTIVATIONS)),
        }

        def forward(model: Decoder, names: tuple[str, ...], embeds: Tensor = embeds) -> Any:
            def run() -> None:
                with torch.inference_mode():
                    model(embeds, capture=names)

            return run

        workloads = {"bare": forward(plain, ())} | {name: forward(decoder, names) for name, names in captures.items()}
        seconds = {
            name: 1e3 * s
            for name, s in time_per_call(workloads, rounds * scale.rounds, least=5e-3, statistic=min).items()
        }
        off = seconds["off"]
        rows.append((f"{model_name}, T {T}", "code without capturing", f"{seconds['bare']:.3f}", "–", "–"))
        rows.append(
            (
                f"{model_name}, T {T}",
                "off",
                f"{off:.3f}",
                f"{off / seconds['bare']:.3f}",
                verdict(off / seconds["bare"], most=1.02, digits=3),
            )
        )
        rows += [
            (
                f"{model_name}, T {T}",
                name,
                f"{seconds[name]:.3f}",
                f"{seconds[name] / off:.3f}",
                f"{seconds[name] - off:+.3f}",
            )
            for name in captures
            if name != "off"
        ]
    text = (
        f"Milliseconds of one forward pass at batch 1 by {clock_name()}, best of {3 * scale.rounds} (the "
        f"small model: {12 * scale.rounds}), rounds interleaved. The row *off* is compared with "
        "the same decoder without code for capturing, the other rows with *off*. "
        "Capturing `scores`, `scores_seen` or `probs` makes those layers use eager attention."
    )
    return Table("Captured activations", text, ("model", "capture", "ms", "ratio", "target, or extra ms"), rows)
