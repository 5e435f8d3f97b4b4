"""The cache as a value: every operation against reading anew, and the old value as it was."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from laconic.errors import CorruptArtifactError
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.storage import atomic
from tests.core.readings import FAMILIES, Reading, alone, at_once, decoder_of, fresh, noise, readings, same, same_held

SOME = pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])


def state_of(decoder: Decoder, B: int, S: int, seed: int = 1) -> KVCache:
    return decoder(noise(seed, B, S, 48).to(decoder.token_embedding.weight.dtype)).state


def copied(state: KVCache) -> KVCache:
    return state.map_tensors(lambda x: x.detach().clone())


@SOME
@given(reading=readings(), data=st.data())
@settings(max_examples=3)
def test_crop_is_never_having_read_the_rest(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder, T = decoder_of(name), reading.vectors.shape[1]
    n = data.draw(st.integers(0, T))
    whole = at_once(decoder, reading).cache
    before, cropped, more = copied(whole), whole.crop(n), noise(2, len(reading.live), 3, 48)
    first = decoder(reading.vectors[:, :n], live=reading.live[:, :n]).state if n else None
    same(decoder(more, cropped).hidden, decoder(more, first).hidden)
    assert whole.crop(T).equal(whole)
    assert n == cropped.S
    assert whole.equal(before)


@SOME
@given(reading=readings(dead=False), data=st.data())
@settings(max_examples=3)
def test_keep_is_switching_off_the_others(name: str, reading: Reading, data: st.DataObject) -> None:
    """In any order, as keys carry their positions; a window counts live slots in the order they stand."""
    decoder, (B, T) = decoder_of(name), reading.live.shape
    state = at_once(decoder, reading).cache
    K = data.draw(st.integers(1, T))
    slots = torch.stack([torch.randperm(T, generator=torch.Generator().manual_seed(b))[:K] for b in range(B)])
    slots = slots.sort(1).values if "window" in name or name == "mistral" else slots
    kept, live = state.gather_slots(slots), torch.zeros_like(state.valid).scatter(1, slots, True)
    more = noise(2, B, 3, 48)
    same(decoder(more, kept).hidden, decoder(more, state.with_valid(live)).hidden)
    assert state.gather_slots(torch.arange(T).expand(B, T)).equal(state)
    assert torch.equal(kept.keys[1][0, :, 0], state.keys[1][0, :, slots[0, 0]])


@SOME
@given(reading=readings(B=4), data=st.data())
@settings(max_examples=3)
def test_take_and_join_are_batches(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder, B = decoder_of(name), len(reading.live)
    state = at_once(decoder, reading).cache
    rows = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=5))
    taken, more = state.select_rows(rows), noise(2, 5, 2, 48)[: len(rows)]
    for i, row in enumerate(rows):
        same(decoder(more, taken).hidden[i], decoder(more[i : i + 1], state.select_rows([row])).hidden[0])
    assert state.select_rows(list(range(B))).equal(state)
    singles = [alone(decoder, reading, row).cache for row in rows]
    joined = KVCache.concat_rows(*singles)
    assert max(single.S for single in singles) == joined.S
    for row, single in enumerate(singles):
        assert not joined.valid[row, : joined.S - single.S].any()
    same_held(joined, taken)
    same(decoder(more, joined).hidden, decoder(more, taken).hidden)


@SOME
def test_join_pads_left_as_a_batch_would_be(name: str) -> None:
    decoder = decoder_of(name)
    long, short = noise(1, 1, 5, 48), noise(2, 1, 2, 48)
    live = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    batch = decoder(torch.cat([long, torch.cat([noise(3, 1, 3, 48), short], 1)]), live=live).state
    joined = KVCache.concat_rows(decoder(long).state, decoder(short).state)
    assert torch.equal(joined.valid, live)
    assert torch.equal(joined.positions, batch.positions)
    same_held(joined, batch)
    same(decoder(noise(4, 2, 2, 48), joined).hidden, decoder(noise(4, 2, 2, 48), batch).hidden)


@SOME
@pytest.mark.parametrize("B", [1, 2])
def test_fork_gives_rows_that_go_their_own_ways(name: str, B: int) -> None:
    decoder = decoder_of(name)
    state = state_of(decoder, B, 5)
    before, forked = copied(state), state.repeat_rows(3)
    more = noise(2, 3 * B, 2, 48)
    read = decoder(more, forked)
    for i in range(3 * B):
        same(read.hidden[i], decoder(more[i : i + 1], state.select_rows([i // 3])).hidden[0])
    assert state.equal(before)
    assert forked.equal(state.select_rows([row for row in range(B) for _ in range(3)]))
    assert (forked.keys[0].data_ptr() == state.keys[0].data_ptr()) == (B == 1)


@SOME
@given(reading=readings(), data=st.data())
@settings(max_examples=3)
def test_append_is_what_a_pass_does(name: str, reading: Reading, data: st.DataObject) -> None:
    decoder, T = decoder_of(name), reading.vectors.shape[1]
    state = at_once(decoder, reading).cache
    n = data.draw(st.integers(0, T))
    left, right = state.crop(n), state.gather_slots(torch.arange(n, T).expand(len(reading.live), -1))
    assert left.append(right).equal(state)
    nothing = KVCache.empty(decoder.config, len(reading.live), torch.float64)
    assert nothing.append(state).equal(state)
    assert state.append(nothing).equal(state)


@SOME
def test_slots_switched_off_are_as_if_removed(name: str) -> None:
    decoder, more = decoder_of(name), noise(2, 2, 2, 48)
    state = state_of(decoder, 2, 6)
    live = torch.tensor([[True, False, True, True, False, True], [False, True, True, True, True, False]])
    off, slots = state.with_valid(live), torch.stack([row.nonzero()[:, 0] for row in live])
    a, b = decoder(more, off), decoder(more, state.gather_slots(slots))
    same(a.hidden, b.hidden)
    assert torch.equal(a.state.positions[:, -2:], b.state.positions[:, -2:])
    assert off.with_valid(state.valid).equal(state)


def test_gradients_flow_through_every_operation() -> None:
    decoder = decoder_of("llama")
    state = state_of(decoder, 2, 3)
    slots = torch.tensor([[2, 0], [1, 1]])

    def operate(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = KVCache((keys,), (values,), state.positions, state.valid)
        made = cache.append(cache.gather_slots(slots)).crop(4).select_rows([1, 1, 0]).repeat_rows(2)
        made = KVCache.concat_rows(made, cache.gather_slots(slots))
        return (*made.keys, *made.values)

    assert gradcheck(operate, tuple(noise(seed, 2, 1, 3, 2).requires_grad_() for seed in (4, 5)))
    vectors = noise(1, 1, 3, 48).requires_grad_()
    held = decoder(vectors).state
    decoder(noise(2, 1, 1, 48), held).hidden.sum().backward()
    assert vectors.grad.any()
    assert not any(x.requires_grad for x in held.detach().keys)


def test_it_is_frozen_and_knows_its_size() -> None:
    decoder = decoder_of("llama", torch.float32)
    state = state_of(decoder, 2, 5)
    with pytest.raises(FrozenInstanceError):
        state.valid = state.valid
    config = decoder.config
    L, G, E = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    assert state.num_bytes == 2 * L * 2 * G * 5 * E * 4 + 9 * 2 * 5
    assert (state.B, state.S) == (2, 5)
    assert KVCache.empty(config, 3).S == 0


def test_elsewhere_and_in_another_type() -> None:
    state = state_of(decoder_of("llama"), 1, 3)
    moved = state.to("meta")
    assert {x.device.type for x in moved.tensors().values()} == {"meta"}
    half = state.to(dtype=torch.bfloat16)
    assert half.keys[0].dtype == half.values[1].dtype == torch.bfloat16
    assert (half.positions.dtype, half.valid.dtype) == (torch.int64, torch.bool)
    assert state.to("cpu", torch.float64).equal(state)


def test_equal_sees_every_tensor() -> None:
    state = state_of(decoder_of("llama"), 1, 3)
    for name in state.tensors():
        other = copied(state)
        changed = other.tensors()[name]
        changed[..., -1] = ~changed[..., -1] if name == "live" else changed[..., -1] + 1
        assert not state.equal(other), name
    assert state.equal(copied(state))
    assert not state.equal(state.crop(2))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_by_its_decoder_only(name: str, tmp_path: Path) -> None:
    decoder = fresh(name)
    state = state_of(decoder, 2, 4).with_valid(torch.tensor([[False, True, True, True]] * 2))
    state.save(tmp_path / "cache.safetensors", decoder)
    loaded = KVCache.load(tmp_path / "cache.safetensors", decoder)
    assert loaded.equal(state.detach())
    same(decoder(noise(2, 2, 1, 48).float(), loaded).hidden, decoder(noise(2, 2, 1, 48).float(), state).hidden)
    with torch.no_grad():
        decoder.token_embedding.weight[0, 0] += 1
    with pytest.raises(CorruptArtifactError, match=r"was written for weights [0-9a-f]+, this model is [0-9a-f]+"):
        KVCache.load(tmp_path / "cache.safetensors", decoder)


def test_what_does_not_fit_is_refused() -> None:
    state, other = state_of(decoder_of("llama"), 1, 12), state_of(decoder_of("llama"), 2, 3)
    with pytest.raises(ValueError, match=r"^crop\(40\): 12 slots are held$"):
        state.crop(40)
    with pytest.raises(ValueError, match=r"^crop\(-1\): 12 slots are held$"):
        state.crop(-1)
    with pytest.raises(ValueError, match=r"^keep: slot 19 of 12 in row 0$"):
        state.gather_slots(torch.tensor([[3, 19]]))
    with pytest.raises(ValueError, match=r"^keep: slot -1 of 12 in row 0$"):
        state.gather_slots(torch.tensor([[-1]]))
    with pytest.raises(ValueError, match=r"^keep: slots of 2 rows, the cache has 1$"):
        state.gather_slots(torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"^append: 2 rows of 2 layers to 1 of 2$"):
        state.append(other)
    with pytest.raises(ValueError, match=r"^live is \[2, 3\], the cache holds \[1, 12\]$"):
        state.with_valid(other.valid)


@pytest.mark.usefixtures("as_users_call_it")
def test_shapes_that_do_not_fit_are_refused() -> None:
    state = state_of(decoder_of("llama"), 2, 3)
    with pytest.raises(ValueError, match=r"^keep: slots are \[3\]; give one list a row, \[B, K\]$"):
        state.gather_slots(torch.arange(3))
    for row in (2, -1):
        with pytest.raises(ValueError, match=rf"^take: row {row} of 2$"):
            state.select_rows([0, row])
    assert state.select_rows([]).B == 0
    with pytest.raises(ValueError, match=r"^join: no cache is given$"):
        KVCache.concat_rows()
    with pytest.raises(ValueError, match=r"^join: 2 layers of 4 heads × 12 to 2 of 2 × 16$"):
        KVCache.concat_rows(state, state_of(decoder_of("gpt2"), 1, 3))


TENSORS = dict(KVCache.empty(decoder_of("llama").config, 2).pad_left(3).tensors())


@pytest.mark.parametrize(
    ("changes", "odd"),
    [
        ({"values.1": None}, "values.1"),
        ({"live": None}, "live"),
        ({"queries.0": torch.ones(1)}, "queries.0"),
        ({"live": torch.ones(2, 3)}, "live"),
        ({"positions": torch.ones(2, 3)}, "positions"),
        ({"positions": torch.ones(2, 4).long()}, "positions"),
        ({"keys.0": torch.ones(2, 2, 4, 16)}, "keys.0"),
        ({"values.1": torch.ones(2, 2, 3, 15)}, "values.1"),
        (dict.fromkeys(TENSORS), "live"),
    ],
)
def test_a_file_of_another_maker(changes: dict[str, torch.Tensor | None], odd: str, tmp_path: Path) -> None:
    decoder = fresh("llama")
    tensors = {name: t for name, t in {**TENSORS, **changes}.items() if t is not None}
    atomic.save_artifact(tmp_path / "cache", tensors, "cache", {"model": decoder.fingerprint})
    with pytest.raises(
        CorruptArtifactError, match=rf"/cache: {odd} is missing or does not fit a cache; take another copy$"
    ):
        KVCache.load(tmp_path / "cache", decoder)


def test_a_file_that_names_no_model(tmp_path: Path) -> None:
    atomic.save_artifact(tmp_path / "cache", TENSORS, "cache", {})
    with pytest.raises(
        CorruptArtifactError, match=r"/cache was written for weights of no name, this model is [0-9a-f]+$"
    ):
        KVCache.load(tmp_path / "cache", fresh("llama"))
