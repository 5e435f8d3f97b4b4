"""`laconic generate` on a checkpoint: sources of prompts, chat, JSONL, JSON, sampling, the length of the context."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.cli import generate_batch
from laconic.cli.generate_output import GenerationPrinter, GenerationTimer
from laconic.cli.generate_prompts import read_prompt_rows
from laconic.cli.threads import apply_cpu_quota, count_cores, limit_spinning
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError
from laconic.experiment.text_models.text_model import find_stop_token_ids
from laconic.generation.config import GenerationConfig
from laconic.generation.published import read_published_sampling
from tests.conftest import CliResult, RunCli

pytestmark = pytest.mark.usefixtures("unchecked")
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def read_jsonl(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make `text` standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def generate_json(run_cli: RunCli, *args: object) -> dict[str, Any]:
    result = run_cli("generate", *args, "--format", "json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_generate_chat_prints_the_reply_alone(run_cli: RunCli, chat_model: Path, tmp_path: Path) -> None:
    tokenizer, decoder = laconic.load_tokenizer(chat_model), laconic.Decoder.from_pretrained(chat_model)
    ids = tokenizer.encode("<system>Be brief.<eos><user>Hi<eos><assistant>")
    config = laconic.GenerationConfig(max_tokens=8, eos_token_ids=(256,))
    text = laconic.generate(decoder, tokenizer, input_ids=[ids], config=config)[0].text
    flags = ("--chat", "--system", "Be brief.", "--max-tokens", 8)
    assert run_cli("generate", chat_model, "Hi", *flags).out == f"{text}\n"
    for name, content in (("list.json", TURNS), ("object.json", {"messages": TURNS})):
        (tmp_path / name).write_text(json.dumps(content))
        result = run_cli("generate", chat_model, "--messages", tmp_path / name, "--max-tokens", 8)
        assert result.out == f"{text}\n"


def test_generate_gives_the_tools_of_a_row_to_the_chat_template(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "real_configs/supported/Qwen--Qwen2.5-0.5B-Instruct"
    row: dict[str, Any] = {"messages": TURNS, "tools": [{"function": {"name": "add"}}]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, row | {"tools": "[]"})))
    tokenizer = laconic.load_tokenizer(folder)
    texts = [
        tokenizer.decode(row.encode(tokenizer), skip_special_tokens=False)
        for row in read_prompt_rows(tmp_path / "rows.jsonl", False, None)
    ]
    assert ['"add"' in text for text in texts] == [True, False]


def test_generate_asks_what_training_reads_as_the_question(tmp_path: Path) -> None:
    rows = (
        {"question": "2+3=", "answer": "5"},
        {"instruction": "Translate.", "input": "Haus", "output": "house"},
        {"problem": "What is 2+2?", "solution": r"\boxed{4}"},
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompt_rows(tmp_path / "rows.jsonl", False, None)
    assert [prompt.text for prompt in prompts] == ["2+3=", "Translate.\n\nHaus", "What is 2+2?"]
    assert [prompt.source for prompt in prompts] == list(rows)


@pytest.mark.parametrize(("field", "message"), [("prompt", "prompt: is not text"), ("messages", "expected a list of")])
def test_generate_says_what_is_wrong_with_a_field_that_is_null(field: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({field: None}) + "\n")
    with pytest.raises(InputError, match=message):
        read_prompt_rows(tmp_path / "rows.jsonl", False, None)


@pytest.mark.medium
def test_generate_reads_prompts_from_standard_input_and_files(
    run_cli: RunCli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße\n")
    echoed = run_cli("generate", chat_model, "Grüße", "--max-tokens", 5).out
    continued = run_cli("generate", chat_model, "Grüße", "--max-tokens", 5, "--no-echo").out
    assert echoed == f"Grüße{continued}"
    assert run_cli("generate", chat_model, "--file", tmp_path / "prompt.txt", "--max-tokens", 5).out == continued
    pipe(monkeypatch, "Grüße\n")
    assert run_cli("generate", chat_model, "-", "--max-tokens", 5).out == continued
    (tmp_path / "prompt.txt").write_text("Grüße\n", encoding="utf-8-sig")
    assert run_cli("generate", chat_model, "--file", tmp_path / "prompt.txt", "--max-tokens", 5).out == continued
    (tmp_path / "turns.json").write_text(json.dumps(TURNS), encoding="utf-8-sig")
    assert generate_json(run_cli, chat_model, "--messages", tmp_path / "turns.json")["generations"]
    pipe(monkeypatch, json.dumps(TURNS))
    assert generate_json(run_cli, chat_model, "--messages", "-")["generations"][0]["messages"] == TURNS


def test_generate_json_measures_prefill_and_decoding_apart(run_cli: RunCli, chat_model: Path) -> None:
    report = generate_json(run_cli, chat_model, "Once", "Hello there", "--max-tokens", 4, "--logprobs")
    assert [row["prompt_tokens"] for row in report["generations"]] == [4, 11]
    assert report["prefill"]["tokens"] == 15
    assert (report["decode"]["tokens"], report["decode"]["tokens_after_first"]) == (8, 6)
    assert 0 < report["seconds_to_first_token"] <= report["seconds"] + 0.001
    assert report["threads"] == torch.get_num_threads()
    for row in report["generations"]:
        assert len(row["logprobs"]) == len(row["ids"]) == 4
        assert all(x < 0 for x in row["logprobs"])
    assert "logprobs" not in generate_json(run_cli, chat_model, "Once", "--max-tokens", 2)["generations"][0]


def test_generate_prints_texts_in_row_order_as_they_finish(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama", vocab_size=300))
    short, long = laconic.generate(decoder, build_byte_tokenizer(), ["Once", "Hello"], config=GenerationConfig(2))
    on_finish = GenerationPrinter(["one:", "two:"], GenerationTimer()).attach(GenerationConfig(2)).on_finish
    assert on_finish is not None
    on_finish(1, long)
    assert capsys.readouterr().out == ""
    on_finish(0, short)
    assert capsys.readouterr().out == f"one:{short.text}\n\ntwo:{long.text}\n"


def test_generate_ends_the_line_of_an_interrupted_text(
    run_cli: RunCli, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(printer: GenerationPrinter, *_: object) -> None:
        if printer.num_tokens:
            raise KeyboardInterrupt
        print_token(printer, 0, 0, "there", 0.0)

    print_token = GenerationPrinter.print_token
    monkeypatch.setattr(GenerationPrinter, "print_token", interrupt)
    result = run_cli("generate", chat_model, "Once", "--max-tokens", 4)
    assert (result.code, result.out) == (130, "Oncethere\n")


@pytest.mark.medium
def test_generate_rows_equal_single_prompts(
    run_cli: RunCli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "Once", "id": 3}, {"messages": TURNS}, {"prompt": "Hello there, you"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--max-tokens", 6, "--temperature", 1.0)
    output = tmp_path / "answers.jsonl"
    result = run_cli(
        "generate", chat_model, "--input", tmp_path / "rows.jsonl", "--output", output, *flags, "--batch-size", 2
    )
    assert result.code == 0, result.err
    answers = read_jsonl(output.read_text())
    assert [{k: v for k, v in answer.items() if k != "generation"} for answer in answers] == rows
    (tmp_path / "turns.json").write_text(json.dumps(TURNS))
    prompts = [("Once",), ("--messages", tmp_path / "turns.json"), ("Hello there, you",)]
    for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        single = generate_json(run_cli, chat_model, *prompt, *flags, "--seed", seed)["generations"][0]
        assert answer["generation"]["ids"] == single["ids"]
    again = run_cli("generate", chat_model, "--input", tmp_path / "rows.jsonl", *flags)
    assert [row["generation"]["ids"] for row in read_jsonl(again.out)] == [a["generation"]["ids"] for a in answers]
    pipe(monkeypatch, (tmp_path / "rows.jsonl").read_text())
    assert run_cli("generate", chat_model, "--input", "-", *flags).out == again.out


def test_generate_says_that_an_output_is_complete(run_cli: RunCli, chat_model: Path, tmp_path: Path) -> None:
    rows, output, done = (tmp_path / name for name in ("rows.jsonl", "answers.jsonl", "answers.jsonl.done"))
    rows.write_text('{"prompt": "Once"}\n{"prompt": "Hello"}\n')
    command = ("generate", chat_model, "--input", rows, "--output", output, "--max-tokens", 3)
    assert run_cli(*command).code == 0
    written = output.read_bytes()
    output.with_name("answers.jsonl.part").touch()  # as if killed before it was deleted
    again = run_cli(*command)
    assert (again.code, again.out) == (0, "")
    assert again.err.endswith(f"{output} is complete: this command wrote its 2 rows\n")
    other = run_cli(*command, "--temperature", 1)
    assert other.code == 73
    assert "exists, with other rows, flags or weights; delete it or choose another file" in other.err
    output.write_bytes(written.replace(b"Once", b"Then"))
    assert run_cli(*command).code == 73
    assert {path.name for path in tmp_path.iterdir()} == {rows.name, output.name, done.name}
    output.unlink()
    assert run_cli(*command).code == 0
    assert output.read_bytes() == written
    done.unlink()
    assert run_cli(*command).code == 73


def test_generate_reads_an_output_as_input(run_cli: RunCli, chat_model: Path, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text('{"prompt": "Once", "id": 1}\n{"prompt": "Hello"}\n')
    command = ("generate", chat_model, "--max-tokens", 3, "--input")
    assert run_cli(*command, rows, "--output", output).code == 0
    again = run_cli(*command, output)
    assert again.out == output.read_text()
    assert "answers.jsonl: the field generation of 2 rows is replaced" in again.err


def test_generate_rows_end_a_reply_where_its_turn_ends(run_cli: RunCli, chat_model: Path, tmp_path: Path) -> None:
    """The tokenizer's eos ends the replies of a file but not its prompts, also where both are in one file."""
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    flags = ("--max-tokens", 6, "--temperature", 0)
    reply = generate_json(run_cli, model, "Hi", "--chat", *flags)["generations"][0]["ids"]
    text = generate_json(run_cli, model, "Hello", *flags)["generations"][0]["ids"]
    eos = next(i for i in reply[1:] if i not in reply[:1])
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["eos_token"] = laconic.load_tokenizer(model).backend.id_to_token(eos)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_cli("generate", model, "--input", tmp_path / "rows.jsonl", *flags)
    assert result.code == 0, result.err
    assert [row["generation"]["ids"] for row in read_jsonl(result.out)] == [text, reply[: reply.index(eos) + 1]]


def test_generate_rows_continue_after_an_interruption(
    run_cli: RunCli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Row {i}"}) + "\n" for i in range(5)))
    command = ("generate", chat_model, "--input", rows, "--max-tokens", 3, "--batch-size", 2)
    whole = run_cli(*command).out
    append = generate_batch.PartialOutput.append

    def interrupt(self: generate_batch.PartialOutput, row: str) -> None:
        if self.num_rows == 3:
            raise KeyboardInterrupt
        append(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(generate_batch.PartialOutput, "append", interrupt)
        stopped = run_cli(*command, "--output", output)
    assert stopped.code == 130
    assert "3 of 5 rows are done" in stopped.err
    part = tmp_path / "answers.jsonl.part"
    part.write_text(part.read_text() + '{"prompt": "Row 3", "gener')  # a torn line
    torn = part.read_text()
    other = run_cli(*command, "--output", output, "--temperature", 1)
    assert other.code == 2
    assert "was begun with other rows, flags or weights" in other.err
    assert run_cli(*command, "--output", output, "--quantize", "int8").code == 2
    assert part.read_text() == torn, "a file of another command stays as it is"
    content = torn.rpartition("\n")[0] + "\n"
    part.write_text(content.replace("Row 1", "Row 7"))
    changed = run_cli(*command, "--output", output)
    assert changed.code == 76
    assert "answers.jsonl.part:3: was changed" in changed.err
    part.write_text(torn)
    assert run_cli(*command, "--output", output).code == 0
    assert output.read_text() == whole
    assert not part.exists()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("Hi", "--file", "prompt.txt"), 2, "PROMPT and --file given; give one of"),
        (("--file", "."), 66, ". is a folder; give an existing file, or - for standard input"),
        (("--file", "empty.txt"), 66, "empty.txt: contains no text (empty); give text in UTF-8"),
        (("--file", "binary.txt"), 66, "binary.txt: byte 1 is NUL, so it is not a text file"),
        (("--input", "."), 66, '. is a folder; give a .jsonl whose rows have "prompt", "messages" or "question"'),
        (("--input", "rows.csv"), 66, "rows.csv: rows are read from JSONL and Parquet"),
        (("--input", "bad.jsonl"), 66, 'expected one of "prompt", "messages" and "question"'),
        (("--messages", "turns.json", "--system", "x"), 2, "already begin with a system message"),
        (("Hi", "--system", "x"), 2, "--system: needs --chat"),
        (("--input", "rows.jsonl", "--system", "x"), 2, '--system: the rows of rows.jsonl have "prompt"'),
        (("Hi", "--output", "x.jsonl"), 2, "needs --input"),
        (("Hi", "--logprobs"), 2, "needs --format json"),
        (("--input", "rows.jsonl", "--output", "no/x.jsonl"), 2, "folder no does not exist"),
        (("x" * 300,), 2, "prompt 1 has 300 tokens, the context of"),
        (("Hi", "--top-p", 2), 2, "top_p=2 must be in (0, 1]"),
        (("Hi", "--max-tokens", 2, "--min-tokens", 3, "--sample"), 2, "min_tokens=3 must be in [0, max_tokens=2]"),
    ],
)
def test_generate_refuses_in_one_line(
    run_cli: RunCli,
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"prompt.txt": "x", "bad.jsonl": '{"text": "x"}', "empty.txt": "", "binary.txt": "a\0b"}
    for name, text in (files | {"turns.json": json.dumps(TURNS), "rows.jsonl": '{"prompt": "x"}'}).items():
        Path(name).write_text(text)
    result: CliResult = run_cli("generate", chat_model, *args)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert len(list(tmp_path.iterdir())) == 6


def test_generate_refuses_numbers_before_loading(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # no model
    assert "temperature=-1 must be" in run_cli("generate", tmp_path, "Hi", "--temperature", -1).err


def test_generate_reads_a_long_prompt_only_if_allowed(run_cli: RunCli, chat_model: Path) -> None:
    result = run_cli("generate", chat_model, "x" * 300)
    assert "shorten it by 45 tokens or more, or go on with --allow-long-prompt" in result.err
    result = run_cli("generate", chat_model, "x" * 300, "--allow-long-prompt", "--max-tokens", 2)
    assert result.code == 0
    assert "exceeds the 256 positions" in result.err


def test_generate_ends_answers_where_the_context_is_full(run_cli: RunCli, chat_model: Path, tmp_path: Path) -> None:
    """Rows of a batch end where their own context is full; only --allow-long-prompt writes on."""
    prompts, flags = ("x" * 250, "y" * 253), ("--max-tokens", 9000, "--seed", 1)
    result = run_cli("generate", chat_model, *prompts, *flags, "--format", "json")
    answers = json.loads(result.out)["generations"]
    assert [(len(a["ids"]), a["stop_reason"]) for a in answers] == [(6, "length"), (3, "length")]
    note = f"2 of 2 answers ended at position 256, where the context of {chat_model} is full; --allow-long-prompt"
    assert note in result.err
    assert "exceeds" not in result.err
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    rows = run_cli("generate", chat_model, "--input", tmp_path / "rows.jsonl", *flags)
    assert [len(row["generation"]["ids"]) for row in read_jsonl(rows.out)] == [6, 3]
    assert note in rows.err
    short = run_cli("generate", chat_model, "x" * 250, "--max-tokens", 6)
    assert "context" not in short.err


def test_generate_names_the_chat_template_where_texts_end_at_once(
    run_cli: RunCli, chat_model: Path, tmp_path: Path
) -> None:
    """As a model tuned for chat does with a plain question; here every id ends a text."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(chat_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": list(range(257))}))
    note = "at once; it has a chat template, which --chat uses"
    assert f"{model} ended 1 of 1 text {note}" in run_cli("generate", model, "Who?").err
    rows.write_text('{"prompt": "Who?"}\n{"prompt": "Where?"}\n')
    assert f"{model} ended 2 of 2 texts {note}" in run_cli("generate", model, "--input", rows).err
    assert note not in run_cli("generate", model, "--chat", "Who?").err
    assert note not in run_cli("generate", chat_model, "Who?", "--max-tokens", 2).err


def test_generate_ends_answers_at_the_end_of_a_position_table(run_cli: RunCli, tmp_path: Path) -> None:
    config = laconic.DecoderConfig.tiny("gpt2", vocab_size=257, max_position_embeddings=32, eos_token_ids=())
    laconic.Decoder(config).save_pretrained(tmp_path)
    build_byte_tokenizer().save(tmp_path)
    answers = generate_json(run_cli, tmp_path, "x" * 20, "y" * 30, "--max-tokens", 90)["generations"]
    assert [len(answer["ids"]) for answer in answers] == [2, 2]


def test_generate_samples_as_published(run_cli: RunCli, chat_model: Path) -> None:
    flags = ("--max-tokens", 30, "--no-echo")
    published = run_cli("generate", chat_model, "Hi", "--sample", *flags)
    expected = run_cli("generate", chat_model, "Hi", "--temperature", 0.7, "--top-p", 0.9, *flags)
    assert published.out == expected.out
    assert "sampling with temperature 0.7, top_p 0.9 (published: temperature, top_p)" in published.err
    greedy = run_cli("generate", chat_model, "Hi", *flags).out
    assert greedy != published.out
    assert run_cli("generate", chat_model, "Hi", "--sample", "--temperature", 0, *flags).out == greedy


def test_read_published_sampling_of_other_files(tmp_path: Path) -> None:
    sampling = read_published_sampling(tmp_path)
    assert sampling.describe() == "sampling with temperature 1 (the model publishes none)"
    assert read_published_sampling(None) == sampling
    foreign = '{"temperature": 0.9, "top_k": 5, "temperature": 0.7, "eta_cutoff": Infinity}'
    (tmp_path / "generation_config.json").write_text(foreign)
    assert read_published_sampling(tmp_path).options["temperature"] == 0.7
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(InputError, match="temperature = 'hot' is not a number"):
        read_published_sampling(tmp_path)
    for text, top_k in (("50.0", 50), ("-1", 0)):
        (tmp_path / "generation_config.json").write_text(f'{{"top_k": {text}}}')
        assert read_published_sampling(tmp_path).options["top_k"] == top_k
    (tmp_path / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(InputError, match=r"generation_config\.json: top_p=1\.5 must be in \(0, 1\]; correct the file"):
        read_published_sampling(tmp_path)


def test_threads_sleep_when_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, count in (({}, "3000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")):
        with monkeypatch.context() as patch:
            patch.delenv("OMP_WAIT_POLICY", raising=False)
            patch.setenv("GOMP_SPINCOUNT", "1")  # restored after the test
            patch.delenv("GOMP_SPINCOUNT")
            for name, value in variables.items():
                patch.setenv(name, value)
            limit_spinning()
            assert os.environ.get("GOMP_SPINCOUNT") == count


def test_cpu_quota_limits_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.cli.threads.count_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # restored after the test
    for text, threads in (("150000 100000", "2"), ("max 100000", None), ("900000 100000", None)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        (tmp_path / "cpu.max").write_text(text)
        apply_cpu_quota(tmp_path / "cpu.max")
        assert os.environ.get("OMP_NUM_THREADS") == threads
    monkeypatch.undo()
    assert count_cores() >= 1


def test_generate_quantize(run_cli: RunCli, chat_model: Path) -> None:
    flags = ("--max-tokens", 8, "--min-tokens", 8, "--logprobs")
    plain, quantized = (
        generate_json(run_cli, chat_model, "Once", *flags, *more) for more in ((), ("--quantize", "int8"))
    )
    assert quantized["weights"] == plain["weights"]
    differences = [a - b for a, b in zip(*(x["generations"][0]["logprobs"] for x in (plain, quantized)), strict=True)]
    assert 0 < abs(differences[0]) < 0.1


def test_hash_memory_files_of_a_folder_leaves_out_other_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    hashes = generate_batch.hash_memory_files([tmp_path])
    (tmp_path / ".cache/huggingface").mkdir(parents=True)  # as hf download --local-dir leaves it
    assert len(hashes) == 2
    assert generate_batch.hash_memory_files([tmp_path]) == hashes


def test_generate_ignores_end_tokens_beyond_the_vocabulary(run_cli: RunCli, tmp_path: Path) -> None:
    """As transformers does: small and pruned models often keep GPT-2's 50256."""
    config = laconic.DecoderConfig.tiny("gpt2", vocab_size=257, eos_token_ids=(50256, 256))
    model = laconic.LanguageModel(laconic.Decoder(config), build_byte_tokenizer())
    model.save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hello"}\n')
    for arguments in (("Hello",), ("--input", tmp_path / "rows.jsonl")):
        assert run_cli("generate", tmp_path / "model", *arguments, "--max-tokens", 3).code == 0
    assert find_stop_token_ids(model.tokenizer, config, is_reply=True) == (256,)
