"""Laws of positions, bias and back ends, and the traps of scaled_dot_product_attention."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models import attention
from laconic.models.decoder import Decoder
from tests.core.readings import (
    FAMILIES,
    SOME,
    VARIANTS,
    WINDOWLESS,
    Reading,
    at_once,
    decoder_of,
    fresh,
    noise,
    readings,
    same,
)
from tests.tolerances import BACKENDS, QUIET_ABSOLUTE, SHIFT_PER_POSITION, error, largest

TURNED = [name for name in VARIANTS if fresh(name).config.rope is not None and "dynamic" not in name]
ROPED = [name for name in TURNED if fresh(name).config.rope.kind == "default"]


@pytest.mark.parametrize("name", ROPED)
@given(reading=readings(dead=False), shift=st.integers(1, 3000))
@settings(max_examples=4)
def test_a_constant_added_to_all_positions_changes_no_logits(name: str, reading: Reading, shift: int) -> None:
    decoder = decoder_of(name)
    B, T = reading.live.shape
    p = torch.arange(T).expand(B, T)
    near, far = (decoder.logits(decoder(reading.vectors, positions=p + more).hidden) for more in (0, shift))
    assert largest(far, near) <= (shift + T) * SHIFT_PER_POSITION
    moved = p.clone()
    moved[:, -1] += 2
    assert largest(decoder.logits(decoder(reading.vectors, positions=moved).hidden), near) > SHIFT_PER_POSITION * T


@pytest.mark.parametrize("name", SOME)
@given(reading=readings(B=2), data=st.data())
@settings(max_examples=3)
def test_a_bias_of_zero_is_no_bias(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    first = decoder(noise(1, len(reading.live), 3, 48)).state
    B, T = reading.live.shape
    bias = torch.zeros(data.draw(st.sampled_from([1, B])), data.draw(st.sampled_from([1, T])), T + 3).double()
    plain = decoder(reading.vectors, first, live=reading.live)
    same(decoder(reading.vectors, first, live=reading.live, bias=bias).hidden[reading.live], plain.hidden[reading.live])
    assert largest(decoder(reading.vectors, first, bias=bias + noise(2, *bias.shape)).hidden, plain.hidden) > 1e-3


@pytest.mark.parametrize("name", WINDOWLESS)
@given(reading=readings(B=2))
@settings(max_examples=4)
def test_a_large_negative_bias_is_a_dead_slot(name: str, reading: Reading) -> None:
    decoder = decoder_of(name)
    B, T = reading.live.shape
    positions = torch.arange(T).expand(B, T)
    bias = torch.zeros(B, 1, T, dtype=torch.float64).masked_fill(~reading.live[:, None], -1e4)
    dead = decoder(reading.vectors, live=reading.live, positions=positions)
    low = decoder(reading.vectors, positions=positions, bias=bias)
    same(low.hidden[reading.live], dead.hidden[reading.live])


@pytest.mark.parametrize("name", SOME)
@given(reading=readings(T=9), biased=st.booleans(), cut=st.integers(0, 4))
@settings(max_examples=3)
def test_sdpa_is_eager(name: str, reading: Reading, biased: bool, cut: int) -> None:
    found = by_back_ends(name, ("sdpa", "eager"), reading.to(torch.float32), biased, cut)
    assert error(found["sdpa"], found["eager"]) <= BACKENDS


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama, windows", "gpt2"])
def test_flex_is_eager(name: str) -> None:
    live = torch.tensor([[False, True, True, False, True], [True, True, True, True, False]])
    reading = Reading(noise(1, 2, 5, 48, dtype=torch.float32), live, ())
    for biased, cut in ((True, 2), (False, 2), (False, 0)):
        found = by_back_ends(name, ("flex", "eager"), reading, biased, cut)
        assert error(found["flex"], found["eager"]) <= BACKENDS


def by_back_ends(name: str, names: tuple[str, ...], reading: Reading, biased: bool, cut: int) -> dict[str, Tensor]:
    """What live slots become by each back end, on a state of the first `cut` slots and under a bias or none."""
    decoder = fresh(name).requires_grad_(False)
    state = decoder(reading.vectors[:, :cut], live=reading.live[:, :cut]).state if cut else None
    T = reading.vectors.shape[1]
    bias = noise(3, 1, T, T + min(T, cut), dtype=torch.float32) if biased else None
    found = {}
    for backend in names:
        decoder.attn_implementation = backend
        found[backend] = decoder(reading.vectors, state, live=reading.live, bias=bias).hidden[reading.live]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_mask_and_with_one_are_the_same(name: str) -> None:
    """SDPA is called in three ways (causal, one query, a mask); all are one function."""
    decoder = decoder_of(name)
    vectors = noise(1, 2, 8, 48)
    causal, masked = decoder(vectors), decoder(vectors, live=torch.ones(2, 8, dtype=torch.bool), bias=zeros(8, 8))
    same(masked.hidden, causal.hidden)
    one, same_one = decoder(vectors[:, :1], causal.state), decoder(vectors[:, :1], causal.state, bias=zeros(1, 9))
    same(same_one.hidden, one.hidden)


def zeros(T: int, P: int) -> Tensor:
    return torch.zeros(1, T, P, dtype=torch.float64)


def test_a_window_counts_the_query_and_live_slots_only() -> None:
    live = torch.tensor([[True] * 6, [True, False, True, True, False, True]])
    probs = decoder_of("mistral, window of 1")(noise(1, 2, 6, 48), attention_mask=live, capture=("probs",)).activations
    n = live.cumsum(1)
    for layer, window in enumerate((3, 1)):
        near = (n[:, :, None] - n[:, None, :] < window) & live[:, None, :] & torch.ones(6, 6).bool().tril()
        seen = (probs[f"probs.{layer}"] > 0).any(1)
        assert torch.equal(seen[live], near[live])


def test_which_mask_is_made() -> None:
    """None where none is needed, one a window else: causality has no mask, and a window that holds all is none."""

    def sights(decoder: Decoder, T: int, S: int, live: bool) -> list[attention.AttentionMask]:
        alive = torch.ones(1, S + T, dtype=torch.bool)
        p = torch.arange(S + T)[None]
        frame = decoder.build_context(p, alive, S, None, torch.float32, all_valid=live, needs_scores=False)
        return list(frame.masks)

    decoder = decoder_of("llama, windows", torch.float32)
    assert [(s.causal, s.mask is None) for s in sights(decoder, 5, 0, True)] == [(True, True)] * 2
    assert [(s.causal, s.mask is None) for s in sights(decoder, 6, 0, True)] == [(True, True), (False, False)]
    assert [(s.causal, s.mask is None) for s in sights(decoder, 1, 4, True)] == [(False, True)] * 2
    assert [(s.causal, s.mask is None) for s in sights(decoder, 2, 3, True)] == [(False, False)] * 2
    assert [(s.causal, s.mask is None) for s in sights(decoder, 5, 0, False)] == [(False, False)] * 2
    assert sights(decoder, 2, 3, True)[0].mask.shape == (1, 1, 2, 5)


# Traps: what torch does, and that we do not fall in.


def test_is_causal_is_upper_left_aligned_and_we_do_not_use_it_on_a_state() -> None:
    q, k = noise(1, 1, 1, 2, 4), noise(2, 1, 1, 5, 4)
    trap = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    corner = F.scaled_dot_product_attention(q, k, k, torch.ones(2, 5, dtype=torch.bool).tril())
    right = F.scaled_dot_product_attention(q, k, k, torch.ones(2, 5, dtype=torch.bool).tril(3))
    same(trap, corner)
    assert largest(trap, right) > 1e-2
    decoder = decoder_of("llama")
    vectors = noise(3, 1, 5, 48)
    same(decoder(vectors[:, 3:], decoder(vectors[:, :3]).state).hidden, decoder(vectors).hidden[:, 3:])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(backend: str) -> None:
    q, k, v = (noise(seed, 1, 2, 3, 4).requires_grad_() for seed in (1, 2, 3))
    live = torch.tensor([[False, True, True]])
    sight = attention.build_attention_mask(
        live, 0, all_valid=False, window=None, bias=None, sdpa_only=False, dtype=torch.float64
    )
    context = attention.ATTENTION_BACKENDS[backend](q, k, v, 0.5, sight, 0.0)
    assert torch.equal(context[0, 0], torch.zeros(8, dtype=torch.float64))
    context.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert torch.softmax(torch.full((3,), -torch.inf), 0).isnan().all()  # the trap


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_padded_query_rows_give_finite_outputs_and_gradients(name: str, backend: str) -> None:
    decoder = fresh(name)
    decoder.attn_implementation = backend
    vectors = noise(1, 2, 6, 48, dtype=torch.float32).requires_grad_()
    live = torch.tensor([[False] * 4 + [True] * 2, [True] * 3 + [False] * 3])
    seen = decoder(vectors, live=live)
    assert seen.hidden.isfinite().all()
    seen.hidden[live].square().sum().backward()
    assert vectors.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in decoder.parameters() if p.grad is not None)
    assert not vectors.grad[~live].any()


def test_a_float_mask_passes_gradients_to_the_bias() -> None:
    decoder = fresh("llama").requires_grad_(False)
    vectors = noise(1, 1, 64, 48, dtype=torch.float32)
    gradients = []
    for backend in ("sdpa", "eager"):
        decoder.attn_implementation = backend
        bias = torch.zeros(1, 64, 64, requires_grad=True)
        decoder(vectors, bias=bias).hidden.square().mean().backward()
        gradients.append(bias.grad)
    assert gradients[1].abs().max() > 1e3 * QUIET_ABSOLUTE
    assert error(gradients[0], gradients[1]) <= BACKENDS


def test_flex_refuses_what_it_cannot_do() -> None:
    decoder = fresh("llama")
    decoder.attn_implementation = "flex"
    with pytest.raises(ValueError, match=r"^flex attention has no gradient on the CPU; use sdpa$"):
        decoder(noise(1, 1, 3, 48, dtype=torch.float32))
    q = noise(1, 1, 2, 3, 4)
    live = torch.ones(1, 3, dtype=torch.bool)
    sight = attention.build_attention_mask(
        live, 0, all_valid=True, window=None, bias=None, sdpa_only=False, dtype=torch.float64
    )
    with pytest.raises(ValueError, match=r"^flex attention has no dropout; set dropout to 0 or use sdpa$"):
        attention.flex_attention_forward(q, q, q, 1.0, sight, 0.1)


def test_low_precision_back_ends_are_compared_by_nobody() -> None:
    """bfloat16: sdpa and eager are apart by hundreds of float32 floors, so such a comparison would say nothing."""
    vectors, found = noise(1, 1, 20, 48, dtype=torch.bfloat16), []
    decoder = fresh("llama").bfloat16().requires_grad_(False)
    for backend in ("sdpa", "eager"):
        decoder.attn_implementation = backend
        found.append(decoder.logits(decoder(vectors).hidden))
    assert BACKENDS < error(*found) < 0.1
    assert (
        at_once(decoder, Reading(vectors, torch.ones(1, 20, dtype=torch.bool), ())).hidden_states.dtype
        == torch.bfloat16
    )
