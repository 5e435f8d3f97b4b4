"""File format of a KV cache."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError
from laconic.storage import atomic

FILE_KIND = "cache"
ExpectedTensor = tuple[tuple[int, ...], torch.dtype | None]  # shape, dtype; None is any floating-point dtype


def read_cache(path: Path, fingerprint: str) -> dict[str, Tensor]:
    """Return the tensors of a saved cache; CorruptArtifactError if it was changed, or belongs to other weights."""
    tensors, metadata = atomic.load_artifact(path, FILE_KIND)
    model = metadata.get("model", "(none)")
    if model != fingerprint:
        raise CorruptArtifactError(f"{path} was written for weights {model}, this model is {fingerprint}")
    invalid = first_invalid_tensor(tensors)
    if invalid:
        raise CorruptArtifactError(f"{path}: tensor {invalid} is missing or has an unexpected shape or dtype")
    return tensors


def first_invalid_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that is missing, unexpected, or of another shape or dtype than a cache has."""
    expected = list_expected_tensors(tensors)
    invalid = min(tensors.keys() ^ expected.keys(), default=None)
    for name, (shape, dtype) in expected.items() if invalid is None else ():
        x = tensors[name]
        has_dtype = x.is_floating_point() if dtype is None else x.dtype == dtype
        if x.shape != shape or not has_dtype or (name == "prefix_sizes" and bool((x < 0).any())):
            return name
    return invalid


def list_expected_tensors(tensors: Mapping[str, Tensor]) -> dict[str, ExpectedTensor]:
    """Return what each tensor of a cache must be, in the order in which they are checked.

    The sizes are those of `valid` [B, S], `keys.0` [B, G, S, E] and `prefix_sizes` [L, G].
    """
    L, missing = sum(name.startswith("keys.") for name in tensors), torch.empty(0)
    valid, keys, sizes = (tensors.get(name, missing) for name in ("valid", "keys.0", "prefix_sizes"))
    B, S = valid.shape if valid.ndim == 2 else (0, 0)
    G, E = keys.shape[1::2] if keys.ndim == 4 else (0, 0)
    expected: dict[str, ExpectedTensor] = {"valid": ((B, S), torch.bool), "positions": ((B, S), torch.long)}
    expected |= {f"{kind}.{i}": ((B, G, S, E), None) for kind in ("keys", "values") for i in range(L)}
    if not any(name.startswith("prefix_") for name in tensors):
        return expected
    expected |= {"prefix_sizes": ((L, G), torch.long), "prefix_tokens": ((B,), torch.long)}
    lengths = [int(N) for N in sizes.long().sum(1)] if sizes.shape == (L, G) else [0] * L
    for kind in ("keys", "valid", "values") if "prefix_valid.0" in tensors else ("keys", "values"):
        for i, N in enumerate(lengths):
            expected[f"prefix_{kind}.{i}"] = ((B, N), torch.bool) if kind == "valid" else ((B, N, E), None)
    return expected
