"""The door: what each command prints, and the code it ends with."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laconic import Decoder, DecoderConfig, cli
from laconic.errors import CorruptArtifactError, NonFiniteError
from tests.conftest import needs

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture
def run(monkeypatch, capsys):
    """A command as a user gives it: its exit code, standard output, standard error."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return call


@pytest.fixture
def story(shared: Path) -> Path:
    return shared / "models" / "stories260k"


def test_a_story_is_written_to_standard_output(run, story):
    code, out, err = run("generate", story, "Once upon a time", "--max-tokens", 40)
    assert code == 0
    assert out.startswith(STORY)
    assert "40 tokens in 40 passes" in err


def test_several_prompts_are_one_batch_and_each_its_own_text(run, story):
    alone = [run("generate", story, prompt, "--max-tokens", 12)[1].strip() for prompt in ("Once", "Tim and Lily saw")]
    code, out, _ = run("generate", story, "Once", "Tim and Lily saw", "--max-tokens", 12)
    assert code == 0
    assert out.strip().split("\n\n") == alone


def test_json_is_one_object_and_nothing_else(run, story):
    code, out, _ = run("generate", story, "Once upon a time", "--max-tokens", 5, "--format", "json")
    told = json.loads(out)
    assert code == 0
    assert told["schema"] == 1
    assert STORY.startswith("Once upon a time" + told["generations"][0]["text"])
    assert told["generations"][0]["passes"]["total"] == 5
    assert told["weights"] == Decoder.from_pretrained(story).fingerprint


def test_the_same_seed_draws_the_same_text(run, story):
    def draw(seed: int) -> str:
        return run("generate", story, "Once", "--temperature", 0.8, "--seed", seed, "--max-tokens", 30)[1]

    assert draw(7) == draw(7) != draw(8)


def test_export_keeps_the_stored_type(run, tmp_path):
    Decoder(DecoderConfig.tiny("qwen2")).save_pretrained(tmp_path / "half", dtype=torch.float16)
    assert run("export", tmp_path / "half", "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "half/model.safetensors").read_bytes()


def test_prompts_are_utf8_whatever_the_locale(run, story):
    odd = "é".encode().decode("ascii", "surrogateescape")  # what Python makes of it under LC_ALL=C
    assert run("generate", story, odd, "--max-tokens", 3)[1] == run("generate", story, "é", "--max-tokens", 3)[1]
    assert run("generate", story, "\udcff", "--max-tokens", 3)[::2] == (2, "laconic: '\\udcff' is not UTF-8\n")


def test_a_warning_is_one_line(run, story):
    code, _, err = run("generate", story, "Once", "--max-tokens", 520)
    assert code == 0
    assert "laconic: position 512 ≥ 512 of llama: farther than it was trained\n" in err


def test_a_llama2c_file_is_exported_bit_for_bit(run, story, tmp_path):
    code, _, err = run("export", story / "stories260K.bin", "--out", tmp_path / "out")
    assert code == 0
    assert "260,032 parameters" in err
    assert (tmp_path / "out/model.safetensors").read_bytes() == (story / "model.safetensors").read_bytes()


def test_export_merges_an_adapter(run, tmp_path):
    needs("peft")
    from peft import LoraConfig

    from laconic.experiment import lora

    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "base")
    model = lora.add_adapter(
        Decoder.from_pretrained(tmp_path / "base"), LoraConfig(target_modules="all-linear", rank=2)
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    lora.save_adapter(model, tmp_path / "adapter")
    code, _, _ = run("export", tmp_path / "base", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out")
    assert code == 0
    merged, base = Decoder.from_pretrained(tmp_path / "out"), Decoder.from_pretrained(tmp_path / "base")
    x = base.embed(torch.arange(9)[None])
    torch.testing.assert_close(merged(x).hidden, model(x).hidden, rtol=1e-5, atol=1e-5)
    assert (merged(x).hidden - base(x).hidden).abs().max() > 0.1


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("generate", "x", "y", "--max-token", 3), 2, "options: --max-token, 3; did you mean --max-tokens?"),
        (("gen",), 2, "laconic: Unrecognized options: gen; see laconic --help"),
        (("generate", "x", "y", "--max-tokens", "q"), 2, "Error parsing --max-tokens"),
        (("generate",), 2, "laconic: Missing from laconic generate: MODEL"),
        ((), 2, "Expected one of {demo, train, compress, generate, evaluate, inspect, report, export, data, verify}"),
        (("verify", "parity", "tiny:phi"), 66, "tiny:phi: known are"),
        (("verify", "parity", "tiny:llama", "--inputs", "I99"), 2, "--inputs I99: known are"),
        (("generate", "x"), 2, "laconic: no prompt given; laconic generate MODEL PROMPT"),
        (("verify", "parity", "tiny:llama", "--out", "no/such.html"), 66, "no folder no to write into; make it first"),
        (("generate", "no such folder", "y"), 66, "is no folder and no name on the hub"),
        (("export", "gone.bin", "--out", "x"), 66, "no gone.bin in ."),
    ],
)  # fmt: skip
def test_a_user_s_error_is_one_line_and_a_code(run, args, code, said):
    ended, out, err = run(*args)
    assert (ended, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


def test_settings_are_refused_before_a_pass(run, story):
    for flag, value, said in (
        ("--temperature", -1, "temperature −1: must be ≥ 0"),
        ("--top-p", 0, "top_p 0: must be in (0, 1]"),
        ("--max-tokens", 0, "max_tokens 0: must be ≥ 1"),
    ):
        code, out, err = run("generate", story, "Once", flag, value)
        assert (code, out) == (2, "")
        assert said in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NonFiniteError("norm: 1 value"), 65, "norm: 1 value"),
        (CorruptArtifactError("m: changed"), 76, "m: changed"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(errno.ENOENT, "gone", "a/b"), 66, "a/b: not there"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 74, "a/b: No space left on device"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, "pip install 'laconic[hf]'"),
        (MemoryError(), 71, "out of memory; take a smaller --dtype"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 71, "out of memory"),
        (RuntimeError("oh"), 70, "a bug in laconic: RuntimeError: oh"),
        (ZeroDivisionError("oh"), 70, "a bug in laconic: ZeroDivisionError: oh"),
    ],
)
def test_every_end_has_its_code(run, monkeypatch, error, code, said):
    def fail(self: cli.Ledger) -> int:
        raise error

    monkeypatch.setattr(cli.Ledger, "run", fail)
    ended, _, err = run("verify", "ledger")
    assert ended == code
    assert said in err
    assert "Traceback" not in err


def test_a_closed_pipe_ends_quietly(story):
    command = f"{sys.executable} -m laconic.cli.main generate {story} Once --max-tokens 400"
    shell = f'{command} | head -c 5; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.stdout == "Once  141\n" or done.stdout.endswith(" 141\n")
    assert "Traceback" not in done.stderr


def test_every_command_has_help_with_an_example(run):
    alone = (("demo",), ("train",), ("generate",), ("export",))
    for verb in (*alone, ("verify", "parity"), ("verify", "ledger"), ("verify", "all")):
        code, out, _ = run(*verb, "--help")
        assert code == 0
        assert f"Example: laconic {' '.join(verb)}".removesuffix(" all") in out


def test_verify_writes_page_and_findings(run, tmp_path):
    needs("transformers")
    code, out, _ = run(
        "verify", "parity", "tiny:gpt2", "--inputs", "I1", "--out", tmp_path / "r.html", "--json", tmp_path / "r.json"
    )
    told = json.loads((tmp_path / "r.json").read_text())
    assert code == (0 if told["ok"] else 1) == 0
    assert "No divergence" in out
    assert "<html" in (tmp_path / "r.html").read_text()
