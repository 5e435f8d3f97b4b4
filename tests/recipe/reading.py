"""Small models that read, of every family and cell, with a tokenizer of bytes; untrained."""

from dataclasses import replace
from typing import Any

import torch

from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig
from laconic.data.tokens import byte_tokenizer
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.settings import Halting, Reading
from laconic.methods.summaries import Summaries
from laconic.recipe.reader import Reader

BOS = 7  # of these models; a tokenizer of bytes has none


def reader(
    family: str = "llama",
    *,
    segment: int = 16,
    halting: Halting | None = None,
    seed: int = 0,
    room: int = 512,
    dtype: torch.dtype = torch.float64,
    **reading: Any,
) -> Reader:
    """A model of `room` positions, drawn so that its attention is peaked, and a stop head that stops at many places."""
    tokenizer = byte_tokenizer()
    config = DecoderConfig.small(family, vocab_size=tokenizer.vocab_size, max_position_embeddings=room)
    if family == "mistral":
        config = replace(config, windows=(room, room))
    decoder = Decoder(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for p in decoder.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.25 if p.ndim == 2 else p + noise * 0.3)
    decoder = decoder.to(dtype).eval()
    settings = Reading(**{"cap": 4, **reading})
    learned = settings.length in ("stop", "ratio")
    how = halting or (Halting(start=0.5) if learned else None)
    summaries = Summaries(decoder, settings, how, eos=tokenizer.eos, seed=seed)
    if summaries.u is not None:
        with torch.no_grad():
            summaries.u.copy_(torch.randn(summaries.u.shape, generator=generator) * 0.05)
    method = AutoCompressor(decoder, summaries, settings, how, steps=1, seed=seed, bos=BOS)
    return Reader(method.eval(), tokenizer, segment, decoder.fingerprint, decoder.fingerprint)
