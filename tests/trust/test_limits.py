"""The numbers that the code holds are those of limits.toml."""

from laconic.storage import atomic, lock, manifest, run_dir, strict_json
from laconic.training import run as training_run
from laconic.training import step
from tests.trust.limits import LIMITS


def test_numbers_stand_once() -> None:
    actual = {
        "header_bytes": strict_json.MAX_HEADER_BYTES,
        "json_depth": strict_json.MAX_JSON_DEPTH,
        "json_parts": strict_json.MAX_JSON_PARTS,
        "room": atomic.FREE_SPACE_FACTOR,
        "artifact_format": atomic.FORMAT_VERSION,
        "manifest_format": manifest.FORMAT_VERSION,
        "least_steps": run_dir.MIN_RETAINED_STEPS,
        "halvings": step.MAX_HALVINGS,
        "skips": training_run.MAX_SKIPS,
        "skip_window": training_run.SKIP_WINDOW,
    }
    assert {name: LIMITS[name] for name in actual} == actual
    assert lock.LOCK_TIMEOUT < 1
