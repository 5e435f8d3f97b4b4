"""The numbers that the code holds are those of limits.toml."""

from laconic.core import artifact, lock, manifest, runs, strict
from laconic.training import running, step
from tests.trust.limits import LIMITS


def test_numbers_stand_once() -> None:
    held = {
        "header_bytes": strict.MAX_HEADER_BYTES,
        "json_depth": strict.MAX_JSON_DEPTH,
        "json_integer": strict.MAX_JSON_INTEGER,
        "json_parts": strict.MAX_JSON_PARTS,
        "room": artifact.FREE_SPACE_FACTOR,
        "artifact_format": artifact.FORMAT_VERSION,
        "manifest_format": manifest.FORMAT_VERSION,
        "least_steps": runs.MIN_RETAINED_STEPS,
        "halvings": step.MAX_HALVINGS,
        "skips": running.MAX_SKIPS,
        "skip_window": running.SKIP_WINDOW,
    }
    assert {name: LIMITS[name] for name in held} == held
    assert LIMITS["busy_seconds"] > lock.LOCK_TIMEOUT
