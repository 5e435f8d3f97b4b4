"""What a recipe may say of memories that learn while they read; nothing here imports torch.

Nested Learning arXiv:2512.24695; Titans arXiv:2501.00663, TNT arXiv:2511.07343. The layers take the same options.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from laconic.methods.settings import Settings, Share, Weight

Adaptive = Literal["k", "v", "step", "keep"]
Grow = Literal["zero", "copy"]
Gradient = Literal["full", "truncated", "first_order", "none"]
InnerOptimizer = Literal["gd", "momentum", "delta_momentum", "muon", "dgd"]
Link = Literal["residual", "plain"]
Mixer = Literal["self", "titans", "attention"]
Place = Literal["depth", "grow", "chain"]
Read = Literal["after", "before", "boundary"]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]

INNER: tuple[Adaptive, ...] = ("k", "v", "step", "keep")
EVER = math.log(2) * 2**23  # tokens of half-life beyond which a keep in float32 is nearly 1, or 1
ETA = {"task": 1e-3, "associative": 1e-2}


class SelfTitansOptions(Settings):
    """Of a self-modifying memory, beside its size."""

    mix: Literal["map", "none"] = Field(default="map", description="input: mapped and convolved, or split in heads")
    conv: Count = Field(default=4, description="tokens of the convolution's window")
    begins: Literal["drawn", "window"] = Field(
        default="drawn", description="drawn; or a key as that of its window's sum, a query as that of its own token"
    )
    inner: tuple[Adaptive, ...] = Field(default=INNER, description="projections that modify themselves; none: baseline")
    inner_query: bool = Field(default=False, description="the query's projection modifies itself too")
    memory: Literal["linear", "affine", "mlp"] = Field(
        default="linear", description="M z, z + W z, or z + W1 silu(W2 z)"
    )
    hidden: Count | None = Field(default=None, description="mlp: inner width; absent: a head's")
    objective: Literal["dot", "l2"] = Field(
        default="dot", description="a write is the value, or what it is off by (the print)"
    )
    factor: Literal[1, 2] = Field(default=1, description="l2: half the squared error, or the print's whole")
    erase: bool = Field(default=True, description="a write first takes away what is at its key")
    erase_inner: bool = Field(default=True, description="mlp: in the first layer too")
    read: Literal["token", "boundary", "after"] = Field(
        default="token", description="state before a token, at its chunk's start, or after it"
    )
    groups: Literal[1, 2] = Field(
        default=2, description="gates and chunk of memory and projections: shared, or their own"
    )
    decay_to: Literal["start", "zero"] = Field(
        default="start", description="what decays goes back there; zero is the print"
    )
    momentum: bool = Field(default=False, description="writes have momentum")
    momentum_start: Positive = Field(default=0.5, description="share of the last write that stays, at first")
    step_max: Positive = Field(default=1.0, description="largest size of a write; 2 where a state must change sign")
    step_form: Literal["sigmoid", "softplus"] = Field(default="sigmoid", description="how a step is bounded")
    step_memory: Positive = Field(default=0.5, description="the memory's step at first")
    step_projections: Positive = Field(default=0.02, description="the projections' step at first")
    keep_half_life: Positive = Field(default=693.0, description="tokens after which half of a write is left, at first")
    chunk_memory: int = Field(default=64, description="tokens between two boundaries of the memory")
    chunk_projections: int = Field(default=64, description="of the projections; one chunk divides the other")
    cap: Weight = Field(default=1.0, description="norm within which the projections stay; 0: no cap")
    guard: Weight = Field(
        default=4.0, description="norm of the memory at boundaries over the root of a head's width; 0: none"
    )
    own_values_gradient: bool = Field(
        default=True, description="the outer gradient passes through a memory's own values"
    )
    checkpoint: bool = Field(default=False, description="each chunk is computed again in the backward")

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The memories that modify themselves, the one that is read left out."""
        return (*self.inner, *(("q",) if self.inner_query else ()))

    @property
    def fault(self) -> str | None:
        """What cannot be meant, if anything."""
        few, many = sorted((self.chunk_memory, self.chunk_projections))
        if few < 1:
            return f"chunk {few} was asked for; a chunk has at least 1 token"
        if many % few:
            return f"chunks {few} and {many}; one divides the other"
        if self.groups == 1 and few != many:
            return f"one group has one chunk, {few} and {many} were asked for; take groups=2"
        if self.begins == "window" and (self.mix == "none" or self.inner_query):
            return 'begins "window" is of a mapped input and a static query; take mix="map", inner_query=false'
        if self.step_max > 2:
            return f"step_max {self.step_max} is beyond 2, where an erase overshoots; lower it"
        for name in ("step_memory", "step_projections") if self.step_form == "sigmoid" else ():
            if getattr(self, name) >= self.step_max:
                return (
                    f"{name} {getattr(self, name)} is not below step_max {self.step_max}, which a sigmoid never reaches"
                )
        if self.cap and self.momentum and self.adaptive:
            return "the cap bounds a write, not the sum that momentum keeps; take cap=0 or no momentum"
        if self.cap and self.adaptive and self.keep_half_life > EVER:
            return (
                f"keep_half_life {self.keep_half_life:g} lets nothing go in float32, and the cap then lets nothing be "
                "written; take cap=0 or a shorter one"
            )
        return None


class TitansOptions(Settings):
    """Of a Titans memory, beside its size."""

    depth: Literal[1, 2] = Field(default=2, description="a matrix, or z + W1 silu(W2 z)")
    hidden: Count | None = Field(default=None, description="depth 2: inner width; absent: a head's")
    read: Read = Field(default="after", description="state after a token, before it, or at its chunk's start")
    gates: Literal["token", "chunk"] = Field(default="token", description="of every token, or a chunk's first for all")
    factor: Literal[1, 2] = Field(default=1, description="half the squared error, or the print's whole")
    momentum: bool = Field(default=True, description="writes have momentum")
    momentum_start: Positive = Field(default=0.5, description="share of the last write that stays, at first")
    step_max: Positive = Field(default=1.0, description="largest size of a write")
    step_start: Positive | None = Field(default=None, description="its size at first; absent: ours, by depth and chunk")
    keep_half_life: Positive = Field(default=693.0, description="tokens after which half of a write is left, at first")
    conv: Count = Field(default=4, description="tokens of the convolutions' window")
    persistent: Annotated[int, Field(ge=0)] = Field(default=0, description="learned vectors before the first token")
    guard: Weight = Field(
        default=4.0, description="norm of the memory at boundaries over the root of a head's width; 0: none"
    )
    reset_every: int | None = Field(default=None, description="tokens until the memory starts again; absent: never")
    global_chunk: int | None = Field(default=None, description="chunk of a second memory; absent: there is one")
    checkpoint: bool = Field(default=False, description="each chunk is computed again in the backward")

    def fault(self, chunk: int) -> str | None:
        """What cannot be meant with that chunk, if anything."""
        if chunk < 1:
            return f"chunk {chunk} was asked for; a chunk has at least 1 token"
        for name, n in (("reset_every", self.reset_every), ("global_chunk", self.global_chunk)):
            if n is not None and (n < 1 or n % chunk):
                return f"{name} {n} is no multiple of the chunk, {chunk}; memories change at its ends"
        first = self.first_step(chunk)
        if first >= self.step_max:
            return f"step_start {first} is not below step_max {self.step_max}, which a sigmoid never reaches"
        if self.step_max * self.factor > 2:
            return (
                f"step_max {self.step_max} times factor {self.factor} is beyond 2, where one write overshoots "
                "further than it was off; lower it"
            )
        return None

    def first_step(self, chunk: int) -> float:
        """`step_start`, or 0.5; of two layers 1/C: its writes add up, and each makes the next gradients larger."""
        ours = 0.5 if self.depth == 1 else 1 / (self.factor * max(16, chunk, self.global_chunk or 0))
        return self.step_start or ours


class ContinuumOptions(Settings):
    """Of MLPs that learn while they read, each level once in its chunk."""

    structure: Literal["sequential", "nested", "independent"] = Field(
        default="sequential", description="a chain; one that starts again where the next slower fires; side by side"
    )
    inner: Literal["task", "associative"] = Field(
        default="task", description="descends the next token's loss through all above, or an error of its own"
    )
    inner_optimizer: InnerOptimizer = Field(default="gd", description="what makes an update of a chunk's gradients")
    link: Link = Field(
        default="residual", description="between levels: with links past each, or the print's bare chain"
    )
    order: Literal["fast_first", "slow_first"] = Field(default="fast_first", description="of the levels in the chain")
    reduce: Literal["sum", "mean"] = Field(default="sum", description="a chunk's gradients: their sum, or mean")
    step: Literal["level", "token"] = Field(
        default="level", description="a learned step of the level, or of every token"
    )
    eta: Weight | None = Field(
        default=None,
        description="whole step of a chunk at first; 0: none learns; absent: 0.001 for the task, else 0.01",
    )
    target: Literal["map", "start"] = Field(
        default="map", description="associative: a map of the input, or the start's answer and a map that is 0 at first"
    )
    meta: Literal["first_order", "full", "reptile", "outer"] = Field(
        default="first_order",
        description="nested: a start moves by the slower step, through the updates too, a share of the way, or never",
    )
    share: Share = Field(default=0.5, description="reptile: that share")
    momentum: Share = Field(default=0.9, description="inner optimizers: share of their memory that stays")
    on: Literal["weights", "delta"] = Field(
        default="weights", description="dgd erases of the weights, or of their change"
    )
    clip: Weight = Field(default=0.1, description="largest update, as a share of the start's norm; 0: not clipped")
    clip_error: Weight = Field(default=1.0, description="task: largest norm of a token's gradient; 0: not clipped")

    @property
    def moved_by(self) -> float:
        """η_0."""
        return ETA[self.inner] if self.eta is None else self.eta

    @property
    def fault(self) -> str | None:
        """What cannot be meant, if anything."""
        if self.meta == "full" and self.inner == "task":
            return "meta full reads a level's chunk again by its own loss, the task's is not; take inner=associative"
        return None


class Memory(Settings):
    """What a layer has in the place of attention."""

    mixer: Mixer = Field(
        default="self", description="self-modifying memory; Titans; or attention, as Hope-Attention has it"
    )
    heads: Count = Field(default=4, description="heads of the memory; attention has the decoder's")
    head: Count | None = Field(default=None, description="self: width of a head; absent: the model's over the heads")
    chunk: int = Field(default=64, description="titans: tokens between two boundaries")
    self: SelfTitansOptions = Field(default=SelfTitansOptions(), description="options of mixer self")
    titans: TitansOptions = Field(default=TitansOptions(), description="options of mixer titans")

    @model_validator(mode="after")
    def fits(self) -> "Memory":
        found = {"self": self.self.fault, "titans": self.titans.fault(self.chunk)}.get(self.mixer)
        if found:
            raise ValueError(f"{self.mixer}: {found}")
        return self

    @property
    def options(self) -> SelfTitansOptions | TitansOptions | None:
        """Those of the mixer; None for attention."""
        return {"self": self.self, "titans": self.titans, "attention": None}[self.mixer]


class Levels(ContinuumOptions):
    """The levels of every layer: their chunks, what they begin as, and their options."""

    chunks: tuple[int, ...] = Field(
        default=(128, 512, 2048), description="tokens of each level between two updates, fastest first"
    )
    place: Place = Field(
        default="depth",
        description="donors: each layer one level, by depth; levels added; or MLPs of several layers in each",
    )
    grow: Grow = Field(default="zero", description="place grow: an added level adds nothing at first, or is a copy")
    map: tuple[int, ...] | None = Field(
        default=None, description="depth: a layer's chunk; chain: a level's donor; by number"
    )
    gated: bool = Field(default=True, description="MLPs of a new model: with a gate, or of two maps")

    @model_validator(mode="after")
    def ascend(self) -> "Levels":
        found = fault_of(self.chunks) or self.fault
        if found:
            raise ValueError(found)
        return self

    @property
    def options(self) -> ContinuumOptions:
        """Those of the levels alone."""
        return ContinuumOptions(**{name: getattr(self, name) for name in ContinuumOptions.model_fields})


class Learning(Settings):
    """What of the reading is learned from, and what of it is learned through."""

    learn: bool = Field(default=True, description="memories and levels learn while they read; false: the control")
    gradient: Gradient | None = Field(
        default=None,
        description="of the outer loss through writes; absent: first_order where levels learn the task, else full",
    )
    horizon: Count | None = Field(
        default=None, description="truncated: chunks after which what was written is constant"
    )
    allow_untrained_level: bool = Field(
        default=False, description="a level may be so slow that no outer gradient reaches its step"
    )

    @model_validator(mode="after")
    def fits(self) -> "Learning":
        if (self.gradient == "truncated") != (self.horizon is not None):
            raise ValueError(f"horizon {self.horizon}: gradient truncated has one, others none")
        return self


def fault_of(chunks: Sequence[int]) -> str | None:
    """What is wrong with the chunks of levels, if anything: each divides the next slower one's."""
    if not chunks or min(chunks) < 1:
        return f"chunks {list(chunks)}; give one a level, each of at least 1 token"
    for fast, slow in pairwise(chunks):
        if slow % fast:
            return f"chunk {fast} does not divide {slow}, the next; chunks ascend, each divides the next"
    return None


def untrained(levels: Levels, tokens: int, learning: Learning) -> str | None:
    """Why a level's step would get no outer gradient where `tokens` of a row stand between two updates, if it would."""
    slow = next((l for l, C in enumerate(levels.chunks) if tokens <= C), None)
    if slow is None or learning.allow_untrained_level or not learning.learn or levels.moved_by == 0:
        return None
    return (
        f"level {slow} has chunk {levels.chunks[slow]}, rows have {tokens} tokens between two updates, so no gradient "
        "reaches its step; read longer rows, take smaller chunks, or set learning.allow_untrained_level = true"
    )
