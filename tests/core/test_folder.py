"""Names allowed to be missing, devices and sizes of shards that cannot be meant."""

import warnings
from pathlib import Path

import pytest
import torch

from laconic.errors import InputError, UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.storage import atomic

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Decoder(DecoderConfig.tiny("llama"), seed=4).save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def drop(folder: Path, n: int) -> tuple[str, ...]:
    """The first n names, whose tensors are no longer there."""
    tensors = atomic.open_tensors(folder / FILE, atomic.read_safetensors_header(folder / FILE).tensors)
    gone = tuple(sorted(tensors))[:n]
    left = {name: tensor.clone() for name, tensor in tensors.items() if name not in gone}
    (folder / FILE).unlink()
    atomic.save_tensors(folder / FILE, left, {"format": "pt"})
    return gone


def test_a_name_that_may_be_missing_is_one_of_the_model(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^model\.nrom\.weight: no such tensor; did you mean model\.norm\.weight\?$"):
        Decoder.from_pretrained(folder, allow_missing=("model.nrom.weight",))


def test_what_is_drawn_anew_is_said(folder: Path) -> None:
    (name,) = drop(folder, 1)
    with pytest.warns(UserWarning, match=f"^{name} was not in the checkpoint and is drawn anew$") as told:
        Decoder.from_pretrained(folder, allow_missing=(name,))
    assert len(told) == 1
    names = drop(folder, 11)
    with pytest.warns(UserWarning, match=r"^12 tensors were not in the checkpoint and are drawn anew \(") as told:
        Decoder.from_pretrained(folder, allow_missing=(name, *names))
    (said,) = told
    assert str(said.message).count(".weight") == 10
    assert str(said.message).endswith(", …)")


def test_what_is_there_is_not_drawn(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder.from_pretrained(folder, allow_missing=("model.norm.weight",))


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_no_device(folder: Path, device: str) -> None:
    with pytest.raises(UsageError, match=f"^device {device}: this torch reaches no such device; use cpu$"):
        Decoder.from_pretrained(folder, device=device)


def test_no_cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"^device cuda: this torch sees no CUDA; use cpu$"):
        Decoder.from_pretrained(folder, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"^device cuda:2: this torch sees 2 of CUDA, from cuda:0$"):
        Decoder.from_pretrained(folder, device=torch.device("cuda", 2))


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_shards_of_no_bytes(tmp_path: Path, size: float) -> None:
    with pytest.raises(UsageError, match=rf"^shard_bytes {size:g}: must be > 0$"):
        Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "a", max_shard_bytes=size)
    assert list(tmp_path.iterdir()) == []
