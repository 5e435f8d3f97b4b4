"""The results store: records on disk, resume after an interruption, several ranks, the latest evaluation."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from laconic.errors import BusyError, CorruptArtifactError, InputError
from laconic.evaluation.results_store import (
    METADATA_FILE,
    RECORDS_FILE,
    RESULT_FILE,
    UNITS_FILE,
    EvalItem,
    EvalJob,
    EvalMetadata,
    group_items,
    latest_evaluations,
    load_items,
    partial_folder,
    run_resumable,
    to_records,
)
from laconic.storage.manifest import MANIFEST_FILE, ManifestWriter

METADATA = EvalMetadata("streams", "mqar", "hope", seed=3, step=100, variant={"protocol": "a b"}, key={"data": "1"})


class Squares:
    """Two records per unit; may be interrupted after some calls."""

    def __init__(self, calls: int = 10**9) -> None:
        self.calls, self.units = calls, list[int]()

    def __call__(self, units: Sequence[int]) -> list[list[EvalItem]]:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.units += units
        return [[EvalItem(f"i{u}", {"a": {"x": u}, "b": {"x": u**2}})] for u in units]


def run(squares: Squares, folder: Path | None = None, metadata: EvalMetadata = METADATA, **options: Any) -> Any:
    job = {name: options.pop(name) for name in ("batch_size", "order", "summarize") if name in options}
    job = EvalJob(metadata, 23, squares, **{"batch_size": 5, **job})
    with TemporaryDirectory() as empty:
        return run_resumable(job, folder or Path(empty), **options)


def test_job_reports_the_share_of_a_batch(tmp_path: Path) -> None:
    def evaluate(units: Sequence[int], report: Callable[[float], None]) -> list[list[EvalItem]]:
        items = list[list[EvalItem]]()
        for n, unit in enumerate(units, 1):
            items.append([EvalItem(f"i{unit}", {"a": {"x": unit}})])
            report(n / len(units))
        return items

    calls = list[tuple[int, int]]()
    job = EvalJob(METADATA, 5, evaluate, 3, reports_fraction=True)
    run_resumable(job, tmp_path, progress=lambda name, done, total: calls.append((done, total)))
    assert calls == [(n, 5) for n in (0, 1, 2, 3, 3, 4, 5, 5)]


def test_group_items_inverts_to_records() -> None:
    items = [EvalItem("i1", {"a": {"x": 1.5}, "b": {}}), EvalItem("i1", {"a": {"x": 2}}), EvalItem("i2", {"b": {}})]
    records = to_records(METADATA, items)
    names = [(record.item, record.condition) for record in records]
    assert names == [("i1", "a"), ("i1", "b"), ("i1", "a"), ("i2", "b")]
    assert {(record.task, record.run, record.seed, record.step) for record in records} == {("mqar", "hope", 3, 100)}
    assert group_items(records) == items
    first, *others = records
    assert group_items([first, *others[2:], others[0]])[0] == items[0]  # records of an item need not be adjacent


def test_run_resumable_evaluates_each_unit_once_after_a_kill(tmp_path: Path) -> None:
    first, second = Squares(calls=2), Squares()
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path)
    units = partial_folder(tmp_path / METADATA.folder_name) / UNITS_FILE
    lines = units.read_text().splitlines(keepends=True)
    assert len(lines) == 10
    units.write_text("".join(lines[:8]) + lines[8][:20])  # killed in the middle of a line
    with pytest.raises(BusyError, match="partial results"):
        run(Squares(), tmp_path, replace(METADATA, key={"data": "2"}))
    records = run(second, tmp_path, extra_files={"a": "b"}, summarize=lambda items: {"n": len(items)})
    assert second.units == list(range(8, 23))
    assert records == run(Squares())
    assert [path.name for path in tmp_path.iterdir()] == ["streams-mqar-a-b-step-100"]
    folder = tmp_path / METADATA.folder_name
    assert {"a", RECORDS_FILE, RESULT_FILE} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / RESULT_FILE).read_text())["figures"] == {"n": 23}
    assert load_items(folder) == records


def test_run_resumable_refuses_changed_partial_results(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Squares(calls=2), tmp_path)
    units = partial_folder(tmp_path / METADATA.folder_name) / UNITS_FILE
    text = units.read_text()
    lines = text.splitlines(keepends=True)
    for number, changed in (
        (4, text.replace(lines[3], lines[3].replace(":3", ":4", 1))),
        (2, "".join([lines[0], *lines[2:]])),
        (1, "".join(line.partition(" ")[2] for line in lines)),
    ):
        assert changed != text
        units.write_text(changed)
        with pytest.raises(CorruptArtifactError, match=rf"units.jsonl:{number}: was changed"):
            run(Squares(), tmp_path)
    units.write_bytes(b"\xff" + text.encode())
    with pytest.raises(CorruptArtifactError, match=r"units.jsonl:1: was changed"):
        run(Squares(), tmp_path)
    units.write_text(text)
    mark = units.with_name(METADATA_FILE)
    content = mark.read_bytes()
    mark.write_bytes(b"\xff" + content)
    with pytest.raises(BusyError, match="another checkpoint or other data"):
        run(Squares(), tmp_path)
    mark.write_bytes(content)
    assert run(Squares(), tmp_path) == run(Squares())


def test_run_resumable_loads_what_is_stored_and_refuses_other_or_damaged_results(tmp_path: Path) -> None:
    records = run(Squares(), tmp_path)
    assert run(Squares(calls=0), tmp_path) == records
    with pytest.raises(BusyError, match="other data"):
        run(Squares(), tmp_path, replace(METADATA, key={"data": "2"}))
    with (tmp_path / METADATA.folder_name / RECORDS_FILE).open("a") as file:
        file.write("more\n")
    with pytest.raises(CorruptArtifactError, match=RECORDS_FILE):
        run(Squares(), tmp_path)


def test_run_resumable_of_a_renamed_run_continues_and_loads_what_is_stored(tmp_path: Path) -> None:
    renamed, rest = replace(METADATA, run="other"), Squares()
    with pytest.raises(KeyboardInterrupt):
        run(Squares(calls=2), tmp_path)
    records = run(rest, tmp_path, renamed)
    assert rest.units == list(range(10, 23))
    lines = (tmp_path / METADATA.folder_name / RECORDS_FILE).read_text().splitlines()
    assert {json.loads(line)["run"] for line in lines} == {"other"}
    assert run(Squares(calls=0), tmp_path) == run(Squares(calls=0), tmp_path, renamed) == records
    for other in (replace(renamed, seed=4), replace(renamed, key={"data": "2"})):
        with pytest.raises(BusyError, match="other data"):
            run(Squares(), tmp_path, other)


def test_run_resumable_follows_an_order_and_stores_in_order_of_the_units(tmp_path: Path) -> None:
    order = sorted(range(23), key=lambda i: (i * 7) % 23)
    first, second = Squares(), Squares()

    def interrupt() -> None:
        if len(first.units) >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path, order=order, before_batch=interrupt)
    assert first.units == order[:10]
    assert run(second, tmp_path, order=order) == run(Squares()) == load_items(tmp_path / METADATA.folder_name)
    assert second.units == order[10:]


class ThreadRank:
    """One of two ranks, each a thread."""

    world_size = 2

    def __init__(self, rank: int, board: list[list[object]], turn: threading.Barrier) -> None:
        self.rank, self.board, self.turn = rank, board, turn

    def all_gather(self, value: object) -> list[object]:
        self.board[self.rank].append(value)
        self.turn.wait(10)
        values = [column[-1] for column in self.board]
        self.turn.wait(10)
        return values

    def run_on_rank_zero(self, function: Callable[[], object]) -> object:
        return self.all_gather(function() if self.rank == 0 else None)[0]


def test_run_resumable_on_two_ranks_gives_the_records_of_one_process(tmp_path: Path) -> None:
    board, turn, work = list[list[object]]([[], []]), threading.Barrier(2), [Squares(), Squares()]

    def rank(number: int) -> list[EvalItem]:
        return run(work[number], tmp_path, batch_size=3, ranks=ThreadRank(number, board, turn))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [run(Squares())] * 2
    assert sorted(work[0].units + work[1].units) == list(range(23))
    assert len(work[0].units) - len(work[1].units) in (0, 1)
    with ThreadPoolExecutor(2) as pool:  # rank 0 loads the stored records for both
        assert list(pool.map(rank, range(2))) == [run(Squares())] * 2
    assert sorted(work[0].units + work[1].units) == list(range(23))


def test_latest_evaluations_takes_the_latest_step_with_the_most_items(tmp_path: Path) -> None:
    versions = [replace(METADATA, step=step, limit=limit) for step, limit in ((100, None), (200, 5), (200, 9))]
    other = replace(METADATA, step=50, variant={"protocol": "c"})
    for metadata in (*versions, other):
        run(Squares(), tmp_path, metadata)
    result = [x.metadata for x in latest_evaluations(tmp_path, "streams").values()]
    assert sorted(result, key=lambda item: item.step) == [other, versions[2]]
    assert not latest_evaluations(tmp_path, "reasoning")


def test_latest_evaluations_refuses_changed_folders(tmp_path: Path) -> None:
    run(Squares(), tmp_path)
    file = next(tmp_path.glob(f"*/{RESULT_FILE}"))
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises((CorruptArtifactError, InputError)):
            latest_evaluations(tmp_path, "streams")
    file.write_bytes(content)
    assert len(latest_evaluations(tmp_path, "streams")) == 1


def test_latest_evaluations_refuses_folders_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "streams-old").mkdir()
    (tmp_path / "streams-old" / RESULT_FILE).write_text("{}")
    with pytest.raises(InputError, match="incompatible version"):
        latest_evaluations(tmp_path, "streams")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("records.jsonl", '"step":', '"sleep":', r"records\.jsonl: 0\.step: field required; remove it"),
        ("records.jsonl", '"item":', '"item', r"records\.jsonl: not JSON in UTF-8: "),
        ("result.json", '"seed":3', '"seed":"x"', r"result\.json: seed: input should be a valid integer"),
        ("result.json", '"figures":', '"digits":', r"result\.json: figures: input should be a valid dictionary"),
    ],
)
def test_latest_evaluations_refuses_types(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    """The manifest fits the changed files."""
    run(Squares(), tmp_path)
    folder = tmp_path / METADATA.folder_name
    files = {path.name: path.read_text() for path in folder.iterdir() if path.name != MANIFEST_FILE}
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    shutil.rmtree(folder)
    folder.mkdir()
    writer = ManifestWriter(folder)
    for file, text in files.items():
        writer.add_text(file, text)
    writer.finish("evaluation", 0, {})
    with pytest.raises(InputError, match=message):
        assert [load_items(stored.folder) for stored in latest_evaluations(tmp_path, "streams").values()]
