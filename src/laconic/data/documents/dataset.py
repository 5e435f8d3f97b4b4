"""Stretches of documents as batches: a row is a stretch, and all rows of a batch are cut at the same columns."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.config.data import TextConfig
from laconic.data.documents.load import Document
from laconic.data.documents.segments import SegmentBoundaries
from laconic.data.documents.tokenize import TokenArray, tokenize_texts
from laconic.data.reasoning.dataset import pad_rows
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.storage.strict_json import to_canonical_json


def tokenize_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, progress: Callable[[str, int, int], None] | None = None
) -> list[TokenArray]:
    """Each document as ids, none of them special; `show` is told how far it is."""
    return tokenize_texts([document.text for document in documents], tokenizer, progress)


class DocumentDataset:
    """Stretches of `tokens` tokens that follow one another (contract.Source); the last of a document is shorter.

    `room` is what AC7 has for a segment. With `fixed`, as evaluation has it, nothing is drawn. Of `count` rows, taken
    from all over the documents, the same ones are taken for every run. With `whole` every batch has all segments, of
    rows that have ended too, so that ranks in step make equally many passes. Raises `BadInput` for fewer rows than
    `least`.
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
        self.names, self.ids, self.config, self.fixed_segments = (
            [each.name for each in documents],
            list(ids),
            config,
            fixed_segments,
        )
        self.boundaries, self.pad_to_row_tokens = SegmentBoundaries(config, seed, max_segment_tokens), pad_to_row_tokens
        step = config.row_tokens
        rows = [(d, at, min(at + step, len(each))) for d, each in enumerate(ids) for at in range(0, len(each), step)]
        rows = [row for row in rows if row[2] - row[1] > 1]  # a single token predicts nothing
        if len(rows) < min_rows:
            raise InputError(
                f"{len(rows)} stretches of {step} tokens in {len(ids)} documents, a batch asks for {min_rows}; "
                "give more text, or lower data.text.row_tokens"
            )
        places = (
            range(len(rows))
            if max_rows is None
            else rng.permuted_index(0, 0, np.arange(min(max_rows, len(rows))), len(rows))
        )
        self.rows = [rows[int(i)] for i in places]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the documents as ids, with their names, and of how they are cut."""
        said = {
            "names": self.names,
            "how": self.config.model_dump(),
            "fixed": self.fixed_segments,
            "rows": len(self.rows),
        }
        digest = hashlib.sha256(to_canonical_json(said).encode())
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return max(end - start for _, start, end in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The rows on a grid as wide as the longest of them, or as any."""
        places = [self.rows[int(i)] for i in rows]
        text, live = pad_rows([self.ids[d][start:end].tolist() for d, start, end in places])
        if self.pad_to_row_tokens:
            text, live = (F.pad(each, (0, self.config.row_tokens - each.shape[1])) for each in (text, live))
        width = text.shape[1]
        ends = self.boundaries.fixed_ends() if self.fixed_segments else self.boundaries.random_ends(step)
        return DocumentBatch(
            text, live, live.clone(), (*(end for end in ends if end < width), width),
            torch.as_tensor(rows, dtype=torch.long), tuple(f"{self.names[d]}@{start}" for d, start, _ in places),
            epoch, step, windows=(self.config.segments_per_window, self.config.segment_overlap),
        )  # fmt: skip
