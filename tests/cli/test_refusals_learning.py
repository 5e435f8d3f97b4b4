"""Commands on nested models that fail: invalid recipes and inner loops that diverge, one line and an exit code each."""

import json
from pathlib import Path

import pytest

from tests.conftest import RunCli
from tests.experiment.books import write_books

pytestmark = pytest.mark.usefixtures("unchecked")
DIVERGING = ("cms.inner_lr=1e30", "cms.max_update_ratio=0")  # finite, but nothing bounds the updates


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, tmp_path: Path) -> RunCli:
    """Run a command in a directory with small recipes and texts."""
    write_books(tmp_path)
    monkeypatch.chdir(tmp_path)
    return run_cli


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        ("cms.chunk_sizes=[0]", ["cms.chunk_sizes=[0]"]),
        ("16", ["cms.chunk_sizes=[16, 24]"]),
        ("mixer.self_modifying", ["mixer.self_modifying.memory_chunk_size=0"]),
        ("max_lr", ["mixer.self_modifying.max_lr=3"]),
        ("cms.inner_lr=-1", ["cms.inner_lr=-1"]),
        ("mixer.chunk_size=0", ["mixer.kind=titans", "mixer.chunk_size=0"]),
        ("cms.chunk_sizes", ["cms.chunk_sizes=[4, 64]"]),
        ("cms.meta_gradient", ["cms.meta_gradient=full", "cms.inner_objective=task"]),
    ],
)
def test_train_refuses_invalid_recipes(run: RunCli, message: str, keys: list[str]) -> None:
    code, _, err = run("train", "books.toml", "--out", "x", *keys)
    assert code == 2, err
    assert err.startswith("laconic: ")
    assert message in err


def test_train_stops_at_a_diverging_inner_loop(run: RunCli) -> None:
    code, _, err = run("train", "books.toml", "--out", "diverged", *DIVERGING)
    assert code == 65
    for part in ("step 1: ", "not finite", "level 0 of layer 0", "incidents/step-000001"):
        assert part in err
    incident = json.loads(Path("diverged/incidents/step-000001/incident.json").read_text())
    assert incident["first"].startswith("level 0 of layer 0 (")


@pytest.mark.medium
def test_commands_stop_at_a_diverging_inner_loop(run: RunCli) -> None:
    # the level is too slow to be updated in training, so that only reading diverges
    slow = ("cms.chunk_sizes=[64]", "inner_loop.allow_untrained_level=true")
    assert run("train", "books.toml", "--out", "diverging", *DIVERGING, *slow).code == 0
    text = "It stands here. " * 5
    for place, args in (
        ("row 0 (book.txt)", ("compress", "diverging", "book.txt", "--out", "a.safetensors")),
        ("row 0, at", ("generate", "diverging", text, "--max-tokens", "2", "--learn")),
        ("row 0 (prompt 0)", ("generate", "diverging", text[:62], "--max-tokens", "9", "--learn")),
        ("row 0 (b", ("evaluate", "diverging", "--tasks", "test")),
    ):
        code, _, err = run(*args)
        assert code == 65, err
        assert "not finite in level 0 of layer 0 (" in err
        assert place in err
    assert not Path("a.safetensors").exists()
