"""A state as a value: rows taken, joined, forked and reset; a file that gives back the bits and refuses strangers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError, UsageError
from laconic.models.cache import KVCache
from laconic.nested import state
from laconic.nested.state import (
    CMSLevelState,
    CMSState,
    FastWeightState,
    LayerState,
    LinearMemoryState,
    LowRankChange,
    MLPMemoryState,
    OpenChunk,
)
from laconic.nested.state_file import load_state, save_state
from laconic.storage import atomic


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def matrix(B: int, momentum: bool = False) -> LinearMemoryState:
    now = noise(B, 2, 3, 4)
    return LinearMemoryState(now, now, noise(B, 2, 3, 4) if momentum else None, torch.arange(B) + 5)


def level(B: int, R: int) -> CMSLevelState:
    return CMSLevelState(
        change={"down_proj": LowRankChange(noise(B, R, 3), noise(B, R, 4)), "up_proj": noise(B, 4, 3)},
        accumulated={"down_proj": LowRankChange(noise(B, 1, 3), noise(B, 1, 4))},
        moments={"up_proj": noise(B, 4, 3)},
        start_change={"up_proj": noise(B, 4, 3)},
        num_tokens=torch.full((B,), 3),
        num_updates=torch.full((B,), 7),
    )


def whole(B: int = 3, R: int = 2, S: int = 4) -> FastWeightState:
    """One of everything."""
    cache = KVCache((noise(B, 1, S, 2),), (noise(B, 1, S, 2),), torch.arange(S).expand(B, -1).clone(),
                  torch.ones(B, S).bool())  # fmt: skip
    layer = LayerState(
        conv_tails={"x": noise(B, 3, 8)},
        memory={"mixer": matrix(B, True), "deep": MLPMemoryState(matrix(B), matrix(B))},
        cms=CMSState((level(B, R), level(B, R))),
        cache=cache,
    )
    opened = OpenChunk(torch.arange(2 * B).reshape(B, 2), torch.full((B,), 2), (layer,))
    return FastWeightState((layer, LayerState()), torch.full((B,), 9), opened)


def test_names_on_disk_are_the_specified() -> None:
    names = dict(state.named_tensors(whole()))
    assert "layers.0.cms.levels.1.down_proj.left" in names
    assert "layers.0.memory.deep.W1.now" in names
    assert len({id(x) for x in names.values()}) < len(names), "a boundary that is the current state is the same tensor"


def test_rows_are_taken_forked_and_joined() -> None:
    held = whole()
    few = state.select_rows(held, [2, 0])
    assert state.states_equal(few.layers[0].cms, state.select_rows(held.layers[0].cms, torch.tensor([2, 0])))
    assert state.states_equal(state.concat_rows(state.select_rows(held, [0]), state.select_rows(held, [1, 2])), held)
    forked = state.repeat_rows(held, 2)
    assert state.states_equal(state.select_rows(forked, [0, 2, 4]), held)
    assert state.states_equal(state.select_rows(forked, [1, 3, 5]), held)
    assert state.num_bytes(state.select_rows(held, [0])) * 3 == state.num_bytes(state.select_rows(held, [0, 1, 2]))


def test_a_state_in_two_places_is_counted_once() -> None:
    m = matrix(2)
    assert state.num_bytes(m) == m.change.nbytes + m.num_tokens.nbytes


def test_joined_rows_of_different_lengths_are_padded_with_what_adds_nothing() -> None:
    short, long = level(1, 1), level(1, 3)
    both = state.concat_rows(short, long).change["down_proj"]
    for row, one in enumerate((short, long)):
        made = one.change["down_proj"]
        assert isinstance(both, LowRankChange)
        assert isinstance(made, LowRankChange)
        torch.testing.assert_close(both.left[row].mT @ both.right[row], made.left[0].mT @ made.right[0])
    caches = state.concat_rows(whole(1, S=2), whole(1, S=4)).layers[0].cache
    assert caches is not None
    assert caches.valid.tolist() == [[False, False, True, True], [True] * 4]


def test_moved_elsewhere_counts_stay() -> None:
    moved = state.to(whole(), "meta", torch.float32)
    assert moved.position.device.type == "cpu"
    now = dict(state.named_tensors(moved))["layers.0.memory.memory.now"]
    assert (now.device.type, now.dtype) == ("meta", torch.float32)
    x = noise(1, 1).requires_grad_()
    assert not state.detach(LayerState(conv_tails={"x": x[None] * 2})).conv_tails["x"].requires_grad


def test_reset_gives_some_rows_their_start() -> None:
    held = whole()
    after = state.reset_rows(held, [1])
    for name, x in state.named_tensors(after):
        old = dict(state.named_tensors(held))[name]
        assert torch.equal(x[0], old[0]), name
        if "cache" not in name and name != "open.ids":
            assert not x[1].any(), name
    cache = after.layers[0].cache
    assert cache is not None
    assert cache.valid.any(1).tolist() == [True, False, True]


def test_reset_of_one_part_leaves_the_others() -> None:
    held = whole()
    after = state.reset_rows(held, parts=("cms",), levels=[1])
    first, second = (dict(state.named_tensors(x)) for x in (held, after))
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed == {name for name in first if ".levels.1." in name} | {"open.count"}
    assert not any(second[name].any() for name in changed)
    assert not state.reset_rows(held, parts=("cache",)).position.any()
    assert state.reset_rows(held, parts=("memory",)).position.tolist() == [9] * 3


def test_a_file_gives_back_the_bits(tmp_path: Path) -> None:
    held = whole()
    save_state(
        held, tmp_path / "me.safetensors", memory_kind="hope", model_fingerprint="f" * 64, num_tokens=9, version="0"
    )
    found = load_state(tmp_path / "me.safetensors", memory_kind="hope", model_fingerprint="f" * 64)
    assert state.states_equal(found, held)
    assert type(found) is FastWeightState
    assert found.layers[1] == LayerState()
    tensors, about = atomic.load_artifact(tmp_path / "me.safetensors", "laconic.state")
    assert len(tensors) == len({id(x) for _, x in state.named_tensors(held)}), "a tensor in two places is written once"
    assert {name: about[name] for name in ("schema", "holds", "tokens", "version")} == {
        "schema": 1, "holds": "hope", "tokens": 9, "version": "0",
    }  # fmt: skip


def test_states_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "me.safetensors"
    save_state(whole(), path, memory_kind="hope", model_fingerprint="3f2a" + "0" * 60)
    with pytest.raises(CorruptArtifactError, match="state: made by model 3f2a00000000…, this is 9c1b"):
        load_state(path, memory_kind="hope", model_fingerprint="9c1b" + "0" * 60)
    assert state.states_equal(
        load_state(path, memory_kind="hope", model_fingerprint="9c1b", force=True),
        load_state(path, memory_kind="hope", model_fingerprint="", force=True),
    )
    with pytest.raises(
        CorruptArtifactError, match="holds hope of schema 1, asked was titans of schema 1; load it with what made"
    ):
        load_state(path, memory_kind="titans", model_fingerprint="")
    monkeypatch.setattr("laconic.nested.state_file.SCHEMA_VERSION", 2)
    with pytest.raises(CorruptArtifactError, match="asked was hope of schema 2"):
        load_state(path, memory_kind="hope", model_fingerprint="")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"is": "Layer", "tails": "y"}, "is no part of a state and no tensor in the file; take another copy"),
        ({"is": "Popen", "args": None}, "is no part of a state and no tensor in the file"),
        ("z", "'z' is no part of a state"),
        (["x"], "y stands nowhere in it; take another copy"),
        (["x", "y"], "its tensors have different numbers of rows"),
    ],
)
def test_a_form_that_does_not_fit_its_tensors_is_refused(tmp_path: Path, shape: object, says: str) -> None:
    about = {"schema": 1, "holds": "hope", "model": "", "shape": shape}
    tensors = {"x": torch.zeros(2), "y": torch.zeros(3)}
    atomic.save_artifact(tmp_path / "me.safetensors", tensors, "laconic.state", about)
    with pytest.raises(CorruptArtifactError, match=says):
        load_state(tmp_path / "me.safetensors", memory_kind="hope", model_fingerprint="")


def test_what_cannot_be_meant_is_refused() -> None:
    held = whole()
    with pytest.raises(UsageError, match="state: row 3 was asked for, there are rows 0 to 2"):
        state.select_rows(held, [3])
    with pytest.raises(UsageError, match="reset: 'cmss' was asked for; a state holds memory, cms, cache"):
        state.reset_rows(held, parts=("cmss",))
    with pytest.raises(UsageError, match="join: states of different forms, Matrix, Deep; join one model's"):
        state.concat_rows(matrix(1), MLPMemoryState(matrix(1), matrix(1)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"join: states that hold different parts, .* and others; join one model's"):
        state.concat_rows({"a": noise(1, 1)}, {"b": noise(1, 1)})
    with pytest.raises(UsageError, match="join: no state was given; give one or more of the same model"):
        state.concat_rows()
    with pytest.raises(UsageError, match=r"state: it holds no tensor, so no rows; begin with start\(params, batch\)"):
        state.select_rows(LayerState(), [0])


def test_the_fingerprint_is_of_names_shapes_types_and_bytes() -> None:
    a = {"x": torch.zeros(2, 3), "y": torch.ones(1)}
    found = [
        state.fingerprint_tensors(w)
        for w in (a, dict(reversed(a.items())), a | {"x": torch.zeros(3, 2)}, a | {"x": torch.zeros(2, 3).double()},
                  a | {"y": torch.ones(1) * 2}, {"z": a["x"], "y": a["y"]})
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len(set(found)) == 5
