"""Documents to judge a memory by: a tail and the tokens before it (E1), or a span copied from them (E1x).

Contexts are cut into fixed segments counted from the tail backwards; of the tail, which is the last segment, all but
its first token is scored, whatever stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laconic.core import keyed
from laconic.core.contract import Documents
from laconic.core.errors import BadInput
from laconic.data.passages import Ids

SPAN = 48  # tokens of an excerpt
START = 5  # key of the place it is copied from


def cuts(n: int, segment: int, tail: int) -> tuple[int, ...]:
    """The ends of segments of n tokens, of which the first may be shorter, and of the tail."""
    first = n % segment or segment
    return (*range(first, n + 1, segment), n + tail)


@dataclass(frozen=True)
class Tails:
    """Stretches of documents, [rows, context + tail] ids, and where each is from."""

    text: Ids
    names: tuple[str, ...]
    tail: int

    @property
    def context(self) -> int:
        """Tokens that stand before a tail."""
        return self.text.shape[1] - self.tail

    def continued(self, rows: Sequence[int], n: int, segment: int) -> Documents:
        """E1: the n tokens before the tails, and the tails. Raises `BadInput` for more tokens than there are."""
        if n > self.context:
            raise BadInput(f"a context of {n} tokens, the stretches have {self.context}; make longer ones")
        text = self.text[list(rows)][:, self.context - n :]
        return self._documents(text, rows, n, segment)

    def copied(self, rows: Sequence[int], n: int, segment: int, span: int = SPAN) -> Documents:
        """E1x: n tokens, and as tail a span of them, from a place that is the row's own."""
        if n < span:
            raise BadInput(f"an excerpt of {span} tokens from a context of {n}; give a longer context")
        context = self.continued(rows, n, segment).text.numpy()[:, :n]
        draws = keyed.uniform(0, START, np.asarray(rows, dtype=np.int64))
        at = (draws * (n - span + 1)).astype(np.int64)[:, None] + np.arange(span)
        return self._documents(np.concatenate([context, np.take_along_axis(context, at, 1)], 1), rows, n, segment)

    def _documents(self, text: Ids, rows: Sequence[int], n: int, segment: int) -> Documents:
        scored = torch.zeros(text.shape, dtype=torch.bool)
        scored[:, n + 1 :] = True
        ends = cuts(n, segment, text.shape[1] - n) if n else (text.shape[1],)
        return Documents(
            torch.as_tensor(text.astype(np.int64)), torch.ones(text.shape, dtype=torch.bool), scored, ends,
            torch.as_tensor(rows, dtype=torch.long), tuple(self.names[int(i)] for i in rows),
            windows=(max(len(ends), 2), 0),
        )  # fmt: skip


def tails(names: Sequence[str], ids: Sequence[Ids], context: int, tail: int, count: int | None = None) -> Tails:
    """Stretches of documents that do not overlap, `count` of them from all over, the same every time.

    Raises `BadInput` where no document is long enough.
    """
    length = context + tail
    there = [(d, at) for d, each in enumerate(ids) for at in range(0, len(each) - length + 1, length)]
    if not there:
        longest = max(map(len, ids), default=0)
        raise BadInput(f"stretches of {length:,} tokens, the longest document has {longest:,}; shorten the context")
    order = keyed.index(0, 0, np.arange(min(count or len(there), len(there))), len(there)).tolist()
    kept = [there[i] for i in order]
    text = np.stack([ids[d][at : at + length] for d, at in kept])
    return Tails(text, tuple(f"{names[d]}@{at}" for d, at in kept), tail)
