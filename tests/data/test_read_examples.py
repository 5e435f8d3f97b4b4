"""Reading of examples: fields, three kinds of chains, notes, metadata, majority answer."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.catalog import get_dataset
from laconic.data.reasoning.columns import detect_columns
from laconic.data.reasoning.read_examples import most_common_answer, read_examples, split_chain
from laconic.data.strict_jsonl import EXCERPT_LENGTH, make_excerpt
from laconic.errors import InputError

CONFIG = DataConfig(path="rows.jsonl")
TEXT = DataConfig(path="rows.jsonl", answer_type="text")
ROW: dict[str, Any] = {"id": "a", "question": "2 and 2?", "steps": ["<<2+2=4>>"], "answer": "4"}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_read_examples_row_and_metadata(tmp_path: Path) -> None:
    path = written(tmp_path, ROW | {"split": "train", "n": 3}, {k: v for k, v in ROW.items() if k != "id"})
    read = read_examples(path, CONFIG)
    assert read.examples[0] == ReasoningExample("a", "2 and 2?", ("<<2+2=4>>",), "4", {"split": "train", "n": 3})
    assert read.examples[1].id == "rows.jsonl:2"
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read.notes == ("rows.jsonl: 1 questions are repeated",)


def test_read_examples_max_rows(tmp_path: Path) -> None:
    path = written(tmp_path, *(ROW | {"id": str(i), "question": str(i)} for i in range(5)))
    read = read_examples(path, CONFIG, 3)
    assert [e.id for e in read.examples] == ["0", "1", "2"]
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("field", "split", "chain", "steps"),
    [
        (None, "spaces", {"cot": "<<2+2=4>> <<4*1=4>>"}, ("<<2+2=4>>", "<<4*1=4>>")),
        ("cot", "sentences", {"cot": "He has 2. He gets 2. So 4."}, ("He has 2", "He gets 2", "So 4")),
        ("cot", "whole", {"cot": "5 5 + 0 6"}, ("5 5 + 0 6",)),
        ("rationale", "lines", {"steps": [], "rationale": "He has 2.\n\nSo 4."}, ("He has 2.", "So 4.")),
        (None, "lines", {"rationale": "He has 2.\nSo 4."}, ("He has 2.", "So 4.")),
        (None, "lines", {}, ()),
        (None, "lines", {"steps": []}, ()),
        (None, "lines", {"steps": None}, ()),  # as pyarrow and polars write an empty list
        (None, "spaces", {"cot": ""}, ()),  # as in GSM8K-Aug
        (None, "lines", {"rationale": None}, ()),
    ],
)
def test_read_examples_chain_fields(
    tmp_path: Path, field: str | None, split: str, chain: dict[str, Any], steps: tuple[str, ...]
) -> None:
    path = written(tmp_path, {"question": "2 and 2?", "answer": "4", **chain})
    config = DataConfig.model_validate({"path": "rows.jsonl", "chain_field": field, "chain_split": split})
    assert read_examples(path, config).examples[0].steps == steps


def test_read_examples_refuses_an_empty_chain_beside_another(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "2?", "answer": "4", "steps": None, "cot": "2"})
    with pytest.raises(InputError, match=r'cot: has a chain, but steps is read.*; set data\.chain_field = "cot"'):
        read_examples(path, CONFIG)


def test_read_examples_renamed_columns_and_numbers(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} and 2?", "output": n + 2, "reasoning": f"{n}+2"} for n in (1, 2.5)]
    path = written(tmp_path, *rows)
    with pytest.raises(InputError) as caught:
        read_examples(path, CONFIG)
    assert str(caught.value) == (
        "rows.jsonl:1: no question and no answer; the fields are prompt, output, reasoning: "
        '{"prompt": "1 and 2?", "output": 3, "reasoning": "1+2"}; '
        'rename them, or set data.columns = { question = "FIELD", answer = "FIELD", cot = "FIELD" }'
    )
    config = DataConfig(path="x", columns={"question": "prompt", "answer": "output", "cot": "reasoning"})
    read = [(e.question, e.steps, e.answer) for e in read_examples(path, config).examples]
    assert read == [("1 and 2?", ("1+2",), "3"), ("2.5 and 2?", ("2.5+2",), "4.5")]


def test_read_examples_notes_columns_that_no_row_has(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "2 and 2?", "answer": "4", "rationale": "2+2"})
    columns = {"question": "prompt", "answer": "output", "cot": "Rationale", "document": "context"}
    read = read_examples(path, DataConfig.model_validate({"path": "x", "columns": columns}))
    assert read.examples[0].steps == ("2+2",)
    assert read.notes == (
        "rows.jsonl: no row has the field 'Rationale', which data.columns names for cot",
        "rows.jsonl: no row has the field 'context', which data.columns names for document",
    ), "but none about the answer, which has our name"


def test_read_examples_notes_texts_that_are_not_read(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2, 3", "output": "5"}
    path = written(tmp_path, row, row | {"input": "4, 1", "instruction": "Sum."}, row | {"input": " "})
    config = DataConfig(path="x", columns={"question": "instruction", "answer": "output"})
    assert read_examples(path, config).notes[0] == (
        "rows.jsonl: input: has a value, which is not part of the question; add it there (2 lines)"
    )
    path = written(tmp_path, {"question": "Who?", "context": "Ada counts.", "answer": "Ada"})
    note = "rows.jsonl: context: has a value, which is not part of the question; add it there"
    assert read_examples(path, CONFIG).notes == (note,)
    assert read_examples(path, DataConfig(path="x", columns={"document": "context"})).notes == ()


@pytest.mark.parametrize(
    ("steps", "is_unclear"),
    [
        (["13+38=51", "51-1=50"], True),
        (["First step one.", "Then 12."], False),
        (["24", "16"], True),
        (["<<13+38=51>>", "<<51-1=50>>"], False),
        (["13+38=51;", "51-1=50;"], False),
        (["He has 51.\n", "Then 50."], False),
        ([" #1 #2 #", " #0 #3 #"], False),
        (["8", "0"], False),  # digits
        (["13+38=51"], False),
        ([], False),
    ],
)
def test_read_examples_notes_steps_without_separator(tmp_path: Path, steps: list[str], is_unclear: bool) -> None:
    path = written(tmp_path, ROW | {"steps": steps}, ROW | {"id": "b", "question": "1?", "steps": steps})
    notes = read_examples(path, CONFIG).notes
    assert len(notes) == is_unclear
    assert all("joins them without a separator" in note and note.endswith(" (2 lines)") for note in notes)
    assert read_examples(path, DataConfig(path="x", format="codi")).notes == ()


def test_read_examples_numbers_as_ids(tmp_path: Path) -> None:
    read = read_examples(written(tmp_path, ROW | {"id": 7}, ROW | {"id": 8.0}), CONFIG)
    assert [example.id for example in read.examples] == ["7", "8"]
    with pytest.raises(InputError, match="duplicate id '7'"):
        read_examples(written(tmp_path, ROW | {"id": 7}, ROW | {"id": "7"}), CONFIG)


def test_read_examples_refuses_csv(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n2 and 2?,4\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"^rows\.csv: rows are read from JSONL and Parquet; convert it"):
        get_dataset("rows.csv")


def test_split_chain_sentences() -> None:
    assert split_chain("He has 2.  He gets 2.5 more. So 4.5.\n", "sentences") == (
        "He has 2",
        " He gets 2.5 more",
        "So 4.5",
    )


def test_read_examples_accepts_byte_order_mark_line_ends_and_blank_lines(tmp_path: Path) -> None:
    line = json.dumps(ROW).encode()
    other = json.dumps(ROW | {"id": "b", "question": "?"}).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n" + other + b"\r\n\r\n")
    read = read_examples(path, CONFIG)
    assert [e.id for e in read.examples] == ["a", "b"]
    assert not read.notes
    path.write_bytes(line + b"\n" + other)
    assert read_examples(path, CONFIG).examples == read.examples


def test_read_examples_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*none\.jsonl"):
        read_examples(tmp_path / "none.jsonl", CONFIG)


def test_read_examples_of_shipped_files(shared: Path) -> None:
    counts = {"gsm8k/test": 1319, "gsm8k-aug/valid": 500, "gsm-hard/test": 1319, "svamp/test": 1000, "prosqa/test": 500}
    coconut = DataConfig(path="x", format="coconut", chain_steps="all")  # whose chains of sentences are lines
    for name, count in counts.items():
        read = read_examples(shared / "data" / f"{name}.jsonl", coconut if name == "prosqa/test" else CONFIG)
        assert len(read.examples) == count
        assert read.notes == ()
    gsm8k = read_examples(shared / "data/gsm8k/test.jsonl", CONFIG)
    assert sum(not e.steps for e in gsm8k.examples) == 18
    assert sum(len(e.steps) == 1 for e in gsm8k.examples) == 65
    assert sum(e.answer.startswith("-") for e in gsm8k.examples) == 2
    assert {"rationale", "raw_answer"} == set(gsm8k.examples[0].metadata)
    hash_ = "266837a2e0c77b63c430308bb468f9c878a6a4bfdaf8ff5c2e3052b096416f92"  # as the data's README has it
    assert gsm8k.sha256 == hash_
    answer, share = most_common_answer(gsm8k.examples)
    assert (answer, round(100 * share, 1)) == ("5", 3.0)
    multiplied = DataConfig(path="x", chain_field="cot", chain_split="whole")
    assert len(read_examples(shared / "data/multiplication/9x9-test.jsonl", multiplied).examples) == 1000


def test_most_common_answer() -> None:
    rows = [ReasoningExample(str(i), "?", (), answer) for i, answer in enumerate(["1", "2", "2", "3"])]
    assert most_common_answer(rows) == ("2", 0.5)


@pytest.mark.parametrize("column", [1, 40, 100, 150])
def test_excerpts_are_short_and_hold_the_place(column: int) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(150))
    part = make_excerpt(text, column)
    assert len(part) <= EXCERPT_LENGTH
    assert text[column - 1] in part
    assert make_excerpt("short", 3) == "short"
    assert make_excerpt("a\u202eb\x07c\u200bd\ud800") == r"a\u202eb\x07c\u200bd\ud800"
    assert len(make_excerpt("\u202e" * 200, 100)) <= EXCERPT_LENGTH


SQUAD = {
    "id": "5733", "title": "Notre_Dame", "context": "The school opened in 1842.", "question": "When did it open?",
    "answers": {"text": ["1842", "in 1842"], "answer_start": [21, 18]},
}  # fmt: skip


def test_read_examples_of_squad(tmp_path: Path) -> None:
    none = SQUAD | {"id": "5734", "answers": {"text": [], "answer_start": []}}
    read = read_examples(written(tmp_path, SQUAD, none), CONFIG)
    (example,) = read.examples
    assert (example.question, example.document, example.answer) == (SQUAD["question"], SQUAD["context"], "1842")
    assert read.notes == ("rows.jsonl: rows dropped because they have no answer",)


@pytest.mark.parametrize(
    ("row", "note"),
    [
        (
            {"question": "Which?", "answer": "B", "choices": {"label": ["A", "B"], "text": ["red", "blue"]}},
            "choices: has",
        ),
        ({"question": "Which? (A) red (B) blue", "answer": "B", "options": ["red", "blue"]}, None),
        (
            {"question": "How many are left?", "answer": "3", "Body": "Ann has 5 apples and eats 2."},
            "Body: has a value",
        ),
        ({"question": "What is 3+4?", "answer": "7", "solution": "3+4=7"}, 'set data.columns = { cot = "solution" }'),
        ({"question": "What is 3+4?", "answer": "7", "id": None, "context": None}, None),
    ],
)
def test_read_examples_notes_what_it_leaves_out(tmp_path: Path, row: dict[str, Any], note: str | None) -> None:
    notes = read_examples(written(tmp_path, row), CONFIG).notes
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_read_examples_refuses_a_document_of_parts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"document: not a string: .*; join its parts into one text"):
        read_examples(written(tmp_path, ROW | {"document": ["a", "b"]}), CONFIG)
    assert read_examples(written(tmp_path, ROW | {"document": None}), CONFIG).examples[0].document is None


def test_read_examples_of_gsm8k_reads_all_rows_as_the_first(tmp_path: Path) -> None:
    equations = {"question": "2 and 2?", "answer": "It is <<2+2=4>>4.\n#### 4"}
    prose = {"question": "2 and 3?", "answer": "It is five.\n#### 5"}
    read = read_examples(written(tmp_path, equations, prose), CONFIG)
    assert [example.steps for example in read.examples] == [("<<2+2=4>>",), ()]
    read = read_examples(written(tmp_path, prose, equations), CONFIG)
    assert [example.steps for example in read.examples] == [("It is five.",), ("It is 4.",)]


def test_read_examples_math(tmp_path: Path) -> None:
    """Rows of MATH, MATH-500 and NuminaMath: the answer is in a field or in the last box of the solution."""
    problem = {"problem": "What is half of 1?", "level": "Level 1"}
    solutions = [
        ("Halve it.\n" r"So $\boxed{0}$, or rather $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"It is $\boxed{\text{a set } \{1, 2\}}$", r"\text{a set } \{1, 2\}"),
        (r"$\boxed{\begin{pmatrix}1\\{2}\\\end{pmatrix}}$", r"\begin{pmatrix}1\\{2}\\\end{pmatrix}"),
        (r"The sum is \fbox{1,200}.", "1200"),
        (r"So $\boxed 2.5$.", "2.5"),
        (r"So $\boxed 1,200\]", "1200"),
        (r"It is \boxed{3}, not \boxed{} or \boxed{4", "3"),
    ]
    rows = [problem | {"solution": solution} for solution, _ in solutions]
    rows += [problem | {"solution": solution} for solution in ("A proof.", r"\boxed\frac12")]
    read = read_examples(written(tmp_path, *rows), CONFIG)
    assert [example.answer for example in read.examples] == [answer for _, answer in solutions]
    assert read.examples[0].question == problem["problem"]
    assert read.examples[0].steps == ("Halve it.", solutions[0][0].splitlines()[1])
    assert "rows.jsonl: rows dropped because they have no answer (2 lines)" in read.notes
    blank = written(tmp_path, problem | {"solution": r"\boxed{3}", "answer": ""})
    assert read_examples(blank, CONFIG).examples[0].answer == "3"
    for extra in ({}, {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}):
        file = written(tmp_path, problem | {"solution": r"\boxed{3}", "answer": "x = 3"} | extra)
        read = read_examples(file, CONFIG)
        assert (read.examples[0].answer, read.examples[0].steps) == ("x = 3", (r"\boxed{3}",))
        assert any("messages: not read beside" in note for note in read.notes) == bool(extra)
    conversation = problem | {"solution": r"\boxed{3}"} | extra  # NuminaMath-CoT: the reply is in the messages alone
    assert read_examples(written(tmp_path, conversation), CONFIG).examples[0].answer == "!"
    mixed = written(tmp_path, {"question": "3?", "answer": "3", "steps": []}, problem | {"solution": r"\boxed{3}"})
    with pytest.raises(InputError, match=r"no field question"):
        read_examples(mixed, CONFIG)
    with pytest.raises(InputError, match=r"contains no row .*rows dropped because they have no answer"):
        read_examples(written(tmp_path, problem | {"solution": "print(3)"}), CONFIG)
    proof = read_examples(
        written(tmp_path, problem | {"solution": "So."}, problem | {"solution": r"\boxed{3}"}), CONFIG
    )
    assert [example.answer for example in proof.examples] == ["3"]


def test_detect_columns_prefers_a_form_with_an_answer_to_an_unboxed_solution() -> None:
    unboxed, boxed = ({"problem": "1?", "solution": text} for text in ("So.", r"\boxed{1}"))
    for name, form in (
        ("prompt-completion", {"prompt": "a", "completion": "b"}),
        ("instruction", {"instruction": "a", "output": "b"}),
        ("conversations", {"conversations": []}),
    ):
        assert detect_columns(unboxed | form) == name
        assert detect_columns(boxed | form) == "math"


def test_read_examples_squad_answers_in_other_forms(tmp_path: Path) -> None:
    row = {"question": "Where?", "context": "In Paris."}
    for answers in ({"text": ["Paris"]}, {"text": "Paris"}, ["Paris"], "Paris"):
        read = read_examples(written(tmp_path, row | {"answers": answers}), TEXT)
        assert [example.answer for example in read.examples] == ["Paris"]
    for answers in ([{"text": "Paris"}], 3):
        with pytest.raises(InputError, match=r'answers: expected a list of texts or \{"text": \[…\]\}'):
            read_examples(written(tmp_path, row | {"answers": answers}), TEXT)
    for answers in (None, {"text": []}, {"answer_start": []}):
        rows = (row | {"answers": "Paris"}, row | {"answers": answers})
        assert len(read_examples(written(tmp_path, *rows), TEXT).examples) == 1


def test_read_examples_notes_a_chain_that_is_not_read_in_every_form(tmp_path: Path) -> None:
    for row in ({"question": "2?", "answer": "2", "steps": []}, {"prompt": "2?", "completion": "2"}):
        read = read_examples(written(tmp_path, row | {"reasoning": "1 + 1 = 2"}), CONFIG)
        assert any("reasoning: not read" in note for note in read.notes), row
