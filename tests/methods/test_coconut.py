"""Coconut: stages, latents of rows that differ, the last stage at test, and when the optimizer forgets."""

from dataclasses import replace

import pytest
import torch

from laconic.core.answering import Writing
from laconic.core.contract import Reasoning
from laconic.core.errors import Usage
from laconic.core.generate import Passes
from laconic.core.keyed import uniform
from laconic.core.thoughts import Thoughts
from laconic.methods.coconut import Coconut
from laconic.methods.settings import Staging
from tests.core.readings import all_same, fresh, same
from tests.methods.batches import EOS, gradients, reasoning

BATCH = reasoning(((4, 7, 4), (3, 2, 3), (4, 0, 5)))  # of 4, 1 and 0 steps


def method(name: str = "llama", **how: object) -> Coconut:
    staging = Staging(**({"per_step": 2, "epochs_per_stage": 3, "max_stage": 2} | how))  # type: ignore[arg-type]
    decoder = fresh(name).double()
    count = staging.max_stage * staging.per_step
    thoughts = Thoughts(decoder, count=count, mode="sequential", project="none", control_init="normal")
    return Coconut(decoder, thoughts, staging, steps_per_epoch=5)


def at(epoch: int, step: int = 0, batch: Reasoning = BATCH) -> Reasoning:
    return replace(batch, epoch=epoch, step=step)


@pytest.mark.parametrize(
    ("epoch", "how", "k", "n"),
    [
        (0, {}, [0, 0, 0], [0, 0, 0]),
        (2, {}, [0, 0, 0], [0, 0, 0]),
        (3, {}, [1, 1, 1], [2, 2, 2]),
        (6, {}, [2, 2, 2], [4, 4, 4]),
        (9, {}, [4, 1, 0], [4, 4, 4]),
        (30, {}, [4, 1, 0], [4, 4, 4]),
        (9, {"pad_latent_to_max": False}, [4, 1, 0], [4, 2, 0]),
        (0, {"first_stage": 1}, [1, 1, 1], [2, 2, 2]),
        (1, {"epochs_per_stage": 1, "per_step": 1}, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_stages(epoch: int, how: dict[str, object], k: list[int], n: list[int]) -> None:
    steps, latents = method(**how).staged(at(epoch))
    assert (steps.tolist(), latents.tolist()) == (k, n)


def test_a_stage_may_be_drawn() -> None:
    coconut = method(uniform_prob=0.5, max_stage=9).train()
    batch = reasoning(((3, 7, 3),) * 40)
    stages = coconut.staged(at(3, batch=batch))[0]
    for b in range(40):
        which, where = (float(uniform(0, 3, int(batch.index[b]), i)) for i in (0, 1))
        assert int(stages[b]) == (int(where * 5) if which < 0.5 else 1)
    assert set(stages.tolist()) == {0, 1, 2, 3, 4}
    assert set(coconut.eval().staged(at(3, batch=batch))[0].tolist()) == {1}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("epoch", "how"), [(0, {}), (3, {}), (9, {}), (9, {"pad_latent_to_max": False})])
def test_a_batch_is_its_rows_however_many_latents_each_has(name: str, epoch: int, how: dict[str, object]) -> None:
    coconut = method(name, **how)
    whole = coconut(at(epoch))
    counts = [coconut.totals(at(epoch).take([b]))["student"] for b in range(3)]
    alone = [coconut(reduced(at(epoch).take([b]))) for b in range(3)]
    assert sum(counts) == coconut.totals(at(epoch))["student"]
    same(whole.loss, sum(step.loss * n for step, n in zip(alone, counts, strict=True)) / sum(counts))
    totals = {"student": sum(counts)}
    parts = sum(coconut(replace(at(epoch).take([b]), totals=totals)).loss for b in range(3))
    all_same(gradients(coconut, parts).values(), gradients(coconut, whole.loss).values())


def reduced(batch: Reasoning) -> Reasoning:
    """One row without any padding."""
    asked, chain, answer = batch.question_live[0], batch.chain_live[0], batch.answer_live[0]
    return replace(
        batch, question=batch.question[:, asked], question_live=batch.question_live[:, asked],
        chain=batch.chain[:, chain], chain_live=batch.chain_live[:, chain], chain_step=batch.chain_step[:, chain],
        next_chain=batch.next_chain[:, chain], answer=batch.answer[:, answer], answer_live=batch.answer_live[:, answer],
        next_answer=batch.next_answer[:, answer], number=batch.number[:, answer],
    )  # fmt: skip


def test_all_that_is_learned_has_a_gradient() -> None:
    coconut = method()
    coconut(at(6)).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in coconut.decoder.blocks.parameters())
    assert coconut.thoughts.bot.shape == (48,)
    grad = coconut.thoughts.vectors.grad
    assert [bool(grad[i].any()) for i in range(3)] == [True, False, True]  # no placeholder is ever read


def test_the_optimizer_forgets_at_every_epoch() -> None:
    assert [step for step in range(16) if method().restarts(at(step // 5, step))] == [5, 10, 15]


def test_answers_come_after_the_latents_of_the_last_stage_or_the_one_asked_for() -> None:
    coconut, told = method().float(), Writing(5, (EOS,), lambda ids: " ".join(map(str, ids)))
    got = coconut.answer(BATCH, told)
    assert [p[:3] for p in got.passes] == [(1, 0, 4)] * 3
    assert [p.answer for p in got.passes] == list(map(len, got.ids))
    assert [held[0] for held in got.held] == [4 + 6, 3 + 6, 4 + 6]
    for b in range(3):
        assert coconut.answer(BATCH.take([b]), told).ids[0] == got.ids[b]
    for epoch, thinks in ((0, 0), (3, 2), (30, 4)):
        coconut.stage = coconut.scheduled(epoch)
        assert coconut.answer(BATCH, told).passes[0][:3] == Passes(1, 0, thinks, 0)[:3]
    assert coconut.think(BATCH, trace=True).trace[0].thoughts.shape == (3, 4, 48)


def test_the_prompt_is_written_after_the_steps_that_are_left() -> None:
    coconut, told = method().float(), Writing(6, (), str)
    free = coconut.answer(BATCH.take([0]), told)
    prompt, eos = free.ids[0][1:3], free.ids[0][4]
    got = coconut.answer(BATCH.take([0]), replace(told, prompt=prompt))
    assert got.ids == free.ids
    assert got.held[0][0] == free.held[0][0] + 3
    inside = coconut.answer(BATCH.take([0]), replace(told, prompt=(eos,), eos=(eos,)))
    assert free.ids[0].index(eos) < len(inside.ids[0]) - 1  # the first eos ends no row


def test_the_gold_chain_is_not_looked_at_in_answering() -> None:
    told = Writing(5, (EOS,), str)
    with pytest.raises(Usage, match="pad_latent_to_max false: the number of latents would be read off the chain"):
        method(pad_latent_to_max=False).answer(BATCH, told)
    with pytest.raises(Usage, match="teacher: Coconut was not taught"):
        method().answer(BATCH, told, teacher=True)


@pytest.mark.parametrize("changes", [{"count": 3}, {"project": "pccot"}, {"mode": "jacobi", "rounds": 4}])
def test_thoughts_that_are_not_those_of_the_stages(changes: dict[str, object]) -> None:
    decoder = fresh("llama")
    settings = {"count": 4, "mode": "sequential", "project": "none"} | changes
    with pytest.raises(Usage, match="choose 4 sequential ones, project none"):
        Coconut(decoder, Thoughts(decoder, **settings), Staging(max_stage=2), steps_per_epoch=5)  # type: ignore[arg-type]


def test_a_loss_is_finite_without_any_chain() -> None:
    batch = reasoning(((4, 0, 3),))
    for epoch in (0, 3, 9):
        assert torch.isfinite(method()(at(epoch, batch=batch)).loss)
