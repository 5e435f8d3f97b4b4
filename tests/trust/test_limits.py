"""The numbers that the code holds are those of limits.toml."""

from laconic.core import artifact, lock, manifest, runs, strict
from laconic.training import running, step
from tests.trust.limits import LIMITS


def test_numbers_stand_once() -> None:
    held = {
        "header_bytes": strict.HEADER_BYTES,
        "json_depth": strict.JSON_DEPTH,
        "json_integer": strict.JSON_INTEGER,
        "json_parts": strict.JSON_PARTS,
        "room": artifact.ROOM,
        "artifact_format": artifact.FORMAT,
        "manifest_format": manifest.FORMAT,
        "least_steps": runs.LEAST,
        "halvings": step.HALVINGS,
        "skips": running.SKIPS,
        "skip_window": running.WINDOW,
    }
    assert {name: LIMITS[name] for name in held} == held
    assert LIMITS["busy_seconds"] > lock.PATIENCE
