"""`laconic compress`, `inspect` and `generate --memory` with a plain checkpoint."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from laconic import Decoder, DecoderConfig, LanguageModel
from laconic.compression.kv import cartridge
from laconic.compression.kv import compress as kv_compress
from laconic.compression.kv.memory import KVMemory
from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from laconic.experiment.text_models.kv_compressor import encode_document, encode_messages, load_kv_memories
from laconic.storage.atomic import save_artifact
from tests.conftest import RunCli, check_refused

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


def test_compress_does_not_replace_a_text(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("notes")
    thoughts = tmp_path / "thoughts.safetensors"
    save_artifact(thoughts, {"begin": torch.ones(1)}, "thoughts", {})
    for out in (text, other, tmp_path, thoughts, model / "model.safetensors"):
        check_refused(run_cli("compress", model, text, "--out", out), 73, "delete it or choose another file")
    assert (text.read_text(), other.read_text()) == (TEXT + "\n", "notes")


def test_compress_into_a_pipe(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """As `--out >(command)` in a shell: /dev/fd has no free space, and a pipe is not replaced."""
    flags, (reading, writing) = ("--keep", 0.5), os.pipe()
    with ThreadPoolExecutor() as pool, os.fdopen(reading, "rb") as file:
        written = pool.submit(file.read)
        try:
            code, _, err = run_cli("compress", model, text, "--out", f"/dev/fd/{writing}", *flags)
        finally:
            os.close(writing)
        (tmp_path / "copy.safetensors").write_bytes(written.result(60))
    assert code == 0, err
    assert run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors", *flags)[0] == 0
    assert KVMemory.load(tmp_path / "copy.safetensors").is_equal(KVMemory.load(tmp_path / "memory.safetensors"))


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


def test_compress_warns_that_windows_have_equal_heads(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    command = ("compress", model, text, "--out", tmp_path / "memory.safetensors", "--keep", 0.1)
    assert "warning" not in run_cli(*command).err
    text.write_text(TEXT * 8)
    err = run_cli(*command).err
    assert "warning: read in 3 windows" in err
    assert "give a shorter text" in err
    assert "positions" not in err, "a memory of a tenth leaves room for prompts"
    assert "warning" not in run_cli(*command, "--equal-heads").err
    data = json.loads(run_cli("inspect", command[-3], "--format", "json")[1])
    assert data["tokens"] == [data["metadata"]["documents"][0][0]["tokens"]], "of the text, not of its slots"


@pytest.mark.medium
def test_compress_says_how_little_room_a_memory_leaves(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    """A text in windows takes the positions of its slots, a shorter one those of all its tokens."""
    command = ("compress", model, text, "--out", tmp_path / "memory.safetensors")
    text.write_text(TEXT * 8)
    err = run_cli(*command, "--keep", 0.8).err
    assert "the memory takes 467 of the model's 512 positions, which leaves 45 for prompt and answer" in err
    assert "for prompt and answer; keep less" in err
    text.write_text(TEXT * 6)
    err = run_cli(*command, "--method", "window").err
    assert "takes 438 of the model's 512 positions" in err
    assert "for prompt and answer; give a shorter text" in err


@pytest.mark.medium
def test_compress_chat_opens_a_message_that_the_question_continues(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    """The white space at the end of the text is dropped, for it would have other tokens than in a message."""
    memory = tmp_path / "memory.safetensors"
    text.write_text(f"{TEXT} \n\n")
    assert run_cli("compress", model, text, "--out", memory, "--keep", 1, "--chat")[0] == 0
    decoder, tokenizer = Decoder.from_pretrained(model), load_tokenizer(model)
    loaded = load_kv_memories([memory], decoder, tokenizer)
    ids = encode_document(tokenizer, TEXT, chat=True)[0] + encode_messages(
        tokenizer, loaded, [{"role": "user", "content": "Which month?"}]
    )
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
    plain = tmp_path / "plain.safetensors"
    assert run_cli("compress", model, text, "--out", plain)[0] == 0
    check_refused(
        run_cli("generate", model, "a", "--memory", plain, *options),
        2,
        "memory.safetensors cannot be joined with others",
    )


def test_generate_refuses_a_memory_of_another_chat_template(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memory = tmp_path / "m.safetensors"
    assert run_cli("compress", model, text, "--out", memory, "--chat")[0] == 0
    other = shutil.copytree(model, tmp_path / "other")
    (other / "chat_template.jinja").write_text(TEMPLATE + " ")
    check_refused(
        run_cli("generate", other, "Which month?", "--memory", memory, "--max-tokens", 1),
        76,
        "was written with chat template ",
    )


def test_generate_continues_a_conversation_after_a_memory(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memory, file = tmp_path / "memory.safetensors", tmp_path / "messages.json"
    assert run_cli("compress", model, text, "--out", memory, "--keep", 1, "--chat")[0] == 0
    turns = [
        {"role": "user", "content": "Which month?"},
        {"role": "assistant", "content": "April."},
        {"role": "user", "content": "And the weather?"},
    ]
    whole = [{"role": "user", "content": f"{TEXT}\n\nWhich month?"}, *turns[1:]]

    def reply(messages: list[dict[str, str]], *options: object) -> tuple[int, str, str]:
        file.write_text(json.dumps(messages))
        return run_cli("generate", model, "--messages", file, "--max-tokens", 9, *options)

    code, out, err = reply(turns, "--memory", memory)
    assert code == 0, err
    assert out == reply(whole)[1]
    code, _, err = reply(turns, "--memory", memory, "--system", "Be brief.")
    assert code == 2
    assert "remove --system, or compress the text without --chat" in err
    check_refused(
        reply([{"role": "system", "content": "Be brief."}, *turns], "--memory", memory),
        2,
        "the memory begins the conversation",
    )
    assert "no message is a user's" in reply([turns[1]], "--memory", memory)[2]


def test_generate_answers_a_file_of_prompts_on_one_memory(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memory, file, output = (tmp_path / name for name in ("memory.safetensors", "rows.jsonl", "out.jsonl"))
    assert run_cli("compress", model, text, "--out", memory, "--keep", 1)[0] == 0
    rows = [{"prompt": " Then", "id": 7}, {"messages": [{"role": "user", "content": "When?"}]}, {"prompt": " It was"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--memory", memory, "--max-tokens", 5)
    assert run_cli("generate", model, "--input", file, "--output", output, "--batch-size", 2, *options)[0] == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer.get("id") for answer in answers] == [7, None, None]
    for prompt, answer in zip((" Then", "<user>When?</user><assistant>", " It was"), answers, strict=True):
        alone = run_cli("generate", model, prompt, *options, "--format", "json")[1]
        assert answer["generation"]["ids"] == json.loads(alone)["generations"][0]["ids"]
    file.write_text(json.dumps(rows[1] | {"tools": [{"name": "add"}]}) + "\n")
    check_refused(
        run_cli("generate", model, "--input", file, *options), 2, "rows.jsonl:1: tools cannot follow a memory"
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    two = tmp_path / "two.safetensors"
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, TEXT[:30])))
    assert run_cli("compress", model, tmp_path / "texts.jsonl", "--out", two, "--method", "knorm")[0] == 0
    check_refused(run_cli("generate", model, "--input", file, "--memory", two), 2, "3 prompts for a memory of 2 texts")


def test_generate_says_what_takes_the_positions(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    memory, prompt = tmp_path / "memory.safetensors", "x" * 450
    assert run_cli("compress", model, text, "--out", memory, "--slots", 9)[0] == 0
    code, _, err = run_cli("generate", model, prompt, "--memory", memory)
    taken = f"prompt 1 has 450 tokens after a memory of {len(TEXT)} positions, the context of"
    assert (code, taken in err, "shorten one of them by 12 tokens or more" in err) == (2, True, True), err


@pytest.mark.medium
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
    code, out, _ = run_cli("generate", model, "a", "--memory", rows, "--max-tokens", 4)
    titles = ["[texts.jsonl:1]", "[texts.jsonl:2]"]
    assert (code, [line[:17] for line in out.splitlines() if line.startswith("[")]) == (0, [f"{t} a" for t in titles])
    code, out, _ = run_cli("generate", model, "a", "--memory", rows, *options)
    generations = json.loads(out)["generations"]
    assert (code, [(row["title"], row["prompt"]) for row in generations]) == (0, [(t, "a") for t in titles])
    check_refused(
        run_cli("generate", model, "a", "--memory", rows, "--memory", one),
        2,
        "memories of 2 and 1 texts cannot be joined",
    )
    assert run_cli("generate", model, "a", "--memory", one, "--memory", one, *options)[0] == 0


def test_generate_refuses_a_memory_of_another_model(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    memory = tmp_path / "memory.safetensors"
    assert run_cli("compress", model, text, "--out", memory)[0] == 0
    decoder = Decoder.from_pretrained(model)
    with torch.no_grad():
        decoder.token_embedding.weight[0] += 1
    LanguageModel(decoder, load_tokenizer(model)).save(tmp_path / "other")
    check_refused(run_cli("generate", tmp_path / "other", "a", "--memory", memory), 76, "compress again")
    before_loading = run_cli("generate", "no-model", "a", "--memory", tmp_path / "none")
    check_refused(before_loading, 66, "none; give one that laconic compress wrote")
    memory.write_bytes(memory.read_bytes()[:-9])
    assert run_cli("inspect", memory)[0] == 76


@pytest.mark.parametrize(
    ("flags", "code", "match"),
    [
        (("--keep", "2"), 2, "share"),
        (("--fit", "0"), 2, "--fit 0: must be at least 1"),
        (("--keep", "0.5", "--slots", "3"), 2, "only one"),
        (("--vectors", "3"), 2, "--vectors"),
        (("--quantile", "0.5"), 2, "--quantile"),
        (("--seed", "3"), 2, "--seed: only with --method random or --fit"),
        (("--equal-heads", "--method", "snapkv"), 2, "--equal-heads: snapkv always keeps the same number"),
    ],
)
def test_compress_refuses_flags(
    flags: tuple[str, ...], code: int, match: str, model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    result = run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors", *flags)
    assert result[0] == code
    assert match in result[2]
    assert not (tmp_path / "memory.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "day.txt: contains no text (empty); give text in UTF-8"),
        (b"\xef\xbb\xbf \n", "day.txt: contains no text (white space); give text in UTF-8"),
        (b"%PDF-1.4\n\x80", "day.txt is a PDF; convert it to text first"),
        (b"\x89PNG\r\n", "day.txt: byte 0 is not UTF-8; give a complete text file in UTF-8"),
        (None, "is a folder; give a text, a .jsonl, or - for standard input"),
    ],
)
def test_compress_refuses_sources_without_text(
    model: Path, tmp_path: Path, run_cli: RunCli, content: bytes | None, message: str
) -> None:
    source = tmp_path if content is None else tmp_path / "day.txt"
    if content is not None:
        source.write_bytes(content)
    result = run_cli("compress", model, source, "--out", tmp_path / "m.safetensors")
    assert (result.code, result.err.count("\n")) == (66, 1)
    assert message in result.err
    assert not (tmp_path / "m.safetensors").exists()


def test_compress_notes_short_texts(model: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "short.txt").write_text("Lily")
    command = ("compress", model, tmp_path / "short.txt", "--out", tmp_path / "memory.safetensors")
    assert "at most 64 tokens, the least" in run_cli(*command).err
    assert "at most 64" not in run_cli(*command, "--keep", 0.9).err


def test_compress_notes_html(model: Path, text: Path, tmp_path: Path, run_cli: RunCli) -> None:
    text.write_text(f"\n<!DOCTYPE html>\n<html><p>{TEXT}</p></html>")
    result = run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors")
    assert result.code == 0
    assert "day.txt looks like HTML: its tags are compressed too" in result.err


def test_compress_notes_json(model: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "day.json").write_text(json.dumps([{"text": TEXT}]))
    code, _, err = run_cli("compress", model, tmp_path / "day.json", "--out", tmp_path / "memory.safetensors")
    assert (code, "day.json is compressed as it is, brackets and all" in err) == (0, True)


def test_compress_reads_line_ends_of_windows_as_others(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memories: list[KVMemory] = []
    for line_end in ("\n", "\r\n"):
        text.write_bytes(line_end.join([TEXT, TEXT]).encode())
        assert run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors").code == 0
        memories.append(KVMemory.load(tmp_path / "memory.safetensors"))
    assert memories[0].num_tokens.tolist() == memories[1].num_tokens.tolist()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody may write to")
def test_compress_refuses_a_folder_that_is_not_writable(model: Path, text: Path, run_cli: RunCli) -> None:
    check_refused(run_cli("compress", model, text, "--out", "/proc/memory.safetensors"), 74, "/proc: not writable")


def test_inspect_refuses_questions_and_damaged_or_other_files(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    memory = tmp_path / "memory.safetensors"
    assert run_cli("compress", model, text, "--out", memory)[0] == 0
    check_refused(
        run_cli("inspect", memory, "Which month?"),
        2,
        "memory.safetensors is a memory or state, which takes no question",
    )
    code, _, err = run_cli("inspect", text)
    assert (code, "day.txt: begins with the text 'It was a'" in err, "intact" in err) == (76, True, False)
    damaged = bytearray(memory.read_bytes())
    damaged[-5] ^= 1
    memory.write_bytes(damaged)
    check_refused(run_cli("inspect", memory), 76, "memory.safetensors is damaged")


@pytest.mark.medium
def test_compress_fit_and_export_to_a_cartridge(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cartridge, "CartridgeConfig", partial(cartridge.CartridgeConfig, num_rows=16, max_tokens=4))
    text, memory, folder = tmp_path / "text.txt", tmp_path / "tom.memory", tmp_path / "cartridge"
    text.write_text(
        "Once upon a time, there was a cat named Tom. Tom had a red ball. He lost the ball in the park. " * 3
    )
    result = run_cli("compress", "stories260k", text, "--out", memory, "--fit", 3, "--slots", 12, "--equal-heads")
    assert result.code == 0, result.err
    assert "fit        KL divergence" in result.out
    assert ", fit (batch_size 8, " in run_cli("inspect", memory).out
    answer = run_cli("generate", "stories260k", "He was", "--memory", memory, "--max-tokens", 12, "--no-echo")
    assert run_cli("export", memory, "--out", folder).code == 0
    again = run_cli("generate", "stories260k", "He was", "--memory", folder, "--max-tokens", 12, "--no-echo")
    assert again.out == answer.out != ""
    assert json.loads((folder / "adapter_config.json").read_text())["num_virtual_tokens"] == 12
    uneven, unfit = tmp_path / "uneven.safetensors", tmp_path / "selected.safetensors"
    result = run_cli("compress", "stories260k", text, "--out", uneven, "--fit", 3, "--slots", 12)
    assert "fit        KL divergence" in result.out
    assert "; a head keeps " in result.out, "KVzip's heads share the slots, also while they are trained"
    reply = run_cli("generate", "stories260k", "He was", "--memory", uneven, "--max-tokens", 12, "--no-echo")
    assert (reply.code, reply.out.strip() != "") == (0, True)
    refused = run_cli("export", uneven, "--out", tmp_path / "other")
    assert refused.code == 2
    assert "cannot be a peft cartridge, whose heads have equally many slots" in refused.err
    assert run_cli("compress", "stories260k", text, "--out", unfit, "--slots", 12, "--equal-heads").code == 0
    refused = run_cli("export", unfit, "--out", tmp_path / "other")
    assert (refused.code, "KVMemory(" in refused.err) == (2, False)
    assert "12 slots cannot be a peft cartridge" in refused.err
    assert "give one that laconic compress --fit --equal-heads has written" in refused.err
    refused = run_cli("export", memory, "--out", tmp_path / "other", "--reader", "stories260k")
    check_refused(refused, 2, "--reader: only with --to vllm")


def test_compress_fit_refuses_a_long_text_before_it_reads(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text("a" * 376)
    monkeypatch.setattr(kv_compress, "rank_document", None)  # reading would fail
    result = run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors", "--fit", 1)
    assert result.code == 2, result.err
    assert "a text of 376 tokens and the 176 of a row of self-study after it exceed the context of 512" in result.err
    assert "fit a text of at most 336 tokens" in result.err
    assert "fit_cartridge" not in result.err


def test_compress_checks_the_disk_before_it_reads(
    model: Path, text: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.storage.atomic.free_bytes", lambda path: 1000)
    monkeypatch.setattr("laconic.cli.compress_kv.compress_text", None)
    check_refused(run_cli("compress", model, text, "--out", tmp_path / "memory.safetensors"), 74, "1,000 are free")
    assert not (tmp_path / "memory.safetensors").exists()
