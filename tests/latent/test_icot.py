"""iCoT: the schedule, what is left of a batch, when the optimizer forgets, and where an answer ends."""

import math
from dataclasses import replace

import pytest
import torch

from laconic.batches import ReasoningBatch
from laconic.config.methods import ICoTConfig
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding
from laconic.latent.cot import Cot, NoCot
from laconic.latent.icot import Icot
from laconic.rng import uniform
from tests.core.readings import all_same, fresh, same
from tests.methods.batches import gradients, reasoning

BATCH = reasoning(((4, 7, 4), (3, 2, 3), (4, 0, 5)))


def method(steps_per_epoch: int = 80, longest: int | None = None, seed: int = 0, **how: object) -> Icot:
    settings = {"remove_all_from": 6, "smoothing": 0.5} | how
    removing = ICoTConfig(**settings)  # type: ignore[arg-type]
    return Icot(fresh("llama").double(), removing, steps_per_epoch=steps_per_epoch, max_chain_length=longest, seed=seed)


def at(step: int, epoch: int = 0, batch: ReasoningBatch = BATCH) -> ReasoningBatch:
    return replace(batch, step=step, epoch=epoch)


def test_one_more_goes_after_so_many_steps_and_then_all() -> None:
    icot = method()  # 80 steps in an epoch, 8 tokens: one each 10 steps
    assert [icot.scheduled_removal(step) for step in (0, 9, 10, 59, 60, 1000)] == [0, 0, 1, 5, math.inf, math.inf]
    assert method(remove_all_after=None).scheduled_removal(1000) == 100
    assert method(remove_all_after=0).scheduled_removal(0) == math.inf
    assert method(steps_per_epoch=3).scheduled_removal(2) == 2  # fewer steps than tokens: one each step
    assert [method(steps_per_epoch=20).scheduled_removal(step) for step in (1, 2, 3, 4)] == [
        0,
        1,
        1,
        2,
    ]  # round(2.5) is 2


def test_what_is_left_is_keyed_by_seed_epoch_and_row() -> None:
    icot = method().train()
    for epoch in (0, 3):
        left = icot.drop_removed(at(20, epoch))
        for b in range(3):
            u = float(uniform(0, epoch, int(BATCH.row_index[b])))
            extra = int(math.log1p(-u) / -0.5)
            count = int(BATCH.chain_mask[b].sum())
            assert int(left.chain_mask[b].sum()) == max(count - 2 - extra, 0)
            tail = BATCH.chain_ids[b, BATCH.chain_mask[b]].tolist()[min(2 + extra, count) :]
            assert left.chain_ids[b, left.chain_mask[b]].tolist() == tail
    turned = icot.drop_removed(at(20).select_rows([2, 0, 1]))
    assert turned.chain_mask.sum(1).tolist() == [int(icot.drop_removed(at(20)).chain_mask[b].sum()) for b in (2, 0, 1)]
    kept = [method(seed=seed).train().drop_removed(at(0, batch=reasoning(((4, 9, 4),) * 9))) for seed in (0, 1)]
    assert not torch.equal(kept[0].chain_mask.sum(1), kept[1].chain_mask.sum(1))


def test_outside_training_nothing_is_drawn_in_addition() -> None:
    assert method().eval().drop_removed(at(20)).chain_mask.sum(1).tolist() == [5, 0, 0]


def test_its_ends_are_the_written_chain_and_none() -> None:
    icot = method().eval()
    same(icot(at(0)).loss, Cot(icot.decoder)(BATCH).loss)
    same(icot(at(60)).loss, NoCot(icot.decoder)(BATCH).loss)


def test_micro_batches_add_up() -> None:
    icot = method().train()
    whole, parts = icot(at(20)), [at(20).select_rows([0]), at(20).select_rows([1, 2])]
    totals = {"student": sum(icot.loss_denominators(part)["student"] for part in parts)}
    assert totals == icot.loss_denominators(at(20))
    steps = [icot(replace(part, loss_denominators=totals)) for part in parts]
    same(sum(step.loss for step in steps), whole.loss)
    all_same(gradients(icot, sum(step.loss for step in steps)).values(), gradients(icot, whole.loss).values())


@pytest.mark.parametrize(("longest", "restarts"), [(None, [10, 20, 30, 40, 50, 60]), (3, [10, 20, 30]), (0, [])])
def test_the_optimizer_forgets_when_more_goes_while_there_is_a_chain(longest: int | None, restarts: list[int]) -> None:
    icot = method(longest=longest)
    assert [step for step in range(100) if icot.resets_optimizer_state(at(step))] == restarts


def test_a_mean_over_rows() -> None:
    same(method(ce_reduction="row").eval()(at(0)).loss, Cot(method().decoder, ce_reduction="row")(BATCH).loss)


def test_an_answer_ends_with_the_second_eos() -> None:
    icot, questions = Icot(fresh("llama"), ICoTConfig(), steps_per_epoch=8), reasoning(((5, 0, 3), (3, 0, 3)))
    told = AnswerDecoding(12, (), lambda ids: " ".join(map(str, ids)))
    free = icot.answer(questions, told)
    end = free.token_ids[0][1]
    got = icot.answer(questions, replace(told, eos_token_ids=(end,), answer_prompt=(end,)))  # as in iCoT's format
    for b in range(2):
        ends = [n for n, i in enumerate(free.token_ids[b]) if i == end]
        n = ends[1] + 1 if len(ends) > 1 else 12
        assert got.token_ids[b] == free.token_ids[b][:n]
        asked, first = int(questions.question_mask[b].sum()), ends[0] + 1 if ends else 12
        assert got.cache_positions[b] == (min(asked + first, asked + n - 1), asked + n - 1)
        assert str(end) not in got.texts[b].split()
    with pytest.raises(UsageError, match="teacher: iCoT was not taught"):
        icot.answer(questions, told, with_cot=True)
