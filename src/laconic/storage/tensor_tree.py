"""Flatten a tree of dataclasses, mappings and tuples into named tensors and a JSON description, and rebuild it."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, cast

from torch import Tensor

from laconic.errors import CorruptArtifactError

NodeTypes = Mapping[str, type]


def stored_fields(tree: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass that belong to its tree; those with the metadata `stored=False` do not."""
    return [f for f in fields(tree) if f.metadata.get("stored", True)]


def named_children(tree: object) -> Iterator[tuple[str, Any]]:
    """Yield the children of a node by name; the name of a dataclass field marked `inline` is empty."""
    if is_dataclass(tree) and not isinstance(tree, type):
        for f in stored_fields(tree):
            yield "" if f.metadata.get("inline") else f.name, getattr(tree, f.name)
    elif isinstance(tree, Mapping):
        yield from cast(Mapping[str, Any], tree).items()
    elif isinstance(tree, tuple):
        for n, item in enumerate(cast(tuple[Any, ...], tree)):
            yield str(n), item


def named_tensors(tree: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its dotted name, for example layers.3.cms.levels.1.down_proj.left."""
    for name, item in named_children(tree):
        yield from named_tensors(item, ".".join(filter(None, (prefix, name))))
    if isinstance(tree, Tensor):
        yield prefix, tree


def unique_tensors(tree: object) -> dict[str, Tensor]:
    """Return every tensor by name; a tensor that occurs several times has its first name."""
    by_id: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named_tensors(tree):
        by_id.setdefault(id(tensor), (name, tensor))
    return dict(by_id.values())


def flatten_tree(tree: object, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a tree by name, each once, and a JSON value from which `unflatten_tree` rebuilds it."""
    tensors = {prefix + name: tensor for name, tensor in unique_tensors(tree).items()}
    return tensors, build_tree_spec(tree, {id(tensor): name for name, tensor in tensors.items()})


def build_tree_spec(tree: object, names: Mapping[int, str]) -> Any:
    if isinstance(tree, Tensor):
        return names[id(tree)]
    if is_dataclass(tree) and not isinstance(tree, type):
        children = {f.name: build_tree_spec(getattr(tree, f.name), names) for f in stored_fields(tree)}
        return {"is": type(tree).__name__} | children
    if isinstance(tree, Mapping):
        return {"of": {name: build_tree_spec(item, names) for name, item in cast(Mapping[str, Any], tree).items()}}
    if isinstance(tree, tuple):
        return [build_tree_spec(item, names) for item in cast(tuple[Any, ...], tree)]
    if tree is None:
        return None
    kind = type(tree).__name__
    raise TypeError(f"a state holds a {kind}; only tensors, None, tuples, mappings and dataclasses can be stored")


def unflatten_tree(spec: Any, tensors: Mapping[str, Tensor], unused: set[str], node_types: NodeTypes) -> Any:
    """Rebuild a tree from the description that `flatten_tree` returned; CorruptArtifactError if it does not fit.

    Names of tensors that occur in the tree are removed from `unused`; `node_types` are its possible dataclasses.
    """
    if spec is None:
        return None
    if isinstance(spec, str) and spec in tensors:
        unused.discard(spec)
        return tensors[spec]
    if isinstance(spec, list):
        return tuple(unflatten_tree(item, tensors, unused, node_types) for item in cast(list[Any], spec))
    if isinstance(spec, dict):
        node = cast(dict[str, Any], spec)
        node_type = node_types.get(str(node.get("is")))
        names = [] if node_type is None else [f.name for f in stored_fields(node_type)]
        if node_type is not None and node.keys() == {"is", *names}:
            return node_type(**{name: unflatten_tree(node[name], tensors, unused, node_types) for name in names})
        if node.keys() == {"of"} and isinstance(node["of"], dict):
            items = cast(dict[str, Any], node["of"]).items()
            return {name: unflatten_tree(item, tensors, unused, node_types) for name, item in items}
    raise CorruptArtifactError(
        f"state: {str(cast(object, spec))[:80]!r} is neither a known part nor a tensor of the file; use an intact copy"
    )
