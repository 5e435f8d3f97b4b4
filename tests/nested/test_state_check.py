"""States of fast weights from strangers: wrong shapes, types and metadata give one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic.errors import CorruptArtifactError, UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested import state_file
from laconic.nested.cms.layer import CMS
from laconic.nested.hope.model import HopeAttention
from laconic.nested.state import FastWeightState, LayerState, map_tensors, select_rows
from laconic.nested.titans.layer import Titans

Change = Callable[[FastWeightState], Any]


@pytest.fixture(scope="module")
def model() -> HopeAttention:
    return HopeAttention.from_decoder(Decoder(DecoderConfig.tiny("llama")), chunk_sizes=(4, 8))


@pytest.fixture(scope="module")
def state(model: HopeAttention) -> FastWeightState:
    return cast(FastWeightState, model.read_tokens(torch.arange(11)[None]).cache)


def narrow(state: FastWeightState) -> FastWeightState:
    narrowed: Any = map_tensors(state, lambda x: x[..., :-1] if x.ndim == 3 else x)
    return narrowed


def with_layer(state: FastWeightState, layer: Any) -> FastWeightState:
    return replace(state, layers=(layer, *state.layers[1:]))


def with_tokens(state: FastWeightState, **changes: Any) -> FastWeightState:
    assert state.open_chunk is not None
    return replace(state, open_chunk=replace(state.open_chunk, **changes))


def shorten_values(state: FastWeightState) -> FastWeightState:
    cache = state.layers[0].cache
    assert cache is not None
    values = (cache.values[0][:, :, :-1],)
    return replace(with_layer(state, replace(state.layers[0], cache=replace(cache, values=values))), open_chunk=None)


WRONG: dict[str, tuple[Change, str]] = {
    "other widths": (narrow, "has shape"),
    "a layer less": (lambda s: replace(s, layers=s.layers[:1], open_chunk=None), "layers"),
    "no layers": (lambda s: replace(s, layers=(), open_chunk=None), "layers"),
    "a layer that is a tensor": (lambda s: replace(with_layer(s, s.position), open_chunk=None), "is a tensor"),
    "a layer without levels": (lambda s: replace(with_layer(s, LayerState()), open_chunk=None), "layers.0.cms is"),
    "counts that are floats": (lambda s: replace(s, position=s.position.float()), "position is torch.float32"),
    "masks of integers": (lambda s: map_tensors(s, lambda x: x.long() if x.dtype == torch.bool else x), "torch.int64"),
    "a cache of uneven parts": (shorten_values, "the cache of layer 0 has 10 and 11 positions"),
    "a mapping": (lambda s: replace(s, layers={"0": s.layers[0]}, open_chunk=None), "state.layers is dict"),
    "ids outside": (lambda s: with_tokens(s, input_ids=torch.full((1, 3), 10**6)), "outside the vocabulary"),
    "a long chunk": (lambda s: with_tokens(s, num_tokens=torch.tensor([12])), "an open chunk of 3 tokens"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_load_state_refuses(
    change: Change, message: str, model: HopeAttention, state: FastWeightState, tmp_path: Path
) -> None:
    path, fingerprint = tmp_path / "state.safetensors", model.weights_fingerprint
    state_file.save_state(change(state), path, model_fingerprint=fingerprint)
    with pytest.raises(CorruptArtifactError, match=f"does not fit this model: .*{message}") as caught:
        model.load_state(path)
    assert "\n" not in str(caught.value)


def test_layers_refuse_states_of_other_sizes_or_chunk_sizes() -> None:
    x = torch.randn(1, 10, 32)
    for layer, others in (
        (CMS(32, 64, (2, 4)), (CMS(32, 64, (2, 8)), CMS(32, 64, (2, 4, 8)), CMS(32, 128, (2, 4)))),
        (Titans(32, 2, 4), (Titans(32, 2, 8), Titans(32, 4, 4))),
    ):
        state = layer(x)[1]
        layer(x, select_rows(state, [0]))
        for other in others:
            with pytest.raises(
                UsageError, match=r"the state is of another layer: it is of .* in chunks of .*, this is"
            ):
                other(x, state)


def test_cms_takes_a_sequence_of_chunk_sizes() -> None:
    chunk_sizes: Any = 4
    with pytest.raises(UsageError, match=r"chunk_sizes 4: give one for each level, such as \(4,\)"):
        CMS(32, 64, chunk_sizes)


def test_hope_refuses_states_of_other_chunk_sizes(model: HopeAttention, state: FastWeightState) -> None:
    other = HopeAttention.from_decoder(Decoder(DecoderConfig.tiny("llama")), chunk_sizes=(4, 16))
    with pytest.raises(UsageError, match="the state is of another layer"):
        other.read_tokens(torch.arange(3)[None], state)


def test_load_state_returns_what_was_saved(model: HopeAttention, state: FastWeightState, tmp_path: Path) -> None:
    for n, saved in enumerate((state, model.initial_state(2), replace(state, open_chunk=None))):
        model.save_state(saved, tmp_path / f"{n}.safetensors")
        assert torch.equal(model.load_state(tmp_path / f"{n}.safetensors").position, saved.position)


@pytest.mark.parametrize(
    "source",
    [
        {"chunks": 5},
        {"chunks": [["4"]]},
        {"documents": [{"name": "a"}]},
        {"documents": [[{"name": 5, "tokens": 1, "sha256": ""}]]},
        {"tokenizer": ["a"]},
        {"levels": "fast"},
    ],
    ids=json.dumps,
)
def test_read_state_file_refuses_metadata(source: dict[str, Any], state: FastWeightState, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state_file.save_state(state, path, model_fingerprint="", source=source)
    with pytest.raises(CorruptArtifactError, match=rf"^state: .*: source\.{next(iter(source))}") as caught:
        state_file.read_state_file(path)
    assert "\n" not in str(caught.value)
