"""Byte length of each token, for bits per byte, which is comparable across tokenizers."""

import re

import torch
from jaxtyping import Int
from tokenizers import decoders
from torch import Tensor

from laconic.data.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SENTENCEPIECE_SPACE = "\u2581"


def token_byte_lengths(tokenizer: Tokenizer) -> Int[Tensor, " V"]:
    """Return the UTF-8 bytes of each token, 0 for special tokens; a prefix space counts as one."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder()
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)  # then each character is one byte
    lengths = torch.zeros(tokenizer.vocab_size, dtype=torch.long)
    for token, id in backend.get_vocab().items():
        if id in added:
            lengths[id] = 0 if added[id].special else len(token.encode())
        elif is_byte_level:
            lengths[id] = len(token)
        else:
            text = token.replace(SENTENCEPIECE_SPACE, " ")
            lengths[id] = 1 if BYTE_TOKEN.fullmatch(token) else len(text.encode())
    return lengths
