"""The conditions of an audit: which ones a run has, and what is left of the cache and of the iterations."""

import numpy as np
import torch

from laconic.evaluation.inspection.conditions import cut_thoughts, limit_iterations, list_conditions
from laconic.evaluation.inspection.interventions import InterventionInputs
from laconic.models.modes import eval_no_grad
from tests.evaluation.test_interventions import M, subject
from tests.latent.batches import reasoning_batch
from tests.tolerances import ORACLE, error


def test_list_conditions_by_schedule() -> None:
    names = list(list_conditions(4, 3))
    assert names[:2] == ["swap vectors", "swap cache"]
    assert names[-4:] == ["first 2", "first 0", "1 iterations", "0 iterations"]
    assert len(names) == 14
    assert list(list_conditions(1, None))[-2:] == ["zero cache", "first 0"]
    assert not any("shuffle" in name for name in list_conditions(1, None))
    assert len(list_conditions(4, 0)) == len(list_conditions(4, None)) == 12
    assert list(list_conditions(4, 1))[-1] == "0 iterations"


def test_cut_thoughts_leave_what_was_read_up_to_them() -> None:
    run, batch = subject(), reasoning_batch()
    inputs = InterventionInputs(run.think(batch, record_passes=True), np.arange(batch.B))
    decoder, thoughts = run.decoder, run.thoughts
    for m in (0, 1, M):
        cache = cut_thoughts(run, batch, inputs, m).cache
        with eval_no_grad(decoder, thoughts):
            bot = thoughts.begin.expand(batch.B, 1, -1).to(decoder.dtype)
            vectors = torch.cat([decoder.embed(batch.question_ids), bot, inputs.rollout.latents[:, :m]], 1)
            mask = torch.cat([batch.question_mask, batch.question_mask.new_ones(batch.B, m + 1)], 1)
            by_hand = decoder(vectors, attention_mask=mask).cache
        assert cache.S == by_hand.S
        assert torch.equal(cache.next_position, by_hand.next_position)
        ours, theirs = ((*c.keys, *c.values) for c in (cache, by_hand))
        valid = by_hand.valid[:, None, :, None]
        assert max(error(x * valid, y * valid) for x, y in zip(ours, theirs, strict=True)) < ORACLE


def test_limit_iterations_asks_the_run_for_them() -> None:
    calls: list[int | None] = []
    run, batch = subject(), reasoning_batch()
    inputs = InterventionInputs(run.think(batch), np.arange(batch.B))
    run.think = lambda questions, iterations=None: calls.append(iterations)
    limit_iterations(run, batch, inputs, 1)
    assert calls == [1]
