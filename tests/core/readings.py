"""What the laws are tried on: decoders of every family and variant, and drawn readings with cuts and dead slots."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.cache import KVCache
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.models.rope import RopeConfig
from tests.tolerances import FLOORS, LEAST_FLOOR, ORACLE, error, largest

FAMILIES = tuple(WEIGHT_NAMES)
GAPS = tuple(1.0 + i / 3 for i in range(8))  # of longrope: E / 2 numbers
ROPES = {
    "linear": RopeConfig("linear", factor=3.0),
    "dynamic": RopeConfig("dynamic", factor=2.0),
    "llama3": RopeConfig("llama3", factor=8.0, original_max_position_embeddings=16),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32),
    "longrope": RopeConfig("longrope", original_max_position_embeddings=64, short_factor=GAPS, long_factor=GAPS[::-1]),
}
VARIANTS: dict[str, dict[str, Any]] = {family: {"family": family} for family in FAMILIES} | {
    "llama, windows": {"family": "llama", "sliding_windows": (None, 5)},
    "mistral, window of 1": {"family": "mistral", "sliding_windows": (3, 1)},
    "llama, one head of keys, tied": {"family": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt2, scale by layer": {"family": "gpt2", "attention_scales": (1.0, 0.5)},
    **{f"llama, {kind}": {"family": "llama", "rope": rope} for kind, rope in ROPES.items()},
}
SOME = (*FAMILIES, "llama, windows", "llama, one head of keys, tied")  # where the scaling of RoPE does not matter
WINDOWLESS = tuple(name for name in VARIANTS if "window" not in name and name != "mistral")


def fresh(name: str, **changes: Any) -> Decoder:
    """A decoder in float32 whose every weight matters: norms away from 1, biases away from 0, peaked attention."""
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
    """`fresh`, shared between tests, the same weights in either type; do not change it."""
    return fresh(name).to(dtype).requires_grad_(False)


def small(name: str, **changes: Any) -> Decoder:
    """A decoder of width 8, for derivatives by finite differences."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12}
    if name in ("gpt2", "opt"):
        sizes |= {"num_key_value_heads": 2}
    return fresh(name, **sizes, head_dim=4, attention_scales=(0.5, 0.5), **changes).double().requires_grad_(False)


@dataclass(frozen=True)
class Reading:
    """Vectors [B, T, D] with which slots are live, and where to cut."""

    vectors: Tensor
    live: Tensor
    cuts: tuple[int, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        ends = (0, *self.cuts, self.vectors.shape[1])
        return list(pairwise(ends))

    def to(self, dtype: torch.dtype) -> "Reading":
        return Reading(self.vectors.to(dtype), self.live, self.cuts)


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal noise of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def patterns(draw: st.DrawFn, T: int) -> list[bool]:
    """Which of T slots are live: all, all but some on the left, on the right, or anywhere; at least one."""
    n = draw(st.integers(0, T - 1))
    anywhere = st.lists(st.booleans(), min_size=T, max_size=T).filter(any)
    padded = st.sampled_from([[True] * T, [False] * n + [True] * (T - n), [True] * (T - n) + [False] * n])
    return draw(st.one_of(padded, anywhere))


@st.composite
def readings(draw: st.DrawFn, *, B: int = 3, T: int = 14, D: int = 48, dead: bool = True) -> Reading:
    """Up to B rows of 2 to T slots."""
    rows, slots = draw(st.integers(1, B)), draw(st.integers(2, T))
    live = [draw(patterns(slots)) if dead else [True] * slots for _ in range(rows)]
    cuts = draw(st.sets(st.integers(1, slots - 1), max_size=3))
    vectors = noise(draw(st.integers(0, 10**6)), rows, slots, D)
    return Reading(vectors, torch.tensor(live), tuple(sorted(cuts)))


def at_once(decoder: Decoder, reading: Reading, want: tuple[str, ...] = ()) -> DecoderOutput:
    return decoder(reading.vectors, live=reading.live, want=want)


def in_pieces(decoder: Decoder, reading: Reading, want: tuple[str, ...] = ()) -> list[DecoderOutput]:
    """One pass for each span between cuts, each on the state of the one before."""
    state: KVCache | None = None
    passes: list[DecoderOutput] = []
    for start, end in reading.spans:
        passes.append(decoder(reading.vectors[:, start:end], state, live=reading.live[:, start:end], want=want))
        state = passes[-1].cache
    return passes


def alone(decoder: Decoder, reading: Reading, row: int) -> DecoderOutput:
    """One row, only its live vectors."""
    return decoder(reading.vectors[row : row + 1, reading.live[row]])


def held(state: KVCache, row: int) -> list[Tensor]:
    """What the live slots of a row hold: keys and values of all layers, positions."""
    live = state.valid[row]
    return [x[row][:, live] for x in (*state.keys, *state.values)] + [state.positions[row, live]]


def same(got: Tensor, asked: Tensor, within: float = ORACLE) -> None:
    """float64: to `within` of the largest magnitude."""
    assert largest(got, asked) <= within, f"{largest(got, asked):.2e} apart, allowed {within:.0e}"


def all_same(got: Iterable[Tensor], asked: Iterable[Tensor]) -> None:
    """`same` for several tensors, one that is nearly zero measured by the others: gradients that cancel."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(got, asked, strict=True) if x.numel() + y.numel()]
    scale = max(y.abs().max().item() for _, y in pairs)
    for x, y in pairs:
        far, size = (x - y).abs().max().item(), max(y.abs().max().item(), 1e-2 * scale)
        assert far <= ORACLE * size, f"{far / size:.2e} apart, allowed {ORACLE:.0e}"


def same_held(got: KVCache, asked: KVCache) -> None:
    """Two states of equal rows hold the same in their live slots."""
    for row in range(asked.B):
        for x, y in zip(held(got, row), held(asked, row), strict=True):
            same(x, y)


def within_floor(name: str, way: Callable[[Decoder], Tensor], other: Callable[[Decoder], Tensor]) -> None:
    """float32: two ways are as near as ten times the way to float64."""
    narrow, wide = decoder_of(name, torch.float32), decoder_of(name)
    floor = max(LEAST_FLOOR, error(other(narrow), other(wide)))
    assert error(way(narrow), other(narrow)) <= FLOORS * floor


def axes(config: DecoderConfig) -> dict[str, list[str]]:
    """The letters of the shape of every stage of a family."""
    return {stage.name: stage.shape.split() for stage in (*layer_activations(config), *MODEL_ACTIVATIONS)}
