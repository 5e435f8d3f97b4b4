"""The command line: output, exit codes, one-line errors, and help."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from laconic import Decoder, DecoderConfig
from laconic.cli.commands.verify import VerifyParityCommand
from laconic.config.recipe_keys import leaf_keys
from laconic.errors import CorruptArtifactError, NonFiniteError
from laconic.storage.atomic import write_folder_atomically
from tests.conftest import REPO, RunCli, check_refused, needs

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture
def story(shared: Path) -> Path:
    return shared / "models" / "stories260k"


def test_generate_prints_the_text(run_cli: RunCli, story: Path) -> None:
    code, out, err = run_cli("generate", story, "Once upon a time", "--max-tokens", 40)
    assert code == 0
    assert out.startswith(STORY)
    assert "5 tokens read in" in err
    assert "40 generated in" in err


def test_generate_json_is_one_object(run_cli: RunCli, story: Path) -> None:
    code, out, _ = run_cli("generate", story, "Once upon a time", "--max-tokens", 5, "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert report["schema"] == 1
    assert STORY.startswith("Once upon a time" + report["generations"][0]["text"])
    assert report["generations"][0]["passes"]["total"] == 5
    assert report["weights"] == Decoder.from_pretrained(story).fingerprint


@pytest.mark.medium
def test_arguments_and_file_names_are_utf8_in_any_locale(run_cli: RunCli, story: Path, tmp_path: Path) -> None:
    (tmp_path / "café.txt").write_text("Zoë", encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for arguments in (["Zoë"], ["--file", str(tmp_path / "café.txt")]):
        command = [sys.executable, "-m", "laconic", "generate", str(story), *arguments, "--max-tokens", "3"]
        out = subprocess.run(command, capture_output=True, env=environment, check=True).stdout
        assert out.decode() == run_cli("generate", story, *arguments, "--max-tokens", 3).out
    check_refused(run_cli("generate", story, "\udcff", "--max-tokens", 3), 2, "not UTF-8")


@pytest.mark.medium
def test_generate_warning_is_one_line(run_cli: RunCli, story: Path) -> None:
    code, _, err = run_cli("generate", story, "Once", "--max-tokens", 520)
    assert code == 0
    assert sum("position 512" in line for line in err.splitlines()) == 1


def test_export_keeps_the_stored_dtype(run_cli: RunCli, tmp_path: Path) -> None:
    Decoder(DecoderConfig.tiny("qwen2")).save_pretrained(tmp_path / "half", dtype=torch.float16)
    assert run_cli("export", tmp_path / "half", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "half/model.safetensors").read_bytes()


def test_import_llama2c_bit_for_bit(run_cli: RunCli, story: Path, tmp_path: Path) -> None:
    assert run_cli("import", story / "stories260K.bin", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (story / "model.safetensors").read_bytes()


def test_export_merges_an_adapter(run_cli: RunCli, tmp_path: Path) -> None:
    needs("peft")
    from peft import LoraConfig

    from laconic.experiment.lora import lora

    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules="all-linear", r=2)
    model = lora.add_adapter(Decoder.from_pretrained(tmp_path / "base"), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    lora.save_adapter(model, tmp_path / "adapter")
    arguments = ("export", tmp_path / "base", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out")
    assert run_cli(*arguments).code == 0
    merged, base = Decoder.from_pretrained(tmp_path / "out"), Decoder.from_pretrained(tmp_path / "base")
    x = base.embed(torch.arange(9)[None])
    torch.testing.assert_close(merged(x).hidden_states, model(x).hidden_states, rtol=1e-5, atol=1e-5)
    assert (merged(x).hidden_states - base(x).hidden_states).abs().max() > 0.1


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("generate", "x", "y", "--max-token", 3), 2, "did you mean --max-tokens?"),
        (
            ("verify", "parity", "stories260k", "--format", "json"),
            2,
            "laconic: verify parity has no option --format; see laconic verify parity --help",
        ),
        (("gen",), 2, "no command gen; did you mean generate?"),
        (("qqq",), 2, "no command qqq; give one of demo, train, recipes,"),
        (("recipes", "show", "demo-kawa"), 66, "did you mean demo-kava?"),
        (("generate", "x", "y", "--max-tokens", "q"), 2, "--max-tokens: q is not an integer; see"),
        (("generate", "x", "y", "--top-p", "q"), 2, "--top-p: q is not a number; see"),
        (("compress", "x", "y", "--out"), 2, "--out: missing value; see"),
        (
            ("compress", "x", "y", "z", "--out", "w"),
            2,
            "fewer arguments; several texts are rows of a .jsonl; see",
        ),
        (("generate", "x", "hi", "--memory", "a", "b"), 2, "b: generate takes fewer arguments; write --memory before"),
        (("generate", "x", "--memory", "a", "b.safetensors"), 2, "b.safetensors is taken as a prompt; write --memory"),
        (("generate", "x", "What is b.safetensors", "--memory", "a"), 66, "no file a; give one that laconic compress"),
        (("evaluate", "x", "--tasks", "a", "b"), 2, "b: evaluate takes fewer arguments; the values of --tasks"),
        (("generate", "x", "y", "--stop", "."), 2, "has no option --stop; did you mean --stop-string?"),
        (("data", "lists"), 2, "no command data lists; did you mean list?"),
        (
            ("compress", "x", "y", "--out", "z", "--method", "foo"),
            2,
            "--method foo: expected one of expected, h2o, knorm, kvzip, random, rkv, snapkv, window; see",
        ),
        (("generate", "stories260k", "Hello", "--chat"), 66, "(base models have none); give plain text"),
        (("generate",), 2, "laconic: generate needs MODEL; see"),
        (("verify", "parity", "tiny:phi"), 66, "tiny:phi"),
        (("verify", "parity", "tiny:llama", "--all-results"), 2, "needs --json FILE"),
        (("generate", "no such folder", "y"), 66, "no such folder"),
    ],
)
def test_usage_error_is_one_line(run_cli: RunCli, args: tuple[object, ...], code: int, message: str) -> None:
    result = run_cli(*args)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_no_command_prints_the_list_of_commands(run_cli: RunCli) -> None:
    code, out, err = run_cli()
    assert (code, out) == (2, "")
    assert "Generate text, optionally" in err
    assert "laconic COMMAND --help" in err


EARLY_REFUSALS = {  # arguments by a part of their error
    "no prompt given": ["generate", "stories260k"],
    "no file gone.txt": ["generate", "stories260k", "--file", "gone.txt"],
    "no file gone.jsonl": ["generate", "stories260k", "--input", "gone.jsonl"],
    "temperature=-1": ["chat", "stories260k", "--temperature", "-1"],
    "keep=3": ["compress", "stories260k", __file__, "--out", "new.safetensors", "--keep", "3"],
    "not a memory": ["compress", "stories260k", __file__, "--out", __file__],
    "/gone/run is neither": ["evaluate", "/gone/run"],
    "no file tasks.jsonl": ["evaluate", "stories260k", "--tasks", "tasks.jsonl"],
    "is not empty": ["export", "stories260k", "--out", str(REPO)],
    "--api-key": ["serve", "stories260k", "--host", "0.0.0.0"],
    "unfinished laconic generate": ["inspect", "rows.jsonl.part"],
}
REFUSE_EARLY = """import contextlib, io, json, signal, sys
for name in ("SIGHUP", "SIGUSR1"):  # as on Windows
    delattr(signal, name)
class Refuse:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "fcntl", "resource", "termios", "pwd", "grp", "readline"):
            raise ImportError(f"No module named {name}", name=name)
sys.meta_path.insert(0, Refuse)
from laconic.cli.main import main
errors = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, err = ["laconic", *arguments], io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main()
    errors.append(err.getvalue())
print(json.dumps(errors))"""


@pytest.mark.medium
def test_flags_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """In a process that can import neither torch nor the modules that Windows lacks."""
    (tmp_path / "rows.jsonl.part").write_text("0" * 64 + "\n")
    command = [sys.executable, "-c", REFUSE_EARLY, json.dumps(list(EARLY_REFUSALS.values()))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    errors = json.loads(done.stdout)
    assert [message for message, err in zip(EARLY_REFUSALS, errors, strict=True) if message not in err] == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NonFiniteError("norm: 1 value"), 65, "norm: 1 value"),
        (CorruptArtifactError("m: changed"), 76, "m: changed"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(errno.ENOENT, "gone", "a/b"), 66, "a/b: no such file"),
        (FileNotFoundError("no zone Mars"), 66, "no zone Mars"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 74, "a/b: No space left on device"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, "pip install '.[hf]'"),
        (MemoryError(), 71, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 71, "out of memory"),
        (RuntimeError("oh"), 70, "internal error: RuntimeError: oh"),
        (ZeroDivisionError("oh"), 70, "internal error: ZeroDivisionError: oh"),
    ],
)
def test_exit_status_of_every_error(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    monkeypatch.setattr(VerifyParityCommand, "run", Mock(side_effect=error))
    result = run_cli("verify", "parity", "tiny:llama")
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.medium
def test_generate_exits_quietly_if_its_pipe_closes(story: Path) -> None:
    command = f"{sys.executable} -m laconic.cli.main generate {story} Once --max-tokens 400"
    shell = f'{command} | head -c 5; echo " ${{PIPESTATUS[0]}}"'
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.endswith(" 141\n")
    assert "Traceback" not in result.stderr


def run_in_shell(command: str, folder: Path) -> tuple[int, str]:
    """Run a command of bash in which `laconic` is this one; return its exit code and standard output."""
    script = f'laconic() {{ {sys.executable} -m laconic "$@"; }}; {command}'
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_removes_what_is_half_written(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def write_half(folder: Path) -> None:
        (folder / "half").write_text("1")
        os.kill(os.getpid(), number)
        time.sleep(30)

    def export(self: VerifyParityCommand) -> None:
        write_folder_atomically(tmp_path / "out", write_half)

    monkeypatch.setattr(VerifyParityCommand, "run", export)
    assert run_cli("verify", "parity", "tiny:llama").code == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("laconic version >&-", 0),
        ("laconic recipes show nope 2>&-", 66),
        ("laconic version <&- >&- 2>&-", 0),
        ("set -o pipefail; laconic recipes | true", 141),  # a table
        ("laconic recipes show nope 2>/dev/full", 66),
    ],
)
def test_closed_streams_change_no_exit_code(tmp_path: Path, command: str, code: int) -> None:
    assert run_in_shell(command, tmp_path)[0] == code


@pytest.mark.medium
def test_verify_writes_json(run_cli: RunCli, tmp_path: Path) -> None:
    needs("transformers")
    file = tmp_path / "parity.json"
    code, out, _ = run_cli("verify", "parity", "tiny:gpt2", "--inputs", "I1", "--json", file)
    assert code == 0
    assert json.loads(file.read_text())["ok"]
    assert "No divergence" in out


def test_tasks_list_names_every_task(run_cli: RunCli) -> None:
    from laconic.data.reasoning.catalog import DATASETS
    from laconic.evaluation.streams.suite import TASK_NAMES

    code, out, _ = run_cli("tasks", "list", "--format", "json")
    assert code == 0
    names = {name for task in json.loads(out)["tasks"] for name in task["name"].split(", ")}
    assert names >= {*DATASETS, *TASK_NAMES}
    assert "class-incremental" in run_cli("tasks").out


def test_recipes_lists_every_recipe_and_prints_one(run_cli: RunCli) -> None:
    from laconic.config.load import SHIPPED_RECIPES

    lines = [line.strip() for line in run_cli("recipes").out.splitlines() if line.startswith("  ")]
    assert len(lines) == len(list(SHIPPED_RECIPES.glob("*.toml")))
    assert any(
        line.startswith("tiny-kava ") and line.endswith("KaVa with six latents and three iterations") for line in lines
    )
    assert max(map(len, lines)) < 200
    listed = json.loads(run_cli("recipes", "list", "--format", "json").out)["recipes"]
    assert json.loads(run_cli("recipes", "--format", "json").out)["recipes"] == listed
    assert all(row["method"] for row in listed)
    assert {row["name"] for row in listed} == {line.split()[0] for line in lines}
    assert all(row["description"] for row in listed)
    assert run_cli("recipes", "show", "tiny-kava").out == (SHIPPED_RECIPES / "tiny-kava.toml").read_text()


@pytest.mark.medium
def test_recipes_keys_explains_every_key(run_cli: RunCli) -> None:
    lines = run_cli("recipes", "keys").out.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(leaf_keys())
    assert all(re.search(r"  # \S.*: \S", line) for line in lines)
    (line,) = (line for line in lines if line.startswith("latents.num_latents "))
    assert tomllib.loads(line) == {"latents": {"num_latents": 24}}
    assert "integer ≥ 1" in line
    assert run_cli("recipes", "keys", "NUM_LATENTS").out.splitlines()[0].startswith("latents.num_latents = 24 ")
    listed = json.loads(run_cli("recipes", "keys", "num_latents", "--format", "json").out)["keys"]
    assert all("num_latents" in row["key"] + row["meaning"] for row in listed)
    code, out, err = run_cli("recipes", "keys", "no such thing")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_version_is_that_of_the_package_and_citation(run_cli: RunCli) -> None:
    from laconic import __version__

    assert run_cli("--version").out == f"{__version__}\n"
    assert f"\nversion: {__version__}\n" in (REPO / "CITATION.cff").read_text()
    assert run_cli("version").out.startswith(f"laconic {__version__}, Python 3.")


def test_data_alone_lists_the_data_sets(run_cli: RunCli) -> None:
    assert "gsm8k-aug-subset" in run_cli("data").out
