"""GGUF files: logits and tokens as transformers', the folder that is written, the cache, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laconic.data.tokenizer import load_tokenizer
from laconic.errors import InputError
from laconic.models.config import RopeConfig
from laconic.models.decoder import Decoder
from laconic.models.gguf.config import special_token_ids
from laconic.models.gguf.convert import convert_gguf, describe_conversion, find_or_convert_gguf
from laconic.models.gguf.header import GGUFHeader, read_header
from laconic.models.gguf.tensors import read_tensor
from laconic.models.gguf.tokenizer import build_sentencepiece
from laconic.models.ops.rope_scaling import llama3_frequencies
from laconic.models.rope import frequencies
from laconic.storage.export_record import read_export_record
from tests.conftest import RunCli, needs
from tests.models.fixtures import read_logits, transformers_logits
from tests.models.gguf_files import K_QUANTS, MIXED, Kind, random_decoder, write_gguf, write_sentencepiece
from tests.tolerances import FLOAT32, error

TEXTS = ("the cat in the hat", "a  12\n\n  thin <|user|>x", "Ünïcode 😀", "", "\n\n1. the")

# Most probable next tokens after 1, 2, …, 40 by llama.cpp (llama-cpp-python 0.3.36), of the file that the test writes.
LLAMA_CPP_SMOLLM3 = [
    81, 145, 70, 82, 226, 54, 224, 89, 158, 156, 14, 83, 38, 83, 203, 19, 213, 224, 165, 59,
    19, 134, 27, 81, 165, 37, 79, 85, 233, 70, 14, 124, 152, 42, 197, 229, 207, 90, 52, 206,
]  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of laconic, empty."""
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache" / "laconic"))
    return tmp_path / "cache/laconic"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("family", "kinds", "D"), [("llama", MIXED, 64), ("llama", K_QUANTS, 256), ("qwen2", MIXED, 64), ("qwen3", {}, 64)]
)
def test_gguf_logits_equal_transformers(family: str, kinds: dict, D: int, tmp_path: Path) -> None:
    """From the file and from the folder that laconic writes."""
    head_dim = 128 if family == "qwen3" else D // 4  # transformers does not read the size of Qwen 3's heads
    file = write_gguf(tmp_path / "tiny.gguf", random_decoder(family, D, head_dim=head_dim), kinds)
    convert_gguf(file, tmp_path / "hf")
    ids = torch.arange(1, 25)[None]
    ours = read_logits(Decoder.from_pretrained(tmp_path / "hf"), ids)
    assert error(ours, transformers_logits(tmp_path, ids, gguf_file="tiny.gguf")) < FLOAT32
    assert error(ours, transformers_logits(tmp_path / "hf", ids)) < FLOAT32


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_gguf_tokens_equal_transformers(pre: str, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import AutoTokenizer

    file = write_gguf(tmp_path / "tiny.gguf", random_decoder("llama"), pre=pre)
    convert_gguf(file, tmp_path / "hf")
    ours = load_tokenizer(tmp_path / "hf")
    from_file = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    from_folder = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert ours.special_tokens == {"bos_token": "<|end|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        for theirs in (from_folder, from_file):
            assert theirs.encode(text, add_special_tokens=False) == ids
        assert from_folder.encode(text) == ours.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == from_folder.apply_chat_template(messages, tokenize=False)


def test_gguf_smollm_splits_digits_and_keeps_line_ends_together(tmp_path: Path) -> None:
    """As the published tokenizer does, and llama.cpp, unlike transformers' reading of GGUF files."""
    tokenizer = load_tokenizer(convert(tmp_path, random_decoder("llama"), pre="smollm"))
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("\n\n12  3")] == ["ĊĊ", "1", "2", "ĠĠ", "3"]
    whole = load_tokenizer(convert(tmp_path / "gpt2", random_decoder("llama"), pre="gpt-2"))
    assert [whole.backend.id_to_token(i) for i in whole.encode("\n\n12  3")] == ["Ċ", "Ċ", "12", "Ġ", "Ġ", "3"]


def convert(folder: Path, decoder: Decoder, **options: object) -> Path:
    """Write a decoder as a GGUF file, convert it, and return the Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    convert_gguf(write_gguf(folder / "tiny.gguf", decoder, **options), folder / "hf")  # pyright: ignore
    return folder / "hf"


def test_gguf_bos_follows_the_file_or_the_pre_tokenizer(tmp_path: Path) -> None:
    cases = {("smollm", None): False, ("llama-bpe", None): True, ("llama-bpe", False): False, ("smollm", True): True}
    cases |= {("smaug-bpe", None): False}  # of SmolLM3: words as in Llama 3, without bos
    for i, ((pre, flag), has_bos) in enumerate(cases.items()):
        extra = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
        tokenizer = load_tokenizer(convert(tmp_path / str(i), random_decoder("llama"), pre=pre, extra=extra))
        assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) is has_bos


def test_gguf_sentencepiece_tokens_equal_the_published_ones(tmp_path: Path, shared: Path) -> None:
    """The pieces and scores of stories260k, from which the packaged tokenizer.json was made by other code."""
    file = write_sentencepiece(tmp_path / "spm.gguf", shared / "models/stories260k/tok512.bin")
    convert_gguf(file, tmp_path / "hf")
    ours, theirs = load_tokenizer(tmp_path / "hf"), load_tokenizer("stories260k")
    story = (shared / "data/text/tinyshakespeare.txt").read_text(encoding="utf-8")[:4000]
    for text in (*TEXTS[:3], "", " two  spaces", "Once upon a time</s>\n", story):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_gguf_keeps_half_precision_and_float32_norms(tmp_path: Path) -> None:
    folder = convert(tmp_path, random_decoder("llama"), quantizations=dict.fromkeys(MIXED, Kind.F16))
    tensors = load_file(folder / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values() if t.ndim == 2} == {"torch.float16"}
    assert {str(t.dtype) for t in tensors.values() if t.ndim == 1} == {"torch.float32"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_gguf_llama3_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    rope = RopeConfig("llama3", 500000.0, factor=32.0, original_max_position_embeddings=8192)
    scaled, _ = llama3_frequencies(rope, 64, torch.zeros(1, dtype=torch.long))
    divisors = frequencies(rope.theta, 64) / scaled
    decoder = random_decoder("llama", head_dim=64, rope=RopeConfig(theta=500000.0))
    convert_gguf(write_gguf(tmp_path / "a.gguf", decoder, rope_factors=divisors), tmp_path / "hf")
    read = Decoder.from_pretrained(tmp_path / "hf").config.rope
    assert read is not None
    assert (read.kind, read.factor, read.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    with pytest.raises(InputError, match="not Llama 3's"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", decoder, rope_factors=divisors * 1.01), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.medium
def test_gguf_smollm3_logits_equal_transformers_and_llama_cpp(tmp_path: Path) -> None:
    """Every fourth layer is without RoPE, which a file does not say; transformers reads the checkpoint it is from."""
    decoder = random_decoder("smollm3", num_hidden_layers=5, nope_layers=(3,))
    decoder.save_pretrained(tmp_path / "original")
    read = Decoder.from_pretrained(convert(tmp_path, decoder, quantizations={}))
    assert read.config.nope_layers == (3,)
    ids = torch.arange(1, 41)[None]
    logits = read_logits(read, ids)
    assert error(logits, transformers_logits(tmp_path / "original", ids)) < FLOAT32
    assert logits[0].argmax(-1).tolist() == LLAMA_CPP_SMOLLM3


@pytest.mark.medium
def test_gguf_yarn_logits_equal_transformers(tmp_path: Path) -> None:
    """With betas, as llama.cpp's converter writes them, and factors that change nothing in llama.cpp."""
    rope = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.5, beta_slow=0.3)
    decoder = random_decoder("llama", rope=rope)
    decoder.save_pretrained(tmp_path / "original")
    keys = YARN | {"yarn_beta_fast": 8.5, "yarn_beta_slow": 0.3, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    extra = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    ours = Decoder.from_pretrained(convert(tmp_path, decoder, quantizations={}, extra=extra))
    ids = torch.arange(1, 61)[None]
    assert error(read_logits(ours, ids), transformers_logits(tmp_path / "original", ids)) < FLOAT32


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"])
def test_gguf_factors_of_rope_scaling_are_refused(key: str, tmp_path: Path) -> None:
    extra = {f"llama.rope.scaling.{name}": value for name, value in (YARN | {key: 0.5}).items()}
    with pytest.raises(InputError, match=rf"^tiny\.gguf: llama\.rope\.scaling\.{key}=0\.5 is not supported"):
        convert(tmp_path, random_decoder("llama"), extra=extra)


def test_gguf_eos_lists_the_end_of_a_turn(tmp_path: Path) -> None:
    folder = convert(tmp_path, random_decoder("llama"), extra={"tokenizer.ggml.eot_token_id": 1})
    assert Decoder.from_pretrained(folder).config.eos_token_ids == (0, 1)


@pytest.mark.parametrize("absent", [-1, 0xFFFFFFFF])
def test_gguf_token_id_of_minus_one_is_no_token(absent: int) -> None:
    names = ("bos", "eos", "eot", "padding", "unknown")
    metadata = {f"tokenizer.ggml.{name}_token_id": absent for name in names}
    tokens = ["<unk>", "▁", "a", "b"]
    header = GGUFHeader(Path("a.gguf"), metadata | {"tokenizer.ggml.scores": [0.0] * 4}, {})
    assert set(special_token_ids(header).values()) == {None}
    assert json.loads(build_sentencepiece(header, tokens).to_str())["model"]["unk_token"] == "<unk>"


def test_gguf_file_works_as_a_model_name(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first use converts into the cache and says so; the next, and a copy elsewhere, find the folder."""
    decoder = random_decoder("llama")
    file = write_gguf(tmp_path / "tiny.gguf", decoder, {})
    loaded = Decoder.from_pretrained(file)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), decoder.parameters(), strict=True))
    assert capsys.readouterr().err.count("converting tiny.gguf once") == 1
    copy = tmp_path / "copy.GGUF"
    copy.write_bytes(file.read_bytes())
    assert find_or_convert_gguf(copy) == find_or_convert_gguf(file) == loaded.source_folder
    assert load_tokenizer(str(file)).encode("<|pad|>") == [2]
    assert capsys.readouterr().err == ""
    assert [path.name for path in (cache / "gguf").iterdir() if path.name.startswith(".tmp")] == []


def test_describe_conversion_counts_weights_not_tensors(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tensors of the file are F32, among them all vectors; most weights are not. The file is hashed once."""
    hashed = list[str]()
    monkeypatch.setattr("laconic.models.gguf.convert.hash_file", lambda path: hashed.append(path.name) or "0" * 64)
    kinds = dict.fromkeys(("ffn_", "attn_output", "token_embd"), Kind.Q8_0)
    folder = find_or_convert_gguf(write_gguf(tmp_path / "tiny.gguf", random_decoder("llama"), kinds))
    assert describe_conversion(folder) == "converted from tiny.gguf (weights rounded to Q8_0)"
    source = json.loads((folder / "gguf_source.json").read_text())
    vocab_size = Decoder.from_pretrained(folder).config.vocab_size
    assert source["quantization"] == {"Q8_0": 64 * (vocab_size + 8 * 64), "F32": 64 * 2 * 128}
    assert (source["sha256"], hashed) == ("0" * 64, ["tiny.gguf"])


def test_import_writes_a_folder_or_nothing(tmp_path: Path, run_cli: RunCli) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_decoder("llama"))
    file = file.rename(tmp_path / "sha256-0123")  # as Ollama does
    assert run_cli("import", file, "--out", tmp_path / "out", "--dtype", "bfloat16").code == 0
    assert Decoder.from_pretrained(tmp_path / "out").config.vocab_size > 256
    record = read_export_record(tmp_path / "out")
    assert record is not None
    assert set(record.files) == {"config.json", "model.safetensors", "tokenizer.json"}
    again = run_cli("import", file, "--out", tmp_path / "out")
    assert (again.code, again.err.count("\n")) == (73, 1)
    file.write_bytes(file.read_bytes()[:-1000])
    cut = run_cli("import", file, "--out", tmp_path / "cut")
    assert (cut.code, cut.err.count("\n")) == (66, 1)
    assert "download it again" in cut.err
    assert run_cli("import", tmp_path / "x.safetensors", "--out", tmp_path / "y").code == 66
    (tmp_path / "notes").write_text("no model")
    assert run_cli("import", tmp_path / "notes", "--out", tmp_path / "y").code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "out", "sha256-0123"]


def test_read_tensor_needs_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows give the same tensor as one piece."""
    header = read_header(write_gguf(tmp_path / "tiny.gguf", random_decoder("llama")))
    tensor = header.tensors["token_embd.weight"]
    whole = read_tensor(header, tensor, torch.float32)
    monkeypatch.setattr("laconic.models.gguf.tensors.CHUNK_ELEMENTS", 7 * tensor.shape[1])
    assert torch.equal(read_tensor(header, tensor, torch.float32), whole)
