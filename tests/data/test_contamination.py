"""What must not meet in training is refused in one line each."""

from pathlib import Path
from typing import Any

import pytest

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.contamination import (
    check_dataset_names,
    check_known_files,
    check_marks,
    check_overlap,
    merge_deduplicated,
    normalise_question,
)
from laconic.data.reasoning.load import load_training_examples
from laconic.errors import InputError


def said(**more: Any) -> DataConfig:
    return DataConfig.model_validate({"kind": "maths", "name": "gsm8k", **more})


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("How many\nTOYS are left?", "how many toys  are left", True),
        ("twenty-five — no, 25", "Twenty five no 25", True),
        ("She has 2 toys?", "She has 3 toys?", False),
        ("3 + 4 - 2 =", "3 - 4 + 2 =", False),  # no words: signs count
        ("7 6 * 1 6", "7  6 * 1 6 ", True),
    ],
)
def test_same(one: str, other: str, equal: bool) -> None:
    assert (normalise_question(one) == normalise_question(other)) == equal


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (said(name="gsm8k:valid"), r"^data\.name gsm8k:valid: valid rows are not trained on; take a train split$"),
        (said(name=("gsm8k", "openai/gsm8k:test")), r"^data\.name openai/gsm8k:test: test rows are not trained on"),
        (said(name="a/b:validation"), r"^data\.name a/b:validation: valid rows are not trained on"),
        (said(valid="gsm8k:test"), r"^data\.valid gsm8k:test: test rows choose nothing; take rows of their own, as"),
        (said(name=("gsm8k-nl", "whynlp/gsm8k-aug-nl")), r"^gsm8k-nl and gsm8k-aug-nl: chains in words of other"),
        (said(name="gsm8k-nl", test="zen-E/GSM8k-Aug-NL:test"), r"^gsm8k-nl and zen-E/GSM8k-Aug-NL: chains in words"),
    ],
)  # fmt: skip
def test_names_that_are_refused(how: DataConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_dataset_names(how)


def test_names_that_are_not() -> None:
    check_dataset_names(said(name=("gsm8k:train", "gsm8k-aug"), valid="gsm8k-aug:valid", test="gsm8k:test"))
    check_dataset_names(said(name="gsm8k-nl", valid="gsm8k-aug:validation"))


def test_a_file_that_is_held_out_elsewhere() -> None:
    with pytest.raises(InputError, match=r"^data\.name a\.jsonl is gsm8k:test: test rows are not trained on; take a"):
        check_known_files(said(name="a.jsonl"), {"a.jsonl": "gsm8k:test"})
    with pytest.raises(
        InputError, match=r"^data\.valid a\.jsonl is gsm8k:test: test rows choose nothing; take rows of"
    ):
        check_known_files(said(valid="a.jsonl"), {"a.jsonl": "gsm8k:test"})
    check_known_files(
        said(name="b.jsonl", valid="a.jsonl", test="c.jsonl"), {"a.jsonl": "svamp:valid", "c.jsonl": "x:test"}
    )


def test_rows_that_are_marked_as_held_out() -> None:
    rows = [
        ReasoningExample("a", "?", (), "1", {"icot_split": "valid"}),
        ReasoningExample("b", "!", (), "1", {"icot_split": "train"}),
    ]
    with pytest.raises(InputError, match=r"^x: 1 rows are the validation questions of GSM8K-Aug \(icot_split"):
        check_marks("x", rows, allow_overlap=False)
    check_marks("x", rows, allow_overlap=True)
    check_marks("x", rows[1:], allow_overlap=False)
    with pytest.raises(
        InputError, match=r"questions of MultiArith \(in_multiarith = True\); data\.name = aggregate is"
    ):
        check_marks("x", [ReasoningExample("a", "?", (), "1", {"in_multiarith": True})], allow_overlap=False)


def test_held_out_questions_in_training_are_refused() -> None:
    train = [ReasoningExample("t1", "2 and\n2?", (), "4"), ReasoningExample("t2", "3 and 3?", (), "6")]
    held = [ReasoningExample("h1", "2  and 2? ", (), "4")]
    with pytest.raises(InputError, match=r"held out \(t1 = h1\); take them out, or set data.allow_contamination"):
        check_overlap(train, held)
    assert check_overlap(train, held, allow_overlap=True) == 1
    assert check_overlap(train[1:], held) == 0


def test_questions_of_several_sets_are_taken_once() -> None:
    one = [
        ReasoningExample("a", "Two and two?", (), "4"),
        ReasoningExample("b", "Two, and two?", (), "4"),
        ReasoningExample("c", "Three?", (), "3"),
    ]
    other = [ReasoningExample("d", "two and TWO", (), "4"), ReasoningExample("e", "Four?", (), "4")]
    rows, notes = merge_deduplicated(("x", "y"), (one, other))
    assert [row.id for row in rows] == ["a", "b", "c", "e"]  # what a set repeats within itself stays
    assert notes == ["y: 1 rows left out, whose questions stand in an earlier set"]
    with pytest.raises(InputError, match=r"^id 'a' stands in x and in z; rows need their own$"):
        merge_deduplicated(("x", "z"), (one, [ReasoningExample("a", "Five?", (), "5")]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name": "gsm8k/train.jsonl"}, r"500 rows are the validation questions of GSM8K-Aug .* the other 6,973, or"),
        ({"name": "aggregate/train.jsonl"}, r"108 rows are questions of MultiArith"),
        ({"name": "svamp/test.jsonl"}, r"is svamp:test: test rows are not trained on"),
        ({"valid": "gsm8k/test.jsonl"}, r"is gsm8k:test: test rows choose nothing"),
        ({"valid": "gsm8k-aug:valid", "test": "gsm8k:valid"}, r"^500 questions of data\.valid stand in data\.test: "),
        ({"name": "aggregate", "valid": "aggregate:train"}, r"^1,384 training questions stand in the rows that are"),
    ],
)  # fmt: skip
def test_rules_on_the_shared_files(shared: Path, more: dict[str, str], message: str) -> None:
    root = shared / "data"
    placed = {key: str(root / value) if value.endswith(".jsonl") else value for key, value in more.items()}
    with pytest.raises(InputError, match=message):
        load_training_examples(said(root=str(root), **placed))


def test_a_question_held_out_is_found_whatever_its_signs(shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Two, and TWO?", "answer": "4"}\n')
    other = tmp_path / "held.jsonl"
    other.write_text('{"question": "two and two", "answer": "4"}\n')
    with pytest.raises(InputError, match=r"1 training questions stand in the rows .* \(rows\.jsonl:1 = held"):
        load_training_examples(said(name=str(path), test=str(other)))
    assert len(load_training_examples(said(name=str(path), test=str(other), allow_overlap=True)).examples) == 1
