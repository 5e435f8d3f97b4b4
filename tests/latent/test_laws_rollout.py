"""Laws of the rollout, for every family: rounds against one after the other, padding, rows, gradients (float64)."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from laconic.latent.rollout import LatentRollout, run_latent_rollout
from laconic.latent.thoughts import Projection
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from tests.core.readings import FAMILIES, all_same, fresh, held, noise, patterns, same, same_held, small

pytestmark = pytest.mark.usefixtures("unchecked")
EVERY = pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])
D = 48
PROJECT = Projection(D, D, 0.0, torch.Generator().manual_seed(3)).double().requires_grad_(False)


@cache
def tame(name: str) -> Decoder:
    """A decoder through whose loops what is rounded in the last place does not grow."""
    decoder = fresh(name).double().requires_grad_(False)
    for p in decoder.layers.parameters():
        p.mul_(0.4 if p.ndim == 2 else 1.0)
    return decoder


@st.composite
def questions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Up to three questions of up to six vectors, and which of them are live."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    return noise(draw(st.integers(0, 999)), B, T, D), torch.tensor([draw(patterns(T)) for _ in range(B)])


def thought(name: str, question: Tensor, live: Tensor, M: int, rounds: int | None, **named: Any) -> LatentRollout:
    """A rollout behind a question that is read first."""
    decoder = named.pop("decoder", None) or tame(name)
    state = named.pop("state", None) or decoder(question, live=live).state
    bot = noise(1001, D).expand(len(question), 1, D)
    mode = "sequential" if rounds is None else "jacobi"
    named = {"project": PROJECT, **named}
    return run_latent_rollout(decoder, bot, noise(1002, D), M, rounds, cache=state, schedule=mode, **named)


def same_rollout(got: LatentRollout, asked: LatentRollout) -> None:
    for name in ("thoughts", "hidden", "start"):
        same(getattr(got, name), getattr(asked, name))
    same_held(got.cache, asked.cache)


def slots(state: KVCache, start: int, end: int) -> Tensor:
    """Keys and values of all layers at the slots."""
    return torch.stack([x[:, :, start:end] for x in (*state.keys, *state.values)])


@EVERY
@given(asked=questions(), M=st.integers(1, 4))
@settings(max_examples=3)
def test_each_pass_makes_one_more_slot_that_of_one_after_the_other(
    name: str, asked: tuple[Tensor, Tensor], M: int
) -> None:
    question, live = asked
    whole, got = thought(name, question, live, M, None), thought(name, question, live, M, M + 2, trace=True)
    first = question.shape[1] + 1
    for t in range(M + 2):
        vectors, made = min(t + 1, M), min(t, M)
        same(got.records[t + 1].latents[:, :vectors], whole.latents[:, :vectors])
        if made:
            same(slots(got.records[t].cache, first, first + made), slots(whole.cache, first, first + made))
        if t < M:
            late = slots(got.records[t].cache, first + t, first + t + 1)
            assert not torch.allclose(late, slots(whole.cache, first + t, first + t + 1), rtol=1e-3)
    same_rollout(got, whole)


@EVERY
@given(asked=questions(), M=st.integers(1, 4), more=st.integers(0, 2))
@settings(max_examples=2)
def test_from_as_many_rounds_as_thoughts_it_is_one_after_the_other(
    name: str, asked: tuple[Tensor, Tensor], M: int, more: int
) -> None:
    question, live = asked
    same_rollout(thought(name, question, live, M, M + more), thought(name, question, live, M, None))
    if M > 1:
        short = thought(name, question, live, M, M - 1)
        assert not torch.allclose(short.hidden_states[:, -1], thought(name, question, live, M, M).hidden_states[:, -1])


def unused(x: Tensor) -> Tensor:
    """A projection that is not to be called."""
    raise AssertionError


@EVERY
@given(asked=questions(), M=st.integers(1, 4))
@settings(max_examples=2)
def test_no_round_is_placeholders_read(name: str, asked: tuple[Tensor, Tensor], M: int) -> None:
    question, live = asked
    got, decoder = thought(name, question, live, M, 0, project=unused), tame(name)
    B = len(question)
    bot, slot = noise(1001, D).expand(B, 1, D), noise(1002, D).expand(B, M, D)
    seen = decoder(torch.cat([bot, slot], 1), decoder(question, live=live).state)
    assert got.cache.equal(seen.state)
    assert torch.equal(got.latents, slot)
    assert torch.equal(got.hidden_states, seen.hidden[:, 1:])


@EVERY
@given(asked=questions(), M=st.integers(1, 4), rounds=st.integers(0, 3) | st.none())
@settings(max_examples=3)
def test_padding_other_rows_and_the_way_of_reading_change_nothing(
    name: str, asked: tuple[Tensor, Tensor], M: int, rounds: int | None
) -> None:
    question, live = asked
    apart, B = thought(name, question.masked_fill(~live[..., None], 7.0), live, M, rounds), len(question)
    prefix = torch.cat([question, noise(1001, D).expand(B, 1, D)], 1)
    alive = torch.cat([live, torch.ones(B, 1, dtype=torch.bool)], 1)
    mode = "sequential" if rounds is None else "jacobi"
    at_once = run_latent_rollout(
        tame(name), prefix, noise(1002, D), M, rounds, project=PROJECT, attention_mask=alive, schedule=mode
    )
    same_rollout(at_once, apart)
    assert at_once.passes == apart.passes
    for row in range(B):
        one = question[row : row + 1, live[row]]
        alone = thought(name, one, torch.ones(one.shape[:2], dtype=torch.bool), M, rounds)
        same(apart.latents[row], alone.latents[0])
        same(apart.hidden_states[row], alone.hidden_states[0])
        for x, y in zip(held(apart.cache, row), held(alone.cache, 0), strict=True):
            same(x, y)


@EVERY
@given(asked=questions(), m=st.integers(1, 3), rounds=st.sampled_from([3, None]))
@settings(max_examples=2)
def test_a_thought_depends_on_none_that_follows(
    name: str, asked: tuple[Tensor, Tensor], m: int, rounds: int | None
) -> None:
    def edit(z: Tensor, t: int) -> Tensor:
        late = torch.arange(z.shape[1]) >= m if rounds is not None else torch.tensor([t > m])
        return torch.where(late[:, None], 3 * z + 1, z)

    plain, edited = (thought(name, *asked, 4, rounds, edit=e) for e in (None, edit))
    end = asked[0].shape[1] + 1 + m
    same(edited.hidden_states[:, :m], plain.hidden_states[:, :m])
    same_held(edited.cache.crop(end), plain.cache.crop(end))
    assert not torch.allclose(edited.hidden_states[:, m:], plain.hidden_states[:, m:])


def test_what_the_last_placeholder_gives_is_not_used() -> None:
    calls: list[Tensor] = []

    def reader(vectors: Tensor, *rest: Any, **named: Any) -> DecoderOutput:
        seen = tame("llama")(vectors, *rest, **named)
        calls.append(vectors)
        if len(calls) > 1:
            return seen
        return seen._replace(hidden=torch.cat([seen.hidden[:, :-1], seen.hidden[:, -1:] + 9], 1))

    question, live = noise(1, 2, 4, D), torch.ones(2, 4, dtype=torch.bool)
    state = tame("llama")(question, attention_mask=live).state
    got = thought("llama", question, live, 3, 2, decoder=reader, state=state)
    assert len(calls) == 3
    same_rollout(got, thought("llama", question, live, 3, 2))


def outcome(got: LatentRollout) -> list[Tensor]:
    """Everything a gradient may come from."""
    return [got.latents, got.hidden_states, got.begin_hidden, *got.cache.keys, *got.cache.values]


@pytest.mark.parametrize("rounds", [0, 2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_finite_differences(name: str, rounds: int | None) -> None:
    """From thoughts, hidden states and every key and value to prefix, slot, projection and the question's cache."""
    decoder = small(name, **({"act": "gelu"} if name == "opt" else {}))  # ReLU has no derivative at its corner
    project = Projection(8, 8, 0.0, torch.Generator().manual_seed(1)).double().requires_grad_(False)
    weights = dict(project.named_parameters())
    held = decoder(noise(1, 2, 3, 8), live=torch.tensor([[True] * 3, [False, True, True]])).state
    L, slot = len(held.keys), noise(3, 8)
    start = [noise(2, 2, 1, 8), *weights.values(), *held.keys, *held.values] + ([] if rounds is None else [slot])
    ways = [noise(i, *x.shape) for i, x in enumerate(start)]

    def read(moves: Tensor) -> tuple[Tensor, ...]:
        """Every input moved along a direction of its own; of what comes out, weighted sums."""
        prefix, *rest = (x + move * way for x, move, way in zip(start, moves, ways, strict=True))
        named, rest = dict(zip(weights, rest, strict=False)), rest[len(weights) :]
        state = KVCache(tuple(rest[:L]), tuple(rest[L : 2 * L]), held.positions, held.live)
        got = run_latent_rollout(
            decoder,
            prefix,
            slot if rounds is None else rest[-1],
            3,
            rounds,
            project=lambda x: torch.func.functional_call(project, named, (x,)),
            cache=state,
            schedule="sequential" if rounds is None else "jacobi",
        )
        return tuple((x * noise(7 + i, *x.shape)).sum() for i, x in enumerate(outcome(got)))

    assert gradcheck(read, torch.zeros(len(start)).double().requires_grad_(), atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("rounds", [0, 2, None])
def test_gradients_reach_all_that_was_read_and_nothing_else(rounds: int | None) -> None:
    decoder = fresh("llama").double().requires_grad_(False)
    project = Projection(D, D, 0.0, torch.Generator().manual_seed(1)).double()
    question = noise(1, 2, 4, D).requires_grad_()
    prefix, slot = noise(2, 2, 1, D).requires_grad_(), noise(3, D).requires_grad_()
    live = torch.tensor([[True] * 4, [False, True, True, False]])
    state, mode = decoder(question, live=live).state, "sequential" if rounds is None else "jacobi"
    got = run_latent_rollout(decoder, prefix, slot, 3, rounds, project=project, cache=state, schedule=mode)
    (got.cache.keys[1][:, :, -3:].square().sum() + got.hidden_states.sum()).backward()
    assert question.grad[live].any()
    assert not question.grad[~live].any()
    assert prefix.grad.any()
    assert (slot.grad is None) == (rounds is None)
    assert [p.grad is None or not p.grad.any() for p in project.parameters()] == [rounds == 0] * 6
    assert all((p.grad is None) == (rounds == 0) for p in project.parameters())


@pytest.mark.parametrize("rounds", [2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_changes_no_gradient(name: str, rounds: int | None) -> None:
    decoder, found = fresh(name).double().train(), []
    for recompute in (0, 1):
        decoder.activation_checkpointing = recompute
        question, live = noise(1, 2, 4, D).requires_grad_(), torch.tensor([[True] * 4, [False] * 2 + [True] * 2])
        got = thought(name, question, live, 3, rounds, decoder=decoder)
        number = sum((x * noise(i, *x.shape)).sum() for i, x in enumerate(outcome(got)))
        grads = torch.autograd.grad(number, [question, *decoder.layers.parameters()], allow_unused=True)
        found.append([x for x in (*outcome(got), *grads) if x is not None])
    all_same(found[1], found[0])
