"""Reset rows of a fast-weight state to the state of a model that has read nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.nested.state import FastWeightState, LayerState, OpenChunk, expand_rows, map_tensors, num_rows, row_index

Tree = TypeVar("Tree")


def reset_rows(state: Tree, rows: Sequence[int] | Int[Tensor, " N"] | None = None) -> Tree:
    """Reset rows, by default all, to the state of a model that has read nothing; their cache slots become invalid.

    Raises:
        UsageError: For a row that does not exist.
    """
    B = num_rows(state)
    keep = torch.ones(B, dtype=torch.bool)
    keep[row_index(list(range(B)) if rows is None else rows, B)] = False
    return _reset_node(state, keep)


def _reset_node(tree: Tree, keep: Tensor) -> Tree:
    node: Any = tree
    if isinstance(node, FastWeightState):
        layers = tuple(_reset_node(layer, keep) for layer in node.layers)
        position = _zero_rows(node.position, keep)
        return cast(Tree, FastWeightState(layers, position, _reset_node(node.open_chunk, keep)))
    if isinstance(node, OpenChunk):
        layers = tuple(_reset_node(layer, keep) for layer in node.layers_at_start)
        return cast(Tree, OpenChunk(node.input_ids, _zero_rows(node.num_tokens, keep), layers))
    if isinstance(node, LayerState):
        zeroed = {name: _zero_rows(getattr(node, name), keep) for name in ("conv_tails", "memory", "cms")}
        cache = node.cache
        if cache is not None:
            cache = cache.with_valid(cache.valid & keep.to(cache.valid.device)[:, None])
        return cast(Tree, replace(node, **zeroed, cache=cache))
    return _zero_rows(tree, keep)


def _zero_rows(tree: Tree, keep: Tensor) -> Tree:
    """Set the rows outside the mask to zero; no gradient flows into them."""
    return map_tensors(tree, lambda x: x.where(expand_rows(keep, x), torch.zeros_like(x)))
