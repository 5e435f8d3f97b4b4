"""Refuse overlap between training, validation and test rows."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.catalog import split_name
from laconic.data.reasoning.chat import has_history
from laconic.errors import InputError

# Marks of held-out rows: (field, value, description of the rows, what to use instead)
HELD_OUT_MARKS: Sequence[tuple[str, Any, str, str]] = (
    ("icot_split", "valid", "validation questions of GSM8K-Aug", "data.name = gsm8k has the other 6,973"),
    ("in_multiarith", True, "questions of MultiArith", "data.name = aggregate has the others"),
)
LETTER_PATTERN = re.compile(r"[^\W\d_]")
# Numbers, words, and the operators and signs before numbers, without which "12 + 7" would be "12 - 7". A hyphen after a
# letter, and one that begins a line, is no sign.
WORD_PATTERN = re.compile(
    r"\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|[^\W\d_]+|(?:(?<![^\W\d_])(?!^- )-|[+*/=<>^%])(?=\s*[\d(])", re.MULTILINE
)
OPERATORS = str.maketrans({"−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "÷": "/"})
ALLOW_OVERLAP_HINT = "remove them, or set data.allow_contamination"


def normalise_question(question: str) -> str:
    """Return the words and numbers of a question, with operators before numbers, in lower case and with single spaces.

    A question without letters, such as a product, only has its white space normalised.
    """
    if LETTER_PATTERN.search(question) is None:
        return " ".join(question.split())
    return " ".join(WORD_PATTERN.findall(question.translate(OPERATORS).lower()))


def identify_question(example: ReasoningExample, with_document: bool = True) -> str:
    """Return the key that equal rows share: the normalised question, and the document that it is about.

    The question of a conversation is all of its messages but the system's: many end with "continue". Without documents,
    which most recipes do not read, rows with the same question are the same.
    """
    messages = example.metadata["messages"] if has_history(example) else ()
    texts = [message["content"] for message in messages if message["role"] != "system"]
    question = normalise_question("\n".join(texts or [example.question]))
    if example.document is None or not with_document:
        return question
    return f"{question}\n{normalise_question(example.document)}"


def check_dataset_names(config: DataConfig) -> None:
    for name in config.name or ():
        split = split_name(name)[1] or "train"
        if split in ("valid", "test"):
            raise InputError(f"data.name {name}: cannot train on {split} rows; use a train split")
    if config.valid and split_name(config.valid)[1] == "test":
        hint = "use gsm8k-aug:valid"  # by which the papers select checkpoints
        raise InputError(f"data.valid {config.valid}: test rows must not select a checkpoint; {hint}")


def check_known_files(config: DataConfig, files: Mapping[str, str]) -> None:
    """Raise `InputError` if a file is a held-out split; `files` has DATASET:SPLIT by the name in the recipe."""
    key, training = ("data.path", (config.path,)) if config.name is None else ("data.name", config.name)
    for name, split in files.items():
        part = split.rpartition(":")[2]
        if name in training and part in ("valid", "test"):
            raise InputError(f"{key} {name} is {split}: cannot train on {part} rows; use a train split")
        if name == config.valid and part == "test":
            raise InputError(f"data.valid {name} is {split}: test rows must not select a checkpoint")


def check_marks(name: str, examples: Sequence[ReasoningExample], allow_overlap: bool) -> None:
    """Raise `InputError` if the fields of training rows mark them as held out, unless allowed."""
    for field, value, description, hint in HELD_OUT_MARKS:
        count = sum(example.metadata.get(field) == value for example in examples)
        if count and not allow_overlap:
            message = f"{name}: {count:,} rows are {description} ({field} = {value}); {hint}; {ALLOW_OVERLAP_HINT}"
            raise InputError(message)


def check_overlap(
    train: Sequence[ReasoningExample],
    held_out: Sequence[ReasoningExample],
    allow_overlap: bool = False,
    with_documents: bool = True,
) -> int:
    """Return how many training rows have a held-out question. Raises `InputError` if any, unless allowed."""
    ids = {identify_question(example, with_documents): example.id for example in held_out}
    questions = [(example.id, identify_question(example, with_documents)) for example in train]
    pairs = [(train_id, ids[question]) for train_id, question in questions if question in ids]
    if pairs and not allow_overlap:
        examples_text = ", ".join(f"{train_id} = {held_out_id}" for train_id, held_out_id in pairs[:3])
        raise InputError(f"{len(pairs):,} training questions are also held out ({examples_text}); {ALLOW_OVERLAP_HINT}")
    return len(pairs)


def merge_deduplicated(
    names: Sequence[str], sets: Sequence[Sequence[ReasoningExample]], with_documents: bool = True
) -> tuple[list[ReasoningExample], list[str]]:
    """Concatenate data sets without questions of earlier ones, with a note for each set on how many were dropped.

    Raises `InputError` if two sets have a row with the same id.
    """
    if len(sets) == 1:
        return list(sets[0]), []
    rows, notes = list[ReasoningExample](), list[str]()
    seen: set[str] = set()
    set_by_id: dict[str, str] = {}
    for name, examples in zip(names, sets, strict=True):
        questions = [identify_question(example, with_documents) for example in examples]
        new = [example for example, question in zip(examples, questions, strict=True) if question not in seen]
        for example in new:
            if set_by_id.setdefault(example.id, name) != name:
                raise InputError(f"id {example.id[:60]!r} is in both {set_by_id[example.id]} and {name}")
        dropped = len(examples) - len(new)
        if dropped:
            notes.append(f"{name}: {dropped:,} rows dropped because their questions are in an earlier set")
        seen.update(questions)
        rows += new
    return rows, notes
