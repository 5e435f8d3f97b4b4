"""A tiny method with its data, to test the training loop without any paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.interfaces import StepOutput


@dataclass(frozen=True)
class ToyBatch:
    """A batch of vectors and their targets."""

    x: Tensor
    y: Tensor
    ids: tuple[str, ...] = ()
    step: int = 0
    loss_denominators: Mapping[str, float] | None = None

    @property
    def B(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return self.B

    @property
    def sequential_parts(self) -> "tuple[ToyBatch, ...]":
        return (self,)

    def to(self, device: Any) -> "ToyBatch":
        return self


class ToyData:
    """Random rows; `requests` records every batch that was requested."""

    def __init__(self, n: int = 40, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = torch.tanh(self.x @ torch.randn(6, 3, generator=generator))
        self.fingerprint = f"{seed:064x}"
        self.requests: list[tuple[tuple[int, ...], int, int]] = []

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ToyBatch:
        self.requests.append((tuple(rows), epoch, step))
        return ToyBatch(self.x[list(rows)], self.y[list(rows)], tuple(map(str, rows)), step)


class ToyMethod(nn.Module):
    """Two layers with dropout; the loss is divided by the rows of the whole update."""

    def __init__(self, dropout: float = 0.1, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)
        self.reset_steps: tuple[int, ...] = ()

    def loss_denominators(self, batch: ToyBatch) -> Mapping[str, float]:
        return {"rows": batch.B}

    def resets_optimizer_state(self, batch: ToyBatch) -> bool:
        return batch.step in self.reset_steps

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        totals = batch.loss_denominators or self.loss_denominators(batch)
        output = self.second(self.dropout(self.norm(torch.relu(self.first(batch.x)))))
        error = (output - batch.y).abs()
        square, distance = error.square().sum() / totals["rows"], error.sum() / totals["rows"]
        return StepOutput(square + 0.1 * distance, {"square": square.detach(), "distance": distance.detach()})
