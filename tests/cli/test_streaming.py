"""Runs that learn while they read, and a plain one beside them: trained a step, evaluated on streams, reported."""

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import laconic
from laconic.evaluation.class_incremental import run as class_incremental
from laconic.evaluation.class_incremental.run import ClassIncrementalPlan
from laconic.evaluation.streams.report import load_metric_series
from tests.conftest import RunCli, call_cli, check_refused
from tests.evaluation.pages import check_page, leave_out_images

pytestmark = pytest.mark.usefixtures("unchecked")
RECIPE = """method = "hope"
[model]
family = "llama"
tokenizer = "{words}"
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[mixer]
kind = "self_modifying"
num_heads = 1
head_dim = 8
[cms]
chunk_sizes = [8, 16]
inner_objective = "associative"
[inner_loop]
allow_untrained_level = true
[data]
{data}
[train]
trainable = "full"
steps = 2
batch_size = 2
"""
TEXT = 'source = "text"\npath = "books.jsonl"\n[data.text]\nrow_tokens = 32\nsegment_tokens = 16'
PAIRS = 'source = "mqar"\nmqar = { num_pairs = [2], row_tokens = 8, test_rows = 6 }'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of books, a plain one of the same, one of pairs, and a plain one of pairs."""
    folder = tmp_path_factory.mktemp("streams")
    rows = [{"book": f"b{b}", "text": f"Book {b}. " + "It stands here. " * 14} for b in range(6)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "books.toml").write_text(RECIPE.format(words="bytes", data=TEXT))
    (folder / "pairs.toml").write_text(RECIPE.format(words="mqar", data=PAIRS))
    plain = ("method=lm",)
    runs = (("books", "hope", ()), ("books", "lm", plain), ("pairs", "pairs", ()), ("pairs", "lm-pairs", plain))
    for recipe, name, keys in runs:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert call_cli("train", f"{recipe}.toml", "--out", name, *keys) == 0
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, place: Path) -> RunCli:
    """Run a command in the directory of the runs."""
    monkeypatch.chdir(place)
    return run_cli


@pytest.mark.medium
def test_generate_continues_with_a_run_of_method_lm(run: RunCli) -> None:
    code, out, err = run("generate", "lm", "Book", "--max-tokens", "5")
    assert code == 0, err
    model = laconic.load("lm")
    config = laconic.GenerationConfig(max_tokens=5)
    assert out == "Book" + model.generate(["Book"], config=config)[0].text + "\n"


@pytest.mark.medium
def test_evaluate_streams_stores_and_reports(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("evaluate", "hope", "lm", "--tasks", "test,books", "--limit", "5")
    assert code == 0, err
    assert re.search(r"hope, books: after (saves|loses) \d", out)
    assert "nats per token against fresh on one item" in out
    assert "ppl (test)" in out
    assert {path.name for path in (place / "hope" / "evaluations").iterdir()} == {
        "lock", "streams-test-ppl-step-2-limit-5", "streams-books-step-2-limit-5",
    }  # fmt: skip
    monkeypatch.setattr("laconic.evaluation.streams.texts.score_tokens", None)  # nothing is read twice
    monkeypatch.setattr("laconic.evaluation.streams.texts.evaluate_book", None)
    report = json.loads(run("evaluate", "hope", "lm", "--tasks", "test,books", "--limit", "5", "--format", "json")[1])
    ways = {(line["run"], line["task"]): set(line["conditions"]) for line in report["streams"]}
    assert ways[("hope", "test")] == {"learn, carry", "learn, reset", "frozen, carry", "frozen, reset"}
    assert ways[("lm", "test")] == {"lm"}
    assert ways[("lm", "books")] == {"fresh", "after"}, "there is one book only"
    monkeypatch.undo()
    monkeypatch.chdir(place)
    code, out, _ = run("evaluate", "hope", "--tasks", "levels", "--limit", "2")
    assert code == 0
    for part in (
        "without chunk 8",
        "without levels",
        "without decay",
        "without erase",
        "static v",
        "all levels, frozen",
    ):
        assert re.search(rf"hope, levels: {part} (loses|saves) \d", out)
    assert run("evaluate", "pairs")[0] == 0
    leave_out_images(monkeypatch, only_dark=True)
    assert run("report", "hope", "lm", "pairs", "--out", "page.html")[0] == 0
    page = (place / "page.html").read_text()
    check_page(page)
    for text in ("what is learned while reading", "NLL by position", "Recall by gap", "Updates of each level",
                 "Half-life of what is written", "hope, memory half life high", "hope, state bytes",
                 "Shares of writes capped",
                 "hope, projections capped", "Rank of level changes", "Size of the state", "Stream levels",
                 "without chunk 16", "14.39 / 10.08 / 58.04", "15.11 / 11.63 / 57.23",
                 "hope, books: after ", "but they forget too"):  # fmt: skip
        assert text in page, text
    assert "hope, grad" not in page


def test_evaluate_a_language_model_of_a_synthetic_stream(run: RunCli) -> None:
    code, out, err = run("evaluate", "lm-pairs", "--format", "json")
    assert code == 0, err
    assert [(line["stream"], list(line["conditions"])) for line in json.loads(out)["streams"]] == [("mqar", ["lm"])]


@pytest.mark.medium
def test_report_of_a_run_in_progress_leaves_out_the_partial_line(place: Path, tmp_path: Path) -> None:
    whole = load_metric_series(place / "hope")
    assert whole
    text = (place / "hope" / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "loss"')
    assert load_metric_series(tmp_path) == whole


@pytest.mark.parametrize(
    ("code", "message", "args"),
    [
        (2, "--tasks x: hope has the tasks test, valid, needle, ppl, books, levels, ", ["hope", "--tasks", "x"]),
        (2, "--tasks mqar: hope has the tasks", ["hope", "--tasks", "mqar"]),
        (2, "--tasks ppl: pairs has the tasks test, valid, mqar, clinc150", ["pairs", "--tasks", "clinc150,ppl"]),
        (2, "--tasks levels: lm has the tasks test, valid, needle, ppl, books, clinc150", ["lm", "--tasks", "levels"]),
        (2, "have test, valid, excerpt", ["lm", "--tasks", "x"]),
        (2, "lm-pairs: data.source mqar has no segments", ["lm", "lm-pairs"]),
        (2, "--data-dir: only for clinc150, banking77", ["hope", "--data-dir", "."]),
        (2, "--latency: only for runs that answer questions", ["hope", "--latency", "5"]),
        (66, "every 5th is held out", ["hope", "--tasks", "books", "--limit", "2"]),
    ],
)  # fmt: skip
def test_evaluate_streams_refuses_in_one_line(run: RunCli, code: int, message: str, args: list[str]) -> None:
    ended, out, err = run("evaluate", *args)
    assert (ended, out) == (code, ""), err
    assert message in err.strip().splitlines()[-1]


@pytest.mark.medium
def test_evaluate_classes_resumes_after_a_signal(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"text": f"{part} {label} {i}", "label": label, "split": part}
        for part, n in (("train", 3), ("test", 1))
        for label in map(str, range(22))
        for i in range(n)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args = ("evaluate", "lm", "--tasks", "banking77", "--data-dir", "rows.jsonl", "--shots", "2", "--limit", "1")
    run_unit, units = ClassIncrementalPlan.run_unit, list[int]()

    def struck(plan: ClassIncrementalPlan, unit: int, log: Any) -> Any:
        units.append(unit)
        if len(units) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_unit(plan, unit, log)

    monkeypatch.setattr(ClassIncrementalPlan, "run_unit", struck)
    monkeypatch.setattr(class_incremental, "METHODS", ("ncm", "finetune"))
    two_orders = partial(class_incremental.plan_class_incremental, orders=(0, 1))
    monkeypatch.setattr(class_incremental, "plan_class_incremental", two_orders)
    check_refused(run(*args), 75, "SIGTERM: lm, banking77: finished items are stored")
    code, out, err = run(*args, "--format", "json")
    assert code == 0, err
    (report,) = json.loads(out)["classes"]
    assert len(units) == 1 + len(report["methods"]) * len(report["orders"])  # none twice but the one that was cut off
    assert report["train_examples"] == 44
    again = run(*args, "--format", "json")
    assert (again[0], json.loads(again[1])) == (0, json.loads(out))
    folder = place / "lm" / "evaluations" / "class_incremental-banking77-step-2-limit-1-shots-2"
    assert json.loads((folder / "result.json").read_text())["figures"] == {
        k: v for k, v in report.items() if k not in ("run", "seed")
    }
    assert run("report", "lm", "--out", "classes.html")[0] == 0
    assert "Classes banking77: lm, seed 0" in (place / "classes.html").read_text()
    (place / "rows.jsonl").write_text((place / "rows.jsonl").read_text().replace("test 0 0", "another text"))
    check_refused(run(*args), 73, "is the evaluation of another checkpoint or of other data")
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("--shots: only for", ["--shots", "3"]),
        ("--shots 0: must be at least 1", ["--shots", "0", "--tasks", "clinc150"]),
    ],
)
def test_evaluate_refuses_shots(run: RunCli, message: str, args: list[str]) -> None:
    check_refused(run("evaluate", "lm", *args), 2, message)


def test_inspect_refuses_a_run_without_latent_thoughts(run: RunCli) -> None:
    reason = "has no latents; give a run of codi, pccot, kava or coconut"
    for question in ((), ("What stands here?",)):
        ended, _, err = run("inspect", "hope", *question, "--device", "cpu")
        assert (ended, err) == (2, f"laconic: hope: method hope {reason}\n")


def test_evaluate_streams_refuses_another_method(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = place / "thinks"
    fake.mkdir()
    (fake / "recipe.toml").write_text(
        'method = "cot"\n[model]\nfamily = "llama"\ntokenizer = "digits"\nhidden_size = 16\nnum_hidden_layers = 1\n'
        'num_attention_heads = 2\n[data]\nsource = "digits"\nformat = "digits"\n[train]\nsteps = 1\nbatch_size = 2\n'
    )
    assert run("train", "thinks/recipe.toml", "--out", "digits")[0] == 0
    ended, _, err = run("evaluate", "digits", "hope", "--tasks", "test")
    assert ended == 2
    assert "digits: method cot has no streams; evaluate it by itself" in err
