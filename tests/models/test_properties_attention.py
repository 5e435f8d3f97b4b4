"""Properties of positions, bias and attention backends, and pitfalls of scaled_dot_product_attention."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models import attention
from laconic.models.block import build_context
from laconic.models.decoder import Decoder
from laconic.models.ops import attention_backends
from laconic.models.ops.upcast_attention import MAX_UPCAST_SLOTS
from tests.models.fixtures import (
    FAMILIES,
    SOME,
    VARIANTS,
    WINDOWLESS,
    EmbedBatch,
    assert_close,
    decoder_of,
    embed_batches,
    fresh,
    noise,
)
from tests.tolerances import BACKENDS, QUIET_ABSOLUTE, SHIFT_PER_POSITION, error, largest

TURNED = [name for name in VARIANTS if fresh(name).config.rope is not None and "dynamic" not in name]
ROPED = [name for name in TURNED if fresh(name).config.rope.kind == "default"]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("name", ROPED)
@given(batch=embed_batches(padding=False), shift=st.integers(1, 3000))
@settings(max_examples=4)
def test_rope_is_invariant_to_a_constant_shift(name: str, batch: EmbedBatch, shift: int) -> None:
    decoder = decoder_of(name)
    B, T = batch.attention_mask.shape
    p = torch.arange(T).expand(B, T)
    near, far = (
        decoder.logits(decoder(batch.inputs_embeds, position_ids=p + more).hidden_states) for more in (0, shift)
    )
    assert largest(far, near) <= (shift + T) * SHIFT_PER_POSITION
    moved = p.clone()
    moved[:, -1] += 2
    logits = decoder.logits(decoder(batch.inputs_embeds, position_ids=moved).hidden_states)
    assert largest(logits, near) > SHIFT_PER_POSITION * T


@pytest.mark.parametrize("name", SOME)
@given(batch=embed_batches(B=2), data=st.data())
@settings(max_examples=3)
def test_attention_bias_of_zero_changes_nothing(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    first = decoder(noise(1, len(batch.attention_mask), 3, 48)).cache
    B, T = batch.attention_mask.shape
    bias = torch.zeros(data.draw(st.sampled_from([1, B])), data.draw(st.sampled_from([1, T])), T + 3).double()
    plain = decoder(batch.inputs_embeds, first, attention_mask=batch.attention_mask)
    biased = decoder(batch.inputs_embeds, first, attention_mask=batch.attention_mask, attention_bias=bias)
    assert_close(biased.hidden_states[batch.attention_mask], plain.hidden_states[batch.attention_mask])
    other = decoder(batch.inputs_embeds, first, attention_bias=bias + noise(2, *bias.shape))
    assert largest(other.hidden_states, plain.hidden_states) > 1e-3


@pytest.mark.parametrize("name", WINDOWLESS)
@given(batch=embed_batches(B=2))
@settings(max_examples=4)
def test_attention_bias_of_minus_1e4_equals_masking(name: str, batch: EmbedBatch) -> None:
    decoder = decoder_of(name)
    B, T = batch.attention_mask.shape
    positions = torch.arange(T).expand(B, T)
    bias = torch.zeros(B, 1, T, dtype=torch.float64).masked_fill(~batch.attention_mask[:, None], -1e4)
    masked = decoder(batch.inputs_embeds, attention_mask=batch.attention_mask, position_ids=positions)
    low = decoder(batch.inputs_embeds, position_ids=positions, attention_bias=bias)
    assert_close(low.hidden_states[batch.attention_mask], masked.hidden_states[batch.attention_mask])


@pytest.mark.parametrize("name", SOME)
@given(batch=embed_batches(T=9), biased=st.booleans(), cut=st.integers(0, 4))
@settings(max_examples=3)
def test_sdpa_equals_eager(name: str, batch: EmbedBatch, biased: bool, cut: int) -> None:
    outputs = run_backends(name, ("sdpa", "eager"), batch.to(torch.float32), biased, cut)
    assert error(outputs["sdpa"], outputs["eager"]) <= BACKENDS


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "cases"), [("llama, windows", ((True, 2), (False, 2), (False, 0))), ("gpt2", ((True, 2),))]
)
def test_flex_equals_eager(name: str, cases: tuple[tuple[bool, int], ...]) -> None:
    mask = torch.tensor([[False, True, True, False, True], [True, True, True, True, False]])
    batch = EmbedBatch(noise(1, 2, 5, 48, dtype=torch.float32), mask, ())
    for biased, cut in cases:
        outputs = run_backends(name, ("flex", "eager"), batch, biased, cut)
        assert error(outputs["flex"], outputs["eager"]) <= BACKENDS


def run_backends(name: str, names: tuple[str, ...], batch: EmbedBatch, biased: bool, cut: int) -> dict[str, Tensor]:
    """Run each backend on a cache of the first `cut` slots, with or without a bias."""
    decoder = fresh(name).requires_grad_(False)
    state = decoder(batch.inputs_embeds[:, :cut], attention_mask=batch.attention_mask[:, :cut]).cache if cut else None
    T = batch.inputs_embeds.shape[1]
    bias = noise(3, 1, T, T + min(T, cut), dtype=torch.float32) if biased else None
    outputs = {}
    for backend in names:
        decoder.attn_implementation = backend
        output = decoder(batch.inputs_embeds, state, attention_mask=batch.attention_mask, attention_bias=bias)
        outputs[backend] = output.hidden_states[batch.attention_mask]
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_sdpa_call_paths_agree(name: str) -> None:
    """SDPA is called in three ways: causal, a single query, and with a mask."""
    decoder = decoder_of(name)
    embeds = noise(1, 2, 8, 48)
    causal = decoder(embeds)
    masked = decoder(embeds, attention_mask=torch.ones(2, 8, dtype=torch.bool), attention_bias=zeros(8, 8))
    assert_close(masked.hidden_states, causal.hidden_states)
    one = decoder(embeds[:, :1], causal.cache)
    same_one = decoder(embeds[:, :1], causal.cache, attention_bias=zeros(1, 9))
    assert_close(same_one.hidden_states, one.hidden_states)


def zeros(T: int, P: int) -> Tensor:
    return torch.zeros(1, T, P, dtype=torch.float64)


def test_sliding_window_counts_valid_slots_and_the_query() -> None:
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, True]])
    probs = decoder_of("mistral, window of 1")(noise(1, 2, 6, 48), attention_mask=mask, capture=("probs",)).activations
    n = mask.cumsum(1)
    for layer, window in enumerate((3, 1)):
        near = (n[:, :, None] - n[:, None, :] < window) & mask[:, None, :] & torch.ones(6, 6).bool().tril()
        output = (probs[f"probs.{layer}"] > 0).any(1)
        assert torch.equal(output[mask], near[mask])


def test_attention_mask_is_built_only_if_needed() -> None:
    """Plain causality, a single query, and a window that covers everything need no mask."""

    def sights(decoder: Decoder, T: int, S: int, mask: bool) -> list[attention.AttentionMask]:
        alive = torch.ones(1, S + T, dtype=torch.bool)
        p = torch.arange(S + T)[None]
        frame = build_context(
            decoder.config, p, alive, S, None, torch.float32, backend="sdpa", all_valid=mask, needs_visible=False
        )
        return list(frame.masks)

    decoder = decoder_of("llama, windows", torch.float32)
    assert [(s.causal, s.mask is None) for s in sights(decoder, 5, 0, True)] == [(True, True)] * 2
    assert [(s.causal, s.mask is None) for s in sights(decoder, 6, 0, True)] == [(True, True), (False, False)]
    assert [(s.causal, s.mask is None) for s in sights(decoder, 1, 4, True)] == [(False, True)] * 2
    assert [(s.causal, s.mask is None) for s in sights(decoder, 2, 3, True)] == [(False, False)] * 2
    assert [(s.causal, s.mask is None) for s in sights(decoder, 5, 0, False)] == [(False, False)] * 2
    assert sights(decoder, 2, 3, True)[0].mask.shape == (1, 1, 2, 5)  # pyright: ignore[reportOptionalMemberAccess]


# Pitfalls of torch, and that the decoder avoids them


def test_sdpa_is_causal_is_not_used_with_a_cache() -> None:
    q, k = noise(1, 1, 1, 2, 4), noise(2, 1, 1, 5, 4)
    trap = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    corner = F.scaled_dot_product_attention(q, k, k, torch.ones(2, 5, dtype=torch.bool).tril())
    right = F.scaled_dot_product_attention(q, k, k, torch.ones(2, 5, dtype=torch.bool).tril(3))
    assert_close(trap, corner)
    assert largest(trap, right) > 1e-2
    decoder = decoder_of("llama")
    embeds = noise(3, 1, 5, 48)
    assert_close(
        decoder(embeds[:, 3:], decoder(embeds[:, :3]).cache).hidden_states, decoder(embeds).hidden_states[:, 3:]
    )


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_query_that_sees_nothing_has_zero_output_and_finite_gradients(backend: str) -> None:
    q, k, v = (noise(seed, 1, 2, 3, 4).requires_grad_() for seed in (1, 2, 3))
    mask = torch.tensor([[False, True, True]])
    sight = attention.build_attention_mask(
        mask, 0, all_valid=False, window=None, bias=None, sdpa_only=False, dtype=torch.float64
    )
    context = attention_backends.ATTENTION_BACKENDS[backend](q, k, v, 0.5, sight, 0.0)
    assert torch.equal(context[0, 0], torch.zeros(8, dtype=torch.float64))
    context.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.softmax(torch.full((3,), -torch.inf), 0).isnan().all()  # the trap


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_padded_queries_have_finite_outputs_and_gradients(name: str, backend: str) -> None:
    decoder = fresh(name)
    decoder.attn_implementation = backend
    embeds = noise(1, 2, 6, 48, dtype=torch.float32).requires_grad_()
    mask = torch.tensor([[False] * 4 + [True] * 2, [True] * 3 + [False] * 3])
    output = decoder(embeds, attention_mask=mask)
    assert output.hidden_states.isfinite().all()
    output.hidden_states[mask].square().sum().backward()
    assert embeds.grad.isfinite().all()  # pyright: ignore[reportOptionalMemberAccess]
    assert all(p.grad.isfinite().all() for p in decoder.parameters() if p.grad is not None)
    assert not embeds.grad[~mask].any()  # pyright: ignore[reportOptionalSubscript]


def test_attention_bias_has_gradients_in_sdpa() -> None:
    decoder = fresh("llama").requires_grad_(False)
    embeds = noise(1, 1, 64, 48, dtype=torch.float32)
    gradients = []
    for backend in ("sdpa", "eager"):
        decoder.attn_implementation = backend
        bias = torch.zeros(1, 64, 64, requires_grad=True)
        decoder(embeds, attention_bias=bias).hidden_states.square().mean().backward()
        gradients.append(bias.grad)
    assert gradients[1].abs().max() > 1e3 * QUIET_ABSOLUTE
    assert error(gradients[0], gradients[1]) <= BACKENDS


def test_flex_refuses_gradients_on_cpu_and_dropout() -> None:
    decoder = fresh("llama")
    decoder.attn_implementation = "flex"
    with pytest.raises(ValueError, match="no gradient on the CPU"):
        decoder(noise(1, 1, 3, 48, dtype=torch.float32))
    q = noise(1, 1, 2, 3, 4)
    mask = torch.ones(1, 3, dtype=torch.bool)
    sight = attention.build_attention_mask(
        mask, 0, all_valid=True, window=None, bias=None, sdpa_only=False, dtype=torch.float64
    )
    with pytest.raises(ValueError, match="no dropout"):
        attention_backends.flex_attention_forward(q, q, q, 1.0, sight, 0.1)


@pytest.mark.parametrize("T", [5, MAX_UPCAST_SLOTS + 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_sdpa_attention_in_bfloat16_has_the_gradients_of_float64(T: int, autocast: bool) -> None:
    q, k, v = (noise(seed, 2, heads, T, 16).bfloat16().requires_grad_() for seed, heads in enumerate((4, 2, 2)))
    valid = torch.ones(2, T, dtype=torch.bool)
    valid[1, :3] = False
    mask = attention.build_attention_mask(
        valid, 0, all_valid=False, window=None, bias=None, sdpa_only=True, dtype=torch.bfloat16
    )

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, autocast and dtype != torch.float64):
            c = attention.sdpa_attention(inputs[0], inputs[1], inputs[2], 0.25, mask, 0.0)
        assert c.dtype == dtype
        return list(torch.autograd.grad(c[:, 3:].double().square().sum(), inputs))

    for low, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert error(low, exact) < 0.02
