"""Documents: a file of text, rows of JSONL or Parquet or of the hub, of which several may be one book; and their parts.

A document is trained on or held out as a whole.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laconic.config.data import DataConfig, SplitName, TextConfig, is_row_file
from laconic.data.documents.streaming import decode_utf8
from laconic.data.parquet_and_hub import load_hub_split
from laconic.data.problems import make_excerpt
from laconic.data.reasoning.catalog import SPLIT_NAMES
from laconic.data.records import convert_rows, number_table_rows, read_rows, require_text
from laconic.data.strict_jsonl import RowError, locate_field
from laconic.errors import InputError, translate_os_errors

ROW_FILES = (".jsonl", ".json", ".parquet")  # what ends so has rows; all else is a text
BLOCK_BYTES = 1 << 20  # bytes of a file read at once
SECTION_SEPARATOR = "\n\n"  # what parts the rows of one document
HELD_OUT_PARTS: tuple[SplitName, ...] = ("valid", "test")


@dataclass(frozen=True)
class Document:
    """A text of several sections; `book` is what its rows call it, `part` the one they say it belongs to."""

    name: str
    sections: tuple[str, ...]
    book: str | None = None
    part: SplitName | None = None

    @property
    def text(self) -> str:
        """All sections, an empty line between two."""
        return SECTION_SEPARATOR.join(self.sections)


@dataclass
class DocumentRowConverter:
    """The rows of a file as they are read: which field names the document, once the first row is seen."""

    config: TextConfig
    document: str | None = None
    first: bool = field(default=True)

    def convert(self, row: dict[str, Any], text: str, name: str) -> Document:
        """A row as a document of one section. Raises `Fault`."""
        asked = self.config.document_field
        if self.first:
            self.first, self.document = False, asked or ("book" if "book" in row else None)
        accepted = f"a row has a field {self.config.text_field}" + (f" and {self.document}" if self.document else "")
        said = require_text(row, self.config.text_field, text, accepted)
        book = require_text(row, self.document, text, accepted) if self.document else None
        return Document(book or name, (said,), book, parse_split(row, text))


def parse_split(row: Mapping[str, Any], text: str) -> SplitName | None:
    """The part that a row says it belongs to, by its field split. Raises `Fault`."""
    said = row.get("split")
    if said is None:
        return None
    if not isinstance(said, str) or said not in SPLIT_NAMES:
        column = locate_field(text, "split")[1]
        raise RowError(
            column, "other splits", f"split: {make_excerpt(text, column)}; it is one of {', '.join(SPLIT_NAMES)}"
        )
    return SPLIT_NAMES[said]


def read_documents(path: str, config: TextConfig, max_rows: int | None = None) -> tuple[list[Document], list[str]]:
    """The documents of a file, of its first `rows` rows; one that is no file of rows is a document. And notes.

    Raises `BadInput`.
    """
    file = Path(path)
    if file.suffix in ROW_FILES:
        found, notes = read_rows(file, DocumentRowConverter(config).convert, max_rows)
        return group_by_book(found), notes
    if not file.is_file():
        raise InputError(f"no file {file}; in a recipe a path is relative to it")
    with translate_os_errors(file), file.open("rb") as stream:
        text = "".join(decode_utf8(iter(lambda: stream.read(BLOCK_BYTES), b""), file.name))
    if not text.strip():
        raise InputError(f"{file.name}: no text in it; give a document")
    return [Document(file.stem, (text,))], []


def load_hub_documents(asked: str, config: TextConfig, revision: str | None, max_rows: int | None) -> list[Document]:
    """The documents of a set of the hub: NAME, or NAME:SPLIT. Raises `BadInput`."""
    name, _, split = asked.partition(":")
    table = load_hub_split(name, None, split or "train", revision)
    return group_by_book(
        convert_rows(name, number_table_rows(table.rows), DocumentRowConverter(config).convert, max_rows, is_table=True)
    )


def group_by_book(rows: Iterable[Document]) -> list[Document]:
    """The rows of each book as one document, in the order of the first of them. Raises `BadInput`."""
    books: dict[str, list[Document]] = {}
    for row in rows:
        books.setdefault(row.name, []).append(row)
    for name, members in books.items():
        parts = sorted({member.part or "train" for member in members})
        if len(parts) > 1:
            raise InputError(f"{name}: rows in {' and '.join(parts)}; a document is of one part, mend the field split")
    return [
        Document(name, tuple(text for each in members for text in each.sections), members[0].book, members[0].part)
        for name, members in books.items()
    ]


def load_documents(config: DataConfig, part: SplitName) -> tuple[list[Document], list[str]]:
    """The documents of a part, and notes. Raises `BadInput`, also for training where it shares one with the others."""
    every, notes = load_all_documents(config)
    if part != "train":
        return select_part(config, every, part), notes
    own = split_documents(config, every)["train"]
    kept: dict[SplitName, list[Document]] = {
        other: select_part(config, every, other) for other in HELD_OUT_PARTS if has_part(config, every, other)
    }
    for other, found in kept.items():
        check_documents_disjoint(own, found, other, config.allow_contamination)
        notes.append(f"{other}: {len(found):,} documents held out, as {found[0].name}")
    return own, notes


def load_all_documents(config: DataConfig) -> tuple[list[Document], list[str]]:
    """All documents of data.path or data.name."""
    if config.path is not None:
        return read_documents(config.path, config.text, config.max_train_rows)
    return load_hub_documents((config.name or ("",))[0], config.text, config.revision, config.max_train_rows), []


def select_part(config: DataConfig, every: Sequence[Document], part: SplitName) -> list[Document]:
    """The documents held out: those of the file the recipe names, else those of the source. Raises `BadInput`."""
    named = getattr(config, part)
    found = split_documents(config, every)[part] if named is None else load_part_file(config, named, part)
    if not found:
        among = named or f"{len(every):,} documents with data.text.held_out_fraction {config.text.held_out_fraction}"
        raise InputError(f"data.{part}: no document is held out for it, of {among}; name a file of documents")
    return found


def load_part_file(config: DataConfig, named: str, part: SplitName) -> list[Document]:
    """The documents of a file, or a set of the hub, that belong to a part; all where they do not say."""
    here = is_row_file(named) or Path(named).is_file()
    found = read_documents(named, config.text)[0] if here else load_hub_documents(named, config.text, None, None)
    return [each for each in found if each.part in (part, None)]


def has_part(config: DataConfig, every: Sequence[Document], part: SplitName) -> bool:
    """Whether any document is held out for a part."""
    return getattr(config, part) is not None or bool(split_documents(config, every)[part])


def split_documents(config: DataConfig, every: Sequence[Document]) -> dict[SplitName, list[Document]]:
    """The documents of the source by part: as their rows say; else a share by the order of their names' SHA-256."""
    found: dict[SplitName, list[Document]] = {"train": [], "valid": [], "test": []}
    if any(each.part for each in every) or config.valid or config.test:
        for each in every:
            found[each.part or "train"].append(each)
        return found
    k = round(config.text.held_out_fraction * len(every)) or int(config.text.held_out_fraction > 0 and len(every) > 2)
    order = sorted(every, key=lambda each: hashlib.sha256(each.name.encode()).digest())
    kept: Mapping[str, SplitName] = {each.name: HELD_OUT_PARTS[i >= k] for i, each in enumerate(order[: 2 * k])}
    for each in every:
        found[kept.get(each.name, "train")].append(each)
    return found


def check_documents_disjoint(
    train: Sequence[Document], held_out: Sequence[Document], part: SplitName, allow_overlap: bool
) -> None:
    """Raises `BadInput` where a document trained on has the name of one held out, or a section of it."""
    books = {each.book for each in held_out if each.book}
    sections = {section for each in held_out for section in each.sections}
    shared = [each.name for each in train if each.book in books or not sections.isdisjoint(each.sections)]
    if shared and not allow_overlap:
        raise InputError(
            f"{len(shared):,} documents trained on share their name or a section with those of {part} ({shared[0]}); "
            "take them out, or set data.allow_contamination"
        )
