"""The whole recipe of a run as one tree of tables, and its rules across tables. Nothing here imports torch."""

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from laconic.config.config_model import ConfigModel, Fraction, PathText, PositiveInt
from laconic.config.data import DataConfig
from laconic.config.methods import (
    CoconutConfig,
    CompressionConfig,
    DistillationConfig,
    IcotConfig,
    KVDistillationConfig,
    KVSelectionConfig,
    LatentConfig,
    StopHeadConfig,
)
from laconic.config.nested import CMSConfig, InnerLoopConfig, MixerConfig
from laconic.config.training import TrainingConfig

# The tables that each method uses. Other tables may be present, so that a run can change only its method.
METHOD_TABLES: Mapping[str, tuple[str, ...]] = {
    "cot": (),
    "nocot": (),
    "icot": ("icot",),
    "coconut": ("latents", "coconut"),
    "codi": ("latents", "distillation"),
    "pccot": ("latents", "distillation"),
    "kava": ("latents", "distillation", "kv_selection", "kv_distillation"),
    "autocompressor": ("compression", "stop_head"),
    "lm": (),
    "hope": ("mixer", "cms", "inner_loop"),
}
CUSTOM_METHOD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:Class
NEW_DECODER_KEYS = (  # keys of [model] that describe a new decoder; a pretrained one has its own values
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "init", "init_seed", "embedding_init_std", "head_init_std",
)  # fmt: skip
DOCUMENT_METHODS = ("autocompressor", "lm", "hope")
DOCUMENT_SOURCES = ("text", "recall", "mqar", "copying", "continual_translation", "formal_languages")
SEGMENTED_SOURCES = ("text", "recall")  # sources whose documents are cut into segments
# Names of tokenizers; write ./digits for a folder.
BUILT_IN_TOKENIZERS = ("digits", "recall", "bytes", "mqar", "formal_languages", "digit_documents")
COT_TEACHER_METHODS = ("codi", "pccot", "kava")  # these learn to write the chain too
DOCUMENT_REASONING_METHODS = ("cot", "nocot", "codi", "pccot", "kava")  # with [compression], over a row's document
METHOD_SCHEDULES = {"codi": "sequential", "coconut": "sequential", "pccot": "jacobi"}  # the only one that a method has
FULL_CHAIN_METHODS = ("cot", "icot", "coconut")  # these learn to write the chain, so data.chain_steps defaults to all
# Keys with paths. A "name" is a path only if that folder exists, "rows" if the file exists or has a data file's suffix.
PATH_KEYS: Mapping[str, Literal["path", "name", "rows"]] = {
    "model.name": "name",
    "model.init_from_run": "path",
    "model.tokenizer": "name",
    "data.path": "path",
    "data.name": "rows",
    "data.valid": "rows",
    "data.test": "rows",
    "data.data_dir": "path",
}
# Keys that do not change what is learned in an update, so a run can be resumed with other values. The rows of data.path
# must stay the same; they are compared by hash.
BOOKKEEPING_KEYS = (
    "paper_table", "table_row", "deviations", "data.path", "data.data_dir", "train.steps", "train.epochs",
    "train.parallel", "train.reshard", "train.keep_best", "train.keep_every", "train.save_every", "train.log_every",
    "train.activation_checkpointing", "train.on_nonfinite",
)  # fmt: skip
# Keys that determine the values of validation metrics; metrics with other values are not comparable.
MEASURE_KEYS = ("data.valid", "validation.max_rows", "validation.max_tokens", "validation.with_cot")
VALIDATION_KEYS = (
    *MEASURE_KEYS, "data.test", "validation.batch_size", "train.validate_every", "train.best_metric",
    "train.best_mode", "train.early_stop.metric", "train.early_stop.at_least",
)  # fmt: skip
RESUMABLE_KEYS = (*BOOKKEEPING_KEYS, *VALIDATION_KEYS)


def check_method_name(name: str) -> str:
    """Return the name if it is a method of laconic or the name of a class outside it; else raise ValueError."""
    if name in METHOD_TABLES or CUSTOM_METHOD.fullmatch(name):
        return name
    close = difflib.get_close_matches(name, METHOD_TABLES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use {', '.join(METHOD_TABLES)}, or package.module:Class"
    raise ValueError(f'"{name}" is not a method; {hint}')


METHOD_SCHEMA: dict[str, Any] = {"anyOf": [{"enum": list(METHOD_TABLES)}, {"pattern": f"^{CUSTOM_METHOD.pattern}$"}]}


class ModelConfig(ConfigModel):
    """[model]: the decoder, from a checkpoint, an earlier run, or new with the given sizes."""

    name: PathText | None = None
    """checkpoint: a folder in Hugging Face layout, a GGUF file, a name on the hub, or a short name"""
    revision: str | None = None
    """commit, tag or branch on the hub"""
    init_from_run: PathText | None = None
    """run directory; training starts from its latest checkpoint"""
    family: Literal["llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2", "opt"] | None = None
    """family of a new decoder with the sizes below"""
    tokenizer: PathText | None = None
    """"digits", "digit_documents", "recall", "bytes", "mqar", "formal_languages", a folder or a hub name; default: the
    checkpoint's"""
    init_seed: int | None = Field(default=None, ge=0)
    """seed of a new decoder's weights; default: the run's seed"""
    hidden_size: PositiveInt = 64
    """D, hidden size"""
    num_hidden_layers: PositiveInt = 2
    """L, decoder blocks"""
    num_attention_heads: PositiveInt = 4
    """H, query heads"""
    num_key_value_heads: PositiveInt | None = None
    """G, key-value heads; default: H"""
    intermediate_size: PositiveInt | None = None
    """F, width of the MLP; default: 2 D"""
    max_position_embeddings: PositiveInt = 256
    """context length"""
    tie_word_embeddings: bool = False
    """share input and output embeddings"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """type of the weights; adapter, control vectors and projection are float32"""
    init: Literal["normal", "fan_in"] = "fan_in"
    """normal(0, 0.02); or std 1/sqrt(fan_in), divided by sqrt(2 L) at the end of a residual branch"""
    embedding_init_std: float = Field(default=0.5, gt=0)
    """fan_in: std of the token embeddings"""
    head_init_std: float = Field(default=0.02, gt=0)
    """fan_in: std of an untied output embedding"""

    @model_validator(mode="after")
    def check_origin(self) -> "ModelConfig":
        sources = [key for key in ("name", "init_from_run", "family") if getattr(self, key) is not None]
        if not sources:
            choice = "such as model.name=stories260k or model.name=smollm2, or set family or init_from_run"
            raise ValueError(f"name: missing; choose a model, {choice}")
        if len(sources) > 1:
            raise ValueError(f"set exactly one of name, init_from_run and family, not {', '.join(sources)}")
        if self.init_from_run and self.tokenizer:
            raise ValueError(f'tokenizer "{self.tokenizer}": the run of init_from_run has its own; remove the key')
        if self.family and not self.tokenizer:
            raise ValueError('tokenizer: missing; a new decoder needs one, such as "digits", or "bytes" for text')
        return self


class LoraConfig(ConfigModel):
    """[lora]: LoRA by peft on a frozen base model."""

    rank: PositiveInt = 128
    """rank r"""
    alpha: PositiveInt = 32
    """scaling numerator; the scale is alpha / rank"""
    dropout: Fraction = 0.1
    """dropout of the adapter's input"""
    target_modules: Literal["all", "attention"] = "all"
    """adapted linear layers: all of a block, or those of attention"""


class ValidationConfig(ConfigModel):
    """[validation]: held-out rows evaluated during training, which also choose the best step."""

    max_rows: PositiveInt = 500
    """use only the first rows"""
    batch_size: PositiveInt = 100
    """rows of a batch"""
    max_tokens: PositiveInt = 64
    """maximum tokens of an answer, its written chain included"""
    with_cot: bool = True
    """also answer with the chain of thought written out, with the same weights"""


class Recipe(ConfigModel):
    """Everything that defines a run."""

    method: Annotated[str, AfterValidator(check_method_name)] = Field(json_schema_extra=METHOD_SCHEMA)
    """training and answering method: a name, or "package.module:Class" for code outside laconic"""
    method_options: Mapping[str, Any] | None = None
    """options of a method outside laconic, as its class defines them"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """seed of data order, sampling and new weights; papers use 0, 1, 2"""
    paper_table: str | None = None
    """table of a paper that the run reproduces, as "PAPER table ID"; "ours": none"""
    table_row: str | None = None
    """row of that table"""
    deviations: Mapping[str, str] = {}
    """keys that differ from the paper's row, each with a reason"""
    model: ModelConfig
    """the decoder: its name, such as "smollm2", or family and sizes of a new one"""
    latents: LatentConfig | None = None
    """latent thoughts"""
    distillation: DistillationConfig | None = None
    """losses of CODI, PCCoT and KaVa"""
    kv_selection: KVSelectionConfig | None = None
    """chain tokens that KaVa distils"""
    kv_distillation: KVDistillationConfig | None = None
    """KaVa's loss on keys and values"""
    icot: IcotConfig | None = None
    """iCoT's curriculum"""
    coconut: CoconutConfig | None = None
    """Coconut's curriculum"""
    compression: CompressionConfig | None = None
    """how documents become summary vectors; for cot, nocot, codi, pccot and kava, those of questions"""
    stop_head: StopHeadConfig | None = None
    """how the number of summary vectors is learned"""
    mixer: MixerConfig | None = None
    """token mixer of each layer"""
    cms: CMSConfig | None = None
    """MLP levels that learn while they read"""
    inner_loop: InnerLoopConfig | None = None
    """learning while reading, and gradients through it"""
    data: DataConfig
    """the rows"""
    validation: ValidationConfig | None = None
    """evaluation during training; unset: none"""
    train: TrainingConfig
    """optimizer, schedule, checkpoints"""
    lora: LoraConfig | None = None
    """the adapter if train.trainable is lora"""

    @model_validator(mode="after")
    def check_method_tables(self) -> "Recipe":
        missing = [name for name in required_tables(self.method, self.train.trainable) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]}: missing; method {self.method} uses this table")
        tables = self.method_tables
        if self.method_options is not None and not self.is_custom_method:
            raise ValueError(f"method_options: method {self.method} has tables of its own; remove the key")
        if self.train.trainable == "latents" and "latents" not in tables and not self.is_custom_method:
            raise ValueError(f'train.trainable "latents": method {self.method} has no latents to train')
        if self.distillation and "distillation" in tables:
            kv_weight = self.kv_distillation.weight if self.kv_distillation and self.method == "kava" else 0.0
            if not (self.distillation.student_ce_weight or self.distillation.hidden_weight or kv_weight):
                raise ValueError("distillation.student_ce_weight: every loss that trains the latents has weight 0")
        goal = self.train.early_stop
        if self.train.validate_every is not None and self.validation is None:
            raise ValueError("train.validate_every: nothing is validated; add a [validation] table")
        for key, metric in (("early_stop", goal.metric if goal else None), ("best_metric", self.train.best_metric)):
            if metric is not None and self.validation is None:
                raise ValueError(f"train.{key}: needs validation metrics; add a [validation] table")
            if metric is not None and metric not in self.validation_metrics:
                known = ", ".join(self.validation_metrics)
                raise ValueError(f'train.{key} "{metric}": not a metric of this validation, which has {known}')
        latents = self.latents if "latents" in tables or self.is_custom_method else None
        schedule = METHOD_SCHEDULES.get(self.method)
        if latents and schedule and latents.schedule != schedule:
            raise ValueError(f'latents.schedule "{latents.schedule}": method {self.method} needs "{schedule}"')
        if latents and latents.schedule == "jacobi" and latents.jacobi_iterations is None:
            raise ValueError("latents.jacobi_iterations: missing; the jacobi schedule needs a number, 3 in the papers")
        if self.latents and self.latents.length_policy != "fixed" and self.method not in ("pccot", "kava"):
            raise ValueError(f'latents.length_policy "{self.latents.length_policy}": only for methods pccot and kava')
        if self.latents and self.latents.jacobi_iterations == 0 and self.latents.projection != "none":
            projection = self.latents.projection
            raise ValueError(f'latents.projection "{projection}": unused with jacobi_iterations = 0; set it to "none"')
        return self

    @model_validator(mode="after")
    def check_documents(self) -> "Recipe":
        source, config = self.data.source, self.compression
        if not self.is_custom_method and (self.method in DOCUMENT_METHODS) != (source in DOCUMENT_SOURCES):
            expected = ", ".join(DOCUMENT_SOURCES) if self.method in DOCUMENT_METHODS else "file, catalog or digits"
            raise ValueError(f'data.source "{source}": method {self.method} reads {expected}')
        if self.reads_documents and config is not None:
            config.check_for_reasoning()
        if source == "digits" and self.reads_documents != (self.data.digits.document_tokens is not None):
            raise ValueError("data.digits.document_tokens: goes with a table [compression]; set both or neither")
        if self.method != "autocompressor" or config is None:
            return self
        if source not in SEGMENTED_SOURCES:
            raise ValueError(f'data.source "{source}": has no segments; use {" or ".join(SEGMENTED_SOURCES)}')
        if config.distillation_weight and self.train.trainable != "lora":
            raise ValueError('compression.distillation_weight: the teacher needs train.trainable "lora"')
        text = self.data.text
        if source == "text" and text.mean_segment_tokens >= text.row_tokens:
            raise ValueError(f"data.text.row_tokens {text.row_tokens}: a single segment never reads its summary")
        return self

    @model_validator(mode="after")
    def check_parallel(self) -> "Recipe":
        """With FSDP2 ranks exchange weights and gradients in their passes, so all must run equally many."""
        compression, coconut, cause = self.compression, self.coconut, None
        if self.method == "autocompressor" and compression:
            if compression.summary == "autoregressive" and compression.length_policy != "fixed":
                cause = f'length_policy "{compression.length_policy}"'
            elif compression.memory_policy == "budgeted":
                cause = 'memory_policy "budgeted"'
        elif self.method == "coconut" and coconut:
            if not coconut.pad_latent_to_max:
                cause = "pad_latent_to_max false"
            elif coconut.uniform_stage_prob:
                cause = f"uniform_stage_prob {coconut.uniform_stage_prob:g}"
        if self.train.parallel == "fsdp" and cause:
            raise ValueError(f'train.parallel "fsdp": with {cause} ranks run unequal numbers of passes; use "ddp"')
        if self.train.reshard and self.method == "hope":
            raise ValueError("train.reshard: method hope uses all weights in the whole pass; remove the key")
        return self

    @model_validator(mode="after")
    def check_nested(self) -> "Recipe":
        train = self.train
        if train.stateful and (self.method != "hope" or self.data.source != "text"):
            raise ValueError('train.stateful: only for method hope with data.source "text"; remove the key')
        if self.method != "hope":
            return self
        if train.trainable != "full":
            raise ValueError(f'train.trainable "{train.trainable}": method hope trains its fast weights; use "full"')
        if train.optimizer == "dgd":
            raise ValueError('train.optimizer "dgd": not supported for method hope; use adamw or m3')
        if train.activation_checkpointing:
            raise ValueError(
                "train.activation_checkpointing: method hope recomputes chunks instead; set "
                "mixer.self_modifying.activation_checkpointing or mixer.titans.activation_checkpointing"
            )
        mixer = self.mixer.kind if self.mixer else "attention"
        if mixer != "attention" and self.model.family not in (None, "llama"):
            raise ValueError(f'model.family "{self.model.family}": mixer.kind "{mixer}" needs "llama"')
        return self

    @property
    def is_custom_method(self) -> bool:
        """Whether the method is a class outside laconic."""
        return ":" in self.method

    @property
    def reads_documents(self) -> bool:
        """Whether questions are answered after the summary vectors of a document."""
        return self.compression is not None and self.method in DOCUMENT_REASONING_METHODS

    @property
    def method_tables(self) -> tuple[str, ...]:
        """Tables that the method uses; one outside laconic has its options only."""
        return (*METHOD_TABLES.get(self.method, ()), *(("compression",) if self.reads_documents else ()))

    @property
    def num_latents(self) -> int:
        """M, latent thoughts of the method; 0 if it has none."""
        return self.latents.num_latents if self.latents and "latents" in self.method_tables else 0

    @property
    def num_latent_positions(self) -> int:
        """Positions that the latent thoughts take: the latents, bot and eot; 0 without latents."""
        return self.num_latents + 2 if self.num_latents else 0

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        if self.data.source in DOCUMENT_SOURCES:
            return ("nats", "accuracy", *(("vectors", "spread") if self.method == "autocompressor" else ()))
        with_teacher = self.validation is not None and self.validation.with_cot and self.method in COT_TEACHER_METHODS
        return ("accuracy", "teacher_accuracy") if with_teacher else ("accuracy",)

    @property
    def unused_tables(self) -> list[str]:
        """Tables that are present but not used by the method."""
        tables = {name for names in METHOD_TABLES.values() for name in names}
        return [name for name in sorted(tables - {*self.method_tables}) if getattr(self, name) is not None]


def required_tables(method: str, trainable: str) -> list[str]:
    """Return the tables that a run needs, at least with their defaults."""
    return [*METHOD_TABLES.get(method, ()), *(["lora"] if trainable == "lora" else [])]
