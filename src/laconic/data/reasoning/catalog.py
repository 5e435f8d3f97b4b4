"""The data sets of the papers by name: splits and their sizes, files, where the hub has them.

Rows and SHA-256 of files are those of the data's README, whose licences hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from laconic.config.data import ROW_FILE_SUFFIXES, SplitName
from laconic.errors import InputError
from laconic.models.nearest import closest_word

AnswerKind = Literal["number", "digits", "text"]
SPLIT_NAMES: Mapping[str, SplitName] = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


@dataclass(frozen=True)
class DatasetFile:
    """A file below `data.data_dir`."""

    path: str
    num_rows: int
    sha256: str


@dataclass(frozen=True)
class DatasetSplit:
    """One split: how many rows it has as published, and which of them count.

    `mark` is a mark that rows must have, and `rows` how many have it. A `file` may hold fewer than `published`: then it
    is a part of the set. `hub` is what the hub calls the split, in the slice syntax of `datasets`.
    """

    published_rows: int | None
    file: DatasetFile | None = None
    hub_split: str | None = None
    required_mark: tuple[str, Any] | None = None
    marked_rows: int | None = None

    @property
    def num_rows(self) -> int | None:
        """Rows of the whole split, None where nobody says."""
        return self.published_rows if self.marked_rows is None else self.marked_rows


@dataclass(frozen=True)
class DatasetInfo:
    """A data set: `chain` is the field of its chain, cut as `cut` says; `columns` how the hub's become ours.

    A set of `members` is these, merged.
    """

    name: str
    description: str
    licence: str
    splits: Mapping[SplitName, DatasetSplit]
    hub_repo: str | None = None
    hub_config: str | None = None
    columns: Literal["ours", "gsm8k", "zen-aug", "zen-nl", "gsm-hard", "svamp", "multiarith"] = "ours"
    chain_field: Literal["steps", "cot", "rationale"] | None = "steps"
    chain_split: Literal["lines", "sentences", "spaces", "whole"] = "lines"
    answer_kind: AnswerKind = "number"
    members: tuple[str, ...] = ()
    generator: str | None = None  # what laconic data make calls more rows of its kind


GSM8K: Mapping[SplitName, DatasetSplit] = {
    "train": DatasetSplit(
        7473, DatasetFile("gsm8k/train.jsonl", 7473, "1ebe58ba54953f5a9ad647432ad0059bd500fe0143f1f24332709b4b82762554"),
        "train", ("icot_split", "train"), 6973,
    ),
    "valid": DatasetSplit(
        7473, DatasetFile("gsm8k/train.jsonl", 7473, "1ebe58ba54953f5a9ad647432ad0059bd500fe0143f1f24332709b4b82762554"),
        "train", ("icot_split", "valid"), 500,
    ),
    "test": DatasetSplit(
        1319, DatasetFile("gsm8k/test.jsonl", 1319, "266837a2e0c77b63c430308bb468f9c878a6a4bfdaf8ff5c2e3052b096416f92"),
        "test",
    ),
}  # fmt: skip
SUBSET = DatasetFile(
    "gsm8k-aug/train-subset.jsonl", 10432, "e54bcd7b127b18e01fada14cc3029487ea616a8f3bb6057c9bea4da541ef1a97"
)
AUG: Mapping[SplitName, DatasetSplit] = {
    "train": DatasetSplit(385620, SUBSET, "train"),
    "valid": DatasetSplit(
        500, DatasetFile("gsm8k-aug/valid.jsonl", 500, "62d66a76ccecb9f210d8fbd9ac040a86bb4d000df18e0abe2a90683302216adb"),
        "validation",
    ),
    "test": DatasetSplit(
        1319, DatasetFile("gsm8k-aug/test.jsonl", 1319, "91125686ed7043e63ce66c23966c066ba9a43abb7d5c177a461133218ea236b9"),
        "test",
    ),
}  # fmt: skip
HARD = DatasetFile("gsm-hard/test.jsonl", 1319, "b9d0407707ccdbd4567e04899265a349465e957b1184a48bdd6df27aea104c98")
SVAMP = DatasetFile("svamp/test.jsonl", 1000, "eb4c9107c5edf408c40cb71c5e8759aae29677324859b5c3da04f779f5942810")
MULTIARITH = DatasetFile(
    "multiarith/test.jsonl", 600, "587d1b1a826bc025e9e3eafa0fcfecd5a2f0bc82e8b271104ff1f1b7192bea1f"
)
AGGREGATE = DatasetFile(
    "aggregate/train.jsonl", 1492, "86e6fd18333442ea1d5b9970fce3145044e805edab4030827ea3e885e45020a9"
)
PRODUCTS = {
    4: ("c29cfee7b076beaa0f0bd246cd20b182a439a38237ed0d6625b0035493a0f00e",
        "ed8d910d24f00cfaadc8d50f45662d3fc56d60dbcd82d054763d317f83e14e7b"),
    5: ("d73131debc8341c0ddace1f6f88483e8633a4bc9a780fd3c6ae23c70bbf4e8bc",
        "6f0d6531ef21a1ab2428cbe96dd6aa0c9c25140ccaba83f1f3d4499cd6887752"),
    7: ("a3c1df7d2a912980b0f2c2fe43d5571e1c7cb746f23ead078cf6c8984949265b",
        "e217517d3bb664b5e210731539a586486b4cce7f8b46196b522a4888a4bf9a75"),
    9: ("b38a2e050f31730a91dfcf1852afa75dde72ec907561f49def63b9d4bb874ccc",
        "0c0e0ab31384a3655360fa98573fd33f3bebfebf0d4d6cafe0cac53d3f1c555e"),
}  # fmt: skip
PROSQA: Mapping[SplitName, DatasetSplit] = {
    "valid": DatasetSplit(
        300, DatasetFile("prosqa/valid.jsonl", 300, "ae615b4078bd2051e3ab38a9c5647b3b13e69ac7e08598b8c6daddd0b0eaa63c")
    ),
    "test": DatasetSplit(
        500, DatasetFile("prosqa/test.jsonl", 500, "d64d940d0e0b7dce63a717da47655d4b670ad889633b98e08061adba173969d4")
    ),
}
PRONTOQA = DatasetFile("prontoqa/test.jsonl", 500, "2b69373fc068a0fbf669e71e3ffbb19c6667dd02d090bd6a0aa7bcc716e0921f")


def multiplication_dataset(n: int) -> DatasetInfo:
    """Products of two numbers of n digits; training pairs are generated."""
    parts: tuple[SplitName, ...] = ("valid", "test")
    files = [DatasetFile(f"multiplication/{n}x{n}-{part}.jsonl", 1000, PRODUCTS[n][i]) for i, part in enumerate(parts)]
    splits: dict[SplitName, DatasetSplit] = {
        part: DatasetSplit(1000, file) for part, file in zip(parts, files, strict=True)
    }
    about = f"iCoT's products of {n} by {n} digits, least significant first"
    return DatasetInfo(
        f"mult-{n}",
        about,
        "MIT",
        splits,
        chain_field="cot",
        chain_split="whole",
        answer_kind="digits",
        generator=f"mult-{n}",
    )


CATALOG: tuple[DatasetInfo, ...] = (
    DatasetInfo("gsm8k", "GSM8K, the 6,973 training questions that are no validation question of GSM8K-Aug", "MIT", GSM8K,
        "openai/gsm8k", "main", "gsm8k"),
    DatasetInfo("gsm8k-nl", "GSM8K with its solutions in words as chains", "MIT", GSM8K, "openai/gsm8k", "main", "gsm8k",
        "rationale"),
    DatasetInfo("gsm8k-aug", "GSM8K-Aug: questions and equations by GPT-4; its test is GSM8K's", "MIT", AUG,
        "whynlp/gsm8k-aug"),
    DatasetInfo("gsm8k-aug-subset", "the 2.7 % of GSM8K-Aug's training rows that the local files hold", "MIT",
        {"train": DatasetSplit(10432, SUBSET)}),
    DatasetInfo("gsm8k-aug-nl", "GSM8K-Aug with chains in words", "MIT",
        {"train": DatasetSplit(385620, hub_split="train"), "valid": DatasetSplit(500, hub_split="validation"), "test": DatasetSplit(1319, hub_split="test")},
        "whynlp/gsm8k-aug-nl"),
    DatasetInfo("zen-E/GSM8k-Aug", "GSM8K-Aug as CODI publishes it", "MIT", {"train": DatasetSplit(None, hub_split="train")},
        "zen-E/GSM8k-Aug", None, "zen-aug"),
    DatasetInfo("zen-E/GSM8k-Aug-NL", "GSM8K-Aug with chains in words as CODI publishes it", "MIT",
        {"train": DatasetSplit(None, hub_split="train")}, "zen-E/GSM8k-Aug-NL", None, "zen-nl"),
    DatasetInfo("gsm-hard", "GSM-Hard: GSM8K's test with large numbers, 329 questions unchanged", "Apache-2.0",
        {"test": DatasetSplit(1319, HARD, "train")}, "juyoung-trl/gsm-hard", None, "gsm-hard", None),
    DatasetInfo("svamp-300", "SVAMP as the hub splits it, 700 and 300", "MIT",
        {"train": DatasetSplit(700, hub_split="train"), "test": DatasetSplit(300, hub_split="test")}, "ChilleD/SVAMP", None, "svamp"),
    DatasetInfo("svamp", "SVAMP, all 1,000 questions as CODI takes them", "MIT", {"test": DatasetSplit(1000, SVAMP, "train+test")},
        "ChilleD/SVAMP", None, "svamp"),
    DatasetInfo("multiarith-180", "MultiArith as the hub splits it, 420 and 180", "MIT",
        {"train": DatasetSplit(420, hub_split="train"), "test": DatasetSplit(180, hub_split="test")}, "ChilleD/MultiArith", None, "multiarith"),
    DatasetInfo("multiarith", "MultiArith, all 600 questions", "MIT", {"test": DatasetSplit(600, MULTIARITH, "train+test")},
        "ChilleD/MultiArith", None, "multiarith"),
    DatasetInfo("aggregate", "one- and two-step questions of older sets, without the 108 that MultiArith has", "MIT",
        {"train": DatasetSplit(1492, AGGREGATE, required_mark=("in_multiarith", False), marked_rows=1384)}),
    DatasetInfo("gsm-union", "gsm8k-aug-subset, gsm8k and aggregate, each question once", "MIT",
        {"train": DatasetSplit(18588)}, members=("gsm8k-aug-subset", "gsm8k", "aggregate")),
    *(multiplication_dataset(n) for n in PRODUCTS),
    DatasetInfo("prosqa", "ProsQA: which of two a chain of facts leads to", "MIT", PROSQA, answer_kind="text", generator="prosqa"),
    DatasetInfo("prontoqa", "ProntoQA of 5 hops, true or false", "MIT", {"test": DatasetSplit(500, PRONTOQA)}, answer_kind="text"),
)  # fmt: skip
DATASETS: Mapping[str, DatasetInfo] = {found.name: found for found in CATALOG}
GSM8K_AUG_TRAIN_SHA256 = (  # iCoT's train.txt: all 385,620 training rows of GSM8K-Aug
    "0a3909a9e7d8d2f7ad6b8c7b5608aa744988d835f9bf874d4cf06ca77df6bf8c"
)


def find_dataset(asked: str) -> DatasetInfo | None:
    """The set of a name, or of a name on the hub: of several made of one the first, which has the hub's own splits."""
    name = split_name(asked)[0]
    return DATASETS.get(name) or next(
        (found for found in CATALOG if found.hub_repo and found.hub_repo.lower() == name.lower()), None
    )


def get_dataset(asked: str) -> DatasetInfo:
    """The set of a name, ours or the hub's. Raises `BadInput` with the nearest name."""
    found, name = find_dataset(asked), split_name(asked)[0]
    if found is None:
        endings = ", ".join(ROW_FILE_SUFFIXES)
        raise InputError(
            f"no data set {name}; {suggest_dataset(name) or f'laconic data list has them; a file ends in {endings}'}"
        )
    return found


def suggest_dataset(name: str) -> str:
    """Which name of ours or of the hub may have been meant, as a question; empty if none is near."""
    there = {other.lower(): other for found in CATALOG for other in (found.name, found.hub_repo) if other}
    near = name.lower() if name.lower() in there else closest_word(name.lower(), list(there))
    return f"did you mean {there[near]}?" if near else ""


def split_name(asked: str) -> tuple[str, str | None]:
    """NAME:SPLIT as name and split, by our word for it."""
    name, colon, split = asked.partition(":")
    return name, SPLIT_NAMES.get(split, split) if colon else None


def iter_whole_split_files() -> Iterator[tuple[str, str]]:
    """Each file's SHA-256, and the set and split that are all of it; of several the first in the list comes last."""
    for found in reversed(CATALOG):
        for part, split in found.splits.items():
            if split.file and split.required_mark is None:
                yield split.file.sha256, f"{found.name}:{part}"
