"""The required inputs I1 to I17: each made for one decoder, or a reason why it cannot be made.

Shapes: B rows, T slots, P slots held and new, D width, V vocabulary; W window, Pmax positions of the model.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig
from laconic.verify.traces import Case

INPUTS = {
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
LONGEST = 1_024
"""Slots of the longest case: scores of all heads are held for it."""
FAR = 3_000
SWITCHED = ("dynamic", "longrope")


class Inputs(NamedTuple):
    """Cases; inputs that no model of the family can have; and inputs that this model cannot have, each with why."""

    cases: list[Case]
    foreign: dict[str, str]
    missing: dict[str, str]


class Maker:
    """Draws ids and vectors for one decoder from one seed."""

    def __init__(self, decoder: Decoder, seed: int = 0) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.generator = torch.Generator().manual_seed(seed)

    def ids(self, B: int, T: int) -> Tensor:
        """Words, any."""
        return torch.randint(0, self.config.vocab_size, (B, T), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers in float32."""
        return torch.randn(shape, generator=self.generator)

    def fits(self, T: int) -> int:
        """T, or what a learned table has room for."""
        return min(T, self.config.max_position_embeddings) if self.config.place == "table" else T

    def fed_back(self, ids: Tensor, rounds: int) -> Tensor:
        """The vectors of words, then hidden states read again one after the other."""
        with torch.no_grad():
            vectors = [self.decoder.embed(ids)]
            seen = self.decoder(vectors[0])
            for _ in range(rounds):
                vectors.append(seen.hidden[:, -1:])
                seen = self.decoder(vectors[-1], seen.state)
        return torch.cat(vectors, 1)


def windows(config: DecoderConfig) -> list[int]:
    """The windows there are."""
    return [W for W in config.windows if W is not None]


def start_at(start: int, B: int, T: int) -> Tensor:
    """Positions start … start + T − 1 in every row."""
    return (start + torch.arange(T)).repeat(B, 1)


def live_rows(lengths: list[int], T: int) -> Tensor:
    """Rows of T slots of which the last so many are live."""
    return torch.arange(T) >= T - torch.tensor(lengths)[:, None]


def weights_away(decoder: Decoder) -> bool:
    """Whether the norms' weights and the biases are such that forgetting them would show."""
    for name, p in decoder.named_parameters():
        norm = p.ndim == 1 and not name.endswith("bias")
        spread = (p.detach().float() - float(norm)).square().mean().sqrt() if p.ndim == 1 else torch.ones(())
        if spread < (1e-2 if norm else 1e-3):
            return False
    return True


def inputs(decoder: Decoder, seed: int = 0) -> Inputs:
    """Every required input that this decoder can have."""
    config, make = decoder.config, Maker(decoder, seed)
    cases = [*plain(make), *placed(make), *cached(make)]
    foreign, missing, also = {}, {}, []
    G, H, E = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    for name, holds, why in (
        ("I3", 1 < G < H, f"G is {G} of {H} heads"),
        ("I4", config.hidden_size != E * H, f"head_dim is {E} = D / H"),
    ):
        if holds:
            also.append(name)
        elif config.place == "table":
            foreign[name] = f"{config.family} has {'as many key heads as heads' if name == 'I3' else 'heads of D / H'}"
        else:
            missing[name] = why
    if weights_away(decoder):
        also.append("I6")
    else:
        missing["I6"] = "a norm's weight is 1 or a bias 0"
    if config.place == "table":
        foreign["I15"] = f"{config.family} has no RoPE"
    long = [W for W in windows(config) if W + 8 > LONGEST]
    if long:
        missing["I1"] = f"a window of {max(long):,} is longer than {LONGEST:,} slots"
    if windows(config) and min(windows(config)) < 6:
        missing["I9"] = f"a window of {min(windows(config))} counts dead slots in the reference"
    cases = [replace(case, covers=(case.name, *also)) if case.name == "I8" else case for case in cases]
    held = {name for case in cases for name in case.covers}
    return Inputs([case for case in cases if case.name not in missing], foreign, {
        name: missing.get(name, "could not be made") for name in INPUTS if name not in foreign and name not in held
    } | missing)  # fmt: skip


def plain(make: Maker) -> list[Case]:
    """Read at once, from the first position."""
    config = make.config
    D, T = config.hidden_size, make.fits(16)
    W = min(windows(config), default=T)
    n = min(T, W, 12)
    middle = torch.ones(2, n, dtype=torch.bool)
    middle[0, n // 2 : n // 2 + 2] = middle[1, n - 2 :] = middle[1, 1] = False
    long = make.fits(max(160, *(W + 8 for W in windows(config)), 0))
    return [
        Case("I1", make.ids(1, min(long, LONGEST))),
        Case("I5", vectors=make.normal(2, T, D) * 0.01),
        Case("I7", make.ids(2, T), peak=8.0),
        Case("I8", make.ids(3, T), live=live_rows([T, T * 2 // 3, 3], T)),
        Case("I9", make.ids(2, n), live=middle),
        Case("I12", make.ids(2, T), before=5, cuts=(T - 3, 3), stray=2),
        Case("I16", make.ids(2, T), bias=make.normal(2, T, T) * 2),
        Case("I17", make.ids(8, 1)),
    ]


def placed(make: Maker) -> list[Case]:
    """Read at once, far from the first position."""
    config = make.config
    T, Pmax, rope = make.fits(16), config.max_position_embeddings, config.rope
    far = FAR if rope is not None and rope.kind not in SWITCHED else max(Pmax - T, 0)
    cases = [
        Case("I2", make.ids(2, T), positions=start_at(far, 2, T), given=True),
        Case("I14", make.ids(2, T), positions=start_at(max(Pmax - T, 0), 2, T), given=True),
    ]
    if rope is None:
        return cases
    switch = Pmax if rope.kind == "dynamic" else rope.original
    return [
        *cases,
        Case("I15", make.ids(2, T), note=f"{rope.kind}, short of {switch:,}"),
        Case(
            "I15 long", make.ids(2, T), positions=start_at(switch + switch // 2, 2, T), given=True, covers=("I15",),
            note=f"{rope.kind}, long of {switch:,}",
        ),
    ]  # fmt: skip


def cached(make: Maker) -> list[Case]:
    """Read in pieces."""
    T = make.fits(16)
    prompt, rounds = make.ids(2, 6), 6
    loop = make.fed_back(prompt, rounds)
    return [
        Case("I10", make.ids(2, T), live=live_rows([T, T - 4], T), cuts=(T - 9, 1, 5, 3)),
        Case("I11", make.ids(2, 10), cuts=(3, *(1,) * 7)),
        Case("I13", vectors=loop, cuts=(6, *(1,) * rounds)),
    ]
