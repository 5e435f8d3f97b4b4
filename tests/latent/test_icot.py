"""iCoT: schedule, removal, reset of the optimizer, and the end of an answer."""

import math
from dataclasses import replace

import pytest
import torch

from laconic.batches import ReasoningBatch
from laconic.config.methods import IcotConfig
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding
from laconic.latent.cot import Cot, NoCot
from laconic.latent.icot import Icot
from laconic.rng import uniform
from tests.latent.batches import gradients, reasoning_batch
from tests.models.fixtures import assert_all_close, assert_close, fresh

BATCH = reasoning_batch(((4, 7, 4), (3, 2, 3), (4, 0, 5)))


def method(steps_per_epoch: int = 80, longest: int | None = None, seed: int = 0, **config: object) -> Icot:
    settings = {"remove_all_after": 6, "removal_smoothing": 0.5} | config
    icot_config = IcotConfig(**settings)  # type: ignore[arg-type]
    return Icot(
        fresh("llama").double(), icot_config, steps_per_epoch=steps_per_epoch, max_chain_length=longest, seed=seed
    )


def at(step: int, epoch: int = 0, batch: ReasoningBatch = BATCH) -> ReasoningBatch:
    return replace(batch, step=step, epoch=epoch)


def test_icot_schedule() -> None:
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


def test_icot_removal_is_keyed_by_seed_epoch_and_row() -> None:
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
    reordered = icot.drop_removed(at(20).select_rows([2, 0, 1]))
    assert reordered.chain_mask.sum(1).tolist() == [
        int(icot.drop_removed(at(20)).chain_mask[b].sum()) for b in (2, 0, 1)
    ]
    batches = [
        method(seed=seed).train().drop_removed(at(0, batch=reasoning_batch(((4, 9, 4),) * 9))) for seed in (0, 1)
    ]
    assert not torch.equal(batches[0].chain_mask.sum(1), batches[1].chain_mask.sum(1))


def test_icot_removes_nothing_more_in_evaluation() -> None:
    assert method().eval().drop_removed(at(20)).chain_mask.sum(1).tolist() == [5, 0, 0]


def test_icot_equals_cot_at_first_and_no_cot_at_last() -> None:
    icot = method().eval()
    assert_close(icot(at(0)).loss, Cot(icot.decoder)(BATCH).loss)
    assert_close(icot(at(60)).loss, NoCot(icot.decoder)(BATCH).loss)


def test_icot_micro_batches_equal_one_batch() -> None:
    icot = method().train()
    whole, parts = icot(at(20)), [at(20).select_rows([0]), at(20).select_rows([1, 2])]
    totals = {"student": sum(icot.loss_denominators(part)["student"] for part in parts)}
    assert totals == icot.loss_denominators(at(20))
    steps = [icot(replace(part, loss_denominators=totals)) for part in parts]
    loss = torch.stack([step.loss for step in steps]).sum()
    assert_close(loss, whole.loss)
    assert_all_close(gradients(icot, loss).values(), gradients(icot, whole.loss).values())


@pytest.mark.parametrize(("longest", "restarts"), [(None, [10, 20, 30, 40, 50, 60]), (3, [10, 20, 30]), (0, [])])
def test_icot_resets_the_optimizer_while_a_chain_remains(longest: int | None, restarts: list[int]) -> None:
    icot = method(longest=longest)
    assert [step for step in range(100) if icot.resets_optimizer_state(at(step))] == restarts


def test_icot_answer_ends_with_the_second_eos() -> None:
    icot, questions = Icot(fresh("llama"), IcotConfig(), steps_per_epoch=8), reasoning_batch(((5, 0, 3), (3, 0, 3)))
    decoding = AnswerDecoding(12, (), lambda ids: " ".join(map(str, ids)))
    free = icot.answer(questions, decoding)
    end = free.token_ids[0][1]
    got = icot.answer(questions, replace(decoding, eos_token_ids=(end,), answer_prompt=(end,)))  # as in iCoT's format
    for b in range(2):
        ends = [n for n, i in enumerate(free.token_ids[b]) if i == end]
        n = ends[1] + 1 if len(ends) > 1 else 12
        assert got.token_ids[b] == free.token_ids[b][:n]
        num_question, first = int(questions.question_mask[b].sum()), ends[0] + 1 if ends else 12
        assert got.cache_positions[b] == (min(num_question + first, num_question + n - 1), num_question + n - 1)
        assert str(end) not in got.texts[b].split()
    with pytest.raises(UsageError, match="Icot is not trained"):
        icot.answer(questions, decoding, with_cot=True)
