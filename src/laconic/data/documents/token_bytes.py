"""Bytes of each token, for bits per byte, which is comparable across tokenizers, and for log probabilities."""

import re

import torch
from jaxtyping import Int
from tokenizers import decoders
from torch import Tensor

from laconic.data.tokenizer import Tokenizer, list_byte_characters

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
SENTENCEPIECE_SPACE = "\u2581"


def list_token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the UTF-8 bytes of each token by its id, with a prefix space; they may be only a part of a character."""
    backend = tokenizer.backend
    tokens: dict[int, bytes] = {}
    added = backend.get_added_tokens_decoder()
    byte_values = {c: i for i, c in enumerate(list_byte_characters())}
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)  # then each character is one byte
    for token, id in backend.get_vocab().items():
        if is_byte_level and id not in added and byte_values.keys() >= set(token):
            tokens[id] = bytes(byte_values[char] for char in token)
        elif match := BYTE_TOKEN.fullmatch(token):
            tokens[id] = bytes.fromhex(match[1])
        else:
            tokens[id] = (token if id in added else token.replace(SENTENCEPIECE_SPACE, " ")).encode()
    return tokens


def token_byte_lengths(tokenizer: Tokenizer) -> Int[Tensor, " V"]:
    """Return the UTF-8 bytes of each token, 0 for special tokens; a prefix space counts as one."""
    added = tokenizer.backend.get_added_tokens_decoder()
    lengths = torch.zeros(tokenizer.vocab_size, dtype=torch.long)
    for id, token in list_token_bytes(tokenizer).items():
        lengths[id] = 0 if id in added and added[id].special else len(token)
    return lengths
