"""Cross-entropy over the scored tokens of a batch, and the targets of a question with chain and answer.

KaVa arXiv:2510.02312, equations 5a and 5b. Symbols: N scored tokens; p the model's softmax.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.models.attention import accumulation_dtype
from laconic.models.ops.row_chunks import Scores, get_chunk_size, run_in_chunks

MIN_CHUNKED_ROWS = 128
LogitsFn = Callable[[Tensor], Tensor]


class LossAndAccuracy(NamedTuple):
    """A cross-entropy in nats, and the share of the same tokens whose most likely id is the target."""

    loss: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def count_scored(targets: Int[Tensor, "B T"]) -> float:
    """Return the number of scored tokens, the denominator of a cross-entropy."""
    return float((targets != IGNORE_INDEX).sum())


def score_rows(logits: LogitsFn, hidden_states: Float[Tensor, "N D"], labels: Int[Tensor, " N"]) -> Scores:
    """Return -log p(label) in nats, and whether the label is the most likely id, from the logits of all rows."""
    rows = logits(hidden_states)
    rows = rows.to(accumulation_dtype(rows.dtype))
    return F.cross_entropy(rows, labels, reduction="none"), rows.detach().argmax(-1) == labels


def score_rows_in_chunks(logits: LogitsFn, hidden_states: Float[Tensor, "N D"], labels: Int[Tensor, " N"]) -> Scores:
    """Compute `score_rows` with the logits of some rows at a time where all would be large."""
    if len(hidden_states) > MIN_CHUNKED_ROWS:
        probe = logits(hidden_states[:1].detach())
        chunk_size = get_chunk_size(probe)
        if len(hidden_states) > chunk_size:
            score = partial(score_rows, logits)
            return run_in_chunks(score, hidden_states, labels, chunk_size, is_trained=probe.requires_grad)
    return score_rows(logits, hidden_states, labels)


def masked_cross_entropy(
    logits: LogitsFn,
    hidden_states: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T"],
    denominator: float | None = None,
) -> LossAndAccuracy:
    """Eq. 5a,5b: -(1/N) sum log p(target | all before), over the scored tokens.

    Args:
        logits: Map from hidden states to logits, row by row; called for scored positions only.
        hidden_states: Hidden states after the final norm.
        targets: Id that each position predicts, `IGNORE_INDEX` where nothing is scored.
        denominator: N of the whole optimizer step, if this is a micro-batch of it.
    """
    denominator = count_scored(targets) if denominator is None else denominator
    positions = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    nats, is_correct = score_rows_in_chunks(logits, hidden_states[positions], targets[positions])
    return LossAndAccuracy(nats.sum() / (denominator or 1.0), is_correct.to(nats.dtype).sum() / (denominator or 1.0))


def build_teacher_targets(batch: ReasoningBatch) -> Int[Tensor, "B T"]:
    """Return what the last question token, the chain and the answer predict."""
    return torch.cat([batch.question_target[:, None], batch.chain_targets, batch.answer_targets], 1)


def build_student_targets(batch: ReasoningBatch) -> Int[Tensor, "B T"]:
    """Return what the last token before the answer and the answer predict if no chain stands between."""
    first = batch.answer_ids[:, :1].masked_fill(~batch.answer_mask[:, :1], IGNORE_INDEX)
    return torch.cat([first, batch.answer_targets], 1)
