"""What a recipe may say of a method: options, bounds and defaults; nothing here imports torch.

KaVa arXiv:2510.02312, CODI 2502.21074, PCCoT 2506.18582, Coconut 2412.06769, iCoT 2405.14838.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Norm = Literal["layer", "global", "none"]
Distance = Literal["smooth_l1", "l1", "mse"]


class Settings(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Thinking(Settings):
    """The thoughts: how many, how they are made, and what of them is trained."""

    count: Annotated[int, Field(ge=1, le=4096)] = Field(24, description="M, thoughts before an answer")
    mode: Literal["jacobi", "sequential"] = Field("jacobi", description="all at once by rounds, or one after the other")
    rounds: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None, description="T, Jacobi passes after the placeholder pass; 0: pause tokens; sequential has none"
    )
    project: Literal["pccot", "codi", "none"] = Field("pccot", description="map from a hidden state to the next vector")
    project_width: Annotated[int, Field(ge=1)] | None = Field(
        None, description="inner width of codi's map; D if absent"
    )
    project_dropout: Share = Field(0.0, description="dropout before codi's map")
    project_scale: Literal["unit", "embedding"] = Field(
        "unit", description="weight of the last LayerNorm at the start: 1, or the RMS of the embedding table"
    )
    control: Literal["vectors", "rows"] = Field("vectors", description="bot, slot, eot: vectors, or vocabulary rows")
    control_init: str = Field("mean", description="mean, normal, or copy:TEXT (mean of the rows of TEXT's tokens)")

    @model_validator(mode="after")
    def fits(self) -> "Thinking":
        if self.mode == "sequential" and self.rounds is not None:
            raise ValueError(f"rounds {self.rounds}: sequential thoughts have no rounds; leave the key out")
        if self.mode == "jacobi" and self.rounds is None:
            raise ValueError("rounds: absent; mode jacobi needs a number of rounds, 3 in the papers")
        return self


class Scoring(Settings):
    """How a cross-entropy is averaged; a table of its own for the methods that have no other."""

    ce_reduction: Literal["token", "row"] = Field("token", description="mean over tokens, or over rows of row means")


class Distilling(Scoring):
    """What CODI, PCCoT and KaVa add to the two cross-entropies: hidden states at the distillation token."""

    student: Weight = Field(1.0, description="weight of the student's cross-entropy")
    teacher: Weight = Field(1.0, description="weight of the teacher's cross-entropy")
    alpha1: Weight = Field(1.0, description="weight of the hidden-state loss (CODI's gamma)")
    codi_loss: Distance = Field("smooth_l1", description="distance of hidden states; mse is not halved")
    codi_layers: Literal["all", "blocks", "last"] = Field("blocks", description="0..L, 1..L, or L alone")
    codi_norm: Norm = Field("layer", description="what the distance is divided by: sigma of each layer, of all, or 1")
    codi_norm_power: Literal[1, 2] = Field(1, description="power of sigma")
    codi_target: Literal["same_pass", "second_pass"] = Field(
        "same_pass", description="teacher's states from the pass that is trained, or from another without gradient"
    )
    share_question: bool = Field(True, description="teacher and student read the question once and share its cache")


class Keeping(Settings):
    """Which of the chain's tokens are kept: R-KV in the form of KaVa, and its controls."""

    select: Literal["rkv", "cosine", "attention", "crop", "uniform", "random", "boundary"] = Field(
        "rkv", description="score by which tokens are kept; all but rkv are controls"
    )
    lam: Share = Field(0.1, description="weight of importance against redundancy")
    answer_rows: Literal["answer", "number", "predict"] = Field(
        "answer", description="answer tokens whose attention counts: all; number and eos; those that predict the number"
    )
    importance_norm: Literal["chain", "renormalised", "full"] = Field(
        "chain",
        description="softmax over the chain; over all keys, then divided by its sum on the chain; over all keys",
    )
    group_pool: Literal["max", "mean"] = Field("max", description="query heads of a group, pooled")
    redundancy_divisor: Literal["count", "others"] = Field("count", description="N_C, or N_C - 1")
    kept_order: Literal["time", "score"] = Field("time", description="slots in order of the chain, or of score")
    random_shared: bool = Field(True, description="random: one draw for all layers and heads of a row")


class Matching(Settings):
    """KaVa's loss on keys and values."""

    alpha2: Weight = Field(1.0, description="weight of the loss on keys and values")
    kv_loss: Distance = Field("smooth_l1", description="distance; mse is not halved")
    kv_reduction: Literal["mean", "row_mean", "paper_sum"] = Field(
        "mean", description="over all that is taught; row by row; the sum as it is printed, L G E times larger"
    )
    kv_norm: Literal["layer", "global", "own", "none"] = Field(
        "none", description="what the loss is divided by: sigma of each layer, of all, each side by its own, or 1"
    )
    kv_norm_power: Literal[1, 2] = Field(1, description="power of sigma")
    kv_terms: Literal["both", "k", "v"] = Field("both", description="keys and values, or one of them")
    kv_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, description="layers matched; absent: all")
    kv_rounds: Literal["last", "all"] = Field("last", description="match the last round, or every round (ours)")
    key_space: Literal["post_rope", "pre_rope"] = Field(
        "post_rope", description="keys as a cache holds them, or before rotation"
    )
    short_chain: Literal["mask", "zero", "repeat"] = Field("mask", description="slots beyond a chain shorter than M")


class Removing(Scoring):
    """iCoT: how fast the chain is taken away."""

    remove_per_epoch: Annotated[float, Field(gt=0)] = Field(8.0, description="tokens removed more in an epoch")
    remove_all_from: Annotated[int, Field(ge=0)] | None = Field(
        None, description="removed tokens after which all go, 39 for GSM8K; absent: never"
    )
    smoothing: Annotated[float, Field(gt=0)] = Field(4.0, description="P(o) of the extra tokens is e^(-this o)")


class Staging(Scoring):
    """Coconut: how steps of the chain give way to latents."""

    per_step: Annotated[int, Field(ge=1)] = Field(2, description="c, latents for a step")
    epochs_per_stage: Annotated[int, Field(ge=1)] = Field(3, description="epochs until the stage grows by one")
    max_stage: Annotated[int, Field(ge=0)] = Field(3, description="the stage from which on all steps are latent")
    first_stage: Annotated[int, Field(ge=0)] = Field(0, description="stage of epoch 0")
    pad_latent_to_max: bool = Field(True, description="as many latents for a chain of fewer steps")
    uniform_prob: Share = Field(0.0, description="chance of a uniform draw in place of the stage")
