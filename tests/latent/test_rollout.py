"""The latent rollout: what comes back, what is refused, and what each pass reads."""

import pytest
import torch
from torch import Tensor

from laconic.batches import PassCounts
from laconic.errors import UsageError
from laconic.latent.rollout import LatentRollout, run_latent_rollout
from tests.core.readings import decoder_of, noise, same

D, M = 48, 4


def project(x: Tensor) -> Tensor:
    """A map that is not linear and has no fixed point at hand."""
    return torch.nn.functional.layer_norm(torch.tanh(x) + x.roll(1, -1), (D,))


def rolled(rounds: int | None, mode: str = "jacobi", **named: object) -> LatentRollout:
    prefix, slot = noise(1, 2, 3, D), noise(2, D)
    return run_latent_rollout(decoder_of("llama"), prefix, slot, M, rounds, project=project, schedule=mode, **named)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_what_comes_back(rounds: int) -> None:
    got = rolled(rounds, trace=True)
    assert got.latents.shape == got.hidden_states.shape == (2, M, D)
    assert got.cache.S == 3 + M
    assert got.passes == PassCounts(0, 1, rounds, 0)
    assert len(got.records) == rounds + 1
    assert torch.equal(got.records[-1].latents, got.latents)
    assert torch.equal(got.records[-1].hidden_states, got.hidden_states)
    assert got.records[-1].cache.equal(got.cache)
    same(got.begin_hidden, decoder_of("llama")(noise(1, 2, 3, D)).hidden[:, -1])


def test_what_comes_back_one_after_the_other() -> None:
    got = rolled(None, "sequential", trace=True)
    assert got.latents.shape == got.hidden_states.shape == (2, M, D)
    assert (got.cache.S, got.passes) == (3 + M, PassCounts(1, 0, M, 0))
    assert torch.equal(got.records[0].latents, got.latents)
    same(got.latents[:, 0], project(got.begin_hidden))
    same(got.latents[:, 1:], project(got.hidden_states[:, :-1]))


@pytest.mark.parametrize(
    ("rounds", "mode", "count", "message"),
    [
        (3, "sequential", M, "rounds 3: thoughts made one after the other have none"),
        (None, "jacobi", M, "rounds None: Jacobi thoughts need a number of rounds"),
        (-1, "jacobi", M, "rounds -1: Jacobi thoughts need a number of rounds"),
        (3, "jacobi", 0, "0 thoughts; give at least one"),
    ],
)
def test_numbers_that_cannot_be_meant(rounds: int | None, mode: str, count: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_latent_rollout(
            decoder_of("llama"), noise(1, 1, 2, D), noise(2, D), count, rounds, project=project, schedule=mode
        )


@pytest.mark.parametrize("rounds", [0, 2])
def test_an_edit_changes_what_is_read_and_all_that_follows(rounds: int) -> None:
    heard: list[tuple[int, Tensor]] = []

    def edit(z: Tensor, t: int) -> Tensor:
        heard.append((t, z))
        return torch.cat([z[:, :1], z[:, 1:2] * 0, z[:, 2:]], 1)

    plain, got = rolled(rounds, trace=True), rolled(rounds, edit=edit, trace=True)
    assert [t for t, _ in heard] == ([1, 2] if rounds else [0])
    assert not got.latents[:, 1].any()
    same(got.cache.crop(4).keys[1], plain.cache.crop(4).keys[1])
    assert not torch.allclose(got.hidden_states[:, 1:], plain.hidden_states[:, 1:])
    if rounds:  # the first vector of a round is what was made, not what an edit made of it
        doubled = rolled(2, edit=lambda z, t: 2 * z)
        same(doubled.latents[:, 0], 2 * plain.latents[:, 0])


def test_an_edit_one_after_the_other() -> None:
    heard: list[int] = []

    def edit(z: Tensor, t: int) -> Tensor:
        heard.append(t)
        assert z.shape == (2, 1, D)
        return z * 0 if t == 2 else z

    plain, got = rolled(None, "sequential"), rolled(None, "sequential", edit=edit)
    assert heard == [1, 2, 3, 4]
    same(got.latents[:, :1], plain.latents[:, :1])
    assert not got.latents[:, 1].any()
    assert not torch.allclose(got.latents[:, 2:], plain.latents[:, 2:])


def test_one_thought() -> None:
    args = (decoder_of("llama"), noise(1, 1, 3, D), noise(2, D), 1)
    jacobi = run_latent_rollout(*args, 3, project=project)
    same(jacobi.cache.keys[1], run_latent_rollout(*args, None, project=project, schedule="sequential").cache.keys[1])
