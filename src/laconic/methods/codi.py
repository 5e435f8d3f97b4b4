"""CODI: one model teaches itself to think without words, by one hidden state where the answer begins.

CODI arXiv:2502.21074; what PCCoT and KaVa share with it stands here too.

Symbols: h_t, h_s hidden states of teacher and student at the distillation token, l over layers (0 what the first block
reads, L after the final norm); sigma their spread; CE_s, CE_t cross-entropies of student and teacher; gamma `alpha1`.
The question is read once; the teacher goes on with chain and answer, the student with bot, thoughts, eot and answer.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.core.answering import Writing, latent, quiet
from laconic.core.attention import wide
from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning, Step
from laconic.core.decoder import Decoder, Seen
from laconic.core.errors import Usage
from laconic.core.rollout import Edit, Reader, Rollout
from laconic.core.thoughts import Thoughts
from laconic.methods.cot import chain, nll, scored, student_targets, teacher_targets
from laconic.methods.settings import Distance, Distilling, Norm

FLOOR = 1e-6  # no spread is taken smaller
DISTANCES = {
    "smooth_l1": partial(F.smooth_l1_loss, reduction="none"),
    "l1": partial(F.l1_loss, reduction="none"),
    "mse": partial(F.mse_loss, reduction="none"),
}
Parts = dict[str, Tensor]


def sigma(x: Float[Tensor, "*shape"], live: Bool[Tensor, "*#shape"]) -> Float[Tensor, ""]:
    """The standard deviation, with n - 1, of all live elements together; 1 if there are fewer than two."""
    live = live.expand_as(x)
    n = live.sum()
    mean = (x * live).sum() / n.clamp(min=1)
    var = ((x - mean).square() * live).sum() / (n - 1).clamp(min=1)
    return var.clamp(min=FLOOR**2).sqrt().where(n > 1, 1.0)


def spreads(x: Sequence[Tensor], live: Tensor, norm: Norm) -> Float[Tensor, " n"]:
    """What the distance in each of n layers is divided by, before the power."""
    if norm == "layer":
        return torch.stack([sigma(layer, live) for layer in x])
    return (sigma(torch.stack(tuple(x)), live) if norm == "global" else x[0].new_ones(())).expand(len(x))


def hidden_loss(
    h_t: Float[Tensor, "n B D"],
    h_s: Float[Tensor, "n B D"],
    has: Bool[Tensor, " B"],
    *,
    loss: Distance = "smooth_l1",
    norm: Norm = "layer",
    power: int = 1,
    total: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. 2: L = 1/n sum over l of 1/sigma_l mean_{b,d} d(h_s,l - sg h_t,l), over the `total` rows that have one."""
    h_t, h_s = h_t.detach().to(wide(h_t.dtype)), h_s.to(wide(h_s.dtype))
    total = float(has.sum()) if total is None else total
    each = (DISTANCES[loss](h_s, h_t) * has[:, None]).sum((1, 2)) / (h_t.shape[2] * (total or 1.0))
    return (each / spreads(h_t.unbind(), has[:, None], norm) ** power).mean()


def total(student: Tensor, teacher: Tensor, codi: Tensor, how: Distilling) -> Float[Tensor, ""]:
    """Eq. 3: L = CE_s + gamma L_CODI + CE_t, the cross-entropies by their weights, 1 in the paper."""
    return how.student * student + how.teacher * teacher + how.alpha1 * codi


class Both(NamedTuple):
    """The two parts of one model on a batch: what each pass saw; `target` is the teacher's that L_CODI goes by."""

    question: Seen
    teacher: Seen | None
    target: Seen | None
    student: Seen


def read_question(decoder: Decoder, batch: Reasoning, state: Cache | None = None) -> Seen:
    """The pass that teacher and student continue."""
    return decoder(decoder.embed(batch.question), state, live=batch.question_live)


def read_chain(decoder: Decoder, batch: Reasoning, question: Cache, want: tuple[str, ...] = ()) -> Seen:
    """The teacher's pass: chain and answer."""
    ids, live = torch.cat([batch.chain, batch.answer], 1), torch.cat([batch.chain_live, batch.answer_live], 1)
    return decoder(decoder.embed(ids), question, live=live, want=want)


def read_answer(
    decoder: Decoder, thoughts: Thoughts, batch: Reasoning, state: Cache, want: tuple[str, ...] = ()
) -> Seen:
    """The student's pass: eot and answer."""
    words = decoder.embed(batch.answer)
    eot = thoughts.eot.to(words.dtype).expand(batch.B, 1, -1)
    live = F.pad(batch.answer_live, (1, 0), value=True)
    return decoder(torch.cat([eot, words], 1), state, live=live, want=want)


def read_both(
    decoder: Decoder,
    thoughts: Thoughts,
    batch: Reasoning,
    how: Distilling,
    state: Cache | None = None,
    *,
    want: tuple[str, ...] = (),
    chosen: bool = False,
    reader: Reader | None = None,
) -> Both:
    """Every pass of a training step that a term of the loss looks at; `reader` reads the thoughts.

    `want` names further stages of the teacher; `chosen`: its cache is looked at, whatever the weights are.
    """
    states = hidden_names(decoder, how)
    question = read_question(decoder, batch, state)
    second = how.codi_target == "second_pass" and bool(states)
    wanted = want if second else (*states, *want)
    teacher = target = read_chain(decoder, batch, question.state, wanted) if how.teacher or wanted or chosen else None
    if second:
        with torch.no_grad():
            again = question if how.share_question else read_question(decoder, batch, state)
            target = read_chain(decoder, batch, again.state, states)
    own = question if how.share_question else read_question(decoder, batch, state)
    rolled = thoughts.think(decoder, own.state, reader=reader)
    return Both(question, teacher, target, read_answer(decoder, thoughts, batch, rolled.state, states))


def hidden_names(decoder: Decoder, how: Distilling) -> tuple[str, ...]:
    """The stages that L_CODI compares; none if it has no weight."""
    L = decoder.config.num_hidden_layers
    first = {"all": 0, "blocks": 1, "last": L}[how.codi_layers]
    return tuple(f"hidden.{l}" for l in range(first, L + 1)) if how.alpha1 else ()


def states_at(seen: Seen, names: tuple[str, ...], column: Int[Tensor, " B"]) -> Float[Tensor, "n B D"]:
    """Hidden states of one column of each row."""
    rows = torch.arange(len(column), device=column.device)
    return torch.stack([seen.stages[name][rows, column] for name in names])


def totals(batch: Reasoning, how: Distilling) -> dict[str, float]:
    """Rows, tokens (or rows) scored in each cross-entropy, and rows that have a distillation token."""
    return {
        "rows": float(batch.B),
        "student": scored(student_targets(batch), how.ce_reduction),
        "teacher": scored(teacher_targets(batch), how.ce_reduction),
        "codi": float((batch.distil >= 0).sum()),
    }


def parts(decoder: Decoder, thoughts: Thoughts, batch: Reasoning, both: Both, how: Distilling) -> Parts:
    """The terms of the loss that have a weight, and how often either part's likeliest token was right."""
    sums: Mapping[str, float] = batch.totals or totals(batch, how)
    logits = partial(thoughts.logits, decoder)
    found: Parts = {}
    if how.student:
        said = nll(logits, both.student.hidden, student_targets(batch), how.ce_reduction, sums["student"])
        found |= {"student": said.loss, "student_right": said.right}
    if how.teacher and both.teacher:
        hidden = torch.cat([both.question.hidden[:, -1:], both.teacher.hidden], 1)
        said = nll(logits, hidden, teacher_targets(batch), how.ce_reduction, sums["teacher"])
        found |= {"teacher": said.loss, "teacher_right": said.right}
    if how.alpha1 and both.target:
        names, column = hidden_names(decoder, how), batch.distil.clamp(min=0)
        h_t = states_at(both.target, names, batch.chain.shape[1] + column)
        h_s = states_at(both.student, names, 1 + column)
        found["codi"] = hidden_loss(
            h_t,
            h_s,
            batch.distil >= 0,
            loss=how.codi_loss,
            norm=how.codi_norm,
            power=how.codi_norm_power,
            total=sums["codi"],
        )
    return found


def terms(found: Parts, *names: str) -> tuple[Tensor, ...]:
    """Terms of the loss in the order asked for; one that was not computed is 0. Raises `Usage` (2) if none was."""
    if not found:
        raise Usage("every weight of the loss is 0, so nothing would be learned; give student one")
    zero = next(iter(found.values())).new_zeros(())
    return tuple(found.get(name, zero) for name in names)


def step(loss: Tensor, found: Parts) -> Step:
    """The loss with its parts cut from the graph."""
    return Step(loss, {name: part.detach() for name, part in found.items()})


def think(
    decoder: Decoder, thoughts: Thoughts, questions: Reasoning, edit: Edit | None = None, trace: bool = False
) -> Rollout:
    """The thoughts on questions, without gradients and dropout."""
    with quiet(decoder, thoughts):
        return thoughts.think(decoder, read_question(decoder, questions).state, edit=edit, trace=trace)


def answer(decoder: Decoder, thoughts: Thoughts, questions: Reasoning, writing: Writing, teacher: bool) -> Answers:
    """The answer after the thoughts, or by the same weights after a chain written out."""
    return chain(decoder, questions, writing) if teacher else latent(decoder, thoughts, questions, writing)


class Codi(nn.Module):
    """CODI whole: thoughts made one after the other, distilled at one token."""

    def __init__(self, decoder: Decoder, thoughts: Thoughts, how: Distilling) -> None:
        super().__init__()
        if thoughts.mode != "sequential":
            raise Usage(f"codi: thoughts of mode {thoughts.mode}; choose sequential, or the method pccot")
        self.decoder, self.thoughts, self.how = decoder, thoughts, how

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """What the sums of the loss are divided by."""
        return totals(batch, self.how)

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        both = read_both(self.decoder, self.thoughts, batch, self.how, state)
        found = parts(self.decoder, self.thoughts, batch, both, self.how)
        student, teacher, kd = terms(found, "student", "teacher", "codi")
        return step(total(student, teacher, kd, self.how), found)

    def restarts(self, batch: Reasoning) -> bool:
        """Never: one phase."""
        return False

    def think(self, questions: Reasoning, edit: Edit | None = None, trace: bool = False) -> Rollout:
        """The thoughts on questions."""
        return think(self.decoder, self.thoughts, questions, edit, trace)

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """The answer after the thoughts; of the teacher, after a chain."""
        return answer(self.decoder, self.thoughts, questions, writing, teacher)
