"""Coconut: stages, rows with different numbers of latents, answers, reset of the optimizer."""

import re
from dataclasses import replace

import pytest
import torch

from laconic.batches import PassCounts, ReasoningBatch
from laconic.config.methods import CoconutConfig
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding
from laconic.latent.coconut import Coconut
from laconic.latent.thoughts import LatentThoughts
from laconic.rng import uniform
from tests.latent.batches import EOS, gradients, reasoning_batch
from tests.models.fixtures import assert_all_close, assert_close, fresh

BATCH = reasoning_batch(((4, 7, 4), (3, 2, 3), (4, 0, 5)))  # of 4, 1 and 0 steps


def method(name: str = "llama", **config: object) -> Coconut:
    coconut_config = CoconutConfig(**({"latents_per_step": 2, "epochs_per_stage": 3, "max_stage": 2} | config))  # type: ignore[arg-type]
    decoder = fresh(name).double()
    count = coconut_config.max_stage * coconut_config.latents_per_step
    latent_thoughts = LatentThoughts(
        decoder, num_latents=count, schedule="sequential", projection="none", control_init="normal"
    )
    return Coconut(decoder, latent_thoughts, coconut_config, steps_per_epoch=5)


def at(epoch: int, step: int = 0, batch: ReasoningBatch = BATCH) -> ReasoningBatch:
    return replace(batch, epoch=epoch, step=step)


@pytest.mark.parametrize(
    ("epoch", "config", "k", "n"),
    [
        (0, {}, [0, 0, 0], [0, 0, 0]),
        (2, {}, [0, 0, 0], [0, 0, 0]),
        (3, {}, [1, 1, 1], [2, 2, 2]),
        (6, {}, [2, 2, 2], [4, 4, 4]),
        (9, {}, [4, 1, 0], [4, 4, 4]),
        (30, {}, [4, 1, 0], [4, 4, 4]),
        (9, {"pad_latent_to_max": False}, [4, 1, 0], [4, 2, 0]),
        (0, {"first_stage": 1}, [1, 1, 1], [2, 2, 2]),
        (1, {"epochs_per_stage": 1, "latents_per_step": 1}, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_coconut_stages(epoch: int, config: dict[str, object], k: list[int], n: list[int]) -> None:
    steps, latents = method(**config).sample_stages(at(epoch))
    assert (steps.tolist(), latents.tolist()) == (k, n)


def test_coconut_uniform_stages() -> None:
    coconut = method(uniform_stage_prob=0.5, max_stage=9).train()
    batch = reasoning_batch(((3, 7, 3),) * 40)
    stages = coconut.sample_stages(at(3, batch=batch))[0]
    for b in range(40):
        which, where = (float(uniform(0, 3, int(batch.row_index[b]), i)) for i in (0, 1))
        assert int(stages[b]) == (int(where * 5) if which < 0.5 else 1)
    assert set(stages.tolist()) == {0, 1, 2, 3, 4}
    assert set(coconut.eval().sample_stages(at(3, batch=batch))[0].tolist()) == {1}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("epoch", "config"), [(0, {}), (3, {}), (9, {}), (9, {"pad_latent_to_max": False})])
def test_coconut_batch_equals_single_rows(name: str, epoch: int, config: dict[str, object]) -> None:
    coconut = method(name, **config)
    whole = coconut(at(epoch))
    counts = [coconut.loss_denominators(at(epoch).select_rows([b]))["student"] for b in range(3)]
    alone = [coconut(remove_padding(at(epoch).select_rows([b]))) for b in range(3)]
    assert sum(counts) == coconut.loss_denominators(at(epoch))["student"]
    assert_close(whole.loss, sum(step.loss * n for step, n in zip(alone, counts, strict=True)) / sum(counts))
    totals = {"student": sum(counts)}
    parts = sum(coconut(replace(at(epoch).select_rows([b]), loss_denominators=totals)).loss for b in range(3))
    assert_all_close(gradients(coconut, parts).values(), gradients(coconut, whole.loss).values())


def remove_padding(batch: ReasoningBatch) -> ReasoningBatch:
    """A single row without any padding."""
    masks = {"question": batch.question_mask[0], "chain": batch.chain_mask[0], "answer": batch.answer_mask[0]}
    columns = {
        name: getattr(batch, name)[:, masks[name.partition("_")[0]]]
        for name in (
            "question_ids", "question_mask", "chain_ids", "chain_mask", "chain_step_index", "chain_targets",
            "answer_ids", "answer_mask", "answer_targets", "answer_number_mask",
        )
    }  # fmt: skip
    return replace(batch, **columns)


def test_coconut_gradients() -> None:
    coconut = method()
    coconut(at(6)).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in coconut.decoder.layers.parameters())
    assert coconut.latent_thoughts.begin.shape == (48,)
    grad = coconut.latent_thoughts.vectors.grad
    assert [bool(grad[i].any()) for i in range(3)] == [True, False, True]  # a sequential rollout has no placeholder


def test_coconut_resets_the_optimizer_at_every_epoch() -> None:
    assert [step for step in range(16) if method().resets_optimizer_state(at(step // 5, step))] == [5, 10, 15]


def test_coconut_answers_after_the_latents_of_a_stage() -> None:
    coconut, decoding = method().float(), AnswerDecoding(5, (EOS,), lambda ids: " ".join(map(str, ids)))
    got = coconut.answer(BATCH, decoding)
    assert [p[:3] for p in got.passes] == [(1, 0, 4)] * 3
    assert [p.answer for p in got.passes] == [len(ids) - 1 for ids in got.token_ids]
    assert [start for start, _ in got.cache_positions] == [4 + 6, 3 + 6, 4 + 6]
    for b in range(3):
        assert coconut.answer(BATCH.select_rows([b]), decoding).token_ids[0] == got.token_ids[b]
    for epoch, thinks in ((0, 0), (3, 2), (30, 4)):
        coconut.eval_stage = coconut.get_stage(epoch)
        assert coconut.answer(BATCH, decoding).passes[0][:3] == PassCounts(1, 0, thinks, 0)[:3]
    assert coconut.think(BATCH, record_passes=True).records[0].latents.shape == (3, 4, 48)


def test_coconut_writes_the_answer_prompt_after_the_remaining_steps() -> None:
    coconut, decoding = method().float(), AnswerDecoding(6, (), str)
    free = coconut.answer(BATCH.select_rows([0]), decoding)
    prompt, eos = free.token_ids[0][1:3], free.token_ids[0][4]
    got = coconut.answer(BATCH.select_rows([0]), replace(decoding, answer_prompt=prompt))
    assert got.token_ids == free.token_ids
    assert got.cache_positions[0][0] == free.cache_positions[0][0] + 3
    inside = coconut.answer(BATCH.select_rows([0]), replace(decoding, answer_prompt=(eos,), eos_token_ids=(eos,)))
    assert free.token_ids[0].index(eos) < len(inside.token_ids[0]) - 1  # the first eos does not end the row


def test_coconut_does_not_use_the_chain_in_answering() -> None:
    decoding = AnswerDecoding(5, (EOS,), str)
    with pytest.raises(UsageError, match="number of latents depends on the chain"):
        method(pad_latent_to_max=False).answer(BATCH, decoding)
    with pytest.raises(UsageError, match="Coconut is not trained"):
        method().answer(BATCH, decoding, with_cot=True)


@pytest.mark.parametrize(
    ("changes", "required"),
    [
        ({"num_latents": 3}, "latents.num_latents = 4 (coconut.max_stage times coconut.latents_per_step)"),
        ({"projection": "pccot"}, 'latents.projection = "none"'),
        ({"schedule": "jacobi", "num_iterations": 4}, 'latents.schedule = "sequential"'),
    ],
)
def test_coconut_refuses_other_latents(changes: dict[str, object], required: str) -> None:
    decoder = fresh("llama")
    settings = {"num_latents": 4, "schedule": "sequential", "projection": "none"} | changes
    with pytest.raises(UsageError, match=f"^coconut requires {re.escape(required)}$"):
        Coconut(decoder, LatentThoughts(decoder, **settings), CoconutConfig(max_stage=2), steps_per_epoch=5)  # type: ignore[arg-type]


def test_coconut_loss_without_chains_is_finite() -> None:
    batch = reasoning_batch(((4, 0, 3),))
    for epoch in (0, 3, 9):
        assert torch.isfinite(method()(at(epoch, batch=batch)).loss)
