"""One segment in one pass: what stands before, in and behind its text, where it stands, and the states that come out.

AutoCompressors (arXiv:2305.14788); the variable-length variant (jo100sun/AutoCompressors bb15bc1) for the loop.

Columns are [bos;] memory [M], text [T], places of summaries [n], causal; what is dead is read by nothing. K places
at most, D width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.families import DecoderConfig
from laconic.core.memory import Memory
from laconic.core.places import last_live
from laconic.methods.halting import gate_bias
from laconic.methods.settings import Reading
from laconic.methods.summaries import Summaries

Positions = Literal["contiguous", "reserved", "zero"]
Done = Callable[[Tensor], bool]


class Pass(NamedTuple):
    """What a pass gives: states of the text and of the places behind it, the cache, and its columns of bos."""

    text: Float[Tensor, "B T D"]
    places: Float[Tensor, "B n D"]
    state: Cache
    lead: int


def positions_of(reading: Reading, config: DecoderConfig) -> Positions:
    """Where memory and summaries stand, by the settings or by the family. Raises `Usage` (2) for none under RoPE."""
    if reading.positions == "zero" and config.place == "rope":
        raise Usage(f'positions "zero": {config.family} has RoPE, where each slot stands somewhere; take contiguous')
    return reading.positions or ("zero" if config.place == "table" else "contiguous")


def started(reading: Reading, memory: Memory, bos: int | None) -> Bool[Tensor, "B b"]:
    """Whether the prompt of each row begins with bos: a column, or none where no prompt does."""
    begins = memory.tokens == 0
    if bos is None or reading.bos not in ("sink", "first") or (reading.bos == "first" and not bool(begins.any())):
        return memory.live[:, :0]
    return (begins if reading.bos == "first" else torch.ones_like(begins))[:, None]


def placed(
    kind: Positions, K: int, bos: Bool[Tensor, "B b"], memory: Memory, live: Bool[Tensor, "B T"], n: int
) -> Int[Tensor, "B P"] | None:
    """Positions of bos, memory, text and n places; None: one after another, as they are without being said.

    Zero: memory and places stand nowhere, the text as if it stood alone. Reserved: block k begins K behind block
    k - 1 and the text K behind the last, whatever is live in them.
    """
    if kind == "contiguous":
        return None
    first, text = bos.sum(1, keepdim=True), live.cumsum(1)
    at, none = torch.arange(n, device=live.device), live.new_zeros(bos.shape, dtype=torch.long)
    if kind == "zero":
        before = none.new_full(memory.live.shape, -1)
        return torch.cat([none, before, (first + text - 1) * live, none.new_full((len(live), n), -1)], 1)
    there = memory.block_lengths > 0
    order = F.pad(there.cumsum(1) - 1, (0, 1))
    before = (first + K * order.gather(1, memory.block % order.shape[1]) + memory.ranks) * memory.live
    start = first + K * there.sum(1, keepdim=True)
    return torch.cat([none, before, (start + text - 1) * live, start + live.sum(1, keepdim=True) + at], 1)


class Prompt(NamedTuple):
    """What stands before a text: vectors of bos and memory, which are live, and where; None: one after another."""

    vectors: Float[Tensor, "B P D"]
    live: Bool[Tensor, "B P"]
    positions: Int[Tensor, "B P"] | None


def prompt(
    decoder: Decoder,
    reading: Reading,
    memory: Memory,
    bos: int | None,
    text: Bool[Tensor, "B T"] | None = None,
    places: int = 0,
) -> Prompt:
    """[bos; M_{i-1}]; `live` and `positions` go on with those of a text and of places, if they are given."""
    starts, vectors = started(reading, memory, bos), memory.vectors.to(decoder.words.weight.dtype)
    text = memory.live[:, :0] if text is None else text
    if starts.shape[1]:
        vectors = torch.cat([decoder.embed(torch.full_like(starts, bos or 0, dtype=torch.long)), vectors], 1)
    live = torch.cat([starts, memory.live, text, text.new_ones(len(text), places)], 1)
    kind = positions_of(reading, decoder.config)
    return Prompt(vectors, live, placed(kind, reading.fixed, starts, memory, text, places))


def read(
    decoder: Decoder,
    reading: Reading,
    memory: Memory,
    words: Float[Tensor, "B T D"],
    live: Bool[Tensor, "B T"],
    places: Float[Tensor, "n D"] | None = None,
    bos: int | None = None,
) -> Pass:
    """Eq. AC2: one pass over [bos; M_{i-1}; text; e_1..e_n], in which a soft memory is gated."""
    (B, T), n = live.shape, 0 if places is None else len(places)
    before = prompt(decoder, reading, memory, bos, live, n)
    parts, P = [before.vectors.to(words.dtype), words], before.vectors.shape[1]
    if places is not None:
        parts.append(places.to(words.dtype).expand(B, -1, -1))
    lead, bias = P - memory.M, None
    if memory.log_s is not None:
        bias = gate_bias(memory.log_s, memory.block, lead, T + n)
    seen = decoder(
        torch.cat(parts, 1),
        live=None if bool(before.live.all()) else before.live,
        positions=before.positions,
        bias=bias,
    )
    return Pass(seen.hidden[:, P : P + T], seen.hidden[:, P + T :], seen.state, lead)


def looped(
    decoder: Decoder,
    summaries: Summaries,
    memory: Memory,
    z: Float[Tensor, "B 1 D"],
    before: Pass,
    n: int,
    done: Done | None = None,
) -> Float[Tensor, "B n D"]:
    """Eq. VL2: z_t = hidden of one more position that reads A(z_{t-1}) + step_t, for t = 1..n; z_0 is `z`.

    The loop ends early where `done` says so of the states so far.
    """
    positions, state = None, before.state
    if positions_of(summaries.reading, decoder.config) == "zero":
        positions = torch.full((len(z), 1), -1, device=z.device)
    found: list[Tensor] = []
    for t in range(1, n + 1):
        bias = None
        if memory.log_s is not None:
            tail = state.S + 1 - before.lead - memory.M
            bias = gate_bias(memory.log_s, memory.block, before.lead, tail, state.S)
        seen = decoder(summaries.step(t, z), state, positions=positions, bias=bias)
        z, state = seen.hidden, seen.state
        found.append(z)
        if done is not None and done(torch.cat(found, 1)):
            break
    return torch.cat(found, 1)


class Written(NamedTuple):
    """What compressing a segment gives: states of its text and of the places, and what the ratio head reads."""

    text: Float[Tensor, "B T D"]
    states: Float[Tensor, "B n D"]
    first: Float[Tensor, "B D"]


def write(
    decoder: Decoder,
    summaries: Summaries,
    memory: Memory,
    words: Float[Tensor, "B T D"],
    live: Bool[Tensor, "B T"],
    n: int,
    bos: int | None = None,
    *,
    graph: bool = True,
    done: Done | None = None,
) -> Written:
    """States at n places of a segment, by the generator of the settings; what is pooled or selected has none.

    Without `graph` the loop keeps none, while the text's pass does.
    """
    reading = summaries.reading
    if reading.generator == "parallel":
        assert summaries.tokens is not None
        seen = read(decoder, reading, memory, words, live, summaries.tokens[:n], bos)
        return Written(seen.text, seen.places, seen.places[:, 0])
    if reading.generator in ("pool", "select"):
        seen = read(decoder, reading, memory, words, live, None, bos)
        return Written(seen.text, seen.places, mean(seen.text, live))
    if reading.trigger == "replace":
        seen = read(decoder, reading, memory, triggered(summaries.trigger, words, live), live, None, bos)
        z = last_live(seen.text, live)[:, None]
    else:
        seen = read(decoder, reading, memory, words, live, summaries.trigger[None], bos)
        z = seen.places
    with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
        before = seen if graph else seen._replace(state=seen.state.detach())
        states = looped(decoder, summaries, memory, z, before, n, done)
    return Written(seen.text, states, z[:, 0])


def mean(h: Float[Tensor, "B T D"], live: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Over the live tokens; 0 where there is none."""
    return h.masked_fill(~live[..., None], 0.0).sum(1) / live.sum(1, keepdim=True).clamp(min=1)


def last(live: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The last live column of each row; none of a row without any."""
    return live & (live.flip(1).cumsum(1).flip(1) == 1)


def triggered(
    trigger: Float[Tensor, " D"], words: Float[Tensor, "B T D"], live: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """Eq. CP1: the trigger in place of each row's last live token."""
    return torch.where(last(live)[..., None], trigger.to(words.dtype), words)
