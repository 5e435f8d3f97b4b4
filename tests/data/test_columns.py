"""Converted columns equal the shared files, which were converted independently from the same sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.config.data import DataConfig
from laconic.data.reasoning.columns import COLUMN_CONVERTERS, detect_columns, normalise_number, parse_icot_line
from laconic.data.reasoning.read_examples import read_examples
from laconic.data.strict_jsonl import RowError
from laconic.errors import InputError

CONFIG = DataConfig(path="rows.jsonl")
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gsm8k": (
        {"question": "2 and 2?", "answer": "He has 2+2 = <<2+2=4>>4.\nSo $1,004.\n#### $1,004"},
        {"question": "2 and 2?", "steps": ["<<2+2=4>>"], "answer": "1004", "rationale": "He has 2+2 = 4.\nSo $1,004."},
    ),
    "gsm8k-prose": (
        {"question": "2 and 2?", "answer": "He has 2+2 = 4.\nSo $1,004.\n#### $1,004"},
        {"question": "2 and 2?", "steps": ["He has 2+2 = 4.", "So $1,004."], "answer": "1004"},
    ),
    "zen": (
        {"question": "2 and 2?", "cot": "<<2+2=4>> <<4*1=4>>", "answer": "#### 1,004"},
        {"question": "2 and 2?", "cot": "<<2+2=4>> <<4*1=4>>", "answer": "1004"},
    ),
    "gsm-hard": ({"instruction": "2 and 2? ", "response": -9867630.0}, {"question": "2 and 2?", "answer": "-9867630"}),
    "svamp": (
        {"question_concat": "2 and 2?", "Answer": "145.0", "Type": "Addition"},
        {"question": "2 and 2?", "answer": "145", "Type": "Addition"},
    ),
    "multiarith": ({"question": "2 and 2?", "final_ans": "4"}, {"question": "2 and 2?", "answer": "4"}),
    "standard": ({"question": "2 and 2?", "steps": [], "answer": "four"}, {"question": "2 and 2?", "answer": "four"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_detect_columns_and_convert(name: str) -> None:
    row, columns = ROWS[name]
    assert detect_columns(row) == name
    converted = COLUMN_CONVERTERS[name](row)
    assert converted is not None
    assert converted | columns == converted


def test_convert_gsm8k_equals_shared_files(shared: Path) -> None:
    for part in ("train", "test"):
        rows = [json.loads(line) for line in (shared / f"data/gsm8k/{part}.jsonl").open(encoding="utf-8")]
        for row in rows:
            converted = COLUMN_CONVERTERS["gsm8k"]({"question": row["question"], "answer": row["raw_answer"]})
            assert converted is not None
            assert {key: converted[key] for key in ("steps", "answer", "rationale", "raw_answer")} == {
                key: row[key] for key in ("steps", "answer", "rationale", "raw_answer")
            }


def test_renaming_converters_equal_shared_files(shared: Path) -> None:
    for line in (shared / "data/gsm-hard/test.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        converted = COLUMN_CONVERTERS["gsm-hard"]({"instruction": row["question"], "response": row["target"]})
        assert converted is not None
        assert converted["question"] == row["question"].strip()
        assert float(converted["answer"]) == row["target"]
        assert converted["answer"] == row["answer"]


def test_read_examples_of_published_gsm8k(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + "\n")
    example = read_examples(path, CONFIG).examples[0]
    assert (example.steps, example.answer) == (("<<2+2=4>>",), "1004")
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + '\n{"question": "3?", "answer": "3"}\n')
    with pytest.raises(InputError, match=r"train\.jsonl:2:1: answer: no #### before the number in '3'"):
        read_examples(path, CONFIG)
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + '\n{"question": "3?"}\n')
    with pytest.raises(InputError, match=r"train\.jsonl:2:1: answer: no such field in .*; the first row has it"):
        read_examples(path, CONFIG)


def test_parse_icot_line_equals_shared_files(shared: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data/gsm8k-aug/valid.jsonl").open(encoding="utf-8")]
    path = tmp_path / "valid.txt"
    lines = [f"{row['question']}||{' '.join(row['steps'])} #### {row['answer']}" for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    read = read_examples(path, CONFIG)
    assert [(e.question, list(e.steps), e.answer) for e in read.examples] == [
        (" ".join(row["question"].split("\n")).strip(), row["steps"], row["answer"]) for row in rows
    ]
    assert read.examples[3].id == "valid.txt:4"


def test_parse_icot_line() -> None:
    row = parse_icot_line("5 6 * 7 4||5 5 + 0 6 ( 5 1 ) #### 5 5 6")
    assert row == {"question": "5 6 * 7 4", "steps": ["5 5 + 0 6 ( 5 1 )"], "answer": "5 5 6"}
    assert parse_icot_line("2?||#### 2")["steps"] == []
    for line in ("2 and 2? #### 4", "2 and 2?||<<2+2=4>>", "||<<2+2=4>> #### 4", "2 and 2?||<<2+2=4>> ####"):
        with pytest.raises(RowError, match=r"not in iCoT's format"):
            parse_icot_line(line)


@pytest.mark.parametrize(
    ("name", "cot", "steps"),
    [
        ("zen-aug", "<<2+2=4>> <<4*1=4>>", ["<<2+2=4>>", "<<4*1=4>>"]),
        ("zen-nl", "He has 2. He gets 2.5. So 4.5.", ["He has 2", "He gets 2.5", "So 4.5"]),
        ("zen-aug", "", []),
        ("zen-nl", None, []),
    ],
)
def test_zen_e_converter(name: str, cot: str | None, steps: list[str]) -> None:
    row = {"question": "2?", "cot": cot, "answer": "2"}
    assert COLUMN_CONVERTERS[name](row) == {"question": "2?", "steps": steps, "answer": "2"}
    assert COLUMN_CONVERTERS[name](row | {"answer": None}) is None


def test_convert_zen_e_drops_null_answers() -> None:
    assert COLUMN_CONVERTERS["zen"]({"question": "2?", "cot": "", "answer": None}) is None
    assert COLUMN_CONVERTERS["zen"]({"question": "2?", "cot": "", "answer": " #### "}) is None


@pytest.mark.parametrize(
    ("raw", "columns"),
    [("1,234", "1234"), ("$18", "18"), ("18.", "18"), ("70.0", "70"), ("-3.00", "-3"), ("0.5", "0.5"), (5.0, "5"),
     (0.25, "0.25"), (7, "7"), ("3/4", "3/4"), ("5:45", "5:45"), ("7 8 0", "7 8 0"), (-0.0, "0"), (" 2 ", "2")],
)  # fmt: skip
def test_normalise_number(raw: object, columns: str) -> None:
    assert normalise_number(raw) == columns
