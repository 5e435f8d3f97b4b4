"""Runs that learn while they read, and a plain one beside them: trained a step, evaluated on streams, reported."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from laconic import cli
from laconic.evaluation.class_incremental.run import ClassIncrementalPlan
from laconic.evaluation.line_store import commit_results, load_partial, partial_folder
from laconic.evaluation.streams import paper_tables as reported_learning
from laconic.evaluation.streams.paper_tables import reproduction_verdicts
from laconic.evaluation.report.verdicts import FIGURE_ONLY, NOT_REPRODUCED, NOT_RUN, REPRODUCED
from laconic.evaluation.streams.cli_runs import kept_found
from laconic.evaluation.streams.evaluate import StreamItemResult, StreamRecord
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.table import StreamResult
from tests.conftest import RunCli

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
TEXT = 'kind = "text"\npath = "books.jsonl"\n[data.text]\nrow_tokens = 32\nsegment_tokens = 16'
PAIRS = 'kind = "mqar"\nmqar = { pairs = [2], length = 8, test_rows = 6 }'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of books, a plain one of the same, and one of pairs."""
    folder = tmp_path_factory.mktemp("streams")
    rows = [{"book": f"b{b}", "text": f"Book {b}. " + "It stands here. " * 14} for b in range(6)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "books.toml").write_text(RECIPE.format(words="bytes", data=TEXT))
    (folder / "pairs.toml").write_text(RECIPE.format(words="mqar", data=PAIRS))
    for recipe, name, keys in (("books", "hope", ()), ("books", "lm", ("method=plain",)), ("pairs", "pairs", ())):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["laconic", "train", f"{recipe}.toml", "--out", name, *keys])
            with pytest.raises(SystemExit) as end:
                cli.main()
        assert not end.value.code
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, place: Path) -> RunCli:
    """Run a command in the directory of the runs."""
    monkeypatch.chdir(place)
    return run_cli


def test_evaluated_kept_and_reported(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("evaluate", "hope", "plain", "--tasks", "test,books", "--limit", "5")
    assert code == 0, err
    assert "hope, books: after saves " in out
    assert "nats a token against fresh on one item" in out
    assert "ppl (test)" in out
    assert {path.name for path in (place / "hope" / "evaluations").iterdir()} == {
        "lock", "test-stream-step-2-first-5", "books-stream-step-2-first-5",
    }  # fmt: skip
    monkeypatch.setattr("laconic.evaluation.streams.evaluate.score_tokens", None)  # nothing is read twice
    monkeypatch.setattr("laconic.evaluation.streams.books.evaluate_book", None)
    told = json.loads(run("evaluate", "hope", "plain", "--tasks", "test,books", "--limit", "5", "--format", "json")[1])
    ways = {(line["run"], line["stream"]): set(line["ways"]) for line in told["streams"]}
    assert ways[("hope", "ppl (test)")] == {"learn, carry", "learn, reset", "still, carry", "still, reset"}
    assert ways[("plain", "ppl (test)")] == {"plain"}
    assert ways[("plain", "books")] == {"fresh", "after"}, "there is one book only"
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
        "all levels, still",
    ):
        assert f"hope, levels: {part} loses " in out
    assert run("evaluate", "pairs")[0] == 0
    assert run("report", "hope", "plain", "pairs", "--out", "page.html")[0] == 0
    page = (place / "page.html").read_text()
    for text in ("What is learned while reading", "Nats by position", "Recall by gap", "Updates of each level",
                 "Half-life of what is written", "hope, memory high", "hope, state bytes", "Bounds that bind",
                 "hope, projections capped", "Rank of what levels have learned", "Size of the state",
                 "hope: levels", "without chunk 16", "14.39 / 10.08 / 58.04", "15.11 / 11.63 / 57.23", "figure only",
                 "not run", "hope, books: after saves ", "Forgetting is not solved"):  # fmt: skip
        assert text in page, text
    assert "hope, grad" not in page
    assert "reproduced</td>" not in page


@pytest.mark.parametrize(
    ("code", "says", "args"),
    [
        (2, "--tasks x: of runs that learn while they read the sets are test, valid, mqar", ["hope", "--tasks", "x"]),
        (66, "--tasks mqar: hope is a run of data.source text; its own sets are test and valid", ["hope", "--tasks", "mqar"]),
        (66, "pairs is a run of data.source mqar; it has no texts of its own", ["pairs", "--tasks", "ppl"]),
        (66, "pairs is a run of data.source mqar; it has no texts of its own", ["pairs", "--tasks", "needle"]),
        (2, "plain: levels are of method hope, this is plain; leave them out", ["lm", "--tasks", "levels"]),
        (2, "--latency: of runs that answer questions; these read documents", ["hope", "--latency", "5"]),
        (66, "every fifth is held out; give longer texts or more rows", ["hope", "--tasks", "books", "--limit", "2"]),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(run: RunCli, code: int, says: str, args: list[str]) -> None:
    ended, out, err = run("evaluate", *args)
    assert (ended, out) == (code, ""), err
    assert says in err.strip().splitlines()[-1]


def measured(row: str | None, right: float, n: int = 400) -> StreamResult:
    rows = [
        StreamRecord(str(i), {"learn": StreamItemResult({OVERALL: (float(i < right * n), 1)}, (), 0)}) for i in range(n)
    ]
    return StreamResult("languages (test-bin-0)", "run", (0,), [rows], {"row": row})


def test_a_signal_among_classes_keeps_whole_courses(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"text": f"{part} {label} {i}", "label": label, "split": part}
        for part, n in (("train", 3), ("test", 1))
        for label in map(str, range(22))
        for i in range(n)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args = ("evaluate", "plain", "--tasks", "banking77", "--data-dir", "rows.jsonl", "--shots", "2", "--limit", "1")
    whole, made = ClassIncrementalPlan.run_one, list[str]()

    def struck(plan: ClassIncrementalPlan, order: int, n: int, note: Any) -> str:
        made.append(f"{order} {plan.methods[n]}")
        if len(made) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(plan, order, n, note)

    monkeypatch.setattr(ClassIncrementalPlan, "run_one", struck)
    monkeypatch.setattr("laconic.evaluation.class_incremental.run.METHODS", ("ncm", "finetune"))
    code, _, err = run(*args)
    assert code == 75, err
    assert "SIGTERM: plain, banking77: whole courses are kept; run the same command again to go on" in err
    code, out, err = run(*args, "--format", "json")
    assert code == 0, err
    (found,) = json.loads(out)["classes"]
    assert len(made) == 1 + len(found["methods"]) * len(found["orders"])  # none twice but the one that was cut off
    assert found["train_examples"] == 44
    again = run(*args, "--format", "json")
    assert (again[0], json.loads(again[1])) == (0, json.loads(out))
    kept = place / "plain" / "evaluations" / "banking77-stream-step-2-first-1-learned-2"
    assert json.loads((kept / "result.json").read_text()) == {
        k: v for k, v in found.items() if k not in ("run", "seed")
    }
    assert list(kept_found(["plain"]).classes[0].figures["methods"]) == ["ncm", "finetune"], "our order"
    lines, texts = (kept / "answers.jsonl").read_text().splitlines(keepends=True), (kept / "key.json").read_text()
    shutil.rmtree(kept)
    load_partial(partial_folder(kept), texts)
    commit_results(kept, lines, {}, {})
    code, _, err = run("report", "plain", "--out", "classes.html")
    assert code == 66
    assert "classes kept in a form of before, without figures; remove it and evaluate again" in err
    shutil.rmtree(kept)


@pytest.mark.parametrize(
    ("says", "args"),
    [
        ("--shots: of clinc150 and banking77, whose classes are learned in turn; leave it out", ["--shots", "3"]),
        ("--shots 0: too few; give 1 or more", ["--shots", "0", "--tasks", "clinc150"]),
    ],
)
def test_examples_that_cannot_be_meant(run: RunCli, says: str, args: list[str]) -> None:
    code, _, err = run("evaluate", "plain", *args)
    assert code == 2
    assert says in err


def test_words_on_papers_are_computed() -> None:
    (table,) = [x for x in reported_learning.load_paper_tables() if x.cells]
    hope = [row[0] for row in table.rows].index("Hope")
    assert reproduction_verdicts(table, [])[hope] == NOT_RUN
    assert reproduction_verdicts(table, [measured(None, 1.0)])[hope] == NOT_RUN
    assert reproduction_verdicts(table, [measured("hope languages", 1.0)])[hope] == REPRODUCED
    assert reproduction_verdicts(table, [measured("hope languages", 0.5)])[hope] == NOT_REPRODUCED
    assert set(reproduction_verdicts(table, [measured("hope languages", 1.0)])) == {REPRODUCED, NOT_RUN}
    assert [
        word for x in reported_learning.load_paper_tables() for word in reproduction_verdicts(x, []) if word != NOT_RUN
    ] == [FIGURE_ONLY] * 3


def test_tables_are_whole() -> None:
    for table in reported_learning.load_paper_tables():
        names = {row[0] for row in table.rows}
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
        assert all(name in names for name, _ in table.measured)
        assert all(column in table.columns for column, *_ in table.cells)


def test_a_learner_beside_another_method(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = place / "thinks"
    fake.mkdir()
    (fake / "recipe.toml").write_text(
        'method = "cot"\n[model]\nfamily = "llama"\ntokenizer = "digits"\nhidden_size = 16\nnum_hidden_layers = 1\n'
        'num_attention_heads = 2\n[data]\nsource = "digits"\nformat = "digits"\n[train]\nsteps = 1\nbatch_size = 2\n'
    )
    assert run("train", "thinks/recipe.toml", "--out", "digits")[0] == 0
    ended, _, err = run("evaluate", "digits", "hope", "--tasks", "test")
    assert ended == 2
    assert "digits: method cot is no language model of streams; evaluate it alone" in err
