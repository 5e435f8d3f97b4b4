"""KVCache: every operation equals reading the equivalent batch, and leaves the old cache unchanged."""

import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from laconic.errors import CorruptArtifactError
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.kv_prefix import KVPrefix
from laconic.storage import atomic
from tests.models.fixtures import (
    FAMILIES,
    EmbedBatch,
    assert_close,
    assert_same_cache,
    decoder_of,
    embed_batches,
    fresh,
    noise,
    read_row_alone,
    read_whole,
)

SOME = pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])


def cache_of(decoder: Decoder, B: int, S: int, seed: int = 1) -> KVCache:
    return decoder(noise(seed, B, S, 48).to(decoder.dtype)).cache


def copy_of(cache: KVCache) -> KVCache:
    return cache.map_tensors(lambda x: x.detach().clone())


@SOME
@given(batch=embed_batches(), data=st.data())
@settings(max_examples=3)
def test_cache_crop_equals_reading_less(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder, (B, T) = decoder_of(name), batch.attention_mask.shape
    n = data.draw(st.integers(0, T))
    cache = read_whole(decoder, batch).cache
    before, cropped, more = copy_of(cache), cache.crop(n), noise(2, B, 3, 48)
    prefix = decoder(batch.inputs_embeds[:, :n], attention_mask=batch.attention_mask[:, :n]).cache if n else None
    assert_close(decoder(more, cropped).hidden_states, decoder(more, prefix).hidden_states)
    assert cache.crop(T).is_equal(cache)
    assert not cache.to(dtype=torch.bfloat16).to(dtype=torch.float64).is_equal(cache)
    assert not cache.to(dtype=torch.float64).is_equal(cache) or cache.keys[0].dtype == torch.float64
    assert n == cropped.S
    assert cache.is_equal(before)


@SOME
@given(batch=embed_batches(padding=False), data=st.data())
@settings(max_examples=3)
def test_cache_gather_slots_equals_masking_the_others(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    """In any order, because keys carry their positions; sliding windows count valid slots in slot order."""
    decoder, (B, T) = decoder_of(name), batch.attention_mask.shape
    cache = read_whole(decoder, batch).cache
    K = data.draw(st.integers(1, T))
    slots = torch.stack([torch.randperm(T, generator=torch.Generator().manual_seed(b))[:K] for b in range(B)])
    slots = slots.sort(1).values if "window" in name or name == "mistral" else slots
    gathered, valid = cache.gather_slots(slots), torch.zeros_like(cache.valid).scatter(1, slots, True)
    more = noise(2, B, 3, 48)
    masked = cache.with_valid(valid)
    assert_close(decoder(more, gathered).hidden_states, decoder(more, masked).hidden_states)
    assert masked.with_valid(cache.valid).is_equal(cache)
    assert cache.gather_slots(torch.arange(T).expand(B, T)).is_equal(cache)
    assert torch.equal(gathered.keys[1][0, :, 0], cache.keys[1][0, :, slots[0, 0]])


@SOME
@given(batch=embed_batches(B=4), data=st.data())
@settings(max_examples=3)
def test_cache_select_and_concat_rows_equal_batches(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder, B = decoder_of(name), len(batch.attention_mask)
    cache = read_whole(decoder, batch).cache
    rows = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=5))
    selected, more = cache.select_rows(rows), noise(2, 5, 2, 48)[: len(rows)]
    for i, row in enumerate(rows):
        expected = decoder(more[i : i + 1], cache.select_rows([row])).hidden_states[0]
        assert_close(decoder(more, selected).hidden_states[i], expected)
    assert cache.select_rows(list(range(B))).is_equal(cache)
    assert cache.select_rows(torch.arange(B) == rows[0]).is_equal(cache.select_rows([rows[0]]))
    assert cache.select_rows(torch.tensor(rows, dtype=torch.uint16)).is_equal(cache.select_rows(rows))
    singles = [read_row_alone(decoder, batch, row).cache for row in rows]
    joined = KVCache.concat_rows(*singles)
    assert max(single.S for single in singles) == joined.S
    for row, single in enumerate(singles):
        assert not joined.valid[row, : joined.S - single.S].any()
    assert_same_cache(joined, selected)
    assert_close(decoder(more, joined).hidden_states, decoder(more, selected).hidden_states)


@SOME
@pytest.mark.parametrize("B", [1, 2])
def test_cache_repeat_rows_makes_independent_rows(name: str, B: int) -> None:
    decoder = decoder_of(name)
    cache = cache_of(decoder, B, 5)
    before, repeated = copy_of(cache), cache.repeat_rows(3)
    more = noise(2, 3 * B, 2, 48)
    output = decoder(more, repeated)
    for i in range(3 * B):
        expected = decoder(more[i : i + 1], cache.select_rows([i // 3])).hidden_states[0]
        assert_close(output.hidden_states[i], expected)
    assert cache.is_equal(before)
    assert repeated.is_equal(cache.select_rows([row for row in range(B) for _ in range(3)]))
    shares_memory = repeated.keys[0].data_ptr() == cache.keys[0].data_ptr()
    assert shares_memory == (B == 1)


@SOME
@given(batch=embed_batches(), data=st.data())
@settings(max_examples=3)
def test_cache_append_inverts_cutting(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder, (B, T) = decoder_of(name), batch.attention_mask.shape
    cache = read_whole(decoder, batch).cache
    n = data.draw(st.integers(0, T))
    left, right = cache.crop(n), cache.gather_slots(torch.arange(n, T).expand(B, -1))
    assert left.append(right).is_equal(cache)
    empty = KVCache.empty(decoder.config, B, torch.float64)
    assert empty.append(cache).is_equal(cache)
    assert cache.append(empty).is_equal(cache)


def test_cache_operations_are_differentiable() -> None:
    decoder = decoder_of("llama")
    base = cache_of(decoder, 2, 3)
    slots = torch.tensor([[2, 0], [1, 1]])

    def operate(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = KVCache((keys,), (values,), base.positions, base.valid)
        result = cache.append(cache.gather_slots(slots)).crop(4).select_rows([1, 1, 0]).repeat_rows(2)
        result = KVCache.concat_rows(result, cache.gather_slots(slots))
        return (*result.keys, *result.values)

    assert gradcheck(operate, tuple(noise(seed, 2, 1, 3, 2).requires_grad_() for seed in (4, 5)))
    embeds = noise(1, 1, 3, 48).requires_grad_()
    cache = decoder(embeds).cache
    decoder(noise(2, 1, 1, 48), cache).hidden_states.sum().backward()
    assert embeds.grad is not None
    assert embeds.grad.any()
    assert not any(x.requires_grad for x in cache.detach().keys)


def test_cache_is_frozen_and_knows_its_size() -> None:
    decoder = decoder_of("llama", torch.float32)
    cache = cache_of(decoder, 2, 5)
    with pytest.raises(FrozenInstanceError):
        cache.valid = cache.valid  # type: ignore[misc]
    config = decoder.config
    L, G, E = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    assert cache.num_bytes == 2 * L * 2 * G * 5 * E * 4 + 9 * 2 * 5
    assert (cache.B, cache.S) == (2, 5)
    assert KVCache.empty(config, 3).S == 0


def test_cache_to_moves_and_converts() -> None:
    cache = cache_of(decoder_of("llama"), 1, 3)
    assert {x.device.type for x in cache.to("meta").tensors().values()} == {"meta"}
    half = cache.to(dtype=torch.bfloat16)
    assert half.keys[0].dtype == half.values[1].dtype == torch.bfloat16
    assert (half.positions.dtype, half.valid.dtype) == (torch.int64, torch.bool)
    assert cache.to("cpu", torch.float64).is_equal(cache)


def test_cache_equal_compares_every_tensor() -> None:
    cache = cache_of(decoder_of("llama"), 1, 3)
    for name in cache.tensors():
        other = copy_of(cache)
        tensor = other.tensors()[name]
        tensor[..., -1] = ~tensor[..., -1] if name == "valid" else tensor[..., -1] + 1
        assert not cache.is_equal(other), name
    assert cache.is_equal(copy_of(cache))
    assert not cache.is_equal(cache.crop(2))


@pytest.mark.parametrize("name", FAMILIES)
def test_cache_file_loads_with_the_same_weights_only(name: str, tmp_path: Path) -> None:
    decoder = fresh(name)
    cache = cache_of(decoder, 2, 4).with_valid(torch.tensor([[False, True, True, True]] * 2))
    cache.save(tmp_path / "cache.safetensors", decoder)
    loaded = KVCache.load(tmp_path / "cache.safetensors", decoder)
    assert loaded.is_equal(cache.detach())
    more = noise(2, 2, 1, 48).float()
    assert_close(decoder(more, loaded).hidden_states, decoder(more, cache).hidden_states)
    with torch.no_grad():
        decoder.token_embedding.weight[0, 0] += 1
    with pytest.raises(CorruptArtifactError, match="written for weights"):
        KVCache.load(tmp_path / "cache.safetensors", decoder)


@pytest.mark.usefixtures("unchecked")
def test_cache_operations_refuse_mismatches() -> None:
    cache, other = cache_of(decoder_of("llama"), 1, 12), cache_of(decoder_of("llama"), 2, 3)
    for n in (40, -1):
        with pytest.raises(ValueError, match=r"crop.*12 slots"):
            cache.crop(n)
    with pytest.raises(ValueError, match="slot 19 of 12 in row 0"):
        cache.gather_slots(torch.tensor([[3, 19]]))
    for slots in (torch.tensor([[0], [1]]), torch.arange(3)):
        with pytest.raises(ValueError, match=r"expected \[1, K\]"):
            cache.gather_slots(slots)
    with pytest.raises(ValueError, match="append: 2 rows"):
        cache.append(other)
    with pytest.raises(ValueError, match=r"valid is \[2, 3\]"):
        cache.with_valid(other.valid)
    for row in (2, -1):
        with pytest.raises(ValueError, match=rf"row {row} does not exist; rows are 0 to 1"):
            other.select_rows([0, row])
    with pytest.raises(ValueError, match="mask of 3 rows cannot select from 2"):
        other.select_rows([True, False, True])
    assert other.select_rows([]).B == 0
    with pytest.raises(ValueError, match="at least one cache"):
        KVCache.concat_rows()
    with pytest.raises(ValueError, match="does not match"):
        KVCache.concat_rows(other, cache_of(decoder_of("gpt2"), 1, 3))


CACHE = KVCache.empty(decoder_of("llama").config, 2).pad_left(3)
PREFIX = KVPrefix((torch.ones(2, 2, 16),) * 2, (torch.ones(2, 2, 16),) * 2, (), torch.ones(2).long(), ((2, 0),) * 2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"values.1": None}, "values.1"),
        ({"valid": None}, "valid"),
        ({"queries.0": torch.ones(1)}, "queries.0"),
        ({"keys.2": torch.ones(2, 2, 3, 16), "values.2": torch.ones(2, 2, 3, 16)}, "keys.2"),
        ({"valid": torch.ones(2, 3)}, "valid"),
        ({"valid": torch.ones(3).bool()}, "valid"),
        ({"positions": torch.ones(2, 4).long()}, "positions"),
        ({"keys.0": torch.ones(2, 2, 3, 16).long()}, "keys.0"),
        ({"keys.1": torch.ones(2, 2, 4, 16)}, "keys.1"),
        ({"values.0": torch.ones(2, 2, 3, 8)}, "values.0"),
        ({"prefix_tokens": None}, "prefix_tokens"),
        ({"prefix_sizes": torch.tensor([2, 0])}, "prefix_sizes"),
        ({"prefix_sizes": torch.tensor([[-1, 3]] * 2)}, "prefix_sizes"),
        ({"prefix_sizes": torch.tensor([[2, 1]] * 2)}, "prefix_keys.0"),
        ({"prefix_valid.0": torch.ones(2, 2).bool()}, "prefix_valid.1"),
    ],
)
def test_cache_load_refuses_an_invalid_tensor(
    changes: dict[str, torch.Tensor | None], name: str, tmp_path: Path
) -> None:
    decoder, path = decoder_of("llama"), tmp_path / "cache.safetensors"
    cache = replace(CACHE, prefix=PREFIX if any("prefix" in key for key in changes) else None)
    cache.save(path, decoder)
    assert KVCache.load(path, decoder).is_equal(cache)
    tensors = {key: x for key, x in (cache.tensors() | changes).items() if x is not None}
    atomic.save_artifact(path, tensors, "cache", {"model": decoder.fingerprint})
    with pytest.raises(CorruptArtifactError, match=rf"tensor {re.escape(name)} is missing or has"):
        KVCache.load(path, decoder)


@pytest.mark.usefixtures("unchecked")
def test_cache_refuses_what_would_change_its_values() -> None:
    decoder = decoder_of("llama")
    cache = decoder(decoder.embed(torch.tensor([[1, 2, 3]]))).cache
    with pytest.raises(ValueError, match="num_slots -1 is negative"):
        cache.pad_left(-1)
    with pytest.raises(ValueError, match=r"dtype torch\.int32 is not a floating-point type"):
        cache.to(dtype=torch.int32)
    masked = cache.with_valid(torch.tensor([[1, 0, 1]]))  # type: ignore[arg-type]
    assert masked.valid.tolist() == [[True, False, True]]
