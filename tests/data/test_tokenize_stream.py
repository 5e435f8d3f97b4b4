"""A text tokenized in parts has the ids of the whole, whatever the tokenizer, parts and windows."""

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from laconic.data.documents.tokenize import decode_utf8, disable_special_tokens, iter_token_chunks, iter_token_ids
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer, load_tokenizer
from laconic.errors import InputError
from tests.conftest import shared_dir

FOLDERS = {"gpt2": "data/tokenizers/gpt2", "bpe": "data/tokenizers/gsm-bpe-2048", "llama": "models/stories260k"}
WORDS = [
    *("the", " ", "  ", "\n\n", "\n", ".", ", ", "Lucy", "'s", "12", "héé", "🎉", "ß", "\t", "antidis", "日本", "a"),
    *("<s>", "</s>", "<|endoftext|>", "<eos>"),
]


@cache
def tokenizer(name: str) -> Tokenizer:
    if name in FOLDERS:
        return load_tokenizer(shared_dir() / FOLDERS[name])
    return {"bytes": build_byte_tokenizer, "digits": build_digits_tokenizer}[name]()


@cache
def inner(name: str) -> Inner:
    return disable_special_tokens(tokenizer(name))


def joined(parts: Iterator[list[int]]) -> list[int]:
    return [id for ids in parts for id in ids]


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.medium
@pytest.mark.parametrize("name", [*FOLDERS, "bytes", "digits"])
@given(st.lists(st.sampled_from(WORDS), max_size=200).map("".join), st.integers(1, 50), st.integers(16, 300))
def test_iter_token_ids_equals_whole_text(name: str, text: str, size: int, window: int) -> None:
    whole = inner(name).encode(text, add_special_tokens=False).ids
    assert joined(iter_token_ids(cut(text, size), inner(name), window)) == whole


@pytest.mark.medium
@pytest.mark.parametrize("name", [*FOLDERS, "bytes"])
def test_iter_token_chunks_of_a_book(name: str) -> None:
    with (shared_dir() / "data/text/tinyshakespeare.txt").open("rb") as file:
        text = file.read(60_000).decode()
    whole = inner(name).encode(text, add_special_tokens=False).ids
    parts = list(iter_token_ids(iter([text]), inner(name), 4096))
    assert joined(iter(parts)) == whole
    assert len(parts) > 10  # so much is given out before the end is read
    segments = list(iter_token_chunks(cut(text, 777), tokenizer(name), 100))
    assert joined(iter(segments)) == whole
    assert {len(segment) for segment in segments[:-1]} == {100}
    assert 0 < len(segments[-1]) <= 100


def test_iter_token_chunks_is_lazy() -> None:
    read: list[int] = []

    def blocks() -> Iterator[str]:
        for i in range(40):
            read.append(i)
            yield "One day, Lily and Tom went out. " * 300

    first = next(iter_token_chunks(blocks(), tokenizer("llama"), 10))
    assert len(first) == 10
    assert len(read) < 25


def test_iter_token_chunks_ignores_special_tokens_in_text() -> None:
    llama = tokenizer("llama")
    ids = joined(iter_token_chunks(["a <s> b </s>"], llama, 8))
    assert llama.bos_token_id not in ids
    assert llama.eos_token_id not in ids
    assert llama.backend.decode(ids) == "a <s> b </s>"
    assert llama.bos_token_id in llama.encode(
        "a <s> b", add_special_tokens=False
    )  # the tokenizer itself stays as it is


@given(st.text() | st.text("a\r\n"), st.integers(1, 7))
def test_decode_utf8_of_blocks(text: str, size: int) -> None:
    text = text.replace("\0", "").removeprefix("\ufeff") + "."
    for raw in (text.encode("utf-8", "ignore"), b"\xef\xbb\xbf" + text.encode("utf-8", "ignore")):
        blocks = (raw[i : i + size] for i in range(0, len(raw), size))
        assert "".join(decode_utf8(blocks, "book.txt", translate_newlines=False)) == text
        blocks = (raw[i : i + size] for i in range(0, len(raw), size))
        assert "".join(decode_utf8(blocks, "book.txt")) == text.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"abc\0def", "book.txt: byte 3 is NUL"),
        ("Brontë, Brontë".encode("latin-1"), "book.txt: byte 5 is not UTF-8"),
        (b"\xef\xbb\xbfab\xff", "book.txt: byte 5 is not UTF-8"),
        ("aé".encode()[:-1], "book.txt: byte 1 is not UTF-8"),
        (b"", "book.txt: contains no text (empty); give text in UTF-8"),
        (b"\xef\xbb\xbf \r\n\t", "book.txt: contains no text (white space); give text in UTF-8"),
    ],
)
def test_decode_utf8_refuses_other_bytes(raw: bytes, message: str, size: int) -> None:
    with pytest.raises(InputError) as error:
        list(decode_utf8((raw[i : i + size] for i in range(0, len(raw), size)), "book.txt"))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("raw", "kind"), [("hi".encode("utf-16"), "UTF-16"), (b"\x1f\x8b\x08\x01", "compressed with gzip")]
)
def test_decode_utf8_names_other_formats(raw: bytes, kind: str) -> None:
    with pytest.raises(InputError, match=f"^book.txt: is {kind}; give a complete text file in UTF-8"):
        list(decode_utf8([raw], "book.txt"))


def test_iter_token_chunks_of_nothing() -> None:
    assert list(iter_token_chunks([], tokenizer("bytes"), 5)) == []
    assert list(iter_token_chunks(["", ""], tokenizer("llama"), 5)) == []
