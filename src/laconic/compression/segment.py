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

from laconic.compression.halting.stop_distribution import attention_gate_bias
from laconic.compression.memory import SummaryMemory
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.errors import UsageError
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.positions import last_valid

PositionScheme = Literal["contiguous", "reserved", "zero"]
StopCheck = Callable[[Tensor], bool]


class SegmentOutput(NamedTuple):
    """What a pass gives: states of the text and of the places behind it, the cache, and its columns of bos."""

    text_states: Float[Tensor, "B T D"]
    summary_states: Float[Tensor, "B n D"]
    cache: KVCache
    prefix_length: int


def resolve_position_scheme(config: CompressionConfig, decoder_config: DecoderConfig) -> PositionScheme:
    """Where memory and summaries stand, by the settings or by the family. Raises `Usage` (2) for none under RoPE."""
    if config.summary_positions == "zero" and decoder_config.position_encoding == "rope":
        raise UsageError(
            f'positions "zero": {decoder_config.family} has RoPE, where each slot stands somewhere; take contiguous'
        )
    return config.summary_positions or ("zero" if decoder_config.position_encoding == "table" else "contiguous")


def build_bos_mask(config: CompressionConfig, memory: SummaryMemory, bos_token_id: int | None) -> Bool[Tensor, "B b"]:
    """Whether the prompt of each row begins with bos: a column, or none where no prompt does."""
    begins = memory.num_tokens == 0
    if (
        bos_token_id is None
        or config.bos not in ("sink", "first")
        or (config.bos == "first" and not bool(begins.any()))
    ):
        return memory.valid[:, :0]
    return (begins if config.bos == "first" else torch.ones_like(begins))[:, None]


def build_position_ids(
    scheme: PositionScheme,
    K: int,
    bos_mask: Bool[Tensor, "B b"],
    memory: SummaryMemory,
    attention_mask: Bool[Tensor, "B T"],
    num_summaries: int,
) -> Int[Tensor, "B P"] | None:
    """Positions of bos, memory, text and n places; None: one after another, as they are without being said.

    Zero: memory and places stand nowhere, the text as if it stood alone. Reserved: block k begins K behind block
    k - 1 and the text K behind the last, whatever is live in them.
    """
    if scheme == "contiguous":
        return None
    first, text = bos_mask.sum(1, keepdim=True), attention_mask.cumsum(1)
    at, none = (
        torch.arange(num_summaries, device=attention_mask.device),
        attention_mask.new_zeros(bos_mask.shape, dtype=torch.long),
    )
    if scheme == "zero":
        before = none.new_full(memory.valid.shape, -1)
        return torch.cat(
            [
                none,
                before,
                (first + text - 1) * attention_mask,
                none.new_full((len(attention_mask), num_summaries), -1),
            ],
            1,
        )
    there = memory.vectors_per_segment > 0
    order = F.pad(there.cumsum(1) - 1, (0, 1))
    before = (first + K * order.gather(1, memory.segment_ids % order.shape[1]) + memory.ranks_in_segment) * memory.valid
    start = first + K * there.sum(1, keepdim=True)
    return torch.cat(
        [none, before, (start + text - 1) * attention_mask, start + attention_mask.sum(1, keepdim=True) + at], 1
    )


class MemoryPrompt(NamedTuple):
    """What stands before a text: vectors of bos and memory, which are live, and where; None: one after another."""

    inputs_embeds: Float[Tensor, "B P D"]
    attention_mask: Bool[Tensor, "B P"]
    position_ids: Int[Tensor, "B P"] | None


def build_memory_prompt(
    decoder: Decoder,
    config: CompressionConfig,
    memory: SummaryMemory,
    bos_token_id: int | None,
    text_mask: Bool[Tensor, "B T"] | None = None,
    num_summaries: int = 0,
) -> MemoryPrompt:
    """[bos; M_{i-1}]; `live` and `positions` go on with those of a text and of places, if they are given."""
    starts, vectors = (
        build_bos_mask(config, memory, bos_token_id),
        memory.vectors.to(decoder.token_embedding.weight.dtype),
    )
    text_mask = memory.valid[:, :0] if text_mask is None else text_mask
    if starts.shape[1]:
        vectors = torch.cat([decoder.embed(torch.full_like(starts, bos_token_id or 0, dtype=torch.long)), vectors], 1)
    live = torch.cat([starts, memory.valid, text_mask, text_mask.new_ones(len(text_mask), num_summaries)], 1)
    kind = resolve_position_scheme(config, decoder.config)
    return MemoryPrompt(
        vectors, live, build_position_ids(kind, config.fixed_length, starts, memory, text_mask, num_summaries)
    )


def read_segment(
    decoder: Decoder,
    config: CompressionConfig,
    memory: SummaryMemory,
    text_embeds: Float[Tensor, "B T D"],
    attention_mask: Bool[Tensor, "B T"],
    summary_embeds: Float[Tensor, "n D"] | None = None,
    bos_token_id: int | None = None,
) -> SegmentOutput:
    """Eq. AC2: one pass over [bos; M_{i-1}; text; e_1..e_n], in which a soft memory is gated."""
    (B, T), n = attention_mask.shape, 0 if summary_embeds is None else len(summary_embeds)
    before = build_memory_prompt(decoder, config, memory, bos_token_id, attention_mask, n)
    parts, P = [before.inputs_embeds.to(text_embeds.dtype), text_embeds], before.inputs_embeds.shape[1]
    if summary_embeds is not None:
        parts.append(summary_embeds.to(text_embeds.dtype).expand(B, -1, -1))
    lead, bias = P - memory.M, None
    if memory.log_s is not None:
        bias = attention_gate_bias(memory.log_s, memory.segment_ids, lead, T + n)
    seen = decoder(
        torch.cat(parts, 1),
        live=None if bool(before.attention_mask.all()) else before.attention_mask,
        positions=before.position_ids,
        bias=bias,
    )
    return SegmentOutput(seen.hidden[:, P : P + T], seen.hidden[:, P + T :], seen.state, lead)


def generate_summaries(
    decoder: Decoder,
    summaries: SummaryParameters,
    memory: SummaryMemory,
    z: Float[Tensor, "B 1 D"],
    segment: SegmentOutput,
    num_vectors: int,
    should_stop: StopCheck | None = None,
) -> Float[Tensor, "B n D"]:
    """Eq. VL2: z_t = hidden of one more position that reads A(z_{t-1}) + step_t, for t = 1..n; z_0 is `z`.

    The loop ends early where `done` says so of the states so far.
    """
    positions, state = None, segment.cache
    if resolve_position_scheme(summaries.config, decoder.config) == "zero":
        positions = torch.full((len(z), 1), -1, device=z.device)
    found: list[Tensor] = []
    for t in range(1, num_vectors + 1):
        bias = None
        if memory.log_s is not None:
            tail = state.S + 1 - segment.prefix_length - memory.M
            bias = attention_gate_bias(memory.log_s, memory.segment_ids, segment.prefix_length, tail, state.S)
        seen = decoder(summaries.loop_input(t, z), state, positions=positions, bias=bias)
        z, state = seen.hidden, seen.state
        found.append(z)
        if should_stop is not None and should_stop(torch.cat(found, 1)):
            break
    return torch.cat(found, 1)


class CompressionOutput(NamedTuple):
    """What compressing a segment gives: states of its text and of the places, and what the ratio head reads."""

    text_states: Float[Tensor, "B T D"]
    summary_states: Float[Tensor, "B n D"]
    first_state: Float[Tensor, "B D"]


def compress_segment(
    decoder: Decoder,
    summaries: SummaryParameters,
    memory: SummaryMemory,
    text_embeds: Float[Tensor, "B T D"],
    attention_mask: Bool[Tensor, "B T"],
    num_vectors: int,
    bos_token_id: int | None = None,
    *,
    keep_graph: bool = True,
    should_stop: StopCheck | None = None,
) -> CompressionOutput:
    """States at n places of a segment, by the generator of the settings; what is pooled or selected has none.

    Without `graph` the loop keeps none, while the text's pass does.
    """
    reading = summaries.config
    if reading.summary == "parallel":
        assert summaries.tokens is not None
        seen = read_segment(
            decoder, reading, memory, text_embeds, attention_mask, summaries.tokens[:num_vectors], bos_token_id
        )
        return CompressionOutput(seen.text_states, seen.summary_states, seen.summary_states[:, 0])
    if reading.summary in ("pool", "select"):
        seen = read_segment(decoder, reading, memory, text_embeds, attention_mask, None, bos_token_id)
        return CompressionOutput(seen.text_states, seen.summary_states, masked_mean(seen.text_states, attention_mask))
    if reading.trigger_placement == "replace":
        seen = read_segment(
            decoder,
            reading,
            memory,
            replace_last_with_trigger(summaries.trigger_vector, text_embeds, attention_mask),
            attention_mask,
            None,
            bos_token_id,
        )
        z = last_valid(seen.text_states, attention_mask)[:, None]
    else:
        seen = read_segment(
            decoder, reading, memory, text_embeds, attention_mask, summaries.trigger_vector[None], bos_token_id
        )
        z = seen.summary_states
    with torch.set_grad_enabled(keep_graph and torch.is_grad_enabled()):
        before = seen if keep_graph else seen._replace(cache=seen.cache.detach())
        states = generate_summaries(decoder, summaries, memory, z, before, num_vectors, should_stop)
    return CompressionOutput(seen.text_states, states, z[:, 0])


def masked_mean(h: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Over the live tokens; 0 where there is none."""
    return h.masked_fill(~attention_mask[..., None], 0.0).sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)


def mark_last_valid(attention_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The last live column of each row; none of a row without any."""
    return attention_mask & (attention_mask.flip(1).cumsum(1).flip(1) == 1)


def replace_last_with_trigger(
    trigger: Float[Tensor, " D"], text_embeds: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """Eq. CP1: the trigger in place of each row's last live token."""
    return torch.where(mark_last_valid(attention_mask)[..., None], trigger.to(text_embeds.dtype), text_embeds)
