"""Cached token ids equal those of tokenizing again, and only a cache of the same texts and tokenizer is used."""

from pathlib import Path

import numpy as np
import pytest

from laconic.data.documents import token_cache
from laconic.data.documents.token_cache import tokenize_with_cache
from laconic.data.documents.tokenize import tokenize_texts
from laconic.data.tokenizer import build_byte_tokenizer
from tests.conftest import shared_dir
from tests.data.test_tokenize_stream import tokenizer

TEXTS = ["Call me Ishmael. " * 40, "", "Some years ago, never mind how long précisément"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path))
    monkeypatch.setattr(token_cache, "MIN_CHARS", 100)
    return tmp_path / "tokens"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often texts are tokenized."""
    counted: list[int] = []

    def tokenize(texts, *rest):  # type: ignore[no-untyped-def]
        counted.append(len(texts))
        return tokenize_texts(texts, *rest)

    monkeypatch.setattr(token_cache, "tokenize_texts", tokenize)
    return counted


def test_tokenize_with_cache_reads_what_it_wrote(cache: Path, calls: list[int]) -> None:
    first, second = (tokenize_with_cache(TEXTS, build_byte_tokenizer()) for _ in range(2))
    expected = tokenize_texts(TEXTS, build_byte_tokenizer())
    assert len(calls) == len(list(cache.iterdir())) == 1
    for ids in (first, second):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(ids, expected, strict=True))


def test_tokenize_with_cache_keys(cache: Path, calls: list[int]) -> None:
    shared_dir()
    tokenize_with_cache(TEXTS, build_byte_tokenizer())
    tokenize_with_cache([*TEXTS, ""], build_byte_tokenizer())
    tokenize_with_cache(["".join(TEXTS)], build_byte_tokenizer())
    tokenize_with_cache(TEXTS, tokenizer("llama"))
    assert len(calls) == len(list(cache.iterdir())) == 4
    tokenize_with_cache(["short"], build_byte_tokenizer())
    assert len(list(cache.iterdir())) == 4


def test_tokenize_with_cache_damaged_file(cache: Path, calls: list[int]) -> None:
    expected = tokenize_with_cache(TEXTS, build_byte_tokenizer())
    file = next(cache.iterdir())
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        again = tokenize_with_cache(TEXTS, build_byte_tokenizer())
        assert all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))
    assert len(calls) == 2


def test_tokenize_with_cache_that_cannot_be_written(cache: Path, calls: list[int]) -> None:
    cache.write_text("a file in the place of the folder")
    assert len(tokenize_with_cache(TEXTS, build_byte_tokenizer())) == len(TEXTS)
