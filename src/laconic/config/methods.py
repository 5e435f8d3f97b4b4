"""Recipe tables of the latent reasoning and compression methods. Nothing here imports torch.

KaVa arXiv:2510.02312, CODI 2502.21074, PCCoT 2506.18582, Coconut 2412.06769, iCoT 2405.14838; AutoCompressors
2305.14788, their variable-length variant, PonderNet 2107.05407.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from laconic.config.config_model import ConfigModel, Fraction, NonNegative, OpenFraction, PositiveFloat, PositiveInt

NumVectors = Annotated[int, Field(ge=1, le=4096)]
ScaleKind = Literal["layer", "global", "none"]
Distance = Literal["smooth_l1", "l1", "mse"]


class LatentConfig(ConfigModel):
    """[latents]: the number of latent thoughts, how they are computed, and the projection between them."""

    num_latents: Annotated[int, Field(ge=1, le=4096)] = 24
    """M, latent thoughts before an answer"""
    schedule: Literal["jacobi", "sequential"] = "jacobi"
    """compute all latents together in Jacobi iterations, or one after the other"""
    jacobi_iterations: Annotated[int, Field(ge=0, le=4096)] | None = None
    """T, iterations after the pass over the placeholders; 0 gives pause tokens; unset if sequential"""
    projection: Literal["pccot", "codi", "none"] = "pccot"
    """map from a hidden state to the next latent's input embedding"""
    projection_width: PositiveInt | None = None
    """inner width of the codi projection; default: D"""
    projection_dropout: Fraction = 0.0
    """dropout before the codi projection"""
    projection_init_scale: Literal["unit", "embedding"] = "unit"
    """initial weight of the last LayerNorm: 1, or the RMS of the token embeddings"""
    control_init: str = "mean"
    """initial begin, placeholder and end vectors: mean, normal, or copy:TEXT (mean of its tokens)"""
    length_policy: Literal["fixed", "nested_dropout", "stop_head"] = "fixed"
    """number of latents read: all; the first N, with random N in training; or an N that is then learned for each
    question (pccot, kava)"""
    length_cost: NonNegative = 0.0
    """stop_head: beta, nats per latent"""
    head_only_after: Fraction = 0.8
    """stop_head: fraction of training with random lengths, before only the head is trained"""
    head_lr_multiplier: PositiveFloat = 3.0
    """stop_head: learning rate of the head, relative to everything else"""

    @model_validator(mode="after")
    def check_iterations(self) -> "LatentConfig":
        if self.schedule == "sequential" and self.jacobi_iterations is not None:
            raise ValueError(f"jacobi_iterations {self.jacobi_iterations}: schedule sequential has none; remove it")
        if self.length_policy != "fixed" and not self.jacobi_iterations:
            raise ValueError(f'length_policy "{self.length_policy}": needs Jacobi iterations; use "fixed"')
        return self


class DistillationConfig(ConfigModel):
    """[distillation]: cross-entropies of student and teacher, and the distillation of hidden states (CODI)."""

    student_ce_weight: NonNegative = 1.0
    """weight of the student's cross-entropy"""
    teacher_ce_weight: NonNegative = 1.0
    """weight of the teacher's cross-entropy"""
    hidden_weight: NonNegative = 1.0
    """weight of the hidden-state loss (CODI's gamma, KaVa's alpha1)"""
    hidden_loss: Distance = "smooth_l1"
    """distance between hidden states; mse is not halved"""
    hidden_layers: Literal["all", "blocks", "last"] = "blocks"
    """distilled layers: embeddings and blocks (0..L), blocks (1..L), or the last"""
    hidden_scale: ScaleKind = "layer"
    """divisor of the distance: standard deviation per layer, over all layers, or 1"""
    teacher_pass: Literal["same_pass", "second_pass"] = "same_pass"
    """teacher states from the trained pass, or from a second pass without gradient"""


class KVSelectionConfig(ConfigModel):
    """[kv_selection]: which chain tokens' keys and values KaVa distils (R-KV and its controls)."""

    policy: Literal["rkv", "results", "cosine", "attention", "crop", "uniform", "random"] = "rkv"
    """score that ranks the chain tokens; results: the last number of each step; the rest are controls"""
    importance_weight: Fraction = 0.1
    """lambda, weight of importance against redundancy"""


class KVDistillationConfig(ConfigModel):
    """[kv_distillation]: KaVa's loss between the student's latent keys and values and the teacher's selected ones."""

    weight: NonNegative = 1.0
    """alpha2, weight of the loss on keys and values"""
    distance: Distance = "smooth_l1"
    """distance between keys or values; mse is not halved"""
    scale: ScaleKind = "none"
    """divisor of the loss: standard deviation per layer, over all, or 1"""
    scale_power: Literal[1, 2] = 1
    """power of that standard deviation"""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """distilled layers; default: all"""
    key_space: Literal["post_rope", "pre_rope"] = "post_rope"
    """keys after rotation, as a cache stores them, or before"""
    short_chain_targets: Literal["mask", "zero"] = "mask"
    """targets of the slots beyond a chain shorter than M: none, or zeros"""


class IcotConfig(ConfigModel):
    """[icot]: iCoT's schedule for removing chain tokens."""

    tokens_removed_per_epoch: PositiveFloat = 8.0
    """further chain tokens removed in each epoch"""
    remove_all_after: Annotated[int, Field(ge=0)] | None = None
    """removed tokens from which on the whole chain is removed (39 for GSM8K); unset: never"""
    removal_smoothing: PositiveFloat = 4.0
    """lambda of P(o) ~ exp(-lambda o), o extra removed tokens"""


class CoconutConfig(ConfigModel):
    """[coconut]: Coconut's curriculum, which replaces chain steps by latents."""

    latents_per_step: PositiveInt = 2
    """c, latents that replace one step"""
    epochs_per_stage: PositiveInt = 3
    """epochs of each stage"""
    max_stage: Annotated[int, Field(ge=0)] = 3
    """stage from which on every step is latent"""
    first_stage: Annotated[int, Field(ge=0)] = 0
    """stage of epoch 0"""
    pad_latent_to_max: bool = True
    """use the full number of latents for a chain of fewer steps"""
    uniform_stage_prob: Fraction = 0.0
    """probability of a uniformly drawn stage"""


class CompressionConfig(ConfigModel):
    """[compression]: how a document becomes summary vectors, segment by segment (AutoCompressor and variants)."""

    summary: Literal["parallel", "autoregressive", "pool", "select"] = "parallel"
    """summary tokens after the text; hidden states fed back; means over equal spans; the best tokens"""
    length_policy: Literal["fixed", "nested_dropout", "stop_head", "classifier"] = "fixed"
    """num_vectors of each segment; random prefixes in training and any length at inference; a learned stop; a
    classifier over allowed_lengths"""
    memory_policy: Literal["accumulate", "replace", "budgeted", "fifo"] = "accumulate"
    """what happens to the older memory when a segment has been compressed"""
    max_vectors: NumVectors = 50
    """K, maximum vectors of a segment"""
    num_vectors: NumVectors | None = None
    """kappa, vectors of a segment if fixed; default: max_vectors"""
    allowed_lengths: tuple[NumVectors, ...] | None = Field(default=None, min_length=1)
    """possible numbers of vectors; default: 1 to max_vectors"""
    max_memory_vectors: NumVectors | None = None
    """maximum memory size for budgeted and fifo"""
    summary_map: Literal["none", "scale"] | None = None
    """map from hidden state to vector (Eq. VL1); default: scale if autoregressive, else none"""
    step_embedding: bool = True
    """autoregressive: add a learned embedding of the step"""
    summary_init: Literal["eos", "normal", "last_tokens"] | None = None
    """initial summary tokens: the eos embedding with noise; noise; the segment's last tokens, which are then also the
    untrained vectors (Eq. VL29); default: last_tokens for parallel summaries of checkpoints, else eos"""
    summary_positions: Literal["contiguous", "zero"] | None = None
    """position ids of memory and summaries; default: contiguous with RoPE, zero with a position table"""
    bos: Literal["none", "sink"] | None = None
    """use of the bos token; default: sink if the tokenizer adds one, else none"""
    trigger_placement: Literal["insert", "replace"] = "insert"
    """autoregressive: put the trigger after the text, or in place of its last token"""
    adapter_scope: Literal["both", "write"] = "both"
    """LoRA is active while reading and writing memory, or only while writing"""
    distillation_weight: NonNegative = 0.0
    """weight of the KL divergence from the base model that reads the window's text (Eq. VL30)"""
    distillation_temperature: PositiveFloat = 1.0
    """temperature of both distributions of that KL divergence"""
    checkpoint_segments: bool = False
    """recompute each segment in the backward pass to save memory"""
    carry_between_windows: Literal["soft"] | None = None
    """needs estimator "soft", and changes nothing there; kept for earlier runs, whose recipes have it"""

    @model_validator(mode="after")
    def check_combination(self) -> "CompressionConfig":
        if self.summary == "pool" and self.length_policy == "stop_head":
            raise ValueError('length_policy "stop_head": not for summary "pool"; use "classifier"')
        if self.summary == "select" and self.length_policy in ("nested_dropout", "stop_head"):
            raise ValueError(f'length_policy "{self.length_policy}" with summary "select": use "fixed" or "classifier"')
        if (self.max_memory_vectors is None) == (self.memory_policy in ("budgeted", "fifo")):
            raise ValueError("max_memory_vectors: set it for memory_policy budgeted and fifo, and only for them")
        if self.trigger_placement == "replace" and self.summary != "autoregressive":
            raise ValueError(f'trigger_placement "replace" with summary "{self.summary}": only autoregressive has one')
        if self.summary_init == "last_tokens" and not self.can_copy_last_tokens:
            raise ValueError('summary_init "last_tokens": needs parallel summaries of text, without a map')
        lengths = self.possible_lengths
        if list(lengths) != sorted(set(lengths)) or lengths[-1] > self.max_vectors:
            raise ValueError(f"allowed_lengths {list(lengths)}: must ascend to at most max_vectors {self.max_vectors}")
        if self.num_vectors is not None and self.length_policy != "fixed":
            raise ValueError(f'num_vectors {self.num_vectors}: only length_policy "fixed" uses it; remove the key')
        if self.fixed_length not in self.possible_lengths:
            raise ValueError(f"num_vectors {self.fixed_length}: not one of allowed_lengths {list(lengths)}")
        return self

    def check_for_reasoning(self) -> None:
        """Raise ValueError for options that questions about a document do not support."""
        supported: dict[str, tuple[object, ...]] = {
            "summary": ("parallel", "autoregressive", "pool"),
            "length_policy": ("fixed",),
            "memory_policy": ("accumulate",),
            "summary_positions": (None, "contiguous"),
            "adapter_scope": ("both",),
            "distillation_weight": (0.0,),
        }
        for key, values in supported.items():
            if getattr(self, key) not in values:
                expected = next(value for value in values if value is not None)
                raise ValueError(f"compression.{key} {getattr(self, key)!r}: answers about documents need {expected!r}")

    @property
    def can_copy_last_tokens(self) -> bool:
        """Whether summary tokens can begin as the last tokens; a budgeted memory is recompressed without text."""
        return self.summary == "parallel" and self.summary_map is None and self.memory_policy != "budgeted"

    @property
    def possible_lengths(self) -> tuple[int, ...]:
        """The numbers of vectors that a segment can become, ascending."""
        return self.allowed_lengths or tuple(range(1, self.max_vectors + 1))

    @property
    def fixed_length(self) -> int:
        """kappa: the number of vectors if the length is fixed, else the largest possible length."""
        return self.num_vectors or self.possible_lengths[-1]


class StopHeadConfig(ConfigModel):
    """[stop_head]: how the number of summary vectors of a segment is learned and decided."""

    estimator: Literal["ponder", "soft"] = "ponder"
    """gradient of the stop head: expectation over every length, or mean field"""
    stop_rule: Literal["quantile", "threshold", "sample"] = "quantile"
    """rule that decides a length"""
    stop_quantile: OpenFraction = 0.5
    """quantile rule: stop at this quantile of the stop distribution"""
    stop_threshold: OpenFraction = 0.5
    """threshold rule: stop at the first stop probability this large"""
    length_cost: NonNegative = 0.0
    """beta, nats per vector; lambda if cost_kind is ratio"""
    cost_kind: Literal["per_vector", "ratio"] = "per_vector"
    """cost of each vector, or of the ratio of vectors to text"""
    ratio_memory_weight: NonNegative = 0.0
    """ratio cost: weight of the older memory in the denominator"""
    cost_on: Literal["read", "all"] = "read"
    """charge the compressions that are read within their window, or all"""
    cost_start: Fraction = 0.5
    """soft: fraction of training before the cost begins; the others charge all of it from head_only_after on"""
    cost_ramp: Fraction = 0.25
    """soft: fraction of training over which the cost rises"""
    head_only_after: Fraction = 0.8
    """ponder: fraction of training with random lengths; after it only the head is trained"""
    hard_window_fraction: Fraction = 0.3
    """soft: fraction of windows read hard, with a sampled length instead of gates"""
    head_lr_multiplier: PositiveFloat = 3.0
    """learning rate of the linear head or classifier, relative to everything else"""
    initial_mean_fraction: OpenFraction = 0.9
    """E[N] / K at initialisation"""
    stop_position: Literal["after", "before", "mixture"] = "after"
    """stop after writing a vector, before it, or (mixture) as in the published formulas, which mix both"""
    soft_gate: Literal["attention_bias", "scale_vectors", "none"] = "attention_bias"
    """soft: add the log survival to the attention logits, scale the vectors, or neither"""
    head: Literal["linear", "vocabulary"] = "linear"
    """stop logit from a linear head, or from a token of the vocabulary"""
    control_tokens: Literal["vectors", "vocabulary"] = "vectors"
    """trigger and stop as free vectors, or as rows of the vocabulary"""
    control_tokens_in_softmax: bool = False
    """vocabulary: include the control tokens in the softmax"""

    @model_validator(mode="after")
    def check_combination(self) -> "StopHeadConfig":
        if self.control_tokens != "vocabulary":
            if self.head == "vocabulary":
                raise ValueError('head "vocabulary" needs control_tokens = "vocabulary"')
            if self.control_tokens_in_softmax:
                raise ValueError('control_tokens_in_softmax needs control_tokens = "vocabulary"')
        if self.estimator != "soft":
            if self.soft_gate != "attention_bias":
                raise ValueError(f'soft_gate "{self.soft_gate}" needs estimator "soft", not "{self.estimator}"')
            if self.stop_position == "mixture":
                raise ValueError(f'stop_position "mixture" needs estimator "soft", not "{self.estimator}"')
        return self
