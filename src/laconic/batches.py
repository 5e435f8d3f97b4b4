"""Batches that data, methods, training and evaluation hand to one another.

Shapes: B rows; Nq, Nc, Na columns of question, chain and answer; T columns of documents. A mask is True at real
tokens and False at padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

IGNORE_INDEX = -100  # target of a position that is not scored; F.cross_entropy's ignore_index


@dataclass(frozen=True)
class ReasoningExample:
    """A question with its chain of thought (a tuple of steps) and its answer, as text.

    `metadata` holds source-specific fields (difficulty, subset, …) that reports group by.
    """

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())


@dataclass(frozen=True)
class ReasoningBatch:
    """A batch of questions, chains and answers; each part starts at the same column in every row.

    Questions are padded on the left, chains and answers on the right. A target is stored at the position that
    predicts it; IGNORE_INDEX marks positions that are not scored.

    Args:
        question_ids: Question tokens; `question_mask` marks the real ones. The same for `chain` and `answer`.
        chain_step_index: Number of the reasoning step of each chain token, from 0.
        question_target: The token that the last question token predicts.
        chain_targets: The token that each chain token predicts.
        answer_targets: The token that each answer token predicts.
        distill_column: Column of the answer token before the first one of the number; -1 if the format has none.
        answer_number_mask: Answer tokens that contain a character of the number.
        row_index: Index of each row in its data set. With `epoch` and `step` it seeds everything random of the row.
        ids: Names of the rows.
        loss_denominators: Denominators of the whole optimizer step (`Method.loss_denominators` summed over
            micro-batches and ranks); None if this batch is the whole step.
    """

    question_ids: Int[Tensor, "B Nq"]
    question_mask: Bool[Tensor, "B Nq"]
    chain_ids: Int[Tensor, "B Nc"]
    chain_mask: Bool[Tensor, "B Nc"]
    chain_step_index: Int[Tensor, "B Nc"]
    answer_ids: Int[Tensor, "B Na"]
    answer_mask: Bool[Tensor, "B Na"]
    question_target: Int[Tensor, " B"]
    chain_targets: Int[Tensor, "B Nc"]
    answer_targets: Int[Tensor, "B Na"]
    distill_column: Int[Tensor, " B"]
    answer_number_mask: Bool[Tensor, "B Na"]
    row_index: Int[Tensor, " B"]
    ids: tuple[str, ...] = ()
    epoch: int = 0
    step: int = 0
    loss_denominators: Mapping[str, float] | None = None

    @property
    def B(self) -> int:
        """Number of rows."""
        return self.question_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of real tokens in questions, chains and answers."""
        return sum(int(mask.sum()) for mask in (self.question_mask, self.chain_mask, self.answer_mask))

    @property
    def sequential_parts(self) -> "tuple[ReasoningBatch, ...]":
        """Parts that an optimizer step runs one after another: the batch itself."""
        return (self,)

    def to(self, device: torch.device | str) -> "ReasoningBatch":
        """Move every tensor to a device."""
        return self.map_tensors(lambda t: t.to(device))

    def select_rows(self, rows: Sequence[int]) -> "ReasoningBatch":
        """Return some of the rows; `loss_denominators` stay those of the whole step."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.question_ids.device)
        ids = tuple(self.ids[i] for i in rows) if self.ids else ()
        return replace(self.map_tensors(lambda t: t.index_select(0, index)), ids=ids)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "ReasoningBatch":
        """Apply `function` to every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in values.items() if isinstance(t, Tensor)})


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
        first_segment: Number of the first segment within its document; with `row_index` it seeds the segment.
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
        """Number of rows."""
        return self.input_ids.shape[0]

    @property
    def targets(self) -> Int[Tensor, "B T"]:
        """The token that each token predicts: its label, or the next real token if that is scored."""
        if self.labels is not None:
            return self.labels
        return next_token_targets(self.input_ids, self.attention_mask, self.loss_mask)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the documents."""
        return self.document_ids

    @property
    def num_tokens(self) -> int:
        """Number of real tokens."""
        return int(self.attention_mask.sum())

    @property
    def segment_slices(self) -> tuple[slice, ...]:
        """Columns of each segment."""
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
        """Return the window that begins with segment `start`."""
        w, o = self.windows
        ends = (0, *self.segment_ends)[start : start + w + 1]
        begin, first_new = ends[0], ends[o] if start else ends[0]
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
        """Move every tensor to a device."""
        return self.map_tensors(lambda t: t.to(device))

    def select_rows(self, rows: Sequence[int]) -> "DocumentBatch":
        """Return some of the rows; `loss_denominators` stay those of the whole step."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.input_ids.device)
        names = tuple(self.document_ids[i] for i in rows) if self.document_ids else ()
        return replace(self.map_tensors(lambda t: t.index_select(0, index)), document_ids=names)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "DocumentBatch":
        """Apply `function` to every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in values.items() if isinstance(t, Tensor)})


def next_token_targets(
    input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]
) -> Int[Tensor, "B T"]:
    """Return the next real token of each real token if that one is scored, else IGNORE_INDEX.

    Args:
        input_ids: Tokens.
        attention_mask: True at real tokens; padding between two real tokens is skipped.
        loss_mask: True at tokens that are targets.
    """
    T = input_ids.shape[1]
    columns = torch.arange(T, device=input_ids.device).expand_as(input_ids)
    shifted = F.pad(columns.masked_fill(~attention_mask, T), (0, 1), value=T)[:, 1:]
    following = shifted.flip(1).cummin(1).values.flip(1)
    index = following.clamp(max=T - 1)
    scored = attention_mask & (following < T) & loss_mask.gather(1, index)
    return input_ids.gather(1, index).masked_fill(~scored, IGNORE_INDEX)


class PassCounts(NamedTuple):
    """Decoder calls that a row took part in before it ended.

    `prompt`: chunks of the prompt; `latent_setup`: the pass that reads question and placeholders; `latent`: passes
    that update latent thoughts; `answer`: generated tokens that were read.
    """

    prompt: int
    latent_setup: int
    latent: int
    answer: int

    @property
    def total(self) -> int:
        """Sum of all four."""
        return sum(self)


@dataclass(frozen=True)
class AnswerBatch:
    """Answers to B questions.

    Args:
        texts: Decoded answers.
        token_ids: Generated ids of each row.
        passes: Decoder calls of each row.
        cache_positions: Per row, the number of cached positions when the answer began and when it ended.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    passes: tuple[PassCounts, ...]
    cache_positions: tuple[tuple[int, int], ...]
