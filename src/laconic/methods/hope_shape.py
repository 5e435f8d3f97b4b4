"""How large a self-modifying Titans layer is, and its options: Nested Learning arXiv:2512.24695, section 8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.core.errors import Usage
from laconic.methods.learning_settings import SelfTitansOptions

Options = SelfTitansOptions


@dataclass(frozen=True)
class Shape:
    """A layer's width, heads, width of a head, and options. Raises `Usage` (2) for what cannot be meant."""

    width: int
    heads: int
    head: int
    options: Options

    def __post_init__(self) -> None:
        o = self.options
        if o.fault:
            raise Usage(f"hope: {o.fault}")
        if o.mix == "none" and self.heads * self.head != self.width:
            raise Usage(f"hope: mix none splits width {self.width}, not into {self.heads} heads of {self.head}; mix it")

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The memories that modify themselves, the one that is read left out."""
        return self.options.adaptive

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
