"""What data, methods, training and evaluation hand to one another: examples, batches, steps, answers.

Shapes: B rows; Nq, Nc, Na columns of question, chain and answer, of which the live ones are a row's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.generation.generate import PassCounts
from laconic.interfaces import StatefulLM as StatefulLM

IGNORE_INDEX = -100  # the target of a token whose successor nobody scores; what F.cross_entropy ignores


@dataclass(frozen=True)
class ReasoningExample:
    """A question with its chain of steps and its answer, as text; `flags` are marks of its source, kept for reports."""

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())


@dataclass(frozen=True)
class ReasoningBatch:
    """A batch on a grid: every part begins at the same column in each row; padding is known by `*_live` alone.

    Questions are padded left, chains and answers right. Targets stand where they are predicted, -100 where nothing is
    scored: `next_question` is what the last question token predicts, in order of live tokens. `chain_step` numbers
    the step of each chain token from 0. `number` marks the answer's tokens that hold a character of the number;
    `distil` is the column before the first of them, -1 where a format has none. `index` is the place of a row in its
    set, `epoch` and `step` say when it is read: together the key of all that is drawn for it. `totals` are the counts
    of the whole optimizer step (`Method.totals`, summed over micro-batches and ranks); None: the batch is the step.
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
        """Rows."""
        return self.question_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Live tokens of question, chain and answer."""
        return sum(int(live.sum()) for live in (self.question_mask, self.chain_mask, self.answer_mask))

    def to(self, device: torch.device | str) -> "ReasoningBatch":
        """The same batch elsewhere."""
        return self.map_tensors(lambda t: t.to(device))

    @property
    def sequential_parts(self) -> "tuple[ReasoningBatch, ...]":
        """What is run one after another in an optimizer step: all at once."""
        return (self,)

    def select_rows(self, rows: Sequence[int]) -> "ReasoningBatch":
        """Some of the rows; `totals` stay those of the whole step."""
        at = torch.as_tensor(rows, dtype=torch.long, device=self.question_ids.device)
        ids = tuple(self.ids[i] for i in rows) if self.ids else ()
        return replace(self.map_tensors(lambda t: t.index_select(0, at)), ids=ids)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "ReasoningBatch":
        """`function` of every tensor."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in found.items() if isinstance(t, Tensor)})


@dataclass(frozen=True)
class DocumentBatch:
    """Documents on a grid, cut into segments at the same columns in every row; of one that has ended, none is live.

    A `scored` token is a target: it is predicted by the live token before it in its window. `cuts` are the exclusive
    ends of the segments' columns, the last is T. `windows` are (w, o): segments in a window, and how many of them the
    next window reads again. `first` is the number of the first segment within the document; with the place `index` of
    a row in its set it keys what is drawn for a segment. `handed` says how many of a window's segments are in the
    memory given to the next one, None for the last. `facts` are how many a document of the recall task holds. `totals`
    as in `Reasoning`. `labels` are what each token predicts where that is not its successor, -100 for nothing. `fresh`
    are the rows that begin a document, of batches whose rows go on where the same rows of the last batch ended; None:
    every row stands alone.
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
        """Rows."""
        return self.input_ids.shape[0]

    @property
    def targets(self) -> Int[Tensor, "B T"]:
        """What each token predicts: its label, or the next live token if that one is scored; else -100."""
        return (
            next_token_targets(self.input_ids, self.attention_mask, self.loss_mask)
            if self.labels is None
            else self.labels
        )

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the documents."""
        return self.document_ids

    @property
    def num_tokens(self) -> int:
        """Live tokens."""
        return int(self.attention_mask.sum())

    @property
    def segment_slices(self) -> tuple[slice, ...]:
        """Columns of each segment."""
        return tuple(slice(a, b) for a, b in zip((0, *self.segment_ends), self.segment_ends, strict=False))

    @property
    def sequential_parts(self) -> "tuple[DocumentBatch, ...]":
        """The windows in order, as section 5 of the method has them; what is scored in one is scored in no other.

        The first token of a window is not scored, since nothing before it is there to predict it; with an overlap
        nothing of what is read again is.
        """
        w, o = self.windows
        last = max(len(self.segment_ends) - w, 0)
        starts = [*range(0, last, w - o), -(-last // (w - o)) * (w - o)]
        return tuple(self._window_batch(start, start != starts[-1]) for start in starts)

    def _window_batch(self, start: int, has_next: bool) -> "DocumentBatch":
        """The window that begins with a segment; whether another one follows."""
        w, o = self.windows
        ends = (0, *self.segment_ends)[start : start + w + 1]
        begin, again = ends[0], ends[o] if start else ends[0]
        cut = self.map_tensors(lambda t: t[:, begin : ends[-1]] if t.ndim == 2 else t)
        new = torch.arange(begin, ends[-1], device=self.input_ids.device) >= again
        predicted = cut.attention_mask.cumsum(1) > 1
        return replace(
            cut,
            loss_mask=cut.loss_mask & cut.attention_mask & predicted & new,
            segment_ends=tuple(end - begin for end in ends[1:]),
            first_segment=self.first_segment + start,
            carried_segments=w - o if has_next else self.carried_segments,
        )

    def to(self, device: torch.device | str) -> "DocumentBatch":
        """The same batch elsewhere."""
        return self.map_tensors(lambda t: t.to(device))

    def select_rows(self, rows: Sequence[int]) -> "DocumentBatch":
        """Some of the rows; `totals` stay those of the whole step."""
        at = torch.as_tensor(rows, dtype=torch.long, device=self.input_ids.device)
        names = tuple(self.document_ids[i] for i in rows) if self.document_ids else ()
        return replace(self.map_tensors(lambda t: t.index_select(0, at)), document_ids=names)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "DocumentBatch":
        """`function` of every tensor."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in found.items() if isinstance(t, Tensor)})


def next_token_targets(
    input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]
) -> Int[Tensor, "B T"]:
    """What each live token predicts: the next live token if that one is scored, across segments too."""
    T = input_ids.shape[1]
    at = torch.arange(T, device=input_ids.device).expand_as(input_ids)
    here = F.pad(at.masked_fill(~attention_mask, T), (0, 1), value=T)[:, 1:]
    following = here.flip(1).cummin(1).values.flip(1)
    there = following.clamp(max=T - 1)
    told = attention_mask & (following < T) & loss_mask.gather(1, there)
    return input_ids.gather(1, there).masked_fill(~told, IGNORE_INDEX)


@runtime_checkable
class MethodState(Protocol):
    """What one step hands to the next, a cache or a memory: a value, with a name for each of its tensors."""

    def detach(self) -> Any: ...
    def to(self, device: torch.device | str) -> Any: ...
    def tensors(self) -> Mapping[str, Tensor]: ...


class StepOutput(NamedTuple):
    """What a method makes of a batch: the loss to descend, its parts (detached, unweighted) by name, and the state."""

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Tensor]
    state: MethodState | None = None


@dataclass(frozen=True)
class AnswerBatch:
    """Answers to B questions: `texts`, their `ids`, the passes each took, and the cache slots it held.

    `held` is (when the answer began, at its end), live positions of the row.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    passes: tuple[PassCounts, ...]
    cache_positions: tuple[tuple[int, int], ...]


@runtime_checkable
class Batch(Protocol):
    """A batch as the loop sees it: `Reasoning`, `Documents`. `pieces` are run in order within one optimizer step."""

    @property
    def B(self) -> int: ...
    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sequential_parts(self) -> tuple[Any, ...]: ...
    def to(self, device: torch.device | str) -> Any: ...


@runtime_checkable
class TrainingData(Protocol):
    """Rows that a run is trained on; `batch` is a pure function of its arguments."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows, bound into every step of a run."""
        ...

    def __len__(self) -> int: ...
    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Batch: ...


@runtime_checkable
class Method(Protocol):
    """One paper's way to train and to answer; a torch module, whose trainable parameters are what is learned."""

    def loss_denominators(self, batch: Any) -> Mapping[str, float]:
        """What the sums of the loss are divided by; summed over micro-batches and ranks, it comes back in `batch`."""
        ...

    def __call__(self, batch: Any, state: Any = None) -> StepOutput: ...

    def resets_optimizer_state(self, batch: Any) -> bool:
        """Whether the optimizer forgets its moments before this step (iCoT, Coconut)."""
        ...


@runtime_checkable
class LocatesNonFinite(Protocol):
    """A method that can say where in a batch, read on a state, numbers stop being finite."""

    def locate_nonfinite(self, batch: Any, state: Any) -> str:
        """The place in words; empty where this is not its to say."""
        ...


@runtime_checkable
class AfterUpdateHook(Protocol):
    """A method that sets something by what an update gave."""

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Called once an update has been applied, with its loss and parts over all ranks."""
        ...
