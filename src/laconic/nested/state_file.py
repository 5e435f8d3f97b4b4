"""Save and load a fast-weight state: one safetensors file with its structure, its kind and the model it belongs to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from laconic.errors import CorruptArtifactError
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
)
from laconic.storage import atomic
from laconic.storage.tensor_tree import flatten_tree, unflatten_tree

ARTIFACT_KIND = "laconic.state"
SCHEMA_VERSION = 2  # 1 had other names of fields, until laconic 0.1
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
        FastWeightState,
    )
}
HASH_PREFIX = 12  # characters of a hash in a message


class LoadedState(NamedTuple):
    """A state and the metadata of its file: model, tokens, source and more."""

    state: Any
    metadata: Mapping[str, Any]


def save_state(
    state: object,
    path: str | Path,
    *,
    memory_kind: str,
    model_fingerprint: str,
    num_tokens: int = 0,
    version: str = "",
    source: Mapping[str, object] | None = None,
) -> None:
    """Save a state; a tensor that occurs twice is written once.

    Args:
        state: a tree of state classes, tuples, mappings and tensors.
        path: file to write.
        memory_kind: kind of the memory, such as "hope".
        model_fingerprint: fingerprint of the trained weights.
        num_tokens: tokens that were read.
        version: version of the program.
        source: where the text comes from.

    Raises:
        NonFiniteError: if the state is not finite.
    """
    tensors, spec = flatten_tree(state)
    metadata = {
        "schema": SCHEMA_VERSION, "holds": memory_kind, "model": model_fingerprint, "tokens": num_tokens,
        "version": version, "shape": spec,
    }  # fmt: skip
    metadata |= {"source": dict(source)} if source else {}
    atomic.save_artifact(Path(path), tensors, ARTIFACT_KIND, metadata)


def load_state(path: str | Path, *, memory_kind: str, model_fingerprint: str, force: bool = False) -> Any:
    """Load a state, bit for bit.

    Args:
        path: file that `save_state` wrote.
        memory_kind: expected kind of the memory.
        model_fingerprint: fingerprint of the trained weights.
        force: whether to load a state of other weights too.

    Raises:
        CorruptArtifactError: for a damaged file, another schema or kind, or other weights without `force`.
    """
    state, metadata = read_state_file(path, memory_kind)
    saved = str(metadata.get("model"))
    if saved != model_fingerprint and not force:
        raise CorruptArtifactError(
            f"state: {path} belongs to model {saved[:HASH_PREFIX]}…, this is {model_fingerprint[:HASH_PREFIX]}…; "
            "load that model or pass force=True"
        )
    return state


def read_state_file(path: str | Path, memory_kind: str) -> LoadedState:
    """Load a state of any weights with its metadata; see `load_state`."""
    tensors, metadata = atomic.load_artifact(Path(path), ARTIFACT_KIND)
    if metadata.get("schema") != SCHEMA_VERSION or metadata.get("holds") != memory_kind:
        raise CorruptArtifactError(
            f"state: {path} is a {metadata.get('holds')} state of schema {metadata.get('schema')}, expected "
            f"{memory_kind} of schema {SCHEMA_VERSION}; load it with the version and command that wrote it"
        )
    unused = set(tensors)
    state = unflatten_tree(metadata.get("shape"), tensors, unused, NODE_TYPES)
    batch_sizes = {x.shape[:1] for x in tensors.values()}
    if unused or len(batch_sizes) > 1:
        problem = f"tensor {min(unused)} is not used" if unused else "its tensors have different batch sizes"
        raise CorruptArtifactError(f"state: {path} is corrupt: {problem}")
    return LoadedState(state, metadata)
