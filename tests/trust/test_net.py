"""The safety net: with each safeguard removed by patching, the check that depends on it must fail."""

import contextlib
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from laconic.compression.kv.memory_file import KVMemoryMetadata
from laconic.config import load
from laconic.config.recipe import Recipe
from laconic.models.checkpoints import checkpoint_files, weights
from laconic.storage import atomic, file_names, lock, manifest
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint, sharded, step
from laconic.training import run as training_run
from laconic.training.metrics import MetricsWriter
from laconic.training.step import Updater
from laconic.training.trackers import Tracker
from tests.trust import bindings, steps, test_resume
from tests.trust.nonfinite_cases import check_run_stops

Patch = pytest.MonkeyPatch


class Guard(NamedTuple):
    """A way to remove a safeguard, and the check that must then fail."""

    remove: Callable[[Patch], None]
    check: Callable[[Path], object]


def skip_fsync(what: Callable[[int], bool]) -> Callable[[Patch], None]:
    """Sync everything but files, or everything but folders."""
    sync = atomic.fsync_path
    return lambda patch: patch.setattr(
        atomic, "fsync_path", lambda path: None if what(path.stat().st_mode) else sync(path)
    )


def commit_in_place(
    self: RunDirectory, step: int, write: Callable[[ManifestWriter], None], fingerprints: Any, expected_bytes: int = 0
) -> Path:
    """Commit without a temporary folder."""
    writer = ManifestWriter(self.step_path(step))
    writer.folder.mkdir()
    write(writer)
    writer.finish("step", step, fingerprints)
    return writer.folder


def manifest_after(
    self: RunDirectory, step: int, write: Callable[[ManifestWriter], None], fingerprints: Any, expected_bytes: int = 0
) -> Path:
    """Commit with the rename before the manifest."""
    writer = ManifestWriter(self.steps_folder / f".tmp-{uuid.uuid4().hex}")
    writer.folder.mkdir()
    write(writer)
    os.rename(writer.folder, self.step_path(step))
    writer.folder = self.step_path(step)
    writer.finish("step", step, fingerprints)
    return writer.folder


def check_size_only(folder: Path, name: str, expected: manifest.FileEntry) -> None:
    if (folder / name).stat().st_size != expected.bytes:
        raise manifest.CorruptArtifactError(f"{name} has another size")


def match_leniently(module: nn.Module, folder: Path, config: Any, allow_missing: Any, tensors: Any = None) -> Any:
    """Match the tensors of a checkpoint that may lack any of them."""
    return checkpoint_files.match_tensors(module, folder, config, tuple(module.state_dict()), tensors)


def prune_unverified(self: RunDirectory, keep: Any) -> None:
    """Delete old steps without verifying the newest."""
    for number in self.step_numbers()[:-2]:
        os.rename(self.step_path(number), self.steps_folder / f".trash-{number}")


def keep_metrics(patch: Patch) -> None:
    start = MetricsWriter.__init__

    def init(self: MetricsWriter, path: Path, start_: int = 0, tracker: Tracker | None = None) -> None:
        start(self, path, path.stat().st_size if path.exists() else 0, tracker)

    patch.setattr(training_run, "MetricsWriter", type("KeepsMetrics", (MetricsWriter,), {"__init__": init}))


def ignore_unknown_keys(patch: Patch) -> None:
    lenient = type("LenientRecipe", (Recipe,), {"model_config": {**Recipe.model_config, "extra": "ignore"}})
    patch.setattr(load, "Recipe", lenient)


GUARDS: dict[str, Guard] = {
    "file fsync": Guard(skip_fsync(stat.S_ISREG), steps.check_power_cut),
    "directory fsync": Guard(skip_fsync(stat.S_ISDIR), steps.check_power_cut),
    "rename": Guard(
        lambda patch: patch.setattr(RunDirectory, "commit_step", commit_in_place),
        lambda path: steps.kill_before(path, "files"),
    ),
    "manifest last": Guard(
        lambda patch: patch.setattr(RunDirectory, "commit_step", manifest_after),
        lambda path: steps.kill_before(path, "manifest"),
    ),
    "sweep": Guard(
        lambda patch: patch.setattr(RunDirectory, "remove_leftovers", lambda self: None),
        lambda path: steps.kill_before(path, "files"),
    ),
    "checksum": Guard(
        lambda patch: patch.setattr(manifest, "_check_file", check_size_only),
        lambda path: steps.check_bit_flips(path, 20),
    ),
    "digest of the manifest": Guard(
        lambda patch: patch.setattr(manifest, "hash_json", lambda value: "0"),
        lambda path: steps.check_bit_flips(path, 100),
    ),
    "lock": Guard(
        lambda patch: patch.setattr(lock, "lock_folder", lambda folder: contextlib.nullcontext()),
        steps.check_single_writer,
    ),
    "chmod by umask": Guard(
        lambda patch: patch.setattr(Path, "chmod", lambda self, mode: None),
        lambda path: steps.check_modes(path, 0o027),
    ),
    "verify before retention": Guard(
        lambda patch: patch.setattr(RunDirectory, "prune_steps", prune_unverified), steps.check_pruning_verifies
    ),
    "finite check before update": Guard(
        lambda patch: patch.setattr(Updater, "classify", lambda self, numbers: "applied"),
        lambda path: check_run_stops(path, "input"),
    ),
    "finite scan at commit": Guard(
        lambda patch: patch.setattr(atomic, "check_finite", lambda name, tensor: None),
        steps.check_nonfinite_is_refused,
    ),
    "cut of metrics.jsonl": Guard(keep_metrics, test_resume.check_metrics_are_truncated),
    "RNG restore": Guard(
        lambda patch: (
            [patch.setattr(module, "set_random_state", lambda state: None) for module in (checkpoint, step)] and None
        ),
        test_resume.check_random_state_is_restored,
    ),
    "split of what is not a tensor": Guard(
        lambda patch: patch.setattr(sharded, "Tensor", object), bindings.check_shards_hold_tensors
    ),
    "tokenizer of a memory": Guard(
        lambda patch: patch.setattr(KVMemoryMetadata, "check_reader", lambda *_: None),
        bindings.check_memory_is_bound_to_its_tokenizer,
    ),
    "tokenizer of a step": Guard(
        lambda patch: patch.setattr(training_run.TrainingRun, "check_fingerprints", lambda *_: None),
        bindings.check_step_is_bound_to_its_tokenizer,
    ),
    "strict loading": Guard(
        lambda patch: patch.setattr(weights, "match_tensors", match_leniently),
        bindings.check_loading_is_strict,
    ),
    "unknown keys": Guard(ignore_unknown_keys, bindings.check_unknown_keys_are_refused),
    "names inside their folder": Guard(
        lambda patch: patch.setattr(file_names, "resolve_inside", lambda root, name: root / name),
        bindings.check_names_stay_inside,
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*using the checkpoint before it")
@pytest.mark.parametrize("name", GUARDS)
def test_check_fails_without_its_safeguard(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    guard = GUARDS[name]
    guard.check(tmp_path / "with")
    guard.remove(monkeypatch)
    try:
        guard.check(tmp_path / "without")
    except (Exception, pytest.fail.Exception):
        return
    raise AssertionError(f"{name} was removed and no check failed")
