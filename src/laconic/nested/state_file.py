"""A state on disk: one safetensors file that knows what kind of memory it holds and which weights it belongs to."""

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

ARTIFACT_KIND = "laconic.state"  # of the artifact
SCHEMA_VERSION = 1
NODE_TYPES = {
    form.__name__: form
    for form in (
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
HASH_PREFIX = 12  # characters of a hash that a message shows


class LoadedState(NamedTuple):
    """A state as its file has it, and what the file says of it: model, tokens, source, and so on."""

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
    """One file; a tensor that stands in two places is written once.

    `kind` is the memory's ("titans", "hope"), `model` the `fingerprint` of its slow tensors, `tokens` how many were
    read, `version` of the program; `source` says where it comes from. Raises `NonFinite` (65) for a state that is not
    finite.
    """
    tensors, shape = flatten_tree(state)
    about = {
        "schema": SCHEMA_VERSION,
        "holds": memory_kind,
        "model": model_fingerprint,
        "tokens": num_tokens,
        "version": version,
    }
    about |= {"paper_table": dict(source)} if source else {}
    atomic.save_artifact(Path(path), tensors, ARTIFACT_KIND, {**about, "shape": shape})


def load_state(path: str | Path, *, memory_kind: str, model_fingerprint: str, force: bool = False) -> Any:
    """What `save` wrote, bit for bit. Raises `Damaged` (76) for another schema or kind, or a file that was changed.

    A state of other weights is refused too, unless `force`.
    """
    state, about = read_state_file(path, memory_kind)
    made = str(about.get("model"))
    if made != model_fingerprint and not force:
        raise CorruptArtifactError(
            f"state: made by model {made[:HASH_PREFIX]}…, this is {model_fingerprint[:HASH_PREFIX]}…; load that model or pass force=True"
        )
    return state


def read_state_file(path: str | Path, memory_kind: str) -> LoadedState:
    """What `save` wrote, whichever weights it belongs to. Raises `Damaged` (76) as `load` does."""
    tensors, about = atomic.load_artifact(Path(path), ARTIFACT_KIND)
    if about.get("schema") != SCHEMA_VERSION or about.get("holds") != memory_kind:
        there = f"{about.get('holds')} of schema {about.get('schema')}"
        raise CorruptArtifactError(
            f"state: {path} holds {there}, asked was {memory_kind} of schema {SCHEMA_VERSION}; load it with what made it"
        )
    left = set(tensors)
    state = unflatten_tree(about.get("shape"), tensors, left, NODE_TYPES)
    rows = {x.shape[:1] for x in tensors.values()}
    if left or len(rows) > 1:
        odd = f"{min(left)} stands nowhere in it" if left else "its tensors have different numbers of rows"
        raise CorruptArtifactError(f"state: {path}: {odd}; take another copy")
    return LoadedState(state, about)
