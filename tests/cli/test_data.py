"""laconic data list, check, make: what they print and write, and the codes they end with."""

import json
from pathlib import Path

import pytest

from laconic.config.data import DataConfig
from laconic.data.tokenizer import build_byte_tokenizer
from tests.conftest import RunCli, check_refused, shared_dir


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


def test_list(run):
    code, out, _ = run("list")
    assert code == 0
    assert "gsm8k-aug-subset" in out
    assert "hub: whynlp/gsm8k-aug" in out
    assert "laconic data make prosqa generates training rows" in out
    code, out, _ = run("list", "--format", "json")
    report = json.loads(out)
    sets = {info["name"]: info for info in report["sets"]}
    assert report["schema"] == 1
    assert sets["gsm8k"]["rows"] == {"train": 6973, "valid": 500, "test": 1319}
    assert sets["gsm8k-aug"]["rows_in_files"]["train"] == 10_432
    assert sets["gsm-hard"]["licence"] == "Apache-2.0"


def test_check_documents(run, tmp_path):
    build_byte_tokenizer().save(tmp_path)
    texts = [("one", "train", "abc"), ("one", "train", "defgh"), ("two", "test", "abc"), ("three", "train", "x" * 21)]
    rows = [{"book": book, "split": part, "text": text} for book, part, text in texts]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "book.txt").write_text("A text of 21 letters.", encoding="utf-8")
    counted = ("--documents", "--tokenizer", ".", "--max-length", 10, "--format", "json")
    report = json.loads(run("check", "books.jsonl", *counted)[1])
    assert report["documents_by_part"] == {"train": 2, "test": 1}
    assert (report["num_sections"], report["num_duplicate_sections"]) == (4, 1)
    assert report["token_lengths"] == {"p50": 10, "p90": 21, "p99": 21, "maximum": 21}
    assert report["num_rows"] == 1 + 1 + 2  # the last token of the longest has nothing to predict it
    assert len(report["sha256"]) == 64
    assert json.loads(run("check", "book.txt", *counted)[1])["documents_by_part"] == {"unspecified": 1}
    code, out, _ = run("check", "books.jsonl", "--documents")
    assert code == 0
    assert "         2  documents, part train" in out
    assert "         1  duplicate sections" in out
    (tmp_path / "raw.jsonl").write_text('{"raw_content": "One."}\n', encoding="utf-8")
    assert "data.text.text_field names another" in run("check", "raw.jsonl", "--documents")[2]
    code, out, _ = run("check", "raw.jsonl", "--documents", "--columns", "text=raw_content")
    assert (code, "         1  documents" in out) == (0, True)
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n{"words": "a"}\n', encoding="utf-8")
    code, _, err = run("check", "bad.jsonl", "--documents")
    assert code == 66
    assert "bad.jsonl:1: text" in err
    assert "bad.jsonl:2: no field text" in err


def test_check_lists_problems_with_their_positions(run, tmp_path):
    number = '{"question": "Three?", "steps": [], "answer": [3]}'
    again = '{"question": "three and four", "steps": [], "answer": "7"}'
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n{number}\n{again}", encoding="utf-8")
    code, out, _ = run("check", "rows.jsonl")
    assert code == 66
    assert "rows.jsonl:3: answer" in out
    assert "1  problem" in out
    assert "1  duplicate questions (rows.jsonl:4)" in out
    code, out, _ = run("check", "rows.jsonl", "--format", "json")
    report = json.loads(out)
    assert code == 66
    assert [(fault["line"], fault["kind"]) for fault in report["problems"]] == [(3, "wrong types")]
    assert report["duplicates"] == [["rows.jsonl:1", "rows.jsonl:4"]]
    assert report["rows_without_chain"] == 1


def test_check_reads_rows_as_the_keys_of_a_recipe_say(run, tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chats = [{"id": "one", "messages": turns}, {"messages": turns * 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats), encoding="utf-8")
    code, out, _ = run("check", "rows.jsonl", "data.answer_type=number")
    assert code == 66
    assert "row rows.jsonl:1 (id one): answer 'Hello' has no number" in out
    assert "2  problems" in out
    code, out, _ = run("check", "rows.jsonl", "data.format=chat", "data.answer_type=text")
    assert (code, "note:" in out) == (0, False)
    check_refused(run("check", "rows.jsonl", "data.fmt=chat"), 2, "no such key")
    check_refused(run("check", "rows.jsonl", "seed=1"), 2, "seed=1: only keys data.*")
    check_refused(run("check", "rows.jsonl", "data.format=chat", "--documents"), 2, "data.format=chat")
    check_refused(
        run("check", "rows.jsonl", "data.path=other.jsonl"), 2, "data.path=other.jsonl: FILE names the rows to check"
    )


def test_check_reports_a_first_row_without_a_chain_once(run, tmp_path):
    rows = ['{"question": "Two?", "answer": "2"}', GOOD.strip(), GOOD.strip().replace("Three", "3")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    code, out, _ = run("check", "rows.jsonl")
    assert code == 66
    assert "rows.jsonl:2: steps: has a chain, but the first row has none" in out
    assert "         1  problem\n" in out


@pytest.mark.medium
def test_check_token_lengths(run, root):
    tokenizer = root / "tokenizers" / "gpt2"
    arguments = ("gsm8k-aug:valid", "--data-dir", root, "--tokenizer", tokenizer, "--max-length", 150)
    code, out, err = run("check", *arguments, "--format", "json")
    report = json.loads(out)
    assert (code, report["rows"], report["problems"], err) == (0, 500, [], "")
    assert report["tokens"]["question"] == {"p50": 51, "p90": 83, "p99": 116, "maximum": 165}
    assert report["tokens"]["row"]["maximum"] == 207
    assert len(report["too_long"]) == 13
    assert report["majority_answer"] == {"answer": "20", "share": 0.042}
    code, out, _ = run("check", *arguments)
    assert code == 0
    assert "13  rows of more than 150 tokens, which would be truncated (gsm8k-aug-valid-00008, " in out
    assert "chain without its last step" in out


def test_check_invalid_input(run, tmp_path, root):
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    assert run("check", "empty.jsonl")[0] == 66
    assert "empty.jsonl" in run("check", "empty.jsonl")[1]
    check_refused(run("check", "nowhere.jsonl"), 66, "nowhere.jsonl")
    check_refused(run("check", "gsm8k-agu", "--data-dir", root), 66, "did you mean gsm8k-aug?")
    check_refused(run("check", "empty.jsonl", "--max-length", 9), 2, "--max-length 9")
    check_refused(
        run("check", "empty.jsonl", "--tokenizer", "x", "--max-length", 0), 2, "--max-length 0: must be at least 1"
    )


def test_check_refuses_flags_without_use(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text(GOOD, encoding="utf-8")
    for arguments, flag in (
        (("rows.jsonl", "--data-dir", "."), "--data-dir"),
        (("rows.jsonl", "--documents", "--data-dir", "."), "--data-dir"),
        (("rows.jsonl", "--documents", "--columns", "question=text"), "--columns question=text"),
        (("gsm8k-aug:valid", "--columns", "question=text"), "--columns"),
    ):
        check_refused(run("check", *arguments), 2, f"{flag}: ")


def test_check_special_token(run, tmp_path, root):
    (tmp_path / "rows.jsonl").write_text(GOOD.replace("four", "<|endoftext|>"), encoding="utf-8")
    code, out, _ = run("check", "rows.jsonl", "--tokenizer", root / "tokenizers" / "gpt2")
    assert code == 66
    assert "row rows.jsonl:1: " in out


@pytest.fixture
def few(monkeypatch, root) -> None:
    """The first 700 training questions in place of 17,204, which take seconds; held-out ones are GSM8K-Aug's."""
    from laconic.data.reasoning import load as reasoning_load

    read = reasoning_load.load_examples(
        "gsm8k-aug-subset", "train", DataConfig(source="catalog", name=("gsm8k-aug-subset",), data_dir=str(root)), 700
    )
    held_rows = reasoning_load.load_examples(
        "gsm8k-aug:valid", "valid", DataConfig(source="catalog", name=("gsm8k-aug",), data_dir=str(root))
    )
    monkeypatch.setattr(reasoning_load, "load_training_examples", lambda config: read)
    monkeypatch.setattr(reasoning_load, "load_examples", lambda arguments, part, config: held_rows)


@pytest.mark.medium
def test_make_variants_without_held_out_templates(run, tmp_path, root, few):
    arguments = ("make", "gsm-variants", "--rows", 1000, "--held-out-fraction", 0.25, "--data-dir", root)
    code, out, err = run(*arguments, "--out", "a.jsonl")
    assert code == 0
    assert "a.jsonl: 1,000 rows of " in out
    assert "a.held_out.jsonl: 250 rows of " in out
    assert "700 questions, 415 templates, 31 left out as ambiguous" in err
    rows, held_rows = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "a.held_out.jsonl")
    assert (len(rows), len(held_rows)) == (1000, 250)
    assert not {row["template"] for row in rows} & {row["template"] for row in held_rows}
    code, out, _ = run(*arguments, "--out", "a.jsonl", "--format", "json")
    assert code == 0
    assert [file["rows"] for file in json.loads(out)["files"]] == [1000, 250]
    check_refused(run(*arguments, "--out", "a.jsonl", "--seed", 1), 73, "a.jsonl")
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "a.held_out.jsonl"}


def test_make_variants_with_few_steps_and_small_results(run, tmp_path, root, few):
    arguments = ("--rows", 300, "--held-out-fraction", 0, "--max-steps", 2, "--max-value", 50, "--include-originals")
    assert run("make", "gsm-variants", *arguments, "--data-dir", root, "--out", "a.jsonl").code == 0
    rows = rows_of(tmp_path / "a.jsonl")
    assert len(rows) == 300
    assert any("template" in row for row in rows)
    assert max(len(row["steps"]) for row in rows) == 2
    results = [float(step.rpartition("=")[2].rstrip(">")) for row in rows for step in row["steps"]]
    assert 25 < max(results) <= 50
    assert run("make", "gsm-variants", "--rows", 4, "--max-value", 0, "--out", "b.jsonl")[0] == 2


def test_make_originals_come_first(run, tmp_path, root, few):
    code, out, _ = run(
        "make", "gsm-variants", "--rows", 900, "--include-originals", "--data-dir", root, "--out", "a.jsonl"
    )
    rows, held_rows = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "a.held_out.jsonl")
    first = [row for row in rows if "template" not in row]
    assert code == 0
    assert f"900 rows: {len(first)} original questions, {900 - len(first)} variants of " in out
    assert 600 < len(first) < 700
    assert first == rows[: len(first)]
    assert not {row["id"] for row in first} & {row["template"] for row in held_rows}


def test_make_allow_ambiguous(run, root, few):
    flags = ("--rows", 9, "--allow-ambiguous", "--held-out-fraction", 0, "--data-dir", root, "--out", "a.jsonl")
    _, out, err = run("make", "gsm-variants", *flags)
    assert out == "a.jsonl: 9 rows of 415 templates\n"
    assert "ambiguous" not in err


def test_make_chains_of_results(run, tmp_path, root, few):
    flags = ("--rows", 60, "--min-steps", 2, "--max-steps", 2, "--chain-style", "results", "--held-out-fraction", 0.2)
    assert run("make", "gsm-variants", *flags, "--data-dir", root, "--out", "a.jsonl")[0] == 0
    rows = rows_of(tmp_path / "a.jsonl") + rows_of(tmp_path / "a.held_out.jsonl")
    assert len(rows) == 72
    for row in rows:
        assert len(row["steps"]) == 2
        assert row["question"].endswith(" =")
        assert int(row["steps"][-1].replace(" ", "").replace("#", "")) == int(row["answer"])


@pytest.mark.medium
def test_make_holds_out_numbers(run, tmp_path, root, few):
    flags = ("--max-value", 200, "--integers-only", "--new-numbers-fraction", 0.2, "--results-only-fraction", 0.5)
    assert run("make", "gsm-variants", "--rows", 300, *flags, "--data-dir", root, "--out", "a.jsonl")[0] == 0
    rows, new_rows, held_out = (rows_of(tmp_path / f"a{part}.jsonl") for part in ("", ".new_numbers", ".held_out"))
    assert (len(rows), len(new_rows), len(held_out)) == (300, 60, 15)
    templates = {row["template"] for row in rows}
    assert {row["template"] for row in new_rows} <= templates
    assert not {row["template"] for row in held_out} & templates
    assert not {row["question"] for row in new_rows} & {row["question"].removesuffix(" :") for row in rows}
    short = [row for row in rows if row["question"].endswith(" :")]
    assert 100 < len(short) < 200
    assert all(row["steps"][-1] == row["answer"] for row in short)
    assert all("<<" in step and "." not in step.rpartition("=")[2] for row in new_rows for step in row["steps"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("gsm-variants", "--chain-style", "brackets"), "--chain-style brackets: give equations or results"),
        (("digits", "--chain-style", "mixed"), "--chain-style mixed: give brackets or equations or results"),
        (("prosqa", "--chain-style", "results"), "--chain-style results: prosqa has one style"),
        (("digits", "--min-operations", 5), "--min-operations 5 exceeds --num-operations 4"),
        (("gsm-variants", "--min-steps", 5, "--max-steps", 2), "--min-steps 5 exceeds --max-steps 2"),
        (("digits", "--max-steps", 2), "--max-steps: digits has no such option"),
        (("prosqa", "--integers-only"), "--integers-only: prosqa has no such option"),
        (("gsm-variants", "--num-operations", 3), "--num-operations: gsm-variants has no such option"),
        (("digits", "--held-out-fraction", 1), "--held-out-fraction 1: must be at least 0 and below 1"),
        (("gsm-variants", "--new-numbers-fraction", 1), "--new-numbers-fraction 1: must be at least 0 and below 1"),
        (
            ("gsm-variants", "--chain-style", "results", "--results-only-fraction", 0.5),
            "--results-only-fraction: --chain-style results has results only",
        ),
        (("digits", "--num-operations", 13), "--num-operations 13: give at most 12"),
        (("digits", "--num-operations", 0), "--num-operations 0"),
        (("digits", "--results-only-fraction", 1.5), "--results-only-fraction 1.5: give a number from 0 to 1"),
        (("prosqa", "--rows", 0), "--rows 0"),
        (("prosqa", "--out", "no/x.jsonl"), "--out no/x.jsonl"),
        (("sudoku",), "generator sudoku: expected one of digits, gsm-variants, "),
    ],
)
def test_make_refuses_invalid_flags(run, tmp_path, flags, message):
    check_refused(run("make", "--rows", 9, "--out", "a.jsonl", *flags), 2, message)
    assert not list(tmp_path.iterdir())


def test_make_too_few_templates(run, tmp_path, root, few):
    flags = ("--rows", 1000, "--held-out-fraction", 0.999, "--data-dir", root, "--out", "a.jsonl")
    check_refused(run("make", "gsm-variants", *flags), 66, "1,000 rows")
    assert not list(tmp_path.iterdir())


def test_make_products_exclude_published_pairs(run, tmp_path, root):
    code, out, _ = run("make", "mult-4", "--rows", 300, "--data-dir", root, "--out", "m.jsonl")
    assert (code, out) == (0, "m.jsonl: 300 products\n")
    shipped = [row for part in ("valid", "test") for row in rows_of(root / "multiplication" / f"4x4-{part}.jsonl")]
    rows = rows_of(tmp_path / "m.jsonl")
    assert list(rows[0]) == list(shipped[0])
    assert not {(r["a"], r["b"]) for r in rows} & {(r["a"], r["b"]) for r in shipped}
    check_refused(run("make", "mult-4", "--rows", 300, "--out", "m.jsonl"), 2, "mult-4 requires --data-dir")


def test_make_graphs(run, tmp_path, root):
    code, out, _ = run("make", "prosqa", "--rows", 20, "--out", "p.jsonl")
    assert (code, out) == (0, "p.jsonl: 20 graphs\n")
    before = (tmp_path / "p.jsonl").read_bytes()
    assert run("make", "prosqa", "--rows", 20, "--out", "p.jsonl", "--data-dir", root)[0] == 0
    assert (tmp_path / "p.jsonl").read_bytes() == before
    code, out, _ = run("check", "p.jsonl")
    assert (code, 'note: most answers are texts; set data.answer_type = "text" in a recipe' in out) == (0, True)


def test_make_digits(run, tmp_path):
    code, out, _ = run("make", "digits", "--rows", 200, "--results-only-fraction", 0.5, "--out", "d.jsonl")
    assert (code, out) == (
        0,
        "d.jsonl: 200 chains of 4 operations\nd.held_out.jsonl: 10 rows that d.jsonl does not contain\n",
    )
    rows, held_out = rows_of(tmp_path / "d.jsonl"), rows_of(tmp_path / "d.held_out.jsonl")
    assert 60 < sum(row["question"].endswith("=:") for row in rows) < 140
    assert not any(row["question"].endswith(":") for row in held_out)
    assert not {row["question"].rstrip(":") for row in rows} & {row["question"] for row in held_out}
    assert run("check", "d.jsonl")[0] == 0
