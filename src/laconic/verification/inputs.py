"""The required inputs I1 to I17 of a parity run, built for one decoder, or the reason why one cannot be built.

Symbols: B rows, T positions, D width, V vocabulary, W sliding window, Pmax the model's number of positions.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.verification.traces import ParityCase

REQUIRED_INPUTS = {
    "I1": "T beyond every sliding window",
    "I2": "positions in the thousands, or up to Pmax",
    "I3": "grouped-query attention: 1 < key heads < query heads",
    "I4": "head_dim other than D / H",
    "I5": "input embeddings of rms 0.01",
    "I6": "norm weights away from 1, biases away from 0",
    "I7": "peaked attention, queries × 8",
    "I8": "a batch padded on the left",
    "I9": "padding on the right and in the middle",
    "I10": "prefill in uneven pieces",
    "I11": "one token at a time on the KV cache",
    "I12": "a decoder used before; cropped caches",
    "I13": "continuous inputs: six hidden states fed back",
    "I14": "the last position",
    "I15": "RoPE scaling on both sides of its switch",
    "I16": "an attention bias",
    "I17": "a single token without a cache, eight rows",
}
MAX_CASE_TOKENS = 512  # length of the longest case; its attention scores of all heads fit into memory
FAR_START = 3_000
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class ParityInputs(NamedTuple):
    """The cases of a decoder, and the reasons for inputs without a case."""

    cases: list[ParityCase]
    inapplicable: dict[str, str]  # no model of the family can have the input
    unavailable: dict[str, str]  # only this model cannot


class InputBuilder:
    """Generate random ids and vectors for one decoder, always the same."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.generator = torch.Generator().manual_seed(0)

    def random_ids(self, B: int, T: int) -> Tensor:
        return torch.randint(0, self.config.vocab_size, (B, T), generator=self.generator)

    def random_normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def clamp_length(self, T: int) -> int:
        """Return T, or the size of a learned position table if it is smaller."""
        return min(T, self.config.max_position_embeddings) if self.config.position_encoding == "table" else T

    def feed_back_hidden(self, ids: Tensor, num_passes: int) -> Tensor:
        """Return token embeddings followed by `num_passes` hidden states, each fed back as the next input."""
        with torch.no_grad():
            vectors = [self.decoder.embed(ids.to(self.decoder.device))]
            output = self.decoder(vectors[0])
            for _ in range(num_passes):
                vectors.append(output.hidden_states[:, -1:])
                output = self.decoder(vectors[-1], output.cache)
        return torch.cat(vectors, 1)


def attention_windows(config: DecoderConfig) -> list[int]:
    return [W for W in config.sliding_windows if W is not None]


def left_padded_mask(lengths: list[int], T: int) -> Tensor:
    """Return a mask [B, T] of rows padded on the left to T."""
    return torch.arange(T) >= T - torch.tensor(lengths)[:, None]


def has_nontrivial_norms(decoder: Decoder) -> bool:
    """Return whether norm weights and biases are far enough from 1 and 0 that leaving them out would show."""
    for name, p in decoder.named_parameters():
        if p.ndim != 1:
            continue
        neutral, least_rms = (0.0, 1e-3) if name.endswith("bias") else (1.0, 1e-2)
        if (p.detach().float() - neutral).square().mean().sqrt() < least_rms:
            return False
    return True


def build_inputs(decoder: Decoder) -> ParityInputs:
    """Build the cases that cover the required inputs, and find the reasons for inputs that remain without a case."""
    config = decoder.config
    builder = InputBuilder(decoder)
    cases = [*single_pass_cases(builder), *position_cases(builder), *incremental_cases(builder)]
    inapplicable: dict[str, str] = {}
    unavailable: dict[str, str] = {}
    properties: list[str] = []  # inputs that are properties of the model and hold in every case
    G, H, E = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    has_table = config.position_encoding == "table"
    for name, applies, family_reason, reason in (
        ("I3", 1 < G < H, "as many key heads as query heads", f"{G} key heads of {H} heads"),
        ("I4", config.hidden_size != E * H, "heads of size D / H", f"head_dim is {E} = D / H"),
    ):
        if applies:
            properties.append(name)
        elif has_table:
            inapplicable[name] = f"{config.family} has {family_reason}"
        else:
            unavailable[name] = reason
    if has_nontrivial_norms(decoder):
        properties.append("I6")
    else:
        unavailable["I6"] = "a norm weight is 1 or a bias is 0"
    if has_table:
        inapplicable["I15"] = f"{config.family} has no RoPE"
    windows = attention_windows(config)
    if windows and max(windows) + 8 > MAX_CASE_TOKENS:
        unavailable["I1"] = f"a sliding window of {max(windows):,} exceeds {MAX_CASE_TOKENS:,} tokens"
    if windows and min(windows) < 6:
        unavailable["I9"] = f"with a sliding window of {min(windows)} the reference counts padding"
    # every case has the model's properties; one of them reports these inputs
    cases = [replace(case, covered_inputs=(case.name, *properties)) if case.name == "I8" else case for case in cases]
    covered = {name for case in cases for name in case.covered_inputs}
    missing = [name for name in REQUIRED_INPUTS if name not in inapplicable and name not in covered]
    for name in missing:
        unavailable.setdefault(name, "could not be built")
    usable = [case.to(decoder.device) for case in cases if case.name not in unavailable]
    return ParityInputs(usable, inapplicable, unavailable)


def single_pass_cases(builder: InputBuilder) -> list[ParityCase]:
    windows = attention_windows(builder.config)
    D, T = builder.config.hidden_size, builder.clamp_length(16)
    n = min(T, min(windows, default=T), 12)
    has_gaps = torch.ones(2, n, dtype=torch.bool)
    has_gaps[0, n // 2 : n // 2 + 2] = False
    has_gaps[1, n - 2 :] = False
    has_gaps[1, 1] = False
    long = builder.clamp_length(max([160, *(W + 8 for W in windows)]))
    return [
        ParityCase("I1", builder.random_ids(1, min(long, MAX_CASE_TOKENS))),
        ParityCase("I5", vectors=builder.random_normal(2, T, D) * 0.01),
        ParityCase("I7", builder.random_ids(2, T), query_scale=8.0),
        ParityCase("I8", builder.random_ids(3, T), valid=left_padded_mask([T, T * 2 // 3, 3], T)),
        ParityCase("I9", builder.random_ids(2, n), valid=has_gaps),
        ParityCase("I12", builder.random_ids(2, T), warmup_tokens=5, piece_sizes=(T - 3, 3), extra_tokens=2),
        ParityCase("I16", builder.random_ids(2, T), bias=builder.random_normal(2, T, T) * 2),
        ParityCase("I17", builder.random_ids(8, 1)),
    ]


def position_cases(builder: InputBuilder) -> list[ParityCase]:
    T = builder.clamp_length(16)
    Pmax = builder.config.max_position_embeddings
    rope = builder.config.rope
    last = max(Pmax - T, 0)
    far = FAR_START if rope is not None and rope.kind not in LENGTH_DEPENDENT_ROPE else last

    def case_at(name: str, start: int, covered: tuple[str, ...] = ()) -> ParityCase:
        positions = (start + torch.arange(T)).repeat(2, 1)
        return ParityCase(
            name, builder.random_ids(2, T), positions=positions, pass_positions=True, covered_inputs=covered
        )

    cases = [case_at("I2", far), case_at("I14", last)]
    if rope is None:
        return cases
    switch = Pmax if rope.kind == "dynamic" else rope.pretrained_positions
    return [*cases, ParityCase("I15", builder.random_ids(2, T)), case_at("I15 long", switch + switch // 2, ("I15",))]


def incremental_cases(builder: InputBuilder) -> list[ParityCase]:
    T = builder.clamp_length(16)
    steps = 6
    prompt = builder.random_ids(2, 6)
    fed_back = builder.feed_back_hidden(prompt, steps)
    ragged = left_padded_mask([T, T - 4], T)
    return [
        ParityCase("I10", builder.random_ids(2, T), valid=ragged, piece_sizes=(T - 9, 1, 5, 3)),
        ParityCase("I11", builder.random_ids(2, 10), piece_sizes=(3, *(1,) * 7)),
        ParityCase("I13", vectors=fed_back, piece_sizes=(6, *(1,) * steps)),
    ]
