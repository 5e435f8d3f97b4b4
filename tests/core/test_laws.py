"""Laws of reading, for every family: pieces, padding, the future, other rows (float64 to 1e-12; float32 by floors)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.core.readings import (
    FAMILIES,
    SOME,
    VARIANTS,
    Reading,
    alone,
    at_once,
    axes,
    decoder_of,
    held,
    in_pieces,
    noise,
    patterns,
    readings,
    same,
    same_held,
    within_floor,
)

EVERY = pytest.mark.parametrize("name", VARIANTS)
USUAL = pytest.mark.parametrize("name", SOME)


@EVERY
@given(reading=readings())
@settings(max_examples=5)
def test_reading_in_pieces_is_reading_at_once(name: str, reading: Reading) -> None:
    decoder = decoder_of(name)
    once, pieces = at_once(decoder, reading), in_pieces(decoder, reading)
    same(torch.cat([piece.hidden_states for piece in pieces], 1)[reading.live], once.hidden_states[reading.live])
    same_held(pieces[-1].cache, once.cache)
    assert torch.equal(pieces[-1].cache.valid, once.cache.valid)
    assert torch.equal(pieces[-1].cache.positions, once.cache.positions)


@pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])
@given(reading=readings(B=2, T=9))
@settings(max_examples=4)
def test_every_stage_in_pieces_is_that_stage_at_once(name: str, reading: Reading) -> None:
    decoder = decoder_of(name)
    letters = axes(decoder.config)
    want = tuple(stage.name for stage in layer_activations(decoder.config)) + tuple(
        stage.name for stage in MODEL_ACTIVATIONS
    )
    once, pieces = at_once(decoder, reading, (*want, "hidden")), in_pieces(decoder, reading, (*want, "hidden"))
    assert {key.split(".")[0] for key in once.activations} == {*want, "hidden"}
    for key, whole in once.activations.items():
        stem = key.split(".")[0]
        shape = ["B", "T", "D"] if stem == "hidden" else letters[stem]
        for (start, end), piece in zip(reading.spans, pieces, strict=True):
            got, asked = piece.activations[key], whole
            if shape[:2] == ["B", "T"]:
                got, asked = got[reading.live[:, start:end]], asked[:, start:end][reading.live[:, start:end]]
            elif shape[-1] == "P":
                got = visible(got, reading, start, end)
                asked = visible(asked[:, :, start:end, :end], reading, start, end)
            elif "T" in shape or "P" in shape:  # heads of the new slots, or of all that are held
                first = start if "T" in shape else 0
                live = reading.live[:, first:end]
                got, asked = got.transpose(1, 2)[live], asked[:, :, first:end].transpose(1, 2)[live]
            else:  # of each row, its last live slot
                last = reading.live[:, start:end].any(1) & ~reading.live[:, end:].any(1)
                got, asked = got[last], asked[last]
            same(got, asked)


def visible(x: Tensor, reading: Reading, start: int, end: int) -> Tensor:
    """Scores and probabilities of live queries at slots they may see; scores of a window's outside are -inf on both."""
    live, slot = reading.live, torch.arange(end)
    may = live[:, start:end, None] & live[:, None, :end] & (slot <= slot[start:, None])
    return x.masked_fill(~may[:, None], 0.0).nan_to_num(neginf=-1.0)


@EVERY
@given(reading=readings(T=11), content=st.sampled_from([0.0, 1.0, 1e6]))
@settings(max_examples=5)
def test_padding_changes_nothing(name: str, reading: Reading, content: float) -> None:
    decoder = decoder_of(name)
    padded = reading.vectors.masked_fill(~reading.live[..., None], content)
    batch = at_once(decoder, Reading(padded, reading.live, reading.cuts))
    assert batch.hidden_states.isfinite().all()
    for row in range(reading.live.shape[0]):
        single = alone(decoder, reading, row)
        same(batch.hidden_states[row, reading.live[row]], single.hidden_states[0])
        for x, y in zip(held(batch.cache, row), held(single.cache, 0), strict=True):
            same(x, y)


@EVERY
@given(reading=readings(T=8, dead=False), data=st.data())
@settings(max_examples=4)
def test_dead_slots_in_a_state_change_nothing(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    B = len(reading.live)
    before = torch.tensor([data.draw(patterns(6)) for _ in range(B)])
    first = decoder(noise(1, B, 6, 48), live=before).state
    kept = first.with_valid(torch.zeros_like(before) if data.draw(st.booleans()) else before)
    far = noisy(kept, 1e6)
    a, b = decoder(reading.vectors, kept), decoder(reading.vectors, far)
    same(b.hidden, a.hidden)
    if not kept.live.any():
        same(a.hidden, decoder(reading.vectors).hidden)


def noisy(state: KVCache, size: float) -> KVCache:
    """The same state with its dead slots filled with large numbers, positions too."""
    dead = ~state.valid[:, None, :, None]
    fill = torch.full_like(state.keys[0], size)
    keys, values = (tuple(torch.where(dead, fill, x) for x in each) for each in (state.keys, state.values))
    return KVCache(keys, values, state.positions.masked_fill(~state.valid, 99), state.valid)


@USUAL
@given(reading=readings(), data=st.data())
@settings(max_examples=5)
def test_the_future_does_not_touch_the_past(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    t = data.draw(st.integers(1, reading.vectors.shape[1] - 1))
    other = reading.vectors.clone()
    other[:, t:] = 30 * noise(2, *other[:, t:].shape)
    a, b = at_once(decoder, reading), at_once(decoder, Reading(other, reading.live, ()))
    same(b.hidden_states[:, :t], a.hidden_states[:, :t])
    same_held(b.cache.crop(t), a.cache.crop(t))
    later = reading.live[:, t:]
    if later.any():
        assert not torch.equal(b.hidden_states[:, t:][later], a.hidden_states[:, t:][later])


@USUAL
@given(reading=readings(B=4), data=st.data())
@settings(max_examples=5)
def test_rows_do_not_touch_one_another(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder = decoder_of(name)
    row = data.draw(st.integers(0, reading.live.shape[0] - 1))
    other, live = 30 * noise(3, *reading.vectors.shape), ~reading.live
    other[row], live[row] = reading.vectors[row], reading.live[row]
    a, b = at_once(decoder, reading), at_once(decoder, Reading(other, live, ()))
    assert torch.equal(b.hidden_states[row], a.hidden_states[row])
    single = at_once(decoder, Reading(reading.vectors[row : row + 1], reading.live[row : row + 1], ()))
    same(single.hidden_states[0, reading.live[row]], a.hidden_states[row, reading.live[row]])
    same_held(single.cache, a.cache.select_rows([row]))


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope"])
def test_a_row_beyond_the_limit_of_its_scaling_leaves_its_neighbours(name: str) -> None:
    decoder = decoder_of(name)
    vectors, live = noise(4, 2, 140, 48), torch.ones(2, 140, dtype=torch.bool)
    live[1, :100] = False
    batch = decoder(vectors, live=live)
    same(batch.hidden[1, 100:], decoder(vectors[1:, 100:]).hidden[0])
    same(batch.hidden[0], decoder(vectors[:1]).hidden[0])


@USUAL
@given(reading=readings(B=2, dead=False))
@settings(max_examples=3)
def test_pieces_in_float32(name: str, reading: Reading) -> None:
    def pieces(decoder: Decoder) -> Tensor:
        passes = in_pieces(decoder, reading.to(decoder.token_embedding.weight.dtype))
        return decoder.logits(torch.cat([each.hidden_states for each in passes], 1))

    def once(decoder: Decoder) -> Tensor:
        return decoder.logits(at_once(decoder, reading.to(decoder.token_embedding.weight.dtype)).hidden_states)

    within_floor(name, pieces, once)


@USUAL
@given(reading=readings(B=2, T=10))
@settings(max_examples=3)
def test_padding_in_float32(name: str, reading: Reading) -> None:
    def padded(decoder: Decoder) -> Tensor:
        given = reading.to(decoder.token_embedding.weight.dtype)
        return decoder.logits(at_once(decoder, given).hidden_states[reading.live])

    def compact(decoder: Decoder) -> Tensor:
        given = reading.to(decoder.token_embedding.weight.dtype)
        return decoder.logits(
            torch.cat([alone(decoder, given, row).hidden_states[0] for row in range(len(reading.live))])
        )

    within_floor(name, padded, compact)
