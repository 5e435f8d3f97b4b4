"""Catalog of the papers' reasoning data sets (`catalog.toml`): splits and sizes, local files, and names on the Hub."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from laconic.config.data import ROW_FILE_SUFFIXES, SplitName
from laconic.errors import InputError

AnswerKind = Literal["number", "digits", "text"]
SPLIT_NAMES: Mapping[str, SplitName] = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
HELD_OUT_PARTS: tuple[SplitName, ...] = ("valid", "test")


@dataclass(frozen=True)
class DatasetFile:
    path: str  # below `data.data_dir`
    num_rows: int
    sha256: str


@dataclass(frozen=True)
class DatasetSplit:
    published_rows: int | None = None  # rows of the split as published; None if unknown
    file: DatasetFile | None = None  # local file; with fewer rows than published, it is a part of the split
    hub_split: str | None = None  # name of the split on the Hub, in the slice syntax of `datasets`
    required_mark: tuple[str, Any] | None = None  # (field, value) that a row must have to belong to the split
    marked_rows: int | None = None  # how many rows have that mark

    @property
    def num_rows(self) -> int | None:
        return self.published_rows if self.marked_rows is None else self.marked_rows


@dataclass(frozen=True)
class PublishedLengths:
    """Training rows, and quantiles (0, 0.5, 0.9, 0.99, 1) of lengths in GPT-2 tokens; short chains lack the last step.

    Counted on 10,432 rows of GSM8K-Aug, on GSM8K's solutions for -nl, and on the generated validation rows of others.
    """

    rows: int
    question: tuple[int, ...]
    chain: tuple[int, ...]
    short_chain: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class DatasetInfo:
    name: str
    description: str
    licence: str
    splits: Mapping[str, DatasetSplit]
    hub_repo: str | None = None
    hub_config: str | None = None
    # how the columns on the Hub are converted; a key of `columns.COLUMN_CONVERTERS`
    columns: Literal["standard", "gsm8k", "zen-aug", "zen-nl", "gsm-hard", "svamp", "multiarith"] = "standard"
    # field that holds the chain; empty if rows have none, or the first row says which
    chain_field: Literal["steps", "cot", "rationale", ""] = "steps"
    # how a chain that is one string is split into steps
    chain_split: Literal["lines", "sentences", "spaces", "whole"] = "lines"
    answer_kind: AnswerKind = "number"
    members: tuple[str, ...] = ()  # names of the data sets that this one is the union of
    generator: str | None = None  # name under which `laconic data make` generates more rows
    published_lengths: PublishedLengths | None = None


TABLES = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
DATASETS = TypeAdapter(dict[str, DatasetInfo]).validate_python({name: {"name": name} | TABLES[name] for name in TABLES})


def find_dataset(name: str) -> DatasetInfo | None:
    """Return the data set of a catalog name or Hub name, either with or without `:SPLIT`.

    A Hub repository with several entries gives the first, whose splits are those of the Hub. Another configuration of
    a repository is not in the catalog.
    """
    repo, config, _ = parse_hub_name(name)
    by_repo = (info for info in DATASETS.values() if info.hub_repo and info.hub_repo.lower() == repo.lower())
    info = DATASETS.get(repo) or next(by_repo, None)
    return info if info is None or config in (None, info.hub_config) else None


def refuse_csv(path: Path) -> None:
    if path.suffix.lower() in (".csv", ".tsv"):
        remedy = 'convert it, as with pandas: read_csv(FILE).to_json("rows.jsonl", orient="records", lines=True)'
        raise InputError(f"{path.name}: rows are read from JSONL and Parquet; {remedy}")


def get_dataset(name: str) -> DatasetInfo:
    """Return the data set of a catalog name or Hub name. Raises `InputError` with the nearest known name."""
    info = find_dataset(name)
    base = split_name(name)[0]
    if info is None:
        refuse_csv(Path(base))
        suffixes = ", ".join(ROW_FILE_SUFFIXES)
        if Path(base).exists():
            kind = "a folder" if Path(base).is_dir() else "a file of another type"
            files = f"give a file that ends in {suffixes}, or name a data set of several files FOLDER/NAME"
            raise InputError(f"{base} is {kind}; {files}, from the folder above")
        hint = suggest_dataset(base) or f"`laconic data list` lists them; a file name ends in {suffixes}"
        raise InputError(f"unknown data set {base}; {hint}")
    return info


def suggest_dataset(name: str) -> str:
    """Return "did you mean NAME?" for the nearest catalog or Hub name; empty if none is near."""
    names = {known.lower(): known for info in DATASETS.values() for known in (info.name, info.hub_repo) if known}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)
    return f"did you mean {names[near[0]]}?" if near else ""


def split_name(name: str) -> tuple[str, str | None]:
    """Split NAME:SPLIT, or NAME:CONFIG:SPLIT, into the name and the split, under our word for it."""
    base, _, split = parse_hub_name(name)
    return base, None if split is None else SPLIT_NAMES.get(split, split)


class HubName(NamedTuple):
    repo: str
    config: str | None = None
    split: str | None = None


def parse_hub_name(name: str) -> HubName:
    """Split `REPO`, `REPO:SPLIT` or `REPO:CONFIG:SPLIT`."""
    repo, _, rest = name.partition(":")
    config, _, split = rest.rpartition(":")
    return HubName(repo, config or None, split or None)


def iter_whole_split_files() -> Iterator[tuple[str, str]]:
    """Yield the SHA-256 of each file that is all of a split, with NAME:SPLIT; earlier entries of the catalog last."""
    for info in reversed(DATASETS.values()):
        for part, split in info.splits.items():
            if split.file and split.required_mark is None:
                yield split.file.sha256, f"{info.name}:{part}"
