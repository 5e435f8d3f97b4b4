"""Reset rows of a fast-weight state to the state of a model that has read nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.nested.state import CMSState, FastWeightState, LayerState, OpenChunk, map_tensors, num_rows, row_index

Tree = TypeVar("Tree")
STATE_PARTS = ("memory", "cms", "cache")


def reset_rows(
    state: Tree,
    rows: Sequence[int] | Int[Tensor, " N"] | None = None,
    parts: Sequence[str] = STATE_PARTS,
    levels: Sequence[int] | None = None,
) -> Tree:
    """Reset rows to the state of a model that has read nothing.

    Args:
        state: A state.
        rows: Rows to reset, by default all.
        parts: Of "memory" (with the convolutions), "cms" and "cache" (with the position).
        levels: Levels of the CMS to reset, by default all.

    Returns:
        The state; cache slots of the reset rows are invalid.

    Raises:
        UsageError: For an unknown part or a row that does not exist.
    """
    unknown = sorted(set(parts) - set(STATE_PARTS))
    if unknown:
        raise UsageError(f"reset_rows: unknown part {unknown[0]!r}; a state has {', '.join(STATE_PARTS)}")
    B = num_rows(state)
    keep = torch.ones(B, dtype=torch.bool)
    keep[row_index(list(range(B)) if rows is None else rows, B)] = False
    return _reset_node(state, keep, frozenset(parts), levels)


def _reset_node(tree: Tree, keep: Tensor, parts: frozenset[str], levels: Sequence[int] | None) -> Tree:
    node: Any = tree
    if isinstance(node, FastWeightState):
        position = _zero_tensor_rows(node.position, keep) if "cache" in parts else node.position
        layers = tuple(_reset_node(layer, keep, parts, levels) for layer in node.layers)
        return cast(Tree, FastWeightState(layers, position, _reset_node(node.open_chunk, keep, parts, levels)))
    if isinstance(node, OpenChunk):
        num_tokens = _zero_tensor_rows(node.num_tokens, keep) if "cms" in parts else node.num_tokens
        layers = tuple(_reset_node(layer, keep, parts, levels) for layer in node.layers_at_start)
        return cast(Tree, OpenChunk(node.input_ids, num_tokens, layers))
    if not isinstance(node, LayerState):
        return _zero_rows(tree, keep)
    layer = node
    if "memory" in parts:
        layer = replace(layer, conv_tails=_zero_rows(layer.conv_tails, keep), memory=_zero_rows(layer.memory, keep))
    if "cms" in parts and layer.cms is not None:
        selected = range(len(layer.cms.levels)) if levels is None else levels
        level_states = (_zero_rows(x, keep) if l in selected else x for l, x in enumerate(layer.cms.levels))
        layer = replace(layer, cms=CMSState(tuple(level_states)))
    if "cache" in parts and layer.cache is not None:
        valid = layer.cache.valid & keep.to(layer.cache.valid.device)[:, None]
        layer = replace(layer, cache=layer.cache.with_valid(valid))
    return cast(Tree, layer)


def _zero_rows(tree: Tree, keep: Tensor) -> Tree:
    return map_tensors(tree, lambda x: _zero_tensor_rows(x, keep))


def _zero_tensor_rows(x: Tensor, keep: Tensor) -> Tensor:
    """Set the rows outside the mask to zero; no gradient flows into them."""
    return x.where(keep.to(x.device).reshape(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x))
