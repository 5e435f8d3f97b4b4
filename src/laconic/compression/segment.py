"""One forward pass over a segment: [bos; memory; text; summary positions], and the states it computes.

AutoCompressors (arXiv:2305.14788); self-generated summaries are those of the variable-length AutoCompressor
(jo100sun/AutoCompressors bb15bc1).

Columns are [bos;] memory [M], text [T], summary positions [n], under a causal mask; invalid slots and padding are
attended by nothing. K is the largest number of summary positions, D the width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.errors import UsageError
from laconic.halting.stop_distribution import attention_gate_bias
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder

PositionScheme = Literal["contiguous", "zero"]
StopCheck = Callable[[Tensor], bool]


class SegmentOutput(NamedTuple):
    """Result of a pass over a segment: last hidden states, KV cache of all columns, and number of bos columns."""

    text_states: Float[Tensor, "B T D"]
    summary_states: Float[Tensor, "B n D"]
    cache: KVCache
    prefix_length: int


class MemoryPrompt(NamedTuple):
    """Embeddings of [bos; memory], their mask, and their position ids; None if positions are consecutive."""

    inputs_embeds: Float[Tensor, "B P D"]
    attention_mask: Bool[Tensor, "B P"]
    position_ids: Int[Tensor, "B P"] | None


class CompressionOutput(NamedTuple):
    """Result of compressing a segment.

    Attributes:
        summary_states: Last hidden states at the summary positions, from which the vectors are computed.
        first_state: The state that the ratio classifier reads.
        last_embeds: Embeddings of the last tokens that the summary tokens begin as; None if they begin otherwise.
    """

    text_states: Float[Tensor, "B T D"]
    summary_states: Float[Tensor, "B n D"]
    first_state: Float[Tensor, "B D"]
    last_embeds: Float[Tensor, "B n D"] | None = None


def resolve_position_scheme(config: CompressionConfig, decoder_config: DecoderConfig) -> PositionScheme:
    """Return the scheme of position ids, configured or the default of the model family."""
    if config.summary_positions == "zero" and decoder_config.position_encoding == "rope":
        raise UsageError(f'summary_positions = "zero" needs a position table, not the RoPE of {decoder_config.family}')
    default = "zero" if decoder_config.position_encoding == "table" else "contiguous"
    return config.summary_positions or default


def count_prefix(config: CompressionConfig, bos_token_id: int | None) -> int:
    """Return 1 if bos precedes every memory, else 0."""
    return int(bos_token_id is not None and config.bos == "sink")


def build_memory_prompt(
    decoder: Decoder,
    config: CompressionConfig,
    memory: SummaryMemory,
    bos_token_id: int | None,
    text_mask: Bool[Tensor, "B T"] | None = None,
    num_summaries: int = 0,
) -> MemoryPrompt:
    """Build [bos; M_{i-1}]; mask and position ids include a text and summary positions after it, if any.

    With "zero" positions, memory and summaries have none (-1), and the text has those that it has alone.
    """
    embeds = memory.vectors.to(decoder.token_embedding.weight.dtype)
    text_mask = memory.valid[:, :0] if text_mask is None else text_mask
    bos = embeds.new_full((memory.B, count_prefix(config, bos_token_id)), bos_token_id or 0, dtype=torch.long)
    if bos.shape[1]:
        embeds = torch.cat([decoder.embed(bos), embeds], 1)
    summary_mask = text_mask.new_ones(memory.B, num_summaries)
    mask = torch.cat([torch.ones_like(bos, dtype=torch.bool), memory.valid, text_mask, summary_mask], 1)
    position_ids = None
    if resolve_position_scheme(config, decoder.config) == "zero":
        text_ids = (bos.shape[1] + text_mask.cumsum(1) - 1) * text_mask
        memory_ids, summary_ids = (x.long().fill_(-1) for x in (memory.valid, summary_mask))
        position_ids = torch.cat([torch.zeros_like(bos), memory_ids, text_ids, summary_ids], 1)
    return MemoryPrompt(embeds, mask, position_ids)


def read_segment(
    decoder: Decoder,
    config: CompressionConfig,
    memory: SummaryMemory,
    text_embeds: Float[Tensor, "B T D"],
    attention_mask: Bool[Tensor, "B T"],
    bos_token_id: int | None = None,
    summary_embeds: Float[Tensor, "*#B n D"] | None = None,
) -> SegmentOutput:
    """Eq. AC2: one pass over [bos; M_{i-1}; text; e_1..e_n]; a soft memory is gated."""
    B, T = attention_mask.shape
    n = 0 if summary_embeds is None else summary_embeds.shape[-2]
    prompt = build_memory_prompt(decoder, config, memory, bos_token_id, attention_mask, n)
    P = prompt.inputs_embeds.shape[1]
    parts = [prompt.inputs_embeds.to(text_embeds.dtype), text_embeds]
    if summary_embeds is not None:
        parts.append(summary_embeds.to(text_embeds.dtype).expand(B, -1, -1))
    prefix_length = P - memory.M
    bias = None
    if memory.log_s is not None:
        bias = attention_gate_bias(memory.log_s, memory.segment_ids, prefix_length, T + n)
    output = decoder(
        torch.cat(parts, 1),
        attention_mask=None if bool(prompt.attention_mask.all()) else prompt.attention_mask,
        position_ids=prompt.position_ids,
        attention_bias=bias,
    )
    states = output.hidden_states
    return SegmentOutput(states[:, P : P + T], states[:, P + T :], output.cache, prefix_length)


def generate_summaries(
    decoder: Decoder,
    summaries: SummaryParameters,
    memory: SummaryMemory,
    z: Float[Tensor, "B 1 D"],
    segment: SegmentOutput,
    num_vectors: int,
    should_stop: StopCheck | None = None,
) -> Float[Tensor, "B n D"]:
    """Eq. VL2: z_t = state of one more position that reads A(z_{t-1}) + step_t, for t = 1..num_vectors.

    `memory` precedes the segment; `should_stop` ends the loop early if it returns True for the states so far.
    """
    position_ids, cache = None, segment.cache
    if resolve_position_scheme(summaries.config, decoder.config) == "zero":
        position_ids = torch.full((len(z), 1), -1, device=z.device)
    states: list[Tensor] = []
    for t in range(1, num_vectors + 1):
        bias = None
        if memory.log_s is not None:
            suffix = cache.S + 1 - segment.prefix_length - memory.M
            bias = attention_gate_bias(memory.log_s, memory.segment_ids, segment.prefix_length, suffix, cache.S)
        output = decoder(summaries.loop_input(t, z), cache, position_ids=position_ids, attention_bias=bias)
        z, cache = output.hidden_states, output.cache
        states.append(z)
        if should_stop is not None and should_stop(torch.cat(states, 1)):
            break
    return torch.cat(states, 1)


def masked_mean(h: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Average over the real tokens; 0 in rows without any."""
    return h.masked_fill(~attention_mask[..., None], 0.0).sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)


def mark_last_valid(attention_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Mark the last real token of each row, if it has one."""
    return attention_mask & (attention_mask.flip(1).cumsum(1).flip(1) == 1)


def replace_last_with_trigger(
    trigger: Float[Tensor, " D"], text_embeds: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """Eq. CP1: replace the last real token of each row by the trigger."""
    return torch.where(mark_last_valid(attention_mask)[..., None], trigger.to(text_embeds.dtype), text_embeds)
