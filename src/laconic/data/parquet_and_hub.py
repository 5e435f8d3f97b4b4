"""Read Parquet files and data sets of the Hugging Face Hub, with the libraries of the extra `hf`."""

import json
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
    num_rows: int
    rows: Iterable[dict[str, Any]]


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file. Raises `InputError`, also for a small file whose rows would take hours."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    num_read, num_bytes = 0, path.stat().st_size
    try:
        with ParquetFile(path) as file:
            num_rows = file.metadata.num_rows
            if num_rows > num_bytes:
                repeated = f"{num_rows:,} rows in {num_bytes:,} bytes, so most are equal; remove duplicates"
                raise InputError(f"{path.name}: {repeated}")
            for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                rows = to_rows(batch, file.schema_arrow)
                num_read += len(rows)
                yield from rows
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:  # an error of the file system; pyarrow's own have no number
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        place = f"damaged after row {num_read:,}" if num_read else "no Parquet file, or damaged"
        raise InputError(f"{path.name}: {place}: {reason}; copy or write it again") from None


def to_rows(table: Any, schema: Any) -> list[dict[str, Any]]:
    """Return the rows of a table: NaN as None, numbers of 32 bits as the shortest decimals that are rounded to them.

    Columns that the library `datasets` wrote have the names of their labels, and the values of their JSON texts.
    """
    import pyarrow

    rows = decode_json_columns(table.to_pylist(), schema)
    label_names = read_label_names(schema)
    for field in schema:
        names = label_names.get(field.name) if pyarrow.types.is_integer(field.type) else None
        if not names and not pyarrow.types.is_floating(field.type):
            continue
        for row in rows:
            x = row[field.name]
            if x is None:
                continue
            if names:
                row[field.name] = names[x] if 0 <= x < len(names) else None
            elif math.isnan(x):
                row[field.name] = None
            else:
                row[field.name] = float(str(np.float32(x)) if field.type == pyarrow.float32() else x)
    return rows


def read_label_names(schema: Any) -> dict[str, list[Any]]:
    """Return the names of labels by column from the metadata of `datasets`; none from other metadata of its key."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: list(feature["names"]) for name, feature in features.items() if "names" in feature}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


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


def load_hub_split(repo: str, config: str | None, split: str, revision: str | None) -> TableRows:
    """Load a split of a Hub data set, in the slice syntax of `datasets`, or its cached copy. Raises `InputError`."""
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
    schema = dataset.features.arrow_schema
    tables = dataset.with_format("arrow").iter(BATCH_ROWS)
    return TableRows(len(dataset), (row for table in tables for row in to_rows(table, schema)))
