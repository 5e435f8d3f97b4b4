"""What a recipe may say of memories that learn while they read; nothing here imports torch.

Nested Learning arXiv:2512.24695; Titans arXiv:2501.00663, TNT arXiv:2511.07343. The layers take the same options.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from laconic.config.methods import ConfigModel, Fraction, NonNegative

AdaptiveProjection = Literal["k", "v", "step", "keep"]
NewLevelInit = Literal["zero", "copy"]
OuterGradient = Literal["full", "truncated", "first_order", "none"]
InnerOptimizer = Literal["gd", "momentum", "delta_momentum", "muon", "dgd"]
LevelConnection = Literal["residual", "plain"]
MixerKind = Literal["self_modifying", "titans", "attention"]
DonorLayout = Literal["depth", "grow", "chain"]
ReadPosition = Literal["after", "before", "boundary"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]

ALL_PROJECTIONS: tuple[AdaptiveProjection, ...] = ("k", "v", "step", "keep")
MAX_HALF_LIFE = math.log(2) * 2**23  # tokens of half-life beyond which a keep in float32 is nearly 1, or 1
DEFAULT_INNER_LR = {"task": 1e-3, "associative": 1e-2}


class SelfModifyingOptions(ConfigModel):
    """Of a self-modifying memory, beside its size."""

    input_proj: Literal["map", "none"] = Field(
        default="map", description="input: mapped and convolved, or split in heads"
    )
    conv_kernel_size: PositiveInt = Field(default=4, description="tokens of the convolution's window")
    init: Literal["random", "window"] = Field(
        default="random", description="drawn; or a key as that of its window's sum, a query as that of its own token"
    )
    adaptive_projections: tuple[AdaptiveProjection, ...] = Field(
        default=ALL_PROJECTIONS, description="projections that modify themselves; none: baseline"
    )
    adaptive_query: bool = Field(default=False, description="the query's projection modifies itself too")
    memory_kind: Literal["linear", "affine", "mlp"] = Field(
        default="linear", description="M z, z + W z, or z + W1 silu(W2 z)"
    )
    mlp_width: PositiveInt | None = Field(default=None, description="mlp: inner width; absent: a head's")
    objective: Literal["dot", "l2"] = Field(
        default="dot", description="a write is the value, or what it is off by (the print)"
    )
    loss_factor: Literal[1, 2] = Field(default=1, description="l2: half the squared error, or the print's whole")
    delta_rule: bool = Field(default=True, description="a write first takes away what is at its key")
    inner_delta_rule: bool = Field(default=True, description="mlp: in the first layer too")
    read_at: Literal["token", "boundary", "after"] = Field(
        default="token", description="state before a token, at its chunk's start, or after it"
    )
    gate_groups: Literal[1, 2] = Field(
        default=2, description="gates and chunk of memory and projections: shared, or their own"
    )
    decay_target: Literal["start", "zero"] = Field(
        default="start", description="what decays goes back there; zero is the print"
    )
    momentum: bool = Field(default=False, description="writes have momentum")
    momentum_init: PositiveFloat = Field(default=0.5, description="share of the last write that stays, at first")
    max_lr: PositiveFloat = Field(default=1.0, description="largest size of a write; 2 where a state must change sign")
    lr_form: Literal["sigmoid", "softplus"] = Field(default="sigmoid", description="how a step is bounded")
    memory_lr_init: PositiveFloat = Field(default=0.5, description="the memory's step at first")
    projection_lr_init: PositiveFloat = Field(default=0.02, description="the projections' step at first")
    decay_half_life: PositiveFloat = Field(
        default=693.0, description="tokens after which half of a write is left, at first"
    )
    memory_chunk_size: int = Field(default=64, description="tokens between two boundaries of the memory")
    projection_chunk_size: int = Field(default=64, description="of the projections; one chunk divides the other")
    max_projection_norm: NonNegative = Field(
        default=1.0, description="norm within which the projections stay; 0: no cap"
    )
    max_memory_norm: NonNegative = Field(
        default=4.0, description="norm of the memory at boundaries over the root of a head's width; 0: none"
    )
    gradient_through_values: bool = Field(
        default=True, description="the outer gradient passes through a memory's own values"
    )
    activation_checkpointing: bool = Field(default=False, description="each chunk is computed again in the backward")

    @property
    def adaptive_names(self) -> tuple[str, ...]:
        """The memories that modify themselves, the one that is read left out."""
        return (*self.adaptive_projections, *(("q",) if self.adaptive_query else ()))

    @property
    def error(self) -> str | None:
        """What cannot be meant, if anything."""
        few, many = sorted((self.memory_chunk_size, self.projection_chunk_size))
        if few < 1:
            return f"chunk {few} was asked for; a chunk has at least 1 token"
        if many % few:
            return f"chunks {few} and {many}; one divides the other"
        if self.gate_groups == 1 and few != many:
            return f"one group has one chunk, {few} and {many} were asked for; take groups=2"
        if self.init == "window" and (self.input_proj == "none" or self.adaptive_query):
            return 'begins "window" is of a mapped input and a static query; take mix="map", inner_query=false'
        if self.max_lr > 2:
            return f"step_max {self.max_lr} is beyond 2, where an erase overshoots; lower it"
        for name in ("memory_lr_init", "projection_lr_init") if self.lr_form == "sigmoid" else ():
            if getattr(self, name) >= self.max_lr:
                return (
                    f"{name} {getattr(self, name)} is not below step_max {self.max_lr}, which a sigmoid never reaches"
                )
        if self.max_projection_norm and self.momentum and self.adaptive_names:
            return "the cap bounds a write, not the sum that momentum keeps; take cap=0 or no momentum"
        if self.max_projection_norm and self.adaptive_names and self.decay_half_life > MAX_HALF_LIFE:
            return (
                f"keep_half_life {self.decay_half_life:g} lets nothing go in float32, and the cap then lets nothing be "
                "written; take cap=0 or a shorter one"
            )
        return None


class TitansOptions(ConfigModel):
    """Of a Titans memory, beside its size."""

    memory_depth: Literal[1, 2] = Field(default=2, description="a matrix, or z + W1 silu(W2 z)")
    mlp_width: PositiveInt | None = Field(default=None, description="depth 2: inner width; absent: a head's")
    read_at: ReadPosition = Field(
        default="after", description="state after a token, before it, or at its chunk's start"
    )
    gate_granularity: Literal["token", "chunk"] = Field(
        default="token", description="of every token, or a chunk's first for all"
    )
    loss_factor: Literal[1, 2] = Field(default=1, description="half the squared error, or the print's whole")
    momentum: bool = Field(default=True, description="writes have momentum")
    momentum_init: PositiveFloat = Field(default=0.5, description="share of the last write that stays, at first")
    max_lr: PositiveFloat = Field(default=1.0, description="largest size of a write")
    lr_init: PositiveFloat | None = Field(
        default=None, description="its size at first; absent: ours, by depth and chunk"
    )
    decay_half_life: PositiveFloat = Field(
        default=693.0, description="tokens after which half of a write is left, at first"
    )
    conv_kernel_size: PositiveInt = Field(default=4, description="tokens of the convolutions' window")
    num_persistent_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0, description="learned vectors before the first token"
    )
    max_memory_norm: NonNegative = Field(
        default=4.0, description="norm of the memory at boundaries over the root of a head's width; 0: none"
    )
    reset_every: int | None = Field(default=None, description="tokens until the memory starts again; absent: never")
    global_chunk_size: int | None = Field(default=None, description="chunk of a second memory; absent: there is one")
    activation_checkpointing: bool = Field(default=False, description="each chunk is computed again in the backward")

    def find_error(self, chunk_size: int) -> str | None:
        """What cannot be meant with that chunk, if anything."""
        if chunk_size < 1:
            return f"chunk {chunk_size} was asked for; a chunk has at least 1 token"
        for name, n in (("reset_every", self.reset_every), ("global_chunk", self.global_chunk_size)):
            if n is not None and (n < 1 or n % chunk_size):
                return f"{name} {n} is no multiple of the chunk, {chunk_size}; memories change at its ends"
        first = self.initial_lr(chunk_size)
        if first >= self.max_lr:
            return f"step_start {first} is not below step_max {self.max_lr}, which a sigmoid never reaches"
        if self.max_lr * self.loss_factor > 2:
            return (
                f"step_max {self.max_lr} times factor {self.loss_factor} is beyond 2, where one write overshoots "
                "further than it was off; lower it"
            )
        return None

    def initial_lr(self, chunk_size: int) -> float:
        """`step_start`, or 0.5; of two layers 1/C: its writes add up, and each makes the next gradients larger."""
        ours = (
            0.5 if self.memory_depth == 1 else 1 / (self.loss_factor * max(16, chunk_size, self.global_chunk_size or 0))
        )
        return self.lr_init or ours


class CMSOptions(ConfigModel):
    """Of MLPs that learn while they read, each level once in its chunk."""

    structure: Literal["sequential", "nested", "independent"] = Field(
        default="sequential", description="a chain; one that starts again where the next slower fires; side by side"
    )
    inner_objective: Literal["task", "associative"] = Field(
        default="task", description="descends the next token's loss through all above, or an error of its own"
    )
    inner_optimizer: InnerOptimizer = Field(default="gd", description="what makes an update of a chunk's gradients")
    residual: LevelConnection = Field(
        default="residual", description="between levels: with links past each, or the print's bare chain"
    )
    level_order: Literal["fast_first", "slow_first"] = Field(
        default="fast_first", description="of the levels in the chain"
    )
    gradient_reduction: Literal["sum", "mean"] = Field(
        default="sum", description="a chunk's gradients: their sum, or mean"
    )
    lr_granularity: Literal["level", "token"] = Field(
        default="level", description="a learned step of the level, or of every token"
    )
    inner_lr: NonNegative | None = Field(
        default=None,
        description="whole step of a chunk at first; 0: none learns; absent: 0.001 for the task, else 0.01",
    )
    associative_target: Literal["map", "start"] = Field(
        default="map", description="associative: a map of the input, or the start's answer and a map that is 0 at first"
    )
    meta_gradient: Literal["first_order", "full", "reptile", "outer"] = Field(
        default="first_order",
        description="nested: a start moves by the slower step, through the updates too, a share of the way, or never",
    )
    reptile_rate: Fraction = Field(default=0.5, description="reptile: that share")
    inner_momentum: Fraction = Field(default=0.9, description="inner optimizers: share of their memory that stays")
    dgd_target: Literal["weights", "delta"] = Field(
        default="weights", description="dgd erases of the weights, or of their change"
    )
    max_update_ratio: NonNegative = Field(
        default=0.1, description="largest update, as a share of the start's norm; 0: not clipped"
    )
    max_error_norm: NonNegative = Field(
        default=1.0, description="task: largest norm of a token's gradient; 0: not clipped"
    )

    @property
    def initial_inner_lr(self) -> float:
        """η_0."""
        return DEFAULT_INNER_LR[self.inner_objective] if self.inner_lr is None else self.inner_lr

    @property
    def error(self) -> str | None:
        """What cannot be meant, if anything."""
        if self.meta_gradient == "full" and self.inner_objective == "task":
            return "meta full reads a level's chunk again by its own loss, the task's is not; take inner=associative"
        return None


class MixerConfig(ConfigModel):
    """What a layer has in the place of attention."""

    kind: MixerKind = Field(
        default="self_modifying", description="self-modifying memory; Titans; or attention, as Hope-Attention has it"
    )
    num_heads: PositiveInt = Field(default=4, description="heads of the memory; attention has the decoder's")
    head_dim: PositiveInt | None = Field(
        default=None, description="self: width of a head; absent: the model's over the heads"
    )
    chunk_size: int = Field(default=64, description="titans: tokens between two boundaries")
    self_modifying: SelfModifyingOptions = Field(default=SelfModifyingOptions(), description="options of mixer self")
    titans: TitansOptions = Field(default=TitansOptions(), description="options of mixer titans")

    @model_validator(mode="after")
    def check_options(self) -> "MixerConfig":
        found = {"self_modifying": self.self_modifying.error, "titans": self.titans.find_error(self.chunk_size)}.get(
            self.kind
        )
        if found:
            raise ValueError(f"{self.kind}: {found}")
        return self

    @property
    def options(self) -> SelfModifyingOptions | TitansOptions | None:
        """Those of the mixer; None for attention."""
        return {"self_modifying": self.self_modifying, "titans": self.titans, "attention": None}[self.kind]


class CMSConfig(CMSOptions):
    """The levels of every layer: their chunks, what they begin as, and their options."""

    chunk_sizes: tuple[int, ...] = Field(
        default=(128, 512, 2048), description="tokens of each level between two updates, fastest first"
    )
    donor_layout: DonorLayout = Field(
        default="depth",
        description="donors: each layer one level, by depth; levels added; or MLPs of several layers in each",
    )
    new_level_init: NewLevelInit = Field(
        default="zero", description="place grow: an added level adds nothing at first, or is a copy"
    )
    donor_map: tuple[int, ...] | None = Field(
        default=None, description="depth: a layer's chunk; chain: a level's donor; by number"
    )
    gated_mlp: bool = Field(default=True, description="MLPs of a new model: with a gate, or of two maps")

    @model_validator(mode="after")
    def check_levels(self) -> "CMSConfig":
        found = find_chunk_error(self.chunk_sizes) or self.error
        if found:
            raise ValueError(found)
        return self

    @property
    def options(self) -> CMSOptions:
        """Those of the levels alone."""
        return CMSOptions(**{name: getattr(self, name) for name in CMSOptions.model_fields})


class InnerLoopConfig(ConfigModel):
    """What of the reading is learned from, and what of it is learned through."""

    enabled: bool = Field(default=True, description="memories and levels learn while they read; false: the control")
    outer_gradient: OuterGradient | None = Field(
        default=None,
        description="of the outer loss through writes; absent: first_order where levels learn the task, else full",
    )
    truncate_after: PositiveInt | None = Field(
        default=None, description="truncated: chunks after which what was written is constant"
    )
    allow_untrained_level: bool = Field(
        default=False, description="a level may be so slow that no outer gradient reaches its step"
    )

    @model_validator(mode="after")
    def check_truncation(self) -> "InnerLoopConfig":
        if (self.outer_gradient == "truncated") != (self.truncate_after is not None):
            raise ValueError(f"horizon {self.truncate_after}: gradient truncated has one, others none")
        return self


def find_chunk_error(chunk_sizes: Sequence[int]) -> str | None:
    """What is wrong with the chunks of levels, if anything: each divides the next slower one's."""
    if not chunk_sizes or min(chunk_sizes) < 1:
        return f"chunks {list(chunk_sizes)}; give one a level, each of at least 1 token"
    for fast, slow in pairwise(chunk_sizes):
        if slow % fast:
            return f"chunk {fast} does not divide {slow}, the next; chunks ascend, each divides the next"
    return None


def find_untrained_level(cms: CMSConfig, row_tokens: int, inner_loop: InnerLoopConfig) -> str | None:
    """Why a level's step would get no outer gradient where `tokens` of a row stand between two updates, if it would."""
    slow = next((l for l, C in enumerate(cms.chunk_sizes) if row_tokens <= C), None)
    if slow is None or inner_loop.allow_untrained_level or not inner_loop.enabled or cms.initial_inner_lr == 0:
        return None
    return (
        f"level {slow} has chunk {cms.chunk_sizes[slow]}, rows have {row_tokens} tokens between two updates, so no gradient "
        "reaches its step; read longer rows, take smaller chunks, or set inner_loop.allow_untrained_level = true"
    )
