"""What importing laconic brings along, and that every public name is there."""

import sys
from pathlib import Path

import pytest

import laconic
from tests.house.source import LACONIC, run

HEAVY = ["torch", "numpy", "transformers", "peft", "datasets", "tokenizers", "matplotlib", "pydantic", "tyro"]


def loaded(program: str, inside: Path) -> set[str]:
    done = run([sys.executable, "-c", f"{program}\nimport sys; print('\\n'.join(sys.modules))"], inside)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_laconic_is_light(tmp_path: Path) -> None:
    assert not loaded("import laconic; laconic.__version__; dir(laconic)", tmp_path).intersection(HEAVY)


@pytest.mark.medium
def test_the_decoder_needs_no_extra(tmp_path: Path) -> None:
    extras = {"transformers", "peft", "datasets", "matplotlib", "huggingface_hub"}
    assert not loaded("import laconic; laconic.Decoder, laconic.generate", tmp_path).intersection(extras)


@pytest.mark.parametrize("arguments", ["--help", "generate --help", "verify --help"])
def test_what_only_prints_does_not_import_torch(arguments: str, tmp_path: Path) -> None:
    shell = LACONIC.replace(
        "sys.exit(main())", "import atexit; atexit.register(lambda: print(*sys.modules)); sys.exit(main())"
    )
    done = run(["bash", "-c", f"{shell}\nlaconic {arguments}"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sys" in done.stdout.split(), "the list of modules was not printed"
    assert not {"torch", "transformers", "peft", "datasets"}.intersection(done.stdout.split())


@pytest.mark.parametrize("name", laconic.__all__)
def test_public_name_is_there(name: str) -> None:
    assert getattr(laconic, name) is not None
    assert name in dir(laconic)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'laconic' has no attribute 'decoder'; public names: Decoder"):
        laconic.decoder  # noqa: B018
