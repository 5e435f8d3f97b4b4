"""Build documents that evaluate a memory: a context and a tail that continues it, or an excerpt copied from it.

Contexts are cut into segments of equal length, counted backwards from the tail. The tail is the last segment; all its
tokens but the first are scored, whatever precedes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.data.documents.tokenize import TokenArray
from laconic.errors import InputError
from laconic.storage.strict_json import to_canonical_json

EXCERPT_TOKENS = 48
EXCERPT_KEY = 5  # random stream of the excerpts' positions


def segment_ends(context_tokens: int, segment_tokens: int, tail_tokens: int) -> tuple[int, ...]:
    """Return the ends of the context's segments and of the tail; the first segment may be shorter."""
    first = context_tokens % segment_tokens or segment_tokens
    return (*range(first, context_tokens + 1, segment_tokens), context_tokens + tail_tokens)


@dataclass(frozen=True)
class DocumentTails:
    """Tails of held-out documents after `context_tokens` each, or excerpts of those contexts (`TrainingData`).

    `token_ids` are stretches of documents that end with the tail, which is one segment; their names have document and
    start. `excerpt_tokens` are copied from a random position of each context in place of the tail.
    """

    token_ids: TokenArray
    names: tuple[str, ...]
    tail_tokens: int
    context_tokens: int
    excerpt_tokens: int | None = None

    @property
    def fingerprint(self) -> str:
        settings = {
            "names": self.names,
            "context_tokens": self.context_tokens,
            "segment_tokens": self.tail_tokens,
            "excerpt_tokens": self.excerpt_tokens,
        }
        return sha256(to_canonical_json(settings).encode() + self.token_ids.astype("<i4").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        C = self.context_tokens
        token_ids = self.token_ids[list(rows), -C - self.tail_tokens :].astype(np.int64)
        if self.excerpt_tokens is not None:
            uniforms = rng.uniform(0, EXCERPT_KEY, np.asarray(rows, dtype=np.int64))
            start = (uniforms * (C - self.excerpt_tokens + 1)).astype(np.int64)
            excerpt = np.take_along_axis(token_ids, start[:, None] + np.arange(self.excerpt_tokens), 1)
            token_ids = np.concatenate([token_ids[:, :C], excerpt], 1)
        loss_mask = torch.zeros(token_ids.shape, dtype=torch.bool)
        loss_mask[:, C + 1 :] = True
        ends = segment_ends(C, self.tail_tokens, token_ids.shape[1] - C)
        return DocumentBatch(
            input_ids=torch.as_tensor(token_ids),
            attention_mask=torch.ones(token_ids.shape, dtype=torch.bool),
            loss_mask=loss_mask,
            segment_ends=ends,
            row_index=torch.as_tensor(rows, dtype=torch.long),
            document_ids=tuple(self.names[int(i)] for i in rows),
            windows=(max(len(ends), 2), 0),
        )


def sample_tails(
    names: Sequence[str], ids: Sequence[TokenArray], context_tokens: int, tail_tokens: int, limit: int | None = None
) -> DocumentTails:
    """Sample non-overlapping stretches of documents, always the same. Raises `InputError` if all are too short."""
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
    return DocumentTails(token_ids, tuple(f"{names[d]}@{start}" for d, start in sampled), tail_tokens, context_tokens)
