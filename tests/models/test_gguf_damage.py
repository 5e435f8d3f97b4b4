"""Damaged, hostile and unsupported GGUF files: one line, a documented error, and neither time nor memory lost."""

import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import InputError, LaconicError, UnsafeFileError
from laconic.models.gguf.convert import convert_gguf
from tests.conftest import RunCli
from tests.models.gguf_files import Kind, random_decoder, write_gguf

U32, I32, F32, STRING, ARRAY, U64 = 4, 5, 6, 8, 9, 10
HUGE = 2**62


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dimensions: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def header(*entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, ...] = ()) -> bytes:
    numbers = counts or (len(tensors), len(entries))
    start = b"GGUF" + struct.pack("<I2Q", version, *numbers) + b"".join((*entries, *tensors))
    return start + bytes(-len(start) % 32)


LLAMA = entry("general.architecture", STRING, text("llama"))
HOSTILE = {
    "no bytes": (b"GGUF", "damaged"),
    "another format": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I2Q", 3, 0, 0), "little-endian"),
    "tensors without end": (header(counts=(HUGE, 0)), "items"),
    "keys without end": (header(counts=(0, HUGE)), "items"),
    "string longer than the file": (header(text("a")[:-1] + b"\xff" * 8), "damaged"),
    "array without end": (header(entry("a", ARRAY, struct.pack("<IQ", U32, HUGE))), "items"),
    "strings without end": (header(entry("a", ARRAY, struct.pack("<IQ", STRING, 2**40)) + bytes(10**6)), "items"),
    "nested arrays": (header(entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 2000)), "array of type 9"),
    "unknown type": (header(entry("a", 77, bytes(8))), "unknown type 77"),
    "bad UTF-8": (header(entry("a", STRING, text(b"\xff\xfe"))), "not UTF-8"),
    "key twice": (header(LLAMA, LLAMA), "twice"),
    "control characters in a key": (header(entry("a\n\x1b[2J", U32, bytes(4))), "not a name"),
    "no architecture": (header(tensors=(tensor("token_embd.weight", (1, 1)),)) + bytes(64), "general.architecture"),
    "architecture of another type": (header(entry("general.architecture", U32, bytes(4))), "not of type str"),
    "alignment of 3": (header(LLAMA, entry("general.alignment", U32, struct.pack("<I", 3))), "power of two"),
    "no tensors": (header(LLAMA), "no embedding"),
    "tensor twice": (header(LLAMA, tensors=(tensor("a", (1,)),) * 2) + bytes(64), "twice"),
    "tensors that overlap": (header(LLAMA, tensors=(tensor("a", (9,)), tensor("b", (9,)))) + bytes(64), "overlaps"),
    "shape beyond the file": (header(LLAMA, tensors=(tensor("a", (2**40, 2**40)),)), "not in the file"),
    "empty shape": (header(LLAMA, tensors=(tensor("a", (0, 5)),)), "not in the file"),
    "offset beyond the file": (header(LLAMA, tensors=(tensor("a", (1,), offset=2**63),)), "not in the file"),
    "offset that wraps around": (header(LLAMA, tensors=(tensor("a", (8,), offset=2**64 - 32),)), "not in the file"),
    "offset without alignment": (header(LLAMA, tensors=(tensor("a", (1,), offset=1),)) + bytes(64), "not in the file"),
    "99 dimensions": (header(LLAMA, tensors=(tensor("a", (1,) * 99),)), "99 dimensions"),
    "unknown quantisation": (header(LLAMA, tensors=(tensor("a", (1,), kind=999),)), "unknown quantisation 999"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_gguf_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=message) as caught:
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_gguf_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"\x80\x04" + bytes(50))
    with pytest.raises(UnsafeFileError):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")


Patch = Callable[[bytes], bytes]


def replace_number(key: str, value: int) -> Patch:
    """Return a patch of a 32-bit metadata value."""

    def patch(data: bytes) -> bytes:
        place = data.index(key.encode()) + len(key) + 4
        return data[:place] + struct.pack("<I", value) + data[place + 4 :]

    return patch


def replace_text(old: str, new: str) -> Patch:
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode())


LYING: dict[str, tuple[Patch, str]] = {
    "another architecture": (replace_text("llama", "gemma"), "architecture 'gemma' is not supported"),
    "layers without end": (replace_number("llama.block_count", 2**31), r"bad\.gguf: num_hidden_layers=2147483648"),
    "a thousand layers": (replace_number("llama.block_count", 1000), "tensors for 1000 layers"),
    "wide": (replace_number("llama.embedding_length", 2**31), "hidden_size"),
    "no heads": (replace_number("llama.attention.head_count", 0), "heads"),
    "more heads than rows": (replace_number("llama.attention.head_count", 2**20), "num_attention_heads"),
    "heads that do not divide": (replace_number("llama.attention.head_count_kv", 3), "does not divide"),
    "partial rotary": (replace_number("llama.rope.dimension_count", 4), "dimension_count=4 is not supported"),
    "narrow MLP": (replace_number("llama.feed_forward_length", 16), "has the shape"),
    "NaN": (replace_number("llama.attention.layer_norm_rms_epsilon", 0x7FC00000), "not of type float"),
    "one more layer": (replace_number("llama.block_count", 3), "no tensor for model.layers.2"),
    "one layer fewer": (replace_number("llama.block_count", 1), "does not belong"),
    "eos outside the vocabulary": (replace_number("ggml.eos_token_id", 10**6), "not one of 267 tokens"),
    "unknown pre-tokenizer": (replace_text("smollm", "viking"), "pre-tokenizer 'viking' is not supported"),
    "unknown tokenizer": (replace_text("gpt2", "bert"), "model='bert' is not supported"),
    "a merge of unknown tokens": (replace_text("Ġt he", "Ġt hq"), "invalid vocabulary"),
    "a merge of one token": (replace_text("Ġt he", "Ġtche"), "pairs of tokens"),
    "quantisation without code": (replace_text("blk.0.attn_v.weight", "blk.0.attn_w.weight"), "does not belong"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a valid file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, random_decoder("llama", 32, head_dim=8), {"token_embd": Kind.Q8_0}).read_bytes()


@pytest.mark.parametrize("name", LYING)
def test_gguf_lying_metadata_are_refused(name: str, tiny: bytes, tmp_path: Path) -> None:
    patch, message = LYING[name]
    assert patch(tiny) != tiny
    (tmp_path / "bad.gguf").write_bytes(patch(tiny))
    with pytest.raises(InputError, match=message) as caught:
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize("head_size", [9, 2**31])
def test_gguf_lying_head_size_beside_rope_factors_is_refused(head_size: int, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "bad.gguf", random_decoder("llama", 32, head_dim=8), rope_factors=torch.ones(4))
    data = file.read_bytes()
    for key in ("llama.attention.key_length", "llama.rope.dimension_count"):
        data = replace_number(key, head_size)(data)
    file.write_bytes(data)
    with pytest.raises(InputError, match="not Llama 3's"):
        convert_gguf(file, tmp_path / "out")


def test_gguf_quantisation_without_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    blocks = header(LLAMA, tensors=(tensor("token_embd.weight", (32, 8), kind=Kind.I8.value),)) + bytes(512)
    file.write_bytes(blocks)
    with pytest.raises(InputError, match="quantisation I8, which the gguf package cannot undo"):
        convert_gguf(file, tmp_path / "out")


def test_gguf_cut_anywhere_is_refused(tiny: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    for end in (3, 4, 20, 24, 100, len(tiny) // 4, len(tiny) // 2, len(tiny) - 1):
        file.write_bytes(tiny[:end])
        with pytest.raises(InputError):
            convert_gguf(file, tmp_path / "out")


def is_converted(file: Path, out: Path) -> bool:
    """Return whether a file becomes a folder; otherwise it must be refused in one line, without a trace."""
    try:
        convert_gguf(file, out)
    except LaconicError as error:
        lines, is_clean = str(error).count("\n") + 1, not out.exists()
        assert (lines, is_clean) == (1, True), error  # noqa: PT017
        return False
    return True


@pytest.mark.medium
def test_gguf_mutated_files_convert_or_are_refused(tiny: bytes, tmp_path: Path) -> None:
    """200 files with changed bytes, most of them in the header."""
    rng, file = random.Random(0), tmp_path / "mutated.gguf"
    header_bytes = tiny.index(b"blk.1.ffn_down.weight") + 200
    outcomes: list[bool] = []
    for i in range(200):
        data = bytearray(tiny)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(header_bytes if rng.random() < 0.9 else len(data))
            data[place] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        file.write_bytes(data)
        outcomes.append(is_converted(file, tmp_path / f"out-{i}"))
    assert 20 < sum(outcomes) < 180
    assert not any(path.name.startswith(".tmp") for path in tmp_path.iterdir())


def test_generate_reports_a_damaged_file_in_one_line(
    tiny: bytes, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache" / "laconic"))
    (tmp_path / "cut.gguf").write_bytes(tiny[:5000])
    result = run_cli("generate", tmp_path / "cut.gguf", "x")
    assert (result.code, result.err.count("\n")) == (66, 1)
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert run_cli("generate", tmp_path / "absent.gguf", "x").code == 66


def test_import_without_the_gguf_package_names_the_extra(
    tiny: bytes, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: dict[str, Any] = {"gguf": None, "gguf.constants": None}
    for name, value in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, value)
    (tmp_path / "tiny.gguf").write_bytes(tiny)
    result = run_cli("import", tmp_path / "tiny.gguf", "--out", tmp_path / "out")
    assert result.code == 2
    assert ".[gguf]" in result.err
