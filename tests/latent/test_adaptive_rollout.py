"""Jacobi iteration with an end for each row: against a loop over rows, with and without neighbours (float64)."""

import math

import pytest
import torch
from torch import Tensor

from laconic.batches import PassCounts
from laconic.errors import UsageError
from laconic.latent.adaptive_rollout import jacobi_residual, run_adaptive_rollout
from laconic.latent.rollout import LatentPrefix, LatentRollout, run_latent_rollout
from laconic.latent.thought_vectors import Projection
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder
from tests.models.fixtures import assert_close, fresh, noise, valid_slots

pytestmark = pytest.mark.usefixtures("unchecked")
D, M, T = 48, 4, 5
PROJECT = Projection(D, D, 0.0, torch.Generator().manual_seed(3)).double().requires_grad_(False)
MASK = torch.tensor([[False, False, True, True], [True] * 4, [False, True, True, True], [False, False, False, True]])
QUESTIONS = noise(7, 4, 4, D)


def small_weight_decoder(name: str) -> Decoder:
    """A decoder whose iterations converge at different speeds."""
    decoder = fresh(name).double().requires_grad_(False)
    for p in decoder.layers.parameters():
        p.mul_(0.6 if p.ndim == 2 else 1.0)
    return decoder


def rollout(decoder: Decoder, question: Tensor, mask: Tensor, tolerance: float, T: int = T) -> LatentRollout:
    """An adaptive rollout after questions that are read in the same pass."""
    prefix = LatentPrefix(question, attention_mask=mask)
    return run_adaptive_rollout(decoder, prefix, noise(2, D), M, T, project=PROJECT, tolerance=tolerance)


def rollout_by_row(decoder: Decoder, question: Tensor, tolerance: float) -> tuple[LatentRollout, int]:
    """One question alone: the shortest fixed rollout after which another iteration changes little."""
    prefix = LatentPrefix(question[None])
    for t in range(1, T + 1):
        fixed, longer = (run_latent_rollout(decoder, prefix, noise(2, D), M, n, project=PROJECT) for n in (t, t + 1))
        changes = [
            math.dist(longer.latents[0, m], fixed.latents[0, m]) / math.hypot(*fixed.latents[0, m]) for m in range(M)
        ]
        if t == T or max(changes) < tolerance:
            return fixed, t
    raise AssertionError


@pytest.mark.medium
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("tolerance", [0.9, 0.5, 0.3])
def test_run_adaptive_rollout_equals_loop_over_rows(name: str, tolerance: float) -> None:
    decoder = small_weight_decoder(name)
    got = rollout(decoder, QUESTIONS, MASK, tolerance)
    for row in range(4):
        alone, t = rollout_by_row(decoder, QUESTIONS[row, MASK[row]], tolerance)
        assert got.passes[row] == PassCounts(0, 1, t, 0)
        assert_close(got.latents[row], alone.latents[0])
        assert_close(got.hidden_states[row], alone.hidden_states[0])
        assert_close(got.begin_hidden[row], alone.begin_hidden[0])
        for x, y in zip(valid_slots(got.cache, row), valid_slots(alone.cache, 0), strict=True):
            assert_close(x, y)


def test_run_adaptive_rollout_ends_rows_apart() -> None:
    decoder = small_weight_decoder("llama")
    passes = rollout(decoder, QUESTIONS, MASK, 0.6).passes
    assert len(set(passes)) > 1, "choose a tolerance that tells rows apart"
    backwards = rollout(decoder, QUESTIONS.flip(0), MASK.flip(0), 0.6).passes
    assert backwards == passes[::-1]


def test_run_adaptive_rollout_calls_the_decoder_for_running_rows_only() -> None:
    decoder, sizes = small_weight_decoder("llama"), list[int]()

    def forward(x: Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(len(x))
        return decoder(x, *args, **kwargs)  # pyright: ignore

    got = run_adaptive_rollout(
        forward, LatentPrefix(QUESTIONS, None, MASK), noise(2, D), M, T, project=PROJECT, tolerance=0.6  # pyright: ignore
    )  # fmt: skip
    counts = [p.latent for p in got.passes]
    assert sizes == [4, *(sum(n >= t for n in counts) for t in range(1, max(counts) + 1))]


@pytest.mark.parametrize(("tolerance", "num_iterations"), [(0.0, T), (1e-300, 3), (1e9, 1)])
def test_run_adaptive_rollout_equals_the_fixed_one_bit_for_bit(tolerance: float, num_iterations: int) -> None:
    """Without a row that ends early (latents are not exact before iteration M), or all rows after the first."""
    decoder = small_weight_decoder("llama")
    prefix = LatentPrefix(QUESTIONS, None, MASK)
    fixed = run_latent_rollout(decoder, prefix, noise(2, D), M, num_iterations, project=PROJECT)
    got = rollout(decoder, QUESTIONS, MASK, tolerance, T if tolerance != 1e-300 else 3)
    assert got.passes == fixed.passes
    assert torch.equal(got.latents, fixed.latents)
    assert torch.equal(got.hidden_states, fixed.hidden_states)
    assert got.cache.is_equal(fixed.cache)


def test_jacobi_residual_is_the_largest_change_of_a_latent() -> None:
    z = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[30.0, 40.0], [0.0, 1.0]]])
    z_next = z + torch.tensor([[[0.0, 0.5], [0.0, 0.2]], [[0.0, 5.0], [0.0, 0.0]]])
    assert jacobi_residual(z, z_next).tolist() == pytest.approx([0.2, 0.1])


def test_latents_refuse_a_tolerance_without_iterations() -> None:
    decoder = fresh("llama")
    question = noise(1, 1, 2, 48).float()
    pause = LatentThoughts(decoder, num_latents=2, num_iterations=0)
    for latents in (pause, LatentThoughts(decoder, num_latents=2, schedule="sequential")):
        with pytest.raises(UsageError, match=r"jacobi_tolerance=0.1: there are no Jacobi iterations"):
            latents.think(decoder, question=question, tolerance=0.1)
    latents = LatentThoughts(decoder, num_latents=2, num_iterations=2)
    with pytest.raises(UsageError, match=r"jacobi_tolerance=-1"):
        latents.think(decoder, question=question, tolerance=-1)
    with pytest.raises(UsageError, match="intervention or records"):
        latents.think(decoder, question=question, tolerance=0.1, record_passes=True)
