"""Save and load a fast-weight state: one safetensors file with its structure and the model it belongs to.

A state with an open chunk refers to the layers twice, as they are and as they were at the start of the chunk. What has
not changed since then is written once, and a KV cache of the start as its number of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Int
from torch import Tensor

from laconic import __version__
from laconic.errors import CorruptArtifactError
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.nested.state import (
    CMSLevelState,
    CMSState,
    FastWeightState,
    LayerState,
    LinearMemoryState,
    LowRankChange,
    MLPMemoryState,
    OpenChunk,
    bit_equal,
    map_tensors,
    to,
)
from laconic.nested.state_check import check_metadata, translate_structure_errors
from laconic.storage import atomic
from laconic.storage.tensor_tree import flatten_tree, named_tensors, unflatten_tree

Tree = TypeVar("Tree")
ARTIFACT_KIND = "laconic.state"


@dataclass(frozen=True)
class StoredOpenChunk:
    """An `OpenChunk` in a file; the caches of its layers are the first slots of those that the layers have now."""

    input_ids: Int[Tensor, "B N"]
    num_tokens: Int[Tensor, " B"]
    layers_at_start: tuple[LayerState, ...]
    cache_slots: Int[Tensor, " B"]


NODE_TYPES = {
    node_type.__name__: node_type
    for node_type in (
        KVCache,
        CMSState,
        MLPMemoryState,
        LowRankChange,
        LayerState,
        CMSLevelState,
        LinearMemoryState,
        OpenChunk,
        StoredOpenChunk,
        FastWeightState,
    )
}
HASH_PREFIX = 12  # characters of a hash in a message


class LoadedState(NamedTuple):
    """A state and the metadata of its file: model, tokens, source and more."""

    state: Any
    metadata: Mapping[str, Any]


def save_state(
    state: FastWeightState, path: str | Path, *, model_fingerprint: str, source: Mapping[str, object] | None = None
) -> None:
    """Save a state with the number of tokens that its rows have read; a tensor that occurs twice is written once.

    `source` says where the text comes from. Raises `NonFiniteError` if the state is not finite.
    """
    tensors, spec = flatten_state(state)
    metadata = {
        "model": model_fingerprint, "tokens": int(state.position.sum()), "version": __version__, "shape": spec
    }  # fmt: skip
    metadata |= {"source": dict(source)} if source else {}
    atomic.save_artifact(Path(path), tensors, ARTIFACT_KIND, metadata, is_named=True)


def load_state(path: str | Path, *, model_fingerprint: str) -> Any:
    """Load a state, bit for bit. Raises `CorruptArtifactError` for a damaged file, another kind, or other weights."""
    state, metadata = read_state_file(path)
    saved = str(metadata.get("model"))
    if saved != model_fingerprint:
        raise CorruptArtifactError(
            f"state: {path} belongs to model {saved[:HASH_PREFIX]}…, this is {model_fingerprint[:HASH_PREFIX]}…; "
            "use that model (if the run was trained further: RUN/steps/STEP), or read the text again"
        )
    return state


def read_state_file(path: str | Path) -> LoadedState:
    """Load a state of any weights with its metadata; see `load_state`."""
    tensors, metadata = atomic.load_artifact(Path(path), ARTIFACT_KIND)
    check_metadata(metadata, path)
    unused = set(tensors)
    with translate_structure_errors(path):
        state = unflatten_state(metadata.get("shape"), tensors, unused)
    batch_sizes = {x.shape[:1] for x in tensors.values()}
    if unused or len(batch_sizes) > 1:
        problem = f"tensor {min(unused)} is not used" if unused else "its tensors have different batch sizes"
        raise CorruptArtifactError(f"state: {path} is corrupt: {problem}")
    return LoadedState(state, metadata)


def flatten_state(state: object, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a state by name, each once, and a JSON value from which `unflatten_state` rebuilds it."""
    if isinstance(state, FastWeightState) and state.open_chunk is not None:
        state = replace(state, open_chunk=cast(Any, pack_open_chunk(state.layers, state.open_chunk)))
    return flatten_tree(state, prefix)


def unflatten_state(spec: Any, tensors: Mapping[str, Tensor], unused: set[str]) -> Any:
    """Rebuild a state; see `unflatten_tree` for the arguments."""
    state = unflatten_tree(spec, tensors, unused, NODE_TYPES)
    if isinstance(state, FastWeightState) and isinstance(state.open_chunk, StoredOpenChunk):
        state = replace(state, open_chunk=unpack_open_chunk(state.layers, state.open_chunk))
    return state


def restore_dtypes(state: FastWeightState, dtype: torch.dtype) -> FastWeightState:
    """Return a state with KV caches in the dtype of the weights, and everything else in that of sums."""

    def restore(layers: tuple[LayerState, ...]) -> tuple[LayerState, ...]:
        return tuple(x if x.cache is None else replace(x, cache=x.cache.to(dtype=dtype)) for x in layers)

    state = to(state, dtype=accumulation_dtype(dtype))
    chunk = state.open_chunk
    chunk = None if chunk is None else replace(chunk, layers_at_start=restore(chunk.layers_at_start))
    return replace(state, layers=restore(state.layers), open_chunk=chunk)


def pack_open_chunk(layers: Sequence[LayerState], chunk: OpenChunk) -> OpenChunk | StoredOpenChunk:
    """Return an open chunk that shares its tensors with the layers where they are equal, in its stored form if all of
    its caches are beginnings of the layers'.
    """
    starts = tuple(map(share_equal_tensors, chunk.layers_at_start, layers))
    caches = [(start.cache, layer.cache) for start, layer in zip(starts, layers, strict=True)]
    for before, now in caches:
        if before is None or now is None or before.S > now.S or not before.is_equal(now.crop(before.S)):
            return replace(chunk, layers_at_start=starts)
    # all layers have read the same tokens; like every tensor of a state, the number has the batch as a dimension
    num_slots = 0 if not caches or caches[0][0] is None else caches[0][0].S
    slots = torch.full((len(chunk.num_tokens),), num_slots)
    starts = tuple(replace(start, cache=None) for start in starts)
    return StoredOpenChunk(chunk.input_ids, chunk.num_tokens, starts, slots)


def unpack_open_chunk(layers: Sequence[LayerState], chunk: StoredOpenChunk) -> OpenChunk:
    """Return the open chunk that `pack_open_chunk` packed. Raises `CorruptArtifactError` for caches that do not fit."""
    slots = int(chunk.cache_slots[0])
    caches = [layer.cache for layer in layers if layer.cache is not None and 0 <= slots <= layer.cache.S]
    if not len(caches) == len(layers) == len(chunk.layers_at_start):
        raise CorruptArtifactError(f"state: an open chunk began at slot {slots}, which its caches do not have")
    pairs = zip(chunk.layers_at_start, caches, strict=True)
    starts = tuple(replace(start, cache=cache.crop(slots)) for start, cache in pairs)
    return OpenChunk(chunk.input_ids, chunk.num_tokens, starts)


def share_equal_tensors(tree: Tree, other: object) -> Tree:
    """Replace the tensors of a tree by those of another tree that have the same name and bits."""
    theirs = dict(named_tensors(other))
    pairs = [(x, theirs[name]) for name, x in named_tensors(tree) if name in theirs]
    shared = {id(x): y for x, y in pairs if x is y or bit_equal(x, y)}
    return map_tensors(tree, lambda x: shared.get(id(x), x))
