"""What a user may get wrong with models that learn while they read: each command ends with one line and its code."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import RunCli
from tests.recipe.books import lay

pytestmark = pytest.mark.usefixtures("unchecked")
WILD = ("cms.inner_lr=1e30", "cms.max_update_ratio=0")  # finite, and nothing bounds what it moves


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, tmp_path: Path) -> RunCli:
    """Run a command in a directory with small recipes and texts."""
    lay(tmp_path)
    monkeypatch.chdir(tmp_path)
    return run_cli


@pytest.mark.parametrize(
    ("says", "keys"),
    [
        ("cms.chunk_sizes=[0]: [0]; give one a level, each of at least 1 token", ["cms.chunk_sizes=[0]"]),
        ("chunk 16 does not divide 24, the next; chunks ascend, each divides", ["cms.chunk_sizes=[16, 24]"]),
        ("chunk 8 does not divide 4, the next; chunks ascend, each divides", ["cms.chunk_sizes=[8, 4]"]),
        ("mixer.self_modifying: chunk 0 was asked for; a chunk has at least 1 token", ["mixer.self_modifying.memory_chunk_size=0"]),
        ("mixer.self_modifying: chunks 24 and 64; one divides the other", ["mixer.self_modifying.memory_chunk_size=24"]),
        ("one group has one chunk, 16 and 64 were asked for", ["mixer.self_modifying.gate_groups=1", "mixer.self_modifying.memory_chunk_size=16"]),
        ("mixer.self_modifying: step_max 3.0 is beyond 2, where an erase overshoots; lower it", ["mixer.self_modifying.max_lr=3"]),
        ("keep_half_life 1e+09 lets nothing go in float32, and the cap", ["mixer.self_modifying.decay_half_life=1e9"]),
        ("step_memory 0.5 is not below step_max 0.5, which a sigmoid never reaches", ["mixer.self_modifying.max_lr=0.5"]),
        ("cms.inner_lr=-1: ", ["cms.inner_lr=-1"]),
        ("mixer.titans: chunk 0 was asked for", ["mixer.kind=titans", "mixer.chunk_size=0"]),
        ("step_max 1.5 times factor 2 is beyond 2, where one write overshoots further than it was off; lower it",
         ["mixer.kind=titans", "mixer.titans.max_lr=1.5", "mixer.titans.loss_factor=2"]),
        ("step_start 0.5 is not below step_max 0.5, which a sigmoid never reaches",
         ["mixer.kind=titans", "mixer.titans.max_lr=0.5", "mixer.titans.memory_depth=1"]),
        ("reset_every 100 is no multiple of the chunk, 64", ["mixer.kind=titans", "mixer.titans.reset_every=100"]),
        ("cms.chunk_sizes: level 1 has chunk 64, rows have 16 tokens between two updates", ["cms.chunk_sizes=[4, 64]"]),
        ("cms.meta_gradient=full: full reads a level's chunk again by", ["cms.meta_gradient=full", "cms.inner_objective=task"]),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_meant(run: RunCli, says: str, keys: list[str]) -> None:
    code, said = run("train", "books.toml", "--out", "x", *keys)
    assert code == 2, said
    assert said.startswith("laconic: ")
    assert says in said


def test_an_inner_loop_that_is_not_finite_stops_training(run: RunCli) -> None:
    code, said = run("train", "books.toml", "--out", "wild", *WILD)
    assert code == 65
    place = r"first in level 0 of layer 0 \(\S+\), row 0 \(b\d@\d+\), from token 5 on; see .*/incidents/step-000001"
    assert re.search(r"^laconic: step 1: loss, nats, .* more not finite; the update was not applied, " + place, said)
    about = json.loads(Path("wild/incidents/step-000001/incident.json").read_text())
    assert about["first"].startswith("level 0 of layer 0 (")


def test_an_inner_loop_that_is_not_finite_stops_reading(run: RunCli) -> None:
    """A level too slow to be updated in training, whose step is wild."""
    slow = ("cms.chunk_sizes=[64]", "inner_loop.allow_untrained_level=true")
    assert run("train", "books.toml", "--out", "wild", *WILD, *slow)[0] == 0
    place = "laconic: state: not finite in level 0 of layer 0 ("
    text = "It stands here. " * 5
    for says, args in (
        ("row 0 (book.txt), from token 65 on", ("compress", "wild", "book.txt", "--out", "a.safetensors")),
        ("row 0, from token 65 on", ("generate", "wild", text, "--max-tokens", "2", "--learn")),
        ("row 0 (prompt 0), at or before token ", ("generate", "wild", text[:62], "--max-tokens", "9", "--learn")),
        ("row 0 (b", ("evaluate", "wild", "--tasks", "test")),
    ):
        code, said = run(*args)
        assert code == 65, said
        assert said.startswith(place), said
        assert says in said
        assert said.endswith("; lower its step, or keep clip, cap and guard on")
    assert not Path("a.safetensors").exists()
