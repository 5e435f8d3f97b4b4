"""S2, for weights and JSON: every hostile folder gives a typed error in bounded memory and runs no code."""

import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from laconic.errors import LaconicError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.trust.hostile import CASES
from tests.trust.limits import LIMITS

UNPICKLED: list[str] = []
sys.addaudithook(lambda event, _: UNPICKLED.append(event) if event in ("pickle.find_class", "os.system") else None)


@pytest.fixture(scope="module")
def valid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(folder)
    Decoder.from_pretrained(folder)  # warm up
    return folder


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_load_hostile_folder(tmp_path: Path, valid_model: Path, name: str) -> None:
    corrupt, code = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(valid_model, folder)
    corrupt(folder)
    before = sorted(tmp_path.rglob("*"))
    UNPICKLED.clear()
    memory = megabytes()
    with pytest.raises(LaconicError) as caught:
        Decoder.from_pretrained(folder)
    assert caught.value.exit_code == code, caught.value
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert UNPICKLED == []
    assert sorted(tmp_path.rglob("*")) == before
    assert megabytes() - memory <= LIMITS["hostile_megabytes"]


def test_hostile_case_count() -> None:
    assert len(CASES) >= LIMITS["hostile"]


def test_load_does_not_run_code_of_the_folder(tmp_path: Path, valid_model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(valid_model, folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"auto_map": {"AutoConfig": "evil.Config"},', 1))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'CANARY')!r}, 'w')")
    UNPICKLED.clear()
    Decoder.from_pretrained(folder)
    assert UNPICKLED == []
    assert not (tmp_path / "CANARY").exists()


def test_audit_hook_works() -> None:
    UNPICKLED.clear()
    os.system("true")
    assert UNPICKLED == ["os.system"]
