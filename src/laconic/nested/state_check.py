"""Check a fast-weight state from a file before it is used: the types of its metadata, and its shapes."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt, PositiveInt
from torch import Tensor

from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.nested.state import FastWeightState, LayerState, LowRankChange, OpenChunk
from laconic.storage.strict_json import validate_json
from laconic.storage.tensor_tree import named_children


@contextmanager
def translate_structure_errors(path: object) -> Generator[None]:
    """Turn what goes wrong with a state of another structure into `CorruptArtifactError`."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptArtifactError(
            f"state: {path} does not have the structure of a state ({reason}); use an intact copy"
        ) from None


class StoredDocument(BaseModel, strict=True):
    """A text that was read."""

    name: str
    tokens: NonNegativeInt
    sha256: str


class StateSource(BaseModel, strict=True):
    """Where a state comes from."""

    chunks: list[list[PositiveInt]] | None = None
    tokenizer: str | None = None
    created: str | None = None
    checkpoint: str | None = None
    levels: dict[str, Any] | None = None
    documents: list[list[StoredDocument]] | None = None


class StateMetadata(BaseModel, strict=True):
    """Metadata of a state's file; others are ignored."""

    model: str
    tokens: NonNegativeInt
    version: str
    source: StateSource | None = None


def check_metadata(metadata: Mapping[str, Any], path: object) -> None:
    try:
        validate_json(StateMetadata, dict(metadata), f"state: {path}", "use an intact copy")
    except InputError as error:
        raise CorruptArtifactError(str(error)) from None


def check_fits_model(state: object, initial: FastWeightState, vocab_size: int, path: object) -> None:
    """Raise `CorruptArtifactError` unless a state has the structure, shapes and kinds of numbers of a model's state.

    Dimensions that are empty in the initial state grow while reading.
    """
    problem = find_mismatch(state, initial, "state")
    if problem is None and isinstance(state, FastWeightState):
        problem = find_uneven_cache(state.layers)
        if state.open_chunk is not None:
            problem = problem or find_uneven_cache(state.open_chunk.layers_at_start)
            problem = problem or find_invalid_tokens(state.open_chunk, vocab_size)
    if problem is not None:
        raise CorruptArtifactError(f"state: {path} does not fit this model: {problem}; use an intact copy")


def check_waiting_tokens(state: FastWeightState, chunk_sizes: Sequence[Sequence[int]]) -> None:
    """Raise `UsageError` if more tokens wait for an update than a chunk has: the state was read in larger chunks."""
    waiting = 0 if state.open_chunk is None else state.open_chunk.num_tokens
    for layer, sizes in zip(state.layers, chunk_sizes, strict=False):
        for level, C in zip(() if layer.cms is None else layer.cms.levels, sizes, strict=False):
            most = int((level.num_tokens + waiting).max())
            if most > C:
                raise UsageError(
                    f"state: it was read by a model with other chunk sizes, this one has {C}, and {most} tokens wait "
                    "for an update; set the same chunk_sizes"
                )


def check_cache_dtype(state: FastWeightState, dtype: torch.dtype) -> None:
    """Raise `UsageError` if a state was read with weights of another dtype than `dtype`, which are other numbers."""
    cache = state.attention_cache
    if cache is not None and cache.keys[0].dtype != dtype:
        theirs = str(cache.keys[0].dtype).removeprefix("torch.")
        ours = str(dtype).removeprefix("torch.")
        raise UsageError(
            f'state: it was read with weights in {theirs}, this model has {ours}; load the model with dtype="{theirs}"'
        )


def check_model_key(state: FastWeightState, key: str) -> None:
    """Raise `UsageError` if a state says that a model with another key has read it."""
    if state.model_key not in ("", key):
        raise UsageError(
            "state: it was read by another model: other weights, another tokenizer, or other levels; use that model, "
            "or read the text again"
        )


def find_mismatch(part: object, initial: object, name: str) -> str | None:
    """Return what differs first between a part of a state and that of an initial state, or None."""
    if isinstance(part, Tensor):
        return find_tensor_mismatch(part, initial, name)
    if part is None and isinstance(initial, OpenChunk):
        return None
    if type(part) is not type(initial):
        return f"{name} is {type(part).__name__}, expected {type(initial).__name__}"
    parts = dict(named_children(part))
    expected_parts = dict(named_children(initial))
    if parts.keys() != expected_parts.keys():
        return f"{name} has {', '.join(sorted(parts)) or 'nothing'}, expected {', '.join(sorted(expected_parts))}"
    mismatches = (find_mismatch(parts[key], expected_parts[key], f"{name}.{key}".rstrip(".")) for key in parts)
    return next((problem for problem in mismatches if problem is not None), None)


def find_tensor_mismatch(part: Tensor, initial: object, name: str) -> str | None:
    """Return what differs between a tensor of a state and an initial tensor or low-rank change, or None.

    Sizes may differ where the initial one is 0; types where both are floating-point, boolean or integers.
    """
    if isinstance(initial, LowRankChange):
        expected, dtype = (initial.left.shape[-1], initial.right.shape[-1]), initial.left.dtype
    elif isinstance(initial, Tensor):
        expected, dtype = tuple(initial.shape[1:]), initial.dtype
    else:
        return f"{name} is a tensor"
    shape = tuple(part.shape[1:])
    fits = len(shape) == len(expected) and all(m in (0, n) for n, m in zip(shape, expected, strict=True))
    if not fits:
        return f"{name} has shape {list(shape)}, expected {list(expected)}"
    kinds = [(x.is_floating_point, x == torch.bool) for x in (part.dtype, dtype)]
    return None if kinds[0] == kinds[1] else f"{name} is {part.dtype}, expected {dtype}"


def find_uneven_cache(layers: Iterable[LayerState]) -> str | None:
    """Return the problem with a KV cache whose parts cover different numbers of positions, or None."""
    for i, layer in enumerate(layers):
        cache = layer.cache
        if cache is not None:
            lengths = {x.shape[2] for x in (*cache.keys, *cache.values)}
            lengths |= {cache.positions.shape[1], cache.valid.shape[1]}
            if len(lengths) > 1:
                return f"the cache of layer {i} has {' and '.join(map(str, sorted(lengths)))} positions"
    return None


def find_invalid_tokens(chunk: OpenChunk, vocab_size: int) -> str | None:
    """Return the problem with the ids or lengths of an open chunk, or None."""
    ids = chunk.input_ids.long()
    ids = ids.maximum(~ids)  # an id that is not a target is stored as its complement
    lengths = chunk.num_tokens
    if ids.numel() and int(ids.max()) >= vocab_size:
        return f"token id {int(ids.max())} is outside the vocabulary of {vocab_size:,}"
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= ids.shape[1]:
        return f"an open chunk of {ids.shape[1]} tokens has lengths {int(lengths.min())} to {int(lengths.max())}"
    return None
