"""Everything a recipe may say: one tree of settings; nothing here imports torch."""

import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from laconic.config.data import DataConfig
from laconic.config.methods import (
    CoconutConfig,
    CompressionConfig,
    ConfigModel,
    DistillationConfig,
    Fraction,
    ICoTConfig,
    KVDistillationConfig,
    KVSelectionConfig,
    LatentConfig,
    LossConfig,
    StopHeadConfig,
)
from laconic.config.nested import CMSConfig, InnerLoopConfig, MixerConfig
from laconic.config.training import TrainingConfig

MethodName = Literal["cot", "nocot", "icot", "coconut", "codi", "pccot", "kava", "autocompressor", "lm", "hope"]
# The tables that a method reads. What else is given is kept and noted, so that one word changes the method.
METHOD_TABLES: Mapping[str, tuple[str, ...]] = {
    "cot": ("loss",),
    "nocot": ("loss",),
    "icot": ("icot",),
    "coconut": ("latents", "coconut"),
    "codi": ("latents", "distillation"),
    "pccot": ("latents", "distillation"),
    "kava": ("latents", "distillation", "kv_selection", "kv_distillation"),
    "autocompressor": ("compression", "stop_head"),
    "lm": (),
    "hope": ("mixer", "cms", "inner_loop"),
}
# Methods that read documents, and the kinds of data that are documents.
DOCUMENT_METHODS, DOCUMENT_SOURCES = (
    ("autocompressor", "lm", "hope"),
    ("text", "recall", "mqar", "copying", "formal_languages"),
)
SEGMENTED_SOURCES = ("text", "recall")  # of these, kinds whose documents have segments, which become vectors
# Tokenizers by name; a folder of such a name is written ./digits.
BUILT_IN_TOKENIZERS = ("digits", "recall", "bytes", "mqar", "formal_languages")
# Methods whose chain is what they are taught to write: it keeps its last step unless a recipe says otherwise.
FULL_CHAIN_METHODS = ("cot", "icot", "coconut")
# Fields that hold paths; a "name" is one only where such a folder is there, "rows" where it ends as files of rows do or
# such a file is there.
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
# Keys that cannot change what is learned: a run may be continued with other values. A longer run learns more, not else.
RESUMABLE_KEYS = (
    *("paper_table", "table_row", "deviations", "data.data_dir", "train.steps", "train.epochs"),
    *("train.parallel", "train.keep_best", "train.keep_every", "train.save_every", "train.log_every"),
)
PositiveSize = Annotated[int, Field(ge=1)]


class ModelConfig(ConfigModel):
    """Where the decoder comes from: a checkpoint, an earlier run, or sizes of a new one."""

    name: str | None = Field(None, description="a checkpoint in Hugging Face layout: folder, or name on the hub")
    revision: str | None = Field(None, description="commit, tag or branch on the hub")
    init_from_run: str | None = Field(None, description="a run, whose newest step is the start")
    family: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"] | None = Field(
        None, description="family of a new decoder, of the sizes below"
    )
    tokenizer: str | None = Field(
        None,
        description='"digits", "recall", "bytes", "mqar", "formal_languages"; else a folder or hub name; absent: its own',
    )
    init_seed: int | None = Field(None, ge=0, description="of a new decoder's weights; absent: the run's seed")
    hidden_size: PositiveSize = Field(64, description="D, numbers in a vector")
    num_hidden_layers: PositiveSize = Field(2, description="L, blocks")
    num_attention_heads: PositiveSize = Field(4, description="H, query heads")
    num_key_value_heads: PositiveSize | None = Field(None, description="G, heads of keys and values; absent: H")
    intermediate_size: PositiveSize | None = Field(None, description="F, numbers inside the feed-forward; absent: 2 D")
    max_position_embeddings: PositiveSize = Field(256, description="positions it is made for")
    tie_word_embeddings: bool = Field(False, description="whether the head is the table of words")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the weights as they are held; those of adapter, control vectors and map are float32"
    )
    init: Literal["normal", "fan_in"] = Field(
        "fan_in", description="normal(0, 0.02); or std 1/sqrt(inputs), outputs of a residual branch / sqrt(2 L)"
    )
    embedding_init_std: float = Field(0.5, gt=0, description="fan_in: std of the table of words")
    head_init_std: float = Field(0.02, gt=0, description="fan_in: std of the head where it is not tied")

    @model_validator(mode="after")
    def check_origin(self) -> "ModelConfig":
        given = [key for key in ("name", "init_from_run", "family") if getattr(self, key) is not None]
        if len(given) != 1:
            there = " and ".join(given) or "none of them"
            raise ValueError(f"given: {there}; one of name, start, family says where the decoder comes from")
        if self.init_from_run and self.tokenizer:
            raise ValueError(f'tokenizer "{self.tokenizer}": a run has its own; leave the key out')
        if self.family and not self.tokenizer:
            raise ValueError(
                'tokenizer: absent; a new decoder needs one: "digits" or "recall" for those tasks, "bytes" for text'
            )
        return self


class LoraConfig(ConfigModel):
    """LoRA by peft, on a base that stays as it is."""

    rank: PositiveSize = Field(128, description="rank")
    alpha: PositiveSize = Field(32, description="the scale is alpha / r")
    dropout: Fraction = Field(0.1, description="share of its inputs dropped in training")
    target_modules: Literal["all", "attention"] = Field(
        "all", description="maps adapted: all of a block, or the four of attention"
    )


class ValidationConfig(ConfigModel):
    """The data's validation rows, answered during training; they choose the best step."""

    max_rows: PositiveSize = Field(500, description="problems, from the first")
    batch_size: PositiveSize = Field(100, description="problems answered at once")
    max_tokens: PositiveSize = Field(64, description="tokens of an answer at most")
    with_cot: bool = Field(True, description="answer by chain with the same weights too")


class Recipe(ConfigModel):
    """A run, whole."""

    method: MethodName = Field(description="which paper's way to train and to answer")
    seed: int = Field(0, ge=0, lt=2**63, description="of order, draws and new weights; the papers' three are 0, 1, 2")
    paper_table: str | None = Field(None, description='the table it stands for, as "PAPER table ID"')
    table_row: str | None = Field(None, description="the row of that table")
    deviations: Mapping[str, str] = Field({}, description="keys that differ from the row, each with its reason")
    model: ModelConfig = Field(description="where the decoder comes from")
    loss: LossConfig | None = Field(None, description="the loss of a chain, or of an answer, alone")
    latents: LatentConfig | None = Field(None, description="the thoughts")
    distillation: DistillationConfig | None = Field(None, description="the losses of CODI, PCCoT and KaVa")
    kv_selection: KVSelectionConfig | None = Field(None, description="which of the chain KaVa keeps")
    kv_distillation: KVDistillationConfig | None = Field(None, description="KaVa's loss on keys and values")
    icot: ICoTConfig | None = Field(None, description="iCoT's curriculum")
    coconut: CoconutConfig | None = Field(None, description="Coconut's curriculum")
    compression: CompressionConfig | None = Field(None, description="how documents become summary vectors")
    stop_head: StopHeadConfig | None = Field(None, description="how the number of vectors is learned")
    mixer: MixerConfig | None = Field(None, description="what each layer remembers with")
    cms: CMSConfig | None = Field(None, description="MLPs that learn while they read, at several rates")
    inner_loop: InnerLoopConfig | None = Field(None, description="what is learned while reading, and through")
    data: DataConfig = Field(description="the rows")
    validation: ValidationConfig | None = Field(None, description="problems answered during training; absent: none")
    train: TrainingConfig = Field(description="how it is trained")
    lora: LoraConfig | None = Field(None, description="the adapter, where train.trainable is lora")

    @model_validator(mode="after")
    def check_method_tables(self) -> "Recipe":
        missing = [name for name in required_tables(self.method, self.train.trainable) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]}: absent; method {self.method} reads this table")
        if self.train.trainable == "latents" and "latents" not in METHOD_TABLES[self.method]:
            raise ValueError(f'train.trainable "latents": method {self.method} has none, so nothing would be trained')
        how, kv = self.distillation, self.kv_distillation if self.method == "kava" else None
        weights = (how.student_ce_weight, how.hidden_weight, kv.weight if kv else 0.0) if how else (1.0,)
        if "distillation" in METHOD_TABLES[self.method] and not any(weights):
            raise ValueError(
                "distillation.student_ce_weight: 0, as every other weight that the thoughts learn by; give one of them"
            )
        given = [key for key in ("early_stop", "best_metric") if getattr(self.train, key) is not None]
        if given and self.validation is None:
            raise ValueError(f"train.{given[0]}: its number comes from [validation]; add that table")
        if self.latents and self.latents.jacobi_iterations == 0 and self.latents.projection != "none":
            raise ValueError(
                f'latents.projection "{self.latents.projection}": with rounds 0 nothing goes through it, '
                'so it would stay as it starts; project = "none"'
            )
        return self

    @model_validator(mode="after")
    def check_documents(self) -> "Recipe":
        if (self.method in DOCUMENT_METHODS) != (self.data.source in DOCUMENT_SOURCES):
            raise ValueError(
                f'data.source "{self.data.source}" with method {self.method}: '
                f"documents, of kind {' or '.join(DOCUMENT_SOURCES)}, are for {', '.join(DOCUMENT_METHODS)} and for no other"
            )
        if self.method == "autocompressor" and self.data.source not in SEGMENTED_SOURCES:
            raise ValueError(
                f'data.source "{self.data.source}" with method autocompressor: its documents have no segments to make '
                f"vectors of; take {' or '.join(SEGMENTED_SOURCES)}"
            )
        how = self.compression if self.method == "autocompressor" else None
        drawn = how and how.summary == "autoregressive" and how.length_policy != "fixed"
        if how and self.train.parallel == "fsdp" and (drawn or how.memory_policy == "budgeted"):
            why = f'generator "self" and length "{how.length_policy}"' if drawn else 'memory "budgeted"'
            raise ValueError(
                f'train.parallel "fsdp": ranks would make unequal numbers of passes with {why}, and wait for ever; '
                'take "ddp"'
            )
        return self

    @model_validator(mode="after")
    def check_nested(self) -> "Recipe":
        how = self.train
        if how.stateful and (self.method != "hope" or self.data.source != "text"):
            raise ValueError(
                f'train.stateful true with method {self.method} and data.source "{self.data.source}": what goes from batch to '
                "batch is what method hope has learned of text; leave it out"
            )
        if self.method != "hope":
            return self
        if how.trainable != "full":
            raise ValueError(
                f'train.trainable "{how.trainable}" with method hope: the starts of its fast weights are its weights, which no '
                'adapter stands in for; take "full"'
            )
        if how.optimizer == "dgd":
            raise ValueError(
                'train.optimizer "dgd" with method hope: its maps read starts and changes together, which no map '
                "records; take adamw or m3"
            )
        if how.parallel == "fsdp":
            raise ValueError('train.parallel "fsdp" with method hope: its fast weights are no shards; take "ddp"')
        if how.activation_checkpointing:
            raise ValueError(
                f"train.activation_checkpointing {how.activation_checkpointing} with method hope: chunks are what is computed again; "
                "set mixer.self_modifying.activation_checkpointing, or mixer.titans.activation_checkpointing"
            )
        mixer = self.mixer.kind if self.mixer else "attention"
        if mixer != "attention" and self.model.family not in (None, "llama"):
            raise ValueError(
                f'model.family "{self.model.family}" with mixer.kind "{mixer}": a model without attention has '
                "Llama's norms and MLPs; take llama"
            )
        return self

    @property
    def unused_tables(self) -> list[str]:
        """Tables that are given and that the method does not read."""
        tables = {name for names in METHOD_TABLES.values() for name in names}
        read = METHOD_TABLES[self.method]
        return [name for name in sorted(tables) if getattr(self, name) is not None and name not in read]


def required_tables(method: str, trainable: str) -> list[str]:
    """The tables that a run needs, if only with their defaults."""
    return [*METHOD_TABLES.get(method, ()), *(["lora"] if trainable == "lora" else [])]


def iter_fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted key, tables before what is in them."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for part in union_members(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from iter_fields(part, f"{prefix}{name}.")


def union_members(annotation: Any) -> Iterator[Any]:
    """The members of a union, without what is annotated on them; the type itself where it is none."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from union_members(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from union_members(part)
    else:
        yield annotation


@cache
def fields_by_key() -> Mapping[str, FieldInfo]:
    """Every field by its dotted key."""
    return dict(iter_fields())


def known_keys() -> list[str]:
    """Every dotted key that a recipe may hold."""
    return list(fields_by_key())


def find_field(key: str) -> FieldInfo | None:
    """The field of a dotted key."""
    return fields_by_key().get(key)


def accepts_text(key: str) -> bool:
    """Whether a field may be text."""
    info = find_field(key)
    return info is not None and any(is_text_type(part) for part in union_members(info.annotation))


def is_text_type(part: Any) -> bool:
    """Whether a type is text, one of some texts, or a list of texts, of which one stands for a list of one."""
    if typing.get_origin(part) is Literal:
        return isinstance(typing.get_args(part)[0], str)
    return part in (str, tuple[str, ...])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def explicit_values(recipe: Recipe) -> dict[str, Any]:
    """The keys that can change what is learned, dotted, with their values; a default is not said.

    So a later laconic with more keys says the same of a recipe.
    """
    everything = flatten(recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    return {
        key: value for key, value in everything.items() if key not in RESUMABLE_KEYS and not key.startswith("differs.")
    }
