"""Utterances and what they are after: CLINC150 and Banking77 as streams of tasks, each of classes never met before.

CLINC150: Larson et al. 2019 (arXiv:1909.02027); Banking77: Casanueva et al. 2020 (arXiv:2003.04807). A line is
`utterance → words of the label`. Training rows whose text is also held out are left out: the published splits overlap.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from laconic import rng
from laconic.config.data import SplitName
from laconic.data.documents.load import parse_split
from laconic.data.parquet_and_hub import load_hub_split
from laconic.data.strict_jsonl import read_rows, require_text
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance, TokenIds
from laconic.models.nearest import closest_word

ARROW, LINE_END = "→", "\n"
ACCEPTED_FIELDS = "a row has text, label and split"
CLASS_ORDER_KEY, VALIDATION_KEY, LIMIT_KEY, LINE_ORDER_KEY = (
    1,
    2,
    3,
    100,
)  # what orders are drawn for; lines from 100 on, a number a task
VALIDATION_DIVISOR = 10


@dataclass(frozen=True)
class IntentDatasetInfo:
    """A set of labelled utterances: its file below a folder of sets, its name on the hub, how many classes a task has.

    `apart` is the label of what belongs to no class.
    """

    name: str
    file: str
    licence: str
    classes_per_task: int
    hub_repo: str | None = None
    hub_config: str | None = None
    splits: tuple[tuple[SplitName, str], ...] = (("train", "train"), ("test", "test"))
    out_of_scope_label: str | None = None


INTENT_CATALOG = (
    IntentDatasetInfo("clinc150", "clinc150/clinc150.jsonl", "CC BY 3.0", 15, "clinc/clinc_oos", "plus",
        (("train", "train"), ("valid", "validation"), ("test", "test")), "oos"),
    IntentDatasetInfo("banking77", "banking77/banking77.jsonl", "CC BY 4.0", 11, "PolyAI/banking77"),
    IntentDatasetInfo("dbpedia14", "dbpedia14/dbpedia14-sample.jsonl", "CC BY-SA", 2),
)  # fmt: skip
INTENT_DATASETS: Mapping[str, IntentDatasetInfo] = {found.name: found for found in INTENT_CATALOG}


class Utterance(NamedTuple):
    """A text, its label as published, and the split it belongs to."""

    text: str
    label: str
    part: SplitName


class IntentRows(NamedTuple):
    """The rows of a set by split, no text in two of them, and how many training rows were left out for that."""

    train: list[Utterance]
    valid: list[Utterance]
    test: list[Utterance]
    num_dropped: int


def parse_utterance(row: dict[str, Any], text: str, name: str) -> Utterance:
    """A row. Raises `Fault`."""
    part = parse_split(row, text)
    return Utterance(
        require_text(row, "text", text, ACCEPTED_FIELDS),
        require_text(row, "label", text, ACCEPTED_FIELDS),
        part or "train",
    )


def get_intent_dataset(name: str) -> IntentDatasetInfo:
    """The set of a name. Raises `BadInput` with the nearest one."""
    if name not in INTENT_DATASETS:
        near = closest_word(name, list(INTENT_DATASETS))
        meant = f"did you mean {near}?" if near else f"there are {', '.join(INTENT_DATASETS)}"
        raise InputError(f"no set of classes {name}; {meant}")
    return INTENT_DATASETS[name]


def load_intents(name: str, where: str | Path | None = None) -> IntentRows:
    """A set by name: from a file of rows, from the folder that holds the sets, or with None from the hub.

    Raises `BadInput` for an unknown set, what is not there, and rows of fewer than two classes.
    """
    known = get_intent_dataset(name)
    if where is None:
        rows = load_hub_utterances(known)
    else:
        path = Path(where)
        rows = read_rows(path / known.file if path.is_dir() else path, parse_utterance)[0]
    return deduplicate_splits([row for row in rows if row.label != known.out_of_scope_label], name)


def load_hub_utterances(info: IntentDatasetInfo) -> list[Utterance]:
    """The rows of the hub's splits. Raises `BadInput`."""
    if info.hub_repo is None:
        raise InputError(f"{info.name}: this sample is on no hub; give the folder that holds {info.file}")
    found: list[Utterance] = []
    for part, split in info.splits:
        for row in load_hub_split(info.hub_repo, info.hub_config, split, None, class_names=True).rows:
            found.append(Utterance(row["text"], row["intent" if "intent" in row else "label"], part))
    return found


def normalise_text(text: str) -> str:
    """What two texts are compared by: lower case, runs of what is no letter or digit as one space."""
    return " ".join(re.findall(r"\w+", text.lower()))


def label_to_text(label: str) -> str:
    """The words of a class: its published name without underscores and marks."""
    return " ".join(re.findall(r"\w+", label.replace("_", " ").lower()))


def deduplicate_splits(rows: Sequence[Utterance], name: str) -> IntentRows:
    """The rows by split. One whose text, compared as `plain` says, stands in a later split is left out of its own.

    Raises `BadInput` for fewer than two classes, a class without training or test rows, names of the same words.
    """
    by: dict[SplitName, list[Utterance]] = {"train": [], "valid": [], "test": []}
    held: set[str] = set()
    for part in ("test", "valid", "train"):
        own = [row for row in rows if row.part == part and normalise_text(row.text) not in held]
        by[part] = own
        held |= {normalise_text(row.text) for row in own}
    labels = {row.label for row in rows}
    if len(labels) < 2:
        raise InputError(f"{name}: {len(labels)} class in {len(rows):,} rows; give two or more")
    for part in ("train", "test"):
        none = sorted(labels - {row.label for row in by[part]})
        if none:
            raise InputError(f"{name}: class {none[0]} has no {part} row; give each class some, with their split")
    if len({label_to_text(label) for label in labels}) < len(labels):
        raise InputError(f"{name}: two labels have the same words; rename one of them")
    return IntentRows(by["train"], by["valid"], by["test"], len(rows) - sum(map(len, by.values())))


def use_validation_split(found: IntentRows) -> IntentRows:
    """The rows on which options are chosen: `valid` in the place of test, where there is none a tenth of train.

    The test rows are gone, so that nothing can be chosen on them.
    """
    if found.valid:
        return found._replace(test=found.valid, valid=[])
    held: set[int] = set()
    for rows in group_by_label(found.train).values():
        held |= {rows[i] for i in permutation(len(rows), 0, VALIDATION_KEY)[: max(1, len(rows) // VALIDATION_DIVISOR)]}
    train = [row for i, row in enumerate(found.train) if i not in held]
    return found._replace(train=train, test=[found.train[i] for i in sorted(held)])


def group_by_label(rows: Iterable[Utterance]) -> dict[str, list[int]]:
    """The places of each label's rows, labels in order."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.label, []).append(i)
    return dict(sorted(found.items()))


def permutation(n: int, seed: int, purpose: int) -> list[int]:
    """The numbers below n in the order of a seed."""
    return rng.permuted_index(seed, purpose, np.arange(n), n).tolist() if n else []


def build_stream(
    intents: IntentRows,
    tokenizer: Tokenizer,
    seed: int,
    *,
    name: str,
    classes_per_task: int | None = None,
    max_test_per_class: int | None = None,
    max_train_per_class: int | None = None,
    part: Literal["test", "valid"] = "test",
) -> ClassIncrementalStream:
    """A stream in the order of a seed: tasks of `task` classes, slices of the shuffled classes; lines shuffled in each.

    `rows` limits the test rows of a class and `examples` its training rows, the same ones for every seed. `part`
    "valid" is for choosing. Raises `BadInput` where classes do not make whole tasks, or the tokenizer joins the arrow
    with what follows it.
    """
    intents = use_validation_split(intents) if part == "valid" else intents
    labels = list(group_by_label([*intents.train, *intents.test]))
    size = classes_per_task or get_intent_dataset(name).classes_per_task
    if size < 1 or len(labels) % size or len(labels) == size:
        raise InputError(f"{name}: {len(labels)} classes in tasks of {size}; take a number that divides them into two")
    shuffled = permutation(len(labels), seed, CLASS_ORDER_KEY)
    tasks = [tuple(shuffled[i : i + size]) for i in range(0, len(labels), size)]
    number = {label: i for i, label in enumerate(labels)}
    learned, asked = (
        limit_per_label(intents.train, max_train_per_class),
        limit_per_label(intents.test, max_test_per_class),
    )
    said = PromptFormat.from_tokenizer(tokenizer)
    train: list[tuple[LabelledUtterance, ...]] = []
    test: list[tuple[LabelledUtterance, ...]] = []
    for i, own in enumerate(tasks):
        mine = [row for row in learned if number[row.label] in own]
        mine = [mine[j] for j in permutation(len(mine), seed, LINE_ORDER_KEY + i)]
        train.append(tuple(LabelledUtterance(said.encode_prompt(row.text), number[row.label]) for row in mine))
        test.append(
            tuple(
                LabelledUtterance(said.encode_prompt(row.text), number[row.label])
                for row in asked
                if number[row.label] in own
            )
        )
    told = tuple(label_to_text(label) for label in labels)
    return ClassIncrementalStream(name, seed, told, tuple(map(said.encode_label, told)), tuple(tasks), tuple(train), tuple(test),
                 said.start_ids, said.arrow_ids, said.line_end_ids)  # fmt: skip


def limit_per_label(rows: Sequence[Utterance], max_per_label: int | None) -> list[Utterance]:
    """At most `n` rows of each label, always the same ones, in their order."""
    if max_per_label is None:
        return list(rows)
    kept = {
        own[i] for own in group_by_label(rows).values() for i in permutation(len(own), 0, LIMIT_KEY)[:max_per_label]
    }
    return [row for i, row in enumerate(rows) if i in kept]


class PromptFormat(NamedTuple):
    """How a tokenizer says a line: what begins a document, the arrow, the end of a line."""

    tokenizer: Tokenizer
    start_ids: TokenIds
    arrow_ids: TokenIds
    line_end_ids: TokenIds

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "PromptFormat":
        """Raises `BadInput` for a tokenizer that makes one token of the arrow and what follows."""
        arrow = tokenizer.encode(ARROW, add_special_tokens=False)
        ended = tokenizer.encode(ARROW + LINE_END, add_special_tokens=False)
        if ended[: len(arrow)] != arrow or len(ended) == len(arrow):
            raise InputError(f"{ARROW}: the tokenizer joins it with what follows, or drops the line end; take another")
        last = tuple(ended[len(arrow) :])
        special = next((one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id) if one is not None), None)
        return cls(tokenizer, last if special is None else (special,), tuple(arrow), last)

    def encode_prompt(self, text: str) -> TokenIds:
        """An utterance with the arrow behind it."""
        return tuple(self.tokenizer.encode(f"{text} {ARROW}", add_special_tokens=False))

    def encode_label(self, words: str) -> TokenIds:
        """The words of a label as they follow the arrow."""
        return tuple(self.tokenizer.encode(f"{ARROW} {words}", add_special_tokens=False)[len(self.arrow_ids) :])
