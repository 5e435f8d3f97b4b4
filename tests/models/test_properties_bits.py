"""Bit equality: a call gives the same bits whatever else is in the batch, captured, or running in parallel."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from tests.models.fixtures import (
    FAMILIES,
    SOME,
    EmbedBatch,
    activation_axes,
    assert_within_float32_floor,
    decoder_of,
    embed_batches,
    fresh,
    noise,
    read_whole,
)

EVERY = pytest.mark.parametrize("name", SOME)


def bits(output: DecoderOutput) -> list[Tensor]:
    return [output.hidden_states, *output.cache.tensors().values()]


def equal(one: DecoderOutput, other: DecoderOutput) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(one), bits(other), strict=True))


@EVERY
@given(batch=embed_batches())
@settings(max_examples=2)
def test_forward_is_deterministic(name: str, batch: EmbedBatch) -> None:
    decoder, batch = decoder_of(name, torch.float32), batch.to(torch.float32)
    first, second, third = (read_whole(decoder, batch, ("logits", "next_probs")) for _ in range(3))
    assert equal(first, second)
    assert equal(second, third)
    for key, value in first.activations.items():
        assert torch.equal(value, third.activations[key])


@EVERY
@pytest.mark.parametrize("T", [4, 31])
def test_batch_equals_its_rows_to_the_bit(name: str, T: int) -> None:
    decoder, embeds = decoder_of(name, torch.float32), noise(1, 8, T, 48, dtype=torch.float32)
    first = decoder(noise(2, 8, 5, 48, dtype=torch.float32)).cache
    batch, after = decoder(embeds), decoder(embeds, first)
    for row in range(8):
        single = decoder(embeds[row : row + 1])
        assert torch.equal(single.hidden_states[0], batch.hidden_states[row])
        assert single.cache.is_equal(batch.cache.select_rows([row]))
        assert torch.equal(
            decoder(embeds[row : row + 1], first.select_rows([row])).hidden_states[0], after.hidden_states[row]
        )


@EVERY
def test_single_token_batch_equals_its_rows_within_float32_error(name: str) -> None:
    """MKL uses another kernel for up to three rows, so equal bits are required from four on only."""
    embeds = noise(1, 8, 1, 48)

    def batch(decoder: Decoder) -> Tensor:
        return decoder(embeds.to(decoder.dtype)).hidden_states

    def rows(decoder: Decoder) -> Tensor:
        return torch.cat([decoder(row[None].to(decoder.dtype)).hidden_states for row in embeds])

    assert_within_float32_floor(name, batch, rows)


@EVERY
@given(batch=embed_batches(), data=st.data())
@settings(max_examples=2)
def test_capture_does_not_change_bits(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder, batch = decoder_of(name, torch.float32), batch.to(torch.float32)
    names = ["hidden", "hidden.2", "probs.1", "k.0", *activation_axes(decoder.config)]
    plain, subset = read_whole(decoder, batch), data.draw(st.sets(st.sampled_from(names), min_size=1))
    assert plain.activations == {}
    for capture_names in (("scores", "probs"), ("hidden",), tuple(subset)):
        captured = read_whole(decoder, batch, capture_names)
        assert equal(plain, captured)
        assert {key.split(".")[0] for key in captured.activations} == {key.split(".")[0] for key in capture_names}


@EVERY
@given(batch=embed_batches(B=2), biased=st.booleans())
@settings(max_examples=2)
def test_forward_does_not_modify_anything(name: str, batch: EmbedBatch, biased: bool) -> None:
    """Parameters, buffers, arguments and module attributes keep values and version counters."""
    decoder, batch = fresh(name), batch.to(torch.float32)
    attributes = {key: dict(vars(module)) for key, module in decoder.named_modules()}
    B, T = batch.attention_mask.shape
    state = decoder(noise(1, B, 3, 48, dtype=torch.float32)).cache.detach()
    bias = noise(2, 1, T, T + 3, dtype=torch.float32) if biased else None
    positions = torch.arange(T).expand(B, T).contiguous()
    tensors = {"embeds": batch.inputs_embeds, "mask": batch.attention_mask, "given": positions, **state.tensors()}
    tensors |= dict(decoder.named_parameters()) | ({"bias": bias} if bias is not None else {})
    before = {key: (x._version, x.detach().clone()) for key, x in tensors.items()}
    options = {"attention_mask": batch.attention_mask, "position_ids": positions, "attention_bias": bias}
    output = decoder(batch.inputs_embeds, state, **options, capture=("probs", "logits"))
    output.hidden_states.sum().backward()
    assert {key: x._version for key, x in tensors.items()} == {key: version for key, (version, _) in before.items()}
    assert all(torch.equal(x, before[key][1]) for key, x in tensors.items())
    assert {key: dict(vars(module)) for key, module in decoder.named_modules()} == attributes
    assert list(decoder.buffers()) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_decoder_can_be_called_from_two_threads(name: str) -> None:
    decoder = decoder_of(name, torch.float32)
    batches = [noise(seed, 1 + seed % 3, 4 + seed, 48, dtype=torch.float32) for seed in range(8)]

    def twice(embeds: Tensor) -> DecoderOutput:
        return decoder(embeds[:, -1:], decoder(embeds).cache, capture=("k_rot", "probs"))

    expected_outputs = [twice(embeds) for embeds in batches]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(twice, batches * 3))
    for i, output in enumerate(together):
        assert equal(output, expected_outputs[i % 8])
        assert all(torch.equal(x, expected_outputs[i % 8].activations[key]) for key, x in output.activations.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_empty_cache_equals_none(name: str) -> None:
    decoder, embeds = decoder_of(name, torch.float32), noise(1, 2, 5, 48, dtype=torch.float32)
    assert equal(decoder(embeds, KVCache.empty(decoder.config, 2)), decoder(embeds))
