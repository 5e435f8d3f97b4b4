"""Documents to judge a memory by: a tail and the tokens before it (E1), or a span copied from them (E1x).

Contexts are cut into fixed segments counted from the tail backwards; of the tail, which is the last segment, all but
its first token is scored, whatever stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.data.documents.dataset import TokenArray
from laconic.errors import InputError

EXCERPT_TOKENS = 48  # tokens of an excerpt
EXCERPT_KEY = 5  # key of the place it is copied from


def segment_ends(context_tokens: int, segment_tokens: int, tail_tokens: int) -> tuple[int, ...]:
    """The ends of segments of n tokens, of which the first may be shorter, and of the tail."""
    first = context_tokens % segment_tokens or segment_tokens
    return (*range(first, context_tokens + 1, segment_tokens), context_tokens + tail_tokens)


@dataclass(frozen=True)
class DocumentTails:
    """Stretches of documents, [rows, context + tail] ids, and where each is from."""

    token_ids: TokenArray
    names: tuple[str, ...]
    tail_tokens: int

    @property
    def context_tokens(self) -> int:
        """Tokens that stand before a tail."""
        return self.token_ids.shape[1] - self.tail_tokens

    def continuation_batch(self, rows: Sequence[int], context_tokens: int, segment_tokens: int) -> DocumentBatch:
        """E1: the n tokens before the tails, and the tails. Raises `BadInput` for more tokens than there are."""
        if context_tokens > self.context_tokens:
            raise InputError(
                f"a context of {context_tokens} tokens, the stretches have {self.context_tokens}; make longer ones"
            )
        text = self.token_ids[list(rows)][:, self.context_tokens - context_tokens :]
        return self._documents(text, rows, context_tokens, segment_tokens)

    def excerpt_batch(
        self, rows: Sequence[int], context_tokens: int, segment_tokens: int, excerpt_tokens: int = EXCERPT_TOKENS
    ) -> DocumentBatch:
        """E1x: n tokens, and as tail a span of them, from a place that is the row's own."""
        if context_tokens < excerpt_tokens:
            raise InputError(
                f"an excerpt of {excerpt_tokens} tokens from a context of {context_tokens}; give a longer context"
            )
        context = self.continuation_batch(rows, context_tokens, segment_tokens).input_ids.numpy()[:, :context_tokens]
        draws = rng.uniform(0, EXCERPT_KEY, np.asarray(rows, dtype=np.int64))
        at = (draws * (context_tokens - excerpt_tokens + 1)).astype(np.int64)[:, None] + np.arange(excerpt_tokens)
        return self._documents(
            np.concatenate([context, np.take_along_axis(context, at, 1)], 1), rows, context_tokens, segment_tokens
        )

    def _documents(self, text: TokenArray, rows: Sequence[int], n: int, segment: int) -> DocumentBatch:
        scored = torch.zeros(text.shape, dtype=torch.bool)
        scored[:, n + 1 :] = True
        ends = segment_ends(n, segment, text.shape[1] - n) if n else (text.shape[1],)
        return DocumentBatch(
            torch.as_tensor(text.astype(np.int64)), torch.ones(text.shape, dtype=torch.bool), scored, ends,
            torch.as_tensor(rows, dtype=torch.long), tuple(self.names[int(i)] for i in rows),
            windows=(max(len(ends), 2), 0),
        )  # fmt: skip


def sample_tails(
    names: Sequence[str], ids: Sequence[TokenArray], context_tokens: int, tail_tokens: int, limit: int | None = None
) -> DocumentTails:
    """Stretches of documents that do not overlap, `count` of them from all over, the same every time.

    Raises `BadInput` where no document is long enough.
    """
    length = context_tokens + tail_tokens
    there = [(d, at) for d, each in enumerate(ids) for at in range(0, len(each) - length + 1, length)]
    if not there:
        longest = max(map(len, ids), default=0)
        raise InputError(f"stretches of {length:,} tokens, the longest document has {longest:,}; shorten the context")
    order = rng.permuted_index(0, 0, np.arange(min(limit or len(there), len(there))), len(there)).tolist()
    kept = [there[i] for i in order]
    text = np.stack([ids[d][at : at + length] for d, at in kept])
    return DocumentTails(text, tuple(f"{names[d]}@{at}" for d, at in kept), tail_tokens)
