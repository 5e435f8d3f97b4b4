"""Evaluation results: one record per item and condition, stored as JSON lines, resumable and committed atomically.

A finished evaluation is a folder in `RUN/evaluations` with `records.jsonl` (one `EvalRecord` per line), `result.json`
(metadata and summary figures), a copy of the recipe and a manifest. While it runs, finished units of work are appended
to a hidden folder beside it, one line with a hash per unit, so that the same command resumes where it stopped.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from laconic.console import ProgressFn
from laconic.errors import BusyError, CorruptArtifactError, InputError
from laconic.storage import manifest
from laconic.storage.atomic import check_not_link, write_folder_atomically, write_text_atomically
from laconic.storage.manifest import hash_json, hash_line
from laconic.storage.run_dir import truncate_partial_line
from laconic.storage.strict_json import read_json, to_canonical_json, validate_json
from laconic.training.ranks import Ranks

EVALUATIONS_FOLDER = "evaluations"
RECORDS_FILE, RESULT_FILE, UNITS_FILE, METADATA_FILE = "records.jsonl", "result.json", "units.jsonl", "metadata.json"
SCHEMA = 1
REMOVE_HINT = "remove it to evaluate again, or give your file another name"

EvalKind = Literal[
    "reasoning", "audit", "compression", "context_qa", "memories", "loss", "streams", "class_incremental"
]
ReportFraction = Callable[[float], None]


@dataclass(frozen=True)
class EvalRecord:
    """The metrics of one item of a task under one condition: a line of `records.jsonl`.

    Run, training seed and step say which checkpoint was evaluated. The condition says how, for example "cot" or "learn,
    carry". Metrics are values that JSON can hold.
    """

    task: str
    run: str
    seed: int
    step: int
    item: str
    condition: str
    metrics: Mapping[str, Any]


class EvalItem(NamedTuple):
    """The metrics of one item by condition."""

    id: str
    conditions: Mapping[str, Mapping[str, Any]]

    @property
    def shared(self) -> Mapping[str, Any]:
        """Those of the first condition, for metrics that do not depend on the condition."""
        return next(iter(self.conditions.values()))


@dataclass(frozen=True)
class EvalMetadata:
    """What an evaluation measured of a run at a step; stored in `result.json`.

    `limit` is the number of items, where the task was cut to its first ones; `shots` the number of training examples
    per class, where it was limited; `suffix` that of the task's file. `variant` has the options that make this a
    different evaluation of the same task, for example the protocol; `key` everything else that the results depend on,
    such as hashes of the checkpoint and of the data.
    """

    kind: EvalKind
    task: str
    run: str = ""
    seed: int = 0
    step: int = 0
    limit: int | None = None
    shots: int | None = None
    variant: Mapping[str, str] = field(default_factory=dict[str, str])
    key: Mapping[str, str] = field(default_factory=dict[str, str])
    suffix: str = ""

    @property
    def folder_name(self) -> str:
        """Name of the folder in `evaluations`: unique per task, variant, step and limits. It is never parsed."""
        parts = [self.kind, self.task, *self.variant.values(), f"step-{self.step}"]
        parts += [f"{name}-{n}" for name, n in (("limit", self.limit), ("shots", self.shots)) if n is not None]
        return "-".join(filter(None, map(folder_safe_name, parts)))

    @property
    def group(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What evaluations of one run at different steps and limits have in common."""
        return self.kind, self.task, tuple(sorted(self.variant.items()))

    @property
    def sort_key(self) -> tuple[int, float, float]:
        """Step, number of items and number of training examples; the largest is the latest and most complete."""
        return self.step, inf if self.limit is None else self.limit, inf if self.shots is None else self.shots


@dataclass(frozen=True)
class EvalJob:
    """One evaluation of one checkpoint: the contents of one results folder.

    `evaluate` returns the items of each of the given units of work; a unit is usually one item. It is called with
    `batch_size` units on each rank, in this `order`, but records are stored in order of the units. If
    `reports_fraction` is set, it takes a second argument: a function to call with the fraction of these units that is
    done. `summarize` returns the figures that are stored in `result.json`; `notes` are remarks that are stored beside
    them, and `source` is data that a report needs besides.

    A stored evaluation with other metadata under the same name is refused, unless only the name of the run differs,
    because runs may be renamed and copied.
    """

    metadata: EvalMetadata
    num_units: int
    evaluate: Callable[..., Sequence[Sequence[EvalItem]]]
    batch_size: int = 1
    order: Sequence[int] | None = None
    summarize: Callable[[Sequence[EvalItem]], Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()
    source: Any = None
    reports_fraction: bool = False


class StoredEvaluation(NamedTuple):
    """A committed evaluation: its folder, metadata, figures and notes, and if loaded its items and its job's data."""

    folder: Path
    metadata: EvalMetadata
    figures: Mapping[str, Any]
    notes: Sequence[str]
    items: Sequence[EvalItem] = ()
    source: Any = None


def folder_safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]", "-", name).strip("-")


def run_resumable(
    job: EvalJob,
    folder: Path,
    *,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressFn | None = None,
    before_batch: Callable[[], None] | None = None,
    ranks: Ranks | None = None,
) -> list[EvalItem]:
    """Return the items of every unit, in order, evaluated or loaded from what the `evaluations` folder has of them.

    `extra_files` are further text files to store, by name. `progress` is called before the first batch and after each,
    and within it if the job reports its fraction, with an empty name, the number of finished units and their total.
    `before_batch` may raise to interrupt. The first rank writes. Raises `BusyError` where stored results are of other
    metadata, and `CorruptArtifactError` where they were changed.
    """
    ranks = ranks or Ranks()
    target = folder / job.metadata.folder_name
    stored = ranks.run_on_rank_zero(lambda: _load_committed(target, job.metadata))
    if stored is not None:
        return stored
    order = range(job.num_units) if job.order is None else job.order
    partial = partial_folder(target)
    lines = [*ranks.run_on_rank_zero(lambda: _load_partial(partial, job.metadata))]
    digest = reduce(hash_line, lines, "")
    with (partial / UNITS_FILE).open("a", encoding="utf-8") if ranks.rank == 0 else io.StringIO() as file:
        if progress:
            progress("", len(lines), job.num_units)
        while len(lines) < job.num_units:
            if before_batch:
                before_batch()
            indices = order[len(lines) : len(lines) + job.batch_size * ranks.world_size]
            rank_indices = indices[ranks.rank :: ranks.world_size]

            def report(fraction: float, num_before: int = len(lines), num_units: int = len(indices)) -> None:
                if progress:
                    progress("", num_before + int(fraction * num_units), job.num_units)

            arguments = (rank_indices, report) if job.reports_fraction else (rank_indices,)
            units = job.evaluate(*arguments) if rank_indices else []
            unit_records = [list(map(asdict, to_records(job.metadata, items))) for items in units]
            parts = ranks.all_gather([f"{to_canonical_json(unit)}\n" for unit in unit_records])
            new = [parts[i % ranks.world_size][i // ranks.world_size] for i in range(len(indices))]
            for line in new:
                digest = hash_line(digest, line)
                file.write(f"{digest} {line}")
            file.flush()
            lines += new
            if progress:
                progress("", len(lines), job.num_units)
    by_unit = sorted(zip(order, lines, strict=True), key=lambda unit: unit[0])
    records = [EvalRecord(**{**record, "run": job.metadata.run}) for _, line in by_unit for record in json.loads(line)]
    ranks.run_on_rank_zero(lambda: _commit(target, job, records, extra_files or {}))
    return group_items(records)


def partial_folder(folder: Path) -> Path:
    return folder.with_name(f".partial-{folder.name}")


def to_records(m: EvalMetadata, items: Sequence[EvalItem]) -> list[EvalRecord]:
    return [
        EvalRecord(m.task, m.run, m.seed, m.step, item.id, condition, metrics)
        for item in items
        for condition, metrics in item.conditions.items()
    ]


def group_items(records: Sequence[EvalRecord]) -> list[EvalItem]:
    """Group records by item, in order; a condition that an item already has begins another item of that name."""
    items: list[EvalItem] = []
    latest: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        conditions = latest.get(record.item)
        if conditions is None or record.condition in conditions:
            conditions = latest[record.item] = {}
            items.append(EvalItem(record.item, conditions))
        conditions[record.condition] = record.metrics
    return items


def load_items(folder: Path) -> list[EvalItem]:
    manifest.verify_folder(folder, "evaluation")
    file = folder / RECORDS_FILE
    try:
        lines = [json.loads(line) for line in file.read_bytes().decode().splitlines()]
    except ValueError as error:
        raise InputError(f"{file}: not JSON in UTF-8: {error}; {REMOVE_HINT}") from None
    return group_items(validate_json(list[EvalRecord], lines, str(file), REMOVE_HINT))


def load_stored(folder: Path) -> StoredEvaluation:
    result = read_json(folder / RESULT_FILE)
    if result.get("schema") != SCHEMA or "metadata" not in result:
        raise InputError(f"{folder / RESULT_FILE}: written by an incompatible version; {REMOVE_HINT}")
    manifest.verify_folder(folder, "evaluation")
    file = str(folder / RESULT_FILE)
    return StoredEvaluation(
        folder,
        validate_json(EvalMetadata, result["metadata"], file, REMOVE_HINT),
        validate_json(dict[str, Any], result.get("figures"), f"{file}: figures", REMOVE_HINT),
        validate_json(list[str], result.get("notes", []), f"{file}: notes", REMOVE_HINT),
    )


def latest_evaluations(
    folder: Path, kind: EvalKind, step: int | None = None
) -> dict[tuple[Any, ...], StoredEvaluation]:
    """Return one evaluation per task and variant: of a step, by default the latest, the one with the most items."""
    latest: dict[tuple[Any, ...], StoredEvaluation] = {}
    for file in sorted(folder.glob(f"{kind}*/{RESULT_FILE}")):
        stored = load_stored(file.parent)
        metadata = stored.metadata
        current = latest.get(metadata.group)
        is_wanted = metadata.kind == kind and step in (None, metadata.step)
        if is_wanted and (current is None or metadata.sort_key > current.metadata.sort_key):
            latest[metadata.group] = stored
    return latest


def _identity(metadata: EvalMetadata) -> str:
    """Return what tells evaluations apart as JSON: the metadata without names of run and file, which may change."""
    return to_canonical_json({key: value for key, value in asdict(metadata).items() if key not in ("run", "suffix")})


def _load_partial(partial: Path, metadata: EvalMetadata) -> list[str]:
    """Return the finished units of an interrupted evaluation, after dropping a half-written last line."""
    units, mark = partial / UNITS_FILE, partial / METADATA_FILE
    text = _identity(metadata)
    if not mark.exists():
        partial.mkdir(parents=True, exist_ok=True)
        write_text_atomically(mark, text)
    elif mark.read_text(encoding="utf-8", errors="replace") != text:
        raise BusyError(f"{partial} holds partial results of another checkpoint or other data; {REMOVE_HINT}")
    check_not_link(units)
    if not units.exists():
        return []
    truncate_partial_line(units)
    stored = units.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    lines = list[str]()
    digest = ""
    for number, (expected, _, line) in enumerate((item.partition(" ") for item in stored), 1):
        digest = hash_line(digest, line)
        if digest != expected:
            raise CorruptArtifactError(f"{units}:{number}: was changed after it was written; remove {partial}")
        lines.append(line)
    return lines


def _load_committed(folder: Path, metadata: EvalMetadata) -> list[EvalItem] | None:
    """Return the items of a committed evaluation with this metadata; None where there is no such folder."""
    if not folder.exists():
        return None
    if _identity(load_stored(folder).metadata) != _identity(metadata):
        raise BusyError(f"{folder} is the evaluation of another checkpoint or of other data; {REMOVE_HINT}")
    return load_items(folder)


def _commit(folder: Path, job: EvalJob, records: Sequence[EvalRecord], extra_files: Mapping[str, str]) -> None:
    text = "".join(f"{to_canonical_json(asdict(r))}\n" for r in records)
    metadata = asdict(job.metadata)
    figures = dict(job.summarize(group_items(records))) if job.summarize else {}

    def write(new: Path) -> None:
        files = manifest.ManifestWriter(new)
        for name, content in {**extra_files, RECORDS_FILE: text}.items():
            files.add_text(name, content)
        result = {"schema": SCHEMA, "metadata": metadata, "figures": figures, "notes": job.notes}
        files.add_json(RESULT_FILE, result)
        files.finish("evaluation", 0, {"metadata": hash_json(metadata)})

    write_folder_atomically(folder, write, len(text))
    shutil.rmtree(partial_folder(folder))
