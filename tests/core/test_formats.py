"""llama2.c files against the checkpoint they are of, bit for bit; the names of Meta and GGUF; the pairing of rows."""

import json
import struct
from pathlib import Path

import pytest
import torch

from laconic.errors import InputError, NonFiniteError, UnsafeFileError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.llama2c import gguf_to_hf, hf_to_gguf, hf_to_meta, meta_to_hf, read_llama2c, write_llama2c
from laconic.models.weights import half_split, interleave
from laconic.storage import atomic


@pytest.fixture
def story(shared: Path) -> Path:
    return shared / "models" / "stories260k"


def stored(path: Path) -> dict[str, torch.Tensor]:
    return atomic.open_tensors(path, atomic.read_safetensors_header(path).tensors)


def test_llama2c_gives_the_checkpoint(story: Path, tmp_path: Path) -> None:
    config, tensors = read_llama2c(story / "stories260K.bin")
    assert config == json.loads((story / "config.json").read_text())
    atomic.save_tensors(tmp_path / "made", tensors, {"format": "pt"})
    assert (tmp_path / "made").read_bytes() == (story / "model.safetensors").read_bytes()


def test_the_checkpoint_gives_llama2c(story: Path, tmp_path: Path) -> None:
    config = json.loads((story / "config.json").read_text())
    write_llama2c(tmp_path / "made.bin", config, stored(story / "model.safetensors"))
    assert (tmp_path / "made.bin").read_bytes() == (story / "stories260K.bin").read_bytes()


def test_keys_converted_with_the_heads_of_queries_are_others(story: Path) -> None:
    """Two converters take H for k: q right, k wrong, and there and back still the identity."""
    _, tensors = read_llama2c(story / "stories260K.bin")
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    wrong = half_split(interleave(k, 4), 8)
    assert not torch.equal(wrong, stored(story / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"])
    assert torch.equal(interleave(half_split(k, 8), 8), k)


def tiny(tie: bool) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 7, "max_position_embeddings": 5}
    config = {"model_type": "llama", **sizes, "tie_word_embeddings": tie, "rms_norm_eps": 1e-5}
    return config, {n: p.detach() for n, p in Decoder(DecoderConfig.from_dict(config), seed=3).named_parameters()}


@pytest.mark.parametrize("tie", [True, False])
def test_there_and_back_tied_and_not(tmp_path: Path, tie: bool) -> None:
    config, tensors = tiny(tie)
    write_llama2c(tmp_path / "x.bin", config, tensors)
    assert struct.unpack("7i", (tmp_path / "x.bin").read_bytes()[:28]) == (8, 12, 2, 2, 1, 7 if tie else -7, 5)
    found, same = read_llama2c(tmp_path / "x.bin")
    assert {key: found[key] for key in config} == config
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 27, "x.bin: 27 bytes are no llama2.c file"),
        (struct.compact("I", 0x616B3432) + b"\0" * 252, "is of a later version of llama2.c's file; export version 0"),
        (
            struct.compact("7i", 8, 12, 2, 3, 1, 7, 5),
            "sizes [8, 12, 2, 3, 1, 7, 5] are of no Llama; is it a llama2.c file?",
        ),
        (struct.compact("7i", 8, -1, 2, 2, 1, 7, 5), "are of no Llama"),
        (struct.compact("7i", 8, 12, 2, 2, 1, 7, 5), "x.bin: header promises 4,332 bytes, file has 28; fetch it again"),
    ],
)
def test_no_llama2c_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_llama2c(tmp_path / "x.bin")
    assert message in str(caught.value)
    with pytest.raises(InputError, match=r"no y\.bin in "):
        read_llama2c(tmp_path / "y.bin")


def test_numbers_that_are_none(tmp_path: Path) -> None:
    config, tensors = tiny(True)
    write_llama2c(tmp_path / "x.bin", config, tensors)
    data = bytearray((tmp_path / "x.bin").read_bytes())
    data[28 + 4 * 11 : 28 + 4 * 12] = struct.compact("f", float("nan"))
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(NonFiniteError, match=r"^model\.embed_tokens\.weight: 1 value not finite, first at \[1, 3\]$"):
        Decoder.from_llama2c(tmp_path / "x.bin")


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02\x8a\n", b"\x80\x04\x95\x0f"])
def test_a_pickle_is_not_opened(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(start + bytes(60))
    with pytest.raises(
        UnsafeFileError, match=r"^x\.bin is a pickle or zip by its first bytes and can run code; not opened\."
    ):
        Decoder.from_llama2c(tmp_path / "x.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(64))
    with pytest.raises(UnsafeFileError, match=r"^pytorch_model\.bin is a pickle and can run code; not opened\."):
        Decoder.from_llama2c(tmp_path / "pytorch_model.bin")


def test_a_width_that_looks_like_a_pickle(tmp_path: Path) -> None:
    config = tiny(True)[0] | {"hidden_size": 640}
    tensors = {n: p.detach() for n, p in Decoder(DecoderConfig.from_dict(config)).named_parameters()}
    write_llama2c(tmp_path / "x.bin", config, tensors)
    assert (tmp_path / "x.bin").read_bytes().startswith(b"\x80\x02")
    assert Decoder.from_llama2c(tmp_path / "x.bin").config.hidden_size == 640


def test_what_llama2c_cannot_say(tmp_path: Path) -> None:
    config, tensors = tiny(True)
    linear = {"rope_type": "linear", "factor": 2.0}
    changes = {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "hidden_act": "gelu", "model_type": "qwen2", "head_dim": 16}
    for key, value in {**changes, "rope_scaling": linear}.items():
        with pytest.raises(InputError, match=r"(theta|eps|act|family|head_dim|rope) .*: llama2.c knows only "):
            write_llama2c(tmp_path / "x.bin", {**config, key: value}, tensors)
    biased = tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)}
    with pytest.raises(InputError, match=r"^1 tensors are missing, unknown or of another shape"):
        write_llama2c(tmp_path / "x.bin", {**config, "attention_bias": True}, biased)
    odd = {**tensors, "extra": torch.ones(1), "model.norm.weight": torch.ones(9)}
    with pytest.raises(
        InputError, match=r"^2 tensors are missing, unknown or of another shape .extra, model.norm.weight"
    ):
        write_llama2c(tmp_path / "x.bin", config, odd)
    assert list(tmp_path.iterdir()) == []


def test_pairing_by_hand() -> None:
    w = torch.arange(8)  # two heads of four
    assert half_split(w, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert half_split(w, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert interleave(half_split(w, 2), 2).tolist() == w.tolist()
    matrix = torch.randn(8, 3)
    assert torch.equal(half_split(matrix, 2), matrix[half_split(w, 2)])


def test_meta(story: Path) -> None:
    ours = stored(story / "model.safetensors")
    theirs = hf_to_meta(ours, 8, 4)
    assert {n for n in theirs if not n.startswith("layers.")} == {"tok_embeddings.weight", "norm.weight"}
    raw = torch.from_file(str(story / "stories260K.bin"), size=(512 + 5 + 5 * 64) * 64 + 7)[7:]
    q = raw[(512 + 5) * 64 :].view(5, 64, 64)  # after words and norms
    assert all(torch.equal(theirs[f"layers.{l}.attention.wq.weight"], q[l]) for l in range(5))
    back = meta_to_hf({**theirs, "rope.freqs": torch.ones(4)}, 8, 4)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gguf(family: str) -> None:
    config = DecoderConfig.tiny(family)
    ours = {n: p.detach() for n, p in Decoder(config).named_parameters()}
    H, G = config.num_attention_heads, config.num_key_value_heads
    theirs = hf_to_gguf(ours, family, H, G)
    q, k = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    turned = family in ("llama", "mistral")
    assert torch.equal(theirs["blk.1.attn_q.weight"], interleave(ours[q], H) if turned else ours[q])
    assert torch.equal(theirs["blk.1.attn_k.weight"], interleave(ours[k], G) if turned else ours[k])
    for name in ("token_embd", "output_norm", "blk.0.ffn_gate", "blk.0.attn_output", "blk.1.ffn_norm"):
        assert f"{name}.weight" in theirs
    assert ("blk.0.attn_q_norm.weight" in theirs) == (family == "qwen3")
    assert ("blk.0.attn_q.bias" in theirs) == (family == "qwen2")
    back = gguf_to_hf({**theirs, "rope_freqs.weight": torch.ones(4)}, family, H, G)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_names_of_no_format() -> None:
    with pytest.raises(InputError, match=r"^blk.0.ssm.weight: no such name in this format; known: token_embd, blk"):
        gguf_to_hf({"blk.0.ssm.weight": torch.ones(1)}, "llama", 2, 1)
    with pytest.raises(InputError, match=r"^layers.0.lora.weight: no such name in this format; known: tok_embeddings"):
        meta_to_hf({"layers.0.lora.weight": torch.ones(1)}, 2, 1)
