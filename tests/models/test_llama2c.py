"""llama2.c files equal their checkpoint to the bit; the permutation of rows."""

import json
import struct
from pathlib import Path

import pytest
import torch

from laconic.errors import InputError, NonFiniteError, UnsafeFileError
from laconic.models.checkpoints.llama2c import half_split, read_llama2c
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.storage import atomic, safetensors_header
from tests.reference.weight_formats import interleave, write_llama2c


@pytest.fixture
def story(shared: Path) -> Path:
    return shared / "models" / "stories260k"


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return atomic.open_tensors(path, safetensors_header.read_safetensors_header(path).tensors)


def tiny(tie: bool) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 7, "max_position_embeddings": 5}
    config = {"model_type": "llama", **sizes, "tie_word_embeddings": tie, "rms_norm_eps": 1e-5}
    return config, {n: p.detach() for n, p in Decoder(DecoderConfig.from_dict(config), seed=3).named_parameters()}


def test_read_llama2c_equals_the_checkpoint(story: Path, tmp_path: Path) -> None:
    config, tensors = read_llama2c(story / "stories260K.bin")
    assert config == json.loads((story / "config.json").read_text())
    atomic.save_tensors(tmp_path / "copy", tensors, {"format": "pt"})
    assert (tmp_path / "copy").read_bytes() == (story / "model.safetensors").read_bytes()


def test_write_llama2c_equals_the_original_file(story: Path, tmp_path: Path) -> None:
    config = json.loads((story / "config.json").read_text())
    write_llama2c(tmp_path / "copy.bin", config, load_tensors(story / "model.safetensors"))
    assert (tmp_path / "copy.bin").read_bytes() == (story / "stories260K.bin").read_bytes()


def test_half_split_of_keys_needs_the_number_of_kv_heads(story: Path) -> None:
    """Some converters use H instead of G for k, which a round trip does not reveal."""
    _, tensors = read_llama2c(story / "stories260K.bin")
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    wrong = half_split(interleave(k, 4), 8)
    assert not torch.equal(wrong, load_tensors(story / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"])
    assert torch.equal(interleave(half_split(k, 8), 8), k)


@pytest.mark.parametrize("tie", [True, False])
def test_llama2c_round_trip(tmp_path: Path, tie: bool) -> None:
    config, tensors = tiny(tie)
    write_llama2c(tmp_path / "x.bin", config, tensors)
    assert struct.unpack("7i", (tmp_path / "x.bin").read_bytes()[:28]) == (8, 12, 2, 2, 1, 7 if tie else -7, 5)
    read_config, read_tensors = read_llama2c(tmp_path / "x.bin")
    assert {key: read_config[key] for key in config} == config
    assert read_tensors.keys() == tensors.keys()
    assert all(torch.equal(read_tensors[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 27, "27 bytes are not a llama2.c file"),
        (struct.pack("I", 0x616B3432) + b"\0" * 252, "is it a llama2.c file of version 0"),  # a later version
        (struct.pack("7i", 8, 12, 2, 3, 1, 7, 5), "does not describe a Llama"),
        (struct.pack("7i", 8, -1, 2, 2, 1, 7, 5), "does not describe a Llama"),
        (struct.pack("7i", 8, 12, 2, 2, 1, 7, 5), "implies 4,332 bytes, not 28"),
    ],
)
def test_read_llama2c_refuses_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_llama2c(tmp_path / "x.bin")
    with pytest.raises(InputError, match=r"no y\.bin"):
        read_llama2c(tmp_path / "y.bin")


def test_read_llama2c_refuses_more_layers_than_any_model(tmp_path: Path) -> None:
    header = struct.pack("7i", 2, 4, 300_000, 1, 1, 8, 8)
    (tmp_path / "x.bin").write_bytes(header + bytes(2_000_000))
    with pytest.raises(InputError, match="does not describe a Llama"):
        read_llama2c(tmp_path / "x.bin")


def test_read_llama2c_refuses_nan(tmp_path: Path) -> None:
    config, tensors = tiny(True)
    write_llama2c(tmp_path / "x.bin", config, tensors)
    data = bytearray((tmp_path / "x.bin").read_bytes())
    data[28 + 4 * 11 : 28 + 4 * 12] = struct.pack("f", float("nan"))
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(NonFiniteError, match=r"model\.embed_tokens\.weight.*\[1, 3\]"):
        Decoder.from_llama2c(tmp_path / "x.bin")


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02\x8a\n", b"\x80\x04\x95\x0f"])
def test_read_llama2c_refuses_pickles(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(start + bytes(60))
    with pytest.raises(UnsafeFileError, match="pickle"):
        Decoder.from_llama2c(tmp_path / "x.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(64))
    with pytest.raises(UnsafeFileError, match="pickle"):
        Decoder.from_llama2c(tmp_path / "pytorch_model.bin")


def test_read_llama2c_accepts_a_width_that_looks_like_a_pickle(tmp_path: Path) -> None:
    config = tiny(True)[0] | {"hidden_size": 640}
    tensors = {n: p.detach() for n, p in Decoder(DecoderConfig.from_dict(config)).named_parameters()}
    write_llama2c(tmp_path / "x.bin", config, tensors)
    assert (tmp_path / "x.bin").read_bytes().startswith(b"\x80\x02")
    assert Decoder.from_llama2c(tmp_path / "x.bin").config.hidden_size == 640


def test_half_split_by_hand() -> None:
    w = torch.arange(8)  # two heads of size four
    assert half_split(w, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert half_split(w, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert interleave(half_split(w, 2), 2).tolist() == w.tolist()
    matrix = torch.randn(8, 3)
    assert torch.equal(half_split(matrix, 2), matrix[half_split(w, 2)])
