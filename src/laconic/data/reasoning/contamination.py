"""What must not meet: rows trained on and rows held out, test rows and choices; errors, no advice."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.catalog import find_dataset, split_name
from laconic.errors import InputError

USUAL_VALIDATION_SET = "gsm8k-aug:valid"  # what the papers choose checkpoints on
GSM8K_SOLUTIONS, GPT4_SOLUTIONS = "gsm8k-nl", ("gsm8k-aug-nl", "zen-E/GSM8k-Aug-NL")
# Marks of rows that are held out: mark, its value, what such rows are, what to do.
HELD_OUT_MARKS: Sequence[tuple[str, Any, str, str]] = (
    ("icot_split", "valid", "the validation questions of GSM8K-Aug", "data.name = gsm8k is the other 6,973"),
    ("in_multiarith", True, "questions of MultiArith", "data.name = aggregate is the others"),
)

LETTER_PATTERN, WORD_PATTERN = re.compile(r"[^\W\d_]"), re.compile(r"[^\W_]+")
ALLOW_OVERLAP_HINT = "or set data.allow_contamination"


def normalise_question(question: str) -> str:
    """What two wordings of a question have in common: lower case, all but words as one space; spaces if it has none."""
    return " ".join(WORD_PATTERN.findall(question.lower()) if LETTER_PATTERN.search(question) else question.split())


def check_dataset_names(config: DataConfig) -> None:
    """What the names alone forbid. Raises `BadInput`."""
    trained = config.name or ()
    for asked in trained:
        split = split_name(asked)[1] or "train"
        if split in ("valid", "test"):
            raise InputError(f"data.name {asked}: {split} rows are not trained on; take a train split")
    if config.valid and split_name(config.valid)[1] == "test":
        raise InputError(
            f"data.valid {config.valid}: test rows choose nothing; take rows of their own, as {USUAL_VALIDATION_SET}"
        )
    every = [find_dataset(asked) for asked in (*trained, config.valid, config.test) if asked]
    names = {found.name for found in every if found}
    theirs = names & set(GPT4_SOLUTIONS)
    if GSM8K_SOLUTIONS in names and theirs:
        raise InputError(
            f"{GSM8K_SOLUTIONS} and {min(theirs)}: chains in words of other origin, whose figures do not compare; take one of them"
        )


def check_known_files(config: DataConfig, files: Mapping[str, str]) -> None:
    """A file, by its SHA-256, that is all of a split held out. `files`: what was asked, and which split it is."""
    key, trained = ("data.path", (config.path,)) if config.name is None else ("data.name", config.name)
    for asked, split in files.items():
        part = split.rpartition(":")[2]
        if asked in trained and part in ("valid", "test"):
            raise InputError(f"{key} {asked} is {split}: {part} rows are not trained on; take a train split")
        if asked == config.valid and part == "test":
            raise InputError(f"data.valid {asked} is {split}: test rows choose nothing; take rows of their own")


def check_marks(name: str, examples: Iterable[ReasoningExample], allow_overlap: bool) -> None:
    """Rows that their own marks call held out. Raises `BadInput` unless allowed."""
    rows = list(examples)
    for mark, value, what, advice in HELD_OUT_MARKS:
        found = sum(example.metadata.get(mark) == value for example in rows)
        if found and not allow_overlap:
            raise InputError(f"{name}: {found:,} rows are {what} ({mark} = {value}); {advice}, {ALLOW_OVERLAP_HINT}")


def check_overlap(
    train: Sequence[ReasoningExample], held_out: Sequence[ReasoningExample], allow_overlap: bool = False
) -> int:
    """How many training rows ask a question of `held`, as `same` has them. Raises `BadInput` unless allowed."""
    asked = {normalise_question(example.question): example.id for example in held_out}
    found = [(e.id, asked[q]) for e in train if (q := normalise_question(e.question)) in asked]
    if found and not allow_overlap:
        pairs = ", ".join(f"{ours} = {theirs}" for ours, theirs in found[:3])
        raise InputError(
            f"{len(found):,} training questions stand in the rows that are held out ({pairs}); "
            "take them out, or set data.allow_contamination, which the report prints"
        )
    return len(found)


def merge_deduplicated(
    names: Sequence[str], sets: Sequence[Sequence[ReasoningExample]]
) -> tuple[list[ReasoningExample], list[str]]:
    """The rows of all sets, without questions that an earlier set has; and how many those were."""
    if len(sets) == 1:
        return list(sets[0]), []
    rows, notes, seen, ids = list[ReasoningExample](), list[str](), set[str](), dict[str, str]()
    for name, examples in zip(names, sets, strict=True):
        asked = [normalise_question(example.question) for example in examples]
        new = [example for example, question in zip(examples, asked, strict=True) if question not in seen]
        for example in new:
            if ids.setdefault(example.id, name) != name:
                raise InputError(
                    f"id {example.id[:60]!r} stands in {ids[example.id]} and in {name}; rows need their own"
                )
        gone = len(examples) - len(new)
        if gone:
            notes.append(f"{name}: {gone:,} rows left out, whose questions stand in an earlier set")
        seen.update(asked)
        rows += new
    return rows, notes
