"""How large a continuum memory system is, and its options: Nested Learning arXiv:2512.24695, section 7."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.core.errors import Usage
from laconic.methods.cms import check_chunks
from laconic.methods.learning_settings import ContinuumOptions

Options = ContinuumOptions


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
        fault = self.options.fault
        if fault:
            raise Usage(f"cms: {fault}")

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
