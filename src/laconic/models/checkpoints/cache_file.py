"""File format of a KV cache."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError
from laconic.models.kv_prefix import first_invalid_tensor as first_invalid_prefix_tensor
from laconic.storage import atomic

FILE_KIND = "cache"


@runtime_checkable
class HasFingerprint(Protocol):
    """A decoder, as far as a saved cache needs it."""

    @property
    def fingerprint(self) -> str: ...


def write_cache(path: Path, tensors: Mapping[str, Tensor], decoder: HasFingerprint) -> None:
    """Write the tensors of a cache, and the fingerprint of the decoder that may read them."""
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    atomic.save_artifact(path, tensors, FILE_KIND, {"model": decoder.fingerprint})


def read_cache(path: Path, decoder: HasFingerprint) -> dict[str, Tensor]:
    """Return the tensors that `write_cache` wrote.

    Raises:
        CorruptArtifactError: The file was changed, or belongs to other weights.
    """
    tensors, metadata = atomic.load_artifact(path, FILE_KIND)
    model = metadata.get("model", "(none)")
    if model != decoder.fingerprint:
        raise CorruptArtifactError(f"{path} was written for weights {model}, this model is {decoder.fingerprint}")
    invalid = first_invalid_tensor(tensors)
    if invalid:
        raise CorruptArtifactError(f"{path}: tensor {invalid} is missing or has an unexpected shape or dtype")
    return tensors


def first_invalid_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that is missing, unexpected, or of another shape or dtype than a cache has."""
    prefix = {name: t for name, t in tensors.items() if name.startswith("prefix_")}
    layers = range(sum(name.startswith("keys.") for name in tensors))
    expected = {f"{kind}.{i}" for kind in ("keys", "values") for i in layers} | {"positions", "valid"}
    unmatched = min((tensors.keys() - prefix.keys()) ^ expected, default=None)
    if unmatched:
        return unmatched
    valid, shapes = tensors["valid"], {name: tuple(t.shape) for name, t in tensors.items()}
    if valid.ndim != 2 or valid.dtype != torch.bool:
        return "valid"
    if shapes["positions"] != shapes["valid"] or tensors["positions"].dtype != torch.long:
        return "positions"
    first = shapes["keys.0"] if layers else ()
    if layers and (len(first) != 4 or first[::2] != shapes["valid"]):
        return "keys.0"
    bad = next((name for name in expected - {"positions", "valid"} if shapes[name] != first), None)
    if bad or not prefix:
        return bad
    _, G, _, E = first or (0, 0, 0, 0)
    return first_invalid_prefix_tensor(prefix, len(valid), (len(layers), G, E))
