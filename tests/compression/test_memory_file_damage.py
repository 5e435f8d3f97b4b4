"""Damaged and foreign memory files are detected before a vector is read."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import CorruptArtifactError, InputError, LaconicError, UnsafeFileError
from tests.compression.test_memory import METADATA, make_memory
from tests.compression.test_memory_file import FILE, rewrite_file
from tests.trust.limits import LIMITS
from tests.trust.test_damage import flip_bit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_memory([[2, 0, 3], [1, 2, 0]], with_metadata=True).save(tmp_path / FILE)
    return tmp_path / FILE


def is_refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        SummaryMemory.load(path, METADATA)
    except CorruptArtifactError:
        return True
    return False


def test_memory_file_detects_truncation_and_bit_flips(path: Path) -> None:
    """A sample; test_damage.py covers the shared guard in full."""
    whole, draw = path.read_bytes(), random.Random(7)
    cuts = draw.sample(range(len(whole)), LIMITS["truncations"] // 3)
    assert [n for n in cuts if not is_refused(path, whole[:n])] == []
    bits = draw.sample(range(8 * len(whole)), LIMITS["flips"] // 3)
    assert [n for n in bits if not is_refused(path, flip_bit(whole, n))] == []
    assert not is_refused(path, whole)


SEGMENT_TOKENS = torch.tensor([[7, 14, 21], [7, 14, 0]])
VECTORS = torch.ones(8, 5)
BAD_TENSORS: list[tuple[str, dict[str, Any]]] = [
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
    ("segment_ids", {"segment_ids": torch.tensor([0, 0, 2, 2, 1, 0, 1, 1])}),
    ("segment_ids", {"segment_ids": torch.tensor([0, 0, 2, 2, 3, 0, 1, 1])}),
    ("segment_ids", {"segment_ids": torch.tensor([-1, 0, 2, 2, 2, 0, 1, 1])}),
    ("segment_ids", {"segment_ids": torch.tensor([0, 0, 2])}),
    ("segment_tokens", {"segment_tokens": SEGMENT_TOKENS[:1]}),
    ("segment_tokens", {"segment_tokens": -SEGMENT_TOKENS}),
    ("segment_tokens", {"segment_tokens": SEGMENT_TOKENS + 1}),
]


@pytest.mark.parametrize(("name", "tensors"), BAD_TENSORS)
def test_memory_file_rejects_inconsistent_tensors(path: Path, name: str, tensors: dict[str, Any]) -> None:
    rewrite_file(path, {}, tensors)
    with pytest.raises(CorruptArtifactError, match=rf"{FILE}: {name} is missing or inconsistent"):
        SummaryMemory.load(path)


def test_memory_file_rejects_nonfinite_vectors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.storage.atomic.check_finite", lambda *_: None)
    rewrite_file(path, {}, {"vectors": VECTORS.masked_fill(torch.eye(8, 5).bool(), torch.inf)})
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
def test_memory_file_rejects_other_file_types(path: Path, content: bytes, error: type[LaconicError]) -> None:
    path.write_bytes(content)
    with pytest.raises(error):
        SummaryMemory.load(path)


def test_memory_load_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no other\.safetensors in "):
        SummaryMemory.load(tmp_path / "other.safetensors")


def test_memory_file_of_another_model_is_rejected(path: Path) -> None:
    for changes in ({"reader": "9" * 64}, {"tokenizer": "9" * 64}):
        with pytest.raises(CorruptArtifactError, match="9999…99"):
            SummaryMemory.load(path, type(METADATA)(**{**vars(METADATA), **changes}))
