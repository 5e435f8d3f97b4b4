"""Encode one example, as several tests do."""

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder
from laconic.data.tokenizer import Tokenizer


def encode_example(example: ReasoningExample, tokenizer: Tokenizer, config: DataConfig) -> EncodedExample:
    return ReasoningEncoder(tokenizer, config).encode_example(example)
