"""How large a self-modifying Titans layer is, and its options: Nested Learning arXiv:2512.24695, section 8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from laconic.core.errors import Usage

Adaptive = Literal["k", "v", "step", "keep"]
INNER: tuple[Adaptive, ...] = ("k", "v", "step", "keep")


@dataclass(frozen=True)
class Options:
    """What a self-modifying layer may be told beside its size.

    `inner` names the projections that modify themselves, none for the static baseline; `inner_query` adds the query's.
    `memory` is M z, z + W z ("affine") or z + W1 σ(W2 z) of inner width `hidden` (a head's, unless given). `objective`
    writes towards the value by its product ("dot") or by the error ("l2", the print, `factor` 2 with its gradient);
    `erase` first takes away what is at the key, `erase_inner` in the first layer of an mlp too. `read` is the state
    before a token ("token"), that of the chunk's start ("boundary") or the one after it. One group shares gates and
    chunk among all memories. What decays goes back to its "start" or to "zero"; `keep_half_life` is in tokens. `cap`
    is the radius in which the projections stay, `guard` the memory's at boundaries in units of √E; None leaves either
    out. `checkpoint` recomputes each chunk in the backward.
    """

    mix: Literal["map", "none"] = "map"
    conv: int = 4
    inner: tuple[Adaptive, ...] = INNER
    inner_query: bool = False
    memory: Literal["linear", "affine", "mlp"] = "linear"
    hidden: int | None = None
    objective: Literal["dot", "l2"] = "dot"
    factor: Literal[1, 2] = 1
    erase: bool = True
    erase_inner: bool = True
    read: Literal["token", "boundary", "after"] = "token"
    groups: Literal[1, 2] = 2
    decay_to: Literal["start", "zero"] = "start"
    momentum: bool = False
    momentum_start: float = 0.5
    step_max: float = 1.0
    step_form: Literal["sigmoid", "softplus"] = "sigmoid"
    step_memory: float = 0.5
    step_projections: float = 0.02
    keep_half_life: float = 693.0
    chunk_memory: int = 64
    chunk_projections: int = 64
    cap: float | None = 1.0
    guard: float | None = 4.0
    own_values_gradient: bool = True
    checkpoint: bool = False


@dataclass(frozen=True)
class Shape:
    """A layer's width, heads, width of a head, and options. Raises `Usage` (2) for what cannot be meant."""

    width: int
    heads: int
    head: int
    options: Options

    def __post_init__(self) -> None:
        o = self.options
        chunks = sorted((o.chunk_memory, o.chunk_projections))
        if chunks[0] < 1:
            raise Usage(f"hope: chunk {chunks[0]} was asked for; a chunk has at least 1 token")
        if chunks[1] % chunks[0]:
            raise Usage(f"hope: chunks {chunks[0]} and {chunks[1]}; one divides the other")
        if o.groups == 1 and chunks[0] != chunks[1]:
            raise Usage(f"hope: one group has one chunk, {chunks[0]} and {chunks[1]} were asked for; take groups=2")
        if o.mix == "none" and self.heads * self.head != self.width:
            raise Usage(f"hope: mix none splits width {self.width}, not into {self.heads} heads of {self.head}; mix it")
        if not 0 < o.step_max <= 2:
            raise Usage(f"hope: step_max {o.step_max} is beyond 2, where an erase overshoots; lower it")
        if o.cap is not None and o.momentum and self.adaptive:
            raise Usage("hope: the cap bounds a write, not the sum that momentum keeps; take cap=None or no momentum")

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The memories that modify themselves, the one that is read left out."""
        return (*self.options.inner, *(("q",) if self.options.inner_query else ()))

    @property
    def groups(self) -> dict[str, int]:
        """Name and chunk of each group of memories."""
        o = self.options
        if o.groups == 1:
            return {"shared": o.chunk_memory}
        return {"memory": o.chunk_memory} | ({"projections": o.chunk_projections} if self.adaptive else {})

    def group(self, name: str) -> str:
        """The group of a memory by its name."""
        if self.options.groups == 1:
            return "shared"
        return "memory" if name == "memory" else "projections"


class Params(NamedTuple):
    """What training changes, and what it does not."""

    shape: Shape
    tensors: Mapping[str, Tensor]
