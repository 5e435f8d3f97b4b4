"""What a model has learned while it reads, as one value: fast weights, counts, open chunks, tails, caches.

Nested Learning arXiv:2512.24695. A fast weight is its trained start plus a change; only the change is carried, so that
a start of all changes is zeros, and a change that is cut from the graph leaves the start's gradient alive. Every tensor
has the rows of the batch in front; counts are int64 [B] and lie on the CPU, where chunk boundaries are decided.

The operations here serve any tree of frozen dataclasses, tuples, mappings and tensors. Nothing is written in place.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.cache import KVCache
from laconic.storage.tensor_tree import named_children, named_tensors, unique_tensors

Tree = TypeVar("Tree")
STATE_PARTS = ("memory", "cms", "cache")
INLINE_FIELD = {"inline": True}  # of a field whose name is left out of the names on disk


@dataclass(frozen=True)
class LinearMemoryState:
    """A linear fast weight: its change now and at the last boundary, the momentum of its writes, tokens learned."""

    change: Float[Tensor, "B H O I"]
    boundary_change: Float[Tensor, "B H O I"]
    momentum: Float[Tensor, "B H O I"] | None
    num_tokens: Int[Tensor, " B"]


@dataclass(frozen=True)
class MLPMemoryState:
    """A memory of two layers, z + W1 σ(W2 z)."""

    W1: LinearMemoryState
    W2: LinearMemoryState


@dataclass(frozen=True)
class LowRankChange:
    """A change as a sum of R outer products, Σ_r left_r right_rᵀ; rows of zeros add nothing."""

    left: Float[Tensor, "B R O"]
    right: Float[Tensor, "B R I"]

    @property
    def dense(self) -> Float[Tensor, "B O I"]:
        """The sum."""
        return self.left.mT @ self.right


@dataclass(frozen=True)
class CMSLevelState:
    """One level of a continuum memory: per linear map its change, and what the open chunk has gathered.

    `moments` are the inner optimizer's, `start` the change of a nested level's start, and `gathered` what the slower
    level's chunk has for it; `count` tokens in the open chunk, `updates` how often it has fired.
    """

    change: Mapping[str, LowRankChange | Tensor] = field(metadata=INLINE_FIELD)
    accumulated: Mapping[str, LowRankChange | Tensor]
    moments: Mapping[str, Tensor]
    start_change: Mapping[str, LowRankChange | Tensor]
    num_tokens: Int[Tensor, " B"]
    num_updates: Int[Tensor, " B"]
    meta_accumulated: Mapping[str, LowRankChange | Tensor] = field(default_factory=dict[str, "LowRankChange | Tensor"])


@dataclass(frozen=True)
class CMSState:
    """The levels of one layer, fastest first."""

    levels: tuple[CMSLevelState, ...]


@dataclass(frozen=True)
class LayerState:
    """One layer: the last vectors before each convolution, memories by name, levels, and what attention has read."""

    conv_tails: Mapping[str, Float[Tensor, "B W D"]] = field(default_factory=dict[str, Tensor])
    memory: Mapping[str, LinearMemoryState | MLPMemoryState] = field(
        default_factory=dict[str, "LinearMemoryState | MLPMemoryState"]
    )
    cms: CMSState | None = None
    cache: KVCache | None = None


@dataclass(frozen=True)
class OpenChunk:
    """Of the fastest chunk that is open: its ids so far, how many of each row, and the layers where it began.

    Of an id that is not learned of, as a target, the complement is held, which is below 0.
    """

    input_ids: Int[Tensor, "B N"]
    num_tokens: Int[Tensor, " B"]
    layers_at_start: tuple[LayerState, ...]


@dataclass(frozen=True)
class FastWeightState:
    """A whole model's: layers, tokens read, and the open chunk where the inner loss is the task's (contract.State)."""

    layers: tuple[LayerState, ...]
    position: Int[Tensor, " B"]
    open_chunk: OpenChunk | None = None

    def detach(self) -> "FastWeightState":
        """The same numbers, cut from the graph, each tensor in memory of its own, as one read from disk is."""
        return map_tensors(self, detached_copy)

    def to(self, device: torch.device | str) -> "FastWeightState":
        """Elsewhere; counts stay on the CPU."""
        return to(self, device)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its name on disk, one that stands in two places once."""
        return unique_tensors(self)

    @property
    def attention_cache(self) -> KVCache | None:
        """KV cache of the first layer with attention; None for a model without attention."""
        return next((layer.cache for layer in self.layers if layer.cache is not None), None)

    def select_rows(self, rows: Sequence[int]) -> "FastWeightState":
        """Return some of the rows, in this order; repeats are allowed."""
        return select_rows(self, rows)


def detached_copy(x: Tensor) -> Tensor:
    """A copy cut from the graph, row after row."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def map_tensors(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """`function` of every tensor, in a tree of the same form; what stands in two places does so again."""
    return _map_node(tree, function, {})


def _map_node(tree: Tree, function: Callable[[Tensor], Tensor], made: dict[int, Tensor]) -> Tree:
    node: Any = tree
    if isinstance(node, Tensor):
        if id(node) not in made:
            made[id(node)] = function(node)
        node = made[id(node)]
    elif is_dataclass(node) and not isinstance(node, type):
        node = replace(node, **{f.name: _map_node(getattr(node, f.name), function, made) for f in fields(node)})
    elif isinstance(node, Mapping):
        node = {name: _map_node(item, function, made) for name, item in cast(Mapping[str, Any], node).items()}
    elif isinstance(node, tuple):
        node = tuple(_map_node(item, function, made) for item in cast(tuple[Any, ...], node))
    return cast(Tree, node)


def is_counter(tensor: Tensor) -> bool:
    """Whether it is a number a row, which stays on the CPU."""
    return tensor.ndim == 1 and not tensor.is_floating_point()


def detach(tree: Tree) -> Tree:
    """The same numbers, cut from the graph: the changes, never the starts in front of them."""
    return map_tensors(tree, Tensor.detach)


def to(tree: Tree, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tree:
    """Elsewhere, or with floating tensors of another type; counts stay on the CPU."""
    return map_tensors(tree, lambda x: x if is_counter(x) else x.to(device, dtype if x.is_floating_point() else None))


def num_rows(tree: object) -> int:
    """B."""
    found = next(named_tensors(tree), None)
    if found is None:
        raise UsageError("state: it holds no tensor, so no rows; begin with start(params, batch)")
    return found[1].shape[0]


def row_index(rows: Sequence[int] | Int[Tensor, " N"], B: int) -> Int[Tensor, " N"]:
    """Rows as indices. Raises `Usage` (2) for one that is not there."""
    at = torch.as_tensor(rows, dtype=torch.long, device="cpu")
    bad = at[(at < 0) | (at >= B)]
    if len(bad):
        raise UsageError(f"state: row {int(bad[0])} was asked for, there are rows 0 to {B - 1}")
    return at


def select_rows(tree: Tree, rows: Sequence[int] | Int[Tensor, " N"]) -> Tree:
    """The rows chosen, in that order; repeats are allowed."""
    at = row_index(rows, num_rows(tree))
    return map_tensors(tree, lambda x: x.index_select(0, at.to(x.device)))


def repeat_rows(tree: Tree, repeats: int) -> Tree:
    """Each row `n` times, side by side: a fork."""
    return map_tensors(tree, lambda x: x.repeat_interleave(repeats, 0))


def concat_rows(*trees: Tree) -> Tree:
    """The rows of all, in order; caches get dead slots on the left, factors rows of zeros. Forms must be equal."""
    if not trees:
        raise UsageError("join: no state was given; give one or more of the same model")
    first: Any = trees[0]
    others: Any = trees
    if {LowRankChange, Tensor} == {type(tree) for tree in trees}:
        return cast(Tree, torch.cat([x.dense if isinstance(x, LowRankChange) else x for x in others]))
    if any(type(tree) is not type(first) for tree in trees):
        raise UsageError(
            f"join: states of different forms, {', '.join(type(t).__name__ for t in trees)}; join one model's"
        )
    if isinstance(first, KVCache):
        return cast(Tree, KVCache.concat_rows(*others))
    if isinstance(first, Tensor):
        longest = max(x.shape[1] for x in others) if first.ndim == 3 else 0
        return cast(Tree, torch.cat([F.pad(x, (0, 0, 0, longest - x.shape[1])) if longest else x for x in others]))
    if isinstance(first, OpenChunk):
        longest = max(x.ids.shape[1] for x in others)
        others = [replace(x, ids=F.pad(x.ids, (0, longest - x.ids.shape[1]))) for x in others]
    keys = [tuple(sorted(name for name, _ in named_children(tree))) for tree in others]
    if any(k != keys[0] for k in keys):
        raise UsageError(f"join: states that hold different parts, {keys[0]} and others; join one model's")
    if is_dataclass(first):
        names = [f.name for f in fields(first)]
        return cast(Tree, type(first)(**{name: concat_rows(*(getattr(x, name) for x in others)) for name in names}))
    if isinstance(first, Mapping):
        return cast(Tree, {name: concat_rows(*(x[name] for x in others)) for name in cast(Mapping[str, Any], first)})
    return cast(
        Tree, tuple(concat_rows(*items) for items in zip(*others, strict=True)) if isinstance(first, tuple) else first
    )


def states_equal(one: object, other: object) -> bool:
    """Whether both have the same form, names and bits."""
    mine, theirs = dict(named_tensors(one)), dict(named_tensors(other))
    return mine.keys() == theirs.keys() and all(bit_equal(mine[name], theirs[name]) for name in mine)


def bit_equal(x: Tensor, y: Tensor) -> bool:
    """Equal in type, shape and bits."""
    return x.dtype == y.dtype and torch.equal(x, y.to(x.device))


def num_bytes(tree: object) -> int:
    """Bytes of its tensors, those that stand in two places counted once."""
    return sum(x.nbytes for x in {id(x): x for _, x in named_tensors(tree)}.values())


def reset_rows(
    state: Tree,
    rows: Sequence[int] | Int[Tensor, " N"] | None = None,
    parts: Sequence[str] = STATE_PARTS,
    levels: Sequence[int] | None = None,
) -> Tree:
    """The start for those rows, all by default; `levels` picks among those of a continuum memory.

    A cache's slots of those rows are dead from then on; the position goes with the cache, tails with the memory.
    """
    strange = sorted(set(parts) - set(STATE_PARTS))
    if strange:
        raise UsageError(f"reset: {strange[0]!r} was asked for; a state holds {', '.join(STATE_PARTS)}")
    B = num_rows(state)
    kept = torch.ones(B, dtype=torch.bool)
    kept[row_index(list(range(B)) if rows is None else rows, B)] = False
    return _reset_node(state, kept, frozenset(parts), levels)


def _reset_node(tree: Tree, kept: Tensor, what: frozenset[str], levels: Sequence[int] | None) -> Tree:
    node: Any = tree
    if isinstance(node, FastWeightState):
        position = _zero_tensor_rows(node.position, kept) if "cache" in what else node.position
        layers = tuple(_reset_node(layer, kept, what, levels) for layer in node.layers)
        return cast(Tree, FastWeightState(layers, position, _reset_node(node.open_chunk, kept, what, levels)))
    if isinstance(node, OpenChunk):
        count = _zero_tensor_rows(node.num_tokens, kept) if "cms" in what else node.num_tokens
        layers = tuple(_reset_node(layer, kept, what, levels) for layer in node.layers_at_start)
        return cast(Tree, OpenChunk(node.input_ids, count, layers))
    if not isinstance(node, LayerState):
        return _zero_rows(tree, kept)
    made = node
    if "memory" in what:
        made = replace(made, conv_tails=_zero_rows(node.conv_tails, kept), memory=_zero_rows(node.memory, kept))
    if "cms" in what and node.cms is not None:
        picked = range(len(node.cms.levels)) if levels is None else levels
        cms = tuple(_zero_rows(x, kept) if n in picked else x for n, x in enumerate(node.cms.levels))
        made = replace(made, cms=CMSState(cms))
    if "cache" in what and node.cache is not None:
        made = replace(made, cache=node.cache.with_valid(node.cache.valid & kept.to(node.cache.valid.device)[:, None]))
    return cast(Tree, made)


def _zero_rows(tree: Tree, kept: Tensor) -> Tree:
    return map_tensors(tree, lambda x: _zero_tensor_rows(x, kept))


def _zero_tensor_rows(x: Tensor, kept: Tensor) -> Tensor:
    """Rows that are not kept become zeros; where nothing is kept no gradient passes."""
    return x.where(kept.to(x.device).reshape(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x))


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, shape, type and bytes of every slow tensor, in the order of names."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {list(x.shape)} {x.dtype}\n".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
