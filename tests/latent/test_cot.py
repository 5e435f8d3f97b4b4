"""The written chain, no chain, and what is left of a chain: passes over a batch, answers, targets."""

import pytest
import torch
import torch.nn.functional as F

from laconic.batches import IGNORE_INDEX, PassCounts, ReasoningBatch
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding, find_answer_offset
from laconic.latent.cot import Cot, NoCot, drop_chain_prefix
from laconic.losses import build_student_targets, build_teacher_targets
from laconic.models.decoder import Decoder
from tests.core.readings import all_same, fresh, same
from tests.methods.batches import EOS, gradients, reasoning

BATCH = reasoning()


def alone(decoder: Decoder, batch: ReasoningBatch, chain: bool) -> list[torch.Tensor]:
    """Negative log probabilities of each row's tokens behind its question, by plain language modelling."""
    rows = []
    for b in range(batch.B):
        parts = [batch.question_ids[b, batch.question_mask[b]]]
        parts += [batch.chain_ids[b, batch.chain_mask[b]]] if chain else []
        parts += [batch.answer_ids[b, batch.answer_mask[b]]]
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
    assert method.loss_denominators(BATCH) == {part: count}
    assert not method.resets_optimizer_state(BATCH)


@pytest.mark.parametrize("kind", [Cot, NoCot])
def test_micro_batches_add_up(kind: type[Cot] | type[NoCot]) -> None:
    method = kind(fresh("llama").double())
    whole = method(BATCH)
    parts = [BATCH.select_rows([0, 1]), BATCH.select_rows([2])]
    totals = {
        name: sum(method.loss_denominators(part)[name] for part in parts) for name in method.loss_denominators(BATCH)
    }
    steps = [method(ReasoningBatch(**{**vars(part), "totals": totals})) for part in parts]
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
    rank = batch.chain_mask.cumsum(1)
    left = drop_chain_prefix(batch, rank > torch.tensor([2, 3, 0])[:, None])
    assert left.chain_ids[0, left.chain_mask[0]].tolist() == batch.chain_ids[0, 2:6].tolist()
    assert left.chain_ids.shape == left.chain_step_index.shape == left.chain_targets.shape == (3, 4)
    first = [batch.chain_ids[0, 2], batch.answer_ids[1, 0], batch.answer_ids[2, 0]]
    assert left.question_target.tolist() == first
    assert (build_teacher_targets(left) != IGNORE_INDEX).sum(1).tolist() == [4 + 4, 3, 5]
    decoder = fresh("llama").double()
    same(Cot(decoder)(left).loss, torch.cat(alone(decoder, left, True)).mean())
    gone = drop_chain_prefix(batch, torch.zeros_like(batch.chain_mask))
    assert gone.chain_ids.shape == (3, 0)
    assert torch.equal(build_teacher_targets(gone), build_student_targets(batch))
    whole = drop_chain_prefix(batch, batch.chain_mask)
    assert torch.equal(whole.question_target, batch.question_target)


def test_a_question_that_is_not_scored_stays_so() -> None:
    batch = ReasoningBatch(**{**vars(BATCH), "next_question": torch.tensor([IGNORE_INDEX, 5, 6])})
    left = drop_chain_prefix(batch, batch.chain_mask & (batch.chain_step_index > 0))
    assert left.question_target.tolist()[0] == IGNORE_INDEX


def writing(**changes: object) -> AnswerDecoding:
    settings = {"max_tokens": 12, "eos": (EOS,), "decode": lambda ids: " ".join(map(str, ids))}
    return AnswerDecoding(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Cot, NoCot])
def test_answers_of_a_batch_are_those_of_its_rows(kind: type[Cot] | type[NoCot]) -> None:
    method, batch = kind(fresh("llama")), reasoning(((5, 0, 3), (2, 0, 3), (7, 0, 3)), pads=2)
    got = method.answer(batch, writing(prompt=(7, 8)))
    given = 2 if kind is NoCot else 0
    for b in range(3):
        one = method.answer(batch.select_rows([b]), writing(prompt=(7, 8)))
        assert (one.token_ids[0], one.passes[0], one.cache_positions[0], one.texts[0]) == (
            got.token_ids[b], got.passes[b], got.cache_positions[b], got.texts[b]
        )  # fmt: skip
        n, asked = len(got.token_ids[b]), int(batch.question_mask[b].sum())
        assert got.passes[b] == PassCounts(1, 0, 0, n - 1)
        assert got.cache_positions[b][1] == asked + given + n - 1
        assert kind is Cot or got.cache_positions[b][0] == asked + given
        assert got.texts[b] == " ".join(str(i) for i in got.token_ids[b] if i != EOS)


def test_no_chain_has_no_teacher() -> None:
    with pytest.raises(UsageError, match="teacher: no CoT was not taught to write a whole chain"):
        NoCot(fresh("llama")).answer(BATCH, writing(), with_cot=True)


def test_where_an_answer_begins_in_what_was_written() -> None:
    assert find_answer_offset((7, 8), [1, 7, 8, 3, 7, 8, 4, 2]) == 6
    assert find_answer_offset((7, 8), [1, 3, 7, 8]) == 4
    assert find_answer_offset((7, 8), [1, 3]) == 2
    assert find_answer_offset((), [1, 3]) == 0


def test_an_eos_inside_the_prompt_ends_no_row() -> None:
    method, batch = Cot(fresh("llama")), reasoning(((5, 0, 3),))
    (free,) = method.answer(batch, writing(eos=())).token_ids
    end = free[3]
    (got,) = method.answer(batch, writing(eos=(end,), prompt=(end,))).token_ids
    second = [n for n, i in enumerate(free) if i == end][1:2]
    assert got == (free[: second[0] + 1] if second else free)
    assert method.answer(batch, writing(eos=(end,))).token_ids[0] == free[: free.index(end) + 1]
