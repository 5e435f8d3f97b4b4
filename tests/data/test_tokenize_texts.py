"""Texts encoded together have the ids that each has alone, whatever the tokenizer and the windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.data.documents import tokenize
from laconic.data.documents.tokenize import TokenizedWindow, find_seam, join_windows, tokenize_texts
from tests.conftest import shared_dir
from tests.data.test_tokenize_stream import FOLDERS, WORDS, inner, tokenizer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of few characters, few of them at once."""
    for name, value in (("WINDOW_CHARS", 300), ("OVERLAP_CHARS", 150), ("BATCH_CHARS", 2000)):
        monkeypatch.setattr(tokenize, name, value)


def alone(name: str, text: str) -> list[int]:
    return inner(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["bpe", "llama", "bytes"])
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=400).map("".join), max_size=4))
def test_tokenize_texts_equals_single_texts(name: str, texts: list[str]) -> None:
    found = tokenize_texts(texts, tokenizer(name))
    assert [ids.tolist() for ids in found] == [alone(name, text) for text in texts]
    assert all(ids.dtype == np.int32 for ids in found)


@pytest.mark.parametrize("name", [*FOLDERS, "bytes"])
def test_tokenize_texts_with_a_book(name: str) -> None:
    with (shared_dir() / "data/text/tinyshakespeare.txt").open("rb") as file:
        text = file.read(40_000).decode()
    told: list[tuple[str, int, int]] = []
    texts = ["", text, "a", "z" * 3000, text[:500]]
    found = tokenize_texts(texts, tokenizer(name), lambda *progress: told.append(progress))
    assert [ids.tolist() for ids in found] == [alone(name, each) for each in texts]
    assert told[0] == ("characters tokenized", 0, 43_501)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] < 43_501


def test_join_windows_that_disagree() -> None:
    text = "one two three four five " * 40
    parts = [alone("gpt2", part) for part in (text[:450], text[300:750], text[600:])]
    assert join_windows(text, parts, inner("gpt2")).tolist() == alone("gpt2", text)
    one = inner("gpt2").encode(text[300:450], add_special_tokens=False)
    shared = TokenizedWindow(text[300:450], one.ids, one.offsets)
    found = find_seam(parts[0], parts[1], shared)
    assert found is not None
    assert parts[0][: found[0]] + parts[1][found[1] :] == alone("gpt2", text[:750])
    other = alone("gpt2", "another text altogether, " * 18)
    assert find_seam(parts[0], other, shared) is find_seam(other, parts[1], shared) is None
    assert join_windows(text, [parts[0], other, parts[2]], inner("gpt2")).tolist() == alone("gpt2", text)
