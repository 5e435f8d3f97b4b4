"""Runs on disk: names, locks, manifests, steps that are whole, the newest good one, what is kept, half lines."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from laconic.errors import BusyError, CorruptArtifactError, DiskError, NonFiniteError, UnsafeFileError, UsageError
from laconic.storage import lock, manifest, strict_json
from laconic.storage.manifest import MANIFEST_FILE, FileEntry, ManifestWriter, UnsupportedFormatError
from laconic.storage.run_dir import RunDirectory, check_name, truncate_partial_line


def fill(value: float) -> Callable[[ManifestWriter], None]:
    def write(files: ManifestWriter) -> None:
        files.add_tensors("model.safetensors", {"a": torch.full((3, 4), value), "b": torch.arange(5)})
        files.add_json("config.json", {"value": value})

    return write


def committed(path: Path, *steps: int) -> RunDirectory:
    run = RunDirectory(path)
    with run.lock():
        for n in steps:
            run.commit_step(n, fill(n), {"data": "d"})
    return run


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "-a", ".a", "a/b", "a\\b", "a.", "CON", "con.txt", "lpt1.x", "ä", "a" * 65, "a b", "a\n", "~"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"is no name: begin with a letter or digit, then letters, digits, \. _ -, at most"
    ):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "kava-2.1_x", "0", "a" * 64, "console", "A.B"])
def test_names_that_are_taken(name: str) -> None:
    assert check_name(name) == name


def test_a_run_has_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no name"):
        RunDirectory(tmp_path / "my run")


def test_a_step_there_and_back(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 3, 7)
    assert run.step_numbers() == [3, 7]
    assert (run.path / "latest").read_text() == "step-000007\n"
    found = run.latest_valid_step()
    assert found is not None
    assert (found.step, found.path.name, found.manifest.step) == (7, "step-000007", 7)
    files = found.manifest.files
    assert files.keys() == {"model.safetensors", "config.json"}
    assert found.manifest.fingerprints == {"data": "d", "config": files["config.json"].sha256}
    for name, file in files.items():
        assert file == FileEntry(*manifest._hash_file(found.path / name))
    text = (found.path / MANIFEST_FILE).read_text()
    assert text == strict_json.to_canonical_json(json.loads(text))
    assert json.loads(text).keys() == {"format", "kind", "laconic", "step", "files", "fingerprints", "sha256"}


def test_no_step_at_all(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "none").latest_valid_step() is None
    with pytest.raises(UsageError, match=r"/none has no step 4; there: none$"):
        RunDirectory(tmp_path / "none").get_step(4)


def test_an_equal_step_is_left_and_another_refused(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1)
    before = run.step_path(1).stat().st_ino
    with run.lock():
        run.commit_step(1, fill(1), {"data": "d"})
        for write, bound in ((fill(2), {"data": "d"}), (fill(1), {"data": "e"})):
            with pytest.raises(
                BusyError, match=r"step-000001 exists and holds something else; resume from it, or choose"
            ):
                run.commit_step(1, write, bound)
        assert [p.name for p in run.steps_folder.iterdir()] == ["step-000001"]
    assert run.step_path(1).stat().st_ino == before


def test_nothing_bad_is_committed(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1)
    with run.lock():
        for write in (fill(float("nan")), lambda files: torch_saved(files.folder)):
            with pytest.raises(NonFiniteError, match="not finite"):
                run.commit_step(2, write, {})
        with pytest.raises(DiskError, match=r"bytes are asked for to write 1,000,000,000,000,000,000"):
            run.commit_step(2, fill(2), {}, expected_bytes=10**18)
    assert [p.name for p in run.steps_folder.iterdir()] == ["step-000001"]


def torch_saved(folder: Path) -> None:
    """A file that is not written by `Files`."""
    from safetensors.torch import save_file

    save_file({"a": torch.tensor([1.0, float("inf")])}, folder / "other.safetensors")


def test_what_others_wrote_is_taken_up(tmp_path: Path) -> None:
    def write(files: ManifestWriter) -> None:
        atomic.save_tensors(files.folder / "model.safetensors", {"a": torch.ones(2)}, {})
        (files.folder / "deep").mkdir()
        (files.folder / "deep" / "note.txt").write_text("1")

    run = RunDirectory(tmp_path / "run")
    with run.lock():
        run.commit_step(1, write, {})
    assert run.get_step(1).manifest.files.keys() == {"model.safetensors", "deep/note.txt"}


def test_a_header_that_promises_other_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's own mistake is found before the file counts."""
    real = atomic.save_file
    monkeypatch.setattr(atomic, "save_file", lambda tensors, path, metadata: real({"z": torch.ones(1)}, path, metadata))
    with pytest.raises(
        CorruptArtifactError, match=r"the header written promises other tensors than were given; try another disk$"
    ):
        ManifestWriter(tmp_path).add_tensors("a.safetensors", {"a": torch.ones(1)})


def spoil(run: RunDirectory, step: int, how: str) -> None:
    folder = run.step_path(step)
    if how == "missing":
        (folder / "config.json").unlink()
    elif how == "more":
        (folder / "more.txt").write_text("1")
    elif how == "longer":
        (folder / "config.json").write_text("longer than before")
    elif how == "other":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("2", "3"))
    elif how == "no manifest":
        (folder / MANIFEST_FILE).unlink()
    elif how == "manifest":
        (folder / MANIFEST_FILE).write_text((folder / MANIFEST_FILE).read_text().replace('"data":"d"', '"data":"e"'))
    elif how == "kind":
        os.rename(run.step_path(1), folder.with_name("step-000003"))
    elif how == "link":
        (folder / "config.json").rename(run.path / "config.json")
        (folder / "config.json").symlink_to(run.path / "config.json")


SPOILT = {
    "missing": r"step-000002: config\.json is missing",
    "more": r"step-000002: more\.txt is not listed",
    "longer": r"step-000002: config\.json has 18 bytes, 12 expected",
    "other": r"step-000002: config\.json has sha256 [0-9a-f]{64}, [0-9a-f]{64} expected",
    "no manifest": r"step-000002 is no committed folder: no MANIFEST\.json in ",
    "manifest": r"step-000002: MANIFEST\.json is not as it was written",
    "kind": r"step-000003: MANIFEST\.json is of step 1, asked was step 3",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_bad_step_is_passed_over(tmp_path: Path, how: str) -> None:
    run = committed(tmp_path / "run", 0, 1, 2)
    spoil(run, 2, how)
    bad = 3 if how == "kind" else 2
    with pytest.raises(CorruptArtifactError, match=SPOILT[how]):
        run.get_step(bad)
    good = 2 if how == "kind" else 1
    with pytest.warns(UserWarning, match=SPOILT[how] + ".*; the step before it is taken$"):
        found = run.latest_valid_step()
    assert found is not None
    assert found.step == good
    assert run.step_numbers()[-1] == bad, "a reader changes nothing"
    with run.lock(), pytest.warns(UserWarning, match="the step before it is taken"):
        assert run.latest_valid_step() == found
    assert run.step_numbers()[-1] == good
    assert (run.steps_folder / f".bad-step-{bad:06d}").is_dir()
    with run.lock():
        run.commit_step(bad, fill(9), {})
    assert run.get_step(bad).step == bad


def test_a_listed_file_that_is_no_safetensors(tmp_path: Path) -> None:
    """Hashes say that a file is as it was written, not that it was sound."""
    run = RunDirectory(tmp_path / "run")
    with run.lock():
        run.commit_step(1, lambda files: files.add_bytes("a.safetensors", b"not at all"), {})
    with pytest.raises(
        CorruptArtifactError, match=r"step-000001: as listed, but a\.safetensors: [\d,]+ bytes of header promised"
    ):
        run.get_step(1)


def test_a_link_out_of_a_step_is_refused(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 2)
    spoil(run, 2, "link")
    with pytest.raises(UnsafeFileError, match=r"leads out of its folder"):
        run.get_step(2)


def test_none_is_good(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1, 2)
    for step in (1, 2):
        spoil(run, step, "missing")
    for _ in range(2):  # the second time they are put aside already
        with run.lock(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(
                CorruptArtifactError, match=r"/run: no step is good; take a copy, or choose another folder$"
            ):
                run.latest_valid_step()


def test_a_later_format_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    monkeypatch.setattr(manifest.Manifest, "format", 2)
    run = committed(tmp_path / "run", 1)
    monkeypatch.undo()
    text = (run.step_path(1) / MANIFEST_FILE).read_text().replace('"format":1', '"format":2')
    (run.step_path(1) / MANIFEST_FILE).write_text(text)
    with (
        run.lock(),
        pytest.raises(UnsupportedFormatError, match=r"format 2 of laconic .*, this one reads format 1; take a newer"),
    ):
        run.latest_valid_step()
    assert run.step_numbers() == [1]


def test_latest_is_not_believed(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1, 2)
    for text in ("step-000001\n", "../../etc\n", ""):
        (run.path / "latest").write_text(text)
        found = run.latest_valid_step()
        assert found is not None
        assert found.step == 2


def test_a_start_sweeps(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1)
    for name in (".tmp-step-000002-x", ".trash-step-000000-y"):
        (run.steps_folder / name).mkdir()
        (run.steps_folder / name / "a").write_text("1")
    (run.path / ".tmp-z").write_text("1")
    (run.path / "metrics.jsonl").write_text('{"a":1}\n{"b":')
    with run.lock():
        pass
    assert sorted(p.name for p in run.path.rglob("*") if p.name.startswith(".")) == []
    assert (run.path / "metrics.jsonl").read_text() == '{"a":1}\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""), (b"a\n", b"a\n"), (b"a\nbc", b"a\n"), (b"abc", b""), (b"\n", b"\n"),
        (b"a\n" + b"b" * 200_000, b"a\n"), (b"c" * 70_000 + b"\n" + b"b" * 65_535, b"c" * 70_000 + b"\n"),
    ],
)  # fmt: skip
def test_half_lines(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    truncate_partial_line(path)
    assert path.read_bytes() == after


def test_retention(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1, 2, 3, 4, 5)
    with run.lock():
        run.prune_steps({2})
        assert run.step_numbers() == [2, 4, 5]
        run.prune_steps(())
        assert run.step_numbers() == [4, 5]
        run.prune_steps(())
        assert run.step_numbers() == [4, 5]
    assert [p.name for p in run.steps_folder.glob(".*")] == []
    for what in (lambda: run.prune_steps(()), lambda: run.commit_step(6, fill(6), {})):
        with pytest.raises(ValueError, match=r": the run is not held; write inside `with run\.held\(\):`$"):
            what()


def test_nothing_is_deleted_on_the_word_of_a_bad_step(tmp_path: Path) -> None:
    run = committed(tmp_path / "run", 1, 2, 3)
    (run.step_path(3) / "config.json").write_text("{}")
    with run.lock(), pytest.warns(UserWarning, match=r"config\.json has 2 bytes, 12 expected; nothing is deleted"):
        run.prune_steps(())
    assert run.step_numbers() == [1, 2, 3]


HOLD = """
import sys, time
from laconic.storage.run_dir import RunFolder
with RunFolder(sys.argv[1]).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_writers(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            about = json.loads((run.path / "lock.json").read_text())
            assert about.keys() == {"pid", "host", "start", "command"}
            named = rf"/run is held by process {other.pid} on \S+ since 20\S+; wait for it, or choose another folder$"
            with pytest.raises(BusyError, match=named), run.lock():
                pass
        finally:
            other.kill()
    with run.lock():  # the kernel freed it, though lock.json still tells of the other
        assert json.loads((run.path / "lock.json").read_text())["pid"] == os.getpid()
    assert not (run.path / "lock.json").exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any, *args: Any, **named: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    run = RunDirectory(tmp_path / "run")
    monkeypatch.setattr(filelock.FileLock, "acquire", none)
    told = r"/run: no locks on this file system; move it, or set LACONIC_SOFT_LOCK=1$"
    with pytest.raises(DiskError, match=told), run.lock():
        pass
    monkeypatch.setenv("LACONIC_SOFT_LOCK", "1")
    named = rf"is held by process {os.getpid()} on "
    with run.lock(), pytest.raises(BusyError, match=named), RunDirectory(run.path).lock():
        pass
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    ours = {**lock._describe_this_process(), "pid": int(gone.stdout)}
    for about, taken in (({**ours, "host": "elsewhere"}, False), (ours, True)):
        (run.path / "lock").write_text(f"{about['pid']}\n{about['host']}\n")
        (run.path / "lock.json").write_text(strict_json.to_canonical_json(about))
        if taken:
            with run.lock():
                pass
        else:
            with pytest.raises(BusyError, match="on elsewhere since"), run.lock():
                pass
