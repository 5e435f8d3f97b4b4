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
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder

OTHER_FIELDS = ("ids", "epoch", "step", "loss_denominators")
TENSOR_FIELDS = sorted({field.name for field in fields(ReasoningBatch)} - set(OTHER_FIELDS))


class TrainerModel(nn.Module):
    """A method that learns from questions, such as `laconic.Kava`, as a module for `transformers.Trainer`.

    `forward(**tensors)` returns `{"loss": …}`.

    Raises:
        UsageError: For methods that follow the steps and epochs of laconic's own loop: iCoT, Coconut, and latents whose
            number is drawn or learned (`length_policy`).

    `examples/hf_trainer.py` trains KaVa, saves it, and answers with the result.
    """

    accepts_loss_kwargs = False  # so that Trainer divides the loss by the number of accumulated micro-batches

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        if isinstance(method, Coconut | Icot):
            raise UsageError("iCoT and Coconut go through stages by epochs of laconic's own loop; use laconic train")
        thoughts = [module for module in method.modules() if isinstance(module, LatentThoughts)]
        if any(module.length_policy != "fixed" for module in thoughts):
            raise UsageError(
                'a length_policy other than "fixed" depends on the steps of laconic\'s own loop; use laconic train'
            )
        self.method = method

    def forward(self, return_loss: bool = True, **tensors: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch, the `tensors` of a `ReasoningBatch` by name.

        `return_loss` tells Trainer that evaluations have a loss although there are no labels.
        """
        return {"loss": self.method(ReasoningBatch(**cast(dict[str, Any], tensors))).loss}

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute every n-th block of a `laconic.Decoder` in the backward pass; UsageError with `offload`."""
        decoders = [module for module in self.method.modules() if isinstance(module, Decoder)]
        if offload or not decoders:
            reason = "offload is not supported" if offload else f"{type(self.method).__name__} has no laconic.Decoder"
            raise UsageError(f"gradient_checkpointing: {reason}; remove it")
        for decoder in decoders:
            decoder.activation_checkpointing = every_n_layers

    def activation_checkpointing_disable(self) -> None:
        """Keep all activations for the backward pass."""
        self.activation_checkpointing_enable(every_n_layers=0)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute every block: the name that earlier releases of transformers call."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    gradient_checkpointing_disable = activation_checkpointing_disable


class RowCollator:
    """Turns indices of rows into the tensors that `TrainerModel` takes; the data set of Trainer is `range(len(data))`.

    The rows of `data` have questions, as `Experiment.training_data` may.
    """

    def __init__(self, data: TrainingData) -> None:
        self.data = data

    def __call__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of a batch by name. Raises `UsageError` if the rows are documents."""
        batch = self.data.batch([int(row) for row in rows], 0, 0)
        if not isinstance(batch, ReasoningBatch):
            raise UsageError("windows of documents need laconic's own loop; use laconic train")
        return {name: getattr(batch, name) for name in TENSOR_FIELDS}
