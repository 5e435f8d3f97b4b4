"""Laws of gradients: through pieces, caches, bias and fed-back thoughts, and the same with activation checkpointing."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.models.hf_config import DropoutRates
from tests.core.readings import (
    FAMILIES,
    Reading,
    all_same,
    at_once,
    fresh,
    in_pieces,
    noise,
    readings,
    same,
    same_held,
    small,
)
from tests.tolerances import RECOMPUTE, error

pytestmark = pytest.mark.usefixtures("unchecked")
USUAL = pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])


def total(hidden: Tensor, state: KVCache, live: Tensor) -> Tensor:
    """A number to which every live output contributes with a weight of its own."""
    heads = [x.transpose(1, 2)[state.valid] for x in (*state.keys, *state.values)]
    return sum(((x * noise(i, *x.shape, dtype=x.dtype)).sum() for i, x in enumerate([hidden[live], *heads])), 0)


def gradients(
    decoder: Decoder, reading: Reading, way: Callable[[Decoder, Reading], list[DecoderOutput]]
) -> list[Tensor]:
    """With respect to the vectors and every parameter that the total depends on."""
    vectors = reading.vectors.clone().requires_grad_()
    passes = way(decoder, Reading(vectors, reading.live, reading.cuts))
    number = total(torch.cat([each.hidden_states for each in passes], 1), passes[-1].cache, reading.live)
    found = torch.autograd.grad(number, [vectors, *decoder.parameters()], allow_unused=True)
    return [x for x in found if x is not None]


@USUAL
@given(reading=readings(B=2, T=9))
@settings(max_examples=3)
def test_gradients_of_pieces_are_those_of_reading_at_once(name: str, reading: Reading) -> None:
    decoder = fresh(name).double()
    once = gradients(decoder, reading, lambda d, r: [at_once(d, r)])
    pieces = gradients(decoder, reading, in_pieces)
    assert len(once) > 10
    all_same(pieces, once)


@USUAL
@given(reading=readings(B=2, T=9), data=st.data())
@settings(max_examples=2)
def test_no_gradient_flows_to_dead_slots_or_to_the_future(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder = fresh(name).double()
    t = data.draw(st.integers(1, reading.vectors.shape[1]))
    vectors = reading.vectors.clone().requires_grad_()
    seen = at_once(decoder, Reading(vectors, reading.live, ()))
    early = reading.live[:, :t]
    if early.any():
        total(seen.hidden_states[:, :t], seen.cache.crop(t), early).backward()
        assert not vectors.grad[:, t:].any()
        assert not vectors.grad[~reading.live].any()
        assert vectors.grad[:, :t][early].any()


SLOW = ("mistral", "qwen2", "opt")  # what is theirs alone has gradient tests of its own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_finite_differences_through_two_reads_on_a_cache(name: str) -> None:
    decoder = small(name, **({"act": "gelu"} if name == "opt" else {}))  # ReLU has no derivative at its corner
    live = torch.tensor([[True, True, False], [False, True, True]])

    start, ways = [noise(i, 2, T, 8) for i, T in enumerate((3, 1, 2))], noise(5, 3, 8)

    def read(*moves: Tensor) -> tuple[Tensor, ...]:
        """Three reads, their vectors moved along a few directions; of what comes out, a few weighted sums."""
        first, second, third = (x + move @ ways for x, move in zip(start, moves[:3], strict=True))
        one = decoder(first, live=live)
        two = decoder(second, one.state)
        three = decoder(third, two.state, bias=moves[3])
        outs = (three.hidden, three.state.keys[1], three.state.values[0], two.hidden)
        return tuple(torch.stack([(x * noise(seed, *x.shape)).sum() for seed in (6, 7)]) for x in outs)

    moves = [torch.zeros(2, T, 3).double().requires_grad_() for T in (3, 1, 2)]
    assert gradcheck(read, (*moves, noise(4, 1, 2, 6).requires_grad_()), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_finite_differences_of_a_bias(name: str, backend: str) -> None:
    decoder = small(name)
    decoder.attn_implementation = backend
    vectors, live = noise(1, 2, 4, 8), torch.tensor([[True] * 4, [False, True, True, True]])

    def read(bias: Tensor) -> Tensor:
        return torch.einsum("nd,dk->nk", decoder(vectors, live=live, bias=bias).hidden[live], noise(3, 8, 2))

    for shape in ((2, 4, 4), (1, 1, 4)):
        assert gradcheck(read, noise(2, *shape).requires_grad_(), atol=1e-7)


@USUAL
@given(reading=readings(B=2, T=8), rounds=st.integers(1, 4))
@settings(max_examples=2)
def test_a_fed_back_loop_is_recomputation(name: str, reading: Reading, rounds: int) -> None:
    """Hidden states become input; the loop on a cache equals reading the question and all thoughts anew."""
    live = reading.live.clone()
    live[:, -1] = True
    decoder = fresh(name).double()
    with torch.no_grad():  # so that rounds do not amplify what is rounded in the last place
        for p in decoder.layers.parameters():
            p.mul_(0.4 if p.ndim == 2 else 1.0)

    def looped(question: Tensor) -> tuple[Tensor, Tensor, KVCache]:
        seen = decoder(question, live=live)
        thoughts: list[Tensor] = []
        for _ in range(rounds):
            thoughts.append(seen.hidden[:, -1:])
            seen = decoder(thoughts[-1], seen.state)
        return seen.hidden, torch.cat(thoughts, 1), seen.state

    def anew(question: Tensor) -> tuple[Tensor, Tensor, KVCache]:
        thoughts = question[:, :0]
        for m in range(rounds + 1):
            alive = torch.cat([live, torch.ones(len(live), m, dtype=torch.bool)], 1)
            seen = decoder(torch.cat([question, thoughts], 1), live=alive)
            if m < rounds:
                thoughts = torch.cat([thoughts, seen.hidden[:, -1:]], 1)
        return seen.hidden[:, -1:], thoughts, seen.state

    found = []
    for way in (looped, anew):
        question = reading.vectors.clone().requires_grad_()
        last, thoughts, state = way(question)
        weights = (last * noise(1, *last.shape)).sum()
        grads = torch.autograd.grad(weights, [question, *decoder.layers.parameters()])
        found.append((last, thoughts, state, grads))
    (last, thoughts, state, grads), (last_anew, thoughts_anew, state_anew, grads_anew) = found
    same(last, last_anew)
    same(thoughts, thoughts_anew)
    same_held(state, state_anew)
    all_same(grads, grads_anew)


@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in FAMILIES), ("llama", 2)])
@given(reading=readings(B=2, T=8))
@settings(max_examples=2)
def test_recompute_changes_no_number(name: str, every: int, reading: Reading) -> None:
    """Hidden states, keys, values and stages, and the gradients through each of them."""
    decoder = fresh(name).double().train()
    first = decoder(noise(9, len(reading.live), 3, 48)).state.detach()
    held = [x.clone().requires_grad_() for x in (*first.keys, *first.values)]
    L, found = len(first.keys), []
    for recompute in (0, every):
        decoder.activation_checkpointing = recompute
        vectors = reading.vectors.clone().requires_grad_()
        state = KVCache(tuple(held[:L]), tuple(held[L:]), first.positions, first.live)
        seen = decoder(vectors, state, live=reading.live, want=("q_rot", "mid.1", "hidden"))
        number = total(seen.hidden, seen.state, reading.live)
        number = number + sum(seen.activations[key].square().mean() for key in sorted(seen.activations))
        leaves = [vectors, *held, *decoder.parameters()]
        grads = [x for x in torch.autograd.grad(number, leaves, allow_unused=True) if x is not None]
        found.append([seen.hidden, *seen.state.keys, *seen.state.values, *seen.activations.values(), *grads])
    all_same(found[1], found[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_in_float32_and_its_dropout(name: str) -> None:
    decoder = fresh(name, dropout=DropoutRates(0.1, 0.1, 0.1)).train()
    found = []
    for recompute in (0, 1):
        decoder.activation_checkpointing = recompute
        torch.manual_seed(7)
        vectors = noise(1, 2, 7, 48, dtype=torch.float32).requires_grad_()
        seen = decoder(vectors)
        total(seen.hidden, seen.state, seen.state.live).backward()
        found.append((seen.hidden, vectors.grad))
    for got, asked in zip(found[1], found[0], strict=True):
        assert error(got, asked) <= RECOMPUTE


def test_recompute_frees_what_it_makes_again() -> None:
    """Fewer tensors are kept for the backward pass."""
    decoder, vectors = fresh("llama").train(), noise(1, 2, 7, 48, dtype=torch.float32)
    kept = []
    for recompute in (0, 1):
        decoder.activation_checkpointing, count = recompute, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, count=count: count.append(x.numel()) or x, lambda x: x):
            decoder(vectors)
        kept.append(sum(count))
    assert kept[1] < 0.6 * kept[0]


def test_recompute_is_for_training_only() -> None:
    decoder, vectors = fresh("llama").eval(), noise(1, 1, 3, 48, dtype=torch.float32)
    decoder.activation_checkpointing = 1
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        decoder(vectors)
    assert len(packed) > 40
