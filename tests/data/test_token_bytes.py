"""Byte lengths of tokens sum to those of a text, with any tokenizer."""

import pytest

from laconic.data.documents.token_bytes import token_byte_lengths
from laconic.data.synthetic.formal_languages import FormalLanguageDataset
from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from tests.conftest import shared_dir

TEXTS = ["Once upon a time", "Grüße – ½ 日本 🦜\n\ttabs", "", "a  b"]


@pytest.mark.parametrize("text", TEXTS)
def test_token_byte_lengths_sum_to_the_text(text: str) -> None:
    plain, stories = build_byte_tokenizer(), load_tokenizer(shared_dir() / "models" / "stories260k")
    assert int(token_byte_lengths(plain)[plain.encode(text, add_special_tokens=False)].sum()) == len(text.encode())
    ids = stories.encode(text)  # with a first token, which has no text, and a space put before
    assert int(token_byte_lengths(stories)[ids].sum()) == len(text.encode()) + bool(text)


def test_token_byte_lengths_of_special_tokens() -> None:
    plain = build_byte_tokenizer()
    assert token_byte_lengths(plain).tolist() == [1] * 256 + [0]
    plain.backend.add_tokens(["<｜User｜>"])  # as DeepSeek's, which is text
    assert token_byte_lengths(plain).tolist() == [1] * 256 + [0, len("<｜User｜>".encode())]
    assert token_byte_lengths(FormalLanguageDataset.build_tokenizer())[:6].tolist() == [0, 0, 0, 1, 1, 1]
