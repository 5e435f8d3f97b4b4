"""R5: a single file cut anywhere, or with any bit turned, is found before a tensor is handed out."""

import random
from pathlib import Path

import pytest
import torch

from laconic.errors import CorruptArtifactError
from laconic.storage import atomic, strict_json
from tests.trust.limits import LIMITS


def small(path: Path) -> bytes:
    tensors = {f"keys.{l}": torch.randn(1, 2, 5, 4) for l in range(3)} | {"live": torch.ones(1, 5, dtype=torch.bool)}
    atomic.save_artifact(path, tensors, "cache", {"model": "3f9a", "positions": [0, 1, 2]})
    return path.read_bytes()


def refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        atomic.load_artifact(path, "cache")
    except CorruptArtifactError:
        return True
    return False


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = small(path)
    cuts = random.Random(5).sample(range(len(whole)), LIMITS["truncations"])
    assert [n for n in cuts if not refused(path, whole[:n])] == []
    assert refused(path, whole + b"\0")


def test_every_turned_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = small(path)
    draw = random.Random(6)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [draw.randrange(8 * header) for _ in range(LIMITS["flips"] // 2)]
    places += [draw.randrange(8 * header, 8 * len(whole)) for _ in range(LIMITS["flips"] // 2)]
    assert [n for n in places if not refused(path, turned(whole, n))] == []
    assert not refused(path, whole)


@pytest.mark.slow
def test_every_bit_and_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = small(path)
    assert [n for n in range(len(whole)) if not refused(path, whole[:n])] == []
    assert [n for n in range(8 * len(whole)) if not refused(path, turned(whole, n))] == []


def turned(whole: bytes, n: int) -> bytes:
    content = bytearray(whole)
    content[n // 8] ^= 1 << n % 8
    return bytes(content)


def test_tensors_exchanged_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    small(path)
    header = strict_json.read_safetensors_header(path)
    tensors = atomic.open_tensors(path, header.tensors)
    tensors["keys.0"], tensors["keys.1"] = tensors["keys.1"], tensors["keys.0"]
    atomic.write_file_atomically(path, lambda new: atomic.save_tensors(new, tensors, header.metadata))
    with pytest.raises(
        CorruptArtifactError, match=r": digest [0-9a-f]{64} promised, [0-9a-f]{64} found; take another copy"
    ):
        atomic.load_artifact(path, "cache")


def test_without_the_digest_a_turned_bit_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is what finds it."""
    path = tmp_path / "cache.safetensors"
    monkeypatch.setattr(atomic, "_hash_artifact", lambda text, tensors: "0" * 64)
    whole = small(path)
    assert not refused(path, turned(whole, 8 * len(whole) - 40))
