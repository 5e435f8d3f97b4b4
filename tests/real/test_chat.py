"""Chat and generation with SmolLM2-135M-Instruct: equal to transformers, and on a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import laconic
from laconic.experiment.text_models.chat_session import ChatSession
from laconic.generation.published import read_published_sampling
from tests.conftest import RunCli, needs

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
TEXT = "The lighthouse on the island is kept by Marit, who lives there with her old dog Bosun and a garden of kale."
TURNS = ["My name is Ada. What is the capital of France?", "And of Italy?", "Write one sentence about both cities."]


def test_chat_turns_equal_transformers(smollm2: Path) -> None:
    """Each reply on the kept cache equals transformers' generate on the whole conversation, rendered anew."""
    needs("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    reference_tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = laconic.load(smollm2)
    assert isinstance(model, laconic.LanguageModel)
    session = ChatSession(model.decoder, model.tokenizer)
    messages: list[dict[str, str]] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        inputs = reference_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = reference.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        reply = session.reply(turn, laconic.GenerationConfig(max_tokens=24))
        assert reply.token_ids == output.tolist()
        assert reply.text == reference_tokenizer.decode(output, skip_special_tokens=True)
        assert session.num_reused + reply.num_prompt_tokens == inputs["input_ids"].shape[1]
        messages.append({"role": "assistant", "content": reply.text})
    assert reply.num_prompt_tokens < 30 < session.num_reused  # the last turn read its question alone


def test_chat_with_levels_that_have_learned_nothing_equals_the_checkpoint(smollm2: Path) -> None:
    model = laconic.load(smollm2)
    assert isinstance(model, laconic.LanguageModel)
    plain, config = ChatSession(model.decoder, model.tokenizer), laconic.GenerationConfig(max_tokens=24)
    levels = laconic.NestedTextModel.from_pretrained(smollm2)
    session = laconic.StateChatSession(levels)
    for turn in TURNS:
        reply = session.reply(turn, config)
        assert reply.text == plain.reply(turn, config).text
    assert reply.num_prompt_tokens < 30 < session.num_reused  # the last turn read its question alone
    reader = laconic.StateChatSession(levels, levels.compress([TEXT]))  # too short to change a weight
    reply = reader.reply(TURNS[0], config)
    ids = model.tokenizer.encode(TEXT) + reader.encode(reader.messages[:1])
    assert reply.token_ids == laconic.generate(model.decoder, input_ids=[ids], config=config)[0].token_ids


def test_generate_continues_from_a_state_like_from_the_text(smollm2: Path) -> None:
    model = laconic.load(smollm2)
    assert isinstance(model, laconic.LanguageModel)
    config = laconic.GenerationConfig(max_tokens=20)
    first = model.generate("Once upon a time", config)[0]
    second = laconic.generate(model.decoder, model.tokenizer, [" Then the wizard"], state=first.state, config=config)[0]
    ids = [*model.tokenizer.encode("Once upon a time"), *first.token_ids, *model.tokenizer.encode(" Then the wizard")]
    assert second.token_ids == laconic.generate(model.decoder, input_ids=[ids], config=config)[0].token_ids


def test_generate_replies_to_messages_after_a_memory(smollm2: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """A memory of everything, and a conversation about it, equals transformers on the text in the first message."""
    needs("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    memory, file = tmp_path / "memory.safetensors", tmp_path / "messages.json"
    (tmp_path / "text.txt").write_text(TEXT)
    turns = [
        {"role": "user", "content": "Who keeps the lighthouse?"},
        {"role": "assistant", "content": "Marit keeps it."},
        {"role": "user", "content": "With which animal?"},
    ]
    file.write_text(json.dumps(turns))
    options = ("--keep", 1, "--method", "window", "--chat")
    assert run_cli("compress", smollm2, tmp_path / "text.txt", "--out", memory, *options).code == 0
    options = ("--messages", file, "--memory", memory, "--max-tokens", 16, "--format", "json")
    ours = json.loads(run_cli("generate", smollm2, *options).out)["generations"][0]["ids"]
    whole = [turns[0] | {"content": f"{TEXT}\n\n{turns[0]['content']}"}, *turns[1:]]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    inputs = tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = reference.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert ours == theirs.tolist()


def test_language_model_after_a_memory_equals_the_command(smollm2: Path, tmp_path: Path, run_cli: RunCli) -> None:
    memory, question = tmp_path / "memory.safetensors", "Who keeps the lighthouse?"
    (tmp_path / "text.txt").write_text(TEXT)
    assert run_cli("compress", smollm2, tmp_path / "text.txt", "--out", memory, "--keep", 0.5, "--chat").code == 0
    model = laconic.load(smollm2)
    assert isinstance(model, laconic.LanguageModel)
    config = laconic.GenerationConfig(max_tokens=24)
    (reply,) = model.generate(question, config, memory=memory)
    assert "Marit" in reply.text
    result = run_cli("generate", smollm2, question, "--memory", memory, "--max-tokens", 24, "--no-echo")
    assert result.out == f"{reply.text}\n"
    assert reply.text not in model.generate(question, config)[0].text


def test_generate_chat_prints_the_reply_alone(run_cli: RunCli, smollm2: Path) -> None:
    result = run_cli("generate", smollm2, "What is the capital of France?", "--chat", "--max-tokens", 20)
    assert result.out == "The capital of France is Paris.\n"
    result = run_cli("generate", smollm2, "x " * 8200)
    assert result.code == 2
    assert "tokens, the context of" in result.err
    assert "8,192" in result.err


def test_published_sampling_is_read(smollm2: Path) -> None:
    assert read_published_sampling(smollm2).options["top_p"] <= 1


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self.output, self.position = "", 0
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=take_terminal
        )
        os.close(slave)

    def read_until(self, text: str, seconds: float = 300) -> str:
        """Read up to the next `text` and return what was printed before it."""
        deadline, start = time.monotonic() + seconds, self.position
        while (end := self.output.find(text, start)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.output!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 65536).decode(errors="replace")
        self.position = end + len(text)
        return self.output[start:end]

    def type(self, text: str) -> None:
        """Type on the keyboard; control characters act as on a terminal."""
        os.write(self.master, text.encode())


def take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C reaches the child."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_chat_on_a_terminal(smollm2: Path, tmp_path: Path) -> None:
    terminal = Terminal(sys.executable, "-m", "laconic", "chat", str(smollm2), "--max-tokens", "400")
    try:
        terminal.read_until(">>> ")
        terminal.type("Write a long story about a lighthouse.\n")
        terminal.read_until("lighthouse.")
        terminal.read_until(" the ")
        terminal.type("\x03")  # Ctrl-C in the middle of the answer
        assert "stopped; " in terminal.read_until(">>> ")
        terminal.type("What is the capital of France?\n")
        terminal.read_until("tokens/s")
        terminal.read_until(">>> ")
        time.sleep(0.5)  # the line editor shows its prompt before it takes over the terminal and would lose a Ctrl-C
        terminal.type("\x03")
        terminal.read_until("Ctrl-D ends")
        terminal.type(f"/save {tmp_path / 'turns.json'}\n")
        terminal.read_until("wrote ")
        terminal.type("\x04")
        assert terminal.process.wait(300) == 0
    finally:
        terminal.process.kill()
    messages = json.loads((tmp_path / "turns.json").read_text())
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert "Traceback" not in terminal.output
    assert "<|im_end|>" not in terminal.output
