"""Rows of tables: Parquet files, and data sets of the hub; both by libraries of the extra hf."""

import logging
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.reasoning.catalog import find_dataset, suggest_dataset
from laconic.errors import InputError

LOCAL_COPY_HINT = (
    "a local copy works too: its .jsonl or .parquet file as data.name, or the folder of the files as data.data_dir"
)
BATCH_ROWS = 1024  # rows turned into Python at once


class TableRows(NamedTuple):
    """How many rows there are, and they."""

    num_rows: int
    rows: Iterable[dict[str, Any]]


def read_parquet(path: Path) -> TableRows:
    """The rows of a Parquet file. Raises `BadInput`."""
    from pyarrow.parquet import ParquetFile

    with translate_parquet_errors(f"{path.name}: no Parquet file"):
        file = ParquetFile(path)
    return TableRows(file.metadata.num_rows, iter_parquet_rows(file, path.name))


def iter_parquet_rows(file: Any, name: str) -> Iterator[dict[str, Any]]:
    """The rows of an open Parquet file, which is closed behind them. Raises `BadInput` for pages that are damaged."""
    with file:
        batches, done = file.iter_batches(BATCH_ROWS, use_threads=False), 0
        while True:
            with translate_parquet_errors(f"{name}: damaged after row {done:,}"):
                batch = next(batches, None)
                rows: list[dict[str, Any]] = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            done += len(rows)
            yield from rows


@contextmanager
def translate_parquet_errors(said: str) -> Generator[None]:
    """Turns what pyarrow raises for bytes that are no sound Parquet into `BadInput` (66)."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:  # the file system's; pyarrow's own have no number
            raise
        raise InputError(f"{said}: {first_error_line(error)}; copy it again, or write it again") from None


def load_hub_split(
    repo: str, config: str | None, split: str, revision: str | None, *, class_names: bool = False
) -> TableRows:
    """The rows of a split on the hub, or in the hub's cache here; with `names` a class is its name, not its number.

    Raises `BadInput`, also for a split there is not.
    """
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are no lines of ours
    try:
        found = datasets.load_dataset(repo, config, split=split, revision=revision)
    except Exception as error:  # the hub's client raises of many kinds: HTTP, names, offline, cache
        there = re.search(r"Unknown split .* one of \[(.*)\]", str(error))
        if there:
            splits = there[1].replace("'", "")
            raise InputError(f"{repo} has no split {split}; it has {splits}") from None
        near = "" if find_dataset(repo) else suggest_dataset(repo)
        say = f"{near} {LOCAL_COPY_HINT}" if near else LOCAL_COPY_HINT
        raise InputError(f"{repo}: the hub gives nothing by that name: {first_error_line(error)}; {say}") from error
    assert isinstance(found, datasets.Dataset)
    classes = {key: kind for key, kind in found.features.items() if isinstance(kind, datasets.ClassLabel)}
    rows = (row for batch in found.iter(BATCH_ROWS) for row in columns_to_rows(batch))
    if class_names and classes:
        rows = (row | {key: kind.int2str(row[key]) for key, kind in classes.items()} for row in rows)
    return TableRows(len(found), rows)


def columns_to_rows(columns: Any) -> Iterator[dict[str, Any]]:
    """Columns as rows."""
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def first_error_line(error: Exception) -> str:
    """What an error says first."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
