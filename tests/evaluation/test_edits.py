"""Edits of thoughts: each against what is computed by hand, those that must change nothing, and what is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laconic.core.cache import Cache
from laconic.core.errors import Usage
from laconic.core.rollout import Rollout
from laconic.evaluation import edits
from laconic.evaluation.edits import Given, Intervention
from laconic.evaluation.subject import Subject, slots
from laconic.methods import codi
from tests.methods.batches import reasoning, trained
from tests.tolerances import FLOAT32, ORACLE, error, largest

M, ROUNDS = 4, 2


def subject(name: str = "llama", rounds: int | None = ROUNDS) -> Any:
    """A decoder with thoughts, as far as edits ask for it."""
    decoder, thoughts = trained(name, M=M, rounds=rounds)

    def think(questions: Any, edit: Any = None, trace: bool = False, rounds: int | None = None) -> Rollout:
        return codi.think(decoder, thoughts, questions, edit, trace)

    return SimpleNamespace(decoder=decoder, thoughts=thoughts, think=think)


def given(run: Subject, batch: Any, seed: int = 0, donors: Any = None) -> Given:
    own = run.think(batch, trace=True)
    return Given(own, np.arange(batch.B), seed, None if donors is None else run.think(donors, trace=True))


def same_cache(a: Cache, b: Cache) -> bool:
    return max(error(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)) < ORACLE


def test_zeros_are_read_in_every_round_as_by_hand() -> None:
    run, batch = subject(), reasoning()
    found = edits.edited(run, batch, Intervention("zero"), given(run, batch))
    decoder, thoughts = run.decoder, run.thoughts
    with torch.no_grad():
        asked = decoder(decoder.embed(batch.question), live=batch.question_live).state
        bot = decoder(thoughts.bot.expand(3, 1, -1), asked)
        last = decoder(torch.zeros(3, M, decoder.config.hidden_size, dtype=torch.float64), bot.state)
    assert error(found.hidden, last.hidden) < ORACLE
    assert same_cache(found.state, last.state)
    assert error(found.hidden, run.think(batch).hidden) > 0.1


def test_a_listed_slot_alone_is_changed_and_those_behind_it_made_anew() -> None:
    run, batch = subject(), reasoning()
    made = given(run, batch)
    edit = edits.editor(Intervention("zero", at=(1,)), made)
    traced = run.think(batch, edit=edit, trace=True)
    for t in (1, 2):
        read, before = traced.trace[t].thoughts, made.own.trace[t].thoughts
        assert not read[:, 1].any()
        assert error(read[:, 0], before[:, 0]) < ORACLE
        assert (error(read[:, 2], before[:, 2]) > 0.01) == (t == 2)  # round 2 is made of what round 1 read


@pytest.mark.parametrize("rounds", [0, ROUNDS, None])
def test_a_swap_with_itself_changes_nothing(rounds: int | None) -> None:
    run, batch = subject(rounds=rounds), reasoning()
    made = given(run, batch, donors=batch)
    same = edits.edited(run, batch, Intervention("swap"), made)
    assert same.state.equal(made.own.state)
    assert torch.equal(same.hidden, made.own.hidden)
    assert same_cache(edits.edited(run, batch, Intervention("swap", "cache"), made).state, made.own.state)


@pytest.mark.parametrize("rounds", [0, ROUNDS, None])
def test_a_swap_reads_the_donors_vectors(rounds: int | None) -> None:
    run, batch = subject(rounds=rounds), reasoning()
    made = given(run, batch, donors=reasoning(((2, 1, 3), (7, 3, 3), (4, 4, 4)), seed=3))
    assert made.donors is not None
    read = edits.edited(run, batch, Intervention("swap"), made).thoughts
    assert torch.equal(read, made.donors.thoughts)
    some = edits.edited(run, batch, Intervention("swap", at=(0,)), made).thoughts
    assert torch.equal(some[:, 0], made.donors.thoughts[:, 0])


@pytest.mark.parametrize("rounds", [0, ROUNDS, None])
@pytest.mark.parametrize("where", edits.WHERES)
def test_the_mean_over_one_question_is_itself(rounds: int | None, where: Any) -> None:
    run, batch = subject(rounds=rounds), reasoning(((4, 2, 3),))
    made = given(run, batch)
    means = edits.means(run, [batch, batch])
    assert means.questions == 2
    same = edits.edited(run, batch, Intervention("mean", where), Given(made.own, made.index, means=means))
    assert same_cache(same.state, made.own.state)


def test_means_are_those_of_all_rows_however_they_are_batched() -> None:
    run, batch = subject(), reasoning()
    rolled = run.think(batch, trace=True)
    found = edits.means(run, [batch.take([0]), batch.take([1, 2])])
    for t, trace in enumerate(rolled.trace):
        assert largest(found.vectors[t], trace.thoughts.mean(0)) < ORACLE
    mine = slots(run.decoder, rolled)
    for l, (k, v) in enumerate(zip(mine.before, mine.values, strict=True)):
        assert largest(found.before[l], k.mean(0)) < ORACLE
        assert largest(found.values[l], v.mean(0)) < ORACLE


def test_a_shuffle_moves_every_slot_it_may() -> None:
    run, batch = subject(), reasoning()
    made = given(run, batch)
    order = edits.shuffled(made, range(M))
    assert (order.sort(1).values == torch.arange(M)).all()
    assert (order != torch.arange(M)).all()
    some = edits.shuffled(made, (0, 3))
    assert some.tolist() == [[3, 1, 2, 0]] * 3
    assert (
        len({tuple(row) for seed in range(9) for row in edits.shuffled(given(run, batch, seed), range(M)).tolist()}) > 3
    )


@pytest.mark.parametrize("rounds", [ROUNDS, None])
def test_a_shuffle_reads_the_vectors_of_other_slots(rounds: int | None) -> None:
    run, batch = subject(rounds=rounds), reasoning()
    made = given(run, batch)
    traced = run.think(batch, edit=edits.editor(Intervention("shuffle"), made), trace=True)
    order, t = edits.shuffled(made, range(M)), 0 if rounds is None else 1
    for b, row in enumerate(order.tolist()):
        assert error(traced.trace[t].thoughts[b], made.own.trace[t].thoughts[b, row]) < ORACLE


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """A key of width E at a position, by complex numbers: pairs (i, i + E/2) turned by position * 10000^(-2i/E)."""
    half = len(x) // 2
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10000.0 ** (-2 * np.arange(half) / len(x)))
    return np.concatenate([pairs.real, pairs.imag])


def test_a_key_that_is_moved_in_the_cache_is_turned_to_its_new_place() -> None:
    run, batch = subject(), reasoning()
    made = given(run, batch)
    own, mine, order = made.own, slots(run.decoder, made.own), edits.shuffled(made, range(M))
    found = edits.edited(run, batch, Intervention("shuffle", "cache"), made).state
    assert torch.equal(found.positions, own.state.positions)
    for l in range(len(found.keys)):
        assert torch.equal(found.keys[l][:, :, :-M], own.state.keys[l][:, :, :-M])
        for b, row in enumerate(order.tolist()):
            for m, source in enumerate(row):
                assert torch.equal(found.values[l][b, :, m - M], own.state.values[l][b, :, source - M])
                for g in range(found.keys[l].shape[1]):
                    asked = turned(mine.before[l][b, g, source].numpy(), int(own.state.positions[b, m - M]))
                    assert largest(found.keys[l][b, g, m - M], torch.from_numpy(asked)) < FLOAT32


def test_where_keys_are_not_turned_an_order_of_the_cache_is_nothing() -> None:
    """GPT-2: attention over the same keys and values in another order is the same."""
    run, batch = subject("gpt2"), reasoning()
    made = given(run, batch)
    moved = edits.edited(run, batch, Intervention("shuffle", "cache"), made).state
    assert not moved.equal(made.own.state)
    eot = run.thoughts.eot.expand(batch.B, 1, -1)
    with torch.no_grad():
        assert error(run.decoder(eot, moved).hidden, run.decoder(eot, made.own.state).hidden) < ORACLE


@pytest.mark.parametrize("kind", ["zero", "noise"])
def test_cache_edits_touch_the_listed_slots_alone(kind: Any) -> None:
    run, batch = subject(), reasoning()
    made = given(run, batch)
    found = edits.edited(run, batch, Intervention(kind, "cache", (2,)), made).state
    for mine, theirs in zip((*found.keys, *found.values), (*made.own.state.keys, *made.own.state.values), strict=True):
        changed = (mine != theirs).any(-1).any(1).any(0)
        assert changed.nonzero()[:, 0].tolist() == [found.S - M + 2]
        if kind == "zero":
            assert not mine[:, :, 2 - M].any()
        else:
            assert error(mine[:, :, 2 - M].norm(dim=-1), theirs[:, :, 2 - M].norm(dim=-1)) < 1e-6  # turned in float32
    assert made.own.state.equal(run.think(batch).state)  # what was given is as it was


def test_noise_has_the_norms_of_what_it_replaces_and_is_a_rows_own() -> None:
    run, batch = subject(), reasoning()
    made = given(run, batch)
    like = torch.randn(3, M, 64, dtype=torch.float64) * 7
    whole = edits.noise(like, made, 1)
    assert error(whole.norm(dim=-1), like.norm(dim=-1)) < ORACLE
    alone = edits.noise(like[1:2], Given(made.own, np.array([1])), 1)
    assert torch.equal(alone[0], whole[1])
    assert not torch.allclose(edits.noise(like, made, 2), whole)
    assert not torch.allclose(edits.noise(like, Given(made.own, made.index, 1), 1), whole)
    many = edits.noise(torch.ones(1, 1, 4000, dtype=torch.float64), Given(made.own, np.array([0])), 1)
    assert abs(float(many.mean())) < 0.1
    assert 2.5 < float((many**4).mean() / (many**2).mean() ** 2) < 3.5  # the kurtosis of a Gaussian is 3


@pytest.mark.parametrize("n", [2, 3, 50])
def test_donors_are_a_derangement_by_seed(n: int) -> None:
    found = edits.donors(n, 0)
    assert sorted(found.tolist()) == list(range(n))
    assert (found != np.arange(n)).all()
    assert (found == edits.donors(n, 0)).all()
    assert n < 50 or (found != edits.donors(n, 1)).any()


def test_what_cannot_be_edited_is_refused() -> None:
    run, batch = subject(), reasoning()
    made = given(run, batch)
    with pytest.raises(Usage, match="swap: 1 question has no other to take thoughts from; give more rows"):
        edits.donors(1, 0)
    with pytest.raises(Usage, match="shuffle: 1 slot has no other to change places with; name two or more, or all"):
        edits.editor(Intervention("shuffle", at=(0,)), made)
    for at in ((4,), (-1,), ()):
        with pytest.raises(Usage, match="there are 4 thoughts, from 1; name some of them"):
            edits.editor(Intervention("zero", at=at), made)
    for where in edits.WHERES:
        with pytest.raises(Usage, match="swap: needs the thoughts on other questions, and there are none"):
            edits.edited(run, batch, Intervention("swap", where), made)
