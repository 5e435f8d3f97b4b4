"""`laconic evaluate` as a user gives it: tables, what is kept, what goes on after a signal, and what is refused."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.batches import AnswerBatch
from laconic.cli import inspect_run
from laconic.cli import main as cli
from laconic.cli.commands.train import TrainCommand
from laconic.evaluation.reasoning import run as reasoning_run
from laconic.evaluation.reasoning import suite as reasoning_suite
from laconic.evaluation.reasoning.question_sets import load_question_set, single_question
from laconic.evaluation.runs import resolve_step
from laconic.experiment.load_run import load_run
from laconic.training.signals import SignalInterruptError, StopSignal
from tests.conftest import REPO, RunCli, check_refused, shared_dir
from tests.tiny_recipes import TINY_RECIPE

WORDS = """method = "kava"
paper_table = "kava table 6"
table_row = "1b aug"
deviations = { "model.family" = "it is small" }
[model]
family = "llama"
tokenizer = "{tokenizer}"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 400
[latents]
num_latents = 2
jacobi_iterations = 1
[data]
path = "{rows}"
valid = "{rows}"
format = "pccot"
eos_token = "<|endoftext|>"
require_leading_digit = true
allow_contamination = true
[validation]
max_rows = 2
max_tokens = 4
[train]
steps = 2
batch_size = 4
save_every = 1
validate_every = 1
best_metric = "accuracy"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits; three seeds on rows in words, and one more that answers at once."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = shared_dir() / "data/tokenizers/gsm-bpe-2048"
    (folder / "digits.toml").write_text(TINY_RECIPE.replace("valid_rows = 20", "valid_rows = 20, test_rows = 24"))
    words = WORDS.replace("{tokenizer}", str(tokenizer)).replace("{rows}", str(REPO / "examples/own.jsonl"))
    (folder / "words.toml").write_text(words)
    assert TrainCommand(str(folder / "digits.toml"), out=folder / "digits", device="cpu").run() == 0
    assert TrainCommand(str(folder / "words.toml"), out=folder / "kava", num_seeds=3, device="cpu").run() == 0
    plain = ("method=nocot", "paper_table=ours")
    assert TrainCommand(str(folder / "words.toml"), plain, out=folder / "plain", device="cpu").run() == 0
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, runs: Path) -> RunCli:
    """Run `laconic evaluate` in the directory of the runs."""
    monkeypatch.chdir(runs)
    return lambda *args: run_cli("evaluate", *args)


def evaluate_json(run: RunCli, *args: object) -> dict[str, Any]:
    code, out, err = run(*args, "--format", "json", "--device", "cpu")
    assert (code, out.count("\n")) == (0, 1), err
    return json.loads(out)


@pytest.mark.medium
def test_evaluate_under_every_condition(run: RunCli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("digits", "--with-cot", "--jacobi-iterations", "0,3", "--jacobi-tolerance", "1e-9")
    report = evaluate_json(run, *args)
    assert report["protocol"] == "last digit"
    (test,) = report["datasets"]
    assert (test["dataset"], test["questions"]) == ("test", 24)
    ways = {line["condition"]: line for line in test["runs"]}
    assert list(ways) == ["as trained", "with CoT", "0 iterations", "3 iterations", "tolerance 1e-09"]
    assert [ways[way]["passes"]["latent"] for way in ("as trained", "0 iterations", "3 iterations")] == [1, 0, 2]
    assert ways["tolerance 1e-09"]["accuracy"] == ways["as trained"]["accuracy"]
    assert ways["with CoT"]["passes"]["prompt"] == 1
    assert ways["with CoT"]["milliseconds"] is None
    assert {p.name for p in (runs / "digits/evaluations").iterdir()} == {
        "lock", "reasoning-test-last-digit-step-4", "reasoning-test-last-digit-with-CoT-step-4",
        "reasoning-test-last-digit-0-iterations-step-4", "reasoning-test-last-digit-3-iterations-step-4",
        "reasoning-test-last-digit-tolerance-1e-09-step-4",
    }  # fmt: skip
    result = reasoning_run.load_result(runs / "digits", "test")
    assert result is not None
    correct = [item.shared["is_correct"] for item in result]
    assert sum(correct) / len(correct) == ways["as trained"]["accuracy"]["mean"]
    folder = runs / "digits/evaluations/reasoning-test-last-digit-step-4"
    assert (folder / "recipe.toml").read_text() == (runs / "digits/recipe.toml").read_text()
    monkeypatch.setattr(reasoning_run, "answer_questions", None)  # whoever asks again fails
    assert evaluate_json(run, *args)["datasets"][0]["runs"][0]["accuracy"] == ways["as trained"]["accuracy"]


@pytest.mark.medium
def test_evaluate_seeds_and_sets_with_a_baseline(run: RunCli, runs: Path) -> None:
    data = ("--data-dir", shared_dir() / "data", "--limit", 12, "--device", "cpu")
    code, out, err = run("kava", "--tasks", "gsm8k,gsm-hard,svamp:test", *data, "--baseline", "plain")
    assert code == 0, err
    for text in (
        "gsm8k: 12 questions", "gsm-hard, changed: 11 questions", "always “18”", "1 seed: the intervals are about",
        "kava: may have trained on these questions: its recipe sets data.allow_contamination",
        "kava  ", "plain ", "protocol pccot", "svamp: kava against plain: ", "; p ",
        "kava: kava, float32; seed 0 at step 2, seed 1 at step 2, seed 2 at step 2",
        "kava differs from kava table 6, 1b aug, in model.family", "device: cpu",
    ):  # fmt: skip
        assert text in out, text
    assert " ± " in out
    lines = [line for line in out.splitlines() if line.startswith(("  kava ", "  plain "))]
    assert all(line.endswith("–") or line.rstrip()[-1].isdigit() for line in lines)  # of so few questions no paper says
    assert len(list((runs / "kava").glob("seed-*/evaluations/reasoning-svamp-pccot-step-2-limit-12"))) == 3


@pytest.mark.medium
def test_evaluate_whole_sets_with_papers_and_timings(run: RunCli, tmp_path: Path) -> None:
    line = '{"question": "What is 3 + 4?", "answer": "7"}\n{"question": "What is 3 - 9?", "answer": "-6"}\n'
    (tmp_path / "own.jsonl").write_text(line)
    flags = ("--protocol", "decimal", "--latency", 5, "--jacobi-iterations", 0)
    report = evaluate_json(run, "kava", "--tasks", tmp_path / "own.jsonl", *flags)
    (dataset,) = report["datasets"]
    assert (dataset["dataset"], dataset["questions"]) == ("own", 2)  # drop_negative is of training
    assert dataset["runs"][0]["papers"] == "not known"
    assert dataset["runs"][0]["seeds"] == [0, 1, 2]
    assert dataset["runs"][0]["accuracy"]["sd"] is not None
    for line in dataset["runs"]:  # only two questions are there
        assert (line["milliseconds"]["num_questions"], line["milliseconds"]["median"] > 0) == (2, True)
    (note,) = [text for text in report["notes"] if "differs from" in text]
    assert note.startswith("kava differs from kava table 6, 1b aug, in model.family, model.name, ")
    assert "train.steps" in note
    assert "seed" not in note


def test_decoding_for_takes_prompt_and_budget_of_the_protocol(runs: Path) -> None:
    kava, plain = (load_run(runs / name, torch.device("cpu")) for name in ("kava/seed-0", "plain"))
    path = str(REPO / "examples/own.jsonl")
    longest = max(len(row) for row in Path(path).read_text().splitlines())

    def decoding(run: Any, name: str | None, teacher: bool = False) -> tuple[int, int]:
        question_set = load_question_set(run, path, reasoning_run.choose_protocol(run.recipe, name))
        assert question_set.max_question_tokens < longest
        first: Any = question_set.source.batch(list(question_set.order[:1]), 0, 0)
        assert int(first.question_mask.sum()) == question_set.max_question_tokens
        decoding = reasoning_run.decoding_for(run, question_set, with_cot=teacher)
        return decoding.max_tokens, len(decoding.answer_prompt)

    assert reasoning_run.choose_protocol(kava.recipe, None).name == "pccot"
    assert decoding(kava, None) == decoding(kava, "decimal") == (10, 5)
    assert decoding(kava, "codi") == (256, 0)
    assert decoding(kava, "codi", teacher=True) == (256, 5)
    assert decoding(plain, "codi") == (256, 0)
    question_set = load_question_set(kava, path, reasoning_run.choose_protocol(kava.recipe, "codi"))
    long = replace(question_set, max_question_tokens=300)
    assert reasoning_run.decoding_for(kava, long).max_tokens == 400 - 300 - 4
    (warning,) = reasoning_run.budget_warnings(kava, long)
    assert "cut at 96 tokens, not 256" in warning
    assert not reasoning_run.budget_warnings(kava, question_set)


def test_inspect_decodes_as_evaluate_does(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, decodings = load_run(runs / "kava/seed-0", torch.device("cpu")), list[Any]()
    monkeypatch.setattr(inspect_run, "InspectedRun", lambda *args: decodings.append(args[2]))
    path = str(REPO / "examples/own.jsonl")
    for name in ("codi", "pccot"):
        protocol = reasoning_run.choose_protocol(run.recipe, name)
        alone, whole = (
            single_question(run, " Two  balls?", (), None, protocol),
            load_question_set(run, path, protocol, with_chains=True),
        )
        assert alone.examples[0].question == protocol.format_question(" Two  balls?")
        inspect_run.build_inspected_runs([run, run], [alone, whole])
        expected = reasoning_run.decoding_for(run, load_question_set(run, path, protocol))
        assert [(decoding.max_tokens, decoding.answer_prompt) for decoding in decodings[-2:]] == [
            (expected.max_tokens, expected.answer_prompt)
        ] * 2
    assert [len(decoding.answer_prompt) for decoding in decodings] == [0, 0, 5, 5]


def test_evaluate_refuses_two_files_of_one_name(run: RunCli, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        line = f'{{"question": "What is {folder}?", "answer": "7", "rationale": "no step"}}\n'
        (tmp_path / folder / "own.jsonl").write_text(line)
    a, b = tmp_path / "a/own.jsonl", tmp_path / "b/own.jsonl"
    code, out, err = run("plain", "--tasks", f"{a},{b}", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err == f"laconic: --tasks: {a} and {b} are both called own; rename one of the files\n"
    same = evaluate_json(run, "plain", "--tasks", f"{a},{tmp_path}/b/../a/own.jsonl")
    assert [dataset["questions"] for dataset in same["datasets"]] == [1]
    code, _, err = run("plain", "--tasks", b, "--device", "cpu")
    assert code == 73
    assert "remove it to evaluate again, or give your file another name" in err


def test_evaluate_loads_sets_once_and_times_greedily(
    run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"question": "What is {i} + 4?", "answer": "{i + 4}"}}\n' for i in range(70)]
    (tmp_path / "seventy.jsonl").write_text("".join(lines))
    real, reads, requests = reasoning_run.answer_questions, list[str](), list[tuple[int, float]]()

    def answer(method: Any, questions: Any, decoding: Any, *, with_cot: bool = False) -> AnswerBatch:
        requests.append((questions.B, decoding.sampling.temperature))
        return real(method, questions, replace(decoding, max_tokens=1), with_cot=with_cot)

    def read(run: Any, name: str, *rest: Any, **more: Any) -> Any:
        reads.append(name)
        return load_question_set(run, name, *rest, **more)

    monkeypatch.setattr(reasoning_run, "answer_questions", answer)
    monkeypatch.setattr(reasoning_suite, "load_question_set", read)
    on = str(tmp_path / "seventy.jsonl")
    report = evaluate_json(run, "plain", "--tasks", on, "--protocol", "codi-sampled", "--latency", 5)
    assert reads == [on]
    assert requests == [(64, 0.1), (6, 0.1), *[(1, 0.0)] * 15]
    (line,) = report["datasets"][0]["runs"]
    assert line["milliseconds"]["num_questions"] == 5
    assert any("timings are of greedy decoding" in text for text in report["notes"])


def test_evaluate_resumes_after_a_signal(run: RunCli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = reasoning_run.answer_questions, list[int]()

    def answer(method: Any, questions: Any, decoding: Any, *, with_cot: bool = False) -> AnswerBatch:
        calls.append(questions.B)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(method, questions, decoding, with_cot=with_cot)

    monkeypatch.setattr(reasoning_run, "answer_questions", answer)
    args = ("digits", "--tasks", "valid", "--batch-size", 5, "--limit", 15, "--device", "cpu")
    code, out, err = run(*args)
    assert (code, out) == (75, "")
    assert "SIGTERM: digits, valid: finished items are stored" in err
    part = runs / "digits/evaluations/.partial-reasoning-valid-last-digit-step-4-limit-15/units.jsonl"
    assert len(part.read_text().splitlines()) == 10
    assert run(*args)[0] == 0
    assert calls == [5] * 4  # the third batch was left, and answered again
    assert not part.parent.exists()


def test_evaluate_interrupted_while_timing(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def latencies(*rest: object, **more: object) -> None:
        raise SignalInterruptError

    monkeypatch.setattr(reasoning_suite, "measure_latencies", latencies)
    monkeypatch.setattr(StopSignal, "signal_name", "SIGINT")
    check_refused(run("digits", "--latency", 3, "--device", "cpu"), 75, "SIGINT: interrupted while timing test")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "no run given; laconic evaluate RUN"),
        (("gone",), 66, "gone: no such local folder"),
        (("kava", "--tasks", "gone.jsonl"), 66, "no file gone.jsonl; give a file, or a task"),
        (
            ("digits", "--jacobi-iterations", "two"),
            2,
            "--jacobi-iterations two: expected comma-separated integers, for example 1,2",
        ),
        (("digits", "--jacobi-tolerance", "0"), 2, "--jacobi-tolerance 0: expected numbers above 0"),
        (("digits", "--tasks", ","), 2, "--tasks: empty"),
        (("digits", "--protocol", "decimal", "--tolerance", "small"), 2, "--tolerance: small is not a number"),
        (("digits", "--protocol", "codi", "--tolerance", "0.1"), 2, "--tolerance: requires --protocol decimal"),
        (("gone", "--protocol", "decimal", "--tolerance", "-1"), 2, "--tolerance -1: expected 0, or a number"),
        (("digits", "--tasks", "gsm8k"), 2, "trained on generated digits"),
        (("digits", "--protocol", "pccot"), 2, "--protocol pccot cannot judge digits"),
        (("kava", "digits"), 2, "last digit and pccot"),
        (("plain", "--with-cot"), 2, "--with-cot: no run is trained"),
        (("plain", "--jacobi-iterations", "1"), 2, "--jacobi-iterations 1: plain has no Jacobi iterations"),
        (("kava",), 66, "test: the recipe of kava/seed-0 has no data.test"),
        (("kava", "--tasks", "levels"), 2, "--tasks levels: for runs of methods hope and lm; the loss of a model is"),
        (("kava", "--tasks", "svanp"), 66, "did you mean svamp?"),
        (("kava", "--tasks", "valid", "--checkpoint", "last"), 2, "--checkpoint last: not available in kava/seed-0"),
        (("digits", "--checkpoint", "best"), 2, "--checkpoint best: not available in digits"),
        (("digits/steps/step-000002",), 66, "step-000002 is a checkpoint; give its run "),
        (("kava", "--tasks", "gsm8k:dev", "--data-dir", "."), 66, "gsm8k has no split dev"),
    ],
)
def test_evaluate_refuses_in_one_line(run: RunCli, args: tuple[str, ...], code: int, message: str) -> None:
    ended, out, err = run(*args, *(("--device", "cpu") if args else ()))
    assert (ended, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_evaluate_refuses_a_protocol_that_cannot_judge_the_data(run: RunCli) -> None:
    code, out, err = run("kava", "--tasks", "prosqa", "--protocol", "codi", "--data-dir", shared_dir() / "data")
    assert (code, out, err.count("\n")) == (66, "", 1)
    assert "protocol codi expects a number" in err


def test_resolve_step_best_is_by_validation(run: RunCli, runs: Path) -> None:
    validations = json.loads((runs / "kava/seed-0/validations.json").read_text())["validations"]
    best = max(validations, key=lambda step: (validations[step]["accuracy"], -int(step)))
    assert resolve_step(runs / "kava/seed-0", "best") == int(best)
    assert resolve_step(runs / "kava/seed-0", "1") == 1
    assert resolve_step(runs / "kava/seed-0", "latest") == 2


def test_evaluate_times_in_one_process(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_refused(run("digits", "--latency", 5), 2, "--latency: requires a single process")


@pytest.mark.medium
@pytest.mark.loopback
def test_evaluate_on_two_ranks_gives_the_records_of_one(run: RunCli, runs: Path, tmp_path: Path) -> None:
    from tests.training.multi_rank import run_ranks_ok

    (runs / "two").mkdir()
    for name in ("recipe.toml", "steps"):
        (runs / "two" / name).symlink_to(runs / "digits" / name)

    def command() -> int:
        sys.argv = ["laconic", "evaluate", "two", "--batch-size", "4", "--device", "cpu", "--format", "json"]
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    assert run_ranks_ok(tmp_path, command) == [0, 0]
    assert run("digits", "--batch-size", "4", "--device", "cpu")[0] == 0
    one, two = (reasoning_run.load_result(runs / name, "test") for name in ("digits", "two"))
    assert one is not None
    assert one == two
