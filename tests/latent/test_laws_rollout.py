"""Laws of the rollout for every family: Jacobi against sequential, padding, rows, gradients (float64)."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from laconic.latent.rollout import LatentPrefix, LatentRollout, run_latent_rollout
from laconic.latent.thought_vectors import Projection
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from tests.models.fixtures import (
    FAMILIES,
    assert_all_close,
    assert_close,
    assert_same_cache,
    fresh,
    masks,
    noise,
    small,
    valid_slots,
)

pytestmark = pytest.mark.usefixtures("unchecked")
EVERY = pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])
D = 48
PROJECT = Projection(D, D, 0.0, torch.Generator().manual_seed(3)).double().requires_grad_(False)


@cache
def small_weight_decoder(name: str) -> Decoder:
    """A decoder with small weights, in which rounding errors do not grow over iterations."""
    decoder = fresh(name).double().requires_grad_(False)
    for p in decoder.layers.parameters():
        p.mul_(0.4 if p.ndim == 2 else 1.0)
    return decoder


@st.composite
def questions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Up to three questions of up to six vectors, and their mask."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    return noise(draw(st.integers(0, 999)), B, T, D), torch.tensor([draw(masks(T)) for _ in range(B)])


def rollout_after(
    name: str, question: Tensor, mask: Tensor, M: int, num_iterations: int | None, **named: Any
) -> LatentRollout:
    """A rollout after a question that is read first."""
    decoder = named.pop("decoder", None) or small_weight_decoder(name)
    state = named.pop("state", None) or decoder(question, attention_mask=mask).cache
    prefix = LatentPrefix(noise(1001, D).expand(len(question), 1, D), state)
    named = {"project": PROJECT, **named}
    return run_latent_rollout(decoder, prefix, noise(1002, D), M, num_iterations, **named)


def same_rollout(got: LatentRollout, inputs: LatentRollout) -> None:
    for name in ("latents", "hidden_states", "begin_hidden"):
        assert_close(getattr(got, name), getattr(inputs, name))
    assert_same_cache(got.cache, inputs.cache)


def slots(state: KVCache, start: int, end: int) -> Tensor:
    """Keys and values of all layers at the slots."""
    return torch.stack([x[:, :, start:end] for x in (*state.keys, *state.values)])


@EVERY
@given(inputs=questions(), M=st.integers(1, 4))
@settings(max_examples=3)
def test_rollout_iterations_complete_one_latent(name: str, inputs: tuple[Tensor, Tensor], M: int) -> None:
    question, mask = inputs
    whole, got = (
        rollout_after(name, question, mask, M, None),
        rollout_after(name, question, mask, M, M + 2, record_passes=True),
    )
    first = question.shape[1] + 1
    for t in range(M + 2):
        vectors, num_done = min(t + 1, M), min(t, M)
        assert_close(got.records[t + 1].latents[:, :vectors], whole.latents[:, :vectors])
        if num_done:
            assert_close(
                slots(got.records[t].cache, first, first + num_done), slots(whole.cache, first, first + num_done)
            )
        if t < M:
            late = slots(got.records[t].cache, first + t, first + t + 1)
            assert not torch.allclose(late, slots(whole.cache, first + t, first + t + 1), rtol=1e-3)
    same_rollout(got, whole)


@EVERY
@given(inputs=questions(), M=st.integers(1, 4), more=st.integers(0, 2))
@settings(max_examples=2)
def test_rollout_as_many_iterations_as_latents_equals_sequential(
    name: str, inputs: tuple[Tensor, Tensor], M: int, more: int
) -> None:
    question, mask = inputs
    same_rollout(rollout_after(name, question, mask, M, M + more), rollout_after(name, question, mask, M, None))
    if M > 1:
        short = rollout_after(name, question, mask, M, M - 1)
        assert not torch.allclose(
            short.hidden_states[:, -1], rollout_after(name, question, mask, M, M).hidden_states[:, -1]
        )


def unused(x: Tensor) -> Tensor:
    """A projection that must not be called."""
    raise AssertionError


@EVERY
@given(inputs=questions(), M=st.integers(1, 4))
@settings(max_examples=2)
def test_rollout_without_iterations_reads_placeholders(name: str, inputs: tuple[Tensor, Tensor], M: int) -> None:
    question, mask = inputs
    got, decoder = rollout_after(name, question, mask, M, 0, project=unused), small_weight_decoder(name)
    B = len(question)
    bot, slot = noise(1001, D).expand(B, 1, D), noise(1002, D).expand(B, M, D)
    seen = decoder(torch.cat([bot, slot], 1), decoder(question, attention_mask=mask).cache)
    assert got.cache.is_equal(seen.cache)
    assert torch.equal(got.latents, slot)
    assert torch.equal(got.hidden_states, seen.hidden_states[:, 1:])


@EVERY
@given(inputs=questions(), M=st.integers(1, 4), num_iterations=st.integers(0, 3) | st.none())
@settings(max_examples=3)
def test_rollout_padding_and_other_rows_change_nothing(
    name: str, inputs: tuple[Tensor, Tensor], M: int, num_iterations: int | None
) -> None:
    question, mask = inputs
    apart, B = rollout_after(name, question.masked_fill(~mask[..., None], 7.0), mask, M, num_iterations), len(question)
    prefix = torch.cat([question, noise(1001, D).expand(B, 1, D)], 1)
    alive = torch.cat([mask, torch.ones(B, 1, dtype=torch.bool)], 1)
    at_once = run_latent_rollout(
        small_weight_decoder(name),
        LatentPrefix(prefix, None, alive),
        noise(1002, D),
        M,
        num_iterations,
        project=PROJECT,
    )
    same_rollout(at_once, apart)
    assert at_once.passes == apart.passes
    for row in range(B):
        one = question[row : row + 1, mask[row]]
        alone = rollout_after(name, one, torch.ones(one.shape[:2], dtype=torch.bool), M, num_iterations)
        assert_close(apart.latents[row], alone.latents[0])
        assert_close(apart.hidden_states[row], alone.hidden_states[0])
        for x, y in zip(valid_slots(apart.cache, row), valid_slots(alone.cache, 0), strict=True):
            assert_close(x, y)


@EVERY
@given(inputs=questions(), m=st.integers(1, 3), num_iterations=st.sampled_from([3, None]))
@settings(max_examples=2)
def test_rollout_is_causal(name: str, inputs: tuple[Tensor, Tensor], m: int, num_iterations: int | None) -> None:
    def intervene(z: Tensor, t: int) -> Tensor:
        late = torch.arange(z.shape[1]) >= m if num_iterations is not None else torch.tensor([t > m])
        return torch.where(late[:, None], 3 * z + 1, z)

    plain, edited = (rollout_after(name, *inputs, 4, num_iterations, intervention=e) for e in (None, intervene))
    end = inputs[0].shape[1] + 1 + m
    assert_close(edited.hidden_states[:, :m], plain.hidden_states[:, :m])
    assert_same_cache(edited.cache.crop(end), plain.cache.crop(end))
    assert not torch.allclose(edited.hidden_states[:, m:], plain.hidden_states[:, m:])


def test_rollout_ignores_the_last_placeholders_output() -> None:
    calls: list[Tensor] = []

    def reader(vectors: Tensor, *rest: Any, **named: Any) -> DecoderOutput:
        seen = small_weight_decoder("llama")(vectors, *rest, **named)
        calls.append(vectors)
        if len(calls) > 1:
            return seen
        return seen._replace(hidden_states=torch.cat([seen.hidden_states[:, :-1], seen.hidden_states[:, -1:] + 9], 1))

    question, mask = noise(1, 2, 4, D), torch.ones(2, 4, dtype=torch.bool)
    state = small_weight_decoder("llama")(question, attention_mask=mask).cache
    got = rollout_after("llama", question, mask, 3, 2, decoder=reader, state=state)
    assert len(calls) == 3
    same_rollout(got, rollout_after("llama", question, mask, 3, 2))


def outcome(got: LatentRollout) -> list[Tensor]:
    """Everything a gradient may come from."""
    return [got.latents, got.hidden_states, got.begin_hidden, *got.cache.keys, *got.cache.values]


@pytest.mark.medium
@pytest.mark.parametrize("num_iterations", [0, 2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_finite_differences(name: str, num_iterations: int | None) -> None:
    """From thoughts, hidden states and every key and value to prefix, slot, projection and the question's cache."""
    decoder = small(name, **({"activation": "gelu"} if name == "opt" else {}))  # ReLU has no derivative at its corner
    project = Projection(8, 8, 0.0, torch.Generator().manual_seed(1)).double().requires_grad_(False)
    weights = dict(project.named_parameters())
    past = decoder(noise(1, 2, 3, 8), attention_mask=torch.tensor([[True] * 3, [False, True, True]])).cache
    L, slot = len(past.keys), noise(3, 8)
    start = [noise(2, 2, 1, 8), *weights.values(), *past.keys, *past.values] + (
        [] if num_iterations is None else [slot]
    )
    ways = [noise(i, *x.shape) for i, x in enumerate(start)]

    def read(moves: Tensor) -> tuple[Tensor, ...]:
        """Every input moved along a direction of its own; of what comes out, weighted sums."""
        prefix, *rest = (x + move * way for x, move, way in zip(start, moves, ways, strict=True))
        named, rest = dict(zip(weights, rest, strict=False)), rest[len(weights) :]
        state = KVCache(tuple(rest[:L]), tuple(rest[L : 2 * L]), past.positions, past.valid)
        got = run_latent_rollout(
            decoder,
            LatentPrefix(prefix, state),
            slot if num_iterations is None else rest[-1],
            3,
            num_iterations,
            project=lambda x: torch.func.functional_call(project, named, (x,)),
        )
        return tuple((x * noise(7 + i, *x.shape)).sum() for i, x in enumerate(outcome(got)))

    assert gradcheck(read, torch.zeros(len(start)).double().requires_grad_(), atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("num_iterations", [0, 2, None])
def test_gradients_reach_all_that_was_read_and_nothing_else(num_iterations: int | None) -> None:
    decoder = fresh("llama").double().requires_grad_(False)
    project = Projection(D, D, 0.0, torch.Generator().manual_seed(1)).double()
    question = noise(1, 2, 4, D).requires_grad_()
    prefix, slot = noise(2, 2, 1, D).requires_grad_(), noise(3, D).requires_grad_()
    mask = torch.tensor([[True] * 4, [False, True, True, False]])
    after = LatentPrefix(prefix, decoder(question, attention_mask=mask).cache)
    got = run_latent_rollout(decoder, after, slot, 3, num_iterations, project=project)
    (got.cache.keys[1][:, :, -3:].square().sum() + got.hidden_states.sum()).backward()
    assert question.grad[mask].any()
    assert not question.grad[~mask].any()
    assert prefix.grad.any()
    assert (slot.grad is None) == (num_iterations is None)
    assert [p.grad is None or not p.grad.any() for p in project.parameters()] == [num_iterations == 0] * 6
    assert all((p.grad is None) == (num_iterations == 0) for p in project.parameters())


@pytest.mark.parametrize("num_iterations", [2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_changes_no_gradient(name: str, num_iterations: int | None) -> None:
    decoder, results = fresh(name).double().train(), []
    for recompute in (0, 1):
        decoder.activation_checkpointing = recompute
        question, mask = noise(1, 2, 4, D).requires_grad_(), torch.tensor([[True] * 4, [False] * 2 + [True] * 2])
        got = rollout_after(name, question, mask, 3, num_iterations, decoder=decoder)
        number = sum((x * noise(i, *x.shape)).sum() for i, x in enumerate(outcome(got)))
        grads = torch.autograd.grad(number, [question, *decoder.layers.parameters()], allow_unused=True)
        results.append([x for x in (*outcome(got), *grads) if x is not None])
    assert_all_close(results[1], results[0])
