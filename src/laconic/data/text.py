"""Documents: a file of text, rows of JSONL or Parquet or of the hub, of which several may be one book; and their parts.

A document is trained on or held out as a whole.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laconic.core.errors import BadInput, on_disk
from laconic.data.lines import Fault, place
from laconic.data.problems import excerpt
from laconic.data.records import read_records, tabled, taken, text_of
from laconic.data.sets import SPLITS
from laconic.data.settings import Data, Part, Text, is_file
from laconic.data.streaming import characters
from laconic.data.tables import hub

ROWS = (".jsonl", ".json", ".parquet")  # what ends so has rows; all else is a text
BLOCK = 1 << 20  # bytes of a file read at once
BETWEEN = "\n\n"  # what parts the rows of one document
OTHERS: tuple[Part, ...] = ("valid", "test")


@dataclass(frozen=True)
class Document:
    """A text of several sections; `book` is what its rows call it, `part` the one they say it belongs to."""

    name: str
    sections: tuple[str, ...]
    book: str | None = None
    part: Part | None = None

    @property
    def text(self) -> str:
        """All sections, an empty line between two."""
        return BETWEEN.join(self.sections)


@dataclass
class Rows:
    """The rows of a file as they are read: which field names the document, once the first row is seen."""

    how: Text
    document: str | None = None
    first: bool = field(default=True)

    def take(self, row: dict[str, Any], text: str, name: str) -> Document:
        """A row as a document of one section. Raises `Fault`."""
        asked = self.how.document
        if self.first:
            self.first, self.document = False, asked or ("book" if "book" in row else None)
        accepted = f"a row has a field {self.how.field}" + (f" and {self.document}" if self.document else "")
        said = text_of(row, self.how.field, text, accepted)
        book = text_of(row, self.document, text, accepted) if self.document else None
        return Document(book or name, (said,), book, part_of(row, text))


def part_of(row: Mapping[str, Any], text: str) -> Part | None:
    """The part that a row says it belongs to, by its field split. Raises `Fault`."""
    said = row.get("split")
    if said is None:
        return None
    if not isinstance(said, str) or said not in SPLITS:
        column = place(text, "split")[1]
        raise Fault(column, "other splits", f"split: {excerpt(text, column)}; it is one of {', '.join(SPLITS)}")
    return SPLITS[said]


def read_documents(asked: str, how: Text, rows: int | None = None) -> tuple[list[Document], list[str]]:
    """The documents of a file, of its first `rows` rows; one that is no file of rows is a document. And notes.

    Raises `BadInput`.
    """
    file = Path(asked)
    if file.suffix in ROWS:
        found, notes = read_records(file, Rows(how).take, rows)
        return grouped(found), notes
    if not file.is_file():
        raise BadInput(f"no file {file}; in a recipe a path is relative to it")
    with on_disk(file), file.open("rb") as stream:
        text = "".join(characters(iter(lambda: stream.read(BLOCK), b""), file.name))
    if not text.strip():
        raise BadInput(f"{file.name}: no text in it; give a document")
    return [Document(file.stem, (text,))], []


def from_hub(asked: str, how: Text, revision: str | None, rows: int | None) -> list[Document]:
    """The documents of a set of the hub: NAME, or NAME:SPLIT. Raises `BadInput`."""
    name, _, split = asked.partition(":")
    table = hub(name, None, split or "train", revision)
    return grouped(taken(name, tabled(table.rows), Rows(how).take, rows, table=True))


def grouped(rows: Iterable[Document]) -> list[Document]:
    """The rows of each book as one document, in the order of the first of them. Raises `BadInput`."""
    books: dict[str, list[Document]] = {}
    for row in rows:
        books.setdefault(row.name, []).append(row)
    for name, members in books.items():
        parts = sorted({member.part or "train" for member in members})
        if len(parts) > 1:
            raise BadInput(f"{name}: rows in {' and '.join(parts)}; a document is of one part, mend the field split")
    return [
        Document(name, tuple(text for each in members for text in each.sections), members[0].book, members[0].part)
        for name, members in books.items()
    ]


def documents(data: Data, part: Part) -> tuple[list[Document], list[str]]:
    """The documents of a part, and notes. Raises `BadInput`, also for training where it shares one with the others."""
    every, notes = source(data)
    if part != "train":
        return of_part(data, every, part), notes
    own = split(data, every)["train"]
    kept: dict[Part, list[Document]] = {
        other: of_part(data, every, other) for other in OTHERS if there(data, every, other)
    }
    for other, found in kept.items():
        refuse_shared(own, found, other, data.allow_overlap)
        notes.append(f"{other}: {len(found):,} documents held out, as {found[0].name}")
    return own, notes


def source(data: Data) -> tuple[list[Document], list[str]]:
    """All documents of data.path or data.name."""
    if data.path is not None:
        return read_documents(data.path, data.text, data.rows)
    return from_hub((data.name or ("",))[0], data.text, data.revision, data.rows), []


def of_part(data: Data, every: Sequence[Document], part: Part) -> list[Document]:
    """The documents held out: those of the file the recipe names, else those of the source. Raises `BadInput`."""
    named = getattr(data, part)
    found = split(data, every)[part] if named is None else of_file(data, named, part)
    if not found:
        among = named or f"{len(every):,} documents with data.text.held {data.text.held}"
        raise BadInput(f"data.{part}: no document is held out for it, of {among}; name a file of documents")
    return found


def of_file(data: Data, named: str, part: Part) -> list[Document]:
    """The documents of a file, or a set of the hub, that belong to a part; all where they do not say."""
    here = is_file(named) or Path(named).is_file()
    found = read_documents(named, data.text)[0] if here else from_hub(named, data.text, None, None)
    return [each for each in found if each.part in (part, None)]


def there(data: Data, every: Sequence[Document], part: Part) -> bool:
    """Whether any document is held out for a part."""
    return getattr(data, part) is not None or bool(split(data, every)[part])


def split(data: Data, every: Sequence[Document]) -> dict[Part, list[Document]]:
    """The documents of the source by part: as their rows say; else a share by the order of their names' SHA-256."""
    found: dict[Part, list[Document]] = {"train": [], "valid": [], "test": []}
    if any(each.part for each in every) or data.valid or data.test:
        for each in every:
            found[each.part or "train"].append(each)
        return found
    k = round(data.text.held * len(every)) or int(data.text.held > 0 and len(every) > 2)
    order = sorted(every, key=lambda each: hashlib.sha256(each.name.encode()).digest())
    kept: Mapping[str, Part] = {each.name: OTHERS[i >= k] for i, each in enumerate(order[: 2 * k])}
    for each in every:
        found[kept.get(each.name, "train")].append(each)
    return found


def refuse_shared(train: Sequence[Document], held: Sequence[Document], part: Part, allow: bool) -> None:
    """Raises `BadInput` where a document trained on has the name of one held out, or a section of it."""
    books = {each.book for each in held if each.book}
    sections = {section for each in held for section in each.sections}
    shared = [each.name for each in train if each.book in books or not sections.isdisjoint(each.sections)]
    if shared and not allow:
        raise BadInput(
            f"{len(shared):,} documents trained on share their name or a section with those of {part} ({shared[0]}); "
            "take them out, or set data.allow_overlap"
        )
