"""Trees of dataclasses, mappings and tuples as named tensors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError
from laconic.storage.tensor_tree import flatten_tree, unflatten_tree


@dataclass(frozen=True)
class Node:
    left: Tensor
    children: tuple[Any, ...]


X, Y = torch.ones(2), torch.zeros(3)
TREE = Node(X, (Y, {"again": X}, None))
TYPES = {"Node": Node}


def test_tensor_tree_round_trip() -> None:
    tensors, spec = flatten_tree(TREE, "0.")
    assert tensors.keys() == {"0.left", "0.children.0"}
    unused = set(tensors)
    tree = unflatten_tree(spec, tensors, unused, TYPES)
    assert not unused
    assert tree.left is tree.children[1]["again"]
    assert tree.left is X
    assert tree.children[0] is Y
    assert tree.children[2] is None


def test_unflatten_tree_refuses_other_descriptions() -> None:
    tensors, spec = flatten_tree(TREE)
    for bad in ({**spec, "is": "Other"}, {**spec, "left": "missing"}, {**spec, "more": None}, 5):
        with pytest.raises(CorruptArtifactError, match="neither a known part nor a tensor"):
            unflatten_tree(bad, tensors, set(), TYPES)


def test_flatten_tree_refuses_what_it_would_lose() -> None:
    with pytest.raises(TypeError, match="a state holds a int; only tensors"):
        flatten_tree({"step": 3})
