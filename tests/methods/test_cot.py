"""The written chain, no chain, and what is left of a chain: passes over a batch, answers, targets."""

import pytest
import torch
import torch.nn.functional as F

from laconic.core.answering import Writing
from laconic.core.contract import UNSCORED, Reasoning
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.generate import Passes
from laconic.methods.cot import Cot, NoCot, begun, shortened, student_targets, teacher_targets
from tests.core.readings import all_same, fresh, same
from tests.methods.batches import EOS, gradients, reasoning

BATCH = reasoning()


def alone(decoder: Decoder, batch: Reasoning, chain: bool) -> list[torch.Tensor]:
    """Negative log probabilities of each row's tokens behind its question, by plain language modelling."""
    rows = []
    for b in range(batch.B):
        parts = [batch.question[b, batch.question_live[b]]]
        parts += [batch.chain[b, batch.chain_live[b]]] if chain else []
        parts += [batch.answer[b, batch.answer_live[b]]]
        ids = torch.cat(parts)
        logits = decoder.logits(decoder(decoder.embed(ids[None])).hidden)[0, len(parts[0]) - 1 : -1]
        rows.append(F.cross_entropy(logits, ids[len(parts[0]) :], reduction="none"))
    return rows


@pytest.mark.parametrize("reduction", ["token", "row"])
@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loss_is_that_of_plain_rows(name: str, chain: bool, reduction: str) -> None:
    decoder = fresh(name).double()
    method = (Cot if chain else NoCot)(decoder, ce_reduction=reduction)
    rows = alone(decoder, BATCH, chain)
    want = torch.cat(rows).mean() if reduction == "token" else torch.stack([row.mean() for row in rows]).mean()
    step, part = method(BATCH), "teacher" if chain else "student"
    same(step.loss, want)
    assert step.parts[part] == step.loss
    assert not step.parts[part].requires_grad
    assert set(step.parts) == {part, f"{part}_right"}
    count = sum(map(len, rows)) if reduction == "token" else 3
    assert method.totals(BATCH) == {part: count}
    assert not method.restarts(BATCH)


@pytest.mark.parametrize("kind", [Cot, NoCot])
def test_micro_batches_add_up(kind: type[Cot] | type[NoCot]) -> None:
    method = kind(fresh("llama").double())
    whole = method(BATCH)
    parts = [BATCH.take([0, 1]), BATCH.take([2])]
    totals = {name: sum(method.totals(part)[name] for part in parts) for name in method.totals(BATCH)}
    steps = [method(Reasoning(**{**vars(part), "totals": totals})) for part in parts]
    same(sum(step.loss for step in steps), whole.loss)
    for name in whole.parts:
        same(sum(step.parts[name] for step in steps), whole.parts[name])
    all_same(gradients(method, sum(step.loss for step in steps)).values(), gradients(method, whole.loss).values())


def test_a_state_stands_before_the_question() -> None:
    decoder = fresh("llama").double()
    before = decoder(decoder.embed(torch.tensor([[5, 6, 7]] * 3)))
    assert Cot(decoder)(BATCH, before.state).loss != Cot(decoder)(BATCH).loss


def test_what_is_left_of_a_chain_closes_up() -> None:
    batch = reasoning(pads=2)
    rank = batch.chain_live.cumsum(1)
    left = shortened(batch, rank > torch.tensor([2, 3, 0])[:, None])
    assert left.chain[0, left.chain_live[0]].tolist() == batch.chain[0, 2:6].tolist()
    assert left.chain.shape == left.chain_step.shape == left.next_chain.shape == (3, 4)
    first = [batch.chain[0, 2], batch.answer[1, 0], batch.answer[2, 0]]
    assert left.next_question.tolist() == first
    assert (teacher_targets(left) != UNSCORED).sum(1).tolist() == [4 + 4, 3, 5]
    decoder = fresh("llama").double()
    same(Cot(decoder)(left).loss, torch.cat(alone(decoder, left, True)).mean())
    gone = shortened(batch, torch.zeros_like(batch.chain_live))
    assert gone.chain.shape == (3, 0)
    assert torch.equal(teacher_targets(gone), student_targets(batch))
    whole = shortened(batch, batch.chain_live)
    assert torch.equal(whole.next_question, batch.next_question)


def test_a_question_that_is_not_scored_stays_so() -> None:
    batch = Reasoning(**{**vars(BATCH), "next_question": torch.tensor([UNSCORED, 5, 6])})
    left = shortened(batch, batch.chain_live & (batch.chain_step > 0))
    assert left.next_question.tolist()[0] == UNSCORED


def writing(**changes: object) -> Writing:
    settings = {"max_tokens": 12, "eos": (EOS,), "decode": lambda ids: " ".join(map(str, ids))}
    return Writing(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Cot, NoCot])
def test_answers_of_a_batch_are_those_of_its_rows(kind: type[Cot] | type[NoCot]) -> None:
    method, batch = kind(fresh("llama")), reasoning(((5, 0, 3), (2, 0, 3), (7, 0, 3)), pads=2)
    got = method.answer(batch, writing(prompt=(7, 8)))
    given = 2 if kind is NoCot else 0
    for b in range(3):
        one = method.answer(batch.take([b]), writing(prompt=(7, 8)))
        assert (one.ids[0], one.passes[0], one.held[0], one.texts[0]) == (
            got.ids[b], got.passes[b], got.held[b], got.texts[b]
        )  # fmt: skip
        n, asked = len(got.ids[b]), int(batch.question_live[b].sum())
        assert got.passes[b] == Passes(1, 0, 0, n - 1)
        assert got.held[b][1] == asked + given + n - 1
        assert kind is Cot or got.held[b][0] == asked + given
        assert got.texts[b] == " ".join(str(i) for i in got.ids[b] if i != EOS)


def test_no_chain_has_no_teacher() -> None:
    with pytest.raises(Usage, match="teacher: no CoT was not taught to write a whole chain"):
        NoCot(fresh("llama")).answer(BATCH, writing(), teacher=True)


def test_where_an_answer_begins_in_what_was_written() -> None:
    assert begun((7, 8), [1, 7, 8, 3, 7, 8, 4, 2]) == 6
    assert begun((7, 8), [1, 3, 7, 8]) == 4
    assert begun((7, 8), [1, 3]) == 2
    assert begun((), [1, 3]) == 0


def test_an_eos_inside_the_prompt_ends_no_row() -> None:
    method, batch = Cot(fresh("llama")), reasoning(((5, 0, 3),))
    (free,) = method.answer(batch, writing(eos=())).ids
    end = free[3]
    (got,) = method.answer(batch, writing(eos=(end,), prompt=(end,))).ids
    second = [n for n, i in enumerate(free) if i == end][1:2]
    assert got == (free[: second[0] + 1] if second else free)
    assert method.answer(batch, writing(eos=(end,))).ids[0] == free[: free.index(end) + 1]
