"""Converted columns equal the shared files, which were converted independently from the same sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.config.data import DataConfig
from laconic.data.reasoning.columns import (
    COLUMN_CONVERTERS,
    detect_columns,
    find_boxed,
    normalise_number,
    parse_icot_line,
    split_gsm8k_answer,
    unbox_answer,
)
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


DOLLY = {
    "instruction": "Where is the fair?",
    "context": "A ticket is $22.50.",
    "response": "Paris, the capital of France, hosts it. A ticket is $22.50.",
    "category": "closed_qa",
}
NOTES = "Intro 0.\n\n#### Notes\nPaper, pens cost $3,000."


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
    with pytest.raises(InputError, match=r"train\.jsonl:2: answer: does not end with ####.*add ####"):
        read_examples(path, CONFIG)
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + '\n{"question": "3?"}\n')
    with pytest.raises(InputError, match=r"train\.jsonl:2: no field answer: .*; the first row has it"):
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
     (0.25, "0.25"), (7, "7"), ("3/4", "3/4"), ("5:45", "5:45"), ("7 8 0", "7 8 0"), (-0.0, "0"), (" 2 ", "2"),
     ("-$1,204.50", "-1204.50"), ("1,200%", "1200%"), (".5", ".5"), ("Paris, $22.50.", "Paris, $22.50."),
     ("1,2,3.", "1,2,3."), ("1,5", "1,5"), ("7 8 0.", "7 8 0."), ("No.", "No.")],
)  # fmt: skip
def test_normalise_number(raw: object, columns: str) -> None:
    assert normalise_number(raw) == columns


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        (DOLLY, "Where is the fair?\n\nA ticket is $22.50.", DOLLY["response"]),
        (DOLLY | {"context": "", "response": "1,2,3."}, "Where is the fair?", "1,2,3."),
        ({"instruction": "Add.", "input": "2, 3", "output": "5"}, "Add.\n\n2, 3", "5"),
        ({"instruction": "Add.", "input": None, "output": "1,200"}, "Add.", "1,200"),
        ({"instruction": "Say $1,200.", "response": "It is $1,200."}, "Say $1,200.", "It is $1,200."),
    ],
)
def test_convert_instruction_keeps_texts(tmp_path: Path, row: dict[str, Any], question: str, answer: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    read = read_examples(path, CONFIG)
    assert (read.examples[0].question, read.examples[0].answer, read.examples[0].steps) == (question, answer, ())
    assert read.examples[0].metadata == ({"category": "closed_qa"} if "category" in row else {})
    assert read.notes == ()


@pytest.mark.parametrize("name", ["gsm-hard", "svamp", "multiarith"])
def test_detect_columns_of_a_published_set_with_other_columns(name: str) -> None:
    assert detect_columns(ROWS[name][0] | {"category": "other"}) == (
        "instruction" if name == "gsm-hard" else "standard"
    )


def test_detect_columns_gsm8k_needs_one_line_after_the_mark(tmp_path: Path) -> None:
    row = {"question": "Q0?", "answer": NOTES}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    read = read_examples(path, DataConfig(path="x", answer_type="text"))
    assert (read.examples[0].answer, read.examples[0].steps) == (NOTES, ())
    for end in ("1,200", "-5", "3.5", " $-5 ", "€50", "5 apples", " (A)", " yes ", r"\frac{1}{2}"):
        assert detect_columns({"question": "?", "answer": f"Some.\n####{end}"}) == "gsm8k-prose"
    for end in ("", " 5\nNotes", " Step 3\n\nAdd."):
        assert detect_columns({"question": "?", "answer": f"Some.\n####{end}"}) == "standard"
    assert detect_columns({"question": "?", "cot": "2", "answer": NOTES}) == "standard"
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=r"^rows\.jsonl:2: answer: does not end with #### and one line"):
        read_examples(path, CONFIG)


def test_convert_instruction_of_hostile_and_mixed_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good, text = {"instruction": "Give", "input": "x", "output": "12"}, DataConfig(path="x", answer_type="text")
    for instruction in (None, "", ["a"]):
        path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"instruction": instruction}) + "\n")
        with pytest.raises(InputError, match=r"^rows\.jsonl:2:"):
            read_examples(path, text)
    both = good | {"response": "13", "conversations": [{"from": "human", "value": "?"}]}
    path.write_text(json.dumps(both) + "\n")
    example = read_examples(path, text).examples[0]
    assert (example.question, example.answer) == ("Give\n\nx", "13")


def test_split_gsm8k_answer_of_a_long_text_is_fast() -> None:
    assert split_gsm8k_answer("#### 7" + " " * 10**6 + "x\ny") == ("", "")


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (r"\boxed{18}", "18"),
        (r"$\boxed{1,200}$.", "1200"),
        (r"$$\boxed 7.0$$", "7"),
        (r"\[ \boxed{\frac{1}{2}} \]" + "\n", r"\frac{1}{2}"),
        (r"\(\boxed{\fbox{3}}\)", "3"),
        (r"\\boxed{3}", None),
        (r"x = \boxed{3}", None),
        (r"\boxed{1}, \boxed{2}", None),
        (r"\boxed{}", None),
        ("$ -18$.", "-18"),
        ("$x$", None),
        ("18", None),
        (18, None),
    ],
)
def test_unbox_answer_of_a_box_alone(answer: object, content: str | None, tmp_path: Path) -> None:
    row = {"question": "9+9?", "answer": answer}
    assert unbox_answer(row) == row | ({} if content is None else {"answer": content})
    if content is not None:
        path = tmp_path / "rows.jsonl"
        chat = {
            "messages": [
                {"role": role, "content": row[key]} for role, key in (("user", "question"), ("assistant", "answer"))
            ]
        }
        for form, answer_type, expected in ((row, "text", content), (chat, "number", content), (chat, "text", answer)):
            path.write_text(json.dumps(form) + "\n")
            config = CONFIG.model_copy(update={"answer_type": answer_type})
            assert read_examples(path, config).examples[0].answer == expected


def test_find_boxed_of_many_boxes_is_fast() -> None:
    marks = r"\boxed{" * 10**5
    assert (find_boxed(marks), find_boxed(marks + "3" + "}" * 10**5)) == (None, "3")
    spaces = {"answer": "$" + " " * 10**5 + r"\boxed 1" * 10**5}
    assert unbox_answer(spaces) == spaces
