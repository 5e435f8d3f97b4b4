"""What a recipe's [train] table may say: the optimizer, its schedule, precision, saving; nothing here imports torch."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ConfigModel(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class EarlyStopConfig(ConfigModel):
    """A number of the validation that ends a run once it is reached."""

    metric: str = Field("accuracy", description="name in what the validation gives")
    at_least: float = Field(description="the run ends when the metric is this or more")


class TrainingConfig(ConfigModel):
    """How a method is trained: one of `steps` and `epochs` says how long."""

    trainable: Literal["full", "lora", "latents"] = Field(
        "full", description="everything; adapter, control vectors and projection; control vectors and projection alone"
    )
    steps: PositiveInt | None = Field(None, description="updates; or give epochs")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="passes over the rows; or give steps")
    batch_size: PositiveInt = Field(128, description="rows an update, over all micro-batches and ranks")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="under torchrun: every rank holds all, or a shard of parameters, gradients and optimizer"
    )
    micro_batch_size: PositiveInt | None = Field(
        None, description="rows a forward pass on one rank; absent: the rank's whole share"
    )
    last_batch: Literal["drop", "keep"] = Field("drop", description="rows at the end of an epoch that fill no batch")

    optimizer: Literal["adamw", "m3", "dgd"] = Field(
        "adamw", description="of matrices: AdamW; two memories of gradients; delta gradient descent; AdamW of all else"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-3, description="largest learning rate")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="how the rate falls after warm-up"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="share of lr at which the schedule ends")
    warmup_ratio: Fraction = Field(0.0, description="share of all steps in which the rate rises from 0")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(None, description="the same in steps; then no share")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="AdamW's decay of both moments")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="of matrices; norms, biases and other vectors never decay"
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest norm of all gradients; 0: not clipped"
    )

    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of products in forward and backward; weights and optimizer keep their own"
    )
    activation_checkpointing: Annotated[int, Field(ge=0)] = Field(
        0, description="every k-th block is computed again in backward, 0 none"
    )
    deterministic: bool = Field(False, description="on a GPU too: slower; operations without a way are errors")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="NaN or infinity: end, or leave out up to 3 in 100"
    )
    stateful: bool = Field(False, description="the state that a step gives goes into the next one")

    save_every: PositiveInt = Field(500, description="steps between checkpoints; the last step is always one")
    keep_every: PositiveInt | None = Field(None, description="checkpoints at multiples of this are never deleted")
    keep_best: Annotated[int, Field(ge=0)] = Field(1, description="checkpoints kept as the best by `best`")
    best_metric: str | None = Field(
        None, description="number of the validation that keep_best goes by; absent: none is best"
    )
    best_mode: Literal["max", "min"] = Field("max", description="which value of it is best")
    log_every: PositiveInt = Field(1, description="steps between lines of metrics.jsonl")
    validate_every: PositiveInt | None = Field(None, description="steps between validations; absent: at the end alone")
    early_stop: EarlyStopConfig | None = Field(None, description="end early: { metric = ..., at_least = ... }")

    @model_validator(mode="after")
    def check_combination(self) -> "TrainingConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps {self.steps}, epochs {self.epochs}: give one of them")
        if self.warmup_ratio and self.warmup_steps is not None:
            raise ValueError(f"warmup {self.warmup_ratio:g} and warmup_steps {self.warmup_steps}: give one of them")
        if self.optimizer != "adamw" and self.parallel == "fsdp":
            raise ValueError(f'parallel "fsdp" with optimizer {self.optimizer}: it moves whole matrices; take "ddp"')
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro {self.micro_batch_size}: more rows than batch {self.batch_size}; leave it out")
        return self

    def updates_per_epoch(self, num_rows: int) -> int:
        """Updates in a pass over `rows`."""
        return num_rows // self.batch_size if self.last_batch == "drop" else math.ceil(num_rows / self.batch_size)

    def total_updates(self, num_rows: int) -> int:
        """Updates in all."""
        return self.num_updates(self.updates_per_epoch(num_rows))

    def num_updates(self, per_epoch: int) -> int:
        """Updates in all, of so many in an epoch."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * per_epoch)

    def num_warmup_updates(self, steps: int) -> int:
        """Updates of the warm-up, of `steps` in all."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * steps)
