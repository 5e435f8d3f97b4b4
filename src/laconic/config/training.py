"""The [train] table of a recipe: optimizer, schedule, precision, checkpoints. Nothing here imports torch."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from laconic.config.config_model import ConfigModel, Fraction, NonNegative, PositiveFloat, PositiveInt

FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class EarlyStopConfig(ConfigModel):
    """[train.early_stop]: a validation metric that ends the run once it is reached."""

    metric: str = Field(default="accuracy", description="name of the validation metric")
    at_least: float = Field(description="value of the metric that ends the run")


class TrainingConfig(ConfigModel):
    """[train]: how a method is trained. Exactly one of `steps` and `epochs` is set."""

    trainable: Literal["full", "lora", "latents"] = Field(
        default="full",
        description="all weights; LoRA adapter, control vectors and projection; or only control vectors and projection",
    )
    steps: PositiveInt | None = Field(default=None, description="optimizer updates; or set epochs")
    epochs: PositiveFloat | None = Field(default=None, description="passes over the training rows; or set steps")
    batch_size: PositiveInt = Field(default=128, description="rows of an update, over all micro-batches and ranks")
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="under torchrun: replicate everything, or shard parameters, gradients and optimizer state",
    )
    reshard: bool = Field(
        default=False, description="with fsdp: gather each block's weights only while it runs; less memory, slower"
    )
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="rows of a forward pass on one rank; default: the rank's whole share"
    )
    last_batch: Literal["drop", "keep"] = Field(
        default="drop", description="what to do with rows at the end of an epoch that do not fill a batch"
    )

    optimizer: Literal["adamw", "m3", "dgd"] = Field(
        default="adamw", description="rule for matrices: AdamW, M3, or delta gradient descent; all else uses AdamW"
    )
    learning_rate: PositiveFloat = Field(default=1e-3, description="peak learning rate")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="decay after the warm-up"
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="final learning rate as a fraction of the peak")
    warmup_ratio: FractionBelowOne = Field(default=0.0, description="fraction of all updates in the linear warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="updates in the warm-up, instead of warmup_ratio"
    )
    betas: tuple[FractionBelowOne, FractionBelowOne] = Field(default=(0.9, 0.999), description="AdamW's betas")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(default=0.0, description="weight decay of matrices; norms and biases never decay")
    max_grad_norm: NonNegative = Field(default=1.0, description="gradient clipping by global norm; 0: none")

    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="autocast type of matrix products; weights and optimizer keep theirs"
    )
    activation_checkpointing: Annotated[int, Field(ge=0)] = Field(
        default=0, description="recompute every k-th block in the backward pass; 0: none"
    )
    deterministic: bool = Field(default=False, description="deterministic algorithms on a GPU too; slower")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="on NaN or infinity: stop, or skip up to 3 of 100 updates"
    )
    stateful: bool = Field(default=False, description="carry the state of a batch into the next one")

    save_every: PositiveInt = Field(
        default=500, description="updates between checkpoints; the last update is always saved"
    )
    keep_every: PositiveInt | None = Field(default=None, description="never delete checkpoints at multiples of this")
    keep_best: Annotated[int, Field(ge=0)] = Field(default=1, description="number of best checkpoints to keep")
    best_metric: str | None = Field(
        default=None, description="validation metric by which keep_best keeps checkpoints; unset: none"
    )
    best_mode: Literal["max", "min"] = Field(
        default="max", description="whether a larger or a smaller metric is better"
    )
    log_every: PositiveInt = Field(default=1, description="updates between lines of metrics.jsonl")
    validate_every: PositiveInt | None = Field(
        default=None, description="updates between validations; default: only at the end"
    )
    early_stop: EarlyStopConfig | None = Field(default=None, description="stop early: { metric = ..., at_least = ... }")

    @model_validator(mode="after")
    def check_combination(self) -> "TrainingConfig":
        if (self.steps is None) == (self.epochs is None):
            number = "neither" if self.steps is None else "both"
            raise ValueError(f"set exactly one of steps and epochs, not {number}")
        if self.warmup_ratio and self.warmup_steps is not None:
            raise ValueError(
                f"warmup_ratio {self.warmup_ratio:g} and warmup_steps {self.warmup_steps}: set only one of them"
            )
        if self.reshard and self.parallel != "fsdp":
            raise ValueError(f'reshard with parallel "{self.parallel}": nothing is sharded; set parallel = "fsdp"')
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size}: exceeds batch_size {self.batch_size}; remove it"
            )
        return self

    def updates_per_epoch(self, num_rows: int) -> int:
        """Return the number of updates in a pass over `num_rows` rows."""
        return num_rows // self.batch_size if self.last_batch == "drop" else math.ceil(num_rows / self.batch_size)

    def total_updates(self, num_rows: int) -> int:
        """Return the number of updates of a run on `num_rows` rows."""
        return self.num_updates(self.updates_per_epoch(num_rows))

    def num_updates(self, per_epoch: int) -> int:
        """Return the number of updates of a run with `per_epoch` updates in an epoch."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * per_epoch)

    def num_warmup_updates(self, steps: int) -> int:
        """Return the number of warm-up updates in a run of `steps` updates."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * steps)
