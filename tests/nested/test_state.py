"""FastWeightState: rows are selected, concatenated, repeated and reset; files give back the bits and refuse others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import laconic
from laconic.errors import CorruptArtifactError, UsageError
from laconic.models.cache import KVCache
from laconic.nested import state
from laconic.nested.cms.layer import CMS
from laconic.nested.hope.model import HopeAttention
from laconic.nested.language_model import carry_state
from laconic.nested.state import (
    CMSLevelState,
    CMSState,
    FastWeightState,
    LayerState,
    LinearMemoryState,
    LowRankChange,
    MLPMemoryState,
    OpenChunk,
    reset_rows,
)
from laconic.nested.state_file import ARTIFACT_KIND, load_state, save_state
from laconic.nested.titans.layer import Titans
from laconic.storage import atomic
from laconic.storage.tensor_tree import named_tensors
from tests.models.fixtures import fresh
from tests.nested.helpers import states_equal


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear_memory(B: int, momentum: bool = False) -> LinearMemoryState:
    change = noise(B, 2, 3, 4)
    return LinearMemoryState(change, change, noise(B, 2, 3, 4) if momentum else None, torch.arange(B) + 5)


def cms_level(B: int, R: int) -> CMSLevelState:
    return CMSLevelState(
        change={"down_proj": LowRankChange(noise(B, R, 3), noise(B, R, 4)), "up_proj": noise(B, 4, 3)},
        accumulated={"down_proj": LowRankChange(noise(B, 1, 3), noise(B, 1, 4))},
        moments={"up_proj": noise(B, 4, 3)},
        start_change={"up_proj": noise(B, 4, 3)},
        num_tokens=torch.full((B,), 3),
        num_updates=torch.full((B,), 7),
    )


def full_state(B: int = 3, R: int = 2, S: int = 4) -> FastWeightState:
    """Return a state with one of every part."""
    positions = torch.arange(S).expand(B, -1).clone()
    layer = LayerState(
        conv_tails={"x": noise(B, 3, 8)},
        memory={"memory": linear_memory(B, True), "deep": MLPMemoryState(linear_memory(B), linear_memory(B))},
        cms=CMSState((cms_level(B, R), cms_level(B, R))),
        cache=KVCache((noise(B, 1, S, 2),), (noise(B, 1, S, 2),), positions, torch.ones(B, S).bool()),
    )
    open_chunk = OpenChunk(torch.arange(2 * B).reshape(B, 2), torch.full((B,), 2), (layer, LayerState()))
    return FastWeightState((layer, LayerState()), torch.full((B,), 9), open_chunk)


def test_state_tensor_names() -> None:
    names = dict(state.named_tensors(full_state()))
    assert "layers.0.cms.levels.1.down_proj.left" in names
    assert "layers.0.memory.deep.W1.change" in names
    assert len({id(x) for x in names.values()}) < len(names), "the change at a boundary is the same tensor"


def test_state_is_compared_by_identity() -> None:
    one, other = full_state(), full_state()
    for mine, theirs in ((one, other), (one.layers[0], other.layers[0]), (one.open_chunk, other.open_chunk)):
        assert mine != theirs
        assert len({mine, theirs}) == 2


def test_state_rows_select_repeat_and_concat_are_consistent() -> None:
    whole = full_state()
    some = state.select_rows(whole, [2, 0])
    assert states_equal(some.layers[0].cms, state.select_rows(whole.layers[0].cms, torch.tensor([2, 0])))
    for mask in ([True, False, True], torch.tensor([True, False, True])):
        assert states_equal(whole.select_rows(mask), whole.select_rows([0, 2]))
    assert states_equal(whole.select_rows([0, 1]).select_rows([False, True]), whole.select_rows([1]))
    parts = state.select_rows(whole, [0]), state.select_rows(whole, [1, 2])
    assert states_equal(state.concat_rows(*parts), whole)
    assert state.num_bytes(state.select_rows(whole, [0])) * 3 == state.num_bytes(state.select_rows(whole, [0, 1, 2]))


def test_state_where_rows_takes_each_row_of_every_tensor_from_one_state() -> None:
    new, old = full_state(), full_state()
    mixed = state.where_rows(torch.tensor([True, False, True]), new, old)
    for rows, source in (([0, 2], new), ([1], old)):
        chosen, expected = (dict(named_tensors(x.select_rows(rows))) for x in (mixed, source))
        for name in expected.keys() - {n for n in expected if n.endswith((".left", ".right"))}:
            assert torch.equal(chosen[name], expected[name]), name


def test_state_num_bytes_counts_a_shared_tensor_once() -> None:
    m = linear_memory(2)
    assert state.num_bytes(m) == m.change.nbytes + m.num_tokens.nbytes
    assert state.num_bytes((m, m.change[..., :1])) == state.num_bytes(m)


def test_state_repr_is_one_short_line() -> None:
    text = repr(state.FastWeightState((), torch.tensor([3, 5])))
    assert text == "FastWeightState([3, 5] tokens, 0 layers, 0.0 MiB)"
    assert repr(full_state().layers[0]).startswith("LayerState(3 rows, ")


@pytest.mark.parametrize("layer", [CMS(8, 16, (2, 4)), Titans(8, 2, 2)], ids=["cms", "titans"])
def test_layer_state_is_carried_after_detach(layer: CMS | Titans) -> None:
    x = torch.randn(2, 5, 8)
    _, whole = layer(x)
    detached = whole.detach().to("cpu")
    assert not any(t.requires_grad for _, t in named_tensors(detached))
    for _ in range(2):  # each backward pass ends at the detached state
        y, after = layer(x, detached)
        y.sum().backward()
        detached = after.detach()
    assert states_equal(whole.select_rows([1, 0]).select_rows([1, 0]), whole)


def test_state_concat_rows_pads_ranks_and_caches() -> None:
    short, long = cms_level(1, 1), cms_level(1, 3)
    both = state.concat_rows(short, long).change["down_proj"]
    for row, one in enumerate((short, long)):
        change = one.change["down_proj"]
        assert isinstance(both, LowRankChange)
        assert isinstance(change, LowRankChange)
        torch.testing.assert_close(both.left[row].mT @ both.right[row], change.left[0].mT @ change.right[0])
    cache = state.concat_rows(full_state(1, S=2), full_state(1, S=4)).layers[0].cache
    assert cache is not None
    assert cache.valid.tolist() == [[False, False, True, True], [True] * 4]


def test_state_to_keeps_counts_on_the_cpu() -> None:
    moved = state.to(full_state(), "meta", torch.float32)
    assert moved.position.device.type == "cpu"
    change = dict(state.named_tensors(moved))["layers.0.memory.memory.change"]
    assert (change.device.type, change.dtype) == ("meta", torch.float32)
    x = noise(1, 1).requires_grad_()
    assert not state.detach(LayerState(conv_tails={"x": x[None] * 2})).conv_tails["x"].requires_grad


def test_state_reset_rows_zeroes_only_these_rows() -> None:
    before = full_state()
    after = reset_rows(before, [1])
    old = dict(state.named_tensors(before))
    for name, x in state.named_tensors(after):
        assert torch.equal(x[0], old[name][0]), name
        assert not x[1].any(), name


def test_state_file_gives_back_the_bits(tmp_path: Path) -> None:
    saved, path = full_state(), tmp_path / "state.safetensors"
    save_state(saved, path, model_fingerprint="f" * 64)
    loaded = load_state(path, model_fingerprint="f" * 64)
    assert states_equal(loaded, saved)
    assert type(loaded) is FastWeightState
    assert not dict(state.named_tensors(loaded.layers[1]))
    tensors, metadata = atomic.load_artifact(path, ARTIFACT_KIND)
    assert len(tensors) == len({id(x) for _, x in state.named_tensors(saved)}), "a shared tensor is written once"
    assert (metadata["tokens"], metadata["version"]) == (3 * 9, laconic.__version__), "tokens of all rows"


@pytest.mark.parametrize("is_cache_carried", [False, True])
def test_state_file_writes_an_open_chunk_once(tmp_path: Path, is_cache_carried: bool) -> None:
    model = HopeAttention.from_decoder(fresh("llama"), (4, 16))
    with torch.no_grad():
        read = model.read_tokens(torch.arange(22)[None].repeat(2, 1)).cache
    assert isinstance(read, FastWeightState)
    saved = carry_state(model, read) if is_cache_carried else read
    saved = state.map_tensors(saved, torch.clone)
    saved = state.FastWeightState(saved.layers, saved.position, state.map_tensors(saved.open_chunk, torch.clone))
    model.save_state(saved, tmp_path / "state.safetensors")
    assert states_equal(model.load_state(tmp_path / "state.safetensors"), saved)
    tensors = atomic.load_artifact(tmp_path / "state.safetensors", ARTIFACT_KIND)[0]
    starts = {name.split(".")[3] for name in tensors if "layers_at_start" in name}
    assert starts == ({"cache"} if is_cache_carried else set())


def test_state_concat_rows_shares_what_is_shared() -> None:
    memory = linear_memory(1)
    both = state.concat_rows(memory, linear_memory(1))
    assert both.change is both.boundary_change
    assert state.concat_rows(memory) is memory


def test_state_file_refuses_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state(full_state(), path, model_fingerprint="3f2a" + "0" * 60)
    with pytest.raises(CorruptArtifactError, match="use that model"):
        load_state(path, model_fingerprint="9c1b" + "0" * 60)


@pytest.mark.parametrize(
    "shape", [{"is": "LayerState", "conv_tails": "y"}, {"is": "Popen", "args": None}, "z", ["x"], ["x", "y"]]
)
def test_state_file_refuses_a_structure_that_does_not_fit(tmp_path: Path, shape: object) -> None:
    metadata = {"model": "", "tokens": 0, "version": "", "shape": shape}
    tensors = {"x": torch.zeros(2), "y": torch.zeros(3)}
    atomic.save_artifact(tmp_path / "state.safetensors", tensors, ARTIFACT_KIND, metadata)
    with pytest.raises(CorruptArtifactError, match="state"):
        load_state(tmp_path / "state.safetensors", model_fingerprint="")


def test_state_functions_refuse_unknown_rows_and_mixtures() -> None:
    whole = full_state()
    with pytest.raises(UsageError, match="row 3"):
        state.select_rows(whole, [3])
    with pytest.raises(UsageError, match="mask of 2 rows cannot select from 3"):
        reset_rows(whole, [True, False])
    with pytest.raises(UsageError, match="different parts"):
        state.concat_rows(linear_memory(1), MLPMemoryState(linear_memory(1), linear_memory(1)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="different parts"):
        state.concat_rows({"a": noise(1, 1)}, {"b": noise(1, 1)})
    with pytest.raises(UsageError, match="leave it out"):
        state.select_rows(LayerState(), [0])


def test_fingerprint_depends_on_names_shapes_types_and_bytes() -> None:
    a = {"x": torch.zeros(2, 3), "y": torch.ones(1)}
    others = [
        a | {"x": torch.zeros(3, 2)}, a | {"x": torch.zeros(2, 3).double()}, a | {"y": torch.ones(1) * 2},
        {"z": a["x"], "y": a["y"]},
    ]  # fmt: skip
    assert state.fingerprint_tensors(a) == state.fingerprint_tensors(dict(reversed(a.items())))
    assert len({state.fingerprint_tensors(x) for x in (a, *others)}) == 5
