"""Small untrained compressors of any family and configuration, with a byte tokenizer."""

from dataclasses import replace
from typing import Any

import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder

BOS = 7  # the byte tokenizer has no bos


def reader(
    family: str = "llama",
    *,
    segment: int = 16,
    halting: StopHeadConfig | None = None,
    seed: int = 0,
    room: int = 512,
    dtype: torch.dtype = torch.float64,
    **reading: Any,
) -> TextCompressor:
    """Build a model of `room` positions with peaked random attention and a stop head that stops at many positions."""
    tokenizer = build_byte_tokenizer()
    config = DecoderConfig.tiny(family, vocab_size=tokenizer.vocab_size, max_position_embeddings=room)
    if family == "mistral":
        config = replace(config, sliding_windows=(room, room))
    decoder = Decoder(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for p in decoder.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.25 if p.ndim == 2 else p + noise * 0.3)
    decoder = decoder.to(dtype).eval()
    settings = CompressionConfig(**{"max_vectors": 4, **reading})
    learned = settings.length_policy in ("stop_head", "classifier")
    rule = halting or (StopHeadConfig(initial_mean_fraction=0.5) if learned else None)
    summaries = SummaryParameters(decoder, settings, rule, eos_token_id=tokenizer.eos_token_id, seed=seed)
    if summaries.u is not None:
        with torch.no_grad():
            summaries.u.copy_(torch.randn(summaries.u.shape, generator=generator) * 0.05)
    method = AutoCompressor(decoder, summaries, settings, rule, total_steps=1, seed=seed, bos_token_id=BOS)
    return TextCompressor(method.eval(), tokenizer, segment, decoder.fingerprint, decoder.fingerprint)
