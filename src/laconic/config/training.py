"""The [train] table of a recipe: optimizer, schedule, precision, checkpoints. Nothing here imports torch."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from laconic.config.config_model import ConfigModel, Fraction, NonNegative, PositiveFloat, PositiveInt

FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class EarlyStopConfig(ConfigModel):
    """[train.early_stop]: a validation metric that ends the run once it is reached."""

    metric: str = "accuracy"
    """name of the validation metric"""
    at_least: float
    """value of the metric that ends the run"""


class TrainingConfig(ConfigModel):
    """[train]: how a method is trained. Exactly one of `steps` and `epochs` is set."""

    trainable: Literal["full", "lora", "latents"] = "full"
    """all weights; LoRA adapter, control vectors and projection; or only control vectors and projection"""
    steps: PositiveInt | None = None
    """optimizer updates; or set epochs"""
    epochs: PositiveFloat | None = None
    """passes over the training rows; or set steps"""
    batch_size: PositiveInt = 128
    """rows of an update, over all micro-batches and ranks"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """under torchrun: replicate everything, or shard parameters, gradients and optimizer state"""
    reshard: bool = False
    """with fsdp: gather each block's weights only while it runs; less memory, slower"""
    micro_batch_size: PositiveInt | None = None
    """rows of a forward pass on one rank; default: the rank's whole share"""
    last_batch: Literal["drop", "keep"] = "drop"
    """what to do with rows at the end of an epoch that do not fill a batch"""

    optimizer: Literal["adamw", "m3", "dgd"] = "adamw"
    """rule for matrices: AdamW, M3, or delta gradient descent; all else uses AdamW"""
    learning_rate: PositiveFloat = 1e-3
    """peak learning rate"""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """decay after the warm-up"""
    min_lr_ratio: Fraction = 0.0
    """final learning rate as a fraction of the peak"""
    warmup_ratio: FractionBelowOne = 0.0
    """fraction of all updates in the linear warm-up"""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """updates in the warm-up, instead of warmup_ratio"""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """AdamW's betas"""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon"""
    weight_decay: NonNegative = 0.0
    """weight decay of matrices; norms and biases never decay"""
    max_grad_norm: NonNegative = 1.0
    """gradient clipping by global norm; 0: none"""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """autocast type of matrix products; weights and optimizer keep theirs"""
    activation_checkpointing: Annotated[int, Field(ge=0)] = 0
    """recompute every k-th block in the backward pass; 0: none"""
    deterministic: bool = False
    """deterministic algorithms on a GPU too; slower"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """on NaN or infinity: stop, or skip up to 3 of 100 updates"""
    stateful: bool = False
    """carry the state of a batch into the next one"""

    save_every: PositiveInt = 500
    """updates between checkpoints; the last update is always saved"""
    keep_every: PositiveInt | None = None
    """never delete checkpoints at multiples of this"""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """number of best checkpoints to keep"""
    best_metric: str | None = None
    """validation metric by which keep_best keeps checkpoints; unset: none"""
    best_mode: Literal["max", "min"] = "max"
    """whether a larger or a smaller metric is better"""
    log_every: PositiveInt = 1
    """updates between lines of metrics.jsonl"""
    validate_every: PositiveInt | None = None
    """updates between validations; default: only at the end"""
    early_stop: EarlyStopConfig | None = None
    """stop early: { metric = ..., at_least = ... }"""

    @model_validator(mode="after")
    def check_combination(self) -> "TrainingConfig":
        if (self.steps is None) == (self.epochs is None):
            number = "neither" if self.steps is None else "both"
            raise ValueError(f"set exactly one of steps and epochs, not {number}")
        if self.warmup_ratio and self.warmup_steps is not None:
            raise ValueError(f"warmup_ratio {self.warmup_ratio:g}, warmup_steps {self.warmup_steps}: set only one")
        if self.reshard and self.parallel != "fsdp":
            raise ValueError(f'reshard with parallel "{self.parallel}": nothing is sharded; set parallel = "fsdp"')
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size}: exceeds batch_size {self.batch_size}")
        return self

    def updates_per_epoch(self, num_rows: int) -> int:
        return num_rows // self.batch_size if self.last_batch == "drop" else math.ceil(num_rows / self.batch_size)

    def total_updates(self, num_rows: int) -> int:
        return self.num_updates(self.updates_per_epoch(num_rows))

    def num_updates(self, per_epoch: int) -> int:
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * per_epoch)

    def num_warmup_updates(self, steps: int) -> int:
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * steps)
