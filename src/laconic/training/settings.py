"""What a recipe's [train] table may say: the optimizer, its schedule, precision, saving; nothing here imports torch."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Goal(Settings):
    """A number of the validation that ends a run once it is reached."""

    metric: str = Field("accuracy", description="name in what the validation gives")
    at_least: float = Field(description="the run ends when the metric is this or more")


class Training(Settings):
    """How a method is trained: one of `steps` and `epochs` says how long."""

    what: Literal["full", "lora", "thoughts"] = Field(
        "full", description="everything; adapter, control vectors and projection; control vectors and projection alone"
    )
    steps: Count | None = Field(None, description="updates; or give epochs")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="passes over the rows; or give steps")
    batch: Count = Field(128, description="rows an update, over all micro-batches and ranks")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="under torchrun: every rank holds all, or a shard of parameters, gradients and optimizer"
    )
    micro: Count | None = Field(None, description="rows a forward pass on one rank; absent: the rank's whole share")
    last_batch: Literal["drop", "keep"] = Field("drop", description="rows at the end of an epoch that fill no batch")

    optimizer: Literal["adamw", "m3", "dgd"] = Field(
        "adamw", description="of matrices: AdamW; two memories of gradients; delta gradient descent; AdamW of all else"
    )
    lr: Annotated[float, Field(gt=0)] = Field(1e-3, description="largest learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="how the rate falls after warm-up")
    floor: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="share of lr at which the schedule ends")
    warmup: Share = Field(0.0, description="share of all steps in which the rate rises from 0")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(None, description="the same in steps; then no share")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's decay of both moments")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="of matrices; norms, biases and other vectors never decay"
    )
    clip: Annotated[float, Field(ge=0)] = Field(1.0, description="largest norm of all gradients; 0: not clipped")

    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of products in forward and backward; weights and optimizer keep their own"
    )
    recompute: Annotated[int, Field(ge=0)] = Field(
        0, description="every k-th block is computed again in backward, 0 none"
    )
    deterministic: bool = Field(False, description="on a GPU too: slower; operations without a way are errors")
    nonfinite: Literal["stop", "skip"] = Field("stop", description="NaN or infinity: end, or leave out up to 3 in 100")
    carry: bool = Field(False, description="the state that a step gives goes into the next one")

    save_every: Count = Field(500, description="steps between checkpoints; the last step is always one")
    keep_every: Count | None = Field(None, description="checkpoints at multiples of this are never deleted")
    keep_best: Annotated[int, Field(ge=0)] = Field(1, description="checkpoints kept as the best by `best`")
    best: str | None = Field(None, description="number of the validation that keep_best goes by; absent: none is best")
    best_is: Literal["largest", "smallest"] = Field("largest", description="which value of it is best")
    log_every: Count = Field(1, description="steps between lines of metrics.jsonl")
    validate_every: Count | None = Field(None, description="steps between validations; absent: at the end alone")
    stop_when: Goal | None = Field(None, description="end early: { metric = ..., at_least = ... }")

    @model_validator(mode="after")
    def fits(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps {self.steps}, epochs {self.epochs}: give one of them")
        if self.warmup and self.warmup_steps is not None:
            raise ValueError(f"warmup {self.warmup:g} and warmup_steps {self.warmup_steps}: give one of them")
        if self.optimizer != "adamw" and self.parallel == "fsdp":
            raise ValueError(f'parallel "fsdp" with optimizer {self.optimizer}: it moves whole matrices; take "ddp"')
        if self.micro is not None and self.micro > self.batch:
            raise ValueError(f"micro {self.micro}: more rows than batch {self.batch}; leave it out")
        return self

    def per_epoch(self, rows: int) -> int:
        """Updates in a pass over `rows`."""
        return rows // self.batch if self.last_batch == "drop" else math.ceil(rows / self.batch)

    def length(self, rows: int) -> int:
        """Updates in all."""
        return self.updates(self.per_epoch(rows))

    def updates(self, per_epoch: int) -> int:
        """Updates in all, of so many in an epoch."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * per_epoch)

    def rising(self, steps: int) -> int:
        """Updates of the warm-up, of `steps` in all."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup * steps)
