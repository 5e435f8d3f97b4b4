"""How many bytes of text each id stands for, so that nats can be told a byte whatever the tokenizer."""

import re

import torch
from jaxtyping import Int
from tokenizers import decoders
from torch import Tensor

from laconic.data.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SENTENCEPIECE_SPACE = "\u2581"  # what stands for a space in SentencePiece's words


def token_byte_lengths(tokenizer: Tokenizer) -> Int[Tensor, " V"]:
    """Bytes of each id in UTF-8, 0 of special ones; a space put before a text counts as one."""
    inner = tokenizer.backend
    special = {id for id, token in inner.get_added_tokens_decoder().items() if token.special}
    letters = isinstance(inner.decoder, decoders.ByteLevel)  # a letter stands for a byte
    found = torch.zeros(tokenizer.vocab_size, dtype=torch.long)
    for word, id in inner.get_vocab().items():
        if id in special:
            continue
        text = word.replace(SENTENCEPIECE_SPACE, " ")
        found[id] = len(word) if letters else 1 if BYTE_TOKEN.fullmatch(word) else len(text.encode())
    return found
