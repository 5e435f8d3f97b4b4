"""Inputs of a parity comparison, and the activations of a forward pass, by key or layer by layer.

Symbols: B rows, T new positions, S cached positions, P = S + T, D width, L layers.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laconic.models import activations as models_activations
from laconic.models import cache_slots
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.verification.float64_copy import Float64Decoder, compute_dtype

FINAL_STAGES = ("final_norm", "logits", "last_logits", "token", "next_probs")


@dataclass(frozen=True)
class ParityCase:
    """One input of a parity comparison, with how it is read; either `ids` or `vectors` is set."""

    name: str
    ids: Tensor | None = None  # token ids [B, T]
    vectors: Tensor | None = None  # input embeddings [B, T, D]
    valid: Tensor | None = None  # True at real tokens [B, T]; None: all
    positions: Tensor | None = None  # position ids [B, T]; None: the number of valid tokens before each slot
    pass_positions: bool = False  # to the decoder, which otherwise must find them itself (Eq. C22)
    bias: Tensor | None = None  # attention bias [B, T, T]
    piece_sizes: tuple[int, ...] = ()  # of the pieces that are read one after another on the cache; (): all at once
    query_scale: float = 1.0  # factor on the query weights; a power of two, so that it is undone bit for bit
    warmup_tokens: int = 0  # unrelated tokens to read first and discard
    extra_tokens: int = 0  # tokens to read after each piece and crop off the cache again
    covered_inputs: tuple[str, ...] = ()  # required inputs (I1 to I17) that this case covers; by default its name

    def __post_init__(self) -> None:
        if not self.covered_inputs:
            object.__setattr__(self, "covered_inputs", (self.name,))

    @property
    def inputs(self) -> Tensor:
        x = self.ids if self.ids is not None else self.vectors
        assert x is not None
        return x

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and positions (B, T)."""
        return self.inputs.shape[0], self.inputs.shape[1]

    @property
    def valid_mask(self) -> Tensor:
        """`valid` as a tensor [B, T] even if it is None."""
        return torch.ones(self.shape, dtype=torch.bool, device=self.device) if self.valid is None else self.valid

    @property
    def position_ids(self) -> Tensor:
        """`positions`, or the number of valid tokens before each slot, 0 for padding."""
        valid = self.valid_mask.long()
        return (valid.cumsum(1) - valid) * valid if self.positions is None else self.positions

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def to(self, device: torch.device) -> "ParityCase":
        tensors = {name: getattr(self, name) for name in ("ids", "vectors", "valid", "positions", "bias")}
        return replace(self, **{name: None if t is None else t.to(device) for name, t in tensors.items()})

    def pieces(self) -> list[tuple[int, int]]:
        sizes = self.piece_sizes or (self.shape[1],)
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    def embed(self, decoder: Decoder) -> Tensor:
        """Return the input embeddings in the decoder's compute dtype; ids are embedded with its own weights."""
        source = decoder.source[0] if isinstance(decoder, Float64Decoder) else decoder
        if self.ids is not None:
            return source.embed(self.ids.to(source.device)).detach().to(compute_dtype(decoder))
        return self.inputs.to(source.device, source.dtype).to(compute_dtype(decoder))


@dataclass
class LayerActivations:
    """Activations of one layer of one piece by name; layer -1 is before the first layer, L after the last."""

    piece: int
    layer: int
    activations: dict[str, Tensor] = field(default_factory=dict)


def layer_index(decoder: Decoder, layer: int) -> int | None:
    """Return a layer of `LayerActivations` as an index; None before the first layer and after the last."""
    return layer if 0 <= layer < len(decoder.layers) else None


def stage_key(name: str, layer: int | None = None, piece: int = 0, pieces: int = 1) -> str:
    """Return the key of an activation: `q_rot.3`, with several pieces `q_rot.3/1`, without a layer `logits`."""
    return name + ("" if layer is None else f".{layer}") + (f"/{piece}" if pieces > 1 else "")


def parse_stage_key(key: str) -> tuple[str, int | None, int]:
    """Return name, layer and piece of a key."""
    stage, _, piece = key.partition("/")
    name, _, layer = stage.partition(".")
    return name, int(layer) if layer else None, int(piece or 0)


def replay_stages(stages: Mapping[str, Tensor], case: ParityCase, num_layers: int) -> Iterator[LayerActivations]:
    """Yield stored activations layer by layer, in the order of computation, with each block's input `x`.

    It keeps none that it has yielded.
    """
    layers: defaultdict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
    for key, t in stages.items():
        name, index, piece = parse_stage_key(key)
        layer = index if index is not None else -1 if name == "embed" else num_layers
        layers[piece, layer][name] = t
        if name in ("embed", "resid2"):
            layers[piece, layer + 1]["x"] = t
    stages, t = {}, None  # only `layers` refers to them now
    for piece in range(len(case.pieces())):
        for layer in range(-1, num_layers + 1):
            yield LayerActivations(piece, layer, layers.pop((piece, layer), {}))


def iterate_stages(decoder: Decoder, case: ParityCase) -> Iterator[LayerActivations]:
    """Run a case with eager attention and yield the activations layer by layer."""
    return replay_stages(trace_stages(decoder, case), case, len(decoder.layers))


def trace_stages(decoder: Decoder, case: ParityCase) -> dict[str, Tensor]:
    """Run a case with eager attention and return every activation by key, in the order of computation."""
    eager = copy.copy(decoder)  # shares the modules
    eager.attn_implementation = "eager"
    layer_stages = (stage.name for stage in models_activations.layer_activations(decoder.config))
    return run_case(eager, case, ("embed", *layer_stages, *FINAL_STAGES))


@torch.no_grad()
def run_case(decoder: Decoder, case: ParityCase, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Run the pieces of a case one after another on one cache, and return the named activations by key."""
    embeddings = case.embed(decoder)
    pieces = case.pieces()
    stages: dict[str, Tensor] = {}
    cache: KVCache | None = None
    if case.warmup_tokens:
        decoder(embeddings.flip(1)[:, : case.warmup_tokens] * 0.5)
    for piece, (S, T) in enumerate(pieces):
        output = decoder(embeddings[:, S : S + T], cache, **forward_arguments(case, S, T), capture=names)
        cache = output.cache
        stages |= {stage_key(name, None, piece, len(pieces)): t for name, t in output.activations.items()}
        if case.extra_tokens:
            cache = decoder(embeddings.flip(1)[:, : case.extra_tokens], cache).cache.crop(S + T)
    return stages


def forward_arguments(case: ParityCase, S: int, T: int) -> dict[str, Tensor | None]:
    return {
        "attention_mask": None if case.valid is None else case.valid[:, S : S + T],
        "position_ids": case.position_ids[:, S : S + T] if case.pass_positions else None,
        "attention_bias": None if case.bias is None else case.bias[:, S : S + T, : S + T],
    }


def expected_position_ids(case: ParityCase, S: int, T: int) -> Tensor:
    """Return the position ids that are passed up to the end of a piece, or as the decoder finds them (Eq. C22)."""
    if case.pass_positions:
        return case.position_ids[:, : S + T]
    position_ids = torch.zeros(case.shape[0], 0, dtype=torch.long, device=case.device)
    for start, size in case.pieces():
        if start <= S:
            valid = case.valid_mask[:, start : start + size]
            new = cache_slots.default_position_ids(valid, position_ids, case.valid_mask[:, :start])
            position_ids = torch.cat([position_ids, new], 1)
    return position_ids


@contextmanager
def sharpened_queries(decoder: Decoder, factor: float) -> Iterator[None]:
    """Multiply the decoder's query weights by a power of two, and restore them on exit."""
    config, names = decoder.config, decoder.weight_names
    rows = config.num_attention_heads * config.head_dim
    name = names.q_norm if config.qk_norm else names.qkv or names.q
    assert name
    with scaled([p[:rows] for block in decoder.layers for p in block.get_submodule(name).parameters()], factor):
        yield


@contextmanager
def scaled(weights: list[Tensor], factor: float) -> Iterator[None]:
    """Multiply weights in place by a power of two, and restore them bit for bit on exit."""
    weights = [w.detach() for w in weights] if factor != 1.0 else []
    for w in weights:
        w.mul_(factor)
    try:
        yield
    finally:
        for w in weights:
            w.mul_(1 / factor)
