"""Everything a recipe may say: one tree of settings; nothing here imports torch."""

import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from laconic.data.settings import Data
from laconic.methods.learning_settings import Learning, Levels, Memory
from laconic.methods.settings import (
    Distilling,
    Halting,
    Keeping,
    Matching,
    Reading,
    Removing,
    Scoring,
    Settings,
    Share,
    Staging,
    Thinking,
)
from laconic.training.settings import Training

MethodName = Literal["cot", "nocot", "icot", "coconut", "codi", "pccot", "kava", "autocompressor", "plain", "hope"]
# The tables that a method reads. What else is given is kept and noted, so that one word changes the method.
TABLES: Mapping[str, tuple[str, ...]] = {
    "cot": ("scoring",),
    "nocot": ("scoring",),
    "icot": ("removing",),
    "coconut": ("thinking", "staging"),
    "codi": ("thinking", "distilling"),
    "pccot": ("thinking", "distilling"),
    "kava": ("thinking", "distilling", "keeping", "matching"),
    "autocompressor": ("reading", "halting"),
    "plain": (),
    "hope": ("memory", "levels", "learning"),
}
# Methods that read documents, and the kinds of data that are documents.
READERS, DOCUMENTS = ("autocompressor", "plain", "hope"), ("text", "recall", "mqar", "copying", "languages")
SEGMENTED = ("text", "recall")  # of these, kinds whose documents have segments, which become vectors
# Tokenizers by name; a folder of such a name is written ./digits.
BUILT_IN = ("digits", "recall", "bytes", "mqar", "languages")
# Methods whose chain is what they are taught to write: it keeps its last step unless a recipe says otherwise.
WHOLE = ("cot", "icot", "coconut")
# Fields that hold paths; a "name" is one only where such a folder is there, "rows" where it ends as files of rows do or
# such a file is there.
PATHS: Mapping[str, Literal["path", "name", "rows"]] = {
    "model.name": "name",
    "model.start": "path",
    "model.tokenizer": "name",
    "data.path": "path",
    "data.name": "rows",
    "data.valid": "rows",
    "data.test": "rows",
    "data.root": "path",
}
# Keys that cannot change what is learned: a run may be continued with other values. A longer run learns more, not else.
FREE = (
    *("source", "row", "differs", "data.root", "train.steps", "train.epochs"),
    *("train.parallel", "train.keep_best", "train.keep_every", "train.save_every", "train.log_every"),
)
Size = Annotated[int, Field(ge=1)]


class Model(Settings):
    """Where the decoder comes from: a checkpoint, an earlier run, or sizes of a new one."""

    name: str | None = Field(None, description="a checkpoint in Hugging Face layout: folder, or name on the hub")
    revision: str | None = Field(None, description="commit, tag or branch on the hub")
    start: str | None = Field(None, description="a run, whose newest step is the start")
    family: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"] | None = Field(
        None, description="family of a new decoder, of the sizes below"
    )
    tokenizer: str | None = Field(
        None, description='"digits", "recall", "bytes", "mqar", "languages"; else a folder or hub name; absent: its own'
    )
    seed: int | None = Field(None, ge=0, description="of a new decoder's weights; absent: the run's seed")
    hidden_size: Size = Field(64, description="D, numbers in a vector")
    num_hidden_layers: Size = Field(2, description="L, blocks")
    num_attention_heads: Size = Field(4, description="H, query heads")
    num_key_value_heads: Size | None = Field(None, description="G, heads of keys and values; absent: H")
    intermediate_size: Size | None = Field(None, description="F, numbers inside the feed-forward; absent: 2 D")
    max_position_embeddings: Size = Field(256, description="positions it is made for")
    tie_word_embeddings: bool = Field(False, description="whether the head is the table of words")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the weights as they are held; those of adapter, control vectors and map are float32"
    )
    init: Literal["range", "fan_in"] = Field(
        "fan_in", description="normal(0, 0.02); or std 1/sqrt(inputs), outputs of a residual branch / sqrt(2 L)"
    )
    init_words: float = Field(0.5, gt=0, description="fan_in: std of the table of words")
    init_head: float = Field(0.02, gt=0, description="fan_in: std of the head where it is not tied")

    @model_validator(mode="after")
    def one_start(self) -> "Model":
        given = [key for key in ("name", "start", "family") if getattr(self, key) is not None]
        if len(given) != 1:
            there = " and ".join(given) or "none of them"
            raise ValueError(f"given: {there}; one of name, start, family says where the decoder comes from")
        if self.start and self.tokenizer:
            raise ValueError(f'tokenizer "{self.tokenizer}": a run has its own; leave the key out')
        if self.family and not self.tokenizer:
            raise ValueError(
                'tokenizer: absent; a new decoder needs one: "digits" or "recall" for those tasks, "bytes" for text'
            )
        return self


class Adapter(Settings):
    """LoRA by peft, on a base that stays as it is."""

    r: Size = Field(128, description="rank")
    alpha: Size = Field(32, description="the scale is alpha / r")
    dropout: Share = Field(0.1, description="share of its inputs dropped in training")
    modules: Literal["all", "attention"] = Field(
        "all", description="maps adapted: all of a block, or the four of attention"
    )


class Validation(Settings):
    """The data's validation rows, answered during training; they choose the best step."""

    rows: Size = Field(500, description="problems, from the first")
    batch: Size = Field(100, description="problems answered at once")
    max_tokens: Size = Field(64, description="tokens of an answer at most")
    teacher: bool = Field(True, description="answer by chain with the same weights too")


class Recipe(Settings):
    """A run, whole."""

    method: MethodName = Field(description="which paper's way to train and to answer")
    seed: int = Field(0, ge=0, lt=2**63, description="of order, draws and new weights; the papers' three are 0, 1, 2")
    source: str | None = Field(None, description='the table it stands for, as "PAPER table ID"')
    row: str | None = Field(None, description="the row of that table")
    differs: Mapping[str, str] = Field({}, description="keys that differ from the row, each with its reason")
    model: Model = Field(description="where the decoder comes from")
    scoring: Scoring | None = Field(None, description="the loss of a chain, or of an answer, alone")
    thinking: Thinking | None = Field(None, description="the thoughts")
    distilling: Distilling | None = Field(None, description="the losses of CODI, PCCoT and KaVa")
    keeping: Keeping | None = Field(None, description="which of the chain KaVa keeps")
    matching: Matching | None = Field(None, description="KaVa's loss on keys and values")
    removing: Removing | None = Field(None, description="iCoT's curriculum")
    staging: Staging | None = Field(None, description="Coconut's curriculum")
    reading: Reading | None = Field(None, description="how documents become summary vectors")
    halting: Halting | None = Field(None, description="how the number of vectors is learned")
    memory: Memory | None = Field(None, description="what each layer remembers with")
    levels: Levels | None = Field(None, description="MLPs that learn while they read, at several rates")
    learning: Learning | None = Field(None, description="what is learned while reading, and through")
    data: Data = Field(description="the rows")
    validation: Validation | None = Field(None, description="problems answered during training; absent: none")
    train: Training = Field(description="how it is trained")
    lora: Adapter | None = Field(None, description="the adapter, where train.what is lora")

    @model_validator(mode="after")
    def something_learns(self) -> "Recipe":
        missing = [name for name in wanted(self.method, self.train.what) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]}: absent; method {self.method} reads this table")
        if self.train.what == "thoughts" and "thinking" not in TABLES[self.method]:
            raise ValueError(f'train.what "thoughts": method {self.method} has none, so nothing would be trained')
        how, kv = self.distilling, self.matching if self.method == "kava" else None
        weights = (how.student, how.alpha1, kv.alpha2 if kv else 0.0) if how else (1.0,)
        if "distilling" in TABLES[self.method] and not any(weights):
            raise ValueError(
                "distilling.student: 0, as every other weight that the thoughts learn by; give one of them"
            )
        given = [key for key in ("stop_when", "best") if getattr(self.train, key) is not None]
        if given and self.validation is None:
            raise ValueError(f"train.{given[0]}: its number comes from [validation]; add that table")
        if self.thinking and self.thinking.rounds == 0 and self.thinking.project != "none":
            raise ValueError(
                f'thinking.project "{self.thinking.project}": with rounds 0 nothing goes through it, '
                'so it would stay as it starts; project = "none"'
            )
        return self

    @model_validator(mode="after")
    def reads(self) -> "Recipe":
        if (self.method in READERS) != (self.data.kind in DOCUMENTS):
            raise ValueError(
                f'data.kind "{self.data.kind}" with method {self.method}: '
                f"documents, of kind {' or '.join(DOCUMENTS)}, are for {', '.join(READERS)} and for no other"
            )
        if self.method == "autocompressor" and self.data.kind not in SEGMENTED:
            raise ValueError(
                f'data.kind "{self.data.kind}" with method autocompressor: its documents have no segments to make '
                f"vectors of; take {' or '.join(SEGMENTED)}"
            )
        how = self.reading if self.method == "autocompressor" else None
        drawn = how and how.generator == "self" and how.length != "fixed"
        if how and self.train.parallel == "fsdp" and (drawn or how.memory == "budgeted"):
            why = f'generator "self" and length "{how.length}"' if drawn else 'memory "budgeted"'
            raise ValueError(
                f'train.parallel "fsdp": ranks would make unequal numbers of passes with {why}, and wait for ever; '
                'take "ddp"'
            )
        return self

    @model_validator(mode="after")
    def learns(self) -> "Recipe":
        how = self.train
        if how.carry and (self.method != "hope" or self.data.kind != "text"):
            raise ValueError(
                f'train.carry true with method {self.method} and data.kind "{self.data.kind}": what goes from batch to '
                "batch is what method hope has learned of text; leave it out"
            )
        if self.method != "hope":
            return self
        if how.what != "full":
            raise ValueError(
                f'train.what "{how.what}" with method hope: the starts of its fast weights are its weights, which no '
                'adapter stands in for; take "full"'
            )
        if how.optimizer == "dgd":
            raise ValueError(
                'train.optimizer "dgd" with method hope: its maps read starts and changes together, which no map '
                "records; take adamw or m3"
            )
        if how.parallel == "fsdp":
            raise ValueError('train.parallel "fsdp" with method hope: its fast weights are no shards; take "ddp"')
        if how.recompute:
            raise ValueError(
                f"train.recompute {how.recompute} with method hope: chunks are what is computed again; "
                "set memory.self.checkpoint, or memory.titans.checkpoint"
            )
        mixer = self.memory.mixer if self.memory else "attention"
        if mixer != "attention" and self.model.family not in (None, "llama"):
            raise ValueError(
                f'model.family "{self.model.family}" with memory.mixer "{mixer}": a model without attention has '
                "Llama's norms and MLPs; take llama"
            )
        return self

    @property
    def unread(self) -> list[str]:
        """Tables that are given and that the method does not read."""
        tables = {name for names in TABLES.values() for name in names}
        read = TABLES[self.method]
        return [name for name in sorted(tables) if getattr(self, name) is not None and name not in read]


def wanted(method: str, what: str) -> list[str]:
    """The tables that a run needs, if only with their defaults."""
    return [*TABLES.get(method, ()), *(["lora"] if what == "lora" else [])]


def fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted key, tables before what is in them."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for part in parts(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields(part, f"{prefix}{name}.")


def parts(annotation: Any) -> Iterator[Any]:
    """The members of a union, without what is annotated on them; the type itself where it is none."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from parts(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from parts(part)
    else:
        yield annotation


@cache
def known() -> Mapping[str, FieldInfo]:
    """Every field by its dotted key."""
    return dict(fields())


def known_keys() -> list[str]:
    """Every dotted key that a recipe may hold."""
    return list(known())


def find(key: str) -> FieldInfo | None:
    """The field of a dotted key."""
    return known().get(key)


def takes_text(key: str) -> bool:
    """Whether a field may be text."""
    info = find(key)
    return info is not None and any(is_text(part) for part in parts(info.annotation))


def is_text(part: Any) -> bool:
    """Whether a type is text, one of some texts, or a list of texts, of which one stands for a list of one."""
    if typing.get_origin(part) is Literal:
        return isinstance(typing.get_args(part)[0], str)
    return part in (str, tuple[str, ...])


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def said(recipe: Recipe) -> dict[str, Any]:
    """The keys that can change what is learned, dotted, with their values; a default is not said.

    So a later laconic with more keys says the same of a recipe.
    """
    everything = flat(recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    return {key: value for key, value in everything.items() if key not in FREE and not key.startswith("differs.")}
