"""Properties of the forward pass for every family: chunks, padding, causality, independent rows.

float64 agrees to 1e-12; float32 to its own error.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.models.fixtures import (
    FAMILIES,
    SOME,
    VARIANTS,
    EmbedBatch,
    activation_axes,
    assert_close,
    assert_same_cache,
    assert_within_float32_floor,
    decoder_of,
    embed_batches,
    masks,
    noise,
    read_in_chunks,
    read_row_alone,
    read_whole,
    valid_slots,
)

EVERY = pytest.mark.parametrize("name", VARIANTS)
USUAL = pytest.mark.parametrize("name", SOME)


@EVERY
@given(batch=embed_batches())
@settings(max_examples=5)
def test_forward_in_chunks_equals_one_pass(name: str, batch: EmbedBatch) -> None:
    decoder, mask = decoder_of(name), batch.attention_mask
    whole, chunks = read_whole(decoder, batch), read_in_chunks(decoder, batch)
    assert_close(torch.cat([chunk.hidden_states for chunk in chunks], 1)[mask], whole.hidden_states[mask])
    assert_same_cache(chunks[-1].cache, whole.cache)
    assert torch.equal(chunks[-1].cache.valid, whole.cache.valid)
    assert torch.equal(chunks[-1].cache.positions, whole.cache.positions)


@pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])
@given(batch=embed_batches(B=2, T=9))
@settings(max_examples=4)
def test_every_activation_in_chunks_equals_one_pass(name: str, batch: EmbedBatch) -> None:
    decoder, real = decoder_of(name), batch.attention_mask
    axes = activation_axes(decoder.config) | {"hidden": ["B", "T", "D"]}
    whole, chunks = read_whole(decoder, batch, tuple(axes)), read_in_chunks(decoder, batch, tuple(axes))
    assert {key.split(".")[0] for key in whole.activations} == axes.keys()
    for key, whole_activation in whole.activations.items():
        shape = axes[key.split(".")[0]]
        for (start, end), piece in zip(batch.chunks, chunks, strict=True):
            actual, expected, mask = piece.activations[key], whole_activation, real[:, start:end]
            if shape[:2] == ["B", "T"]:
                actual, expected = actual[mask], expected[:, start:end][mask]
            elif shape[-1] == "P":
                actual = visible(actual, batch, start, end)
                expected = visible(expected[:, :, start:end, :end], batch, start, end)
            elif "T" in shape or "P" in shape:  # heads of the new slots, or of all slots
                first = start if "T" in shape else 0
                mask = real[:, first:end]
                actual, expected = actual.transpose(1, 2)[mask], expected[:, :, first:end].transpose(1, 2)[mask]
            else:  # the last real slot of output row
                last = mask.any(1) & ~real[:, end:].any(1)
                actual, expected = actual[last], expected[last]
            assert_close(actual, expected)


def visible(x: Tensor, batch: EmbedBatch, start: int, end: int) -> Tensor:
    """Set scores and probabilities at slots a query does not see to 0, and minus infinity (windows) to -1."""
    mask, slot = batch.attention_mask, torch.arange(end)
    may = mask[:, start:end, None] & mask[:, None, :end] & (slot <= slot[start:, None])
    return x.masked_fill(~may[:, None], 0.0).nan_to_num(neginf=-1.0)


@EVERY
@given(batch=embed_batches(T=11), content=st.sampled_from([0.0, 1.0, 1e6]))
@settings(max_examples=5)
def test_padding_does_not_change_results(name: str, batch: EmbedBatch, content: float) -> None:
    decoder = decoder_of(name)
    mask = batch.attention_mask
    padded = batch.inputs_embeds.masked_fill(~mask[..., None], content)
    output = read_whole(decoder, EmbedBatch(padded, mask, batch.cuts))
    assert output.hidden_states.isfinite().all()
    for row in range(len(mask)):
        single = read_row_alone(decoder, batch, row)
        assert_close(output.hidden_states[row, mask[row]], single.hidden_states[0])
        for x, y in zip(valid_slots(output.cache, row), valid_slots(single.cache, 0), strict=True):
            assert_close(x, y)


@EVERY
@given(batch=embed_batches(T=8, padding=False), data=st.data())
@settings(max_examples=4)
def test_invalid_cache_slots_do_not_change_results(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    B = len(batch.attention_mask)
    before = torch.tensor([data.draw(masks(6)) for _ in range(B)])
    first = decoder(noise(1, B, 6, 48), attention_mask=before).cache
    past = first.with_valid(torch.zeros_like(before) if data.draw(st.booleans()) else before)
    far = corrupt_invalid_slots(past, 1e6)
    a, b = decoder(batch.inputs_embeds, past), decoder(batch.inputs_embeds, far)
    assert_close(b.hidden_states, a.hidden_states)
    if not past.valid.any():
        assert_close(a.hidden_states, decoder(batch.inputs_embeds).hidden_states)


def corrupt_invalid_slots(state: KVCache, size: float) -> KVCache:
    """Fill the invalid slots of a cache with large numbers, positions too."""
    dead = ~state.valid[:, None, :, None]
    fill = torch.full_like(state.keys[0], size)
    keys, values = (tuple(torch.where(dead, fill, x) for x in output) for output in (state.keys, state.values))
    return KVCache(keys, values, state.positions.masked_fill(~state.valid, 99), state.valid)


@USUAL
@given(batch=embed_batches(), data=st.data())
@settings(max_examples=5)
def test_attention_is_causal(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    t = data.draw(st.integers(1, batch.inputs_embeds.shape[1] - 1))
    other = batch.inputs_embeds.clone()
    other[:, t:] = 30 * noise(2, *other[:, t:].shape)
    a, b = read_whole(decoder, batch), read_whole(decoder, EmbedBatch(other, batch.attention_mask, ()))
    assert_close(b.hidden_states[:, :t], a.hidden_states[:, :t])
    assert_same_cache(b.cache.crop(t), a.cache.crop(t))
    later = batch.attention_mask[:, t:]
    if later.any():
        assert not torch.equal(b.hidden_states[:, t:][later], a.hidden_states[:, t:][later])


@USUAL
@given(batch=embed_batches(B=4), data=st.data())
@settings(max_examples=5)
def test_rows_are_independent(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    row = data.draw(st.integers(0, batch.attention_mask.shape[0] - 1))
    other, mask = 30 * noise(3, *batch.inputs_embeds.shape), ~batch.attention_mask
    other[row], mask[row] = batch.inputs_embeds[row], batch.attention_mask[row]
    a, b = read_whole(decoder, batch), read_whole(decoder, EmbedBatch(other, mask, ()))
    assert torch.equal(b.hidden_states[row], a.hidden_states[row])
    inputs, real = batch.inputs_embeds[row : row + 1], batch.attention_mask[row]
    single = read_whole(decoder, EmbedBatch(inputs, real[None], ()))
    assert_close(single.hidden_states[0, real], a.hidden_states[row, real])
    assert_same_cache(single.cache, a.cache.select_rows([row]))


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope"])
def test_rope_scaling_of_a_long_row_does_not_change_others(name: str) -> None:
    decoder = decoder_of(name)
    embeds, mask = noise(4, 2, 140, 48), torch.ones(2, 140, dtype=torch.bool)
    mask[1, :100] = False
    batch = decoder(embeds, attention_mask=mask)
    assert_close(batch.hidden_states[1, 100:], decoder(embeds[1:, 100:]).hidden_states[0])
    assert_close(batch.hidden_states[0], decoder(embeds[:1]).hidden_states[0])


@USUAL
@given(batch=embed_batches(B=2, padding=False))
@settings(max_examples=3)
def test_chunks_agree_in_float32(name: str, batch: EmbedBatch) -> None:
    def chunks(decoder: Decoder) -> Tensor:
        passes = read_in_chunks(decoder, batch.to(decoder.dtype))
        return decoder.logits(torch.cat([output.hidden_states for output in passes], 1))

    def whole(decoder: Decoder) -> Tensor:
        return decoder.logits(read_whole(decoder, batch.to(decoder.dtype)).hidden_states)

    assert_within_float32_floor(name, chunks, whole)


@USUAL
@given(batch=embed_batches(B=2, T=10))
@settings(max_examples=3)
def test_padding_agrees_in_float32(name: str, batch: EmbedBatch) -> None:
    def padded(decoder: Decoder) -> Tensor:
        typed_batch = batch.to(decoder.dtype)
        return decoder.logits(read_whole(decoder, typed_batch).hidden_states[batch.attention_mask])

    def compact(decoder: Decoder) -> Tensor:
        typed_batch = batch.to(decoder.dtype)
        rows = [read_row_alone(decoder, typed_batch, row).hidden_states[0] for row in range(len(batch.attention_mask))]
        return decoder.logits(torch.cat(rows))

    assert_within_float32_floor(name, padded, compact)
