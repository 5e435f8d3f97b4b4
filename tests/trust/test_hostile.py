"""S2, for weights and JSON: every hostile folder ends in one typed error, soon, and runs and touches nothing."""

import os
import resource
import shutil
import sys
import time
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(folder)
    Decoder.from_pretrained(folder)  # what is slow the first time
    return folder


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", CASES)
def test_hostile(tmp_path: Path, whole: Path, name: str) -> None:
    spoil, code = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    UNPICKLED.clear()
    memory, start = megabytes(), time.process_time()
    with pytest.raises(LaconicError) as caught:
        Decoder.from_pretrained(folder)
    took = time.process_time() - start  # of the processor: other tests may run beside; a hang meets the time limit
    assert caught.value.exit_code == code, caught.value
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert UNPICKLED == []
    assert sorted(tmp_path.rglob("*")) == before
    assert took <= LIMITS["hostile_seconds"]
    assert megabytes() - memory <= LIMITS["hostile_megabytes"]


def test_enough_of_them() -> None:
    assert len(CASES) >= LIMITS["hostile"]


def test_the_folder_itself_loads_and_its_code_is_not_run(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"auto_map": {"AutoConfig": "evil.Config"},', 1))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'CANARY')!r}, 'w')")
    UNPICKLED.clear()
    Decoder.from_pretrained(folder)
    assert UNPICKLED == []
    assert not (tmp_path / "CANARY").exists()


def test_the_watch_sees() -> None:
    UNPICKLED.clear()
    os.system("true")
    assert UNPICKLED == ["os.system"]
