"""Laws of bits: one call gives the same bits, whoever else is in the batch, looks on, or calls meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from tests.core.readings import FAMILIES, SOME, Reading, at_once, decoder_of, fresh, noise, readings, within_floor

EVERY = pytest.mark.parametrize("name", SOME)


def bits(seen: DecoderOutput) -> list[Tensor]:
    return [seen.hidden_states, *seen.cache.tensors().values()]


def equal(one: DecoderOutput, other: DecoderOutput) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(one), bits(other), strict=True))


@EVERY
@given(reading=readings())
@settings(max_examples=2)
def test_three_runs_have_equal_bits(name: str, reading: Reading) -> None:
    decoder, reading = decoder_of(name, torch.float32), reading.to(torch.float32)
    first, second, third = (at_once(decoder, reading, ("logits", "next_probs")) for _ in range(3))
    assert equal(first, second)
    assert equal(second, third)
    for key, value in first.activations.items():
        assert torch.equal(value, third.activations[key])


@EVERY
@pytest.mark.parametrize("T", [4, 31])
def test_a_batch_of_eight_is_its_rows_bit_for_bit(name: str, T: int) -> None:
    decoder, vectors = decoder_of(name, torch.float32), noise(1, 8, T, 48, dtype=torch.float32)
    first = decoder(noise(2, 8, 5, 48, dtype=torch.float32)).state
    batch, after = decoder(vectors), decoder(vectors, first)
    for row in range(8):
        single = decoder(vectors[row : row + 1])
        assert torch.equal(single.hidden[0], batch.hidden[row])
        assert single.state.equal(batch.state.take([row]))
        assert torch.equal(decoder(vectors[row : row + 1], first.take([row])).hidden[0], after.hidden[row])


@EVERY
@pytest.mark.parametrize("T", [1])
def test_a_short_batch_of_eight_is_its_rows_within_the_floor(name: str, T: int) -> None:
    """Up to three rows of a matrix MKL multiplies by another kernel, so bits are asked for from four on."""
    vectors = noise(1, 8, T, 48)

    def batch(decoder: Decoder) -> Tensor:
        return decoder(vectors.to(decoder.token_embedding.weight.dtype)).hidden

    def rows(decoder: Decoder) -> Tensor:
        return torch.cat([decoder(row[None].to(decoder.token_embedding.weight.dtype)).hidden for row in vectors])

    within_floor(name, batch, rows)


@EVERY
@given(reading=readings(), data=st.data())
@settings(max_examples=2)
def test_want_changes_no_bit(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder, reading = decoder_of(name, torch.float32), reading.to(torch.float32)
    names = [stage.name for stage in (*layer_activations(decoder.config), *MODEL_ACTIVATIONS)] + [
        "hidden",
        "hidden.2",
        "probs.1",
        "k.0",
    ]
    plain = at_once(decoder, reading)
    assert plain.activations == {}
    for want in (("scores", "probs"), ("hidden",), tuple(data.draw(st.sets(st.sampled_from(names), min_size=1)))):
        looked = at_once(decoder, reading, want)
        assert equal(plain, looked)
        assert {key.split(".")[0] for key in looked.activations} == {key.split(".")[0] for key in want}


@EVERY
@given(reading=readings(B=2), biased=st.booleans())
@settings(max_examples=2)
def test_a_pass_writes_to_nothing(name: str, reading: Reading, biased: bool) -> None:
    """Version counters and values of parameters, buffers and arguments stay; so do the module's own attributes."""
    decoder, reading = fresh(name), reading.to(torch.float32)
    attributes = {key: dict(vars(module)) for key, module in decoder.named_modules()}
    B, T = reading.live.shape
    state = decoder(noise(1, B, 3, 48, dtype=torch.float32)).state.detach()
    bias = noise(2, 1, T, T + 3, dtype=torch.float32) if biased else None
    positions = torch.arange(T).expand(B, T).contiguous()
    given = {"vectors": reading.vectors, "live": reading.live, "positions": positions, **state.tensors()}
    given |= dict(decoder.named_parameters()) | ({"bias": bias} if bias is not None else {})
    before = {key: (x._version, x.detach().clone()) for key, x in given.items()}
    seen = decoder(reading.vectors, state, live=reading.live, positions=positions, bias=bias, want=("probs", "logits"))
    seen.hidden.sum().backward()
    assert {key: x._version for key, x in given.items()} == {key: version for key, (version, _) in before.items()}
    assert all(torch.equal(x, before[key][1]) for key, x in given.items())
    assert {key: dict(vars(module)) for key, module in decoder.named_modules()} == attributes
    assert list(decoder.buffers()) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_two_threads_may_call_one_decoder(name: str) -> None:
    decoder = decoder_of(name, torch.float32)
    batches = [noise(seed, 1 + seed % 3, 4 + seed, 48, dtype=torch.float32) for seed in range(8)]

    def twice(vectors: Tensor) -> DecoderOutput:
        return decoder(vectors[:, -1:], decoder(vectors).state, want=("k_rot", "probs"))

    alone = [twice(vectors) for vectors in batches]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(twice, batches * 3))
    for i, seen in enumerate(together):
        assert equal(seen, alone[i % 8])
        assert all(torch.equal(x, alone[i % 8].activations[key]) for key, x in seen.activations.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_that_was_used_before_answers_as_a_new_one(name: str) -> None:
    def answer(decoder: Decoder, seed: int) -> list[Tensor]:
        seen = decoder(noise(seed, 2, 6, 48, dtype=torch.float32))
        return bits(decoder(seen.hidden[:, -1:], seen.state))

    used = fresh(name)
    answer(used, 1)
    assert all(torch.equal(x, y) for x, y in zip(answer(used, 2), answer(fresh(name), 2), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_held_is_nothing(name: str) -> None:
    decoder, vectors = decoder_of(name, torch.float32), noise(1, 2, 5, 48, dtype=torch.float32)
    assert equal(decoder(vectors, KVCache.empty(decoder.config, 2)), decoder(vectors))
