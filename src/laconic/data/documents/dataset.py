"""Documents as training rows of fixed length; all rows of a batch are cut into segments at the same columns."""

from collections.abc import Sequence

import numpy as np
import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.batches.padding import pad_rows
from laconic.config.data import TextConfig
from laconic.console import ProgressFn
from laconic.data.documents.load import Document
from laconic.data.documents.segments import SegmentBoundaries
from laconic.data.documents.token_cache import tokenize_with_cache
from laconic.data.documents.tokenize import TokenArray, hash_token_arrays
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError


def tokenize_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, progress: ProgressFn | None = None
) -> list[TokenArray]:
    """Tokenize documents without special tokens; ids of a large corpus are cached on disk."""
    return tokenize_with_cache([document.text for document in documents], tokenizer, progress)


def permute_vocabulary(ids: TokenArray, interval: int, vocab_size: int, key: Sequence[int]) -> TokenArray:
    """Permute the ids below `vocab_size` in another way every `interval` tokens, so that reading needs learning."""
    permuted = ids.copy()
    vocabulary = np.arange(vocab_size)
    seed = int(rng.hash64(*key).view(np.int64))
    for start in range(0, len(ids), interval):
        new_ids = rng.permuted_index(seed, start // interval, vocabulary, vocab_size)
        chunk = ids[start : start + interval]
        is_permuted = chunk < vocab_size
        permuted[start : start + interval] = np.where(is_permuted, new_ids[np.minimum(chunk, vocab_size - 1)], chunk)
    return permuted


class DocumentDataset:
    """Documents cut into rows of `config.row_tokens` tokens; the last row of a document may be shorter.

    Segments have random lengths, or fixed ones as in evaluation; `max_segment_tokens` is X in Eq. AC7. With
    `pad_to_row_tokens`, every batch has all segments, so that ranks make the same number of passes. `max_rows` rows are
    a random choice that is the same in every run. Raises `InputError` if there are fewer rows than `min_rows`.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        ids: Sequence[TokenArray],
        config: TextConfig,
        seed: int,
        max_segment_tokens: int,
        *,
        fixed_segments: bool = False,
        pad_to_row_tokens: bool = False,
        max_rows: int | None = None,
        min_rows: int = 1,
    ) -> None:
        self.names, self.books = [doc.name for doc in documents], [doc.book for doc in documents]
        self.ids = list(ids)
        self.config = config
        self.fixed_segments, self.pad_to_row_tokens = fixed_segments, pad_to_row_tokens
        self.boundaries = SegmentBoundaries(config, seed, max_segment_tokens)
        step = config.row_tokens
        rows = [
            (d, start, min(start + step, len(document)))
            for d, document in enumerate(ids)
            for start in range(0, len(document), step)
        ]
        rows = [row for row in rows if row[2] - row[1] > 1]  # a single token predicts nothing
        if len(rows) < min_rows:
            raise InputError(f"{len(rows)} rows of {step} tokens, fewer than a batch of {min_rows}; give more text")
        selected = range(len(rows)) if max_rows is None else rng.permutation(len(rows), 0, limit=max_rows)
        self.rows = [rows[i] for i in selected]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the names that rows give, of token ids, and of the settings for rows and segments."""
        config = self.config.model_dump()
        cuts = {"books": self.books, "config": config, "fixed": self.fixed_segments, "rows": len(self.rows)}
        return hash_token_arrays(cuts, self.ids)

    @property
    def max_length(self) -> int:
        return max(end - start for _, start, end in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """Return a batch as wide as its longest row, or as `config.row_tokens` if batches are padded to it."""
        spans = [self.rows[int(i)] for i in rows]
        ids = [self.ids[d][start:end].tolist() for d, start, end in spans]
        input_ids, mask = pad_rows(ids, width=self.config.row_tokens if self.pad_to_row_tokens else None)
        width = input_ids.shape[1]
        ends = self.boundaries.fixed_ends() if self.fixed_segments else self.boundaries.draw_ends(step)
        return DocumentBatch(
            input_ids=input_ids,
            attention_mask=mask,
            loss_mask=mask.clone(),
            segment_ends=(*(end for end in ends if end < width), width),
            row_index=torch.as_tensor(rows, dtype=torch.long),
            document_ids=tuple(f"{self.names[d]}@{start}" for d, start, _ in spans),
            epoch=epoch,
            step=step,
            windows=(self.config.segments_per_window, self.config.segment_overlap),
        )
