"""Questions with their chains of thought and answers.

Shapes: B rows; Nq, Nc, Na columns of question, chain and answer, Nd of documents. A mask is True at real tokens and
False at padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class ReasoningBatch:
    """A batch of questions, chains and answers; each part starts at the same column in every row.

    Questions are padded on the left, chains and answers on the right. A target is stored at the position that
    predicts it; IGNORE_INDEX marks positions that are not scored.

    Args:
        question_ids: Question tokens; `question_mask` marks the real ones. The same for `chain` and `answer`.
        chain_step_index: Index of the reasoning step of each chain token, from 0.
        question_target: The token that the last question token predicts.
        chain_targets: The token that each chain token predicts.
        answer_targets: The token that each answer token predicts.
        distill_column: Column of the answer token before the first one of the number; -1 if the format has none.
        answer_number_mask: Answer tokens that contain a character of the number.
        row_index: Index of each row in its data set. With `epoch` and `step` it seeds everything random of the row.
        ids: Names of the rows.
        loss_denominators: Denominators of the whole optimizer step (`Method.loss_denominators` summed over
            micro-batches and ranks); None if this batch is the whole step.
        document_ids: Tokens of the document of each question, padded on the right; None if they have none.
        document_mask: True at their real tokens.
        chain_result_mask: Chain tokens that contain a digit of the last number of their step; None if not known.
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
    document_ids: Int[Tensor, "B Nd"] | None = None
    document_mask: Bool[Tensor, "B Nd"] | None = None
    chain_result_mask: Bool[Tensor, "B Nc"] | None = None

    @property
    def B(self) -> int:
        return self.question_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of real tokens in documents, questions, chains and answers."""
        masks = (self.document_mask, self.question_mask, self.chain_mask, self.answer_mask)
        return sum(int(mask.sum()) for mask in masks if mask is not None)

    @property
    def sequential_parts(self) -> "tuple[ReasoningBatch, ...]":
        """Parts that an optimizer step runs one after another: the batch itself."""
        return (self,)

    def to(self, device: torch.device | str) -> "ReasoningBatch":
        return self.map_tensors(lambda t: t.to(device))

    def select_rows(self, rows: Sequence[int]) -> "ReasoningBatch":
        """Return some of the rows; `loss_denominators` stay those of the whole step."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.question_ids.device)
        ids = tuple(self.ids[i] for i in rows) if self.ids else ()
        return replace(self.map_tensors(lambda t: t.index_select(0, index)), ids=ids)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "ReasoningBatch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in values.items() if isinstance(t, Tensor)})
