"""A tiny method and its rows, so that the loop is tried without any paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.interfaces import StepOutput


@dataclass(frozen=True)
class Rows:
    """A batch of vectors and what they are to become."""

    x: Tensor
    y: Tensor
    ids: tuple[str, ...] = ()
    step: int = 0
    totals: Mapping[str, float] | None = None

    @property
    def B(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        return self.B

    @property
    def pieces(self) -> "tuple[Rows, ...]":
        return (self,)

    def to(self, device: Any) -> "Rows":
        return self


class Points:
    """Rows drawn once; `read` remembers every batch that was asked for."""

    def __init__(self, n: int = 40, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = torch.tanh(self.x @ torch.randn(6, 3, generator=generator))
        self.fingerprint = f"{seed:064x}"
        self.read: list[tuple[tuple[int, ...], int, int]] = []

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Rows:
        self.read.append((tuple(rows), epoch, step))
        return Rows(self.x[list(rows)], self.y[list(rows)], tuple(map(str, rows)), step)


class Toy(nn.Module):
    """Two layers with dropout; the sum of squares divided by the rows of the whole update."""

    def __init__(self, dropout: float = 0.1, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)
        self.restart_at: tuple[int, ...] = ()

    def totals(self, batch: Rows) -> Mapping[str, float]:
        return {"rows": batch.B}

    def restarts(self, batch: Rows) -> bool:
        return batch.step in self.restart_at

    def forward(self, batch: Rows, state: Any = None) -> StepOutput:
        totals = batch.totals or self.totals(batch)
        found = self.second(self.dropout(self.norm(torch.relu(self.first(batch.x)))))
        far = (found - batch.y).abs()
        square, distance = far.square().sum() / totals["rows"], far.sum() / totals["rows"]
        return StepOutput(square + 0.1 * distance, {"square": square.detach(), "distance": distance.detach()})
