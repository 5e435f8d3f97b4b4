"""The required inputs I1 to I17: each made for one decoder, or a reason why it cannot be made.

Shapes: B rows, T slots, P slots held and new, D width, V vocabulary; W window, Pmax positions of the model.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.verification.traces import ParityCase

REQUIRED_INPUTS = {
    "I1": "T beyond every window",
    "I2": "start in the thousands, or at Pmax − T",
    "I3": "key heads neither 1 nor all",
    "I4": "head width other than D / H",
    "I5": "vectors of rms 0.01",
    "I6": "norm weights away from 1, biases away from 0",
    "I7": "peaked attention, queries × 8",
    "I8": "a batch padded on the left",
    "I9": "dead slots on the right and in the middle",
    "I10": "prefill in uneven pieces",
    "I11": "one by one on the cache",
    "I12": "used before",
    "I13": "vectors that are no words: six rounds of fed-back hidden states",
    "I14": "the last position",
    "I15": "the scaling of RoPE, short and long of its switch",
    "I16": "a bias",
    "I17": "one slot from nothing, eight rows",
}
MAX_CASE_TOKENS = 1_024
"""Slots of the longest case: scores of all heads are held for it."""
FAR_START = 3_000
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class ParityInputs(NamedTuple):
    """Cases; inputs that no model of the family can have; and inputs that this model cannot have, each with why."""

    cases: list[ParityCase]
    inapplicable: dict[str, str]
    unavailable: dict[str, str]


class InputBuilder:
    """Draws ids and vectors for one decoder from one seed."""

    def __init__(self, decoder: Decoder, seed: int = 0) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.generator = torch.Generator().manual_seed(seed)

    def random_ids(self, B: int, T: int) -> Tensor:
        """Words, any."""
        return torch.randint(0, self.config.vocab_size, (B, T), generator=self.generator)

    def random_normal(self, *shape: int) -> Tensor:
        """Normal numbers in float32."""
        return torch.randn(shape, generator=self.generator)

    def clamp_length(self, T: int) -> int:
        """T, or what a learned table has room for."""
        return min(T, self.config.max_position_embeddings) if self.config.position_encoding == "table" else T

    def feed_back_hidden(self, ids: Tensor, num_passes: int) -> Tensor:
        """The vectors of words, then hidden states read again one after the other."""
        with torch.no_grad():
            vectors = [self.decoder.embed(ids)]
            seen = self.decoder(vectors[0])
            for _ in range(num_passes):
                vectors.append(seen.hidden[:, -1:])
                seen = self.decoder(vectors[-1], seen.state)
        return torch.cat(vectors, 1)


def attention_windows(config: DecoderConfig) -> list[int]:
    """The windows there are."""
    return [W for W in config.sliding_windows if W is not None]


def positions_from(start: int, B: int, T: int) -> Tensor:
    """Positions start … start + T − 1 in every row."""
    return (start + torch.arange(T)).repeat(B, 1)


def left_padded_mask(lengths: list[int], T: int) -> Tensor:
    """Rows of T slots of which the last so many are live."""
    return torch.arange(T) >= T - torch.tensor(lengths)[:, None]


def has_nontrivial_norms(decoder: Decoder) -> bool:
    """Whether the norms' weights and the biases are such that forgetting them would show."""
    for name, p in decoder.named_parameters():
        norm = p.ndim == 1 and not name.endswith("bias")
        spread = (p.detach().float() - float(norm)).square().mean().sqrt() if p.ndim == 1 else torch.ones(())
        if spread < (1e-2 if norm else 1e-3):
            return False
    return True


def build_inputs(decoder: Decoder, seed: int = 0) -> ParityInputs:
    """Every required input that this decoder can have."""
    config, make = decoder.config, InputBuilder(decoder, seed)
    cases = [*single_pass_cases(make), *position_cases(make), *incremental_cases(make)]
    foreign, missing, also = {}, {}, []
    G, H, E = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    for name, holds, why in (
        ("I3", 1 < G < H, f"G is {G} of {H} heads"),
        ("I4", config.hidden_size != E * H, f"head_dim is {E} = D / H"),
    ):
        if holds:
            also.append(name)
        elif config.position_encoding == "table":
            foreign[name] = f"{config.family} has {'as many key heads as heads' if name == 'I3' else 'heads of D / H'}"
        else:
            missing[name] = why
    if has_nontrivial_norms(decoder):
        also.append("I6")
    else:
        missing["I6"] = "a norm's weight is 1 or a bias 0"
    if config.position_encoding == "table":
        foreign["I15"] = f"{config.family} has no RoPE"
    long = [W for W in attention_windows(config) if W + 8 > MAX_CASE_TOKENS]
    if long:
        missing["I1"] = f"a window of {max(long):,} is longer than {MAX_CASE_TOKENS:,} slots"
    if attention_windows(config) and min(attention_windows(config)) < 6:
        missing["I9"] = f"a window of {min(attention_windows(config))} counts dead slots in the reference"
    cases = [replace(case, covered_inputs=(case.name, *also)) if case.name == "I8" else case for case in cases]
    held = {name for case in cases for name in case.covered_inputs}
    return ParityInputs([case for case in cases if case.name not in missing], foreign, {
        name: missing.get(name, "could not be made") for name in REQUIRED_INPUTS if name not in foreign and name not in held
    } | missing)  # fmt: skip


def single_pass_cases(builder: InputBuilder) -> list[ParityCase]:
    """Read at once, from the first position."""
    config = builder.config
    D, T = config.hidden_size, builder.clamp_length(16)
    W = min(attention_windows(config), default=T)
    n = min(T, W, 12)
    middle = torch.ones(2, n, dtype=torch.bool)
    middle[0, n // 2 : n // 2 + 2] = middle[1, n - 2 :] = middle[1, 1] = False
    long = builder.clamp_length(max(160, *(W + 8 for W in attention_windows(config)), 0))
    return [
        ParityCase("I1", builder.random_ids(1, min(long, MAX_CASE_TOKENS))),
        ParityCase("I5", vectors=builder.random_normal(2, T, D) * 0.01),
        ParityCase("I7", builder.random_ids(2, T), query_scale=8.0),
        ParityCase("I8", builder.random_ids(3, T), valid=left_padded_mask([T, T * 2 // 3, 3], T)),
        ParityCase("I9", builder.random_ids(2, n), valid=middle),
        ParityCase("I12", builder.random_ids(2, T), warmup_tokens=5, piece_sizes=(T - 3, 3), extra_tokens=2),
        ParityCase("I16", builder.random_ids(2, T), bias=builder.random_normal(2, T, T) * 2),
        ParityCase("I17", builder.random_ids(8, 1)),
    ]


def position_cases(builder: InputBuilder) -> list[ParityCase]:
    """Read at once, far from the first position."""
    config = builder.config
    T, Pmax, rope = builder.clamp_length(16), config.max_position_embeddings, config.rope
    far = FAR_START if rope is not None and rope.kind not in LENGTH_DEPENDENT_ROPE else max(Pmax - T, 0)
    cases = [
        ParityCase("I2", builder.random_ids(2, T), positions=positions_from(far, 2, T), pass_positions=True),
        ParityCase(
            "I14", builder.random_ids(2, T), positions=positions_from(max(Pmax - T, 0), 2, T), pass_positions=True
        ),
    ]
    if rope is None:
        return cases
    switch = Pmax if rope.kind == "dynamic" else rope.pretrained_positions
    return [
        *cases,
        ParityCase("I15", builder.random_ids(2, T), note=f"{rope.kind}, short of {switch:,}"),
        ParityCase(
            "I15 long", builder.random_ids(2, T), positions=positions_from(switch + switch // 2, 2, T), pass_positions=True, covered_inputs=("I15",),
            note=f"{rope.kind}, long of {switch:,}",
        ),
    ]  # fmt: skip


def incremental_cases(builder: InputBuilder) -> list[ParityCase]:
    """Read in pieces."""
    T = builder.clamp_length(16)
    prompt, rounds = builder.random_ids(2, 6), 6
    loop = builder.feed_back_hidden(prompt, rounds)
    return [
        ParityCase(
            "I10", builder.random_ids(2, T), valid=left_padded_mask([T, T - 4], T), piece_sizes=(T - 9, 1, 5, 3)
        ),
        ParityCase("I11", builder.random_ids(2, 10), piece_sizes=(3, *(1,) * 7)),
        ParityCase("I13", vectors=loop, piece_sizes=(6, *(1,) * rounds)),
    ]
