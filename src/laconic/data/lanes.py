"""Documents read in order, side by side: lanes, of which each goes on in a batch where it ended in the one before."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.core import keyed
from laconic.core.contract import Documents
from laconic.core.errors import BadInput
from laconic.core.strict import canonical
from laconic.data.encoding import Ids
from laconic.data.text import Document

LANES = 8  # key of the orders of documents
Piece = tuple[int, int]  # a document, and its token that a piece begins with


class Lanes:
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
        ids: Sequence[Ids],
        tokens: int,
        lanes: int,
        seed: int,
        count: int | None = None,
    ) -> None:
        self.names, self.ids = [each.name for each in documents], list(ids)
        self.tokens, self.lanes, self.seed = tokens, lanes, seed
        # A single token predicts nothing, so the last piece of a document has at least two.
        self.starts = [range(0, max(len(each) - 1, 0), tokens) for each in ids]
        if (whole := sum(map(len, self.starts))) < lanes:
            raise BadInput(
                f"{whole} pieces of {tokens} tokens in {len(self.ids)} documents, a batch has {lanes} lanes; "
                "give more text, or lower train.batch or data.text.tokens"
            )
        self.length = whole // lanes
        self.times = self.length if count is None else min(self.length, -(-count // lanes))
        self._ordered: tuple[int, list[Piece]] | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the documents as ids, with their names, and of how they are dealt."""
        said = {"names": self.names, "tokens": self.tokens, "lanes": self.lanes, "seed": self.seed, "times": self.times}
        digest = hashlib.sha256(canonical(said).encode())
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def longest(self) -> int:
        """Columns of a batch."""
        return self.tokens + 1

    def __len__(self) -> int:
        return self.times * self.lanes

    def pieces(self, epoch: int) -> list[Piece]:
        """Those of an epoch, one document after another: lane b has `length` of them, from b * `length` on."""
        if self._ordered is None or self._ordered[0] != epoch:
            n = len(self.ids)
            order = keyed.index(int(keyed.mix(self.seed, LANES)) >> 1, epoch, np.arange(n), n).tolist()
            self._ordered = epoch, [(d, start) for d in order for start in self.starts[d]]
        return self._ordered[1]

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """The rows on a grid that is as wide for all."""
        pieces, at = self.pieces(epoch), [divmod(int(row), self.lanes) for row in rows]
        places = [pieces[lane * self.length + time] for time, lane in at]
        text, live = self.grid(places)
        fresh = [time == 0 or start == 0 for (time, _), (_, start) in zip(at, places, strict=True)]
        return Documents(
            text, live, live.clone(), (self.longest,), torch.as_tensor(rows, dtype=torch.long),
            tuple(f"{self.names[d]}@{start}" for d, start in places), epoch, step, fresh=torch.tensor(fresh),
        )  # fmt: skip

    def grid(self, places: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """[B, tokens + 1], and which of it is live: all but what follows a document."""
        text = torch.zeros(len(places), self.longest, dtype=torch.long)
        live = torch.zeros(text.shape, dtype=torch.bool)
        for b, (d, start) in enumerate(places):
            own = self.ids[d][start : start + self.longest]
            text[b, : len(own)], live[b, : len(own)] = torch.from_numpy(own.astype(np.int64)), True
        return text, live
