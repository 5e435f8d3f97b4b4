"""`laconic compress`, `inspect` and `generate --memory` with a plain checkpoint."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from laconic import Decoder, DecoderConfig, LanguageModel
from laconic.compression import cartridge
from laconic.compression.kv_memory import KVMemory
from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from laconic.experiment.kv_compressor import encode_document, encode_prompt, load_kv_memories
from tests.conftest import RunCli

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen."
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_byte_tokenizer()
    config = DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    LanguageModel(Decoder(config).eval(), tokenizer).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "day.txt").write_text(TEXT + "\n")
    return tmp_path / "day.txt"


def test_compress_keeping_everything_generates_what_the_text_does(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memory = tmp_path / "memory.safetensors"
    assert run_cli("compress", model, text, "--out", memory, "--keep", 1)[0] == 0
    code, out, _ = run_cli("generate", model, " Then", "--memory", memory, "--max-tokens", 12)
    assert code == 0
    assert out == run_cli("generate", model, TEXT + " Then", "--max-tokens", 12)[1].removeprefix(TEXT)


def test_compress_describes_what_it_keeps(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    memory = tmp_path / "memory.safetensors"
    code, out, _ = run_cli("compress", model, text, "--out", memory, "--slots", 20, "--format", "json")
    cost = json.loads(out)["cost"]
    assert code == 0
    assert (cost["num_tokens"], cost["num_slots"], cost["method"]) == (len(TEXT), 20, "kvzip")
    assert cost["text_cache_bytes"] == len(TEXT) * 2 * 2 * 2 * 16 * 4  # layers, KV heads, keys and values
    assert cost["kept_bytes"] == 20 * 2 * 2 * 2 * 16 * 4
    assert memory.stat().st_size == json.loads(out)["bytes"] < cost["text_cache_bytes"]
    lines = run_cli("compress", model, text, "--out", memory, "--max-loss", 0.01)[1]
    assert "nats per token" in lines
    described = run_cli("inspect", memory)[1]
    assert all(word in described for word in ("kvzip", "day.txt: 73 tokens", "llama", "nats per token"))
    data = json.loads(run_cli("inspect", memory, "--format", "json")[1])
    assert data["metadata"]["measured"]["windows"][0]["max_loss"] == 0.01
    assert data["tokens"] == [73]


def test_compress_chat_opens_a_message_that_the_question_continues(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memory = tmp_path / "memory.safetensors"
    assert run_cli("compress", model, text, "--out", memory, "--keep", 1, "--chat")[0] == 0
    decoder, tokenizer = Decoder.from_pretrained(model), load_tokenizer(model)
    loaded = load_kv_memories([memory], decoder, tokenizer)
    ids = encode_document(tokenizer, TEXT, chat=True)[0] + encode_prompt(tokenizer, loaded, "Which month?")
    assert tokenizer.decode(ids) == f"<user>{TEXT}\n\nWhich month?</user><assistant>"
    options = ("--memory", memory, "--max-tokens", 9, "--format", "json")
    code, out, _ = run_cli("generate", model, "Which month?", *options)
    expected = run_cli("generate", model, f"{TEXT}\n\nWhich month?", "--chat", "--max-tokens", 9, "--format", "json")[1]
    assert code == 0
    assert json.loads(out)["generations"][0]["ids"] == json.loads(expected)["generations"][0]["ids"]
    assert (
        json.loads(run_cli("generate", model, "Which month?", "--chat", *options)[1])["generations"][0]["ids"]
        == (json.loads(out)["generations"][0]["ids"])
    )


def test_generate_joins_memories_and_matches_rows(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    one, rows = tmp_path / "one.safetensors", tmp_path / "rows.safetensors"
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, TEXT[:30])))
    assert run_cli("compress", model, text, "--out", one, "--method", "snapkv")[0] == 0
    assert run_cli("compress", model, tmp_path / "texts.jsonl", "--out", rows, "--method", "snapkv")[0] == 0
    memory = KVMemory.load(rows)
    assert memory.num_tokens.tolist() == [73, 30]
    options = ("--max-tokens", 4, "--format", "json")
    code, out, _ = run_cli("generate", model, "a", "b", "--memory", rows, *options)
    assert code == 0
    assert len(json.loads(out)["generations"]) == 2
    alone = run_cli("generate", model, "a", "--memory", one, *options)[1]
    assert json.loads(out)["generations"][0]["ids"] == json.loads(alone)["generations"][0]["ids"]
    assert run_cli("generate", model, "a", "b", "c", "--memory", rows)[0] == 2
    assert run_cli("generate", model, "a", "--memory", one, "--memory", one, *options)[0] == 0


def test_generate_refuses_a_memory_of_another_model(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    memory = tmp_path / "memory.safetensors"
    assert run_cli("compress", model, text, "--out", memory)[0] == 0
    decoder = Decoder.from_pretrained(model)
    with torch.no_grad():
        decoder.token_embedding.weight[0] += 1
    LanguageModel(decoder, load_tokenizer(model)).save(tmp_path / "other")
    code, _, err = run_cli("generate", tmp_path / "other", "a", "--memory", memory)
    assert code == 76
    assert "compress again" in err
    memory.write_bytes(memory.read_bytes()[:-9])
    assert run_cli("inspect", memory)[0] == 76


@pytest.mark.parametrize(
    ("flags", "code", "match"),
    [
        (("--keep", "2"), 2, "share"),
        (("--keep", "0.5", "--slots", "3"), 2, "only one"),
        (("--vectors", "3"), 2, "--vectors"),
        (("--quantile", "0.5"), 2, "--quantile"),
    ],
)
def test_compress_refuses_flags(
    flags: tuple[str, ...], code: int, match: str, model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    result = run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors", *flags)
    assert result[0] == code
    assert match in result[2]
    assert not (tmp_path / "memory.safetensors").exists()


def test_compress_refuses_an_empty_text(model: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    assert run_cli("compress", model, tmp_path / "empty.txt", "--out", tmp_path / "m.safetensors")[0] == 66


def test_compress_fit_and_export_to_a_cartridge(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cartridge, "CartridgeConfig", partial(cartridge.CartridgeConfig, num_rows=16, max_tokens=8))
    text, memory, folder = tmp_path / "text.txt", tmp_path / "m.safetensors", tmp_path / "cartridge"
    text.write_text(
        "Once upon a time, there was a cat named Tom. Tom had a red ball. He lost the ball in the park. " * 3
    )
    result = run_cli("compress", "stories260k", text, "--out", memory, "--fit", 3, "--slots", 12)
    assert result.code == 0, result.err
    assert "fit        KL divergence" in result.out
    answer = run_cli("generate", "stories260k", "He was", "--memory", memory, "--max-tokens", 12, "--no-echo")
    assert run_cli("export", memory, "--out", folder).code == 0
    again = run_cli("generate", "stories260k", "He was", "--memory", folder, "--max-tokens", 12, "--no-echo")
    assert again.out == answer.out != ""
    assert json.loads((folder / "adapter_config.json").read_text())["num_virtual_tokens"] == 12
    unfit = tmp_path / "selected.safetensors"
    assert run_cli("compress", "stories260k", text, "--out", unfit, "--slots", 12).code == 0
    refused = run_cli("export", unfit, "--out", tmp_path / "other")
    assert (refused.code, "fit it first" in refused.err) == (2, True)
