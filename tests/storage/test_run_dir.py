"""Run directories: names, locks, manifests, committed steps, verification, retention, partial lines."""

import json
import os
import platform
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from laconic.errors import BusyError, CorruptArtifactError, DiskError, NonFiniteError, UnsafeFileError, UsageError
from laconic.storage import atomic, manifest, strict_json
from laconic.storage.manifest import MANIFEST_FILE, FileEntry, ManifestWriter, UnsupportedFormatError
from laconic.storage.run_dir import RunDirectory, check_name, truncate_partial_line


def write_values(value: float) -> Callable[[ManifestWriter], None]:
    def write(writer: ManifestWriter) -> None:
        writer.add_tensors("model.safetensors", {"a": torch.full((3, 4), value), "b": torch.arange(5)})
        writer.add_json("config.json", {"value": value})

    return write


def commit_steps(path: Path, *steps: int) -> RunDirectory:
    run = RunDirectory(path)
    with run.lock():
        for n in steps:
            run.commit_step(n, write_values(n), {"data": "d"})
    return run


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "-a", ".a", "a/b", "a\\b", "a.", "CON", "con.txt", "lpt1.x", "ä", "a" * 65, "a b", "a\n", "~"],
)
def test_check_name_refuses(name: str) -> None:
    with pytest.raises(UsageError, match="not a valid name"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "kava-2.1_x", "0", "a" * 64, "console", "A.B"])
def test_check_name_accepts(name: str) -> None:
    assert check_name(name) == name


def test_run_directory_checks_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a valid name"):
        RunDirectory(tmp_path / "my run")


def test_commit_step_round_trip(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 3, 7)
    assert run.step_numbers() == [3, 7]
    assert (run.path / "latest").read_text() == "step-000007\n"
    latest_step = run.latest_valid_step()
    assert latest_step is not None
    assert (latest_step.step, latest_step.path.name, latest_step.manifest.step) == (7, "step-000007", 7)
    files = latest_step.manifest.files
    assert files.keys() == {"model.safetensors", "config.json"}
    assert latest_step.manifest.fingerprints == {"data": "d", "config": files["config.json"].sha256}
    for name, file in files.items():
        assert file == FileEntry(*manifest.hash_file(latest_step.path / name))
    text = (latest_step.path / MANIFEST_FILE).read_text()
    assert text == strict_json.to_canonical_json(json.loads(text))
    assert json.loads(text).keys() == {"format", "kind", "laconic", "step", "files", "fingerprints", "sha256"}


def test_run_directory_without_steps(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "none").latest_valid_step() is None
    with pytest.raises(UsageError, match="no checkpoint of step 4; available: none"):
        RunDirectory(tmp_path / "none").get_step(4)


def test_commit_step_leaves_an_equal_one_and_refuses_another(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1)
    before = run.step_path(1).stat().st_ino
    with run.lock():
        run.commit_step(1, write_values(1), {"data": "d"})
        for write, bound in ((write_values(2), {"data": "d"}), (write_values(1), {"data": "e"})):
            with pytest.raises(BusyError, match="step-000001 exists with other contents"):
                run.commit_step(1, write, bound)
        assert [p.name for p in run.steps_folder.iterdir()] == ["step-000001"]
    assert run.step_path(1).stat().st_ino == before


def test_commit_step_refuses_nonfinite_tensors_and_a_full_disk(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1)
    with run.lock():
        for write in (write_values(float("nan")), lambda writer: save_without_check(writer.folder)):
            with pytest.raises(NonFiniteError, match="not finite"):
                run.commit_step(2, write, {})
        with pytest.raises(DiskError, match="required to write 1,000,000,000,000,000,000"):
            run.commit_step(2, write_values(2), {}, expected_bytes=10**18)
    assert [p.name for p in run.steps_folder.iterdir()] == ["step-000001"]


def save_without_check(folder: Path) -> None:
    """Write a file without the manifest writer."""
    from safetensors.torch import save_file

    save_file({"a": torch.tensor([1.0, float("inf")])}, folder / "other.safetensors")


def test_manifest_records_files_of_other_libraries(tmp_path: Path) -> None:
    def write(writer: ManifestWriter) -> None:
        atomic.save_tensors(writer.folder / "model.safetensors", {"a": torch.ones(2)}, {})
        (writer.folder / "deep").mkdir()
        (writer.folder / "deep" / "note.txt").write_text("1")

    run = RunDirectory(tmp_path / "run")
    with run.lock():
        run.commit_step(1, write, {})
    assert run.get_step(1).manifest.files.keys() == {"model.safetensors", "deep/note.txt"}


def test_manifest_writer_refuses_a_wrong_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong write is found before the file is recorded."""
    real = atomic.save_file
    monkeypatch.setattr(atomic, "save_file", lambda tensors, path, metadata: real({"z": torch.ones(1)}, path, metadata))
    with pytest.raises(CorruptArtifactError, match="lists other tensors"):
        ManifestWriter(tmp_path).add_tensors("a.safetensors", {"a": torch.ones(1)})


def corrupt(run: RunDirectory, step: int, kind: str) -> None:
    folder = run.step_path(step)
    if kind == "missing":
        (folder / "config.json").unlink()
    elif kind == "more":
        (folder / "more.txt").write_text("1")
    elif kind == "longer":
        (folder / "config.json").write_text("longer than before")
    elif kind == "other":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("2", "3"))
    elif kind == "no manifest":
        (folder / MANIFEST_FILE).unlink()
    elif kind == "manifest":
        (folder / MANIFEST_FILE).write_text((folder / MANIFEST_FILE).read_text().replace('"data":"d"', '"data":"e"'))
    elif kind == "kind":
        os.rename(run.step_path(1), folder.with_name("step-000003"))
    elif kind == "link":
        (folder / "config.json").rename(run.path / "config.json")
        (folder / "config.json").symlink_to(run.path / "config.json")


CORRUPTIONS = {
    "missing": r"step-000002: config\.json is missing",
    "more": r"step-000002: more\.txt is not listed",
    "longer": r"step-000002: config\.json has 18 bytes, expected 12",
    "other": r"step-000002: config\.json has sha256 [0-9a-f]{64}, expected",
    "no manifest": r"step-000002 is incomplete: no MANIFEST\.json in ",
    "manifest": r"step-000002: MANIFEST\.json was changed",
    "kind": r"step-000003: MANIFEST\.json is of step 1, expected step 3",
}


def test_latest_valid_step_skips_one_with_a_link_that_leads_out(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1, 2, 3, 4)
    corrupt(run, 4, "link")
    (run.path / "manifest.json").write_text((run.step_path(3) / MANIFEST_FILE).read_text())
    (run.step_path(3) / MANIFEST_FILE).unlink()
    (run.step_path(3) / MANIFEST_FILE).symlink_to(run.path / "manifest.json")
    for step in (3, 4):
        with pytest.raises(UnsafeFileError, match="leads out of its folder"):
            run.get_step(step)
    with run.lock(), pytest.warns(UserWarning, match="leads out of its folder.*; using the checkpoint before it"):
        latest_step = run.latest_valid_step()
    assert latest_step is not None
    assert (latest_step.step, run.step_numbers()) == (2, [1, 2])


@pytest.mark.parametrize("name", [".DS_Store", "._model.safetensors", "Thumbs.db", ".nfs000000000123abcd00000001"])
def test_verify_folder_ignores_files_of_the_operating_system(tmp_path: Path, name: str) -> None:
    def write(writer: ManifestWriter) -> None:
        write_values(1)(writer)
        (writer.folder / name).write_text("1")

    run = RunDirectory(tmp_path / "run")
    with run.lock():
        run.commit_step(1, write, {"data": "d"})
    assert name not in run.get_step(1).manifest.files
    (run.step_path(1) / name).write_text("2")
    assert run.get_step(1).step == 1


@pytest.mark.parametrize("name", ["steps", "metrics.jsonl"])
def test_lock_refuses_links_in_the_run_directory(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir() if name == "steps" else outside.write_text("mine, without a line end")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(UnsafeFileError, match=f"{name} is a link to .*; not written through"), run.lock():
        pass
    assert outside.is_dir() or outside.read_text() == "mine, without a line end"
    (tmp_path / "linked").symlink_to(commit_steps(tmp_path / "moved", 1).path)  # the whole of a run may be a link
    assert commit_steps(tmp_path / "linked", 2).step_numbers() == [1, 2]


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_latest_valid_step_skips_a_corrupt_one(tmp_path: Path, kind: str) -> None:
    run = commit_steps(tmp_path / "run", 0, 1, 2)
    corrupt(run, 2, kind)
    bad = 3 if kind == "kind" else 2
    with pytest.raises(CorruptArtifactError, match=CORRUPTIONS[kind]):
        run.get_step(bad)
    good = 2 if kind == "kind" else 1
    with pytest.warns(UserWarning, match=CORRUPTIONS[kind] + ".*; using the checkpoint before it"):
        latest_step = run.latest_valid_step()
    assert latest_step is not None
    assert latest_step.step == good
    assert run.step_numbers()[-1] == bad, "reading must not rename"
    with run.lock(), pytest.warns(UserWarning, match="using the checkpoint before it"):
        assert run.latest_valid_step() == latest_step
    assert run.step_numbers()[-1] == good
    assert (run.steps_folder / f".bad-step-{bad:06d}").is_dir()
    with run.lock():
        run.commit_step(bad, write_values(9), {})
    assert run.get_step(bad).step == bad


def test_get_step_refuses_an_invalid_safetensors_file(tmp_path: Path) -> None:
    """The hash of an invalid file is right."""
    run = RunDirectory(tmp_path / "run")
    with run.lock():
        run.commit_step(1, lambda writer: writer.add_text("a.safetensors", "not at all"), {})
    with pytest.raises(CorruptArtifactError, match=r"step-000001: a\.safetensors: begins with the text 'not at a'"):
        run.get_step(1)


def test_latest_valid_step_with_none_valid(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1, 2)
    for step in (1, 2):
        corrupt(run, step, "missing")
    for _ in range(2):  # the second time they are renamed already
        with run.lock(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CorruptArtifactError, match="no valid checkpoint"):
                run.latest_valid_step()


@pytest.mark.parametrize("version", [1, 3])
def test_latest_valid_step_refuses_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(manifest.Manifest, "format", version)
    monkeypatch.setattr(manifest, "FORMAT_VERSION", version)
    run = commit_steps(tmp_path / "run", 1)
    monkeypatch.undo()
    text = (run.step_path(1) / MANIFEST_FILE).read_text().replace('"format":2', f'"format":{version}')
    (run.step_path(1) / MANIFEST_FILE).write_text(text)
    with (
        run.lock(),
        pytest.raises(UnsupportedFormatError, match=rf"format {version} and was written by laconic \S+; .*2"),
    ):
        run.latest_valid_step()
    assert run.step_numbers() == [1]


def test_latest_valid_step_ignores_the_file_latest(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1, 2)
    for text in ("step-000001\n", "../../etc\n", ""):
        (run.path / "latest").write_text(text)
        latest_step = run.latest_valid_step()
        assert latest_step is not None
        assert latest_step.step == 2


def test_lock_removes_leftovers(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1)
    for name in (".tmp-step-000002-x", ".trash-step-000000-y"):
        (run.steps_folder / name).mkdir()
        (run.steps_folder / name / "a").write_text("1")
    for name in (f".tmp-latest-{uuid.uuid4().hex}", ".tmp-of-the-user"):
        (run.path / name).write_text("1")
    (run.path / "metrics.jsonl").write_text('{"a":1}\n{"b":')
    with run.lock():
        pass
    assert sorted(p.name for p in run.path.rglob("*") if p.name.startswith(".")) == [".tmp-of-the-user"]
    assert (run.path / "metrics.jsonl").read_text() == '{"a":1}\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""), (b"a\n", b"a\n"), (b"a\nbc", b"a\n"), (b"abc", b""), (b"\n", b"\n"),
        (b"a\n" + b"b" * 200_000, b"a\n"), (b"c" * 70_000 + b"\n" + b"b" * 65_535, b"c" * 70_000 + b"\n"),
    ],
)  # fmt: skip
def test_truncate_partial_line(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    truncate_partial_line(path)
    assert path.read_bytes() == after


def test_prune_steps(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1, 2, 3, 4, 5)
    with run.lock():
        run.prune_steps({2})
        assert run.step_numbers() == [2, 4, 5]
        run.prune_steps(())
        assert run.step_numbers() == [4, 5]
        run.prune_steps(())
        assert run.step_numbers() == [4, 5]
    assert [p.name for p in run.steps_folder.glob(".*")] == []
    for operation in (lambda: run.prune_steps(()), lambda: run.commit_step(6, write_values(6), {})):
        with pytest.raises(ValueError, match="requires the lock"):
            operation()


def test_prune_steps_verifies_the_newest_first(tmp_path: Path) -> None:
    run = commit_steps(tmp_path / "run", 1, 2, 3)
    (run.step_path(3) / "config.json").write_text("{}")
    with run.lock(), pytest.warns(UserWarning, match=r"config\.json has 2 bytes, .*; no checkpoint is deleted"):
        run.prune_steps(())
    assert run.step_numbers() == [1, 2, 3]


HOLD_LOCK = """
import sys, time
from laconic.storage.run_dir import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.medium
def test_lock_refuses_a_second_writer(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(run.path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            about = json.loads((run.path / "lock.json").read_text())
            assert about.keys() == {"pid", "host", "start", "command"}
            named = rf"/run is locked by process {other.pid} on \S+ since 20"
            with pytest.raises(BusyError, match=named), run.lock():
                pass
        finally:
            other.kill()
    with run.lock():  # the kernel released it, though lock.json still names the other
        assert json.loads((run.path / "lock.json").read_text())["pid"] == os.getpid()
    assert not (run.path / "lock.json").exists()


@pytest.mark.medium
def test_lock_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    run = RunDirectory(tmp_path / "run")
    monkeypatch.setattr(filelock.FileLock, "acquire", unsupported)
    with pytest.raises(DiskError, match="LACONIC_SOFT_LOCK=1"), run.lock():
        pass
    monkeypatch.setenv("LACONIC_SOFT_LOCK", "1")
    with run.lock(), pytest.raises(BusyError, match=f"process {os.getpid()} on "), RunDirectory(run.path).lock():
        pass
    command = [sys.executable, "-c", "import os; print(os.getpid())"]
    ended = int(subprocess.run(command, capture_output=True, check=True).stdout)
    (run.path / "lock").write_text(f"{os.getpid()}\nelsewhere\n")
    with pytest.raises(BusyError, match="locked by"), run.lock():
        pass
    (run.path / "lock").write_text(f"{ended}\n{platform.node()}\n")
    with run.lock():  # the process of a stale lock on this host has ended
        pass


def refuse_run(path: Path, file: str | None = None) -> None:
    with RunDirectory(path).lock():
        if file:
            (path / file).write_text("of the user")
        raise UsageError("refused")


def test_lock_deletes_a_new_directory_only_if_nothing_was_written(tmp_path: Path) -> None:
    unused, used, older = tmp_path / "unused", tmp_path / "used", tmp_path / "older"
    older.mkdir()
    for path, file in ((unused, None), (used, "notes.txt"), (older, None)):
        with pytest.raises(UsageError):
            refuse_run(path, file)
    assert not unused.exists()
    assert (used / "notes.txt").is_file()
    assert older.is_dir()
