"""How large a self-modifying Titans layer is, and its options: Nested Learning arXiv:2512.24695, section 8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.config.nested import SelfModifyingOptions
from laconic.errors import UsageError

Options = SelfModifyingOptions


@dataclass(frozen=True)
class SelfTitansShape:
    """A layer's width, heads, width of a head, and options. Raises `Usage` (2) for what cannot be meant."""

    width: int
    num_heads: int
    head_dim: int
    options: Options

    def __post_init__(self) -> None:
        o = self.options
        if o.error:
            raise UsageError(f"hope: {o.error}")
        if o.input_proj == "none" and self.num_heads * self.head_dim != self.width:
            raise UsageError(
                f"hope: mix none splits width {self.width}, not into {self.num_heads} heads of {self.head_dim}; mix it"
            )

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The memories that modify themselves, the one that is read left out."""
        return self.options.adaptive_names

    @property
    def group_chunk_sizes(self) -> dict[str, int]:
        """Name and chunk of each group of memories."""
        o = self.options
        if o.gate_groups == 1:
            return {"shared": o.memory_chunk_size}
        return {"memory": o.memory_chunk_size} | ({"projections": o.projection_chunk_size} if self.adaptive else {})

    def group_of(self, name: str) -> str:
        """The group of a memory by its name."""
        if self.options.gate_groups == 1:
            return "shared"
        return "memory" if name == "memory" else "projections"


class SelfTitansParams(NamedTuple):
    """What training changes, and what it does not."""

    shape: SelfTitansShape
    weights: Mapping[str, Tensor]
