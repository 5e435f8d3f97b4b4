"""A small share of the fuzzed inputs of benchmarks/hostile_inputs.py, in every parser; the rest is slow."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import hostile_inputs
from tests.conftest import needs, shape_checks_off
from tests.trust.fuzz import Target, build_targets, try_input

NAMES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "weights", "adapter_config.json", "recipe", "rows",
    "Parquet", "memory", "KV memory", "state", "golden bundle", "progress.json",
    "optimizer.json", "state.json", "report: records",
    "report: result", "GGUF", "llama2.c", "requests",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numbers of damaged GGUF blocks
SMALL, LARGE = 10, 300  # inputs of each parser


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("peft", "pyarrow", "gguf", "fastapi"):
        needs(package)
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def targets(base: Path) -> Iterator[dict[str, Target]]:
    with ExitStack() as stack:
        with shape_checks_off():  # a stored state has another open chunk than one in memory
            targets = build_targets(base, stack)
        yield targets


def find_broken(name: str, targets: dict[str, Target], base: Path, place: Path, numbers: range) -> list[str]:
    outcomes = ((n, try_input(targets[name], base, place, random.Random(f"{name} {n}"))) for n in numbers)
    return [f"{name} {n}: {outcome.result}" for n, outcome in outcomes if outcome.is_broken]


def test_fuzz_names_are_the_targets(targets: dict[str, Target]) -> None:
    assert tuple(targets) == NAMES


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", NAMES)
def test_fuzz_ends_well_or_with_one_line(name: str, targets: dict[str, Target], base: Path, tmp_path: Path) -> None:
    assert find_broken(name, targets, base, tmp_path / "place", range(SMALL)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", NAMES)
def test_fuzz_of_many_inputs(name: str, targets: dict[str, Target], base: Path, tmp_path: Path) -> None:
    assert find_broken(name, targets, base, tmp_path / "place", range(SMALL, LARGE)) == []


def test_hostile_inputs_prints_its_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["hostile_inputs.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        hostile_inputs.main()
    assert "usage: hostile_inputs.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("40", "weight"), "no parser weight; expected config.json"), (("2",), "2 files are too few for 20 parsers")],
)
def test_hostile_inputs_refuses_to_fuzz_nothing(
    arguments: tuple[str, ...],
    message: str,
    targets: dict[str, Target],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hostile_inputs, "build_targets", lambda base, stack: targets)
    monkeypatch.setattr(hostile_inputs.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["hostile_inputs.py", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        hostile_inputs.main()
    assert message in capsys.readouterr().err
