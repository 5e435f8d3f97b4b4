"""How large a continuum memory system is, and its options: Nested Learning arXiv:2512.24695, section 7."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from laconic.core.errors import Usage
from laconic.methods.cms import Link, check_chunks

InnerOptimizer = Literal["gd", "momentum", "delta_momentum", "muon", "dgd"]
ETA = {"task": 1e-3, "associative": 1e-2}


@dataclass(frozen=True)
class Options:
    """What a continuum memory may be told beside its size.

    `inner` is whose gradient a level descends: that of the next token's loss through all above it ("task"), or of
    ½‖MLP(κ) - ν‖² of its own, ν a map of its input, or with `target` "start" the start's own answer and a map that is 0
    at first. `eta` is a level's whole step over a chunk at first, by default 1e-3 for the task and 1e-2 otherwise; at 0
    nothing is learned. `step` "token" makes it of every token. `structure` "nested" restarts each level where the next
    slower one fires, its start moved by `meta`: by the slower level's own step ("first_order"), a `share` of the way to
    where it has come ("reptile"), or by training alone ("outer"). `momentum` is the share that the inner optimizers'
    memories keep; `on` is what dgd erases, the weights or their change. `clip` bounds one update by that share of its
    start's Frobenius norm, `clip_error` the task's gradient at one token; None leaves either out.
    """

    structure: Literal["sequential", "nested", "independent"] = "sequential"
    inner: Literal["task", "associative"] = "task"
    inner_optimizer: InnerOptimizer = "gd"
    link: Link = "residual"
    order: Literal["fast_first", "slow_first"] = "fast_first"
    reduce: Literal["sum", "mean"] = "sum"
    step: Literal["level", "token"] = "level"
    eta: float | None = None
    target: Literal["map", "start"] = "map"
    meta: Literal["first_order", "reptile", "outer"] = "first_order"
    share: float = 0.5
    momentum: float = 0.9
    on: Literal["weights", "delta"] = "weights"
    clip: float | None = 0.1
    clip_error: float | None = 1.0

    @property
    def moved_by(self) -> float:
        """η_0."""
        return ETA[self.inner] if self.eta is None else self.eta


@dataclass(frozen=True)
class Shape:
    """Width, width inside, a chunk for each level, activation, names of the maps (gate, up, down, or up and down).

    Raises `Usage` (2) for what cannot be meant.
    """

    width: int
    hidden: int
    chunks: tuple[int, ...]
    options: Options
    act: str = "silu"
    maps: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_chunks(self.chunks)
        o = self.options
        if o.moved_by < 0:
            raise Usage(f"cms: eta {o.moved_by} is below 0, which climbs; 0 learns nothing")
        for name, bound in (("clip", o.clip), ("clip_error", o.clip_error)):
            if bound is not None and bound <= 0:
                raise Usage(f"cms: {name} {bound} lets nothing through; give more than 0, or None for no bound")

    @property
    def order(self) -> tuple[int, ...]:
        """The levels in the order in which a chain runs them."""
        levels = tuple(range(len(self.chunks)))
        return levels if self.options.order == "fast_first" else levels[::-1]

    @property
    def still(self) -> bool:
        """Whether no level can ever move."""
        return self.options.moved_by == 0

    def sizes(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a map, a bias counted as an input that is 1."""
        o, i = (self.width, self.hidden) if name == self.maps[-1] else (self.hidden, self.width)
        return o, i + self.bias


class Params(NamedTuple):
    """What training changes, and what it does not."""

    shape: Shape
    tensors: Mapping[str, Tensor]
