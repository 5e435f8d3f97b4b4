"""How large a Titans layer is, and its options: arXiv:2501.00663, with TNT's, arXiv:2511.07343."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from laconic.core.errors import Usage
from laconic.methods.delta import Read


@dataclass(frozen=True)
class Options:
    """What a Titans layer may be told beside its size.

    `depth` 2 is z + W1 σ(W2 z) of inner width `hidden` (a head's, unless given), 1 a matrix. `factor` 1 is the loss
    ½‖M(k) - v‖², 2 the print. `keep_half_life` is in tokens; `guard` bounds ‖M‖_F at boundaries by guard √E, None does
    not. `gates` "chunk": those of a chunk's first token hold for all of it. `reset_every` tokens the memory starts
    again; `global_chunk` adds one of larger chunks. `checkpoint` recomputes each chunk in the backward.
    """

    depth: Literal[1, 2] = 2
    hidden: int | None = None
    read: Read = "after"
    gates: Literal["token", "chunk"] = "token"
    factor: Literal[1, 2] = 1
    momentum: bool = True
    momentum_start: float = 0.5
    step_max: float = 1.0
    step_start: float = 0.5
    keep_half_life: float = 693.0
    conv: int = 4
    persistent: int = 0
    guard: float | None = 4.0
    reset_every: int | None = None
    global_chunk: int | None = None
    checkpoint: bool = False


@dataclass(frozen=True)
class Shape:
    """A layer's size and options. Raises `Usage` (2) for what cannot be meant."""

    width: int
    heads: int
    chunk: int
    options: Options

    def __post_init__(self) -> None:
        o = self.options
        if self.chunk < 1:
            raise Usage(f"titans: chunk {self.chunk} was asked for; a chunk has at least 1 token")
        if self.heads < 1 or self.width % self.heads:
            raise Usage(f"titans: width {self.width} does not divide by {self.heads} heads; choose others")
        for name, n in (("reset_every", o.reset_every), ("global_chunk", o.global_chunk)):
            if n is not None and (n < 1 or n % self.chunk):
                raise Usage(
                    f"titans: {name} {n} is no multiple of the chunk, {self.chunk}; memories change at its ends"
                )
        if not 0 < o.step_max * o.factor <= 2:
            raise Usage(
                f"titans: step_max {o.step_max} times factor {o.factor} is beyond 2, where one write overshoots "
                "further than it was off; lower it"
            )

    @property
    def head(self) -> int:
        """E."""
        return self.width // self.heads

    @property
    def memories(self) -> dict[str, int]:
        """Name and chunk of each memory."""
        far = self.options.global_chunk
        return {"memory": self.chunk} | ({} if far is None else {"global": far})


class Params(NamedTuple):
    """What training changes, and what it does not."""

    shape: Shape
    tensors: Mapping[str, Tensor]
