"""Build documents that evaluate a memory: a context and a tail that continues it, or an excerpt copied from it.

Contexts are cut into segments of equal length, counted backwards from the tail. The tail is the last segment; all its
tokens but the first are scored, whatever precedes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.data.documents.tokenize import TokenArray
from laconic.errors import InputError

EXCERPT_TOKENS = 48
EXCERPT_KEY = 5  # random stream of the excerpts' positions


def segment_ends(context_tokens: int, segment_tokens: int, tail_tokens: int) -> tuple[int, ...]:
    """Return the ends of the context's segments and of the tail; the first segment may be shorter."""
    first = context_tokens % segment_tokens or segment_tokens
    return (*range(first, context_tokens + 1, segment_tokens), context_tokens + tail_tokens)


@dataclass(frozen=True)
class DocumentTails:
    """Stretches of documents: their token ids [rows, context + tail], and document and start of each as its name."""

    token_ids: TokenArray
    names: tuple[str, ...]
    tail_tokens: int

    @property
    def context_tokens(self) -> int:
        """Number of tokens before the tail."""
        return self.token_ids.shape[1] - self.tail_tokens

    def continuation_batch(self, rows: Sequence[int], context_tokens: int, segment_tokens: int) -> DocumentBatch:
        """Build a batch of the last `context_tokens` before each tail, and the tails.

        Raises:
            InputError: If the stretches have fewer tokens.
        """
        if context_tokens > self.context_tokens:
            raise InputError(
                f"a context of {context_tokens} tokens exceeds the {self.context_tokens} tokens before the tail"
            )
        ids = self.token_ids[list(rows)][:, self.context_tokens - context_tokens :]
        return self._build_batch(ids, rows, context_tokens, segment_tokens)

    def excerpt_batch(
        self, rows: Sequence[int], context_tokens: int, segment_tokens: int, excerpt_tokens: int = EXCERPT_TOKENS
    ) -> DocumentBatch:
        """Build a batch of contexts whose tail is an excerpt of them, at a random position of each row.

        Raises:
            InputError: If the context is shorter than the excerpt.
        """
        if context_tokens < excerpt_tokens:
            raise InputError(f"an excerpt of {excerpt_tokens} tokens exceeds the context of {context_tokens} tokens")
        context = self.continuation_batch(rows, context_tokens, segment_tokens).input_ids.numpy()[:, :context_tokens]
        uniforms = rng.uniform(0, EXCERPT_KEY, np.asarray(rows, dtype=np.int64))
        start = (uniforms * (context_tokens - excerpt_tokens + 1)).astype(np.int64)
        excerpt = np.take_along_axis(context, start[:, None] + np.arange(excerpt_tokens), 1)
        return self._build_batch(np.concatenate([context, excerpt], 1), rows, context_tokens, segment_tokens)

    def _build_batch(
        self, token_ids: TokenArray, rows: Sequence[int], context_tokens: int, segment_tokens: int
    ) -> DocumentBatch:
        loss_mask = torch.zeros(token_ids.shape, dtype=torch.bool)
        loss_mask[:, context_tokens + 1 :] = True
        total = token_ids.shape[1]
        ends = segment_ends(context_tokens, segment_tokens, total - context_tokens) if context_tokens else (total,)
        return DocumentBatch(
            torch.as_tensor(token_ids.astype(np.int64)),
            torch.ones(token_ids.shape, dtype=torch.bool),
            loss_mask,
            ends,
            torch.as_tensor(rows, dtype=torch.long),
            tuple(self.names[int(i)] for i in rows),
            windows=(max(len(ends), 2), 0),
        )


def sample_tails(
    names: Sequence[str], ids: Sequence[TokenArray], context_tokens: int, tail_tokens: int, limit: int | None = None
) -> DocumentTails:
    """Sample non-overlapping stretches of documents; the same arguments always give the same stretches.

    Raises:
        InputError: If no document is long enough.
    """
    length = context_tokens + tail_tokens
    starts = [(d, start) for d, doc in enumerate(ids) for start in range(0, len(doc) - length + 1, length)]
    if not starts:
        longest = max(map(len, ids), default=0)
        raise InputError(
            f"the task takes {length:,} tokens of a document, {context_tokens:,} to compress and {tail_tokens:,} to "
            f"score, but the longest held-out document has {longest:,}; train with longer ones"
        )
    sampled = [starts[i] for i in rng.permutation(len(starts), 0, limit=limit)]
    token_ids = np.stack([ids[d][start : start + length] for d, start in sampled])
    return DocumentTails(token_ids, tuple(f"{names[d]}@{start}" for d, start in sampled), tail_tokens)
