"""Inputs and results of the passes over a segment, position schemes, and the trigger.

Symbols: P columns of bos and memory, T of text, n summary positions, D width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.config.methods import CompressionConfig
from laconic.errors import UsageError
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig

PositionScheme = Literal["contiguous", "zero"]
StopCheck = Callable[[Tensor], bool]


class SegmentOutput(NamedTuple):
    """Result of a pass over a segment: last hidden states, and the KV cache of all columns."""

    text_states: Float[Tensor, "B T D"]
    summary_states: Float[Tensor, "B n D"]
    cache: KVCache


class MemoryPrompt(NamedTuple):
    """Embeddings of [bos; memory], their mask, and their position ids; None if positions are consecutive."""

    inputs_embeds: Float[Tensor, "B P D"]
    attention_mask: Bool[Tensor, "B P"]
    position_ids: Int[Tensor, "B P"] | None


class CompressionOutput(NamedTuple):
    """Result of compressing a segment: last hidden states at the text and at the summary positions."""

    text_states: Float[Tensor, "B T D"]
    summary_states: Float[Tensor, "B n D"]
    first_state: Float[Tensor, "B D"]  # input of the ratio classifier
    last_embeds: Float[Tensor, "B n D"] | None = None  # of the last tokens, if summary tokens begin as these


def resolve_position_scheme(config: CompressionConfig, decoder_config: DecoderConfig) -> PositionScheme:
    """Return the scheme of position ids, configured or the default of the model family."""
    if config.summary_positions == "zero" and decoder_config.position_encoding == "rope":
        raise UsageError(f'summary_positions = "zero" needs a position table, not the RoPE of {decoder_config.family}')
    default = "zero" if decoder_config.position_encoding == "table" else "contiguous"
    return config.summary_positions or default


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
