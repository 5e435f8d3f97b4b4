"""Load documents from text files, rows of JSONL or Parquet, or the Hub, and split them into train, valid and test.

Rows of the same book form one document. A document is never divided between two splits.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.config.data import ROW_FILE_SUFFIXES, DataConfig, SplitName, TextConfig, is_row_file
from laconic.console import pluralize
from laconic.data.documents.tokenize import decode_utf8
from laconic.data.parquet_and_hub import load_hub_split
from laconic.data.reasoning.catalog import HELD_OUT_PARTS, SPLIT_NAMES, parse_hub_name
from laconic.data.reasoning.contamination import ALLOW_OVERLAP_HINT
from laconic.data.strict_jsonl import (
    RowError,
    RowProblem,
    check_data_file,
    convert_each,
    convert_rows,
    find_compression,
    format_problems,
    parse_lines,
    read_rows,
    require_text,
)
from laconic.errors import InputError, UsageError, translate_os_errors

ROW_FILES = tuple(suffix for suffix in ROW_FILE_SUFFIXES if suffix != ".txt")  # any other file is one text
BLOCK_BYTES = 1 << 20
ROW_SPLITS: Mapping[str, SplitName] = {**SPLIT_NAMES, "val": "valid", "dev": "valid", "eval": "valid"}
MIN_COMPARED_LENGTH = 200  # characters of a section
SECTION_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Document:
    name: str  # name of the file or book, or the place of its row
    sections: tuple[str, ...]  # texts of its rows
    book: str | None = None  # name of the document in its rows
    part: SplitName | None = None  # split that its rows name

    def __post_init__(self) -> None:
        if isinstance(self.sections, str):  # its characters would be taken for sections
            raise UsageError(f"{self.name}: sections: give a tuple of texts, not one text")

    @property
    def compared_sections(self) -> list[str]:
        """The sections that no other document has by chance."""
        return [x for x in self.sections if len(x) >= MIN_COMPARED_LENGTH or len(self.sections) == 1]

    @property
    def text(self) -> str:
        return SECTION_SEPARATOR.join(self.sections)


class DocumentRowConverter:
    """Converts rows to documents of one section; the first row decides which field names the document."""

    def __init__(self, config: TextConfig, max_documents: int | None = None) -> None:
        self.config, self.max_documents = config, max_documents
        self.document_field, self.is_first = config.document_field, True
        self.names = set[str]()
        self.has_splits = False

    def convert(self, row: dict[str, Any], name: str) -> Document | None:
        """Return the document of a row, or None if its text is blank. Raises `RowError`."""
        if self.is_first and self.document_field is None and "book" in row:
            self.document_field = "book"
        self.is_first = False
        names = " and ".join(filter(None, (self.config.text_field, self.document_field)))
        accepted = f"expected a field {names}; data.text.text_field names another"
        section = row.get(self.config.text_field)
        if isinstance(section, str) and not section.strip():
            return None
        section = require_text(row, self.config.text_field, accepted)
        book = require_text(row, self.document_field, accepted) if self.document_field else None
        return Document(book or name, (section,), book, parse_split(row))

    def is_last(self, row: Document | None) -> bool:
        """Return whether a row begins one document more than `max_documents`; rows that name splits are all read."""
        if row is not None:
            self.names.add(row.name)
            self.has_splits = self.has_splits or row.part is not None
        return self.max_documents is not None and not self.has_splits and len(self.names) > self.max_documents


def parse_split(row: Mapping[str, Any]) -> SplitName | None:
    split = row.get("split")
    if split is None:
        return None
    if not isinstance(split, str) or split.lower() not in ROW_SPLITS:
        raise RowError("unknown splits", f"expected one of {', '.join(ROW_SPLITS)}", field="split")
    return ROW_SPLITS[split.lower()]


def read_documents(path: str, config: TextConfig, max_documents: int | None = None) -> tuple[list[Document], list[str]]:
    """Read the documents of a file: rows, or one text for any other suffix; with notes. Raises `InputError`."""
    file = Path(path)
    if file.suffix.lower() in ROW_FILES:
        converter = DocumentRowConverter(config, max_documents)
        rows = read_rows(file, converter.convert, converter.is_last)
        num_blank = rows.count(None)
        notes = [f"{file.name}: {num_blank:,} rows with a blank text are skipped"] if num_blank else []
        return group_by_book(rows, file.name, max_documents), notes
    check_data_file(file)
    with translate_os_errors(file), file.open("rb") as stream:
        program = find_compression(stream.peek(8))
        if program is not None:
            raise InputError(f"{file.name}: compressed with {program}; unpack it")
        blocks = iter(lambda: stream.read(BLOCK_BYTES), b"")
        text = "".join(decode_utf8(blocks, file.name, translate_newlines=False))  # the tokens of runs stay the same
    return [Document(file.stem, (text,))], []


def iter_texts(lines: Iterable[bytes], file: str) -> Iterator[tuple[str, str]]:
    """Yield name (`id`, or file and line) and text of each JSONL row lazily. Raises `InputError`, also for none."""
    accepted = 'expected {"text": "…"}, optionally with an "id"'
    result = None

    def convert(row: dict[str, Any], name: str) -> tuple[str, str]:
        return str(row.get("id", name)), require_text(row, "text", accepted)

    for result in convert_each(file, parse_lines(lines), convert):
        if isinstance(result, RowProblem):
            raise InputError(format_problems([result], file))
        yield result
    if result is None:
        raise InputError(f"{file}: contains no rows; {accepted}, one per line")


def load_hub_documents(
    name: str, config: TextConfig, revision: str | None, max_documents: int | None = None
) -> list[Document]:
    """Load the documents of a Hub data set: `NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`. Raises `InputError`."""
    repo, hub_config, split = parse_hub_name(name)
    rows = enumerate(load_hub_split(repo, hub_config, split or "train", revision).rows, 1)
    converter = DocumentRowConverter(config, max_documents)
    return group_by_book(convert_rows(repo, rows, converter.convert, converter.is_last), repo, max_documents)


def group_by_book(rows: Iterable[Document | None], name: str, max_documents: int | None = None) -> list[Document]:
    """Merge the rows of each book into one document, without blank rows. Raises `InputError` if none is left.

    Of documents whose rows name no split, the first `max_documents` are returned.
    """
    books: dict[str, list[Document]] = {}
    for row in filter(None, rows):
        books.setdefault(row.name, []).append(row)
    for book, members in books.items():
        parts = sorted({member.part or "train" for member in members})
        if len(parts) > 1:
            raise InputError(f"{book}: rows in {' and '.join(parts)}; a document must be in one split, see field split")
    if not books:
        raise InputError(f"{name}: every text is blank; give rows with text")
    documents = [
        Document(book, tuple(text for member in members for text in member.sections), members[0].book, members[0].part)
        for book, members in books.items()
    ]
    return documents if any(document.part for document in documents) else documents[:max_documents]


def load_documents(config: DataConfig, part: SplitName) -> tuple[list[Document], list[str]]:
    """Load the documents of a split, with notes. Raises `InputError`, also if training and held-out ones overlap."""
    limit = count_documents_to_read(config)
    if config.path is not None:
        documents, notes = read_documents(config.path, config.text, limit)
    else:
        documents = load_hub_documents((config.name or ("",))[0], config.text, config.revision, limit)
        notes = []
    parts = split_documents(config, documents)
    if part != "train":
        return select_part(config, parts, part), notes
    for other in HELD_OUT_PARTS:
        if getattr(config, other) is not None or parts[other]:
            held_out = select_part(config, parts, other)
            check_documents_disjoint(parts["train"], held_out, other, config.allow_contamination)
            notes.append(f"{other}: {pluralize(len(held_out), 'document')} held out, such as {held_out[0].name}")
    return parts["train"][: config.max_train_rows], notes


def count_documents_to_read(config: DataConfig) -> int | None:
    """Return of how many documents without a split `max_train_rows` are left for training; None for all documents."""
    max_rows, fraction = config.max_train_rows, config.text.held_out_fraction
    if max_rows is None or config.valid or config.test:
        return max_rows
    n = max(max_rows, 3)  # of fewer, none is held out
    while n - 2 * count_held_out(n, fraction) < max_rows:
        n += max_rows - (n - 2 * count_held_out(n, fraction))
    return n


def count_held_out(num_texts: int, fraction: float) -> int:
    """Return how many of some texts are for validation, and again for testing."""
    return round(fraction * num_texts) or int(fraction > 0 and num_texts > 2)


def select_part(config: DataConfig, parts: Mapping[SplitName, list[Document]], part: SplitName) -> list[Document]:
    """Return the held-out documents: those of the recipe's file, else those of `parts`. Raises `InputError`."""
    name = getattr(config, part)
    if name is None:
        selected = parts[part]
    else:
        is_file = is_row_file(name) or Path(name).is_file()
        read = read_documents(name, config.text)[0] if is_file else load_hub_documents(name, config.text, None)
        selected = [document for document in read if document.part in (part, None)]
    if not selected:
        texts = pluralize(len({document.sections for rows in parts.values() for document in rows}), "different text")
        source = f"{texts} with data.text.held_out_fraction = {config.text.held_out_fraction}"
        raise InputError(f"data.{part}: {name or source} leaves no document; give more, or data.{part} = FILE")
    return selected


def split_documents(config: DataConfig, documents: Sequence[Document]) -> dict[SplitName, list[Document]]:
    """Split documents as their rows say.

    If no row names a split and the recipe names no held-out documents, hold out a fraction by the SHA-256 of the names,
    or of the numbers of rows without a name: a file may be renamed. Equal texts are in the same split.
    """
    parts: dict[SplitName, list[Document]] = {"train": [], "valid": [], "test": []}
    if any(document.part for document in documents) or config.valid or config.test:
        for document in documents:
            parts[document.part or "train"].append(document)
        return parts
    keys: dict[tuple[str, ...], str] = {}
    for document in documents:
        keys.setdefault(document.sections, document.book or document.name.rpartition(":")[2])
    k = count_held_out(len(keys), config.text.held_out_fraction)
    order = sorted(keys, key=lambda sections: hashlib.sha256(keys[sections].encode()).digest())
    held_out: dict[tuple[str, ...], SplitName] = {
        **dict.fromkeys(order[:k], "valid"),
        **dict.fromkeys(order[k : 2 * k], "test"),
    }
    for document in documents:
        parts[held_out.get(document.sections, "train")].append(document)
    return parts


def check_documents_disjoint(
    train: Sequence[Document], held_out: Sequence[Document], part: SplitName, allow_overlap: bool
) -> None:
    """Raise `InputError` if a training document shares its name or a section with a held-out one.

    Short sections count if they are a whole document, since headings such as "Chapter One" repeat.
    """
    books = {document.book for document in held_out if document.book}
    sections = {section for document in held_out for section in document.sections}
    compared = {section for document in held_out for section in document.compared_sections}
    shared = [
        document.name
        for document in train
        if document.book in books
        or not compared.isdisjoint(document.sections)
        or not sections.isdisjoint(document.compared_sections)
    ]
    if shared and not allow_overlap:
        message = f"{len(shared):,} training documents share a name or section with {part} ({shared[0]})"
        raise InputError(f"{message}; {ALLOW_OVERLAP_HINT}")
