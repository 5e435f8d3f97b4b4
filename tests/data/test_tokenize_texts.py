"""Texts tokenized together have the ids of each alone, whatever the tokenizer and windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.data.documents import tokenize
from laconic.data.documents.tokenize import TokenizedWindow, find_join, join_token_windows, tokenize_texts
from tests.conftest import shared_dir
from tests.data.test_tokenize_stream import FOLDERS, WORDS, inner, tokenizer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small windows and batches."""
    for name, value in (("WINDOW_CHARS", 300), ("OVERLAP_CHARS", 150), ("BATCH_CHARS", 2000)):
        monkeypatch.setattr(tokenize, name, value)


def alone(name: str, text: str) -> list[int]:
    return inner(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["bpe", "llama", "bytes"])
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=400).map("".join), max_size=4))
def test_tokenize_texts_equals_single_texts(name: str, texts: list[str]) -> None:
    result = tokenize_texts(texts, tokenizer(name))
    assert [ids.tolist() for ids in result] == [alone(name, text) for text in texts]
    assert all(ids.dtype == np.int32 for ids in result)


@pytest.mark.parametrize("name", [*FOLDERS, "bytes"])
def test_tokenize_texts_with_a_book(name: str) -> None:
    with (shared_dir() / "data/text/tinyshakespeare.txt").open("rb") as file:
        text = file.read(40_000).decode()
    calls: list[tuple[str, int, int]] = []
    texts = ["", text, "a", "z" * 3000, text[:500]]
    result = tokenize_texts(texts, tokenizer(name), lambda *progress: calls.append(progress))
    assert [ids.tolist() for ids in result] == [alone(name, single) for single in texts]
    assert calls[0] == ("characters tokenized", 0, 43_501)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] < 43_501


def test_join_windows_that_disagree() -> None:
    text = "one two three four five " * 40
    parts = [alone("gpt2", part) for part in (text[:450], text[300:750], text[600:])]
    assert join_token_windows(text, parts, inner("gpt2")).tolist() == alone("gpt2", text)
    one = inner("gpt2").encode(text[300:450], add_special_tokens=False)
    shared = TokenizedWindow(text[300:450], one.ids, one.offsets)
    result = find_join(parts[0], parts[1], shared)
    assert result is not None
    assert parts[0][: result[0]] + parts[1][result[1] :] == alone("gpt2", text[:750])
    other = alone("gpt2", "another text altogether, " * 18)
    assert find_join(parts[0], other, shared) is find_join(other, parts[1], shared) is None
    assert join_token_windows(text, [parts[0], other, parts[2]], inner("gpt2")).tolist() == alone("gpt2", text)
