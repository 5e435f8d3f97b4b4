"""`laconic evaluate` and `laconic report` for runs that read documents, as a user calls them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from laconic.cli.commands.report import ReportCommand
from laconic.cli.commands.train import TrainCommand
from laconic.errors import InputError, UsageError
from laconic.evaluation.compression import context_qa
from laconic.evaluation.compression import run as compression_run
from laconic.evaluation.compression.suite import detect_kind
from laconic.evaluation.results_store import UNITS_FILE, load_items
from tests.conftest import REPO, RunCli
from tests.evaluation.pages import leave_out_images
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE, TINY_RECIPE

RECALL = """method = "autocompressor"
[model]
family = "llama"
tokenizer = "recall"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[compression]
length_policy = "stop_head"
max_vectors = 3
summary_init = "normal"
[stop_head]
length_cost = 0.1
[data]
source = "recall"
recall = { train_rows = 40, test_rows = 12, num_facts = [1, 2] }
[train]
steps = 2
batch_size = 4
"""
TEXT = (
    *("method=autocompressor", "model.max_position_embeddings=512", "compression.length_policy=nested_dropout"),
    *("compression.max_vectors=4", "compression.allowed_lengths=[1,4]", "compression.summary_init=normal"),
    *("data.text.row_tokens=128", "data.text.segment_tokens=64", "data.text.held_out_fraction=0.3"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on fact recall, two seeds on text with a language-model baseline, and one that answers questions."""
    folder = tmp_path_factory.mktemp("runs")
    books = [{"book": f"book {i}", "text": " ".join(f"{i * n * n}" for n in range(200))} for i in range(4)]
    (folder / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    for name, text in (("facts", RECALL), ("text", TINY_DOCUMENT_RECIPE), ("digits", TINY_RECIPE)):
        (folder / f"{name}.toml").write_text(text)
    assert TrainCommand(str(folder / "facts.toml"), out=folder / "facts", device="cpu").run() == 0
    assert TrainCommand(str(folder / "text.toml"), TEXT, out=folder / "books", num_seeds=2, device="cpu").run() == 0
    assert TrainCommand(str(folder / "text.toml"), (*TEXT, "method=lm"), out=folder / "lm", device="cpu").run() == 0
    assert TrainCommand(str(folder / "digits.toml"), out=folder / "digits", device="cpu").run() == 0
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, runs: Path) -> RunCli:
    """Run `laconic evaluate` in the folder of the runs."""
    monkeypatch.chdir(runs)
    return lambda *args: run_cli("evaluate", *args, "--device", "cpu")


def evaluate_json(run: RunCli, *args: object) -> list[dict[str, Any]]:
    code, out, err = run(*args, "--format", "json")
    assert (code, out.count("\n")) == (0, 1), err
    return json.loads(out)["results"]


@pytest.mark.medium
def test_evaluate_fact_recall_stores_and_reuses_results(
    run: RunCli, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = evaluate_json(run, "facts")
    assert [gain["condition"] for gain in result["conditions"]] == [
        *("none", "compressed", "truncated", "other text", "full", "untrained none", "untrained", "oracle length"),
        *("n = 1", "end, n = 1", "n = 2", "end, n = 2", "n = 3", "end, n = 3"),
        *("quantile 0.1", "quantile 0.25", "quantile 0.75", "quantile 0.9", "sampled", "soft"),
    ]
    assert (result["dataset"], result["documents"], result["length_policy"]) == ("test", 12, "stop_head")
    (result_file,) = (runs / "facts/evaluations").glob("*/result.json")
    documents = load_items(result_file.parent)
    assert {document.shared["num_facts"] for document in documents} == {1, 2}
    assert all(sum(document.shared["scored_tokens"]) == 8 for document in documents)
    nll = {gain["condition"]: gain["nll"]["mean"] for gain in result["conditions"]}
    for name in ("none", "n = 2", "soft"):
        assert nll[name] == pytest.approx(sum(sum(d.conditions[name]["nll"]) / 8 for d in documents) / 12)
    assert [d.conditions["n = 2"]["vectors_per_segment"] for d in documents] == [[2]] * 12
    expected = [d.conditions["soft"]["expected_lengths"][0] for d in documents]
    assert all(0 < length <= 3 for length in expected)
    assert result["gap"]["expected_length"] == pytest.approx(sum(expected) / 12)
    monkeypatch.setattr(compression_run, "evaluate_batch", None)  # evaluating again would fail
    assert evaluate_json(run, "facts") == [result]
    code, out, _ = run("facts")
    assert code == 0
    for text in ("truncated", "facts, compressed: F=1 ", "correlation of N with F", "soft minus hard: "):
        assert text in out, text


def test_evaluate_keeps_finished_documents_after_a_signal(
    run: RunCli, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression_run, "BATCH_TOKENS", 5 * (16 + 16))
    evaluate_batch = compression_run.evaluate_batch

    def kill_on_second_call(*args: Any) -> Any:
        monkeypatch.setattr(compression_run, "evaluate_batch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        return evaluate_batch(*args)

    monkeypatch.setattr(compression_run, "evaluate_batch", kill_on_second_call)
    code, _, err = run("facts", "--limit", 9)
    assert code == 75
    assert "SIGTERM: facts, test: finished items are stored" in err
    (partial,) = (runs / "facts/evaluations").glob(".partial-*")
    assert len((partial / UNITS_FILE).read_text().splitlines()) == 5


@pytest.mark.medium
def test_evaluate_tails_and_excerpts_of_held_out_books(run: RunCli) -> None:
    results = evaluate_json(run, "books", "lm", "--tasks", "test,excerpt", "--limit", 3)
    assert [result["dataset"] for result in results if result["run"] == "books"] == [
        *("test-16", "test-64", "test-128", "test-192"),
        *("test-excerpt-64", "test-excerpt-128", "test-excerpt-192"),
    ]
    assert {result["documents"] for result in results} == {3}
    books, baseline = (
        next(result for result in results if (result["run"], result["dataset"]) == (name, "test-64"))
        for name in ("books", "lm")
    )
    assert (books["seeds"], baseline["seeds"]) == ([0, 1], [0])
    sizes = {gain["condition"]: gain["context_size"] for gain in books["conditions"]}
    assert 1 <= sizes.pop("oracle length") <= 4
    assert sizes == {
        "none": 0,
        "compressed": 4,
        "truncated": 4,
        "other text": 4,
        "full": 64,
        "untrained none": 0,
        "untrained": 4,
        "n = 1": 1,
        "end, n = 1": 1,
        "n = 4": 4,
        "end, n = 4": 4,
    }
    names = [gain["condition"] for gain in baseline["conditions"]]
    assert names == ["none", *(f"end {2**i}" for i in range(6)), "full"]


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (("facts", "digits"), 2, "facts reads documents, and others answer questions"),
        (("facts", "--tasks", "gsm8k"), 2, "--tasks gsm8k"),
        (("facts", "--with-cot"), 2, "--with-cot"),
        (("facts", "--tasks", "excerpt"), 66, "fact recall"),
        (("facts", "--tasks", "x.jsonl"), 66, "no file x.jsonl; give a file, or a task"),
        (("lm", "--tasks", str(REPO / "examples/own.jsonl")), 2, "has no memory"),
    ],
)
def test_evaluate_rejects_tasks_and_flags_that_do_not_fit(
    run: RunCli, args: tuple[str, ...], exit_code: int, message: str
) -> None:
    code, out, err = run(*args)
    assert (code, out) == (exit_code, "")
    assert message in err


def test_evaluate_refuses_excerpts_longer_than_every_context(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_run, "EXCERPT_TOKENS", 193)
    code, out, err = run("lm", "--tasks", "excerpt", "--limit", 1)
    assert (code, out) == (66, "")
    assert "excerpt: no context of up to 192 tokens holds an excerpt of 193 tokens and fits the run" in err


def write_files(folder: Path) -> tuple[str, str]:
    """Questions about two contexts, and labelled texts."""
    rows = [{"context": f"{c} is here", "question": "who?", "answer": [c], "max_new_tokens": 2} for c in "ab"]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"t{i}", "label": "xy"[i % 2]} for i in range(12)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(folder / "questions.jsonl"), str(folder / "labelled.jsonl")


@pytest.mark.medium
def test_evaluate_and_report_files_of_questions_and_labels(
    run: RunCli, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.evaluation.compression.demonstrations.NUM_ORDERS", 1)
    monkeypatch.setattr("laconic.evaluation.compression.demonstrations.TEXT_DEMO_TOKENS", ())
    leave_out_images(monkeypatch, only_dark=True)
    questions, labelled = write_files(tmp_path)
    code, out, err = run("books/seed-0", "--tasks", f"{questions},{labelled}", "--limit", 2, "--format", "json")
    assert code == 0, err
    answers, labels = json.loads(out)["files"]
    assert (answers["kind"], answers["items"], answers["contexts"]) == ("answers", 2, 2)
    assert [score["condition"] for score in answers["conditions"]] == ["none", "compressed", "truncated", "full"]
    assert (labels["kind"], labels["items"], labels["conditions"][0]["condition"]) == ("labels", 2, "zero-shot")
    assert len(labels["conditions"][0]["accuracies"]) == 1
    code, out, _ = run("books/seed-0", "--tasks", questions)
    assert code == 0
    assert out.count("  expected: ") == 2
    code, out, _ = run("books/seed-0", "--tasks", labelled, "--limit", 2)
    assert "majority baseline " in out
    assert ReportCommand(("books/seed-0",), Path("files.html")).run() == 0
    text = (runs / "files.html").read_text()
    for title in ("In-context classification: labelled", "question answering: questions", "answered by"):
        assert title in text, title
    assert run("books/seed-1", "--tasks", questions, "--limit", 1)[0] == 0
    with pytest.raises(InputError, match="different items of questions"):
        ReportCommand(("books",), Path("none.html")).run()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('{"text": "a", "label": "context"}', "labels"),
        ('{"context": "the \\"text\\"", "question": "who?"}', "answers"),
    ],
)
def test_detect_kind_parses_the_first_row(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line)
    assert detect_kind(tmp_path / "rows.jsonl") == kind


def test_evaluate_files_keeps_finished_items_after_a_signal(
    run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, _ = write_files(tmp_path)
    monkeypatch.setattr(context_qa, "answer_question", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code, _, err = run("books/seed-1", "--tasks", questions)
    assert code == 75
    assert "questions: finished items are stored" in err


@pytest.mark.medium
def test_report_of_stored_results(run: RunCli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_images(monkeypatch, only_dark=True)
    with pytest.raises(InputError, match="digits"):
        ReportCommand(("digits",), Path("none.html")).run()
    with pytest.raises(UsageError, match="laconic report RUN"):
        ReportCommand(()).run()
    assert run("facts")[0] == run("books/seed-0", "lm", "--limit", 3)[0] == 0
    assert ReportCommand(("facts", "books/seed-0", "lm"), Path("page.html")).run() == 0
    text = (runs / "page.html").read_text()
    for expected in ("test: 12 documents", "test-64: 3 documents", "Recall and soft reading"):
        assert expected in text, expected
