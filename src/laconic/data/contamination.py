"""What must not meet: rows trained on and rows held out, test rows and choices; errors, no advice."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from laconic.core.contract import Example
from laconic.core.errors import BadInput
from laconic.data.sets import known, parted
from laconic.data.settings import Data

CHOOSE = "gsm8k-aug:valid"  # what the papers choose checkpoints on
OURS, THEIRS = "gsm8k-nl", ("gsm8k-aug-nl", "zen-E/GSM8k-Aug-NL")
# Marks of rows that are held out: mark, its value, what such rows are, what to do.
HELD: Sequence[tuple[str, Any, str, str]] = (
    ("icot_split", "valid", "the validation questions of GSM8K-Aug", "data.name = gsm8k is the other 6,973"),
    ("in_multiarith", True, "questions of MultiArith", "data.name = aggregate is the others"),
)

LETTER, WORD = re.compile(r"[^\W\d_]"), re.compile(r"[^\W_]+")
OVER = "or set data.allow_overlap"


def same(question: str) -> str:
    """What two wordings of a question have in common: lower case, all but words as one space; spaces if it has none."""
    return " ".join(WORD.findall(question.lower()) if LETTER.search(question) else question.split())


def refuse_names(how: Data) -> None:
    """What the names alone forbid. Raises `BadInput`."""
    trained = how.name or ()
    for asked in trained:
        split = parted(asked)[1] or "train"
        if split in ("valid", "test"):
            raise BadInput(f"data.name {asked}: {split} rows are not trained on; take a train split")
    if how.valid and parted(how.valid)[1] == "test":
        raise BadInput(f"data.valid {how.valid}: test rows choose nothing; take rows of their own, as {CHOOSE}")
    every = [known(asked) for asked in (*trained, how.valid, how.test) if asked]
    names = {found.name for found in every if found}
    theirs = names & set(THEIRS)
    if OURS in names and theirs:
        raise BadInput(
            f"{OURS} and {min(theirs)}: chains in words of other origin, whose figures do not compare; take one of them"
        )


def refuse_files(how: Data, files: Mapping[str, str]) -> None:
    """A file, by its SHA-256, that is all of a split held out. `files`: what was asked, and which split it is."""
    key, trained = ("data.path", (how.path,)) if how.name is None else ("data.name", how.name)
    for asked, split in files.items():
        part = split.rpartition(":")[2]
        if asked in trained and part in ("valid", "test"):
            raise BadInput(f"{key} {asked} is {split}: {part} rows are not trained on; take a train split")
        if asked == how.valid and part == "test":
            raise BadInput(f"data.valid {asked} is {split}: test rows choose nothing; take rows of their own")


def refuse_marks(asked: str, examples: Iterable[Example], allow: bool) -> None:
    """Rows that their own marks call held out. Raises `BadInput` unless allowed."""
    rows = list(examples)
    for mark, value, what, advice in HELD:
        found = sum(example.flags.get(mark) == value for example in rows)
        if found and not allow:
            raise BadInput(f"{asked}: {found:,} rows are {what} ({mark} = {value}); {advice}, {OVER}")


def refuse_overlap(train: Sequence[Example], held: Sequence[Example], allow: bool = False) -> int:
    """How many training rows ask a question of `held`, as `same` has them. Raises `BadInput` unless allowed."""
    asked = {same(example.question): example.id for example in held}
    found = [(e.id, asked[q]) for e in train if (q := same(e.question)) in asked]
    if found and not allow:
        pairs = ", ".join(f"{ours} = {theirs}" for ours, theirs in found[:3])
        raise BadInput(
            f"{len(found):,} training questions stand in the rows that are held out ({pairs}); "
            "take them out, or set data.allow_overlap, which the report prints"
        )
    return len(found)


def merged(names: Sequence[str], sets: Sequence[Sequence[Example]]) -> tuple[list[Example], list[str]]:
    """The rows of all sets, without questions that an earlier set has; and how many those were."""
    if len(sets) == 1:
        return list(sets[0]), []
    rows, notes, seen, ids = list[Example](), list[str](), set[str](), dict[str, str]()
    for name, examples in zip(names, sets, strict=True):
        asked = [same(example.question) for example in examples]
        new = [example for example, question in zip(examples, asked, strict=True) if question not in seen]
        for example in new:
            if ids.setdefault(example.id, name) != name:
                raise BadInput(f"id {example.id[:60]!r} stands in {ids[example.id]} and in {name}; rows need their own")
        gone = len(examples) - len(new)
        if gone:
            notes.append(f"{name}: {gone:,} rows left out, whose questions stand in an earlier set")
        seen.update(asked)
        rows += new
    return rows, notes
