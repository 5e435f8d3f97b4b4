"""How large a Titans layer is, and its options: arXiv:2501.00663, with TNT's, arXiv:2511.07343."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.core.errors import Usage
from laconic.methods.learning_settings import TitansOptions

Options = TitansOptions


@dataclass(frozen=True)
class Shape:
    """A layer's size and options. Raises `Usage` (2) for what cannot be meant."""

    width: int
    heads: int
    chunk: int
    options: Options

    def __post_init__(self) -> None:
        fault = self.options.fault(self.chunk)
        if fault:
            raise Usage(f"titans: {fault}")
        if self.heads < 1 or self.width % self.heads:
            raise Usage(f"titans: width {self.width} does not divide by {self.heads} heads; choose others")

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
