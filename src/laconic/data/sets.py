"""The data sets of the papers by name: splits and their sizes, files, where the hub has them.

Rows and SHA-256 of files are those of the data's README, whose licences hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from laconic.core.errors import BadInput
from laconic.core.nearest import closest
from laconic.data.settings import FILES, Part

Answer = Literal["number", "digits", "text"]
SPLITS: Mapping[str, Part] = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


@dataclass(frozen=True)
class File:
    """A file below `data.root`."""

    path: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: how many rows it has as published, and which of them count.

    `mark` is a mark that rows must have, and `rows` how many have it. A `file` may hold fewer than `published`: then it
    is a part of the set. `hub` is what the hub calls the split, in the slice syntax of `datasets`.
    """

    published: int | None
    file: File | None = None
    hub: str | None = None
    mark: tuple[str, Any] | None = None
    marked: int | None = None

    @property
    def rows(self) -> int | None:
        """Rows of the whole split, None where nobody says."""
        return self.published if self.marked is None else self.marked


@dataclass(frozen=True)
class Set:
    """A data set: `chain` is the field of its chain, cut as `cut` says; `columns` how the hub's become ours.

    A set of `members` is these, merged.
    """

    name: str
    about: str
    licence: str
    splits: Mapping[Part, Split]
    repo: str | None = None
    config: str | None = None
    columns: Literal["ours", "gsm8k", "zen-aug", "zen-nl", "gsm-hard", "svamp", "multiarith"] = "ours"
    chain: Literal["steps", "cot", "rationale"] | None = "steps"
    cut: Literal["lines", "sentences", "spaces", "whole"] = "lines"
    answer: Answer = "number"
    members: tuple[str, ...] = ()
    made: str | None = None  # what laconic data make calls more rows of its kind


GSM8K: Mapping[Part, Split] = {
    "train": Split(
        7473, File("gsm8k/train.jsonl", 7473, "1ebe58ba54953f5a9ad647432ad0059bd500fe0143f1f24332709b4b82762554"),
        "train", ("icot_split", "train"), 6973,
    ),
    "valid": Split(
        7473, File("gsm8k/train.jsonl", 7473, "1ebe58ba54953f5a9ad647432ad0059bd500fe0143f1f24332709b4b82762554"),
        "train", ("icot_split", "valid"), 500,
    ),
    "test": Split(
        1319, File("gsm8k/test.jsonl", 1319, "266837a2e0c77b63c430308bb468f9c878a6a4bfdaf8ff5c2e3052b096416f92"),
        "test",
    ),
}  # fmt: skip
SUBSET = File("gsm8k-aug/train-subset.jsonl", 10432, "e54bcd7b127b18e01fada14cc3029487ea616a8f3bb6057c9bea4da541ef1a97")
AUG: Mapping[Part, Split] = {
    "train": Split(385620, SUBSET, "train"),
    "valid": Split(
        500, File("gsm8k-aug/valid.jsonl", 500, "62d66a76ccecb9f210d8fbd9ac040a86bb4d000df18e0abe2a90683302216adb"),
        "validation",
    ),
    "test": Split(
        1319, File("gsm8k-aug/test.jsonl", 1319, "91125686ed7043e63ce66c23966c066ba9a43abb7d5c177a461133218ea236b9"),
        "test",
    ),
}  # fmt: skip
HARD = File("gsm-hard/test.jsonl", 1319, "b9d0407707ccdbd4567e04899265a349465e957b1184a48bdd6df27aea104c98")
SVAMP = File("svamp/test.jsonl", 1000, "eb4c9107c5edf408c40cb71c5e8759aae29677324859b5c3da04f779f5942810")
MULTIARITH = File("multiarith/test.jsonl", 600, "587d1b1a826bc025e9e3eafa0fcfecd5a2f0bc82e8b271104ff1f1b7192bea1f")
AGGREGATE = File("aggregate/train.jsonl", 1492, "86e6fd18333442ea1d5b9970fce3145044e805edab4030827ea3e885e45020a9")
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
PROSQA: Mapping[Part, Split] = {
    "valid": Split(
        300, File("prosqa/valid.jsonl", 300, "ae615b4078bd2051e3ab38a9c5647b3b13e69ac7e08598b8c6daddd0b0eaa63c")
    ),
    "test": Split(
        500, File("prosqa/test.jsonl", 500, "d64d940d0e0b7dce63a717da47655d4b670ad889633b98e08061adba173969d4")
    ),
}
PRONTOQA = File("prontoqa/test.jsonl", 500, "2b69373fc068a0fbf669e71e3ffbb19c6667dd02d090bd6a0aa7bcc716e0921f")


def multiplied(n: int) -> Set:
    """Products of two numbers of n digits; training pairs are generated."""
    parts: tuple[Part, ...] = ("valid", "test")
    files = [File(f"multiplication/{n}x{n}-{part}.jsonl", 1000, PRODUCTS[n][i]) for i, part in enumerate(parts)]
    splits: dict[Part, Split] = {part: Split(1000, file) for part, file in zip(parts, files, strict=True)}
    about = f"iCoT's products of {n} by {n} digits, least significant first"
    return Set(f"mult-{n}", about, "MIT", splits, chain="cot", cut="whole", answer="digits", made=f"mult-{n}")


KNOWN: tuple[Set, ...] = (
    Set("gsm8k", "GSM8K, the 6,973 training questions that are no validation question of GSM8K-Aug", "MIT", GSM8K,
        "openai/gsm8k", "main", "gsm8k"),
    Set("gsm8k-nl", "GSM8K with its solutions in words as chains", "MIT", GSM8K, "openai/gsm8k", "main", "gsm8k",
        "rationale"),
    Set("gsm8k-aug", "GSM8K-Aug: questions and equations by GPT-4; its test is GSM8K's", "MIT", AUG,
        "whynlp/gsm8k-aug"),
    Set("gsm8k-aug-subset", "the 2.7 % of GSM8K-Aug's training rows that the local files hold", "MIT",
        {"train": Split(10432, SUBSET)}),
    Set("gsm8k-aug-nl", "GSM8K-Aug with chains in words", "MIT",
        {"train": Split(385620, hub="train"), "valid": Split(500, hub="validation"), "test": Split(1319, hub="test")},
        "whynlp/gsm8k-aug-nl"),
    Set("zen-E/GSM8k-Aug", "GSM8K-Aug as CODI publishes it", "MIT", {"train": Split(None, hub="train")},
        "zen-E/GSM8k-Aug", None, "zen-aug"),
    Set("zen-E/GSM8k-Aug-NL", "GSM8K-Aug with chains in words as CODI publishes it", "MIT",
        {"train": Split(None, hub="train")}, "zen-E/GSM8k-Aug-NL", None, "zen-nl"),
    Set("gsm-hard", "GSM-Hard: GSM8K's test with large numbers, 329 questions unchanged", "Apache-2.0",
        {"test": Split(1319, HARD, "train")}, "juyoung-trl/gsm-hard", None, "gsm-hard", None),
    Set("svamp-300", "SVAMP as the hub splits it, 700 and 300", "MIT",
        {"train": Split(700, hub="train"), "test": Split(300, hub="test")}, "ChilleD/SVAMP", None, "svamp"),
    Set("svamp", "SVAMP, all 1,000 questions as CODI takes them", "MIT", {"test": Split(1000, SVAMP, "train+test")},
        "ChilleD/SVAMP", None, "svamp"),
    Set("multiarith-180", "MultiArith as the hub splits it, 420 and 180", "MIT",
        {"train": Split(420, hub="train"), "test": Split(180, hub="test")}, "ChilleD/MultiArith", None, "multiarith"),
    Set("multiarith", "MultiArith, all 600 questions", "MIT", {"test": Split(600, MULTIARITH, "train+test")},
        "ChilleD/MultiArith", None, "multiarith"),
    Set("aggregate", "one- and two-step questions of older sets, without the 108 that MultiArith has", "MIT",
        {"train": Split(1492, AGGREGATE, mark=("in_multiarith", False), marked=1384)}),
    Set("gsm-union", "gsm8k-aug-subset, gsm8k and aggregate, each question once", "MIT",
        {"train": Split(18588)}, members=("gsm8k-aug-subset", "gsm8k", "aggregate")),
    *(multiplied(n) for n in PRODUCTS),
    Set("prosqa", "ProsQA: which of two a chain of facts leads to", "MIT", PROSQA, answer="text", made="prosqa"),
    Set("prontoqa", "ProntoQA of 5 hops, true or false", "MIT", {"test": Split(500, PRONTOQA)}, answer="text"),
)  # fmt: skip
SETS: Mapping[str, Set] = {found.name: found for found in KNOWN}
PUBLISHED = (  # iCoT's train.txt: all 385,620 training rows of GSM8K-Aug
    "0a3909a9e7d8d2f7ad6b8c7b5608aa744988d835f9bf874d4cf06ca77df6bf8c"
)


def known(asked: str) -> Set | None:
    """The set of a name, or of a name on the hub: of several made of one the first, which has the hub's own splits."""
    name = parted(asked)[0]
    return SETS.get(name) or next((found for found in KNOWN if found.repo and found.repo.lower() == name.lower()), None)


def named(asked: str) -> Set:
    """The set of a name, ours or the hub's. Raises `BadInput` with the nearest name."""
    found, name = known(asked), parted(asked)[0]
    if found is None:
        endings = ", ".join(FILES)
        raise BadInput(f"no data set {name}; {meant(name) or f'laconic data list has them; a file ends in {endings}'}")
    return found


def meant(name: str) -> str:
    """Which name of ours or of the hub may have been meant, as a question; empty if none is near."""
    there = {other.lower(): other for found in KNOWN for other in (found.name, found.repo) if other}
    near = name.lower() if name.lower() in there else closest(name.lower(), list(there))
    return f"did you mean {there[near]}?" if near else ""


def parted(asked: str) -> tuple[str, str | None]:
    """NAME:SPLIT as name and split, by our word for it."""
    name, colon, split = asked.partition(":")
    return name, SPLITS.get(split, split) if colon else None


def files() -> Iterator[tuple[str, str]]:
    """Each file's SHA-256, and the set and split that are all of it; of several the first in the list comes last."""
    for found in reversed(KNOWN):
        for part, split in found.splits.items():
            if split.file and split.mark is None:
                yield split.file.sha256, f"{found.name}:{part}"
