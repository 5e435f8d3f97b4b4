"""Read Parquet files and data sets of the Hugging Face Hub, with the libraries of the extra `hf`."""

import logging
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic.console import status
from laconic.data.reasoning.catalog import find_dataset, suggest_dataset
from laconic.errors import InputError

LOCAL_COPY_HINT = (
    "a local copy also works: name its .jsonl or .parquet file in --tasks or data.name, or its folder in --data-dir or "
    "data.data_dir"
)
BATCH_ROWS = 1024


class TableRows(NamedTuple):
    """The number of rows, and an iterable of them."""

    num_rows: int
    rows: Iterable[dict[str, Any]]


def read_parquet(path: Path) -> TableRows:
    """Open a Parquet file; its rows are read lazily. Raises `InputError`.

    A file with more rows than bytes repeats few rows very often: a small file could take hours.
    """
    from pyarrow.parquet import ParquetFile

    with translate_parquet_errors(f"{path.name}: not a Parquet file"):
        file = ParquetFile(path)
    num_rows, num_bytes = file.metadata.num_rows, path.stat().st_size
    if num_rows > num_bytes:
        file.close()
        raise InputError(f"{path.name}: {num_rows:,} rows in {num_bytes:,} bytes, so most are equal; remove duplicates")
    return TableRows(file.metadata.num_rows, iter_parquet_rows(file, path.name))


def iter_parquet_rows(file: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open Parquet file and close it."""
    with file:
        batches, num_read = file.iter_batches(BATCH_ROWS, use_threads=False), 0
        while True:
            with translate_parquet_errors(f"{name}: damaged after row {num_read:,}"):
                batch = next(batches, None)
                rows = [] if batch is None else decode_json_columns(batch.to_pylist(), batch.schema)
            if batch is None:
                return
            num_read += len(rows)
            yield from clean_floats(rows, batch.schema)


def decode_json_columns(rows: list[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """Return rows in which the texts of JSON columns, as the library `datasets` writes them, are replaced by values.

    Other columns may have types that `datasets` does not know. A text that is not JSON stays as it is.
    """
    fields = [field for field in schema if "arrow.json" in str(field.type)]
    if not fields:
        return rows
    import datasets
    import pyarrow

    features = datasets.Features.from_arrow_schema(pyarrow.schema(fields))
    decoded = list[dict[str, Any]]()
    for row in rows:
        with suppress(ValueError):
            row = row | features.decode_example({field.name: row[field.name] for field in fields})
        decoded.append(row)
    return decoded


@contextmanager
def translate_parquet_errors(message: str) -> Generator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:  # an error of the file system; pyarrow's own have no number
            raise
        raise InputError(f"{message}: {first_error_line(error)}; copy or write it again") from None


def load_hub_split(
    repo: str, config: str | None, split: str, revision: str | None, *, class_names: bool = False
) -> TableRows:
    """Load a split of a Hub data set, in the slice syntax of `datasets`, or its cached copy. Raises `InputError`.

    With `class_names`, labels are names instead of numbers.
    """
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hide its messages about retries
    try:
        with status(f"fetching {repo} from the Hugging Face Hub"):
            dataset = datasets.load_dataset(repo, config, split=split, revision=revision)
    except Exception as error:  # the client raises many types: HTTP, names, offline, cache
        suggestion = "" if find_dataset(repo) else suggest_dataset(repo)
        hint = f"{suggestion} {LOCAL_COPY_HINT}" if suggestion else LOCAL_COPY_HINT
        hint = f"name it, {repo}:CONFIG:{split}" if "Config name is missing" in str(error) else hint
        origin = "the folder of this name" if Path(repo).is_dir() else "the Hub"
        message = f"cannot load {repo} from {origin}: {' '.join(str(error).split())[:300] or type(error).__name__}"
        raise InputError(f"{message}; {hint}") from error
    assert isinstance(dataset, datasets.Dataset)
    labels = {key: kind for key, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)}
    batches = map(columns_to_rows, dataset.iter(BATCH_ROWS))
    rows = (row for batch in batches for row in clean_floats(batch, dataset.features.arrow_schema))
    if class_names and labels:
        rows = (row | {key: kind.int2str(row[key]) for key, kind in labels.items()} for row in rows)
    return TableRows(len(dataset), rows)


def columns_to_rows(columns: Any) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def clean_floats(rows: list[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """Replace NaN by None, and numbers of 32 bits by the shortest decimals that are rounded to them, in place."""
    import pyarrow

    for field in schema:
        if pyarrow.types.is_floating(field.type):
            to_float = (lambda x: float(str(np.float32(x)))) if field.type == pyarrow.float32() else float
            for row in rows:
                x = row[field.name]
                row[field.name] = None if x is None or math.isnan(x) else to_float(x)
    return rows


def first_error_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
