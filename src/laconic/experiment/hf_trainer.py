"""Train a method of laconic with `transformers.Trainer`."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from torch import Tensor, nn

from laconic.batches import ReasoningBatch
from laconic.errors import UsageError
from laconic.interfaces import TrainingData
from laconic.latent.coconut import Coconut
from laconic.latent.icot import Icot

TENSOR_FIELDS = frozenset(field.name for field in fields(ReasoningBatch)) - {
    *("ids", "epoch", "step", "loss_denominators")
}


class TrainerModel(nn.Module):
    """A method as a module for `transformers.Trainer`: `forward(**tensors)` returns `{"loss": …}`.

    Args:
        method: A method that learns from questions, such as `laconic.Kava`.

    Raises:
        UsageError: For methods whose stages follow the epochs of laconic's own loop (iCoT, Coconut).

    `examples/hf_trainer.py` trains KaVa, saves it, and answers with the result.
    """

    accepts_loss_kwargs = False  # so that Trainer divides the loss by the number of accumulated micro-batches

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        if isinstance(method, Coconut | Icot):
            raise UsageError("iCoT and Coconut go through stages by epochs of laconic's own loop; use laconic train")
        self.method = method

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch, the tensors of a `ReasoningBatch` by name."""
        return {"loss": self.method(ReasoningBatch(**cast(dict[str, Any], tensors))).loss}


class RowCollator:
    """Turns indices of rows into the tensors that `TrainerModel` takes; the data set of Trainer is `range(len(data))`.

    Args:
        data: Rows with questions, such as `Experiment.training_data`.
    """

    def __init__(self, data: TrainingData) -> None:
        self.data = data

    def __call__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of some rows by name of its tensors. Raises `UsageError` if the rows are documents."""
        batch = self.data.batch([int(row) for row in rows], 0, 0)
        if not isinstance(batch, ReasoningBatch):
            raise UsageError("the data are documents, whose windows need laconic's own loop; use laconic train")
        return {name: getattr(batch, name) for name in sorted(TENSOR_FIELDS)}
