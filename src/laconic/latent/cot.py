"""The written chain and its two ends: no chain at all, a chain written out, and the loss that all methods share.

KaVa arXiv:2510.02312, equations 5a and 5b. Symbols: N tokens scored, of a row or of all rows; p the model's softmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.batches import IGNORE_INDEX, AnswerBatch, ReasoningBatch, StepOutput
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding, generate_answers
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

CrossEntropyReduction = Literal["token", "row"]
LogitsFn = Callable[[Tensor], Tensor]


class LossAndAccuracy(NamedTuple):
    """A cross-entropy in nats, and the share of the same tokens, weighted alike, whose likeliest id is the target."""

    loss: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def count_scored(targets: Int[Tensor, "B T"], reduction: CrossEntropyReduction = "token") -> float:
    """What the sum of a cross-entropy is divided by: tokens that are scored, or rows that have one."""
    there = targets != IGNORE_INDEX
    return float((there if reduction == "token" else there.any(1)).sum())


def masked_cross_entropy(
    logits: LogitsFn,
    hidden_states: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T"],
    reduction: CrossEntropyReduction = "token",
    denominator: float | None = None,
) -> LossAndAccuracy:
    """Eq. 5a,5b: -(1/N) sum log p(target | all before), over the scored tokens of the batch (or row by row)."""
    there = targets != IGNORE_INDEX
    denominator = count_scored(targets, reduction) if denominator is None else denominator
    at = there.nonzero(as_tuple=True)
    rows = logits(hidden_states[at])
    asked, rows = targets[at], rows.to(accumulation_dtype(rows.dtype))
    each = F.cross_entropy(rows, asked, reduction="none")
    hit = (rows.detach().argmax(-1) == asked).to(each.dtype)
    if reduction == "row":
        share = (there.to(each.dtype) / there.sum(1, keepdim=True).clamp(min=1))[at]
        each, hit = each * share, hit * share
    return LossAndAccuracy(each.sum() / (denominator or 1.0), hit.sum() / (denominator or 1.0))


def build_teacher_targets(batch: ReasoningBatch) -> Int[Tensor, "B T"]:
    """What the last question token, the chain and the answer predict."""
    return torch.cat([batch.question_target[:, None], batch.chain_targets, batch.answer_targets], 1)


def build_student_targets(batch: ReasoningBatch) -> Int[Tensor, "B T"]:
    """What the last token before the answer, when no chain stands between, and the answer predict."""
    first = batch.answer_ids[:, :1].masked_fill(~batch.answer_mask[:, :1], IGNORE_INDEX)
    return torch.cat([first, batch.answer_targets], 1)


def drop_chain_prefix(batch: ReasoningBatch, remaining: Bool[Tensor, "B Nc"]) -> ReasoningBatch:
    """The batch with only those chain tokens that are `left`, which end each chain; positions close up.

    The last question token then predicts the first token that is left, or the answer's first. Columns in which no
    row has a token are taken out.
    """
    remaining = remaining & batch.chain_mask
    first = batch.answer_ids[:, 0]
    if remaining.shape[1]:
        found = batch.chain_ids.gather(1, remaining.long().argmax(1, keepdim=True))[:, 0]
        first = torch.where(remaining.any(1), found, first)
    columns = remaining.any(0).nonzero()[:, 0]
    return replace(
        batch,
        chain_ids=batch.chain_ids[:, columns],
        chain_mask=remaining[:, columns],
        chain_step_index=batch.chain_step_index[:, columns],
        chain_targets=batch.chain_targets.masked_fill(~remaining, IGNORE_INDEX)[:, columns],
        question_target=first.masked_fill(batch.question_target == IGNORE_INDEX, IGNORE_INDEX),
    )


def encode_batch(
    decoder: Decoder, batch: ReasoningBatch, cache: KVCache | None, *, with_chain: bool
) -> Float[Tensor, "B N D"]:
    """Question, chain if asked for, and answer in one pass: hidden states from the last question token on."""
    ids, live = [batch.question_ids, batch.answer_ids], [batch.question_mask, batch.answer_mask]
    if with_chain:
        ids.insert(1, batch.chain_ids)
        live.insert(1, batch.chain_mask)
    seen = decoder(decoder.embed(torch.cat(ids, 1)), cache, live=torch.cat(live, 1))
    return seen.hidden[:, batch.question_ids.shape[1] - 1 :]


def find_answer_offset(answer_prompt: Sequence[int], ids: list[int]) -> int:
    """How many ids there are up to the end of the last prompt that something follows; without one, none.

    All of them if there is no such prompt: the answer has not begun.
    """
    n = len(answer_prompt)
    ends = [i for i in range(n, len(ids)) if ids[i - n : i] == list(answer_prompt)] if n else [0]
    return ends[-1] if ends else len(ids)


def generate_with_chain(decoder: Decoder, questions: ReasoningBatch, decoding: AnswerDecoding) -> AnswerBatch:
    """A chain written out, then the prompt, then the answer, which begins where the prompt ends."""
    return generate_answers(
        decoder,
        questions,
        decoding,
        eos_count=count_expected_eos(decoding),
        answer_offset=partial(find_answer_offset, decoding.answer_prompt),
    )


def count_expected_eos(decoding: AnswerDecoding) -> int:
    """How many eos a row has where the prompt is written too: one between chain and answer ends no row."""
    return 1 + sum(i in decoding.eos_token_ids for i in decoding.answer_prompt)


def make_single_loss_output(name: str, result: LossAndAccuracy) -> StepOutput:
    """The step of a method that has one cross-entropy."""
    return StepOutput(result.loss, {name: result.loss.detach(), f"{name}_right": result.accuracy})


class Cot(nn.Module):
    """The chain written out, chain and answer scored."""

    def __init__(self, decoder: Decoder, *, ce_reduction: CrossEntropyReduction = "token") -> None:
        super().__init__()
        self.decoder = decoder
        self.ce_reduction: CrossEntropyReduction = ce_reduction

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"teacher": count_scored(build_teacher_targets(batch), self.ce_reduction)}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        hidden, sums = (
            encode_batch(self.decoder, batch, state, with_chain=True),
            batch.loss_denominators or self.loss_denominators(batch),
        )
        said = masked_cross_entropy(
            self.decoder.logits, hidden, build_teacher_targets(batch), self.ce_reduction, sums["teacher"]
        )
        return make_single_loss_output("teacher", said)

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Never: one phase."""
        return False

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """The chain and the answer; there is no other way, whoever asks."""
        return generate_with_chain(self.decoder, questions, decoding)


class NoCot(nn.Module):
    """The answer at once, nothing between question and answer."""

    def __init__(self, decoder: Decoder, *, ce_reduction: CrossEntropyReduction = "token") -> None:
        super().__init__()
        self.decoder = decoder
        self.ce_reduction: CrossEntropyReduction = ce_reduction

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"student": count_scored(build_student_targets(batch), self.ce_reduction)}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        hidden, sums = (
            encode_batch(self.decoder, batch, state, with_chain=False),
            batch.loss_denominators or self.loss_denominators(batch),
        )
        said = masked_cross_entropy(
            self.decoder.logits, hidden, build_student_targets(batch), self.ce_reduction, sums["student"]
        )
        return make_single_loss_output("student", said)

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Never: one phase."""
        return False

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """The answer after the prompt. Raises `Usage` (2) for a teacher."""
        check_no_teacher(with_cot, "no CoT")
        return generate_answers(self.decoder, questions, decoding, prefix_ids=decoding.answer_prompt)


def check_no_teacher(with_cot: bool, method: str) -> None:
    """Raises `Usage` where a teacher is asked of a method that has none."""
    if with_cot:
        raise UsageError(f"teacher: {method} was not taught to write a whole chain; ask cot, codi, pccot or kava")
