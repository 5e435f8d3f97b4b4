"""Documents of files, their parts, and what is refused; a book held out shares nothing with those trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.config.data import DataConfig, SplitName, TextConfig
from laconic.data.documents import load as documents_load
from laconic.data.documents.load import Document, load_documents, load_hub_documents, read_documents
from laconic.data.parquet_and_hub import TableRows
from laconic.errors import InputError
from tests.conftest import needs, shared_dir

ROWS = [
    {"book": "emma", "text": "one", "n": 1},
    {"book": "dracula", "text": "two"},
    {"book": "emma", "text": "three"},
    {"book": "alice", "text": "four"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def data(path: str, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"kind": "text", "path": path, **more})


def names(data: DataConfig, part: SplitName) -> list[str]:
    return [each.name for each in load_documents(data, part)[0]]


def test_rows_of_one_book_are_one_document(tmp_path: Path) -> None:
    found, notes = read_documents(write(tmp_path / "a.jsonl", ROWS), TextConfig())
    assert [(each.name, each.text) for each in found] == [
        ("emma", "one\n\nthree"),
        ("dracula", "two"),
        ("alice", "four"),
    ]
    assert notes == []
    assert [each.name for each in read_documents(str(tmp_path / "a.jsonl"), TextConfig(), 2)[0]] == ["emma", "dracula"]


def test_other_fields_name_text_and_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"body": "x", "title": "t"}, {"body": "y", "title": "t"}])
    assert read_documents(path, TextConfig(text_field="body", document_field="title"))[0] == [
        Document("t", ("x", "y"), "t")
    ]
    assert [each.name for each in read_documents(path, TextConfig(text_field="body"))[0]] == ["a.jsonl:1", "a.jsonl:2"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes("\ufeffAn étude.\r\n\r\nTwo.".encode())
    assert read_documents(str(file), TextConfig())[0] == [Document("book", ("An étude.\r\n\r\nTwo.",))]
    file.write_bytes(b"  \n")
    with pytest.raises(InputError, match=r"book\.txt: no text in it; give a document"):
        read_documents(str(file), TextConfig())
    file.write_bytes(b"ab\0")
    with pytest.raises(InputError, match=r"book\.txt: byte 2 is NUL, so it is no text"):
        read_documents(str(file), TextConfig())
    with pytest.raises(InputError, match=r"no file .*other\.txt; in a recipe a path is relative to it"):
        read_documents(str(tmp_path / "other.txt"), TextConfig())


def test_parquet_and_hub_have_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"book": row["book"], "text": row["text"]} for row in ROWS]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = read_documents(write(tmp_path / "a.jsonl", rows), TextConfig())[0]
    assert read_documents(str(tmp_path / "a.parquet"), TextConfig())[0] == lines
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(documents_load, "hub", lambda *names: asked.append(names) or TableRows(4, rows))
    assert load_hub_documents("some/books:validation", TextConfig(), "v1", None) == lines
    assert names(DataConfig(source="text", name=("some/books",)), "train") == ["emma"]
    assert asked == [("some/books", None, "validation", "v1"), ("some/books", None, "train", None)]
    parquet.write_table(pa.Table.from_pylist([{"text": "a"}, {"text": None}]), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet:row 2:text: text: no text: .*; put it in quotes"):
        read_documents(str(tmp_path / "b.parquet"), TextConfig())


FAULTS: list[tuple[bytes, str]] = [
    (
        b'{"text": "a"}\n{"text": 5}\n',
        'a.jsonl:2:10: text: no text: {"text": 5}; put it in quotes; a row has a field text',
    ),
    (b'{"text": " "}\n', 'a.jsonl:1:10: text: empty: {"text": " "}; give a text'),
    (b'{"body": "a"}\n', 'a.jsonl:1:1: text: no such field in {"body": "a"}; a row has a field text'),
    (b'{"text": "a", "book": "b"}\n{"text": "c"}\n', 'a.jsonl:2:1: book: no such field in {"text": "c"}'),
    (
        b'{"text": "a", "split": "dev"}\n',
        'a.jsonl:1:24: split: {"text": "a", "split": "dev"}; it is one of train, valid, validation, test',
    ),
    (b'{"text": "a"}\n\n{"text": "b"}\n', "a.jsonl:2:1: a blank line between rows; delete it"),
    (b'{"text": "a"\n', "a.jsonl:1:"),
    (b'{"text": "\xff"}\n', "a.jsonl:1:11: byte 11 of the line is not UTF-8"),
    (b"\n", "a.jsonl: no row in it; write one object a line"),
    (
        b'{"text":"a","book":"b","split":"train"}\n{"text":"c","book":"b","split":"test"}\n',
        "b: rows in test and train; a document is of one part, mend the field split",
    ),
]


@pytest.mark.parametrize(("raw", "message"), FAULTS)
def test_faulty_rows_are_refused_with_their_place(raw: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(InputError) as error:
        read_documents(str(tmp_path / "a.jsonl"), TextConfig())
    assert message in str(error.value)


def test_what_is_odd_and_harmless_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n\r\n')
    found, notes = read_documents(str(tmp_path / "a.jsonl"), TextConfig())
    assert [each.text for each in found] == ["a", "b"]
    assert any("byte-order mark" in note for note in notes)


def test_parts_are_those_that_rows_say(tmp_path: Path) -> None:
    marks = {"emma": "train", "dracula": "validation", "alice": "test"}
    path = write(tmp_path / "a.jsonl", [{**row, "split": marks[row["book"]]} for row in ROWS])
    parts: tuple[SplitName, ...] = ("train", "valid", "test")
    assert [names(data(path), part) for part in parts] == [["emma"], ["dracula"], ["alice"]]
    assert load_documents(data(path), "train")[1] == [
        "valid: 1 documents held out, as dracula",
        "test: 1 documents held out, as alice",
    ]
    assert names(data(path, valid=path, test=path), "valid") == ["dracula"]


def test_parts_are_drawn_by_document_where_nobody_says(tmp_path: Path) -> None:
    rows = [{"book": f"b{i % 20}", "text": f"section {i}"} for i in range(60)]
    said = data(write(tmp_path / "a.jsonl", rows))
    parts = [set(names(said, part)) for part in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert len(set.union(*parts)) == 20
    assert names(said, "valid") == names(said, "valid")
    none = data(said.path or "", text={"held": 0})
    assert len(names(none, "train")) == 20
    with pytest.raises(InputError, match=r"data\.valid: no document is held out for it, of 20 documents with .*held 0"):
        load_documents(none, "valid")


def test_a_file_of_its_own_may_be_held_out(tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.jsonl", ROWS), tmp_path / "other.txt"
    other.write_text("five", encoding="utf-8")
    said = data(path, valid=str(other))
    assert names(said, "train") == ["emma", "dracula", "alice"]
    assert names(said, "valid") == ["other"]
    with pytest.raises(InputError, match=r"data\.test: no document is held out for it"):
        load_documents(said, "test")


@pytest.mark.parametrize("row", [{"book": "emma", "text": "new"}, {"book": "new", "text": "three"}])
def test_what_is_held_out_is_not_trained_on(row: dict[str, Any], tmp_path: Path) -> None:
    path, held = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", [row])
    line = r"1 documents trained on share their name or a section with those of valid \(emma\); take them out, or set"
    with pytest.raises(InputError, match=line):
        load_documents(data(path, valid=held), "train")
    assert len(load_documents(data(path, valid=held, allow_overlap=True), "train")[0]) == 3


def test_the_books_at_hand_are_split_by_book() -> None:
    said = data(str(shared_dir() / "data/text/standard-ebooks.jsonl"))
    assert names(said, "valid") == ["charles-darwin_the-origin-of-species", "jane-austen_emma"]
    assert names(said, "test") == ["bram-stoker_dracula", "joseph-conrad_lord-jim"]
    train = load_documents(said, "train")[0]
    assert len(train) == 23
    assert sum(len(each.sections) for each in train) == 1542 - 15 - 55 - 28 - 45
