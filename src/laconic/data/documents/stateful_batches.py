"""Stateful batches: each row continues the document where it stopped in the previous batch."""

from collections.abc import Sequence

import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.batches.padding import pad_rows
from laconic.data.documents.load import Document
from laconic.data.documents.tokenize import TokenArray, hash_token_arrays
from laconic.errors import InputError

DOCUMENT_ORDER_KEY = 8
ChunkStart = tuple[int, int]  # document, first token


class StatefulBatches:
    """Documents as chunks in parallel lanes, the rows of a batch (batches.TrainingData).

    Row r of an epoch is chunk r // `num_lanes` of lane r % `num_lanes`, so batches must take rows in order. A chunk has
    `chunk_tokens` tokens and one more, the last target, with which the next chunk begins; the last chunk of a document
    is shorter. In every epoch the documents are shuffled, and their chunks are divided into lanes of equal length; the
    remainder is not read. A row is marked in `document_starts` at the beginning of an epoch and of a document.
    Raises `InputError` if there are fewer chunks than lanes.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        ids: Sequence[TokenArray],
        chunk_tokens: int,
        num_lanes: int,
        seed: int,
        max_rows: int | None = None,
    ) -> None:
        self.names, self.books = [doc.name for doc in documents], [doc.book for doc in documents]
        self.ids = list(ids)
        self.chunk_tokens, self.num_lanes, self.seed = chunk_tokens, num_lanes, seed
        # A single token predicts nothing, so the last chunk of a document has at least two.
        self.chunk_starts = [range(0, max(len(document) - 1, 0), chunk_tokens) for document in ids]
        num_chunks = sum(map(len, self.chunk_starts))
        if num_chunks < num_lanes:
            count = f"{num_chunks} chunks of {chunk_tokens} tokens"
            raise InputError(f"{count}, fewer than a batch of {num_lanes}; give more text")
        self.lane_length = num_chunks // num_lanes
        self.num_steps = self.lane_length if max_rows is None else min(self.lane_length, -(-max_rows // num_lanes))
        self._epoch_chunks: tuple[int, list[ChunkStart]] | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the names that rows give, of token ids, and of how documents are divided."""
        names = ("books", "chunk_tokens", "num_lanes", "seed", "num_steps")
        return hash_token_arrays({name: getattr(self, name) for name in names}, self.ids)

    @property
    def max_length(self) -> int:
        return self.chunk_tokens + 1

    def __len__(self) -> int:
        return self.num_steps * self.num_lanes

    def epoch_chunks(self, epoch: int) -> list[ChunkStart]:
        """Return the chunks of an epoch, document after document; lane b begins at b * `lane_length`."""
        if self._epoch_chunks is None or self._epoch_chunks[0] != epoch:
            seed = int(rng.hash64(self.seed, DOCUMENT_ORDER_KEY)) >> 1
            order = rng.permutation(len(self.ids), seed, epoch)
            self._epoch_chunks = epoch, [(d, start) for d in order for start in self.chunk_starts[d]]
        return self._epoch_chunks[1]

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        lanes = self.epoch_chunks(epoch)
        coordinates = [divmod(int(row), self.num_lanes) for row in rows]
        starts = [lanes[lane * self.lane_length + time] for time, lane in coordinates]
        chunks = [self.ids[d][start : start + self.max_length].tolist() for d, start in starts]
        input_ids, mask = pad_rows(chunks, width=self.max_length)
        is_start = [time == 0 or start == 0 for (time, _), (_, start) in zip(coordinates, starts, strict=True)]
        return DocumentBatch(
            input_ids=input_ids,
            attention_mask=mask,
            loss_mask=mask.clone(),
            segment_ends=(self.max_length,),
            row_index=torch.as_tensor(rows, dtype=torch.long),
            document_ids=tuple(f"{self.names[d]}@{start}" for d, start in starts),
            epoch=epoch,
            step=step,
            document_starts=torch.tensor(is_start),
        )
