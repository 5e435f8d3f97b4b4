"""Fixtures of the model tests: decoders of every family and variant, random batches with padding and cuts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.block import Block
from laconic.models.cache import KVCache
from laconic.models.config import WEIGHT_NAMES, DecoderConfig, RopeConfig
from laconic.models.decoder import Decoder, DecoderOutput
from tests.conftest import needs
from tests.tolerances import FLOORS, LEAST_FLOOR, ORACLE, error, largest

FAMILIES = tuple(family for family in WEIGHT_NAMES if family != "smollm3")  # which is Llama but for `nope_layers`
GAPS = tuple(1.0 + i / 3 for i in range(8))  # factors for longrope: E / 2 numbers
ROPES = {
    "linear": RopeConfig("linear", factor=3.0),
    "dynamic": RopeConfig("dynamic", factor=2.0),
    "llama3": RopeConfig("llama3", factor=8.0, original_max_position_embeddings=16),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32),
    "longrope": RopeConfig("longrope", original_max_position_embeddings=64, short_factor=GAPS, long_factor=GAPS[::-1]),
}
VARIANTS: dict[str, dict[str, Any]] = {family: {"family": family} for family in WEIGHT_NAMES} | {
    "llama, windows": {"family": "llama", "sliding_windows": (None, 5)},
    "mistral, window of 1": {"family": "mistral", "sliding_windows": (3, 1)},
    "llama, one head of keys, tied": {"family": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt2, scale by layer": {"family": "gpt2", "attention_scales": (1.0, 0.5)},
    **{f"llama, {kind}": {"family": "llama", "rope": rope} for kind, rope in ROPES.items()},
}
SOME = (*FAMILIES, "llama, windows", "llama, one head of keys, tied")  # for tests that do not depend on RoPE scaling
WINDOWLESS = tuple(name for name in VARIANTS if "window" not in name and name != "mistral")


def fresh(name: str, **changes: Any) -> Decoder:
    """Return a float32 decoder in which every weight matters: norms not 1, biases not 0, peaked attention."""
    settings = VARIANTS[name] | changes
    decoder = Decoder(DecoderConfig.tiny(settings["family"], **{k: v for k, v in settings.items() if k != "family"}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in decoder.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.25 if p.ndim == 2 else p + noise * 0.3)
    return decoder.eval()


@cache
def decoder_of(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return `fresh(name)`, cached and shared between tests; do not modify it."""
    return fresh(name).to(dtype).requires_grad_(False)


def small(name: str, **changes: Any) -> Decoder:
    """Return a float64 decoder of width 8, for finite differences."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12}
    if name in ("gpt2", "opt"):
        sizes |= {"num_key_value_heads": 2}
    return fresh(name, **sizes, head_dim=4, attention_scales=(0.5, 0.5), **changes).double().requires_grad_(False)


def random_block(family: str) -> Block:
    """Return a block with random parameters, including norms and biases."""
    block = Block(DecoderConfig.tiny(family), 0).double()
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn_like(p) * 0.4 + (0.8 if p.ndim == 1 else 0.0))
    return block


def qkv_parameters(block: Block) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """Return weight and bias of q, k and v; GPT-2's fused projection is split."""
    if block.weight_names.qkv:
        fused = block.submodule("qkv")
        return tuple(zip(fused.weight.chunk(3), fused.bias.chunk(3), strict=True))
    return tuple((block.submodule(role).weight, block.submodule(role).bias) for role in ("q", "k", "v"))


@dataclass(frozen=True)
class EmbedBatch:
    """Embeddings [B, T, D] with an attention mask, and columns at which to cut them into chunks."""

    inputs_embeds: Tensor
    attention_mask: Tensor
    cuts: tuple[int, ...]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        ends = (0, *self.cuts, self.inputs_embeds.shape[1])
        return list(pairwise(ends))

    def to(self, dtype: torch.dtype) -> "EmbedBatch":
        return EmbedBatch(self.inputs_embeds.to(dtype), self.attention_mask, self.cuts)


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal noise."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def masks(draw: st.DrawFn, T: int) -> list[bool]:
    """Draw a mask over T slots: padded on the left, on the right, or anywhere; at least one slot is real."""
    n = draw(st.integers(0, T - 1))
    anywhere = st.lists(st.booleans(), min_size=T, max_size=T).filter(any)
    padded = st.sampled_from([[True] * T, [False] * n + [True] * (T - n), [True] * (T - n) + [False] * n])
    return draw(st.one_of(padded, anywhere))


@st.composite
def embed_batches(draw: st.DrawFn, *, B: int = 3, T: int = 14, D: int = 48, padding: bool = True) -> EmbedBatch:
    """Draw a batch of up to B rows and 2 to T slots."""
    rows, slots = draw(st.integers(1, B)), draw(st.integers(2, T))
    mask = [draw(masks(slots)) if padding else [True] * slots for _ in range(rows)]
    cuts = draw(st.sets(st.integers(1, slots - 1), max_size=3))
    embeds = noise(draw(st.integers(0, 10**6)), rows, slots, D)
    return EmbedBatch(embeds, torch.tensor(mask), tuple(sorted(cuts)))


def read_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """Return the logits of token ids [B, T]."""
    return decoder.logits(decoder(decoder.embed(ids)).hidden_states)


def transformers_logits(folder: Path, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits of transformers' model of a folder, in float32."""
    needs("transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()(ids).logits.detach()


def read_whole(decoder: Decoder, batch: EmbedBatch, capture: tuple[str, ...] = ()) -> DecoderOutput:
    """Run one forward pass over the batch."""
    return decoder(batch.inputs_embeds, attention_mask=batch.attention_mask, capture=capture)


def read_in_chunks(
    decoder: Decoder, batch: EmbedBatch, capture: tuple[str, ...] = (), cache: KVCache | None = None
) -> list[DecoderOutput]:
    """Run one forward pass per chunk, each on the cache of the one before."""
    outputs: list[DecoderOutput] = []
    for start, end in batch.chunks:
        mask = batch.attention_mask[:, start:end]
        outputs.append(decoder(batch.inputs_embeds[:, start:end], cache, attention_mask=mask, capture=capture))
        cache = outputs[-1].cache
    return outputs


def read_row_alone(decoder: Decoder, batch: EmbedBatch, row: int) -> DecoderOutput:
    """Run a forward pass over the real slots of one row."""
    return decoder(batch.inputs_embeds[row : row + 1, batch.attention_mask[row]])


def valid_slots(cache: KVCache, row: int) -> list[Tensor]:
    """Return keys, values and positions of a row's valid slots."""
    valid = cache.valid[row]
    return [x[row][:, valid] for x in (*cache.keys, *cache.values)] + [cache.positions[row, valid]]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = ORACLE) -> None:
    """Assert that the largest difference is within `tolerance` of the largest magnitude (float64)."""
    difference = largest(actual, expected)
    assert difference <= tolerance, f"relative difference {difference:.2e} exceeds {tolerance:.0e}"


def assert_all_close(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Assert `assert_close` for several tensors; gradients that cancel to nearly 0 are scaled by the others."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(actual, expected, strict=True) if x.numel() + y.numel()]
    scale = max(y.abs().max().item() for _, y in pairs)
    for x, y in pairs:
        difference, size = (x - y).abs().max().item(), max(y.abs().max().item(), 1e-2 * scale)
        assert difference <= ORACLE * size, f"relative difference {difference / size:.2e} exceeds {ORACLE:.0e}"


def assert_same_cache(actual: KVCache, expected: KVCache) -> None:
    """Assert that the valid slots of two caches agree."""
    for row in range(expected.B):
        for x, y in zip(valid_slots(actual, row), valid_slots(expected, row), strict=True):
            assert_close(x, y)


def assert_within_float32_floor(
    name: str, run: Callable[[Decoder], Tensor], reference: Callable[[Decoder], Tensor]
) -> None:
    """Assert that two float32 computations differ by at most ten times float32's own error to float64."""
    float32, float64 = decoder_of(name, torch.float32), decoder_of(name)
    floor = max(LEAST_FLOOR, error(reference(float32), reference(float64)))
    assert error(run(float32), reference(float32)) <= FLOORS * floor


def activation_axes(config: DecoderConfig) -> dict[str, list[str]]:
    """Return the letters of the shape of every activation of a family."""
    return {row.name: row.shape.split() for row in (*layer_activations(config), *MODEL_ACTIVATIONS)}
