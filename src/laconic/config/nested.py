"""Recipe tables of the nested learning models: mixers, CMS levels, inner loop. This module does not import torch.

Nested Learning arXiv:2512.24695; Titans arXiv:2501.00663. The layers in `laconic.nested`
take these option objects too.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Annotated, Literal, SupportsIndex, get_args

from pydantic import Field, model_validator

from laconic.config.config_model import ConfigModel, Fraction, NonNegative, OpenFraction, PositiveFloat, PositiveInt

AdaptiveProjection = Literal["k", "v", "step", "keep"]
OuterGradient = Literal["full", "truncated", "first_order"]
InnerOptimizer = Literal["gd", "momentum", "delta_momentum", "muon", "dgd"]
LevelConnection = Literal["residual", "plain"]
MixerKind = Literal["self_modifying", "titans", "attention"]
DonorLayout = Literal["depth", "grow", "chain"]
ReadPosition = Literal["after", "before", "boundary"]

ALL_PROJECTIONS: tuple[AdaptiveProjection, ...] = get_args(AdaptiveProjection)
MAX_HALF_LIFE = math.log(2) * 2**23  # tokens; beyond it, 1 - decay factor is below float32's epsilon
DEFAULT_INNER_LR = {"task": 1e-3, "associative": 1e-2}


class SelfModifyingOptions(ConfigModel):
    """[mixer.self_modifying]: options of the self-modifying Titans memory (Nested Learning, section 8)."""

    conv_kernel_size: PositiveInt = 4
    """kernel size of the convolution"""
    init: Literal["random", "window"] = "random"
    """initial projections: random, or (window) such that a repeated token recalls what followed it"""
    adaptive_projections: tuple[AdaptiveProjection, ...] = ALL_PROJECTIONS
    """projections that modify themselves; an empty list disables self-modification"""
    adaptive_query: bool = False
    """the query projection modifies itself too"""
    memory_kind: Literal["linear", "affine", "mlp"] = "linear"
    """memory M z, z + W z, or z + W1 silu(W2 z)"""
    objective: Literal["dot", "l2"] = "dot"
    """dot: write the value; l2 (the paper): write its error under the current memory"""
    delta_rule: bool = True
    """erase what is stored at the key before writing"""
    read_at: Literal["token", "boundary", "after"] = "token"
    """memory that a query reads: before its token is written, at the chunk's start, or after the write"""
    gate_groups: Literal[1, 2] = 2
    """1: memory and projections share gates and chunk; 2: each has its own"""
    decay_target: Literal["start", "zero"] = "start"
    """value that weights decay towards: their initial value, or zero (the paper)"""
    momentum: bool = False
    """writes have momentum"""
    max_lr: Annotated[float, Field(gt=0, le=2)] = 1.0
    """largest write step; 2 allows a state to change sign, above 2 erasing overshoots"""
    memory_lr_init: PositiveFloat = 0.5
    """initial write step of the memory"""
    projection_lr_init: PositiveFloat = 0.001
    """initial write step of the projections; with max_projection_norm, a step far above 1 / decay_half_life is cut to
    its limit and gets no gradient"""
    decay_half_life: PositiveFloat = 693.0
    """initial half-life of a write, in tokens"""
    memory_chunk_size: PositiveInt = 64
    """tokens per chunk of the memory; a chunk's gradients use the memory at its start"""
    projection_chunk_size: PositiveInt = 64
    """tokens per chunk of the projections; one chunk size must divide the other"""
    max_projection_norm: NonNegative = 1.0
    """norm limit of the projections; 0: no limit"""
    max_memory_norm: NonNegative = 4.0
    """norm limit of the memory at chunk ends, times sqrt(head_dim); 0: no limit"""
    activation_checkpointing: bool = False
    """recompute each chunk in the backward pass"""

    @property
    def adaptive_names(self) -> tuple[str, ...]:
        """The projections that modify themselves; the main memory is not among them."""
        return (*self.adaptive_projections, *(("q",) if self.adaptive_query else ()))

    @model_validator(mode="after")
    def check_options(self) -> "SelfModifyingOptions":
        smaller, larger = sorted((self.memory_chunk_size, self.projection_chunk_size))
        if larger % smaller:
            raise ValueError(f"chunk sizes {smaller} and {larger}: one must divide the other")
        if self.gate_groups == 1 and smaller != larger:
            raise ValueError(f"chunk sizes {smaller} and {larger}: gate_groups = 1 needs equal sizes")
        if self.init == "window" and self.adaptive_query:
            raise ValueError('init "window" needs adaptive_query = false')
        for name in ("memory_lr_init", "projection_lr_init"):
            if getattr(self, name) >= self.max_lr:
                raise ValueError(
                    f"{name} {getattr(self, name)}: must be below max_lr {self.max_lr}, which a sigmoid never reaches"
                )
        if self.max_projection_norm and self.momentum and self.adaptive_names:
            raise ValueError("max_projection_norm does not work with momentum; set one of them to 0 or false")
        if self.max_projection_norm and self.adaptive_names and self.decay_half_life > MAX_HALF_LIFE:
            raise ValueError(
                f"decay_half_life {self.decay_half_life:g}: too long to decay in float32, so max_projection_norm would "
                "block every write; set max_projection_norm = 0 or a shorter half-life"
            )
        return self


class TitansOptions(ConfigModel):
    """[mixer.titans]: options of a Titans neural memory."""

    memory_depth: Literal[1, 2] = 2
    """1: the memory is a matrix; 2: two layers, z + W1 silu(W2 z)"""
    mlp_width: PositiveInt | None = None
    """inner width at depth 2; default: head_dim"""
    read_at: ReadPosition = "after"
    """memory that a query reads: after its token is written, before, or at the chunk's start"""
    loss_factor: Literal[1, 2] = 1
    """loss is the squared error times 1/2 (1) or 1 (2, the paper)"""
    momentum: bool = True
    """writes have momentum"""
    lr_init: OpenFraction | None = None
    """initial write step; default: by depth and chunk size"""
    decay_half_life: PositiveFloat = 693.0
    """initial half-life of a write, in tokens"""
    conv_kernel_size: PositiveInt = 4
    """kernel size of the convolutions"""
    num_persistent_tokens: Annotated[int, Field(ge=0)] = 0
    """learned vectors before the first token"""
    max_memory_norm: NonNegative = 4.0
    """norm limit of the memory at chunk ends, times sqrt(head_dim); 0: no limit"""
    activation_checkpointing: bool = False
    """recompute each chunk in the backward pass"""

    def initial_lr(self, chunk_size: int) -> float:
        """Return `lr_init`, or its default.

        The default is 0.5 for a matrix. For two layers it is about 1 / chunk size, because the writes of a chunk add up
        and each makes the next gradients larger.
        """
        default = 0.5
        if self.memory_depth == 2:
            default = 1 / (self.loss_factor * max(16, chunk_size))
        return self.lr_init or default


class CMSOptions(ConfigModel):
    """Options of the continuum memory system: MLPs that learn while the model reads, each level once per chunk."""

    structure: Literal["sequential", "nested", "independent"] = "sequential"
    """sequential: levels in a chain; nested: also, each level restarts when the next slower one updates; independent:
    in parallel"""
    inner_objective: Literal["task", "associative"] = "task"
    """task: next-token loss, through all layers above; associative: a loss of the level alone"""
    inner_optimizer: InnerOptimizer = "gd"
    """rule that turns a chunk's gradient into an update"""
    residual: LevelConnection = "residual"
    """residual connections around each level, or a plain chain (the paper)"""
    lr_granularity: Literal["level", "token"] = "level"
    """learned inner learning rate per level, or per token"""
    inner_lr: NonNegative | None = None
    """initial inner learning rate of a whole chunk; 0 disables learning; default: 0.001 for task, 0.01 for associative
    """
    associative_target: Literal["map", "start"] = "map"
    """target of the associative loss: a linear map of the input, or the level's initial output plus a map that starts
    at 0"""
    meta_gradient: Literal["first_order", "full", "reptile", "outer"] = "first_order"
    """nested: how the initial weights of a level are learned: by a step of the slower level (first_order), by that step
    with gradients through the level's updates (full), by moving towards its result (reptile), or by the outer loss
    alone"""
    reptile_rate: Fraction = 0.5
    """reptile: step towards the result, as a fraction of the distance"""
    inner_momentum: Fraction = 0.9
    """momentum of the inner optimizers that have one"""
    max_update_ratio: NonNegative = 0.1
    """largest update relative to the initial weights' norm; 0: no clipping; use 1e-4 for pretrained weights that are
    not trained further"""
    max_error_norm: NonNegative = 1.0
    """task: largest norm of a token's gradient; 0: no clipping"""

    @property
    def initial_inner_lr(self) -> float:
        """eta_0: `inner_lr`, or its default."""
        return DEFAULT_INNER_LR[self.inner_objective] if self.inner_lr is None else self.inner_lr

    @model_validator(mode="after")
    def check_options(self) -> "CMSOptions":
        if self.meta_gradient == "full" and self.inner_objective == "task":
            raise ValueError('meta_gradient "full" needs a loss of the level; set inner_objective = "associative"')
        return self


class MixerConfig(ConfigModel):
    """[mixer]: the layer that mixes tokens in place of attention."""

    kind: MixerKind = "self_modifying"
    """self-modifying memory, Titans, or attention (Hope-Attention)"""
    num_heads: PositiveInt = 4
    """heads of the memory; attention uses the decoder's"""
    head_dim: PositiveInt | None = None
    """self_modifying: width of a head; default: hidden_size / num_heads"""
    chunk_size: PositiveInt = 64
    """titans: tokens of a chunk"""
    self_modifying: SelfModifyingOptions = SelfModifyingOptions()
    """options of kind self_modifying"""
    titans: TitansOptions = TitansOptions()
    """options of kind titans"""

    @property
    def options(self) -> SelfModifyingOptions | TitansOptions | None:
        """Options of the selected kind; None for attention."""
        return {"self_modifying": self.self_modifying, "titans": self.titans, "attention": None}[self.kind]


class CMSConfig(CMSOptions):
    """[cms]: the CMS levels of every layer, and how they are taken from a pretrained donor."""

    chunk_sizes: tuple[int, ...] = (128, 512, 2048)
    """tokens between two updates of each level, fastest level first"""
    donor_layout: DonorLayout = "depth"
    """use of a pretrained decoder's (donor's) MLPs. depth: each becomes the one level of its layer; grow: keep them and
    add levels with zero output; chain: each layer chains the MLPs of several donor layers"""
    gated_mlp: bool = True
    """MLPs of a new model: gated (three matrices) or plain (two)"""

    @model_validator(mode="after")
    def check_levels(self) -> "CMSConfig":
        if error := find_chunk_error(self.chunk_sizes):
            raise ValueError(error)
        return self

    @property
    def options(self) -> CMSOptions:
        """The options that a single layer takes."""
        return CMSOptions(**{name: getattr(self, name) for name in CMSOptions.model_fields})


class InnerLoopConfig(ConfigModel):
    """[inner_loop]: whether the model learns while it reads, and how the outer gradient passes through that."""

    enabled: bool = True
    """memories and levels learn while the model reads; false: they stay fixed (control experiment)"""
    outer_gradient: OuterGradient = "full"
    """outer gradient through inner writes: all of it (full), through the last truncate_after chunks (truncated), or
    with the inner gradients as constants (first_order: less memory and time, but no level is trained to learn)"""
    truncate_after: PositiveInt | None = None
    """truncated: number of chunks after which gradients through written values stop"""
    allow_untrained_level: bool = False
    """accept levels and gates of memories that no outer gradient reaches"""

    @model_validator(mode="after")
    def check_truncation(self) -> "InnerLoopConfig":
        if (self.truncate_after is None) == (self.outer_gradient == "truncated"):
            raise ValueError(
                f'truncate_after {self.truncate_after}: set it for outer_gradient "truncated", and only for it'
            )
        return self


def find_chunk_error(chunk_sizes: Sequence[int]) -> str | None:
    """Return a message if the chunk sizes are not ascending multiples of one another, else None."""
    if not chunk_sizes or not all(isinstance(C, SupportsIndex) and index(C) > 0 for C in chunk_sizes):
        return f"chunk_sizes {list(chunk_sizes)}: must be at least 1 token for each level"
    for fast, slow in pairwise(chunk_sizes):
        if slow % fast:
            return f"chunk_sizes {list(chunk_sizes)}: must ascend, and {fast} must divide {slow}"
    return None


def find_size_error(width: int, intermediate_size: int, chunk_sizes: Sequence[int]) -> str | None:
    """Return a message if a width is not a positive integer or the chunk sizes do not fit, else None."""
    for name, size in (("width", width), ("intermediate_size", intermediate_size)):
        if not isinstance(size, SupportsIndex) or index(size) < 1:
            return f"{name} {size!r}: must be an integer of at least 1"
    return find_chunk_error(chunk_sizes)
