"""Documents cut into segments and windows, and the targets of their tokens.

Shapes: B rows; T columns. A mask is True at real tokens and False at padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

IGNORE_INDEX = -100  # target of a position that is not scored; F.cross_entropy's ignore_index


@dataclass(frozen=True)
class DocumentBatch:
    """A batch of documents, cut into segments at the same columns in every row; ended documents are padded.

    Args:
        input_ids: Tokens; `attention_mask` marks the real ones.
        loss_mask: Tokens that are targets. A target is predicted by the real token before it in its window.
        segment_ends: Exclusive end column of each segment; the last is T.
        row_index: Index of each row in its data set.
        document_ids: Names of the documents.
        loss_denominators: As in ReasoningBatch.
        first_segment: Index of the first segment within its document; with `row_index` it seeds the segment.
        carried_segments: How many of this window's segments are in the memory passed to the next window; None for
            the last window.
        windows: (segments per window, segments that the next window reads again).
        num_facts: Facts per document, in the fact recall task.
        labels: The token that each token predicts where it is not the next one; IGNORE_INDEX for none.
        document_starts: Rows that begin a new document, when rows continue where the previous batch ended. None:
            every row is a document of its own.
    """

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    segment_ends: tuple[int, ...]
    row_index: Int[Tensor, " B"]
    document_ids: tuple[str, ...] = ()
    epoch: int = 0
    step: int = 0
    loss_denominators: Mapping[str, float] | None = None
    first_segment: int = 0
    carried_segments: int | None = None
    windows: tuple[int, int] = (3, 1)
    num_facts: Int[Tensor, " B"] | None = None
    labels: Int[Tensor, "B T"] | None = None
    document_starts: Bool[Tensor, " B"] | None = None

    @property
    def B(self) -> int:
        return self.input_ids.shape[0]

    @property
    def targets(self) -> Int[Tensor, "B T"]:
        """The token that each token predicts: its label, or the next real token if that is scored."""
        if self.labels is not None:
            return self.labels
        return next_token_targets(self.input_ids, self.attention_mask, self.loss_mask)

    @property
    def ids(self) -> tuple[str, ...]:
        return self.document_ids

    @property
    def num_tokens(self) -> int:
        return int(self.attention_mask.sum())

    @property
    def segment_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip((0, *self.segment_ends), self.segment_ends, strict=False))

    @property
    def sequential_parts(self) -> "tuple[DocumentBatch, ...]":
        """The windows in order (AutoCompressor, section 5); every target is scored in exactly one of them.

        The first token of a window is not scored, because no token before it predicts it. Segments that are read
        again because of the overlap are not scored again.
        """
        w, o = self.windows
        last = max(len(self.segment_ends) - w, 0)
        starts = [*range(0, last, w - o), -(-last // (w - o)) * (w - o)]
        return tuple(self._window_batch(start, start != starts[-1]) for start in starts)

    def _window_batch(self, start: int, has_next: bool) -> "DocumentBatch":
        w, o = self.windows
        ends = (0, *self.segment_ends)[start : start + w + 1]
        begin = ends[0]
        first_new = ends[o] if start else ends[0]
        window = self.map_tensors(lambda t: t[:, begin : ends[-1]] if t.ndim == 2 else t)
        is_new = torch.arange(begin, ends[-1], device=self.input_ids.device) >= first_new
        is_predicted = window.attention_mask.cumsum(1) > 1
        return replace(
            window,
            loss_mask=window.loss_mask & window.attention_mask & is_predicted & is_new,
            segment_ends=tuple(end - begin for end in ends[1:]),
            first_segment=self.first_segment + start,
            carried_segments=w - o if has_next else self.carried_segments,
        )

    def to(self, device: torch.device | str) -> "DocumentBatch":
        return self.map_tensors(lambda t: t.to(device))

    def select_rows(self, rows: Sequence[int]) -> "DocumentBatch":
        """Return some of the rows; `loss_denominators` stay those of the whole step."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.input_ids.device)
        names = tuple(self.document_ids[i] for i in rows) if self.document_ids else ()
        return replace(self.map_tensors(lambda t: t.index_select(0, index)), document_ids=names)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "DocumentBatch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in values.items() if isinstance(t, Tensor)})


def next_token_targets(
    input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]
) -> Int[Tensor, "B T"]:
    """Return the next real token of each real token if `loss_mask` scores that one, else IGNORE_INDEX.

    Padding between two real tokens is skipped.
    """
    T = input_ids.shape[1]
    columns = torch.arange(T, device=input_ids.device).expand_as(input_ids)
    shifted = F.pad(columns.masked_fill(~attention_mask, T), (0, 1), value=T)[:, 1:]
    following = shifted.flip(1).cummin(1).values.flip(1)
    index = following.clamp(max=T - 1)
    scored = attention_mask & (following < T) & loss_mask.gather(1, index)
    return input_ids.gather(1, index).masked_fill(~scored, IGNORE_INDEX)
