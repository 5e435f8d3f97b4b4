"""Documents read in order, side by side: lanes, of which each goes on in a batch where it ended in the one before."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.data.documents.load import Document
from laconic.data.documents.tokenize import TokenArray
from laconic.errors import InputError
from laconic.storage.strict_json import to_canonical_json

DOCUMENT_ORDER_KEY = 8  # key of the orders of documents
ChunkStart = tuple[int, int]  # a document, and its token that a piece begins with


class StatefulBatches:
    """Row r of an epoch is piece r // `lanes` of lane r % `lanes`, so batches take rows in order (contract.Source).

    A piece is `tokens` that are read and one more, the last target, with which the next piece begins; the last of a
    document is shorter. The pieces of all documents, in an order of documents keyed by seed and epoch, are cut into
    lanes of equal length; those left over are not read in that epoch. A lane is `fresh` where it begins, as every
    one does with an epoch, and where a document does. With `count` the lanes end after so many rows in all. Raises
    `BadInput` (66) for fewer pieces than lanes.
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
        self.names, self.ids = [each.name for each in documents], list(ids)
        self.chunk_tokens, self.num_lanes, self.seed = chunk_tokens, num_lanes, seed
        # A single token predicts nothing, so the last piece of a document has at least two.
        self.chunk_starts = [range(0, max(len(each) - 1, 0), chunk_tokens) for each in ids]
        if (whole := sum(map(len, self.chunk_starts))) < num_lanes:
            raise InputError(
                f"{whole} pieces of {chunk_tokens} tokens in {len(self.ids)} documents, a batch has {num_lanes} lanes; "
                "give more text, or lower train.batch_size or data.text.row_tokens"
            )
        self.lane_length = whole // num_lanes
        self.num_steps = self.lane_length if max_rows is None else min(self.lane_length, -(-max_rows // num_lanes))
        self._ordered: tuple[int, list[ChunkStart]] | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the documents as ids, with their names, and of how they are dealt."""
        said = {
            "names": self.names,
            "tokens": self.chunk_tokens,
            "lanes": self.num_lanes,
            "seed": self.seed,
            "times": self.num_steps,
        }
        digest = hashlib.sha256(to_canonical_json(said).encode())
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def max_length(self) -> int:
        """Columns of a batch."""
        return self.chunk_tokens + 1

    def __len__(self) -> int:
        return self.num_steps * self.num_lanes

    def epoch_chunks(self, epoch: int) -> list[ChunkStart]:
        """Those of an epoch, one document after another: lane b has `length` of them, from b * `length` on."""
        if self._ordered is None or self._ordered[0] != epoch:
            n = len(self.ids)
            order = rng.permuted_index(
                int(rng.hash64(self.seed, DOCUMENT_ORDER_KEY)) >> 1, epoch, np.arange(n), n
            ).tolist()
            self._ordered = epoch, [(d, start) for d in order for start in self.chunk_starts[d]]
        return self._ordered[1]

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The rows on a grid that is as wide for all."""
        pieces, at = self.epoch_chunks(epoch), [divmod(int(row), self.num_lanes) for row in rows]
        places = [pieces[lane * self.lane_length + time] for time, lane in at]
        text, live = self.pad_chunks(places)
        fresh = [time == 0 or start == 0 for (time, _), (_, start) in zip(at, places, strict=True)]
        return DocumentBatch(
            text, live, live.clone(), (self.max_length,), torch.as_tensor(rows, dtype=torch.long),
            tuple(f"{self.names[d]}@{start}" for d, start in places), epoch, step, document_starts=torch.tensor(fresh),
        )  # fmt: skip

    def pad_chunks(self, places: Sequence[ChunkStart]) -> tuple[Tensor, Tensor]:
        """[B, tokens + 1], and which of it is live: all but what follows a document."""
        text = torch.zeros(len(places), self.max_length, dtype=torch.long)
        live = torch.zeros(text.shape, dtype=torch.bool)
        for b, (d, start) in enumerate(places):
            own = self.ids[d][start : start + self.max_length]
            text[b, : len(own)], live[b, : len(own)] = torch.from_numpy(own.astype(np.int64)), True
        return text, live
