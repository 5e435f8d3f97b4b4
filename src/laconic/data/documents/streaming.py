"""A text of any length as ids, read lazily and held in part: the ids are those of the whole text tokenized at once.

Windows of text overlap; a cut is made where two of them agree in the tokens on either side of it, so that what stands
further away did not matter. Where they do not agree, the window grows.
"""

import codecs
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tokenizers

from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

WINDOW_CHARS = 65_536  # characters tokenized at once
AGREEING_TOKENS = 8  # tokens on either side of a cut in which two windows have to agree


def decode_utf8(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """Blocks of a UTF-8 text, without byte-order mark. Raises `BadInput` with the offset of a byte that is none."""
    decoder, at, begun = codecs.getincrementaldecoder("utf-8")(), 0, False
    for block in blocks:
        text = decode_block(decoder, block, at, name, final=False)
        yield text if begun else text.removeprefix("\ufeff")
        at, begun = at + len(block), begun or bool(text)
    decode_block(decoder, b"", at, name, final=True)


def decode_block(decoder: codecs.IncrementalDecoder, block: bytes, at: int, name: str, *, final: bool) -> str:
    """A block that begins at byte `at`, after what the decoder holds of the one before."""
    held = len(decoder.getstate()[0])
    if (nul := block.find(b"\0")) >= 0:
        raise InputError(f"{name}: byte {at + nul:,} is NUL, so it is no text; give a file of text in UTF-8")
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        start = at - held + error.start
        cause = "ends inside a character" if final else "is not UTF-8"
        raise InputError(f"{name}: byte {start:,} {cause}; give a whole file of text, saved as UTF-8") from None


def disable_special_tokens(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A copy that takes what a text says of special tokens for the characters that it is."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    copy.encode_special_tokens = True
    return copy


def iter_token_chunks(texts: Iterable[str], tokenizer: Tokenizer, chunk_tokens: int) -> Iterator[list[int]]:
    """Ids in segments of so many, the last one shorter, without those that the tokenizer adds to a text."""
    held: list[int] = []
    for ids in iter_token_ids(texts, disable_special_tokens(tokenizer)):
        held += ids
        whole = len(held) - len(held) % chunk_tokens
        yield from (held[i : i + chunk_tokens] for i in range(0, whole, chunk_tokens))
        held = held[whole:]
    if held:
        yield held


class TokenizedWindow(NamedTuple):
    """A stretch of text and its tokens: ids, and for each the characters [start, end) it stands for."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def is_boundary(self, k: int) -> bool:
        """Whether no character belongs to tokens on both sides of the one before token k."""
        return self.offsets[k - 1][1] <= self.offsets[k][0] < self.offsets[k][1]

    def is_between_words(self, k: int) -> bool:
        """Whether one white space stands at that border, after a letter or digit: no rule for words joins there."""
        end, text = self.offsets[k - 1][1], self.text
        return text[end - 1 : end].isalnum() and text[end : end + 1].isspace() and not text[end + 1 : end + 2].isspace()


def iter_token_ids(
    texts: Iterable[str], backend: tokenizers.Tokenizer, window_chars: int = WINDOW_CHARS
) -> Iterator[list[int]]:
    """Ids in parts, which joined are those of the joined texts; about two windows of text are held."""
    blocks = iter_blocks(texts, window_chars)
    now, first = tokenize_window(next(blocks, ""), backend), 0
    for block in blocks:
        k = find_cut(now, first, len(now.text) - window_chars // 8)
        begin = 0 if k is None else now.offsets[max(k - 2 * AGREEING_TOKENS - window_chars // 64, 0)][0]
        later = tokenize_window(now.text[begin:] + block, backend)
        same = None if k is None or not begin else match_token(now, k, later, begin)
        if k is None or same is None:
            now = tokenize_window(now.text + block, backend)
            continue
        yield now.ids[first:k]
        now, first = later, same
    yield now.ids[first:]


def iter_blocks(texts: Iterable[str], size: int) -> Iterator[str]:
    """The joined texts in blocks of one size, the last one shorter."""
    held: list[str] = []
    count = 0
    for text in texts:
        held.append(text)
        count += len(text)
        if count >= size:
            joined = "".join(held)
            whole = count - count % size
            yield from (joined[i : i + size] for i in range(0, whole, size))
            held, count = [joined[whole:]], count - whole
    if count:
        yield "".join(held)


def tokenize_window(text: str, backend: tokenizers.Tokenizer) -> TokenizedWindow:
    """A stretch of text, without special tokens."""
    found = backend.encode(text, add_special_tokens=False)
    return TokenizedWindow(text, found.ids, found.offsets)


def find_cut(window: TokenizedWindow, first: int, end: int) -> int | None:
    """The token before which to cut: the last that begins at `end` or before, between words if there is such a place.

    None where too few tokens stand on either side to see whether another window agrees.
    """
    last = len(window.ids) - AGREEING_TOKENS
    while last > first and window.offsets[last][0] > end:
        last -= 1
    places = range(last, max(first, AGREEING_TOKENS), -1)
    found = next((k for k in places if window.is_boundary(k) and window.is_between_words(k)), None)
    return found if found is not None else next((k for k in places if window.is_boundary(k)), None)


def match_token(now: TokenizedWindow, k: int, later: TokenizedWindow, begin: int) -> int | None:
    """Which token of the later window is token k, if the tokens around both are the same; it begins at `begin`."""
    start, end = now.offsets[k]
    same = next((j for j, span in enumerate(later.offsets) if span == (start - begin, end - begin)), None)
    if same is None or same < AGREEING_TOKENS or not later.is_boundary(same):
        return None
    around = slice(k - AGREEING_TOKENS, k + AGREEING_TOKENS), slice(same - AGREEING_TOKENS, same + AGREEING_TOKENS)
    spans = [(a - begin, b - begin) for a, b in now.offsets[around[0]]]
    return same if now.ids[around[0]] == later.ids[around[1]] and spans == later.offsets[around[1]] else None
