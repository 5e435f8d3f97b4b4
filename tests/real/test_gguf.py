"""The GGUF file of SmolLM2-135M-Instruct: weights as transformers reads it, tokens as llama.cpp has them."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.data.tokenizer import load_tokenizer
from laconic.models.decoder import Decoder
from tests.conftest import REPO, missing, needs
from tests.real.texts import build_texts
from tests.tolerances import FLOAT32, error
from tools import smollm2 as package

pytestmark = pytest.mark.real
PROMPT = "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": "1 + 1?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|>"},
    ],
]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    try:
        return package.find_file()
    except package.InputError as error:
        missing(str(error))
        raise


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2: Path) -> Any:
    needs("transformers")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_gguf_logits_equal_transformers_reading_of_the_file(smollm2: Path, gguf_file: Path) -> None:
    """And its reading of the folder that laconic wrote."""
    needs("transformers")
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([load_tokenizer(smollm2).encode(PROMPT)])
    decoder = Decoder.from_pretrained(smollm2)
    with torch.inference_mode():
        ours = decoder.logits(decoder(decoder.embed(ids)).hidden_states)
        for options in ({"gguf_file": gguf_file.name}, {}):
            folder = gguf_file.parent if options else smollm2
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
            state = dict(theirs.named_parameters())
            assert all(torch.equal(p, state[name]) for name, p in decoder.named_parameters())
            assert error(ours, theirs.eval()(ids).logits) < FLOAT32


def test_gguf_tokens_equal_llama_cpp(smollm2: Path) -> None:
    """Checksums of the ids that llama.cpp gives for 2,000 texts; transformers' own reading of the file misses 188."""
    tokenizer, texts = load_tokenizer(smollm2), build_texts()
    expected = (REPO / "tests/real/llama_cpp_tokens.txt").read_text(encoding="ascii").split()
    actual = [f"{zlib.crc32(json.dumps(tokenizer.encode(text)).encode()):08x}" for text in texts]
    wrong = [text for text, a, b in zip(texts, actual, expected, strict=True) if a != b]
    assert (len(texts), wrong) == (2000, [])


def test_gguf_tokens_equal_transformers_in_the_folder(smollm2: Path, reference_tokenizer: Any) -> None:
    tokenizer = load_tokenizer(smollm2)
    for text in build_texts():
        ids = tokenizer.encode(text)
        assert ids == reference_tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("messages", MESSAGES)
def test_gguf_chat_template_renders_as_in_transformers(
    messages: list[dict[str, str]], smollm2: Path, reference_tokenizer: Any
) -> None:
    ours = load_tokenizer(smollm2).apply_chat_template(messages)
    assert ours == reference_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_make_model_checks_what_it_wrote(
    smollm2: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_MODELS", str(smollm2.parent))
    package.write_model()
    source = json.loads((smollm2 / "gguf_source.json").read_text(encoding="utf-8"))
    assert (source["file"], source["sha256"]) == (package.FILE, package.FILE_SHA256)
    monkeypatch.setenv("LACONIC_MODELS", str(tmp_path))
    (tmp_path / smollm2.name).mkdir()
    (tmp_path / smollm2.name / "model.safetensors").write_bytes(b"another")
    with pytest.raises(package.CorruptArtifactError, match="expected a672150"):
        package.write_model()
