"""What a recipe may say of a method: options, bounds and defaults; nothing here imports torch.

KaVa arXiv:2510.02312, CODI 2502.21074, PCCoT 2506.18582, Coconut 2412.06769, iCoT 2405.14838; AutoCompressors
2305.14788, their variable-length variant, PonderNet 2107.05407.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
NumVectors = Annotated[int, Field(ge=1, le=4096)]
ScaleKind = Literal["layer", "global", "none"]
Distance = Literal["smooth_l1", "l1", "mse"]


class ConfigModel(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class LatentConfig(ConfigModel):
    """The thoughts: how many, how they are made, and what of them is trained."""

    num_latents: Annotated[int, Field(ge=1, le=4096)] = Field(24, description="M, thoughts before an answer")
    schedule: Literal["jacobi", "sequential"] = Field(
        "jacobi", description="all at once by rounds, or one after the other"
    )
    jacobi_iterations: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None, description="T, Jacobi passes after the placeholder pass; 0: pause tokens; sequential has none"
    )
    projection: Literal["pccot", "codi", "none"] = Field(
        "pccot", description="map from a hidden state to the next vector"
    )
    projection_width: Annotated[int, Field(ge=1)] | None = Field(
        None, description="inner width of codi's map; D if absent"
    )
    projection_dropout: Fraction = Field(0.0, description="dropout before codi's map")
    projection_init_scale: Literal["unit", "embedding"] = Field(
        "unit", description="weight of the last LayerNorm at the start: 1, or the RMS of the embedding table"
    )
    control_tokens: Literal["vectors", "vocabulary"] = Field(
        "vectors", description="bot, slot, eot: vectors, or vocabulary rows"
    )
    control_init: str = Field("mean", description="mean, normal, or copy:TEXT (mean of the rows of TEXT's tokens)")

    @model_validator(mode="after")
    def check_iterations(self) -> "LatentConfig":
        if self.schedule == "sequential" and self.jacobi_iterations is not None:
            raise ValueError(f"rounds {self.jacobi_iterations}: sequential thoughts have no rounds; leave the key out")
        if self.schedule == "jacobi" and self.jacobi_iterations is None:
            raise ValueError("rounds: absent; mode jacobi needs a number of rounds, 3 in the papers")
        return self


class LossConfig(ConfigModel):
    """How a cross-entropy is averaged; a table of its own for the methods that have no other."""

    ce_reduction: Literal["token", "row"] = Field("token", description="mean over tokens, or over rows of row means")


class DistillationConfig(LossConfig):
    """What CODI, PCCoT and KaVa add to the two cross-entropies: hidden states at the distillation token."""

    student_ce_weight: NonNegative = Field(1.0, description="weight of the student's cross-entropy")
    teacher_ce_weight: NonNegative = Field(1.0, description="weight of the teacher's cross-entropy")
    hidden_weight: NonNegative = Field(1.0, description="weight of the hidden-state loss (CODI's gamma)")
    hidden_loss: Distance = Field("smooth_l1", description="distance of hidden states; mse is not halved")
    hidden_layers: Literal["all", "blocks", "last"] = Field("blocks", description="0..L, 1..L, or L alone")
    hidden_scale: ScaleKind = Field(
        "layer", description="what the distance is divided by: sigma of each layer, of all, or 1"
    )
    hidden_scale_power: Literal[1, 2] = Field(1, description="power of sigma")
    teacher_pass: Literal["same_pass", "second_pass"] = Field(
        "same_pass", description="teacher's states from the pass that is trained, or from another without gradient"
    )
    share_question_cache: bool = Field(
        True, description="teacher and student read the question once and share its cache"
    )


class KVSelectionConfig(ConfigModel):
    """Which of the chain's tokens are kept: R-KV in the form of KaVa, and its controls."""

    policy: Literal["rkv", "cosine", "attention", "crop", "uniform", "random", "boundary"] = Field(
        "rkv", description="score by which tokens are kept; all but rkv are controls"
    )
    importance_weight: Fraction = Field(0.1, description="weight of importance against redundancy")
    importance_queries: Literal["answer", "number", "predict"] = Field(
        "answer", description="answer tokens whose attention counts: all; number and eos; those that predict the number"
    )
    importance_norm: Literal["chain", "renormalised", "full"] = Field(
        "chain",
        description="softmax over the chain; over all keys, then divided by its sum on the chain; over all keys",
    )
    head_pooling: Literal["max", "mean"] = Field("max", description="query heads of a group, pooled")
    redundancy_divisor: Literal["count", "others"] = Field("count", description="N_C, or N_C - 1")
    slot_order: Literal["position", "score"] = Field("position", description="slots in order of the chain, or of score")
    share_random_draw: bool = Field(True, description="random: one draw for all layers and heads of a row")


class KVDistillationConfig(ConfigModel):
    """KaVa's loss on keys and values."""

    weight: NonNegative = Field(1.0, description="weight of the loss on keys and values")
    distance: Distance = Field("smooth_l1", description="distance; mse is not halved")
    reduction: Literal["mean", "row_mean", "paper_sum"] = Field(
        "mean", description="over all that is taught; row by row; the sum as it is printed, L G E times larger"
    )
    scale: Literal["layer", "global", "each_side", "none"] = Field(
        "none", description="what the loss is divided by: sigma of each layer, of all, each side by its own, or 1"
    )
    scale_power: Literal[1, 2] = Field(1, description="power of sigma")
    terms: Literal["both", "k", "v"] = Field("both", description="keys and values, or one of them")
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, description="layers matched; absent: all")
    iterations: Literal["last", "all"] = Field("last", description="match the last round, or every round (ours)")
    key_space: Literal["post_rope", "pre_rope"] = Field(
        "post_rope", description="keys as a cache holds them, or before rotation"
    )
    short_chain_targets: Literal["mask", "zero", "repeat"] = Field(
        "mask", description="slots beyond a chain shorter than M"
    )


class ICoTConfig(LossConfig):
    """iCoT: how fast the chain is taken away."""

    tokens_removed_per_epoch: Annotated[float, Field(gt=0)] = Field(8.0, description="tokens removed more in an epoch")
    remove_all_after: Annotated[int, Field(ge=0)] | None = Field(
        None, description="removed tokens after which all go, 39 for GSM8K; absent: never"
    )
    removal_smoothing: Annotated[float, Field(gt=0)] = Field(4.0, description="P(o) of the extra tokens is e^(-this o)")


class CoconutConfig(LossConfig):
    """Coconut: how steps of the chain give way to latents."""

    latents_per_step: Annotated[int, Field(ge=1)] = Field(2, description="c, latents for a step")
    epochs_per_stage: Annotated[int, Field(ge=1)] = Field(3, description="epochs until the stage grows by one")
    max_stage: Annotated[int, Field(ge=0)] = Field(3, description="the stage from which on all steps are latent")
    first_stage: Annotated[int, Field(ge=0)] = Field(0, description="stage of epoch 0")
    pad_latent_to_max: bool = Field(True, description="as many latents for a chain of fewer steps")
    uniform_stage_prob: Fraction = Field(0.0, description="chance of a uniform draw in place of the stage")


class CompressionConfig(ConfigModel):
    """How a document becomes summary vectors, segment by segment: one cell of the grid of generator, length, memory."""

    summary: Literal["parallel", "autoregressive", "pool", "select"] = Field(
        "parallel",
        description="learned tokens after the text; hidden states fed back; means over equal spans; the best tokens",
    )
    length_policy: Literal["fixed", "nested_dropout", "stop_head", "classifier"] = Field(
        "fixed", description="kappa; drawn in training, any at inference; learned stop; a classifier over allowed"
    )
    memory_policy: Literal["accumulate", "replace", "budgeted", "fifo"] = Field(
        "accumulate", description="what of the older memory stays when a segment has been compressed"
    )
    max_vectors: NumVectors = Field(50, description="K, vectors of a segment at most")
    num_vectors: NumVectors | None = Field(None, description="vectors of a segment where length is fixed; absent: cap")
    allowed_lengths: tuple[NumVectors, ...] | None = Field(None, description="lengths that occur; absent: 1 to cap")
    max_memory_vectors: NumVectors | None = Field(None, description="budgeted, fifo: live vectors of a memory at most")
    reread_memory: bool = Field(True, description="whether the older memory stands in the prompt of a compression")
    summary_map: Literal["none", "scale", "mlp"] | None = Field(
        None, description="map from state to vector (VL1); absent: scale for generator self, else none"
    )
    step_embedding: bool = Field(True, description="self: a learned vector tells the steps of the loop apart")
    summary_init: Literal["eos", "normal"] = Field(
        "eos", description="summary tokens at the start: the row of eos with noise, or noise alone"
    )
    summary_positions: Literal["contiguous", "reserved", "zero"] | None = Field(
        None, description="where memory and summaries stand; absent: contiguous under RoPE, zero with a table"
    )
    bos: Literal["none", "first", "sink"] | None = Field(
        None, description="the tokenizer's first token; absent: sink where the tokenizer adds one, else none"
    )
    trigger_placement: Literal["insert", "replace"] = Field(
        "insert", description="self: the trigger stands after the text, or in place of its last token"
    )
    adapter_scope: Literal["both", "write"] = Field("both", description="lora: the adapter also reads, or only writes")
    loss_reduction: Literal["token", "window"] = Field(
        "token", description="loss: nats over all scored tokens of the step, or the sum of the windows' means"
    )
    checkpoint_segments: bool = Field(False, description="text pass and loop of a segment are computed again backward")
    carry_between_windows: Literal["hard", "soft"] | None = Field(
        None, description="memory at a window's edge; absent: hard if lengths were, else soft"
    )

    @model_validator(mode="after")
    def check_combination(self) -> "CompressionConfig":
        if self.summary == "pool" and self.length_policy == "stop_head":
            raise ValueError(
                'length "stop" with generator "pool": a prefix of its spans is a prefix of the text; take ratio'
            )
        if self.summary == "select" and self.length_policy in ("nested_dropout", "stop_head"):
            raise ValueError(f'length "{self.length_policy}" with generator "select": it has fixed and ratio')
        if (self.max_memory_vectors is None) == (self.memory_policy in ("budgeted", "fifo")):
            raise ValueError(
                f'budget {self.max_memory_vectors} with memory "{self.memory_policy}": budgeted and fifo need one, others none'
            )
        if not self.reread_memory and self.memory_policy in ("replace", "budgeted"):
            raise ValueError(
                f'recurrent false with memory "{self.memory_policy}": the older memory would be lost unread'
            )
        if self.trigger_placement == "replace" and self.summary != "autoregressive":
            raise ValueError(f'trigger "replace" with generator "{self.summary}": it is self\'s')
        outside = [n for n in self.possible_lengths if n > self.max_vectors]
        if outside or list(self.possible_lengths) != sorted(set(self.possible_lengths)):
            raise ValueError(
                f"allowed {list(self.possible_lengths)}: ascending lengths from 1 to cap {self.max_vectors}"
            )
        if self.num_vectors is not None and self.length_policy != "fixed":
            raise ValueError(
                f'kappa {self.num_vectors} with length "{self.length_policy}": it is the fixed length; leave it out'
            )
        if self.fixed_length not in self.possible_lengths:
            raise ValueError(f"kappa {self.fixed_length}: none of the lengths {list(self.possible_lengths)} allowed")
        return self

    @property
    def possible_lengths(self) -> tuple[int, ...]:
        """The lengths that occur, ascending."""
        return self.allowed_lengths or tuple(range(1, self.max_vectors + 1))

    @property
    def fixed_length(self) -> int:
        """kappa: the one length of fixed; the largest of the others."""
        return self.num_vectors or self.possible_lengths[-1]

    @property
    def resolved_summary_map(self) -> Literal["none", "scale", "mlp"]:
        """The adapter, or the generator's own."""
        return self.summary_map or ("scale" if self.summary == "autoregressive" else "none")


class StopHeadConfig(ConfigModel):
    """How the number of vectors of a segment is learned, and when a compression stops."""

    estimator: Literal["ponder", "reinforce", "soft", "straight_through"] = Field(
        "ponder", description="the stop head's gradient: every length read; two draws; mean field; straight through"
    )
    stop_rule: Literal["quantile", "threshold", "sample"] = Field("quantile", description="how a hard length is found")
    stop_quantile: OpenFraction = Field(0.5, description="quantile: stop where so much of the probability lies behind")
    stop_threshold: OpenFraction = Field(0.5, description="threshold: stop at the first stop probability this large")
    length_cost: NonNegative = Field(0.0, description="beta, nats a vector costs; lambda where penalty is ratio")
    cost_kind: Literal["per_vector", "ratio"] = Field(
        "per_vector", description="price of a vector, or of the share kept"
    )
    ratio_memory_weight: NonNegative = Field(
        0.0, description="ratio: weight of the old memory in what the vectors are compared with"
    )
    cost_on: Literal["read", "all"] = Field("read", description="compressions read in their window, or all of them")
    cost_start: Fraction = Field(0.5, description="share of the steps before the price begins (ponder after: at once)")
    cost_ramp: Fraction = Field(0.25, description="share of the steps in which it rises")
    head_only_after: Fraction = Field(
        0.8, description="ponder: share of the steps on drawn lengths before the head learns alone"
    )
    joint_training: bool = Field(False, description="ponder, sample: head and decoder together")
    exploration: Fraction = Field(0.3, description="joint: share of lengths drawn uniformly")
    hard_window_fraction: Fraction = Field(0.3, description="soft: share of windows that read a drawn length hard")
    reinforce_baseline: Literal["draws", "rows"] = Field(
        "draws", description="sample: against a second draw, or other rows"
    )
    head_gradient: Literal["cut", "flow"] | None = Field(
        None, description="whether the head's gradient ends at its state; absent: cut for ponder and sample"
    )
    head_lr_multiplier: Annotated[float, Field(gt=0)] = Field(
        3.0, description="own head, classifier: its rate over that of all else; a row of the vocabulary has none"
    )
    initial_mean_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(0.9, description="E[N] / K at the start")
    stop_position: Literal["after", "before", "mixture"] = Field(
        "after", description="stop after writing, before it, or the original's mixture"
    )
    soft_gate: Literal["attention_bias", "scale_vectors", "none"] = Field(
        "attention_bias", description="soft: log survival on the logits, vectors scaled (for comparison), or nothing"
    )
    head: Literal["linear", "vocabulary"] = Field("linear", description="own head, or a word's share of the vocabulary")
    control_tokens: Literal["vectors", "vocabulary"] = Field(
        "vectors", description="trigger and stop: vectors, or vocabulary rows"
    )
    control_tokens_in_softmax: bool = Field(False, description="rows: scored beside the words in training")
    prior_kl_weight: NonNegative = Field(0.0, description="weight of KL(P, geometric)")
    prior_stop_prob: OpenFraction = Field(0.25, description="the geometric's stop probability")
    prior_tail: Literal["truncated", "forced"] = Field("truncated", description="where the geometric's tail goes")
    entropy_weight: NonNegative = Field(0.0, description="weight of what the entropy of lengths is below the floor")
    entropy_floor: NonNegative = Field(0.0, description="nats of that floor")
    target_mean_length: Annotated[float, Field(gt=0)] | None = Field(
        None, description="mean length that the price is steered to"
    )
    cost_step_size: NonNegative = Field(0.01, description="target: change of the price a vector and step")
    max_length_cost: NonNegative = Field(10.0, description="target: largest price")

    @model_validator(mode="after")
    def check_combination(self) -> "StopHeadConfig":
        if self.head == "vocabulary" and self.control_tokens != "vocabulary":
            raise ValueError(
                'stop_head "vocabulary" with control "vectors": it is a row of the vocabulary; control = "rows"'
            )
        if self.control_tokens_in_softmax and self.control_tokens != "vocabulary":
            raise ValueError('control_in_softmax with control "vectors": there are no rows to score; control = "rows"')
        if self.soft_gate != "attention_bias" and self.estimator != "soft":
            raise ValueError(
                f'gate "{self.soft_gate}" with estimator "{self.estimator}": soft reading alone has a gate'
            )
        if self.stop_position == "mixture" and self.estimator != "soft":
            raise ValueError(f'index "split" with estimator "{self.estimator}": the original\'s, of soft alone')
        return self

    @property
    def detaches_head_input(self) -> bool:
        """Whether the stop head's gradient ends at the state it reads."""
        return (self.head_gradient or ("cut" if self.estimator in ("ponder", "reinforce") else "flow")) == "cut"
