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

from laconic.core import keyed
from laconic.core.errors import BadInput
from laconic.core.nearest import closest
from laconic.core.tasks import Ids, Item, Tasks
from laconic.data.records import read_records, text_of
from laconic.data.settings import Part
from laconic.data.tables import hub
from laconic.data.text import part_of
from laconic.data.tokens import Tokenizer

ARROW, END = "→", "\n"
ACCEPTED = "a row has text, label and split"
CLASSES, HELD, FEW, LINES = 1, 2, 3, 100  # what orders are drawn for; lines from 100 on, a number a task
TENTH = 10


@dataclass(frozen=True)
class Set:
    """A set of labelled utterances: its file below a folder of sets, its name on the hub, how many classes a task has.

    `apart` is the label of what belongs to no class.
    """

    name: str
    file: str
    licence: str
    task: int
    repo: str | None = None
    config: str | None = None
    splits: tuple[tuple[Part, str], ...] = (("train", "train"), ("test", "test"))
    apart: str | None = None


KNOWN = (
    Set("clinc150", "clinc150/clinc150.jsonl", "CC BY 3.0", 15, "clinc/clinc_oos", "plus",
        (("train", "train"), ("valid", "validation"), ("test", "test")), "oos"),
    Set("banking77", "banking77/banking77.jsonl", "CC BY 4.0", 11, "PolyAI/banking77"),
    Set("dbpedia14", "dbpedia14/dbpedia14-sample.jsonl", "CC BY-SA", 2),
)  # fmt: skip
SETS: Mapping[str, Set] = {found.name: found for found in KNOWN}


class Utterance(NamedTuple):
    """A text, its label as published, and the split it belongs to."""

    text: str
    label: str
    part: Part


class Intents(NamedTuple):
    """The rows of a set by split, no text in two of them, and how many training rows were left out for that."""

    train: list[Utterance]
    valid: list[Utterance]
    test: list[Utterance]
    left_out: int


def utterance(row: dict[str, Any], text: str, name: str) -> Utterance:
    """A row. Raises `Fault`."""
    part = part_of(row, text)
    return Utterance(text_of(row, "text", text, ACCEPTED), text_of(row, "label", text, ACCEPTED), part or "train")


def named(name: str) -> Set:
    """The set of a name. Raises `BadInput` with the nearest one."""
    if name not in SETS:
        near = closest(name, list(SETS))
        meant = f"did you mean {near}?" if near else f"there are {', '.join(SETS)}"
        raise BadInput(f"no set of classes {name}; {meant}")
    return SETS[name]


def read_intents(name: str, where: str | Path | None = None) -> Intents:
    """A set by name: from a file of rows, from the folder that holds the sets, or with None from the hub.

    Raises `BadInput` for an unknown set, what is not there, and rows of fewer than two classes.
    """
    known = named(name)
    if where is None:
        rows = from_hub(known)
    else:
        path = Path(where)
        rows = read_records(path / known.file if path.is_dir() else path, utterance)[0]
    return parted([row for row in rows if row.label != known.apart], name)


def from_hub(known: Set) -> list[Utterance]:
    """The rows of the hub's splits. Raises `BadInput`."""
    if known.repo is None:
        raise BadInput(f"{known.name}: this sample is on no hub; give the folder that holds {known.file}")
    found: list[Utterance] = []
    for part, split in known.splits:
        for row in hub(known.repo, known.config, split, None, names=True).rows:
            found.append(Utterance(row["text"], row["intent" if "intent" in row else "label"], part))
    return found


def plain(text: str) -> str:
    """What two texts are compared by: lower case, runs of what is no letter or digit as one space."""
    return " ".join(re.findall(r"\w+", text.lower()))


def words_of(label: str) -> str:
    """The words of a class: its published name without underscores and marks."""
    return " ".join(re.findall(r"\w+", label.replace("_", " ").lower()))


def parted(rows: Sequence[Utterance], name: str) -> Intents:
    """The rows by split. One whose text, compared as `plain` says, stands in a later split is left out of its own.

    Raises `BadInput` for fewer than two classes, a class without training or test rows, names of the same words.
    """
    by: dict[Part, list[Utterance]] = {"train": [], "valid": [], "test": []}
    held: set[str] = set()
    for part in ("test", "valid", "train"):
        own = [row for row in rows if row.part == part and plain(row.text) not in held]
        by[part] = own
        held |= {plain(row.text) for row in own}
    labels = {row.label for row in rows}
    if len(labels) < 2:
        raise BadInput(f"{name}: {len(labels)} class in {len(rows):,} rows; give two or more")
    for part in ("train", "test"):
        none = sorted(labels - {row.label for row in by[part]})
        if none:
            raise BadInput(f"{name}: class {none[0]} has no {part} row; give each class some, with their split")
    if len({words_of(label) for label in labels}) < len(labels):
        raise BadInput(f"{name}: two labels have the same words; rename one of them")
    return Intents(by["train"], by["valid"], by["test"], len(rows) - sum(map(len, by.values())))


def choosing(found: Intents) -> Intents:
    """The rows on which options are chosen: `valid` in the place of test, where there is none a tenth of train.

    The test rows are gone, so that nothing can be chosen on them.
    """
    if found.valid:
        return found._replace(test=found.valid, valid=[])
    held: set[int] = set()
    for rows in by_label(found.train).values():
        held |= {rows[i] for i in order(len(rows), 0, HELD)[: max(1, len(rows) // TENTH)]}
    train = [row for i, row in enumerate(found.train) if i not in held]
    return found._replace(train=train, test=[found.train[i] for i in sorted(held)])


def by_label(rows: Iterable[Utterance]) -> dict[str, list[int]]:
    """The places of each label's rows, labels in order."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.label, []).append(i)
    return dict(sorted(found.items()))


def order(n: int, seed: int, purpose: int) -> list[int]:
    """The numbers below n in the order of a seed."""
    return keyed.index(seed, purpose, np.arange(n), n).tolist() if n else []


def tasks_of(
    found: Intents,
    tokenizer: Tokenizer,
    seed: int,
    *,
    name: str,
    task: int | None = None,
    rows: int | None = None,
    examples: int | None = None,
    part: Literal["test", "valid"] = "test",
) -> Tasks:
    """A stream in the order of a seed: tasks of `task` classes, slices of the shuffled classes; lines shuffled in each.

    `rows` limits the test rows of a class and `examples` its training rows, the same ones for every seed. `part`
    "valid" is for choosing. Raises `BadInput` where classes do not make whole tasks, or the tokenizer joins the arrow
    with what follows it.
    """
    found = choosing(found) if part == "valid" else found
    labels = list(by_label([*found.train, *found.test]))
    size = task or named(name).task
    if size < 1 or len(labels) % size or len(labels) == size:
        raise BadInput(f"{name}: {len(labels)} classes in tasks of {size}; take a number that divides them into two")
    shuffled = order(len(labels), seed, CLASSES)
    tasks = [tuple(shuffled[i : i + size]) for i in range(0, len(labels), size)]
    number = {label: i for i, label in enumerate(labels)}
    learned, asked = limited(found.train, examples), limited(found.test, rows)
    said = Wording.of(tokenizer)
    train: list[tuple[Item, ...]] = []
    test: list[tuple[Item, ...]] = []
    for i, own in enumerate(tasks):
        mine = [row for row in learned if number[row.label] in own]
        mine = [mine[j] for j in order(len(mine), seed, LINES + i)]
        train.append(tuple(Item(said.prompt(row.text), number[row.label]) for row in mine))
        test.append(tuple(Item(said.prompt(row.text), number[row.label]) for row in asked if number[row.label] in own))
    told = tuple(words_of(label) for label in labels)
    return Tasks(name, seed, told, tuple(map(said.label, told)), tuple(tasks), tuple(train), tuple(test),
                 said.first, said.arrow, said.last)  # fmt: skip


def limited(rows: Sequence[Utterance], n: int | None) -> list[Utterance]:
    """At most `n` rows of each label, always the same ones, in their order."""
    if n is None:
        return list(rows)
    kept = {own[i] for own in by_label(rows).values() for i in order(len(own), 0, FEW)[:n]}
    return [row for i, row in enumerate(rows) if i in kept]


class Wording(NamedTuple):
    """How a tokenizer says a line: what begins a document, the arrow, the end of a line."""

    tokenizer: Tokenizer
    first: Ids
    arrow: Ids
    last: Ids

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Wording":
        """Raises `BadInput` for a tokenizer that makes one token of the arrow and what follows."""
        arrow = tokenizer.encode(ARROW, special=False)
        ended = tokenizer.encode(ARROW + END, special=False)
        if ended[: len(arrow)] != arrow or len(ended) == len(arrow):
            raise BadInput(f"{ARROW}: the tokenizer joins it with what follows, or drops the line end; take another")
        last = tuple(ended[len(arrow) :])
        special = next((one for one in (tokenizer.bos, tokenizer.eos) if one is not None), None)
        return cls(tokenizer, last if special is None else (special,), tuple(arrow), last)

    def prompt(self, text: str) -> Ids:
        """An utterance with the arrow behind it."""
        return tuple(self.tokenizer.encode(f"{text} {ARROW}", special=False))

    def label(self, words: str) -> Ids:
        """The words of a label as they follow the arrow."""
        return tuple(self.tokenizer.encode(f"{ARROW} {words}", special=False)[len(self.arrow) :])
