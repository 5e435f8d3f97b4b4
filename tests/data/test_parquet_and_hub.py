"""Parquet files are read as strictly as JSONL; errors of the Hub are one line."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from laconic.config.data import DataConfig, TextConfig
from laconic.data.documents.load import load_hub_documents
from laconic.data.parquet_and_hub import load_hub_split, read_parquet
from laconic.data.reasoning.catalog import find_dataset, parse_hub_name
from laconic.data.reasoning.load import load_examples
from laconic.data.reasoning.read_examples import read_examples
from laconic.errors import DiskError, InputError, translate_os_errors
from tests.conftest import needs

CONFIG = DataConfig(path="rows.parquet")
ROW: dict[str, Any] = {"question": "2 and 2?", "steps": ["<<2+2=4>>"], "answer": "4"}


def written(folder: Path, *rows: dict[str, Any], compression: str = "snappy") -> Path:
    needs("pyarrow")
    import pyarrow
    from pyarrow import parquet

    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, compression=compression)
    return path


def test_read_examples_of_parquet(tmp_path: Path) -> None:
    path = written(tmp_path, ROW | {"level": 3}, ROW | {"question": "3?", "steps": [], "answer": "3", "level": None})
    read = read_examples(path, CONFIG)
    assert [(e.id, e.question, e.steps, e.answer) for e in read.examples] == [
        ("rows.parquet:1", "2 and 2?", ("<<2+2=4>>",), "4"),
        ("rows.parquet:2", "3?", (), "3"),
    ]
    assert read.examples[0].metadata == {"level": 3}
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [e.id for e in read_examples(path, CONFIG, 1).examples] == ["rows.parquet:1"]


def test_tables_with_nan_and_numbers_of_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Parquet file, and a folder of it as the library `datasets` reads it."""
    needs("datasets")
    import pyarrow
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "set").mkdir(parents=True)
    answers = pyarrow.array([0.1, -3.0, 2.5], pyarrow.float32())
    columns = {"question": ["a?", "b?", "c?"], "answer": answers, "score": [1.0, float("nan"), None]}
    parquet.write_table(pyarrow.table(columns), "own/set/train.parquet")
    for read in (
        read_examples("own/set/train.parquet", CONFIG),
        load_examples("own/set", "train", CONFIG),
    ):
        assert [example.answer for example in read.examples] == ["0.1", "-3", "2.5"]
        assert [example.metadata["score"] for example in read.examples] == [1.0, None, None]


def test_tables_with_json_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("datasets")
    from datasets import Dataset, Features, Json, List, Value

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "set").mkdir(parents=True)
    features = Features({"messages": List({"role": Value("string"), "content": Value("string"), "tool_calls": Json()})})
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": "?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    Dataset.from_list([{"messages": messages}], features=features).to_parquet("own/set/train.parquet")
    assert list(load_hub_split("own/set", None, "train", None).rows) == [{"messages": messages}]
    assert list(read_parquet(Path("own/set/train.parquet"))) == [{"messages": messages}]


def test_read_parquet_with_json_beside_types_that_datasets_does_not_know(tmp_path: Path) -> None:
    needs("datasets")
    import pyarrow
    from pyarrow import parquet

    columns = {
        "question": ["1?", "2?"],
        "tags": pyarrow.array(['{"a": 1}', "no JSON"], pyarrow.json_()),
        "counts": pyarrow.array([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    first, second = read_parquet(tmp_path / "rows.parquet")
    assert first == {"question": "1?", "tags": {"a": 1}, "counts": [("a", 1)]}
    assert second == {"question": "2?", "tags": "no JSON", "counts": []}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": None}, r"^rows\.parquet:2: answer: not a string: null; expected messages"),
        ({"steps": ["a", ""]}, r"^rows\.parquet:2: steps: not a list of non-empty strings"),
    ],
)
def test_read_examples_locates_invalid_parquet_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_examples(written(tmp_path, ROW, ROW | row), CONFIG)


def test_tables_with_names_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Parquet file as of MMLU, and a folder of it as the library `datasets` reads it; -1 is no label."""
    needs("datasets")
    from datasets import ClassLabel, Dataset, Features, Value

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "set").mkdir(parents=True)
    features = Features({"question": Value("string"), "answer": ClassLabel(names=list("ABCD"))})
    rows = {"question": ["1?", "2?"], "answer": [2, -1]}
    Dataset.from_dict(rows, features=features).to_parquet("own/set/train.parquet")
    for table in (load_hub_split("own/set", None, "train", None).rows, read_parquet(Path("own/set/train.parquet"))):
        assert [row["answer"] for row in table] == ["C", None]


@pytest.mark.parametrize("text", ["{", "[]", '{"info": null}', '{"info": {"features": {"n": 1, "m": {"names": 2}}}}'])
def test_read_parquet_ignores_other_metadata(tmp_path: Path, text: str) -> None:
    needs("pyarrow")
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{"n": 1, "m": 2}]).replace_schema_metadata({"huggingface": text})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert list(read_parquet(tmp_path / "a.parquet")) == [{"n": 1, "m": 2}]


def test_read_examples_of_parquet_with_published_columns(tmp_path: Path) -> None:
    row = {"question": "2?", "cot": "<<1+1=2>> <<2*1=2>>", "answer": "#### 2"}
    read = read_examples(
        written(tmp_path, row, row | {"answer": None}), DataConfig(path="rows.parquet", chain_split="spaces")
    )
    assert [(e.steps, e.answer) for e in read.examples] == [(("<<1+1=2>>", "<<2*1=2>>"), "2")]
    assert read.notes == ("rows.parquet: rows dropped because they have no answer",)


def test_read_parquet_refuses_other_files(tmp_path: Path) -> None:
    path = written(tmp_path, ROW)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"rows\.parquet: no Parquet file"):
        read_examples(path, CONFIG)


def test_read_parquet_refuses_more_rows_than_bytes(tmp_path: Path) -> None:
    """A megabyte of equal rows may take minutes to read."""
    path = written(tmp_path, *[ROW] * 20_000)
    assert path.stat().st_size < 20_000
    with pytest.raises(InputError, match=r"20,000 rows in [\d,]+ bytes, so most are equal"):
        read_examples(path, CONFIG)


def test_read_parquet_damaged_page(tmp_path: Path) -> None:
    path = written(tmp_path, *(ROW | {"question": f"{i} and 2?"} for i in range(5000)))
    data = bytearray(path.read_bytes())
    data[len(data) // 8 : len(data) // 4] = bytes(len(data) // 4 - len(data) // 8)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"^rows\.parquet: (damaged after row \d|no Parquet file)"):
        read_examples(path, CONFIG)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_read_parquet_with_changed_bytes(tmp_path: Path, compression: str) -> None:
    whole = written(tmp_path, ROW | {"level": 3}, ROW | {"question": "3?"}, compression=compression).read_bytes()
    path, errors = tmp_path / "rows.parquet", list[str]()
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 0xFF
        path.write_bytes(data)
        try:
            read_examples(path, CONFIG)
        except InputError as error:
            errors.append(str(error))
    assert len(errors) > len(whole) // 70
    assert all(text.startswith("rows.parquet:") for text in errors)


def test_read_parquet_passes_disk_errors_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(parquet, "ParquetFile", fail)
    path = written(tmp_path, ROW)
    with pytest.raises(DiskError, match=r"rows\.parquet: Input/output error"), translate_os_errors(path):
        list(read_parquet(path))


def test_load_hub_split_offline() -> None:
    needs("datasets")
    with pytest.raises(InputError, match=r"cannot load whynlp/gsm8k-aug from the Hub: .*; a local copy also works"):
        load_hub_split("whynlp/gsm8k-aug", None, "train", None)
    with pytest.raises(InputError, match=r"did you mean whynlp/gsm8k-aug\? a local copy also works"):
        load_hub_split("whynlp/gsm8k-agu", None, "train", None)


def test_load_hub_split_of_several_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local copy of a hub data set with two configurations, as the library `datasets` reads it."""
    needs("datasets")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own" / "multi"
    folder.mkdir(parents=True)
    files = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}.jsonl"}]} for name in ("s", "l")]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(files)}\n---\n")
    for name in ("s", "l"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": f"{name}?", "answer": "1", "text": name}) + "\n")
    with pytest.raises(
        InputError, match=r"^cannot load own/multi from the folder .*\['s', 'l'\].*; name it, own/multi:CONFIG:train$"
    ):
        load_hub_split("own/multi", None, "train", None)
    with pytest.raises(
        InputError, match=r"^cannot load own/multi from .*: BuilderConfig 'm' not found\. Available: \['s', 'l'\]"
    ):
        load_hub_split("own/multi", "m", "train", None)
    examples = load_examples("own/multi:l:train", "train", DataConfig(path="rows.jsonl")).examples
    assert [example.question for example in examples] == ["l?"]
    documents = load_hub_documents("own/multi:s:train", TextConfig(), None)
    assert [document.sections for document in documents] == [("s",)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b:train", ("a/b", None, "train")),
        ("a/b:c:train", ("a/b", "c", "train")),
        ("a/b:c:", ("a/b", "c", None)),
        ("a/b:", ("a/b", None, None)),
    ],
)
def test_parse_hub_name(name: str, expected: tuple[str | None, ...]) -> None:
    assert parse_hub_name(name) == expected


def test_find_dataset_another_configuration_is_not_known() -> None:
    known = find_dataset("openai/gsm8k:main:test")
    assert known is not None
    assert known is find_dataset("openai/gsm8k")
    assert find_dataset("openai/gsm8k:socratic:test") is None
