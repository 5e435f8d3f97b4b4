"""Catalog against the README of the data, and suggestions for unknown names."""

import re
from pathlib import Path

import pytest

from laconic.data.reasoning.catalog import (
    DATASETS,
    find_dataset,
    get_dataset,
    iter_whole_split_files,
    split_name,
)
from laconic.errors import InputError


def test_catalog_files_match_the_readme(shared: Path) -> None:
    text = (shared / "data/README.md").read_text("utf-8")
    hashes = {path: hash_ for hash_, path in re.findall(r"^([0-9a-f]{64})  (\S+)$", text, re.MULTILINE)}
    rows = {
        path: int(n.replace(",", "")) for path, n in re.findall(r"^\| (\S+\.jsonl) \| ([\d,]+) \|", text, re.MULTILINE)
    }
    licences = dict(re.findall(r"^\| (\S+\.jsonl) \|.*\| (MIT|Apache-2\.0)[^|]*\| [^|]* \|$", text, re.MULTILINE))
    files = [(one, split.file) for one in DATASETS.values() for split in one.splits.values() if split.file]
    assert {file.path for _, file in files} == {
        path for path in hashes if path.endswith(".jsonl") and not re.match("clinc|banking|dbpedia|text", path)
    }
    for one, file in files:
        assert (file.sha256, file.num_rows) == (hashes[file.path], rows[file.path])
        assert one.licence == licences[file.path]


def test_catalog_sizes_match_the_specification() -> None:
    sizes = {f"{one.name}:{part}": split.num_rows for one in DATASETS.values() for part, split in one.splits.items()}
    for name in ("gsm8k-aug", "gsm8k-aug-nl"):
        assert [sizes[f"{name}:{part}"] for part in ("train", "valid", "test")] == [385620, 500, 1319]
    assert [sizes[f"gsm8k:{part}"] for part in ("train", "valid", "test")] == [6973, 500, 1319]
    assert (sizes["svamp:test"], sizes["svamp-300:test"], sizes["svamp-300:train"]) == (1000, 300, 700)
    assert (sizes["multiarith:test"], sizes["multiarith-180:test"]) == (600, 180)
    assert sizes["gsm-union:train"] == 10432 + 6973 - 201 + 1384
    assert sizes["aggregate:train"] == 1492 - 108


@pytest.mark.parametrize(
    ("query", "name"),
    [("gsm8k-aug", "gsm8k-aug"), ("gsm8k-aug:valid", "gsm8k-aug"), ("whynlp/gsm8k-aug", "gsm8k-aug"),
     ("ChilleD/SVAMP", "svamp-300"), ("openai/GSM8K:test", "gsm8k"), ("zen-E/GSM8k-Aug-NL", "zen-E/GSM8k-Aug-NL")],
)  # fmt: skip
def test_get_dataset_by_name_or_repository(query: str, name: str) -> None:
    assert get_dataset(query) is DATASETS[name]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("gsm8k-agu", r"gsm8k-agu; did you mean gsm8k-aug\?$"),
        ("GSM8K:test", r"GSM8K; did you mean gsm8k\?$"),
        ("whynlp/gsm8kaug", r"did you mean whynlp/gsm8k-aug\?$"),
        ("mathematics", r"^unknown data set mathematics; .* a file name ends in \.jsonl, \.ndjson,"),
        ("rows.jsonl.gz", r"^rows\.jsonl\.gz is a file of another type; give a file that ends in"),
        ("./own/set:train", r"^\./own/set is a folder; give a .*, or name a data set of several files FOLDER/NAME"),
    ],
)
def test_get_dataset_suggests_names(query: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl.gz").touch()
    (tmp_path / "own" / "set").mkdir(parents=True)
    assert find_dataset(query) is None
    with pytest.raises(InputError, match=message):
        get_dataset(query)


def test_split_name_normalises_the_split() -> None:
    assert split_name("a/b:validation") == ("a/b", "valid")
    assert split_name("a:dev") == ("a", "dev")
    assert split_name("a") == ("a", None)


def test_iter_whole_split_files() -> None:
    files = dict(iter_whole_split_files())
    assert files[DATASETS["gsm8k"].splits["test"].file.sha256] == "gsm8k:test"  # pyright: ignore
    assert not any(split.startswith("gsm8k:train") for split in files.values())
