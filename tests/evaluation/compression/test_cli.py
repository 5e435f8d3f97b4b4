"""`laconic evaluate` of runs that read documents, as a user gives it."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laconic import cli
from laconic.cli.report import ReportCommand
from laconic.cli.train import TrainCommand
from laconic.errors import InputError, UsageError
from laconic.evaluation import line_store as results_store
from laconic.evaluation.compression import cli_files
from laconic.evaluation.compression import cli_runs as compression_cli_runs
from laconic.evaluation.compression import evaluate as compression_evaluate
from laconic.evaluation.compression import run as compression_run
from tests.verbs.test_train import TINY

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
TEXT = """method = "autocompressor"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 512
[compression]
length_policy = "nested_dropout"
max_vectors = 4
allowed_lengths = [1, 4]
summary_init = "normal"
[data]
source = "text"
path = "books.jsonl"
text = { row_tokens = 128, segment_tokens = 64, segment_lengths = "fixed", segments_per_window = 2, segment_overlap = 0, held_out_fraction = 0.3 }
[train]
steps = 1
batch_size = 2
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on recall, two seeds on a few sentences with a plain one beside them, and one that answers questions."""
    folder = tmp_path_factory.mktemp("runs")
    books = [{"book": f"book {i}", "text": " ".join(f"{i * n * n}" for n in range(200))} for i in range(4)]
    (folder / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    for name, text in (("facts", RECALL), ("text", TEXT), ("digits", TINY)):
        (folder / f"{name}.toml").write_text(text)
    assert TrainCommand(str(folder / "facts.toml"), out=folder / "facts", device="cpu").run() == 0
    assert TrainCommand(str(folder / "text.toml"), out=folder / "books", num_seeds=2, device="cpu").run() == 0
    assert TrainCommand(str(folder / "text.toml"), ("method=plain",), out=folder / "lm", device="cpu").run() == 0
    assert TrainCommand(str(folder / "digits.toml"), out=folder / "digits", device="cpu").run() == 0
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: Path) -> Run:
    """A command in the folder of the runs: its exit code, standard output, standard error."""
    monkeypatch.chdir(runs)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["laconic", "evaluate", *map(str, args), "--device", "cpu"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return call


def told(run: Run, *args: object) -> list[dict[str, Any]]:
    code, out, err = run(*args, "--format", "json")
    assert (code, out.count("\n")) == (0, 1), err
    return json.loads(out)["lines"]


def test_recall_in_every_way_is_kept_and_read_again(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = told(run, "facts")
    ways = [way["way"] for way in line["ways"]]
    assert ways[:7] == ["none", "compressed", "truncated", "full", "untrained none", "untrained", "oracle length"]
    assert ways[7:] == [
        "n = 1", "end, n = 1", "n = 2", "end, n = 2", "n = 3", "end, n = 3", "quantile 0.1", "quantile 0.25",
        "quantile 0.75", "quantile 0.9", "sampled", "soft",
    ]  # fmt: skip
    assert (line["set"], line["documents"], line["length"]) == ("test", 12, "stop")
    folder = runs / "facts/evaluations/test-reading-step-2"
    rows = [compression_evaluate.parse_result(text) for text in results_store.read_lines(folder)]
    assert {row.num_facts for row in rows} == {1, 2}
    assert all(sum(row.scored_tokens) == 8 for row in rows)
    nats = {way["way"]: way["nats"]["mean"] for way in line["ways"]}
    for way in ("none", "n = 2", "soft"):
        assert nats[way] == pytest.approx(sum(sum(row.conditions[way].nll) / 8 for row in rows) / 12)
    assert {row.conditions["n = 2"].vectors_per_segment for row in rows} == {(2,)}
    assert all(0 < row.conditions["soft"].expected_lengths[0] <= 3 for row in rows)
    assert line["gap"]["expected"] == pytest.approx(
        sum(row.conditions["soft"].expected_lengths[0] for row in rows) / 12
    )
    monkeypatch.setattr(compression_evaluate, "evaluate_batch", None)  # whoever reads again fails
    assert told(run, "facts") == [line]
    code, out, _ = run("facts")
    assert code == 0
    for text in ("truncated", "facts, compressed: F=1 ", "correlation of N with F", "soft less hard: "):
        assert text in out, text


def test_a_signal_ends_it_and_what_is_read_is_kept(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_run, "BATCH_TOKENS", 5 * (16 + 16))
    read = compression_evaluate.evaluate_batch

    def second(*given: Any) -> Any:
        monkeypatch.setattr(compression_evaluate, "evaluate_batch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        return read(*given)

    monkeypatch.setattr(compression_evaluate, "evaluate_batch", second)
    code, _, err = run("facts", "--limit", 9)
    assert code == 75
    assert "SIGTERM: facts, test: what is read is kept; run the same command again to go on" in err
    assert (
        len((runs / "facts/evaluations/.part-test-reading-step-2-first-9/answers.jsonl").read_text().splitlines()) == 5
    )


def test_tails_and_excerpts_of_held_out_books(run: Run) -> None:
    lines = told(run, "books", "plain", "--tasks", "test,excerpt", "--limit", 3)
    sets = [line["set"] for line in lines if line["run"] == "books"]
    assert sets == [
        "test-16",
        "test-64",
        "test-128",
        "test-192",
        "test-excerpt-64",
        "test-excerpt-128",
        "test-excerpt-192",
    ]
    assert {line["documents"] for line in lines} == {3}
    books, plain = (
        [line for line in lines if line["run"] == name and line["set"] == "test-64"] for name in ("books", "plain")
    )
    assert (books[0]["seeds"], plain[0]["seeds"]) == ([0, 1], [0])
    held = {way["way"]: way["held"] for way in books[0]["ways"]}
    assert 1 <= held.pop("oracle length") <= 4
    assert held == {"none": 0, "compressed": 4, "truncated": 4, "full": 64, "untrained none": 0, "untrained": 4,
                    "full-tuned": 64, "n = 1": 1, "end, n = 1": 1, "n = 4": 4, "end, n = 4": 4}  # fmt: skip
    (tuned,) = (way for way in books[0]["ways"] if way["way"] == "full-tuned")
    assert tuned["nats"]["mean"] == pytest.approx(plain[0]["ways"][-1]["nats"]["mean"])
    assert [way["way"] for way in plain[0]["ways"]] == ["none", *(f"end {2**i}" for i in range(6)), "full"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("facts", "digits"), "facts reads documents, digits answers questions; evaluate them by themselves"),
        (("facts", "--tasks", "gsm8k"), "--tasks gsm8k: of runs that read documents the sets are"),
        (("facts", "--with-cot"), "--with-cot: of runs that answer questions; these read documents, leave it out"),
    ],
)
def test_what_is_not_for_documents_is_refused(run: Run, asked: tuple[str, ...], said: str) -> None:
    code, out, err = run(*asked)
    assert (code, out) == (2, "")
    assert said in err


def files(folder: Path) -> tuple[str, str]:
    """Questions about two contexts, and labelled texts."""
    rows = [{"context": f"{c} is here", "question": "who?", "answer": [c], "max_new_tokens": 2} for c in "ab"]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"t{i}", "label": "xy"[i % 2]} for i in range(12)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(folder / "asked.jsonl"), str(folder / "labelled.jsonl")


def test_files_of_questions_and_of_labels(
    run: Run, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.evaluation.compression.context_qa_run.NUM_ORDERS", 1)
    monkeypatch.setattr("laconic.evaluation.compression.context_qa_run.TEXT_DEMO_TOKENS", ())
    asked, labelled = files(tmp_path)
    code, out, err = run("books/seed-0", "--tasks", f"{asked},{labelled}", "--limit", 2, "--format", "json")
    assert code == 0, err
    answers, labels = json.loads(out)["files"]
    assert (answers["kind"], answers["rows"], answers["contexts"]) == ("answers", 2, 2)
    assert [each["way"] for each in answers["ways"]] == ["none", "compressed", "truncated", "full"]
    assert (labels["kind"], labels["rows"], labels["ways"][0]["way"]) == ("labels", 2, "zero-shot")
    assert len(labels["ways"][0]["each"]) == 1
    code, out, _ = run("books/seed-0", "--tasks", asked, "--query-aware")
    assert code == 0
    assert "2 rows, the question stood before the context" in out
    code, out, _ = run("books/seed-0", "--tasks", labelled, "--limit", 2)
    assert "majority floor " in out
    monkeypatch.setattr(sys, "argv", ["laconic", "report", "books/seed-0", "--out", "files.html"])
    with pytest.raises(SystemExit):
        cli.main()
    text = (runs / "files.html").read_text()
    for title in ("Labels behind demonstrations: labelled", "contexts: asked", "when that was compressed"):
        assert title in text, title
    assert run("books/seed-1", "--tasks", asked, "--limit", 1)[0] == 0
    with pytest.raises(
        InputError, match="books: its seeds were asked other rows of asked; evaluate them in one command"
    ):
        cli_files.load_file_results({"books": "books"})
    shutil.rmtree(runs / "books/seed-1/evaluations/asked-answers-step-1-first-1")
    kept = {path.name for path in (runs / "books/seed-0/evaluations").iterdir()}
    assert {"asked-answers-step-1-query-aware", "labelled-labels-step-1-first-2"} <= kept


def test_a_signal_amid_a_file_keeps_what_is_asked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = files(tmp_path)
    monkeypatch.setattr(cli_files.ContextQA, "run_items", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code, _, err = run("books/seed-1", "--tasks", asked)
    assert code == 75
    assert "asked.jsonl: what is asked is kept; the same command goes on" in err


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("plain", "--tasks", "x.jsonl"), 2, "a plain model has no memory to be asked; give runs of autocompressor"),
        (
            ("facts", "--tasks", "x.jsonl"),
            66,
            "--tasks x.jsonl: no such file; give one of rows, or test, valid, excerpt",
        ),
        (("digits", "--query-aware"), 2, "--query-aware: of runs that read documents; these answer questions"),
    ],
)
def test_files_that_cannot_be_asked(run: Run, args: tuple[str, ...], code: int, said: str) -> None:
    found, _, err = run(*args)
    assert found == code
    assert said in err


def test_recall_has_no_excerpt(run: Run) -> None:
    code, _, err = run("facts", "--tasks", "excerpt")
    assert code == 66
    assert "excerpt: the recall task is no text to take one from; ask for test" in err


def test_a_page_of_what_is_kept(
    run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["laconic", "report", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().err

    assert report("digits") == (
        66, "laconic: digits: nothing read of documents is kept; run laconic evaluate on them first\n"
    )  # fmt: skip
    assert report()[0] == 2
    assert run("facts")[0] == run("books", "plain", "--limit", 3)[0] == 0
    assert report("facts", "books", "plain", "--out", "page.html")[0] == 0
    text = (runs / "page.html").read_text()
    for asked in ("test: 12 documents", "test-64: 3 documents", "Recall by the number of facts", "full-tuned"):
        assert asked in text, asked
    folder = runs / "books/seed-1/evaluations"
    for each in folder.glob("test-16-*"):
        each.rename(folder / "aside")
    (runs / "books.toml").write_text(TEXT)
    monkeypatch.setattr(
        compression_cli_runs, "find_latest_folders", lambda run: {"x": next((run / "evaluations").glob("test-64-*"))}
    )
    monkeypatch.setattr(results_store, "read_lines", lambda f: [ROW.replace("ID", f.parent.parent.name)])
    said = "its seeds read other documents of x; evaluate them in one command"
    assert said in report("books")[1]


def test_no_run_is_no_report() -> None:
    with pytest.raises(UsageError, match="no run given; laconic report RUN"):
        ReportCommand(()).run()


ROW = '{"facts":null,"id":"ID","scored":[1],"ways":[]}'
