"""Loading and splitting of documents; held-out documents share nothing with training ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from laconic.config.data import DataConfig, SplitName, TextConfig
from laconic.data.documents import load as documents_load
from laconic.data.documents.load import Document, iter_texts, load_documents, load_hub_documents, read_documents
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
    return DataConfig.model_validate({"source": "text", "path": path, **more})


def names(data: DataConfig, part: SplitName) -> list[str]:
    return [document.name for document in load_documents(data, part)[0]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson"])
def test_read_documents_groups_by_book(tmp_path: Path, name: str) -> None:
    documents, notes = read_documents(write(tmp_path / name, ROWS), TextConfig())
    assert [(document.name, document.text) for document in documents] == [
        ("emma", "one\n\nthree"),
        ("dracula", "two"),
        ("alice", "four"),
    ]
    assert notes == []


def test_read_documents_with_other_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"body": "x", "title": "t"}, {"body": "y", "title": "t"}])
    assert read_documents(path, TextConfig(text_field="body", document_field="title"))[0] == [
        Document("t", ("x", "y"), "t")
    ]
    assert [document.name for document in read_documents(path, TextConfig(text_field="body"))[0]] == [
        "a.jsonl:1",
        "a.jsonl:2",
    ]


def test_read_documents_of_text_file(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes("\ufeffAn étude.\r\n\r\nTwo.".encode())
    assert read_documents(str(file), TextConfig())[0] == [Document("book", ("An étude.\r\n\r\nTwo.",))]
    file.write_bytes("\ufeff  \n".encode())
    with pytest.raises(InputError, match=r"book\.txt: contains no text"):
        read_documents(str(file), TextConfig())
    file.write_bytes(b"ab\0")
    with pytest.raises(InputError, match=r"book\.txt: byte 2 is NUL"):
        read_documents(str(file), TextConfig())
    with pytest.raises(InputError, match=r"no file .*other\.txt"):
        read_documents(str(tmp_path / "other.txt"), TextConfig())


def test_load_documents_from_parquet_and_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"book": row["book"], "text": row["text"]} for row in ROWS]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = read_documents(write(tmp_path / "a.jsonl", rows), TextConfig())[0]
    assert read_documents(str(tmp_path / "a.parquet"), TextConfig())[0] == lines
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(documents_load, "load_hub_split", lambda *names: calls.append(names) or TableRows(4, rows))
    assert load_hub_documents("some/books:validation", TextConfig(), "v1") == lines
    assert names(DataConfig(source="text", name=("some/books",)), "train") == ["emma"]
    assert calls == [("some/books", None, "validation", "v1"), ("some/books", None, "train", None)]
    parquet.write_table(pa.Table.from_pylist([{"text": "a"}, {"text": None}]), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet:2: text: not a string"):
        read_documents(str(tmp_path / "b.parquet"), TextConfig())


FAULTS: list[tuple[bytes, str]] = [
    (
        b'{"text": "a"}\n{"text": 5}\n',
        "a.jsonl:2: text: not a string: 5",
    ),
    (b'{"text": " "}\n', "a.jsonl: every text is blank; give rows with text"),
    (b'{"body": "a"}\n', 'a.jsonl:1: no field text: {"body": "a"}; expected a field text'),
    (b'{"text": "a", "book": "b"}\n{"text": "c"}\n', 'a.jsonl:2: no field book: {"text": "c"}'),
    (
        b'{"text": "a", "split": "dove"}\n',
        "a.jsonl:1: split: expected one of train, valid, validation, test, val, dev, eval",
    ),
    (b'{"text": "a"}\n\n{"text": 3}\n', "a.jsonl:3: text: not a string"),
    (b'{"text": "a"\n', "a.jsonl:1:"),
    (b'{"text": "\xff"}\n', "a.jsonl:1: byte 11 of the line is not UTF-8"),
    (b"\n", "a.jsonl: contains no row"),
    (
        b'{"text":"a","book":"b","split":"train"}\n{"text":"c","book":"b","split":"test"}\n',
        "b: rows in test and train",
    ),
]


@pytest.mark.parametrize(("raw", "message"), FAULTS)
def test_read_documents_refuses_invalid_rows(raw: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(InputError) as error:
        read_documents(str(tmp_path / "a.jsonl"), TextConfig())
    assert message in str(error.value)


def test_read_documents_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n\r\n')
    documents, _ = read_documents(str(tmp_path / "a.jsonl"), TextConfig())
    assert [document.text for document in documents] == ["a", "b"]


def test_split_documents_by_field(tmp_path: Path) -> None:
    marks = {"emma": "train", "dracula": "validation", "alice": "test"}
    path = write(tmp_path / "a.jsonl", [{**row, "split": marks[row["book"]]} for row in ROWS])
    parts: tuple[SplitName, ...] = ("train", "valid", "test")
    assert [names(data(path), part) for part in parts] == [["emma"], ["dracula"], ["alice"]]
    assert load_documents(data(path), "train")[1] == [
        "valid: 1 document held out, such as dracula",
        "test: 1 document held out, such as alice",
    ]
    assert names(data(path, valid=path, test=path), "valid") == ["dracula"]


def test_split_documents_at_random(tmp_path: Path) -> None:
    rows = [{"book": f"b{i % 20}", "text": f"section {i}"} for i in range(60)]
    config = data(write(tmp_path / "a.jsonl", rows))
    parts = [set(names(config, part)) for part in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert len(set.union(*parts)) == 20
    assert names(config, "valid") == names(config, "valid")
    none = data(config.path or "", text={"held_out_fraction": 0})
    assert len(names(none, "train")) == 20
    with pytest.raises(InputError, match=r"data\.valid: 20 different texts with .* leaves no document"):
        load_documents(none, "valid")


@pytest.mark.parametrize("max_rows", [1, 2, 5, 40])
def test_load_documents_stops_reading_at_max_train_rows(max_rows: int, tmp_path: Path) -> None:
    """The rest of the file, which has no end in a stream, is not read; held-out documents are of the part that is."""
    rows = [{"book": f"b{i // 2}", "text": f"section {i}"} for i in range(400)]
    path = write(tmp_path / "a.jsonl", rows)
    with open(path, "a", encoding="utf-8") as file:
        file.write("not JSON\n")
    parts = {part: load_documents(data(path, max_train_rows=max_rows), part)[0] for part in ("train", "valid", "test")}
    assert len(parts["train"]) == max_rows
    assert len(parts["valid"]) == len(parts["test"]) > 0
    read = [document for part in parts.values() for document in part]
    assert {document.name for document in read} == {f"b{i}" for i in range(len(read))}
    assert all(len(document.sections) == 2 for document in read)
    other = write(tmp_path / "b.jsonl", [{"text": "other"}])
    config = data(path, max_train_rows=max_rows, valid=other)
    assert names(config, "train") == [f"b{i}" for i in range(max_rows)]


def test_load_documents_limits_rows_that_name_splits(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "split": "valid" if i < 5 or i == 20 else "train"} for i in range(21)]
    config = data(write(tmp_path / "a.jsonl", rows), max_train_rows=3)
    assert names(config, "train") == ["a.jsonl:6", "a.jsonl:7", "a.jsonl:8"]
    assert len(names(config, "valid")) == 6


def test_split_documents_does_not_depend_on_the_file_name(tmp_path: Path) -> None:
    """Else a run whose file was renamed would be evaluated on documents that it was trained on."""
    rows = [{"text": f"section {i}"} for i in range(40)]
    files = [data(write(tmp_path / name, rows)) for name in ("a.jsonl", "b.jsonl")]
    for part in ("train", "valid", "test"):
        first, second = ([document.text for document in load_documents(file, part)[0]] for file in files)
        assert first == second


def test_split_documents_at_random_with_repetitions(tmp_path: Path) -> None:
    """Web pages repeat, and books share headings: equal texts are in one split, and a short section may be in two."""
    pages = [{"text": f"page {i % 8}"} for i in range(40)]
    books = [{"book": f"b{i}", "text": text} for i in range(40) for text in ("Chapter One", f"text {i}")]
    for rows in (pages, books):
        config = data(write(tmp_path / "a.jsonl", rows))
        documents = {part: load_documents(config, part)[0] for part in ("train", "valid", "test")}
        texts = [{document.text for document in part} for part in documents.values()]
        assert all(texts)
        assert len(set.union(*texts)) == sum(map(len, texts))
        assert sum(map(len, documents.values())) == 40
    few = data(write(tmp_path / "a.jsonl", [{"text": f"page {i % 2}"} for i in range(40)]))
    with pytest.raises(InputError, match=r"data\.valid: 2 different texts with .* leaves no document"):
        load_documents(few, "valid")
    long = "A preface of many words. " * 10
    config = data(write(tmp_path / "a.jsonl", [{"book": f"b{i}", "text": x} for i in range(9) for x in (long, f"{i}")]))
    with pytest.raises(InputError, match=r"training documents share a name or section with valid"):
        load_documents(config, "train")


def test_load_documents_from_held_out_file(tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.jsonl", ROWS), tmp_path / "other.txt"
    other.write_text("five", encoding="utf-8")
    config = data(path, valid=str(other))
    assert names(config, "train") == ["emma", "dracula", "alice"]
    assert names(config, "valid") == ["other"]
    with pytest.raises(InputError, match=r"data\.test: .* leaves no document"):
        load_documents(config, "test")


@pytest.mark.parametrize("row", [{"book": "emma", "text": "new"}, {"book": "new", "text": "three"}])
def test_load_documents_refuses_overlap(row: dict[str, Any], tmp_path: Path) -> None:
    path, held_out = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", [row])
    line = r"1 training documents share a name or section with valid \(emma\)"
    with pytest.raises(InputError, match=line):
        load_documents(data(path, valid=held_out), "train")
    assert len(load_documents(data(path, valid=held_out, allow_contamination=True), "train")[0]) == 3


@pytest.mark.medium
def test_load_documents_of_shipped_books() -> None:
    config = data(str(shared_dir() / "data/text/standard-ebooks.jsonl"))
    assert names(config, "valid") == ["charles-darwin_the-origin-of-species", "jane-austen_emma"]
    assert names(config, "test") == ["bram-stoker_dracula", "joseph-conrad_lord-jim"]
    train = load_documents(config, "train")[0]
    assert len(train) == 23
    assert sum(len(document.sections) for document in train) == 1542 - 15 - 55 - 28 - 45


def test_read_documents_skips_blank_texts(tmp_path: Path) -> None:
    """As wikitext has between its paragraphs."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " = Title = "}\n{"text": "\\n"}\n')
    documents, notes = read_documents(str(tmp_path / "a.jsonl"), TextConfig())
    assert [document.sections for document in documents] == [(" = Title = ",)]
    assert notes == ["a.jsonl: 2 rows with a blank text are skipped"]


def test_read_documents_compressed(tmp_path: Path) -> None:
    (tmp_path / "c4.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(InputError, match=r"^c4\.json\.gz: compressed with gzip; unpack it$"):
        read_documents(str(tmp_path / "c4.json.gz"), TextConfig())


def test_documents_may_have_controls(tmp_path: Path) -> None:
    """Web pages have NUL, and Hebrew or Arabic texts marks of direction; plain text files and Parquet pass too."""
    text = "\u202bשלום\u202c and \0 here, \u2066\u202e again"
    file = tmp_path / "pages.jsonl"
    for is_ascii in (True, False):
        file.write_text(json.dumps({"text": text}, ensure_ascii=is_ascii) + "\n", encoding="utf-8")
        assert read_documents(str(file), TextConfig())[0][0].sections == (text,)
        assert next(iter_texts(file.read_bytes().splitlines(keepends=True), "pages"))[1] == text
    file.write_text('{"text": "half \\ud83d"}\n')
    with pytest.raises(InputError, match=r"^pages\.jsonl:1: text: has lone surrogates"):
        read_documents(str(file), TextConfig())
