"""Edits of thoughts: each against what is computed by hand, those that must change nothing, and what is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laconic.errors import UsageError
from laconic.evaluation.inspection import interventions
from laconic.evaluation.inspection.inspected_run import InspectedRun, latent_keys_values
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec
from laconic.latent import codi
from laconic.latent.rollout import LatentRollout
from laconic.models.cache import KVCache
from laconic.models.modes import eval_no_grad
from tests.latent.batches import build_latent_model, reasoning_batch
from tests.tolerances import FLOAT32, ORACLE, error, largest

M, ROUNDS = 4, 2


def subject(name: str = "llama", rounds: int | None = ROUNDS) -> Any:
    """A decoder with thoughts, as far as edits ask for it."""
    decoder, thoughts = build_latent_model(name, num_latents=M, num_iterations=rounds)

    def think(
        questions: Any, intervention: Any = None, record_passes: bool = False, iterations: int | None = None
    ) -> LatentRollout:
        with eval_no_grad(decoder, thoughts):
            cache = codi.read_question(decoder, questions).cache
            return thoughts.think(decoder, cache, intervention=intervention, record_passes=record_passes)

    return SimpleNamespace(decoder=decoder, thoughts=thoughts, think=think)


def build_inputs(run: InspectedRun, batch: Any, seed: int = 0, donors: Any = None) -> InterventionInputs:
    donor_rollout = None if donors is None else run.think(donors, record_passes=True)
    return InterventionInputs(run.think(batch, record_passes=True), np.arange(batch.B), seed, donor_rollout)


def same_cache(a: KVCache, b: KVCache) -> bool:
    return max(error(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)) < ORACLE


def test_zeros_are_read_in_every_round_as_by_hand() -> None:
    run, batch = subject(), reasoning_batch()
    result = interventions.run_intervention(run, batch, build_inputs(run, batch), InterventionSpec("zero"))
    decoder, thoughts = run.decoder, run.thoughts
    with torch.no_grad():
        requested = decoder(decoder.embed(batch.question_ids), attention_mask=batch.question_mask).cache
        bot = decoder(thoughts.begin.expand(3, 1, -1), requested)
        last = decoder(torch.zeros(3, M, decoder.config.hidden_size, dtype=torch.float64), bot.cache)
    assert error(result.hidden_states, last.hidden_states) < ORACLE
    assert same_cache(result.cache, last.cache)
    assert error(result.hidden_states, run.think(batch).hidden_states) > 0.1


@pytest.mark.parametrize("rounds", [0, ROUNDS, None])
def test_a_swap_with_itself_changes_nothing(rounds: int | None) -> None:
    run, batch = subject(rounds=rounds), reasoning_batch()
    built = build_inputs(run, batch, donors=batch)
    same = interventions.run_intervention(run, batch, built, InterventionSpec("swap"))
    assert same.cache.is_equal(built.rollout.cache)
    assert torch.equal(same.hidden_states, built.rollout.hidden_states)
    in_cache = interventions.run_intervention(run, batch, built, InterventionSpec("swap", "cache"))
    assert same_cache(in_cache.cache, built.rollout.cache)


@pytest.mark.parametrize("rounds", [0, ROUNDS, None])
def test_a_swap_reads_the_donors_vectors(rounds: int | None) -> None:
    run, batch = subject(rounds=rounds), reasoning_batch()
    built = build_inputs(run, batch, donors=reasoning_batch(((2, 1, 3), (7, 3, 3), (4, 4, 4)), seed=3))
    assert built.donor_rollout is not None
    read = interventions.run_intervention(run, batch, built, InterventionSpec("swap")).latents
    assert torch.equal(read, built.donor_rollout.latents)


@pytest.mark.parametrize("rounds", [0, ROUNDS, None])
@pytest.mark.parametrize("where", interventions.INTERVENTION_TARGETS)
def test_the_mean_over_one_question_is_itself(rounds: int | None, where: Any) -> None:
    run, batch = subject(rounds=rounds), reasoning_batch(((4, 2, 3),))
    built = build_inputs(run, batch)
    means = interventions.compute_reference_means(run, [batch, batch])
    inputs = InterventionInputs(built.rollout, built.row_index, means=means)
    same = interventions.run_intervention(run, batch, inputs, InterventionSpec("mean", where))
    assert same_cache(same.cache, built.rollout.cache)


def test_means_are_those_of_all_rows_however_they_are_batched() -> None:
    run, batch = subject(), reasoning_batch()
    rolled = run.think(batch, record_passes=True)
    result = interventions.compute_reference_means(run, [batch.select_rows([0]), batch.select_rows([1, 2])])
    for t, trace in enumerate(rolled.records):
        assert largest(result.vectors[t], trace.latents.mean(0)) < ORACLE
    mine = latent_keys_values(run.decoder, rolled)
    for l, (k, v) in enumerate(zip(mine.keys_before_rope, mine.values, strict=True)):
        assert largest(result.keys_before_rope[l], k.mean(0)) < ORACLE
        assert largest(result.values[l], v.mean(0)) < ORACLE


def test_a_shuffle_moves_every_slot_it_may() -> None:
    run, batch = subject(), reasoning_batch()
    built = build_inputs(run, batch)
    order = interventions.shuffle_order(built)
    assert (order.sort(1).values == torch.arange(M)).all()
    assert (order != torch.arange(M)).all()
    orders = [interventions.shuffle_order(build_inputs(run, batch, seed)).tolist() for seed in range(9)]
    assert len({tuple(row) for order in orders for row in order}) > 3


@pytest.mark.parametrize("rounds", [ROUNDS, None])
def test_a_shuffle_reads_the_vectors_of_other_slots(rounds: int | None) -> None:
    run, batch = subject(rounds=rounds), reasoning_batch()
    built = build_inputs(run, batch)
    traced = run.think(
        batch, intervention=lambda z, t: interventions.replacement_vectors("shuffle", z, t, built), record_passes=True
    )
    order, t = interventions.shuffle_order(built), 0 if rounds is None else 1
    for b, row in enumerate(order.tolist()):
        assert error(traced.records[t].latents[b], built.rollout.records[t].latents[b, row]) < ORACLE


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """A key of width E at a position, by complex numbers: pairs (i, i + E/2) turned by position * 10000^(-2i/E)."""
    half = len(x) // 2
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10000.0 ** (-2 * np.arange(half) / len(x)))
    return np.concatenate([pairs.real, pairs.imag])


def test_a_key_that_is_moved_in_the_cache_is_turned_to_its_new_place() -> None:
    run, batch = subject(), reasoning_batch()
    built = build_inputs(run, batch)
    rollout, order = built.rollout, interventions.shuffle_order(built)
    mine = latent_keys_values(run.decoder, rollout)
    result = interventions.run_intervention(run, batch, built, InterventionSpec("shuffle", "cache")).cache
    assert torch.equal(result.positions, rollout.cache.positions)
    for l in range(len(result.keys)):
        assert torch.equal(result.keys[l][:, :, :-M], rollout.cache.keys[l][:, :, :-M])
        for b, row in enumerate(order.tolist()):
            for m, source in enumerate(row):
                assert torch.equal(result.values[l][b, :, m - M], rollout.cache.values[l][b, :, source - M])
                for g in range(result.keys[l].shape[1]):
                    position = int(rollout.cache.positions[b, m - M])
                    requested = turned(mine.keys_before_rope[l][b, g, source].numpy(), position)
                    assert largest(result.keys[l][b, g, m - M], torch.from_numpy(requested)) < FLOAT32


def test_where_keys_are_not_turned_an_order_of_the_cache_is_nothing() -> None:
    """GPT-2: attention over the same keys and values in another order is the same."""
    run, batch = subject("gpt2"), reasoning_batch()
    built = build_inputs(run, batch)
    moved = interventions.run_intervention(run, batch, built, InterventionSpec("shuffle", "cache")).cache
    assert not moved.is_equal(built.rollout.cache)
    eot = run.thoughts.end.expand(batch.B, 1, -1)
    with torch.no_grad():
        before, after = (run.decoder(eot, cache).hidden_states for cache in (built.rollout.cache, moved))
    assert error(after, before) < ORACLE


@pytest.mark.parametrize("kind", ["zero", "noise"])
def test_cache_edits_touch_the_latents_alone(kind: Any) -> None:
    run, batch = subject(), reasoning_batch()
    built = build_inputs(run, batch)
    result = interventions.run_intervention(run, batch, built, InterventionSpec(kind, "cache")).cache
    for mine, theirs in zip(
        (*result.keys, *result.values), (*built.rollout.cache.keys, *built.rollout.cache.values), strict=True
    ):
        changed = (mine != theirs).any(-1).any(1).any(0)
        assert changed.nonzero()[:, 0].tolist() == list(range(result.S - M, result.S))
        if kind == "zero":
            assert not mine[:, :, -M:].any()
        else:
            assert error(mine[:, :, -M:].norm(dim=-1), theirs[:, :, -M:].norm(dim=-1)) < 1e-6  # turned in float32
    assert built.rollout.cache.is_equal(run.think(batch).cache)  # what was given is as it was


def test_noise_has_the_norms_of_what_it_replaces_and_is_a_rows_own() -> None:
    run, batch = subject(), reasoning_batch()
    built = build_inputs(run, batch)
    like = torch.randn(3, M, 64, dtype=torch.float64) * 7
    whole = interventions.norm_matched_noise(like, built, 1)
    assert error(whole.norm(dim=-1), like.norm(dim=-1)) < ORACLE
    alone = interventions.norm_matched_noise(like[1:2], InterventionInputs(built.rollout, np.array([1])), 1)
    assert torch.equal(alone[0], whole[1])
    assert not torch.allclose(interventions.norm_matched_noise(like, built, 2), whole)
    other_seed = InterventionInputs(built.rollout, built.row_index, 1)
    assert not torch.allclose(interventions.norm_matched_noise(like, other_seed, 1), whole)
    one_row, ones = InterventionInputs(built.rollout, np.array([0])), torch.ones(1, 1, 4000, dtype=torch.float64)
    many = interventions.norm_matched_noise(ones, one_row, 1)
    assert abs(float(many.mean())) < 0.1
    assert 2.5 < float((many**4).mean() / (many**2).mean() ** 2) < 3.5  # the kurtosis of a Gaussian is 3


@pytest.mark.parametrize("n", [2, 3, 50])
def test_donors_are_a_derangement_by_seed(n: int) -> None:
    result = interventions.choose_donors(n, 0)
    assert sorted(result.tolist()) == list(range(n))
    assert (result != np.arange(n)).all()
    assert (result == interventions.choose_donors(n, 0)).all()
    assert n < 50 or (result != interventions.choose_donors(n, 1)).any()


def test_one_question_has_no_donor_and_one_latent_no_other_order() -> None:
    with pytest.raises(UsageError, match="swap needs at least two"):
        interventions.choose_donors(1, 0)
    assert {spec.kind for spec in interventions.list_interventions(1)} == {"swap", "mean", "noise", "zero"}
