"""Size and options of a continuum memory system (CMS): Nested Learning arXiv:2512.24695, section 7."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.config.nested import CMSOptions
from laconic.errors import UsageError
from laconic.nested.cms.equations import check_chunk_sizes


@dataclass(frozen=True)
class CMSShape:
    """Size and options of the levels of one layer, as `CMS` takes them. Raises `UsageError` if they do not fit."""

    width: int
    intermediate_size: int
    chunk_sizes: tuple[int, ...]
    options: CMSOptions
    activation: str = "silu"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    has_bias: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_chunk_sizes(self.chunk_sizes)
        error = self.options.error
        if error:
            raise UsageError(f"cms: {error}")

    @property
    def run_order(self) -> tuple[int, ...]:
        """The levels in the order in which the chain runs them, fastest first."""
        return tuple(range(len(self.chunk_sizes)))

    @property
    def is_frozen(self) -> bool:
        """Whether no level can ever change."""
        return self.options.initial_inner_lr == 0

    def projection_shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a linear map; a bias counts as one more input, which is 1."""
        o, i = self.width, self.intermediate_size
        o, i = (o, i) if name == self.projections[-1] else (i, o)
        return o, i + self.has_bias


class CMSParams(NamedTuple):
    """Shape and trained weights of the levels of a layer, by name."""

    shape: CMSShape
    weights: Mapping[str, Tensor]
