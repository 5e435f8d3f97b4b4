"""Tokenize long texts in windows: many texts in parallel, or one as a stream.

The ids are meant to be those of tokenizing the whole text at once. Windows overlap; two of them are joined at a cut
where both have the same tokens on either side. Where they disagree, the window grows.
"""

import codecs
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from laconic.console import ProgressFn
from laconic.data.strict_jsonl import COMPRESSED_FILES
from laconic.data.tokenizer import Tokenizer, translate_tokenizer_errors
from laconic.errors import InputError
from laconic.storage.strict_json import to_canonical_json

TokenArray = NDArray[np.int32]
WINDOW_CHARS = 65_536
OVERLAP_CHARS = 2048  # characters that two windows of `tokenize_texts` share
BATCH_CHARS = 4_000_000  # characters in one call of the tokenizer
OTHER_FORMATS = {start: f"compressed with {program}" for start, program in COMPRESSED_FILES.items()} | {
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
AGREEING_TOKENS = 8  # tokens that must agree on each side of a cut


class TokenizedWindow(NamedTuple):
    """A window of text, its ids, and the characters [start, end) of each token."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def is_boundary(self, k: int) -> bool:
        """Return whether tokens k - 1 and k share no character."""
        return self.offsets[k - 1][1] <= self.offsets[k][0] < self.offsets[k][1]

    def is_between_words(self, k: int) -> bool:
        """Return whether token k begins with exactly one space after a word, where most tokenizers split a text."""
        end = self.offsets[k - 1][1]
        text = self.text
        return text[end - 1 : end].isalnum() and text[end : end + 1].isspace() and not text[end + 1 : end + 2].isspace()


# --- many texts at once


def tokenize_texts(texts: Sequence[str], tokenizer: Tokenizer, progress: ProgressFn | None = None) -> list[TokenArray]:
    """Tokenize texts in parallel; special tokens in them are ordinary characters.

    Windows are tokenized without offsets, which is faster; only the overlap of two windows is tokenized again with
    offsets.
    """
    backend = disable_special_tokens(tokenizer)
    done = 0
    total = sum(map(len, texts))
    windows_per_text: list[list[list[int]]] = []
    for group in group_windows(split_text(texts)):
        if progress:
            progress("characters tokenized", done, total)
        with translate_tokenizer_errors():
            encodings = backend.encode_batch_fast([window for _, window in group], add_special_tokens=False)
        for (is_first, window), encoding in zip(group, encodings, strict=True):
            if is_first:
                windows_per_text.append([])
            windows_per_text[-1].append(encoding.ids)
            done += min(len(window), WINDOW_CHARS)
    return [join_token_windows(text, windows, backend) for text, windows in zip(texts, windows_per_text, strict=True)]


def split_text(texts: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Yield the overlapping windows of texts, and whether each is the first of its text."""
    for text in texts:
        for start in window_starts(text):
            yield start == 0, text[start : start + WINDOW_CHARS + OVERLAP_CHARS]


def window_starts(text: str) -> range:
    return range(0, max(len(text) - OVERLAP_CHARS, 1), WINDOW_CHARS)


def group_windows(windows: Iterable[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    group: list[tuple[bool, str]] = []
    count = 0
    for window in windows:
        group.append(window)
        count += len(window[1]) + 1
        if count >= BATCH_CHARS:
            yield group
            group, count = [], 0
    if group:
        yield group


def join_token_windows(text: str, windows: Sequence[Sequence[int]], backend: tokenizers.Tokenizer) -> TokenArray:
    """Join the ids of a text's windows; if two disagree, tokenize the text again in growing windows."""
    overlaps = [text[start : start + OVERLAP_CHARS] for start in window_starts(text)[1:]]
    with translate_tokenizer_errors():
        encodings = backend.encode_batch(overlaps, add_special_tokens=False)
    joins = [
        find_join(left, right, TokenizedWindow(overlap, encoding.ids, encoding.offsets))
        for (left, right), overlap, encoding in zip(pairwise(windows), overlaps, encodings, strict=True)
    ]
    cuts = [join for join in joins if join is not None]
    if len(cuts) < len(joins):
        return np.fromiter(chain.from_iterable(iter_token_ids([text], backend)), dtype=np.int32)
    starts = [0, *(start for _, start in cuts)]
    ends = [*(end for end, _ in cuts), len(windows[-1])]
    parts = (window[start:end] for window, start, end in zip(windows, starts, ends, strict=True))
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def find_join(left: Sequence[int], right: Sequence[int], overlap: TokenizedWindow) -> tuple[int, int] | None:
    """Return the end of the left window and the start of the right one, in tokens; None if the tokens disagree."""
    k = find_cut(overlap, 0, len(overlap.text) // 2)
    if k is None:
        return None
    rest = len(overlap.ids) - k
    is_left_equal = left[-rest - AGREEING_TOKENS :] == overlap.ids[k - AGREEING_TOKENS :]
    is_right_equal = right[: k + AGREEING_TOKENS] == overlap.ids[: k + AGREEING_TOKENS]
    return (len(left) - rest, k) if is_left_equal and is_right_equal else None


# --- one text as a stream


def iter_token_chunks(texts: Iterable[str], tokenizer: Tokenizer, chunk_tokens: int) -> Iterator[list[int]]:
    """Yield the ids of the joined texts in chunks of `chunk_tokens`, the last one shorter; no special tokens."""
    buffer: list[int] = []
    for ids in iter_token_ids(texts, disable_special_tokens(tokenizer)):
        buffer += ids
        whole = len(buffer) - len(buffer) % chunk_tokens
        yield from (buffer[i : i + chunk_tokens] for i in range(0, whole, chunk_tokens))
        buffer = buffer[whole:]
    if buffer:
        yield buffer


def iter_token_ids(
    texts: Iterable[str], backend: tokenizers.Tokenizer, window_chars: int = WINDOW_CHARS
) -> Iterator[list[int]]:
    """Yield the ids of the joined texts in parts, with about two windows of text in memory at a time.

    A window is cut in its last eighth; the next window begins enough tokens before, so that it agrees around the cut.
    """
    blocks = iter_blocks(texts, window_chars)
    window = tokenize_window(next(blocks, ""), backend)
    first = 0
    for block in blocks:
        k = find_cut(window, first, len(window.text) - window_chars // 8)
        start = 0 if k is None else window.offsets[max(k - 2 * AGREEING_TOKENS - window_chars // 64, 0)][0]
        next_window = tokenize_window(window.text[start:] + block, backend)
        match = None if k is None or not start else match_token(window, k, next_window, start)
        if k is None or match is None:
            window = tokenize_window(window.text + block, backend)
            continue
        yield window.ids[first:k]
        window, first = next_window, match
    yield window.ids[first:]


def iter_blocks(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the joined texts in blocks of `size` characters; the last may be shorter."""
    buffer: list[str] = []
    count = 0
    for text in texts:
        buffer.append(text)
        count += len(text)
        if count >= size:
            joined = "".join(buffer)
            whole = count - count % size
            yield from (joined[i : i + size] for i in range(0, whole, size))
            buffer = [joined[whole:]]
            count -= whole
    if count:
        yield "".join(buffer)


def match_token(window: TokenizedWindow, k: int, next_window: TokenizedWindow, start: int) -> int | None:
    """Return the token of the next window, from character `start` on, that equals token k and its neighbours."""
    a, b = window.offsets[k]
    match = next((j for j, span in enumerate(next_window.offsets) if span == (a - start, b - start)), None)
    if match is None or match < AGREEING_TOKENS or not next_window.is_boundary(match):
        return None
    left = slice(k - AGREEING_TOKENS, k + AGREEING_TOKENS)
    right = slice(match - AGREEING_TOKENS, match + AGREEING_TOKENS)
    offsets = [(a - start, b - start) for a, b in window.offsets[left]]
    is_equal = window.ids[left] == next_window.ids[right] and offsets == next_window.offsets[right]
    return match if is_equal else None


# --- shared by both


def disable_special_tokens(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy of the backend that treats special tokens in a text as ordinary characters."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    copy.encode_special_tokens = True
    return copy


def tokenize_window(text: str, backend: tokenizers.Tokenizer) -> TokenizedWindow:
    with translate_tokenizer_errors():
        encoding = backend.encode(text, add_special_tokens=False)
    return TokenizedWindow(text, encoding.ids, encoding.offsets)


def find_cut(window: TokenizedWindow, first: int, end: int) -> int | None:
    """Return the last token that begins at or before character `end` and before which the text can be cut.

    Places between words are preferred. Return None if too few tokens are on either side to compare two windows.
    """
    last = len(window.ids) - AGREEING_TOKENS
    while last > first and window.offsets[last][0] > end:
        last -= 1
    candidates = range(last, max(first, AGREEING_TOKENS), -1)
    boundary = None
    for k in filter(window.is_boundary, candidates):
        if window.is_between_words(k):
            return k
        boundary = k if boundary is None else boundary
    return boundary


def hash_token_arrays(description: Mapping[str, Any], arrays: Iterable[TokenArray]) -> str:
    """Return the SHA-256 of a description as JSON and of arrays of token ids."""
    digest = hashlib.sha256(to_canonical_json(description).encode())
    for ids in arrays:
        digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
    return digest.hexdigest()


def decode_utf8(blocks: Iterable[bytes], name: str, *, translate_newlines: bool = True) -> Iterator[str]:
    """Decode blocks of a UTF-8 text without its byte-order mark, with `\\n` for every line end, as Python's text mode.

    Raises `InputError` with the offset of the first byte that is not text, or if there is nothing but white space.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate_newlines)
    offset, is_blank = 0, True
    for block in chain(blocks, [b""]):  # the empty block is the last
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            position = offset + len(block) - len(error.object) + error.start  # in the file: the object lacks its mark
            problem = f"byte {position:,} is not UTF-8"
            for magic, file_type in OTHER_FORMATS.items():
                if not offset and block.startswith(magic):
                    problem = f"is {file_type}"
            raise InputError(f"{name}: {problem}; give a complete text file in UTF-8") from None
        nul = block.find(b"\0")
        if nul >= 0:
            raise InputError(f"{name}: byte {offset + nul:,} is NUL, so it is not a text file; give text in UTF-8")
        offset += len(block)
        is_blank = is_blank and not text.strip()
        yield text
    if is_blank:
        raise InputError(f"{name}: contains no text ({'white space' if offset else 'empty'}); give text in UTF-8")
