"""Latent rollout: results, invalid arguments, interventions."""

import pytest
import torch
from torch import Tensor

from laconic.batches import PassCounts
from laconic.latent.rollout import LatentPrefix, LatentRollout, run_latent_rollout
from tests.models.fixtures import assert_close, decoder_of, noise

D, M = 48, 4


def project(x: Tensor) -> Tensor:
    """A nonlinear map."""
    return torch.nn.functional.layer_norm(torch.tanh(x) + x.roll(1, -1), (D,))


def run_rollout(num_iterations: int | None, **options: object) -> LatentRollout:
    prefix, slot = LatentPrefix(noise(1, 2, 3, D)), noise(2, D)
    return run_latent_rollout(decoder_of("llama"), prefix, slot, M, num_iterations, project=project, **options)


@pytest.mark.parametrize("num_iterations", [0, 1, 3])
def test_rollout_jacobi_result(num_iterations: int) -> None:
    got = run_rollout(num_iterations, record_passes=True)
    assert got.latents.shape == got.hidden_states.shape == (2, M, D)
    assert got.cache.S == 3 + M
    assert got.passes == (PassCounts(0, 1, num_iterations, 0),) * 2
    assert len(got.records) == num_iterations + 1
    assert torch.equal(got.records[-1].latents, got.latents)
    assert torch.equal(got.records[-1].hidden_states, got.hidden_states)
    assert got.records[-1].cache.is_equal(got.cache)
    assert_close(got.begin_hidden, decoder_of("llama")(noise(1, 2, 3, D)).hidden_states[:, -1])


def test_rollout_sequential_result() -> None:
    got = run_rollout(None, record_passes=True)
    assert got.latents.shape == got.hidden_states.shape == (2, M, D)
    assert (got.cache.S, got.passes) == (3 + M, (PassCounts(1, 0, M, 0),) * 2)
    assert torch.equal(got.records[0].latents, got.latents)
    assert_close(got.latents[:, 0], project(got.begin_hidden))
    assert_close(got.latents[:, 1:], project(got.hidden_states[:, :-1]))


@pytest.mark.parametrize("num_iterations", [0, 2])
def test_rollout_jacobi_intervention(num_iterations: int) -> None:
    calls: list[tuple[int, Tensor]] = []

    def intervene(z: Tensor, t: int) -> Tensor:
        calls.append((t, z))
        return torch.cat([z[:, :1], z[:, 1:2] * 0, z[:, 2:]], 1)

    plain, got = (
        run_rollout(num_iterations, record_passes=True),
        run_rollout(num_iterations, intervention=intervene, record_passes=True),
    )
    assert [t for t, _ in calls] == ([1, 2] if num_iterations else [0])
    assert not got.latents[:, 1].any()
    assert_close(got.cache.crop(4).keys[1], plain.cache.crop(4).keys[1])
    assert not torch.allclose(got.hidden_states[:, 1:], plain.hidden_states[:, 1:])
    if num_iterations:  # an iteration starts from the unchanged latents
        doubled = run_rollout(2, intervention=lambda z, t: 2 * z)
        assert_close(doubled.latents[:, 0], 2 * plain.latents[:, 0])


def test_rollout_sequential_intervention() -> None:
    calls: list[int] = []

    def intervene(z: Tensor, t: int) -> Tensor:
        calls.append(t)
        assert z.shape == (2, 1, D)
        return z * 0 if t == 2 else z

    plain, got = run_rollout(None), run_rollout(None, intervention=intervene)
    assert calls == [1, 2, 3, 4]
    assert_close(got.latents[:, :1], plain.latents[:, :1])
    assert not got.latents[:, 1].any()
    assert not torch.allclose(got.latents[:, 2:], plain.latents[:, 2:])


def test_rollout_of_one_latent() -> None:
    args = (decoder_of("llama"), LatentPrefix(noise(1, 1, 3, D)), noise(2, D), 1)
    jacobi = run_latent_rollout(*args, 3, project=project)
    assert_close(jacobi.cache.keys[1], run_latent_rollout(*args, None, project=project).cache.keys[1])
