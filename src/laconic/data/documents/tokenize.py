"""Many texts as ids at once, on all cores: in windows that overlap, joined where they agree (see streaming.py).

What two windows share is encoded once more by itself, with the characters of its tokens, which windows do without.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
import tokenizers
from numpy.typing import NDArray

from laconic.data.documents.streaming import (
    AGREEING_TOKENS,
    WINDOW_CHARS,
    TokenizedWindow,
    disable_special_tokens,
    find_cut,
    iter_token_ids,
)
from laconic.data.tokenizer import Tokenizer

TokenArray = NDArray[np.int32]
OVERLAP_CHARS = 2048  # characters that two windows share
BATCH_CHARS = 4_000_000  # characters that are encoded at once


def tokenize_texts(
    texts: Sequence[str], tokenizer: Tokenizer, progress: Callable[[str, int, int], None] | None = None
) -> list[TokenArray]:
    """Each text as ids, none of them special; `show` is told how many characters are done."""
    inner, total, done = disable_special_tokens(tokenizer), sum(map(len, texts)), 0
    found: list[list[list[int]]] = []
    for group in group_windows(split_windows(texts)):
        if progress:
            progress("characters encoded", done, total)
        each = inner.encode_batch_fast([part for _, part in group], add_special_tokens=False)
        for (begins, part), one in zip(group, each, strict=True):
            found += [[]] if begins else []
            found[-1].append(one.ids)
            done += min(len(part), WINDOW_CHARS)
    return [join_windows(text, parts, inner) for text, parts in zip(texts, found, strict=True)]


def split_windows(texts: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Parts of the texts, each with SHARED characters of the next one; and whether it is the first of its text."""
    for text in texts:
        for start in window_starts(text):
            yield start == 0, text[start : start + WINDOW_CHARS + OVERLAP_CHARS]


def window_starts(text: str) -> range:
    """Where the windows of a text begin."""
    return range(0, max(len(text) - OVERLAP_CHARS, 1), WINDOW_CHARS)


def group_windows(parts: Iterator[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    """The parts in order, AT_ONCE characters or a little more together."""
    held, count = list[tuple[bool, str]](), 0
    for part in parts:
        held.append(part)
        count += len(part[1]) + 1
        if count >= BATCH_CHARS:
            yield held
            held, count = [], 0
    if held:
        yield held


def join_windows(text: str, parts: Sequence[Sequence[int]], backend: tokenizers.Tokenizer) -> TokenArray:
    """The ids of a text from those of its windows; from windows that grow, where two of these do not agree."""
    both = [text[start : start + OVERLAP_CHARS] for start in window_starts(text)[1:]]
    shared = backend.encode_batch(both, add_special_tokens=False)
    seams = [
        find_seam(left, right, TokenizedWindow(part, one.ids, one.offsets))
        for (left, right), part, one in zip(pairwise(parts), both, shared, strict=True)
    ]
    cuts = [cut for cut in seams if cut is not None]
    if len(cuts) < len(seams):
        return np.fromiter(chain.from_iterable(iter_token_ids([text], backend)), dtype=np.int32)
    begins, ends = [0, *(after for _, after in cuts)], [*(before for before, _ in cuts), len(parts[-1])]
    kept = (part[begin:end] for part, begin, end in zip(parts, begins, ends, strict=True))
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in kept])


def find_seam(left: Sequence[int], right: Sequence[int], shared: TokenizedWindow) -> tuple[int, int] | None:
    """How many tokens of the left window stand before a cut in what both share, and how many of the right one.

    None where either differs in the tokens on either side of it.
    """
    k = find_cut(shared, 0, len(shared.text) // 2)
    if k is None:
        return None
    after = len(shared.ids) - k
    agree = (
        left[-after - AGREEING_TOKENS :] == shared.ids[k - AGREEING_TOKENS :]
        and right[: k + AGREEING_TOKENS] == shared.ids[: k + AGREEING_TOKENS]
    )
    return (len(left) - after, k) if agree else None
