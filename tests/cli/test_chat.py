"""`laconic chat` on a pipe: turns, commands, errors; and how Ctrl-C becomes a flag."""

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

import laconic
from laconic.cli.commands import chat
from laconic.compression.kv.config import KVCompressionConfig
from laconic.experiment.text_models.chat_session import ChatPrefix, ChatSession
from laconic.experiment.text_models.kv_compressor import SEPARATOR, compress_text
from laconic.generation.config import GenerationConfig
from tests.conftest import CliResult, RunCli, check_refused

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def talk(run_cli: RunCli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `laconic chat` on lines of standard input, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(lines: list[str], *flags: object) -> CliResult:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        return run_cli("chat", chat_model, "--max-tokens", 5, *flags)

    return run


def test_chat_answers_each_line_of_a_pipe(talk, chat_model: Path) -> None:
    model = laconic.load(chat_model)
    assert isinstance(model, laconic.LanguageModel)
    session = ChatSession(model.decoder, model.tokenizer, system="Be brief.")
    config = GenerationConfig(max_tokens=5)
    replies = [session.reply(text, config).text for text in ("Hi", "And you?")]
    result = talk(["Hi", "", "And you?"], "--system", "Be brief.")
    assert (result.code, result.out, result.err) == (0, "".join(f"{reply}\n" for reply in replies), "")


def test_chat_saves_loads_and_resets(talk) -> None:
    result = talk(["Hi", "/save one.json", "/reset", "/system Be kind.", "Hi", "/save two.json", "/exit", "never"])
    assert result.code == 0, result.err
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    assert [m["role"] for m in one] == ["user", "assistant"]
    assert [m["role"] for m in two] == ["system", "user", "assistant"]
    assert two[0]["content"] == "Be kind."
    again = talk(["/load one.json", "And you?"])
    assert "2 messages loaded" in again.err
    assert again.out == talk(["Hi", "And you?"]).out.split("\n", 1)[1]


def test_chat_continues_a_fast_weight_state(talk, chat_model: Path, run_cli: RunCli) -> None:
    Path("book.txt").write_text("A book of one line. " * 5)
    command = ("compress", chat_model, "book.txt", "--learn", "--inner-lr", 0.5, "--out", "state.safetensors")
    assert run_cli(*command).code == 0
    generated = run_cli("generate", chat_model, "Hi", "--chat", "--memory", "state.safetensors", "--max-tokens", 5)
    talked = talk(["Hi", "And you?"], "--memory", "state.safetensors")
    assert talked.code == 0, talked.err
    assert talked.out.split("\n")[0] == generated.out.split("\n")[0] != talk(["Hi"]).out.split("\n")[0]
    check_refused(talk(["Hi"], "--memory", "state.safetensors", "--quantize", "int8"), 2, "with fast weights")


@pytest.mark.parametrize("chat_flag", [False, True])
def test_chat_on_a_kv_memory_of_everything_equals_the_text(talk, chat_model: Path, chat_flag: bool) -> None:
    """A memory that keeps every slot gives the replies of the document before, or in, the conversation."""
    model = laconic.load(chat_model)
    assert isinstance(model, laconic.LanguageModel)
    config = KVCompressionConfig(method="window", slots=len("The sea is green.") + 20)
    document = "The sea is green."
    result = compress_text(model.decoder, model.tokenizer, document, config, chat=chat_flag)
    result.memory.save("memory.safetensors")
    replies = talk(["Hi", "And you?"], "--memory", "memory.safetensors")
    assert replies.code == 0, replies.err
    texts = [document + SEPARATOR + "Hi", "And you?"] if chat_flag else ["Hi", "And you?"]
    session = ChatSession(model.decoder, model.tokenizer)
    if not chat_flag:
        ids = torch.tensor([model.tokenizer.encode(document)])
        cache = model.decoder(model.decoder.embed(ids)).cache
        session = ChatSession(model.decoder, model.tokenizer, prefix=ChatPrefix(cache))
    expected = [session.reply(text, GenerationConfig(max_tokens=5)).text for text in texts]
    assert replies.out == "".join(f"{text}\n" for text in expected)
    if chat_flag:
        refused = talk(["Hi"], "--memory", "memory.safetensors", "--system", "Be brief.")
        assert refused.code == 2
        assert "remove --system, or compress the text without --chat" in refused.err


@pytest.mark.parametrize(
    ("lines", "flags", "code", "message"),
    [
        (["/save"], (), 2, "/save: give a file"),
        (["/load gone.json"], (), 66, "no file gone.json"),
        (["x" * 300], (), 2, "the context 256; begin a new one"),
        ([], ("--memory", "m.safetensors"), 66, "m.safetensors"),
        ([], ("--max-tokens", 0), 2, "must be at least 1"),
    ],
)
def test_chat_on_a_pipe_ends_at_an_error(
    talk, lines: list[str], flags: tuple[object, ...], code: int, message: str
) -> None:
    result = talk(lines, *flags)
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1


def test_chat_takes_paths_for_text_and_says_when_the_context_is_full(talk) -> None:
    result = talk(["/usr/bin " + "x" * 200, "/help"], "--max-tokens", 100)
    assert result.code == 0
    assert "the context of 256 tokens is full; /save FILE" in result.err
    assert "/reset" in result.err


def test_chat_goes_on_after_an_unknown_command_of_a_pipe(talk) -> None:
    result = talk(["/nosuch", "Hi", "//nosuch"])
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "/nosuch: no such command; /help lists them, //nosuch is a message" in result.err
    assert result.out.startswith(talk(["Hi"]).out)
    assert talk(["//nosuch", "/save slash.json"]).code == 0
    assert talk(["Hi", "/save slash.json"]).code == 0, "a conversation may be replaced"
    Path("rows.jsonl").write_text('{"question": "1 + 1"}\n')
    assert talk(["Hi", "/save rows.jsonl"]).code == 73
    assert talk(["//nosuch", "/save slash.json"]).code == 0
    assert json.loads(Path("slash.json").read_text())[0]["content"] == "/nosuch"


def test_chat_refuses_a_model_without_a_template(run_cli: RunCli, shared: Path) -> None:
    result = run_cli("chat", shared / "models" / "stories260k")
    check_refused(result, 66, "so it does not chat; use laconic generate")
    assert "--chat" not in result.err


def test_interrupt_is_a_flag_between_tokens() -> None:
    tokens, before = list[int](), signal.getsignal(signal.SIGINT)
    interrupt = threading.Event()
    with chat.catch_interrupt(interrupt, lambda: bool(tokens)):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)  # before the first token
        tokens.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)  # the second time
    assert signal.getsignal(signal.SIGINT) is before
