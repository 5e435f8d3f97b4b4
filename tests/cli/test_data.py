"""laconic data list, check, make: what they print and write, and the codes they end with."""

import json
from pathlib import Path

import pytest

from laconic.config.data import DataConfig
from laconic.data.tokenizer import build_byte_tokenizer
from tests.conftest import RunCli, shared_dir


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, tmp_path: Path) -> RunCli:
    """Run `laconic data` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *args: run_cli("data", *args)


@pytest.fixture
def root() -> Path:
    return shared_dir() / "data"


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


GOOD = '{"question": "Three and four?", "steps": ["<<3+4=7>>"], "answer": "7"}\n'


def test_sets_are_listed(run):
    code, out, _ = run("list")
    assert code == 0
    assert "gsm8k-aug-subset" in out
    assert "hub: whynlp/gsm8k-aug" in out
    assert "laconic data make prosqa writes training rows" in out
    code, out, _ = run("list", "--format", "json")
    told = json.loads(out)
    sets = {found["name"]: found for found in told["sets"]}
    assert told["schema"] == 1
    assert sets["gsm8k"]["rows"] == {"train": 6973, "valid": 500, "test": 1319}
    assert sets["gsm8k-aug"]["rows_in_files"]["train"] == 10_432
    assert sets["gsm-hard"]["licence"] == "Apache-2.0"


def test_documents_are_looked_over(run, tmp_path):
    build_byte_tokenizer().save(tmp_path)
    texts = [("one", "train", "abc"), ("one", "train", "defgh"), ("two", "test", "abc"), ("three", "train", "x" * 21)]
    rows = [{"book": book, "split": part, "text": text} for book, part, text in texts]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "book.txt").write_text("A text of 21 letters.", encoding="utf-8")
    counted = ("--documents", "--tokenizer", ".", "--max-length", 10, "--format", "json")
    told = json.loads(run("check", "books.jsonl", *counted)[1])
    assert (told["parts"], told["sections"], told["twice"]) == ({"train": 2, "test": 1}, 4, 1)
    assert told["tokens"] == {"p50": 10, "p90": 21, "p99": 21, "most": 21}
    assert told["rows"] == 1 + 1 + 2  # the last token of the longest has nothing to predict it
    assert len(told["sha256"]) == 64
    assert json.loads(run("check", "book.txt", *counted)[1])["parts"] == {"unsaid": 1}
    code, out, _ = run("check", "books.jsonl", "--documents")
    assert code == 0
    assert "         2  documents, part train" in out
    assert "         1  sections that stood before" in out
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n{"words": "a"}\n', encoding="utf-8")
    code, _, err = run("check", "bad.jsonl", "--documents")
    assert code == 66
    assert "bad.jsonl:1:10: text: empty" in err
    assert "bad.jsonl:2:1: text: no such field" in err


def test_faults_are_listed_with_their_places_and_end_with_66(run, tmp_path):
    number = '{"question": "Three?", "steps": [], "answer": 3}'
    again = '{"question": "three and four", "steps": [], "answer": "7"}'
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n{number}\n{again}", encoding="utf-8")
    code, out, _ = run("check", "rows.jsonl")
    assert code == 66
    assert "rows.jsonl:2:1: a blank line between rows; delete it" in out
    assert "rows.jsonl:3:47: answer: number where text is asked" in out
    assert "2  faults" in out
    assert "1  questions that stood before (rows.jsonl:4)" in out
    assert "note: no line end after the last row" in out
    code, out, _ = run("check", "rows.jsonl", "--format", "json")
    told = json.loads(out)
    assert code == 66
    assert [(fault["line"], fault["column"], fault["kind"]) for fault in told["faults"]] == [
        (2, 1, "blank lines"),
        (3, 47, "wrong types"),
    ]
    assert told["questions_twice"] == [["rows.jsonl:1", "rows.jsonl:4"]]
    assert told["rows_without_chain"] == 1


def test_lengths_are_told_by_part_under_a_tokenizer(run, root):
    tokenizer = root / "tokenizers" / "gpt2"
    asked = ("gsm8k-aug:valid", "--data-dir", root, "--tokenizer", tokenizer, "--max-length", 150)
    code, out, err = run("check", *asked, "--format", "json")
    told = json.loads(out)
    assert (code, told["rows"], told["faults"], err) == (0, 500, [], "")
    assert told["tokens"]["question"] == {"p50": 51, "p90": 83, "p99": 116, "most": 165}
    assert told["tokens"]["row"]["most"] == 207
    assert len(told["rows_over_context"]) == 13
    assert told["commonest_answer"] == {"answer": "20", "share": 0.042}
    code, out, _ = run("check", *asked)
    assert code == 0
    assert "13  rows over 150 tokens, which would be cut (gsm8k-aug-valid-00008, " in out
    assert "chain without its last step" in out


def test_what_cannot_be_checked_ends_with_a_line(run, tmp_path, root):
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    assert run("check", "empty.jsonl")[0] == 66
    assert "empty.jsonl: no row in it; accepted are" in run("check", "empty.jsonl")[1]
    code, _, err = run("check", "nowhere.jsonl")
    assert (code, err) == (66, "laconic: nowhere.jsonl: no such file; give a file of rows, or a set that "
                           "laconic data list names\n")  # fmt: skip
    code, _, err = run("check", "gsm8k-agu", "--data-dir", root)
    assert code == 66
    assert "did you mean gsm8k-aug?" in err
    code, _, err = run("check", "empty.jsonl", "--max-length", 9)
    assert (code, err) == (2, "laconic: --max-length 9: counted in tokens; name a --tokenizer\n")


def test_a_row_with_a_special_token_is_a_fault(run, tmp_path, root):
    (tmp_path / "rows.jsonl").write_text(GOOD.replace("four", "<|endoftext|>"), encoding="utf-8")
    code, out, _ = run("check", "rows.jsonl", "--tokenizer", root / "tokenizers" / "gpt2")
    assert code == 66
    assert "row rows.jsonl:1: a special token of the tokenizer stands in the text; take it out" in out


@pytest.fixture
def few(monkeypatch, root) -> None:
    """The first 700 training questions in place of 17,204, which take seconds; the held-out ones are GSM8K-Aug's."""
    from laconic.data.reasoning import load as reasoning_load

    read = reasoning_load.load_examples(
        "gsm8k-aug-subset", "train", DataConfig(source="catalog", name=("gsm8k-aug-subset",), data_dir=str(root)), 700
    )
    held = reasoning_load.load_examples(
        "gsm8k-aug:valid", "valid", DataConfig(source="catalog", name=("gsm8k-aug",), data_dir=str(root))
    )
    monkeypatch.setattr(reasoning_load, "load_training_examples", lambda how: read)
    monkeypatch.setattr(reasoning_load, "load_examples", lambda asked, part, how: held)


def test_variants_are_made_without_a_held_out_template(run, tmp_path, root, few):
    asked = ("make", "gsm-variants", "--rows", 1000, "--held-out-fraction", 0.25, "--data-dir", root)
    code, out, err = run(*asked, "--out", "a.jsonl")
    assert code == 0
    assert "a.jsonl: 1,000 rows of " in out
    assert "a.held.jsonl: 250 rows of " in out
    assert "700 questions, 415 templates, 31 left out as doubtful" in err
    made, held = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "a.held.jsonl")
    assert (len(made), len(held)) == (1000, 250)
    assert not {row["template"] for row in made} & {row["template"] for row in held}
    code, out, _ = run(*asked, "--out", "a.jsonl", "--format", "json")
    assert code == 0
    assert [file["rows"] for file in json.loads(out)["made"]] == [1000, 250]
    code, _, err = run(*asked, "--out", "a.jsonl", "--seed", 1)
    assert code == 73
    assert "a.jsonl is there and holds other rows; choose another name, or remove it" in err
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "a.held.jsonl"}


def test_questions_as_they_are_come_first(run, tmp_path, root, few):
    code, out, _ = run(
        "make", "gsm-variants", "--rows", 900, "--include-originals", "--data-dir", root, "--out", "a.jsonl"
    )
    made, held = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "a.held.jsonl")
    first = [row for row in made if "template" not in row]
    assert code == 0
    assert f"900 rows: {len(first)} questions as they are, then of " in out
    assert 600 < len(first) < 700
    assert first == made[: len(first)]
    assert not {row["id"] for row in first} & {row["template"] for row in held}


def test_too_few_rows_for_a_variant_are_said_to_be_originals(run, tmp_path, root, few):
    _, out, _ = run(
        "make",
        "gsm-variants",
        "--rows",
        9,
        "--include-originals",
        "--held-out-fraction",
        0,
        "--data-dir",
        root,
        "--out",
        "a.jsonl",
    )
    assert out == "a.jsonl: 9 of 700 questions as they are, and no variant; ask for more --rows\n"
    assert not any("template" in row for row in rows_of(tmp_path / "a.jsonl"))


def test_doubtful_templates_are_taken_if_asked(run, root, few):
    _, out, err = run(
        "make",
        "gsm-variants",
        "--rows",
        9,
        "--allow-ambiguous",
        "--held-out-fraction",
        0,
        "--data-dir",
        root,
        "--out",
        "a.jsonl",
    )
    assert out == "a.jsonl: 9 rows of 415 templates\n"
    assert "doubtful" not in err


def test_templates_that_give_too_few_rows(run, tmp_path, root, few):
    asked = (
        "make",
        "gsm-variants",
        "--rows",
        1000,
        "--held-out-fraction",
        0.999,
        "--data-dir",
        root,
        "--out",
        "a.jsonl",
    )
    code, _, err = run(*asked)
    assert code == 66
    assert "rows asked, there are " in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_variants_of_all_questions(run, tmp_path, root):
    code, out, err = run(
        "make", "gsm-variants", "--rows", 17_000, "--include-originals", "--data-dir", root, "--out", "a.jsonl"
    )
    made, held = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "a.held.jsonl")
    assert code == 0
    assert "17,204 questions, 8,715 templates, 744 left out as doubtful" in err
    assert "17,000 rows: 16,394 questions as they are, then of 7,578 templates" in out
    assert not {row["id"] for row in made} & {row["template"] for row in held}


def test_products_leave_out_the_published_pairs(run, tmp_path, root):
    code, out, _ = run("make", "mult-4", "--rows", 300, "--data-dir", root, "--out", "m.jsonl")
    assert (code, out) == (0, "m.jsonl: 300 products\n")
    shipped = [row for part in ("valid", "test") for row in rows_of(root / "multiplication" / f"4x4-{part}.jsonl")]
    made = rows_of(tmp_path / "m.jsonl")
    assert list(made[0]) == list(shipped[0])
    assert not {(r["a"], r["b"]) for r in made} & {(r["a"], r["b"]) for r in shipped}
    code, _, err = run("make", "mult-4", "--rows", 300, "--out", "m.jsonl")
    assert code == 2
    assert "mult-4: no --data-dir; name the folder of the sets' files, whose pairs are left out" in err


def test_graphs_are_made(run, tmp_path, root):
    code, out, _ = run("make", "prosqa", "--rows", 20, "--out", "p.jsonl")
    assert (code, out) == (0, "p.jsonl: 20 graphs\n")
    before = (tmp_path / "p.jsonl").read_bytes()
    assert run("make", "prosqa", "--rows", 20, "--out", "p.jsonl", "--data-dir", root)[0] == 0
    assert (tmp_path / "p.jsonl").read_bytes() == before
    assert run("check", "p.jsonl")[0] == 0


@pytest.mark.parametrize(("what", "said"), [("mult-6", "did you mean mult-4?"), ("sudoku", "there are gsm-variants, ")])
def test_what_is_not_made_here(run, what, said):
    code, _, err = run("make", what, "--rows", 9, "--out", "x.jsonl")
    assert code == 2
    assert f"{what}: not made here; {said}" in err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--rows", "0", "--out", "x.jsonl"), 2, "--rows 0: give at least 1"),
        (
            ("--rows", "9", "--out", "x.jsonl", "--held-out-fraction", "1"),
            2,
            "--held-out-fraction 1: give a share of at least 0 and below 1",
        ),
        (("--rows", "9", "--out", "no/x.jsonl"), 66, "no/x.jsonl: no folder no to write into; make it first"),
        (("--rows", "9"), 2, "--out"),
    ],
)
def test_what_cannot_be_made(run, flags, code, said):
    found, _, err = run("make", "prosqa", *flags)
    assert found == code
    assert said in err
