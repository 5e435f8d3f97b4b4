"""Loading with missing tensors, devices and shard sizes that are refused."""

import warnings
from pathlib import Path

import pytest
import torch

from laconic.errors import InputError, UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.storage import atomic, safetensors_header

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Decoder(DecoderConfig.tiny("llama"), seed=4).save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def remove_tensors(folder: Path, n: int) -> tuple[str, ...]:
    """Remove the first n tensors of a checkpoint; return their names."""
    path = folder / FILE
    tensors = atomic.open_tensors(path, safetensors_header.read_safetensors_header(path).tensors)
    removed = tuple(sorted(tensors))[:n]
    rest = {name: tensor.clone() for name, tensor in tensors.items() if name not in removed}
    path.unlink()
    atomic.save_tensors(path, rest, {"format": "pt"})
    return removed


def test_allow_missing_refuses_a_name_the_model_does_not_have(folder: Path) -> None:
    with pytest.raises(InputError, match=r"model\.nrom\.weight: the model has no such tensor"):
        Decoder.from_pretrained(folder, allow_missing=("model.nrom.weight",))


def test_allow_missing_warns_of_tensors_that_are_initialised(folder: Path) -> None:
    (name,) = remove_tensors(folder, 1)
    with pytest.warns(UserWarning, match=f"^{name}: not in the checkpoint") as caught:
        Decoder.from_pretrained(folder, allow_missing=(name,))
    assert len(caught) == 1
    names = remove_tensors(folder, 11)
    with pytest.warns(UserWarning, match="…: not in the checkpoint") as caught:
        Decoder.from_pretrained(folder, allow_missing=(name, *names))
    assert str(caught[0].message).count(".weight") == 10


def test_allow_missing_does_not_warn_of_tensors_that_are_present(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder.from_pretrained(folder, allow_missing=("model.norm.weight",))


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_from_pretrained_refuses_an_unknown_device(folder: Path, device: str) -> None:
    with pytest.raises(UsageError, match=f"device {device} is not available"):
        Decoder.from_pretrained(folder, device=device)


def test_from_pretrained_refuses_a_missing_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="no CUDA"):
        Decoder.from_pretrained(folder, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="it has 2, from cuda:0"):
        Decoder.from_pretrained(folder, device=torch.device("cuda", 2))


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_save_pretrained_refuses_shards_of_no_bytes(tmp_path: Path, size: float) -> None:
    with pytest.raises(UsageError, match="max_shard_bytes"):
        Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "a", max_shard_bytes=size)
    assert list(tmp_path.iterdir()) == []
