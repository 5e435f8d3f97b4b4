"""Fast-weight state: what a nested-learning model has learned while reading, as one immutable value.

Nested Learning arXiv:2512.24695. A fast weight is its trained start plus a change ΔW, and only the change is stored. A
state that has read nothing is therefore all zeros, and detaching a change from the graph leaves the start its gradient.
Every tensor has the batch as its first dimension; token counts are int64 [B] and stay on the CPU, where chunk
boundaries are decided.

The functions of this module work on any tree of frozen dataclasses, tuples, mappings and tensors, and never in place.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.cache import KVCache, RowIndex, build_row_index
from laconic.storage.tensor_tree import named_children, named_tensors, unique_tensors

Tree = TypeVar("Tree")
INLINE_FIELD = {"inline": True}  # metadata of a field whose name is left out of tensor names


@dataclass(frozen=True, eq=False)
class LinearMemoryState:
    """Change of a matrix since its start, now and at the last chunk boundary, from which writes are computed; the
    momentum of the writes, if any; and the tokens read.
    """

    change: Float[Tensor, "B H O I"]
    boundary_change: Float[Tensor, "B H O I"]
    momentum: Float[Tensor, "B H O I"] | None
    num_tokens: Int[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class MLPMemoryState:
    """State of a two-layer memory, z + W1 σ(W2 z)."""

    W1: LinearMemoryState
    W2: LinearMemoryState


MemoryState = LinearMemoryState | MLPMemoryState


@dataclass(frozen=True, eq=False)
class LowRankChange:
    """A change of a weight as the sum of R outer products, Σ_r left_r right_rᵀ. Zero rows add nothing."""

    left: Float[Tensor, "B R O"]
    right: Float[Tensor, "B R I"]

    @property
    def dense(self) -> Float[Tensor, "B O I"]:
        return self.left.mT @ self.right


@dataclass(frozen=True, eq=False)
class CMSLevelState:
    """State of one level of a continuum memory system. Mappings are by the name of a linear map.

    Attributes:
        change: Change of each weight since its trained start.
        accumulated: Error terms of the open chunk.
        moments: State of the inner optimizer.
        start_change: Change of a nested level's start.
        num_tokens: Tokens of the open chunk.
        num_updates: Updates so far.
        meta_accumulated: Terms for a nested level's start, accumulated over the slower level's chunk.
    """

    change: Mapping[str, LowRankChange | Tensor] = field(metadata=INLINE_FIELD)
    accumulated: Mapping[str, LowRankChange | Tensor]
    moments: Mapping[str, Tensor]
    start_change: Mapping[str, LowRankChange | Tensor]
    num_tokens: Int[Tensor, " B"]
    num_updates: Int[Tensor, " B"]
    meta_accumulated: Mapping[str, LowRankChange | Tensor] = field(default_factory=dict[str, "LowRankChange | Tensor"])


@dataclass(frozen=True, eq=False)
class CMSState:
    """States of the levels of a layer, fastest first."""

    levels: tuple[CMSLevelState, ...]


class BatchState:
    """State of the rows of a batch, as a tree of tensors."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({num_rows(self)} rows, {num_bytes(self) / 2**20:,.1f} MiB)"

    def select_rows(self: Tree, rows: RowIndex) -> Tree:
        """Return the given rows, in that order, or those where a mask is True; a row may be repeated."""
        return select_rows(self, rows)

    def detach(self: Tree) -> Tree:
        """Return a copy outside the graph, whose tensors own their memory."""
        return map_tensors(self, lambda x: x.detach().clone(memory_format=torch.contiguous_format))

    def to(self: Tree, device: torch.device | str) -> Tree:
        """Move to a device; token counts stay on the CPU."""
        return to(self, device)


@dataclass(frozen=True, eq=False, repr=False)
class LayerState(BatchState):
    """State of one layer; `conv_tails` are the last inputs of each causal convolution, by name.

    `readers` names the layers that have read, with their sizes and chunk sizes; empty where they are unknown.
    """

    conv_tails: Mapping[str, Float[Tensor, "B W D"]] = field(default_factory=dict[str, Tensor])
    memory: Mapping[str, MemoryState] = field(default_factory=dict[str, MemoryState])
    cms: CMSState | None = None
    cache: KVCache | None = None
    readers: str = field(default="", metadata={"stored": False})


@dataclass(frozen=True, eq=False)
class OpenChunk:
    """Tokens of the fastest levels' open chunk, for levels that learn from the next token's loss.

    Attributes:
        input_ids: Ids read since the chunk began; an id that is not a target is stored as its complement `~id` (< 0).
        num_tokens: Ids of each row.
        layers_at_start: States of the layers when the chunk began.
    """

    input_ids: Int[Tensor, "B N"]
    num_tokens: Int[Tensor, " B"]
    layers_at_start: tuple[LayerState, ...]


@dataclass(frozen=True, eq=False)
class FastWeightState(BatchState):
    """What a model has learned from the text that it read: the changes of the weights of every layer.

    Immutable: reading returns a new state. `NestedTextModel.compress` returns one, and its `load_memory` reads one
    from a file.

    Attributes:
        layers: Changes of each layer's levels and memories.
        position: Tokens read by each row.
        open_chunk: For levels that learn from the next token's loss: the tokens read since the last update, and the
            states before them.
        model_key: Hash of the model that read the text, which `NestedTextModel` compares; empty where that is unknown.
        is_donated: Whether a read may empty this state, so that each layer is freed as soon as it is replaced.

    Examples:
        >>> import torch, laconic
        >>> model = laconic.Hope(laconic.HopeConfig.attention_free(257, 32, 2, chunk_sizes=(4, 8)))
        >>> state = model.read_tokens(torch.tensor([[1, 2, 3]])).cache
        >>> model.read_tokens(torch.tensor([[4, 5]]), state).cache.position.tolist(), state.position.tolist()
        ([5], [3])
    """

    layers: tuple[LayerState, ...]
    position: Int[Tensor, " B"]
    open_chunk: OpenChunk | None = None
    model_key: str = field(default="", metadata={"stored": False})
    is_donated: bool = field(default=False, metadata={"stored": False})

    def __repr__(self) -> str:
        size = f"{num_bytes(self) / 2**20:,.1f} MiB"
        return f"FastWeightState({list(map(int, self.position))} tokens, {len(self.layers)} layers, {size})"

    @property
    def attention_cache(self) -> KVCache | None:
        """KV cache of the first layer with attention; None for a model without attention."""
        return next((layer.cache for layer in self.layers if layer.cache is not None), None)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, each one once."""
        return unique_tensors(self)


def check_reader(label: str, state: LayerState) -> None:
    """Raise `UsageError` if a state is that of a layer with other sizes or chunk sizes than those of `label`."""
    if state.readers and label not in state.readers:
        layer = label.partition(" ")[0]
        problem = f"it is of {state.readers.strip('; ')}, this is {label.strip('; ')}"
        raise UsageError(f"{layer}: the state is of another layer: {problem}; leave it out to start with a new one")


def map_tensors(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """Apply a function to every tensor of a tree; a tensor that occurs twice is mapped once."""

    def map_node(node: object) -> Tensor | None:
        return function(node) if isinstance(node, Tensor) else None

    return _combine(map_node, (tree,), {})


def _combine(function: Callable[..., Any], trees: tuple[Any, ...], results: dict[tuple[int, ...], Any]) -> Any:
    """Apply a function to the nodes at the same place of trees, and to their children where it returns None.

    Nodes that occur twice in all trees are combined once; `results` has them by their ids.
    """
    key = tuple(map(id, trees))
    if key in results:
        return results[key][1]
    first = trees[0]
    node = function(*trees)
    if node is None and is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: tuple(getattr(tree, f.name) for tree in trees) for f in fields(first)}
        node = replace(first, **{name: _combine(function, part, results) for name, part in parts.items()})
    elif node is None and isinstance(first, Mapping):
        names = cast(Mapping[str, Any], first)
        node = {name: _combine(function, tuple(tree[name] for tree in trees), results) for name in names}
    elif node is None and isinstance(first, tuple):
        node = tuple(_combine(function, parts, results) for parts in zip(*trees, strict=True))
    results[key] = trees, first if node is None else node  # the trees too, so that no other object gets their ids
    return results[key][1]


def is_counter(tensor: Tensor) -> bool:
    """Return whether a tensor is one integer per row, which stays on the CPU."""
    return tensor.ndim == 1 and not tensor.is_floating_point()


def detach(tree: Tree) -> Tree:
    """Detach every tensor of a tree. Trained starts are not part of it and keep their gradient."""
    return map_tensors(tree, Tensor.detach)


def to(tree: Tree, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tree:
    """Move a tree to a device and its floating-point tensors to a type; token counts stay on the CPU."""
    return map_tensors(tree, lambda x: x if is_counter(x) else x.to(device, dtype if x.is_floating_point() else None))


def expand_rows(rows: Bool[Tensor, " B"], x: Tensor) -> Tensor:
    """Give a mask of rows as many dimensions as `x` has, on its device."""
    return rows.to(x.device).reshape(-1, *[1] * (x.ndim - 1))


def where_rows(rows: Bool[Tensor, " B"], new: Tree, old: Tree) -> Tree:
    """Return `new` in the rows of the mask and `old` in the others, for trees of the same structure."""
    return new if bool(rows.all()) else _combine(partial(_where, rows), (new, old), {})


def _where(rows: Tensor, new: Any, old: Any) -> LowRankChange | Tensor | None:
    if isinstance(new, LowRankChange) and isinstance(old, LowRankChange):
        # the products of both, where each is zero in the rows of the other
        mask = expand_rows(rows, new.left)
        left = torch.cat([new.left * mask, old.left * ~mask], 1)
        return LowRankChange(left, torch.cat([new.right * mask, old.right * ~mask], 1))
    if isinstance(new, LowRankChange | Tensor):
        x = new.dense if isinstance(new, LowRankChange) else new
        y = old.dense if isinstance(old, LowRankChange) else old
        return torch.where(expand_rows(rows, x), x, y)
    return None


def num_rows(tree: object) -> int:
    """Return the batch size of a tree. Raises `UsageError` for one without tensors."""
    first = next(named_tensors(tree), None)
    if first is None:
        raise UsageError("state: it has no tensors, so no rows; leave it out to start with a new one")
    return first[1].shape[0]


def row_index(rows: RowIndex, B: int) -> Int[Tensor, " N"]:
    """Return rows as an index tensor. Raises `UsageError` for rows that do not exist."""
    try:
        return build_row_index(rows, B).cpu()
    except ValueError as error:
        raise UsageError(f"state: {error}") from None


def select_rows(tree: Tree, rows: RowIndex) -> Tree:
    """Return the given rows, in that order, or those where a mask is True; a row may be repeated."""
    if isinstance(rows, list) and all(type(row) is int for row in rows) and rows == list(range(num_rows(tree))):
        return tree  # most batches are one group of aligned rows; [False, True] would equal [0, 1]
    index = row_index(rows, num_rows(tree))
    return map_tensors(tree, lambda x: x.index_select(0, index.to(x.device)))


def reset_rows(state: Tree, rows: RowIndex | None = None) -> Tree:
    """Reset rows, by default all, to zeros: the state of a model that has read nothing, with invalid cache slots."""
    keep = torch.ones(num_rows(state), dtype=torch.bool)
    keep[row_index(range(len(keep)) if rows is None else rows, len(keep))] = False
    return map_tensors(state, lambda x: x.where(expand_rows(keep, x), torch.zeros_like(x)))


def concat_rows(*trees: Tree) -> Tree:
    """Concatenate the rows of trees of the same structure; tensors that occur twice in all of them still do.

    Shorter caches get invalid slots on the left, low-rank changes and ids of open chunks zeros at their ends. Raises
    `UsageError` if structures differ.
    """
    return trees[0] if len(trees) == 1 else _combine(_concat, trees, {})


def _concat(*nodes: Any) -> Any:
    first = nodes[0]
    if {LowRankChange, Tensor} == {type(node) for node in nodes}:
        return torch.cat([node.dense if isinstance(node, LowRankChange) else node for node in nodes])
    kinds: set[object] = {(type(node), tuple(sorted(name for name, _ in named_children(node)))) for node in nodes}
    if len(kinds) > 1:
        raise UsageError("concat_rows: the states have different parts; pass states of one model")
    if isinstance(first, str):
        if len({*nodes} - {""}) > 1:
            raise UsageError("concat_rows: the states were read by different models; pass states of one model")
        return min(nodes)  # "", for unknown, if one is
    if isinstance(first, KVCache):
        return KVCache.concat_rows(*nodes)
    if isinstance(first, Tensor):
        longest = max(x.shape[1] for x in nodes) if first.ndim in (2, 3) else 0
        ends = (0, 0) * (first.ndim - 2)  # nothing is added to the last dimension of three
        return torch.cat([F.pad(x, (*ends, 0, longest - x.shape[1])) if longest else x for x in nodes])
    return None


def map_groups(keys: Iterable[Hashable], function: Callable[..., Tree], *trees: Any) -> Tree:
    """Apply a function to each group of rows with equal keys, and join its results in the order of the batch.

    It is called with the indices of the rows, and with these rows of the trees.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    results = [function(rows, *(select_rows(tree, rows) for tree in trees)) for rows in groups.values()]
    if len(results) == 1:
        return results[0]
    inverse = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
    return select_rows(concat_rows(*results), inverse)


def bit_equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y.to(x.device))


def num_bytes(tree: object) -> int:
    """Return the bytes of the tensors of a tree; a tensor that occurs twice, or whose beginning does, counts once."""
    largest: dict[int, int] = {}  # by address; empty tensors have none
    for _, x in named_tensors(tree):
        address = x.data_ptr() or id(x)
        largest[address] = max(x.nbytes, largest.get(address, 0))
    return sum(largest.values())


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the names, shapes, types and bytes of tensors, sorted by name."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {list(x.shape)} {x.dtype}\n".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
