"""Size and options of a Titans memory layer: Titans arXiv:2501.00663."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError


@dataclass(frozen=True)
class TitansShape:
    """Width, heads, chunk size and options of a layer. Raises `UsageError` if they do not fit together."""

    width: int
    num_heads: int
    chunk_size: int
    options: TitansOptions

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise UsageError(f"titans: chunk_size {self.chunk_size}: must be at least 1 token")
        if self.num_heads < 1 or self.width % self.num_heads:
            raise UsageError(f"titans: width {self.width} is not divisible by {self.num_heads} heads")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


class TitansParams(NamedTuple):
    """Shape and trained weights of a layer, by name."""

    shape: TitansShape
    weights: Mapping[str, Tensor]
