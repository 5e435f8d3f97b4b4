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

from laconic.core.answering import Writing, written
from laconic.core.attention import wide
from laconic.core.cache import Cache
from laconic.core.contract import UNSCORED, Answers, Reasoning, Step
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage

Reduction = Literal["token", "row"]
Logits = Callable[[Tensor], Tensor]


class Scored(NamedTuple):
    """A cross-entropy in nats, and the share of the same tokens, weighted alike, whose likeliest id is the target."""

    loss: Float[Tensor, ""]
    right: Float[Tensor, ""]


def scored(targets: Int[Tensor, "B T"], reduction: Reduction = "token") -> float:
    """What the sum of a cross-entropy is divided by: tokens that are scored, or rows that have one."""
    there = targets != UNSCORED
    return float((there if reduction == "token" else there.any(1)).sum())


def nll(
    logits: Logits,
    hidden: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T"],
    reduction: Reduction = "token",
    total: float | None = None,
) -> Scored:
    """Eq. 5a,5b: -(1/N) sum log p(target | all before), over the scored tokens of the batch (or row by row)."""
    there = targets != UNSCORED
    total = scored(targets, reduction) if total is None else total
    at = there.nonzero(as_tuple=True)
    rows = logits(hidden[at])
    asked, rows = targets[at], rows.to(wide(rows.dtype))
    each = F.cross_entropy(rows, asked, reduction="none")
    hit = (rows.detach().argmax(-1) == asked).to(each.dtype)
    if reduction == "row":
        share = (there.to(each.dtype) / there.sum(1, keepdim=True).clamp(min=1))[at]
        each, hit = each * share, hit * share
    return Scored(each.sum() / (total or 1.0), hit.sum() / (total or 1.0))


def teacher_targets(batch: Reasoning) -> Int[Tensor, "B T"]:
    """What the last question token, the chain and the answer predict."""
    return torch.cat([batch.next_question[:, None], batch.next_chain, batch.next_answer], 1)


def student_targets(batch: Reasoning) -> Int[Tensor, "B T"]:
    """What the last token before the answer, when no chain stands between, and the answer predict."""
    first = batch.answer[:, :1].masked_fill(~batch.answer_live[:, :1], UNSCORED)
    return torch.cat([first, batch.next_answer], 1)


def shortened(batch: Reasoning, left: Bool[Tensor, "B Nc"]) -> Reasoning:
    """The batch with only those chain tokens that are `left`, which end each chain; positions close up.

    The last question token then predicts the first token that is left, or the answer's first. Columns in which no
    row has a token are taken out.
    """
    left = left & batch.chain_live
    first = batch.answer[:, 0]
    if left.shape[1]:
        found = batch.chain.gather(1, left.long().argmax(1, keepdim=True))[:, 0]
        first = torch.where(left.any(1), found, first)
    columns = left.any(0).nonzero()[:, 0]
    return replace(
        batch,
        chain=batch.chain[:, columns],
        chain_live=left[:, columns],
        chain_step=batch.chain_step[:, columns],
        next_chain=batch.next_chain.masked_fill(~left, UNSCORED)[:, columns],
        next_question=first.masked_fill(batch.next_question == UNSCORED, UNSCORED),
    )


def read(decoder: Decoder, batch: Reasoning, state: Cache | None, *, chain: bool) -> Float[Tensor, "B N D"]:
    """Question, chain if asked for, and answer in one pass: hidden states from the last question token on."""
    ids, live = [batch.question, batch.answer], [batch.question_live, batch.answer_live]
    if chain:
        ids.insert(1, batch.chain)
        live.insert(1, batch.chain_live)
    seen = decoder(decoder.embed(torch.cat(ids, 1)), state, live=torch.cat(live, 1))
    return seen.hidden[:, batch.question.shape[1] - 1 :]


def begun(prompt: Sequence[int], ids: list[int]) -> int:
    """How many ids there are up to the end of the last prompt that something follows; without one, none.

    All of them if there is no such prompt: the answer has not begun.
    """
    n = len(prompt)
    ends = [i for i in range(n, len(ids)) if ids[i - n : i] == list(prompt)] if n else [0]
    return ends[-1] if ends else len(ids)


def chain(decoder: Decoder, questions: Reasoning, writing: Writing) -> Answers:
    """A chain written out, then the prompt, then the answer, which begins where the prompt ends."""
    return written(decoder, questions, writing, eos_count=ends(writing), begins=partial(begun, writing.prompt))


def ends(writing: Writing) -> int:
    """How many eos a row has where the prompt is written too: one between chain and answer ends no row."""
    return 1 + sum(i in writing.eos for i in writing.prompt)


def only(name: str, scored: Scored) -> Step:
    """The step of a method that has one cross-entropy."""
    return Step(scored.loss, {name: scored.loss.detach(), f"{name}_right": scored.right})


class Cot(nn.Module):
    """The chain written out, chain and answer scored."""

    def __init__(self, decoder: Decoder, *, ce_reduction: Reduction = "token") -> None:
        super().__init__()
        self.decoder = decoder
        self.ce_reduction: Reduction = ce_reduction

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"teacher": scored(teacher_targets(batch), self.ce_reduction)}

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        hidden, sums = read(self.decoder, batch, state, chain=True), batch.totals or self.totals(batch)
        said = nll(self.decoder.logits, hidden, teacher_targets(batch), self.ce_reduction, sums["teacher"])
        return only("teacher", said)

    def restarts(self, batch: Reasoning) -> bool:
        """Never: one phase."""
        return False

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """The chain and the answer; there is no other way, whoever asks."""
        return chain(self.decoder, questions, writing)


class NoCot(nn.Module):
    """The answer at once, nothing between question and answer."""

    def __init__(self, decoder: Decoder, *, ce_reduction: Reduction = "token") -> None:
        super().__init__()
        self.decoder = decoder
        self.ce_reduction: Reduction = ce_reduction

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"student": scored(student_targets(batch), self.ce_reduction)}

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        hidden, sums = read(self.decoder, batch, state, chain=False), batch.totals or self.totals(batch)
        said = nll(self.decoder.logits, hidden, student_targets(batch), self.ce_reduction, sums["student"])
        return only("student", said)

    def restarts(self, batch: Reasoning) -> bool:
        """Never: one phase."""
        return False

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """The answer after the prompt. Raises `Usage` (2) for a teacher."""
        refuse(teacher, "no CoT")
        return written(self.decoder, questions, writing, given=writing.prompt)


def refuse(teacher: bool, method: str) -> None:
    """Raises `Usage` where a teacher is asked of a method that has none."""
    if teacher:
        raise Usage(f"teacher: {method} was not taught to write a whole chain; ask cot, codi, pccot or kava")
