"""R5, R10, S2 for memories: a file that was cut, turned, or made by a stranger is found before a vector is read."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import CorruptArtifactError, InputError, LaconicError, UnsafeFileError
from tests.compression.test_memory import ABOUT, made
from tests.compression.test_memory_file import FILE, rewritten
from tests.trust.limits import LIMITS
from tests.trust.test_damage import turned


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made([[2, 0, 3], [1, 2, 0]], known=True).save(tmp_path / FILE)
    return tmp_path / FILE


def refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        SummaryMemory.load(path, ABOUT)
    except CorruptArtifactError:
        return True
    return False


def test_memory_file_damage_is_detected(path: Path) -> None:
    """A third of the draws of a single file: test_damage.py has them all, and the same guard finds these."""
    whole, draw = path.read_bytes(), random.Random(7)
    cuts = draw.sample(range(len(whole)), LIMITS["truncations"] // 3)
    assert [n for n in cuts if not refused(path, whole[:n])] == []
    bits = draw.sample(range(8 * len(whole)), LIMITS["flips"] // 3)
    assert [n for n in bits if not refused(path, turned(whole, n))] == []
    assert not refused(path, whole)


OFFSETS, BLOCK, SPANS = (
    torch.tensor([0, 5, 8]),
    torch.tensor([0, 0, 2, 2, 2, 0, 1, 1]),
    torch.tensor([[7, 14, 21], [7, 14, 0]]),
)
VECTORS = torch.ones(8, 5)
SPOILT: list[tuple[str, dict[str, Any]]] = [
    ("vectors", {"vectors": torch.ones(8, 6)}),
    ("vectors", {"vectors": torch.ones(8, 5).long()}),
    ("vectors", {"vectors": torch.ones(8, 5).to(torch.float8_e4m3fn)}),
    ("vectors", {"vectors": torch.ones(40)}),
    ("vectors", {"vectors": None}),
    ("more", {"more": torch.ones(1)}),
    ("offsets", {"offsets": torch.tensor([0, 9, 8])}),
    ("offsets", {"offsets": torch.tensor([1, 5, 8])}),
    ("offsets", {"offsets": torch.tensor([0, 5, 9])}),
    ("offsets", {"offsets": torch.tensor([0, 8])}),
    ("offsets", {"offsets": torch.tensor([0.0, 5.0, 8.0])}),
    ("offsets", {"offsets": torch.tensor([], dtype=torch.long)}),
    ("block", {"block": torch.tensor([0, 0, 2, 2, 1, 0, 1, 1])}),
    ("block", {"block": torch.tensor([0, 0, 2, 2, 3, 0, 1, 1])}),
    ("block", {"block": torch.tensor([-1, 0, 2, 2, 2, 0, 1, 1])}),
    ("block", {"block": torch.tensor([0, 0, 2])}),
    ("spans", {"spans": SPANS[:1]}),
    ("spans", {"spans": -SPANS}),
    ("spans", {"spans": SPANS + 1}),
]


@pytest.mark.parametrize(("name", "tensors"), SPOILT)
def test_tensors_that_do_not_fit_together(path: Path, name: str, tensors: dict[str, Any]) -> None:
    rewritten(path, {}, tensors)
    with pytest.raises(
        CorruptArtifactError, match=rf"^memory: {FILE}: {name} is missing or does not fit the others; take another"
    ):
        SummaryMemory.load(path)


def test_numbers_that_are_not_finite(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.storage.atomic.check_finite", lambda *_: None)
    rewritten(path, {}, {"vectors": VECTORS.masked_fill(torch.eye(8, 5).bool(), torch.inf)})
    with pytest.raises(CorruptArtifactError, match=r"vectors: 5 values not finite, first at \[0, 0\]; compress again"):
        SummaryMemory.load(path)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"PK\x03\x04" + b"x" * 90, UnsafeFileError),
        (b"\x80\x04" + b"x" * 90, UnsafeFileError),
        (b"", CorruptArtifactError),
        (b"{}" * 50, CorruptArtifactError),
    ],
)
def test_what_is_no_safetensors_file(path: Path, content: bytes, error: type[LaconicError]) -> None:
    path.write_bytes(content)
    with pytest.raises(error):
        SummaryMemory.load(path)


def test_memory_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no other\.safetensors in "):
        SummaryMemory.load(tmp_path / "other.safetensors")


def test_a_foreign_memory_is_refused_within_a_second(path: Path) -> None:
    """R10, with both hashes."""
    for changes in ({"reader": "9" * 64}, {"tokenizer": "9" * 64}):
        began = time.monotonic()
        with pytest.raises(CorruptArtifactError, match="9999…99"):
            SummaryMemory.load(path, type(ABOUT)(**{**vars(ABOUT), **changes}))
        assert time.monotonic() - began < 1
