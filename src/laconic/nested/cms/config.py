"""How large a continuum memory system is, and its options: Nested Learning arXiv:2512.24695, section 7."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.config.nested import CMSOptions
from laconic.errors import UsageError
from laconic.nested.cms.equations import check_chunk_sizes

Options = CMSOptions


@dataclass(frozen=True)
class CMSShape:
    """Width, width inside, a chunk for each level, activation, names of the maps (gate, up, down, or up and down).

    Raises `Usage` (2) for what cannot be meant.
    """

    width: int
    intermediate_size: int
    chunk_sizes: tuple[int, ...]
    options: Options
    act: str = "silu"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    has_bias: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_chunk_sizes(self.chunk_sizes)
        fault = self.options.error
        if fault:
            raise UsageError(f"cms: {fault}")

    @property
    def run_order(self) -> tuple[int, ...]:
        """The levels in the order in which a chain runs them."""
        levels = tuple(range(len(self.chunk_sizes)))
        return levels if self.options.level_order == "fast_first" else levels[::-1]

    @property
    def is_frozen(self) -> bool:
        """Whether no level can ever move."""
        return self.options.initial_inner_lr == 0

    def projection_shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a map, a bias counted as an input that is 1."""
        o, i = (
            (self.width, self.intermediate_size)
            if name == self.projections[-1]
            else (self.intermediate_size, self.width)
        )
        return o, i + self.has_bias


class CMSParams(NamedTuple):
    """What training changes, and what it does not."""

    shape: CMSShape
    weights: Mapping[str, Tensor]
