"""R5: truncation and bit flips of a single-file artifact are found before a tensor is returned."""

import random
from pathlib import Path

import pytest
import torch

from laconic.errors import CorruptArtifactError
from laconic.storage import atomic, safetensors_header
from tests.trust.limits import LIMITS


def write_small(path: Path) -> bytes:
    tensors = {f"keys.{l}": torch.randn(1, 2, 5, 4) for l in range(3)} | {"live": torch.ones(1, 5, dtype=torch.bool)}
    atomic.save_artifact(path, tensors, "cache", {"model": "3f9a", "positions": [0, 1, 2]})
    return path.read_bytes()


def is_refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        atomic.load_artifact(path, "cache")
    except CorruptArtifactError:
        return True
    return False


def test_artifact_truncations_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = write_small(path)
    cuts = random.Random(5).sample(range(len(whole)), LIMITS["truncations"])
    assert [n for n in cuts if not is_refused(path, whole[:n])] == []
    assert is_refused(path, whole + b"\0")


def test_artifact_bit_flips_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = write_small(path)
    draw = random.Random(6)
    header = 8 + int.from_bytes(whole[:8], "little")
    bits = [draw.randrange(8 * header) for _ in range(LIMITS["flips"] // 2)]
    bits += [draw.randrange(8 * header, 8 * len(whole)) for _ in range(LIMITS["flips"] // 2)]
    assert [n for n in bits if not is_refused(path, flip_bit(whole, n))] == []
    assert not is_refused(path, whole)


@pytest.mark.slow
def test_artifact_every_bit_and_length(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = write_small(path)
    assert [n for n in range(len(whole)) if not is_refused(path, whole[:n])] == []
    assert [n for n in range(8 * len(whole)) if not is_refused(path, flip_bit(whole, n))] == []


def flip_bit(whole: bytes, n: int) -> bytes:
    content = bytearray(whole)
    content[n // 8] ^= 1 << n % 8
    return bytes(content)


def test_artifact_exchanged_tensors_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    write_small(path)
    header = safetensors_header.read_safetensors_header(path)
    tensors = atomic.open_tensors(path, header.tensors)
    tensors["keys.0"], tensors["keys.1"] = tensors["keys.1"], tensors["keys.0"]
    atomic.write_file_atomically(path, lambda new: atomic.save_tensors(new, tensors, header.metadata))
    with pytest.raises(CorruptArtifactError, match="is damaged, or was changed"):
        atomic.load_artifact(path, "cache")


def test_artifact_bit_flip_passes_without_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the digest that finds it."""
    path = tmp_path / "cache.safetensors"
    monkeypatch.setattr(atomic, "hash_artifact", lambda text, tensors: "0" * 64)
    whole = write_small(path)
    assert not is_refused(path, flip_bit(whole, 8 * len(whole) - 40))
