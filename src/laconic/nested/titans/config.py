"""How large a Titans layer is, and its options: arXiv:2501.00663, with TNT's, arXiv:2511.07343."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError

Options = TitansOptions


@dataclass(frozen=True)
class TitansShape:
    """A layer's size and options. Raises `Usage` (2) for what cannot be meant."""

    width: int
    num_heads: int
    chunk_size: int
    options: Options

    def __post_init__(self) -> None:
        fault = self.options.find_error(self.chunk_size)
        if fault:
            raise UsageError(f"titans: {fault}")
        if self.num_heads < 1 or self.width % self.num_heads:
            raise UsageError(f"titans: width {self.width} does not divide by {self.num_heads} heads; choose others")

    @property
    def head_dim(self) -> int:
        """E."""
        return self.width // self.num_heads

    @property
    def memory_chunk_sizes(self) -> dict[str, int]:
        """Name and chunk of each memory."""
        far = self.options.global_chunk_size
        return {"memory": self.chunk_size} | ({} if far is None else {"global": far})


class TitansParams(NamedTuple):
    """What training changes, and what it does not."""

    shape: TitansShape
    weights: Mapping[str, Tensor]
