"""A file of rows looked over: its faults, what stands twice, how long the parts are, what would be cut."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from laconic.core.contract import Example
from laconic.core.errors import BadInput
from laconic.data.contamination import same
from laconic.data.encoding import encoded_together
from laconic.data.examples import ACCEPTED, majority, scanned
from laconic.data.pieces import NUMBER, Encoded, Encoder
from laconic.data.problems import Problem
from laconic.data.settings import Data, Text
from laconic.data.text import read_documents
from laconic.data.tokens import Tokenizer

PARTS = ("question", "chain", "chain without its last step", "answer with its prompt", "row")
Show = Callable[[str, int, int], None]
HOW = Data(path="", chain="all", answers="text")  # how rows are encoded: whole chains, any answer


class Lengths(NamedTuple):
    """Tokens of a part over the rows, by nearest rank."""

    p50: int
    p90: int
    p99: int
    most: int


class Scan(NamedTuple):
    """The rows of a file or set, SHA-256 of its bytes, all its faults, and notes."""

    examples: Sequence[Example]
    sha256: str
    faults: Sequence[Problem] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Checked:
    """What was found. `twice` are pairs of ids, the first and a later row of one question; `over`, ids of rows cut."""

    rows: int
    faults: tuple[Problem, ...]
    chainless: int
    wordless: int
    answer: tuple[str, float]
    twice: tuple[tuple[str, str], ...]
    lengths: Mapping[str, Lengths] = field(default_factory=dict[str, Lengths])
    over: tuple[str, ...] = ()
    unknown: int = 0


@dataclass(frozen=True)
class Documents:
    """Documents looked over: how many of each part, their sections and those that stood before, SHA-256 of the file.

    With a tokenizer `tokens` are those of a document, and `rows` the stretches of `context` that are made of them.
    """

    parts: Mapping[str, int]
    sections: int
    twice: int
    sha256: str
    notes: Sequence[str] = ()
    tokens: Lengths | None = None
    rows: int | None = None


def look_documents(path: Path, tokenizer: Tokenizer | None, context: int | None, show: Show) -> Documents:
    """A text, or rows of texts, looked over. Raises `BadInput` (66) with all the faults."""
    documents, notes = read_documents(str(path), Text())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sections = [section for each in documents for section in each.sections]
    named = {part: sum(each.part == part for each in documents) for part in ("train", "valid", "test", None)}
    parts = {part or "unsaid": n for part, n in named.items() if n}
    found = Documents(parts, len(sections), len(sections) - len(set(sections)), digest, notes)
    if tokenizer is None:
        return found
    counts = [len(ids) for ids in encoded_together([each.text for each in documents], tokenizer, show)]
    stretches = None if not context else sum(n // context + (n % context > 1) for n in counts)
    return replace(found, tokens=ranked(counts), rows=stretches)


def scan(path: Path) -> Scan:
    """The rows of a file, with every fault in place of an error for them."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file; give a file of rows, or a set that laconic data list names")
    reader = scanned(path, HOW)
    notes = [text + (f" ({n:,} lines)" if n > 1 else "") for text, n in reader.notes.items()]
    notes += ["blank lines at the end"] if reader.blank else []
    if not reader.examples and not reader.problems:
        reader.problems.append(Problem(0, 0, "empty files", f"{path.name}: no row in it; {ACCEPTED}"))
    return Scan(reader.examples, reader.hash.hexdigest(), reader.problems, notes)


def look(found: Scan, tokenizer: Tokenizer | None, context: int | None, show: Show) -> Checked:
    """Rows looked over; lengths by the tokenizer, rows cut where they are longer than `context` tokens."""
    rows = found.examples
    checked = Checked(
        rows=len(rows),
        faults=tuple(found.faults),
        chainless=sum(not example.steps for example in rows),
        wordless=sum(NUMBER.search(example.answer) is None for example in rows),
        answer=majority(rows) if rows else ("", 0.0),
        twice=twice(rows),
    )
    return checked if tokenizer is None else measured(checked, rows, tokenizer, context, show)


def measured(
    found: Checked, examples: Sequence[Example], tokenizer: Tokenizer, context: int | None, show: Show
) -> Checked:
    """The same with lengths, and the faults of rows that cannot be encoded."""
    encoder = Encoder(tokenizer, HOW.model_copy(update={"eos": ended(tokenizer)}))
    counts: dict[str, list[int]] = {part: [] for part in PARTS}
    faults, over, unknown = list(found.faults), [], 0
    for done, example in enumerate(examples):
        show("rows", done, len(examples))
        try:
            row = encoder.row(example)
        except BadInput as error:
            faults.append(Problem(0, 0, "that cannot be encoded", str(error)))
            continue
        unknown += row.unknown
        for part, n in zip(PARTS, parts(row), strict=True):
            counts[part].append(n)
        over += [row.id] if context is not None and len(row) > context else []
    lengths = {part: ranked(all) for part, all in counts.items() if all}
    return replace(found, faults=tuple(faults), lengths=lengths, over=tuple(over), unknown=unknown)


def parts(row: Encoded) -> tuple[int, int, int, int, int]:
    """Tokens of the parts, in the order of PARTS."""
    short = sum(step < row.chain_step[-1] for step in row.chain_step)
    return len(row.question), len(row.chain), short, len(row.answer), len(row)


def ended(tokenizer: Tokenizer) -> str | None:
    """A token to end answers with where the tokenizer's files name none: lengths do not depend on which."""
    added = tokenizer.inner.get_added_tokens_decoder().values()
    return None if tokenizer.eos is not None else next((token.content for token in added if token.special), None)


def twice(examples: Sequence[Example]) -> tuple[tuple[str, str], ...]:
    """Pairs of rows that ask one question, whatever its capitals, spaces and marks."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(same(e.question), e.id), e.id) for e in examples]
    return tuple((a, b) for a, b in pairs if a != b)


def ranked(counts: Sequence[int]) -> Lengths:
    """Median, 90th and 99th hundredth, and the most."""
    ordered = sorted(counts)
    return Lengths(*(ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99, 1)))
