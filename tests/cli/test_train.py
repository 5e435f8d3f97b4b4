"""`laconic train` as a user gives it: runs, their end, what continues them and what refuses to."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import laconic
from laconic.cli import generate_batch
from laconic.cli.commands import train as train_command
from laconic.cli.commands.train import normalise_args, outcome_to_json
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.errors import UsageError
from laconic.evaluation.runs import resolve_step
from laconic.experiment.load_run import load_run, read_run_recipe
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.storage import atomic
from laconic.storage.run_dir import RunDirectory
from laconic.training.run import TrainingResult
from tests.conftest import REPO, RunCli, check_refused, needs
from tests.tiny_recipes import TINY_RECIPE
from tests.tolerances import FLOAT32, error

CPU = torch.device("cpu")
ON_BASE = TINY_RECIPE.replace(
    'family = "llama"\ntokenizer = "digits"\nhidden_size = 16\nnum_hidden_layers = 1\nnum_attention_heads = 2\n',
    'name = "base"\n',
).replace("steps = 4", 'trainable = "lora"\nsteps = 4')


@pytest.fixture
def run(run_cli: RunCli, tiny_recipe: Path) -> RunCli:
    """Run a command in a directory with tiny.toml."""
    return run_cli


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small checkpoint with the tokenizer of the digits task."""
    config = DecoderConfig.tiny("llama", vocab_size=build_digits_tokenizer().vocab_size)
    Decoder(config, seed=1).save_pretrained(tmp_path / "base")
    build_digits_tokenizer().save(tmp_path / "base")
    (tmp_path / "lora.toml").write_text(ON_BASE)
    return tmp_path / "base"


def weights(folder: str, step: int) -> bytes:
    return (Path(folder) / f"steps/step-{step:06d}/model.safetensors").read_bytes()


def metrics(folder: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.medium
def test_train_writes_recipe_environment_and_steps(run: RunCli, tmp_path: Path) -> None:
    code, out, err = run("train", "tiny.toml", "--train.learning_rate", "2e-3", "seed=5")
    assert (code, out) == (0, "")
    assert "runs/tiny: step 4, loss" in err
    last = err.splitlines()[-1]
    assert all(f", {name} " in last for name in ("codi", "kv", "kv_target_fraction", "teacher_accuracy"))
    run_dir = tmp_path / "runs/tiny"
    assert {"recipe.toml", "env.json", "metrics.jsonl", "latest", "steps"} <= {p.name for p in run_dir.iterdir()}
    message = json.loads((run_dir / "env.json").read_text())
    assert message["command"] == "laconic train tiny.toml --train.learning_rate 2e-3 seed=5"
    assert message["versions"]["torch"] == torch.__version__
    assert "learning_rate = 0.002" in (run_dir / "recipe.toml").read_text()
    again = run("train", run_dir / "recipe.toml", "--out", "runs/again")
    assert again[0] == 0
    assert weights("runs/again", 4) == weights("runs/tiny", 4)
    assert (
        run("chat", "runs/tiny").err == "laconic: runs/tiny is a Reasoner, which does not chat; use laconic generate\n"
    )
    check_refused(run("train", run_dir / "recipe.toml"), 2, "pass --out")


@pytest.mark.medium
def test_train_extends_a_run_but_does_not_shorten_it(run: RunCli) -> None:
    assert run("train", "tiny.toml", "--out", "runs/long", "train.steps=6", "train.lr_schedule=constant")[0] == 0
    assert run("train", "tiny.toml", "--out", "runs/a", "train.lr_schedule=constant")[0] == 0
    assert run("train", "tiny.toml", "--out", "runs/a", "train.lr_schedule=constant", "train.steps=6")[0] == 0
    assert weights("runs/a", 6) == weights("runs/long", 6)
    check_refused(run("train", "tiny.toml", "--out", "runs/a", "train.lr_schedule=constant"), 2, "train.steps")


def test_train_refuses_another_recipe_and_lists_the_keys(run: RunCli, tmp_path: Path) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    code, _, err = run("train", "tiny.toml", "--out", "runs/a", "train.learning_rate=3", "latents.num_latents=3")
    assert code == 2
    assert str(tmp_path / "runs/a") in err
    assert [line.partition(":")[0] for line in err.splitlines()[1:]] == ["latents.num_latents", "train.learning_rate"]
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1", "train.log_every=3")[0] == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.best_metric=f1",), '"f1": not a metric of this validation, which has accuracy, teacher_accuracy'),
        (("train.best_metric=teacher_accuracy", "validation.with_cot=false"), "validation, which has accuracy"),
        (("model.family=gpt2", "validation.max_tokens=245"), "validation.max_tokens 245: exceeds the 256 positions"),
    ],
)
def test_train_checks_the_validation_before_the_first_update(
    run: RunCli, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    for flags in ((), ("--plan",)):
        code, out, err = run("train", "tiny.toml", "--out", "runs/a", *overrides, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
    assert not (tmp_path / "runs/a/metrics.jsonl").exists()


def test_train_accepts_an_answer_that_just_fits(run: RunCli) -> None:
    keys = ("model.family=gpt2", "train.steps=1", "validation.max_tokens=244")
    assert run("train", "tiny.toml", "--out", "runs/a", *keys)[0] == 0


@pytest.mark.medium
def test_train_resumes_with_another_validation(run: RunCli) -> None:
    keys = ("train.lr_schedule=constant", "train.steps=2")
    assert run("train", "tiny.toml", "--out", "runs/a", *keys, "train.best_metric=accuracy")[0] == 0
    more = ("train.steps=4", "train.best_metric=teacher_accuracy", "validation.max_tokens=5", "validation.batch_size=3")
    more = (*more, "train.activation_checkpointing=1", "train.on_nonfinite=skip")
    assert run("train", "tiny.toml", "--out", "runs/a", keys[0], *more)[0] == 0
    assert run("train", "tiny.toml", "--out", "runs/whole", keys[0])[0] == 0
    assert weights("runs/a", 4) == weights("runs/whole", 4)
    assert load_run("runs/a", CPU, 2).recipe.validation.max_tokens == 5  # type: ignore[union-attr]
    assert resolve_step(Path("runs/a"), "best") == 4  # the metric of step 2 was measured with other answers


def test_train_that_cannot_resume_leaves_the_recipe_of_the_run(run: RunCli) -> None:
    command = ("train", "tiny.toml", "--out", "runs/a", "train.lr_schedule=constant")
    assert run(*command, "train.steps=1")[0] == 0
    before = Path("runs/a/recipe.toml").read_text()
    assert run(*command, "train.steps=3", "train.best_metric=unknown")[0] == 2
    assert Path("runs/a/recipe.toml").read_text() == before
    assert run(*command, "train.steps=2")[0] == 0


def test_train_replaces_no_recipe_of_the_user(run: RunCli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = "# why these values\n" + Path("tiny.toml").read_text()
    (tmp_path / "mine/recipe.toml").write_text(text)
    check_refused(run("train", "mine/recipe.toml", "--out", "mine"), 73, "recipe.toml would be replaced")
    assert (tmp_path / "mine/recipe.toml").read_text() == text


def test_train_that_was_killed_while_it_wrote_the_recipe_starts_again(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        writes: list[str] = []

        def write_first(path: Path, text: str) -> None:
            writes.append(path.name)
            if len(writes) > 1:
                raise KeyboardInterrupt
            atomic.write_text_atomically(path, text)

        patch.setattr("laconic.experiment.run_init.write_text_atomically", write_first)
        assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] != 0
    assert len(writes) == 2
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1").code == 0


def test_train_refuses_what_it_cannot_resume_before_the_rows_are_read(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    monkeypatch.setattr("laconic.experiment.from_recipe.build.build_experiment", None)
    check_refused(
        run("train", "tiny.toml", "--out", "runs/a", "train.steps=1", "--resume", "step-7"),
        2,
        "has no checkpoint of step 7; available: 1",
    )
    Path("my recipe.toml").write_text(Path("tiny.toml").read_text())
    check_refused(run("train", "my recipe.toml"), 2, "my recipe.toml: pass --out")


def test_train_mentions_rows_left_out_of_validation(run: RunCli, tmp_path: Path) -> None:
    row = '{"question": "3 + %d =", "steps": ["1", "2"], "answer": "%s"}\n'
    (tmp_path / "rows.jsonl").write_text("".join(row % (n, n) for n in range(8)))
    (tmp_path / "valid.jsonl").write_text(row % (11, "12") + row % (22, "x") + row % (33, "y") + row % (44, "3 " * 9))
    data = TINY_RECIPE[TINY_RECIPE.index("[data]") : TINY_RECIPE.index("[validation]")]
    data_table = '[data]\npath = "rows.jsonl"\nvalid = "valid.jsonl"\nanswer_prompt = "ans"\n'
    data_table += 'require_leading_digit = true\nmax_tokens = 15\non_too_long = "drop"\n'
    (tmp_path / "own.toml").write_text(TINY_RECIPE.replace(data, data_table))
    code, _, err = run("train", "own.toml", "--out", "runs/a", "train.steps=1")
    assert code == 0, err
    expected = 'validation: 3 of 4 rows left out: 1 too long (on_too_long = "drop"), 2 without a leading digit'
    assert [line for line in err.splitlines() if line.startswith(expected)]


@pytest.mark.medium
def test_train_resumes_after_its_files_moved_and_refuses_other_rows(run: RunCli, tmp_path: Path) -> None:
    row = '{"question": "3 + %d =", "steps": ["1", "2"], "answer": 7}\n'
    (tmp_path / "old").mkdir()
    (tmp_path / "old/rows.jsonl").write_text("".join(row % n for n in range(8)))
    (tmp_path / "old/valid.jsonl").write_text(row % 11)
    data = TINY_RECIPE[TINY_RECIPE.index("[data]") : TINY_RECIPE.index("[validation]")]
    table = '[data]\npath = "old/rows.jsonl"\nvalid = "old/valid.jsonl"\nanswer_prompt = "ans"\n'
    (tmp_path / "own.toml").write_text(TINY_RECIPE.replace(data, table))
    assert run("train", "own.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    (tmp_path / "old").rename(tmp_path / "new")
    moved = ("train", "own.toml", "--out", "runs/a", "data.path=new/rows.jsonl", "data.valid=new/valid.jsonl")
    code, _, err = run(*moved, "train.steps=2")
    assert code == 0, err
    assert "a: resumed from step 1 of 2\n" in err
    assert "train.steps: 1 in the run, 2 requested; the cosine schedule of the learning rate now ends at 2, so" in err
    code, _, err = run(*moved, "train.steps=2")
    assert code == 0, err
    assert "a: already finished, at step 2 of 2; a larger train.steps trains on\n" in err
    with (tmp_path / "new/rows.jsonl").open("a") as file:
        file.write(row % 8)
    code, _, err = run(*moved, "train.steps=3")
    assert (code, err.count("\n")) == (76, 1), err
    assert f"other rows than {tmp_path / 'new/rows.jsonl'} has now; restore the old rows, or train from" in err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--resume", "never"), 73, "already has checkpoints; resume the run or choose another folder"),
        (("--resume", "step-9"), 2, "has no checkpoint of step 9"),
        (("--resume", "soon"), 2, "--resume soon"),
        (("--num-seeds", "0"), 2, "--num-seeds 0"),
        (("--resme", "auto"), 2, "train has no option --resme; did you mean --resume?"),
        (("--dry-run",), 2, "train has no option --dry-run; see laconic train --help"),
        (("--learning-rate", "1e-3"), 2, "train has no option --learning-rate; did you mean --train.learning_rate?"),
        (("--train.learning_rate",), 2, "--train.learning_rate: missing value"),
        (("--replay", "runs/a/incidents/step-1"), 66, "give RUN/incidents/step-N"),
        (("--device", "cuda:9"), 2, "device cuda:9"),
    ],
)
def test_train_invalid_flags(run: RunCli, flags: tuple[str, ...], code: int, message: str) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    ended, out, err = run("train", "tiny.toml", "--out", "runs/a", "train.steps=1", *flags)
    assert (ended, out) == (code, "")
    assert message in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_train_stops_at_a_signal_before_the_first_update(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def read_rows_for_long(recipe: object, device: object, show: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    monkeypatch.setattr("laconic.experiment.from_recipe.build.build_experiment", read_rows_for_long)
    code, out, err = run("train", "tiny.toml", "--out", "runs/a")
    assert (code, out) == (75, "")
    assert f"{number.name}: stopped before the first update; run the same command again" in err


def test_train_schema(run: RunCli) -> None:
    check_refused(run("train"), 2, "no recipe given")
    code, out, _ = run("train", "--schema")
    assert code == 0
    assert json.loads(out)["properties"]["method"]["description"]


def test_train_locked_directory_and_full_disk(run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory(tmp_path / "runs/a").lock():
        check_refused(run("train", "tiny.toml", "--out", "runs/a"), 73, f"locked by process {os.getpid()} on")
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    code, _, err = run("train", "tiny.toml", "--out", "runs/b")
    assert code == 74
    assert "1,000" in err
    assert err.count("\n") == 1
    assert RunDirectory(tmp_path / "runs/b").step_numbers() == []
    monkeypatch.undo()


def test_train_track_copies_metrics(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    code, _, err = run("train", "tiny.toml", "--track", "trackio")
    assert (code, err) == (2, "laconic: trackio is not installed; in a clone of laconic: pip install '.[track]'\n")
    assert not Path("runs").exists()
    report = list[Any]()
    trackio = SimpleNamespace(
        init=lambda **named: report.append(named),
        log=lambda metrics, step: report.append((step, sorted(metrics))),
        finish=lambda: report.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    flags = ("--track", "trackio", "--track-project", "mine", "train.steps=1")
    assert run("train", "tiny.toml", *flags)[0] == 0
    assert (report[0]["project"], report[0]["name"]) == ("mine", "tiny")
    assert report[0]["config"]["method"] == "kava"
    assert report[1][0] == 1
    assert "loss" in report[1][1]
    assert report[-1] == "finish"


def test_train_num_seeds_and_json(run: RunCli) -> None:
    code, out, _ = run("train", "tiny.toml", "--num-seeds", 2, "--train.steps", 1, "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert [entry["out"] for entry in report["runs"]] == ["runs/tiny/seed-0", "runs/tiny/seed-1"]
    assert weights("runs/tiny/seed-0", 1) != weights("runs/tiny/seed-1", 1)


def test_train_says_which_run_has_to_be_trained_first(run: RunCli) -> None:
    code, _, err = run("train", "tiny-kava", "--out", "kv", "train.steps=1")
    assert code == 66
    assert "model.init_from_run" in err
    assert "no such run; first laconic train tiny-cot --out " in err


@pytest.mark.medium
def test_train_init_from_run_with_other_methods(run: RunCli) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "method=cot", "train.steps=1")[0] == 0
    text = TINY_RECIPE[TINY_RECIPE.index("[latents]") :]
    Path("next.toml").write_text(f'method = "kava"\n[model]\ninit_from_run = "runs/a"\n{text}')
    for method in ("kava", "pccot", "nocot"):
        result = run("train", "next.toml", "--out", f"runs/{method}", "method=" + method, "train.steps=1")
        assert result.code == 0
    assert "[latents] is not used by method nocot" in result.err


@pytest.mark.slow
def test_train_plan_reads_no_weights(run: RunCli, base: Path) -> None:
    for path in base.glob("*.safetensors"):
        path.unlink()
    code, out, err = run("train", "lora.toml", "--plan")
    assert (code, err) == (0, "")
    for word in ("parameters", "trainable", "rows         200", "4; an epoch has 25", "at the peak", "of 8 rows"):
        assert word in out
    report = json.loads(run("train", "lora.toml", "--plan", "--format", "json", "train.trainable=full")[1])
    assert report["trainable"] == report["parameters"]
    assert report["tokens"]["question"] == {"p50": 7, "p90": 7, "max": 7}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        (["--plan", "step", "a.toml"], ["--plan=step", "a.toml"]),
        (["a.toml", "--plan", "seed=1"], ["--plan=estimate", "a.toml", "seed=1"]),
        (["a.toml", "--plan=step"], ["--plan=step", "a.toml"]),
        (["a.toml", "--plan"], ["--plan=estimate", "a.toml"]),
        (["a.toml", "--", "seed=1"], ["a.toml", "seed=1"]),
    ],
)
def test_normalise_args_of_plan(args: list[str], flags: list[str]) -> None:
    assert normalise_args(args) == flags


@pytest.mark.parametrize("flag", ["--out", "--train.compile"])
@pytest.mark.parametrize("rest", [[], ["--plan"]])
def test_normalise_args_refuses_a_flag_without_value(flag: str, rest: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{flag}: missing value"):
        normalise_args(["a.toml", flag, *rest])


def test_current_commit_is_that_of_laconic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed below another project's repository has no commit."""
    for command in ("init", "add", "commit"):
        options = {"add": ["README"], "commit": ["--quiet", "--message", "x"]}.get(command, ["--quiet"])
        (tmp_path / "README").write_text("x")
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *identity, command, *options], cwd=tmp_path, check=True)
    monkeypatch.setattr(train_command, "__file__", str(tmp_path / "train.py"))
    (tmp_path / "train.py").write_text("")
    assert train_command.current_commit() is None


@pytest.mark.medium
def test_export_run_adapter_equals_peft(run: RunCli, base: Path) -> None:
    needs("transformers")
    needs("peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert run("train", "lora.toml", "--out", "runs/a", "lora.rank=4", "train.learning_rate=0.05")[0] == 0
    step = Path("runs/a/steps/step-000004")
    ids = torch.arange(12)[None]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), step).eval()
    decoder = load_run("runs/a", CPU).parts.decoder
    logits = decoder.logits(decoder(decoder.embed(ids)).hidden_states)
    assert error(theirs(input_ids=ids).logits, logits) <= FLOAT32
    plain = Decoder.from_pretrained(base)
    assert error(plain.logits(plain(plain.embed(ids)).hidden_states), logits) > 1e-2
    code, _, err = run("export", "runs/a", "--out", "merged")
    assert code == 0
    assert "step 4 of kava" in err
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert error(merged(input_ids=ids).logits, logits) <= FLOAT32
    check_refused(run("export", "runs/a", "--out", "other", "--adapter", step), 2, "--adapter")


@pytest.mark.medium
def test_generate_run_answers_with_its_method_or_chain(run: RunCli) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    question = "3 + 4 * 2 ="
    code, out, _ = run("generate", "runs/a", question, question, "--max-tokens", 5)
    assert code == 0
    assert out == f"{out.splitlines()[0]}\n\n{out.splitlines()[0]}\n"
    report = json.loads(run("generate", "runs/a", question, "--max-tokens", 5, "--format", "json")[1])
    (decoder,) = report["generations"]
    assert (report["method"], report["step"], decoder["text"]) == ("kava", 1, out.splitlines()[0])
    assert (decoder["passes"]["latent_setup"], decoder["passes"]["latent"]) == (1, 1)
    by_chain = json.loads(run("generate", "runs/a", question, "--with-cot", "--format", "json", "--max-tokens", 5)[1])
    assert by_chain["generations"][0]["passes"]["latent"] == 0
    early = json.loads(
        run("generate", "runs/a", question, "--jacobi-tolerance", 9, "--format", "json", "--max-tokens", 5)[1]
    )
    assert early["generations"] == report["generations"], "a single iteration cannot end earlier"
    for flags, message in (
        (("--jacobi-tolerance", "-1"), "jacobi_tolerance=-1.0: give a number of 0 or more"),
        (("--dtype", "float16"), "--dtype: not available for a run"),
        (("--chat",), "--chat: not available for a run"),
    ):
        assert run("generate", "runs/a", question, *flags)[::2][0] == 2
        assert message in run("generate", "runs/a", question, *flags)[2]
    assert "gone: no such local folder" in run("generate", "gone", "x", "--with-cot").err
    assert run("export", "runs/a", "--out", "out")[0] == 0
    assert Path("out/model.safetensors").read_bytes() == weights("runs/a", 1)


def test_outcome_to_json_has_null_for_a_metric_that_is_not_finite() -> None:
    outcome = TrainingResult(1, {"loss": 0.5}, {"accuracy": math.nan, "loss": 0.25}, None, 0, None)
    assert outcome_to_json(outcome)["validation"] == {"accuracy": None, "loss": 0.25}


def test_generate_run_answers_rows(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    questions = ("3 + 4 * 2 =", "1 + 1 =", "7 * 3 + 1 - 5 * 2 =")
    rows: list[dict[str, object]] = [{"question": question, "answer": n} for n, question in enumerate(questions)]
    rows.append({"prompt": questions[0], "question": "another"})
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = ("--max-tokens", 5, "--temperature", 2, "--seed", 3)
    command = ("generate", "runs/a", "--input", "rows.jsonl", *flags)
    code, out, err = run(*command)
    assert code == 0
    assert "tokens in " in err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [{name: line[name] for name in line if name != "generation"} for line in lines] == rows
    alone = json.loads(run("generate", "runs/a", *questions, questions[0], *flags, "--format", "json")[1])
    assert [{"prompt": result.pop("prompt"), "generation": result} for result in alone["generations"]] == [
        {"prompt": row.get("prompt", row["question"]), "generation": line["generation"]}
        for row, line in zip(rows, lines, strict=True)
    ]
    assert lines[0]["generation"] != lines[3]["generation"], "the same question at another index has another seed"
    assert run(*command, "--batch-size", 1)[1] == out
    resumed = (*command, "--output", "answers.jsonl", "--batch-size", 1)
    append = generate_batch.PartialOutput.append

    def stop(self: generate_batch.PartialOutput, row: str) -> None:
        if self.num_rows == 2:
            raise KeyboardInterrupt
        append(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(generate_batch.PartialOutput, "append", stop)
        assert run(*resumed)[0] == 130
    assert run(*resumed, "--with-cot")[0] == 2, "begun with other flags"
    assert "2 of 4 rows are done; continuing" in run(*resumed)[2]
    assert Path("answers.jsonl").read_text() == out
    Path("renamed.jsonl").write_text(Path("rows.jsonl").read_text().replace('"question"', '"ask"'))
    err = run("generate", "runs/a", "--input", "renamed.jsonl")[2]
    assert 'expected one of "prompt", "messages" and "question"' in err
    recipe = Path("runs/a/recipe.toml")
    text = recipe.read_text()
    recipe.write_text(text.replace("[data.columns]\n", '[data.columns]\nquestion = "ask"\n'))
    assert read_run_recipe("runs/a").data.columns["question"] == "ask"
    recipe.write_text(text)
    Path("empty.jsonl").write_text(Path("rows.jsonl").read_text() * 5 + '{"question": ""}\n')
    check_refused(
        run("generate", "runs/a", "--input", "empty.jsonl", "--output", "empty.out"),
        2,
        "empty.jsonl:21 is empty; give a question",
    )
    assert not Path("empty.out.part").exists()
    Path("chat.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    check_refused(
        run("generate", "runs/a", "--input", "chat.jsonl"), 2, "chat.jsonl:2 has messages, and the run was trained"
    )


@pytest.mark.medium
def test_generate_answers_the_conversations_that_a_run_was_trained_on(run: RunCli, chat_model: Path) -> None:
    """Rows of `messages` as in training, whose last one is the answer, or that end with the question."""
    history = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    question = {"role": "user", "content": "And twice that?"}
    answer = {"role": "assistant", "content": "<think>3+3=6</think>6"}
    rows = [{"messages": [*history, question, answer]}, {"messages": [question, answer]}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = f'''method = "nocot"
[model]
name = "{chat_model}"
[data]
path = "rows.jsonl"
format = "chat"
[train]
steps = 1
batch_size = 2
'''
    Path("chat.toml").write_text(recipe)
    assert run("train", "chat.toml", "--out", "runs/a")[0] == 0
    Path("new.jsonl").write_text(json.dumps({"messages": [*history, question]}) + "\n")
    Path("one.json").write_text(json.dumps([*history, question]))
    flags = ("--max-tokens", 6)
    outputs = [run("generate", "runs/a", "--input", name, *flags)[1] for name in ("rows.jsonl", "new.jsonl")]
    generations = [json.loads(line)["generation"] for output in outputs for line in output.splitlines()]
    assert generations[0] == generations[2]
    assert generations[0]["prompt_tokens"] > generations[1]["prompt_tokens"], "the history is read"
    single = json.loads(run("generate", "runs/a", "--messages", "one.json", *flags, "--format", "json")[1])
    assert single["generations"][0]["text"] == generations[0]["text"]
    Path("none.jsonl").write_text('{"messages": [{"role": "assistant", "content": "6"}]}\n')
    check_refused(run("generate", "runs/a", "--input", "none.jsonl"), 2, "none.jsonl:1 has no question")


def test_generate_refuses_an_empty_question_before_the_run_is_loaded(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("train", "tiny.toml", "--out", "runs/a", "train.steps=1")[0] == 0
    monkeypatch.setattr(laconic, "load", None)
    code, _, err = run("generate", "runs/a", "1 + 1 =", "")
    assert (code, err) == (2, "laconic: prompt 2 is empty; give a question\n")


def test_generate_answers_with_a_checkpoint(run: RunCli) -> None:
    keys = ("train.steps=2", "train.save_every=1", "train.validate_every=1", "train.best_metric=accuracy")
    assert run("train", "tiny.toml", "--out", "runs/a", *keys)[0] == 0
    question = ("1 + 1 =", "--max-tokens", 2, "--format", "json")
    steps = {
        name: json.loads(run("generate", "runs/a", *question, "--checkpoint", name)[1])["step"]
        for name in ("latest", "best", "1", "2")
    }
    assert steps == {"latest": 2, "best": resolve_step(Path("runs/a"), "best"), "1": 1, "2": 2}
    for model, name, message in (
        ("runs/a", "7", "has no checkpoint of step 7; available: 1, 2"),
        ("runs/a", "first", "--checkpoint first: not available in runs/a; give latest, a number, or best"),
        ("stories260k", "1", "--checkpoint: stories260k is not the directory of a run"),
        ("runs/a/steps/step-000007", "latest", "has no checkpoint of step 7; available: 1, 2"),
    ):
        check_refused(run("generate", model, *question, "--checkpoint", name), 2, message)
    check_refused(run("generate", "runs", *question, "--checkpoint", "latest"), 66, "load one of them, such as runs/a")


@pytest.mark.medium
def test_load_run_checks_recipe_and_base_weights(run: RunCli, base: Path) -> None:
    assert run("train", "lora.toml", "--out", "runs/a", "train.steps=1", "lora.rank=2")[0] == 0
    recipe = Path("runs/a/recipe.toml")
    text = recipe.read_text()
    recipe.write_text(text.replace('method = "kava"', 'method = "pccot"'))
    check_refused(run("generate", "runs/a", "1 + 1 ="), 76, "belongs to")
    recipe.write_text(text)
    Decoder(DecoderConfig.tiny("llama", vocab_size=23), seed=2).save_pretrained(base.parent / "other")
    (base / "model.safetensors").write_bytes((base.parent / "other/model.safetensors").read_bytes())
    code, _, err = run("generate", "runs/a", "1 + 1 =")
    assert code in (66, 76)
    config = DecoderConfig.tiny("llama", vocab_size=build_digits_tokenizer().vocab_size)
    Decoder(config, seed=3).save_pretrained(base.parent / "third")
    (base / "model.safetensors").write_bytes((base.parent / "third/model.safetensors").read_bytes())
    code, _, err = run("generate", "runs/a", "1 + 1 =")
    assert code == 76
    assert len([word for word in err.replace(",", " ").replace(";", " ").split() if len(word) == 64]) == 2
    code, _, err = run("train", "lora.toml", "--out", "runs/a", "lora.rank=2")
    assert code == 76
    assert "was trained with other weights of the base model (" in err


def test_train_refuses_another_tokenizer_with_both_hashes(run: RunCli, base: Path) -> None:
    assert run("train", "lora.toml", "--out", "runs/a", "train.steps=1", "lora.rank=2")[0] == 0
    path = base / "tokenizer.json"
    path.write_text(path.read_text().replace('"ans": 17', '"sna": 17').replace('"*": 12', '"ans": 12'))
    code, _, err = run("train", "lora.toml", "--out", "runs/a", "lora.rank=2")
    assert code == 76
    assert "tokenizer" in err
    assert len([word for word in err.replace(",", " ").replace(";", " ").split() if len(word) == 64]) == 2


def test_train_invalid_origin_and_tokenizer(run: RunCli, base: Path) -> None:
    assert run("train", "tiny.toml", "model.init_from_run=base", "model.family=llama")[0] == 2
    Path("from.toml").write_text(ON_BASE.replace('name = "base"', 'init_from_run = "base"'))
    assert "no run, and no recipe of its name; train it first, or set model.name" in run("train", "from.toml")[2]
    (base / "recipe.toml").write_text(TINY_RECIPE)
    check_refused(run("train", "from.toml"), 66, "no checkpoint yet")
    (base / "recipe.toml").unlink()
    path = base / "tokenizer.json"
    path.write_text(path.read_text().replace('"ans": 17', '"sna": 17'))
    check_refused(run("train", "lora.toml", "--out", "runs/c"), 76, "tokenizer")
    Decoder(DecoderConfig.tiny("llama", vocab_size=12), seed=1).save_pretrained(base.parent / "few")
    build_digits_tokenizer().save(base.parent / "few")
    code, _, err = run("train", "lora.toml", "--out", "runs/d", "model.name=few")
    assert (code, "24" in err, "12" in err) == (66, True, True)
    assert run("train", "lora.toml", "--plan", "model.name=few")[::2] == (code, err)
    Path("text.toml").write_text(ON_BASE.replace('source = "digits"\nformat = "digits"', 'path = "rows.jsonl"'))
    Path("rows.jsonl").write_text('{"question": "1 + 1", "steps": [], "answer": "2"}\n' * 8)
    check_refused(
        run("train", "text.toml", "--out", "runs/e", "model.name=base", "data.digits.train_rows=9"),
        66,
        "'The answer is:'",
    )


@pytest.mark.medium
def test_train_nonfinite_update_is_replayed(run: RunCli) -> None:
    code, _, err = run("train", "tiny.toml", "--out", "runs/a", "train.learning_rate=1e30", "train.max_grad_norm=1e30")
    assert code == 65
    assert "not finite" in err
    (incident,) = Path("runs/a/incidents").iterdir()
    code, out, _ = run("train", "--replay", incident)
    assert code == 0
    assert out.startswith("step 2: nonfinite, first in ")
    assert "loss: None recorded, None now" in out
    report = json.loads(run("train", "--replay", incident, "--format", "json")[1])
    assert report["recorded"] == report["repeated"]


def test_train_incompatible_sizes(run: RunCli) -> None:
    for keys, message in (
        (("data.max_tokens=300",), "302 positions, the model has 256"),
        (("kv_distillation.layers=[0, 4]",), "kv_distillation.layers names layer 4"),
        (("model.num_attention_heads=3",), "model.num_attention_heads 3 does not divide model.hidden_size 16"),
        (("latents.control_init=copy:zero",), 'latents.control_init "copy:zero"'),
        (("latents.control_init=zeros",), 'latents.control_init "zeros": write mean, normal, or copy:TEXT'),
    ):
        check_refused(run("train", "tiny.toml", *keys), 2, message)
    check_refused(run("train", "tiny.toml", "model.max_position_embeddings=13"), 66, "14 positions")


def test_normalise_args_separates_keys_from_flags() -> None:
    arguments = "--train.learning_rate -1 r.toml --out o seed=1 --plan --kv_selection.share-random-draw=false -h"
    expected = "--out o --plan=estimate -h train.learning_rate=-1 r.toml seed=1 kv_selection.share_random_draw=false"
    assert normalise_args(arguments.split()) == expected.split()


def start(folder: Path, *args: str) -> "subprocess.Popen[str]":
    settings = {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "laconic", "train", *args],
        cwd=folder, env=os.environ | settings, text=True, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_train_resumes_after_a_signal_bit_for_bit(run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ü 𝄞 שלום"  # 4-byte, right to left
    folder.mkdir()
    (folder / "é.toml").write_text(TINY_RECIPE.replace("steps = 4", "steps = 30"), encoding="utf-8")
    command = ("é.toml", "--out", "ñ/run", "paper_table=ours", "train.save_every=15")
    process = start(folder, *command)
    while not ((folder / "ñ/run/metrics.jsonl").exists() and metrics(str(folder / "ñ/run"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert RunDirectory(folder / "ñ/run").step_numbers()[-1] < 30
    monkeypatch.chdir(folder)
    code, _, message = run("train", *command)
    assert (code, "ñ/run: step 30" in message) == (0, True)
    assert run("train", "é.toml", "--out", "runs/whole", *command[3:])[0] == 0
    assert weights("ñ/run", 30) == weights("runs/whole", 30)
    assert metrics("ñ/run") == metrics("runs/whole")
    assert Path("ñ/run/recipe.toml").read_bytes() == Path("runs/whole/recipe.toml").read_bytes()
