"""R5, R13, R15: damaged and exchanged files of steps, two writers, file modes."""

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import CorruptArtifactError, DiskError, UnsafeFileError
from laconic.storage import lock, manifest
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import to_canonical_json
from tests.trust import steps
from tests.trust.children import Child
from tests.trust.limits import LIMITS


@pytest.mark.medium
def test_truncations_are_detected(tmp_path: Path) -> None:
    steps.check_truncations(tmp_path / "run", LIMITS["truncations"] // 3)


@pytest.mark.medium
def test_bit_flips_are_detected(tmp_path: Path) -> None:
    steps.check_bit_flips(tmp_path / "run", LIMITS["flips"] // 3)


@pytest.mark.slow
def test_ten_thousand_bit_flips(tmp_path: Path) -> None:
    steps.check_bit_flips(tmp_path / "run", 10_000)


@pytest.mark.parametrize("case", ["shards", "steps", "deleted", "added", "empty folder"])
def test_files_exchanged_deleted_and_added(tmp_path: Path, case: str) -> None:
    run = steps.commit_steps(tmp_path / "run", 1, 2)
    folder, other = run.step_path(2), run.step_path(1)
    if case == "shards":
        os.rename(folder / "model.safetensors", folder / "x")
        os.rename(folder / "optimizer.safetensors", folder / "model.safetensors")
        os.rename(folder / "x", folder / "optimizer.safetensors")
    elif case == "steps":
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    elif case == "deleted":
        (folder / "optimizer.safetensors").unlink()
    elif case == "added":
        (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    else:
        for path in folder.iterdir():
            path.unlink()
    assert steps.is_skipped(run)


def test_prune_steps_keeps_valid_steps(tmp_path: Path) -> None:
    steps.check_pruning_verifies(tmp_path / "run")


@pytest.mark.medium
@pytest.mark.parametrize("race", range(LIMITS["races"]))
def test_lock_race(tmp_path: Path, race: int) -> None:
    """Two processes start at once; all steps belong to one of them."""

    def writer(value: float) -> Callable[[Callable[[int], None]], None]:
        def write(writer: ManifestWriter) -> None:
            writer.add_tensors("model.safetensors", {"a": torch.full((4,), value)})
            writer.add_json("progress.json", {"value": value})

        def work(tell: Callable[[int], None]) -> None:
            with run.lock():
                for n in range(3):
                    run.commit_step(n, write, {})
                tell(1)
                time.sleep(3 * lock.LOCK_TIMEOUT)

        return work

    run = RunDirectory(tmp_path / "run")
    children = [Child(writer(1.0)), Child(writer(2.0))]
    codes = sorted(child.end() for child in children)
    assert codes == [0, 73]
    values = {(run.step_path(n) / "progress.json").read_text() for n in run.step_numbers()}
    assert len(values) == 1


def test_lock_second_writer_is_refused(tmp_path: Path) -> None:
    steps.check_single_writer(tmp_path / "run")


def test_commit_step_with_a_failing_rename_and_a_clock_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steps.commit_steps(tmp_path / "run", 1, 2)
    for n in (1, 2):
        os.utime(run.step_path(n), (10**9 - n * 10**6,) * 2)
    latest = run.latest_valid_step()
    assert latest is not None
    assert latest.step == 2

    def refuse(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with run.lock():
        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(DiskError, match="Input/output error"):
            run.commit_step(3, steps.write_step(3), {})
        monkeypatch.undo()
    steps.check_intact(run, 2, 2)


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_run_directory_follows_the_umask(tmp_path: Path, umask: int) -> None:
    steps.check_modes(tmp_path / "run", umask)


def test_run_directory_in_a_set_group_folder(tmp_path: Path) -> None:
    """Folders of a run inherit the group of a set-group folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    run = steps.commit_steps(shared / "run", 1)
    assert all(p.stat().st_mode & 0o2000 for p in (run.path, run.steps_folder, run.step_path(1)))
    assert {p.stat().st_gid for p in run.path.rglob("*")} == {shared.stat().st_gid}


WRONG: list[Any] = [None, -1, 2**60, 0.5, "", "../x", "/etc/passwd", "a\0b", [], {}, True, "x" * 70, [[]], {"a": {}}]


def test_manifest_with_random_changes(tmp_path: Path) -> None:
    """S5: fields are exchanged, dropped and retyped, and the hash is recomputed."""
    run = steps.commit_steps(tmp_path / "run", 1)
    path = run.step_path(1) / manifest.MANIFEST_FILE
    original = json.loads(path.read_text())
    chance = random.Random(3)
    for _ in range(LIMITS["parsed"]):
        fields = json.loads(json.dumps(original))
        del fields["sha256"]
        where = chance.choice([fields, fields["files"], fields["fingerprints"], *fields["files"].values()])
        key = chance.choice([*where, "more"])
        if chance.random() < 0.3:
            where.pop(key, None)
        else:
            where[chance.choice([key, "../x", "a\0"])] = chance.choice(WRONG)
        path.write_text(to_canonical_json({**fields, "sha256": manifest.hash_json(fields)}))
        with suppress(CorruptArtifactError, UnsafeFileError):
            assert manifest.verify_folder(run.step_path(1), "step", 1).files.keys() == original["files"].keys()


def test_get_step_reads_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = steps.commit_steps(tmp_path / "run", 1)
    names: list[str] = []
    hash_file = manifest.hash_file
    monkeypatch.setattr(manifest, "hash_file", lambda path: names.append(path.name) or hash_file(path))
    step = run.get_step(1)
    assert sorted(names) == sorted(step.manifest.files)
