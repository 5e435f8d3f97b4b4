"""Stretches of documents as batches: a row is a stretch, and all rows of a batch are cut at the same columns."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from laconic.core import keyed
from laconic.core.contract import Documents
from laconic.core.errors import BadInput
from laconic.core.strict import canonical
from laconic.data.encoding import Ids, encoded_together
from laconic.data.reasoning import grid
from laconic.data.segmenting import Cuts
from laconic.data.settings import Text
from laconic.data.text import Document
from laconic.data.tokens import Tokenizer


def tokenized(
    documents: Sequence[Document], tokenizer: Tokenizer, show: Callable[[str, int, int], None] | None = None
) -> list[Ids]:
    """Each document as ids, none of them special; `show` is told how far it is."""
    return encoded_together([document.text for document in documents], tokenizer, show)


class Passages:
    """Stretches of `tokens` tokens that follow one another (contract.Source); the last of a document is shorter.

    `room` is what AC7 has for a segment. With `fixed`, as evaluation has it, nothing is drawn. Of `count` rows, taken
    from all over the documents, the same ones are taken for every run. With `whole` every batch has all segments, of
    rows that have ended too, so that ranks in step make equally many passes. Raises `BadInput` for fewer rows than
    `least`.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        ids: Sequence[Ids],
        how: Text,
        seed: int,
        room: int,
        *,
        fixed: bool = False,
        whole: bool = False,
        count: int | None = None,
        least: int = 1,
    ) -> None:
        self.names, self.ids, self.how, self.fixed = [each.name for each in documents], list(ids), how, fixed
        self.cuts, self.whole = Cuts(how, seed, room), whole
        step = how.tokens
        rows = [(d, at, min(at + step, len(each))) for d, each in enumerate(ids) for at in range(0, len(each), step)]
        rows = [row for row in rows if row[2] - row[1] > 1]  # a single token predicts nothing
        if len(rows) < least:
            raise BadInput(
                f"{len(rows)} stretches of {step} tokens in {len(ids)} documents, a batch asks for {least}; "
                "give more text, or lower data.text.tokens"
            )
        places = range(len(rows)) if count is None else keyed.index(0, 0, np.arange(min(count, len(rows))), len(rows))
        self.rows = [rows[int(i)] for i in places]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the documents as ids, with their names, and of how they are cut."""
        said = {"names": self.names, "how": self.how.model_dump(), "fixed": self.fixed, "rows": len(self.rows)}
        digest = hashlib.sha256(canonical(said).encode())
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(end - start for _, start, end in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """The rows on a grid as wide as the longest of them, or as any."""
        places = [self.rows[int(i)] for i in rows]
        text, live = grid([self.ids[d][start:end].tolist() for d, start, end in places])
        if self.whole:
            text, live = (F.pad(each, (0, self.how.tokens - each.shape[1])) for each in (text, live))
        width = text.shape[1]
        ends = self.cuts.fixed() if self.fixed else self.cuts.drawn(step)
        return Documents(
            text, live, live.clone(), (*(end for end in ends if end < width), width),
            torch.as_tensor(rows, dtype=torch.long), tuple(f"{self.names[d]}@{start}" for d, start, _ in places),
            epoch, step, windows=(self.how.window, self.how.overlap),
        )  # fmt: skip
