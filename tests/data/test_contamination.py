"""Overlap of training, validation and test rows is refused."""

import json
from dataclasses import replace
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


def build_config(**more: Any) -> DataConfig:
    return DataConfig.model_validate({"source": "catalog", "name": "gsm8k", **more})


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("What is 12 + 7?", "What is 12 - 7?", False),
        ("Solve x + 3 = 5.", "Solve x - 3 = 5.", False),
        ("Is 3 < 5?", "Is 3 > 5?", False),
        ("What is -3 times 2?", "What is 3 times 2?", False),
        ("1.5 times 2", "1 5 times 2", False),
        ("x-3 = 5, x?", "x+3 = 5, x?", False),
        ("5–10 hours", "5-10 hours", True),
        ("12 − 7 apples", "12 - 7 apples", True),
        ("What is 3 × 4?", "What is 3 * 4?", True),
        ("buys 3,4 and 5", "buys 3, 4 and 5", True),
        ("1,000 cats", "1000 cats", False),
        ("COVID-19", "COVID 19", True),
        ("A list:\n- 3 pears", "A list: 3 pears", True),
        ("A well-known, 3-year-old cat; $5.", "a well known 3 year old cat $5", True),
        ("How many\nTOYS are left?", "how many toys  are left", True),
        ("twenty-five — no, 25", "Twenty five no 25", True),
        ("She has 2 toys?", "She has 3 toys?", False),
        ("3 + 4 - 2 =", "3 - 4 + 2 =", False),  # no words: signs count
        ("7 6 * 1 6", "7  6 * 1 6 ", True),
    ],
)
def test_normalise_question(one: str, other: str, equal: bool) -> None:
    assert (normalise_question(one) == normalise_question(other)) == equal


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (build_config(name="gsm8k:valid"), r"^data\.name gsm8k:valid: cannot train on valid rows"),
        (build_config(name=("gsm8k", "openai/gsm8k:test")), r"^data\.name openai/gsm8k:test: cannot train on test"),
        (build_config(name="a/b:validation"), r"^data\.name a/b:validation: cannot train on valid rows"),
        (build_config(valid="gsm8k:test"), r"^data\.valid gsm8k:test: test rows must not select"),
    ],
)  # fmt: skip
def test_check_dataset_names_refuses_held_out_splits(config: DataConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_dataset_names(config)


def test_check_dataset_names_accepts_train_splits() -> None:
    check_dataset_names(build_config(name=("gsm8k:train", "gsm8k-aug"), valid="gsm8k-aug:valid", test="gsm8k:test"))
    check_dataset_names(build_config(name="gsm8k-nl", valid="gsm8k-aug:validation"))


def test_check_known_files_refuses_held_out_splits() -> None:
    with pytest.raises(InputError, match=r"^data\.name a\.jsonl is gsm8k:test: cannot train on test rows"):
        check_known_files(build_config(name="a.jsonl"), {"a.jsonl": "gsm8k:test"})
    with pytest.raises(InputError, match=r"^data\.valid a\.jsonl is gsm8k:test: test rows must not select"):
        check_known_files(build_config(valid="a.jsonl"), {"a.jsonl": "gsm8k:test"})
    check_known_files(
        build_config(name="b.jsonl", valid="a.jsonl", test="c.jsonl"), {"a.jsonl": "svamp:valid", "c.jsonl": "x:test"}
    )


def test_check_marks_refuses_held_out_rows_unless_overlap_is_allowed() -> None:
    rows = [
        ReasoningExample("a", "?", (), "1", {"icot_split": "valid"}),
        ReasoningExample("b", "!", (), "1", {"icot_split": "train"}),
    ]
    with pytest.raises(InputError, match=r"^x: 1 rows are validation questions of GSM8K-Aug \(icot_split"):
        check_marks("x", rows, allow_overlap=False)
    check_marks("x", rows, allow_overlap=True)
    check_marks("x", rows[1:], allow_overlap=False)
    with pytest.raises(
        InputError, match=r"questions of MultiArith \(in_multiarith = True\); data\.name = aggregate has"
    ):
        check_marks("x", [ReasoningExample("a", "?", (), "1", {"in_multiarith": True})], allow_overlap=False)


def test_check_overlap_refuses_or_counts_held_out_questions() -> None:
    train = [ReasoningExample("t1", "2 and\n2?", (), "4"), ReasoningExample("t2", "3 and 3?", (), "6")]
    held_out = [ReasoningExample("h1", "2  and 2? ", (), "4")]
    with pytest.raises(InputError, match=r"held out \(t1 = h1\); .*data.allow_contamination"):
        check_overlap(train, held_out)
    assert check_overlap(train, held_out, allow_overlap=True) == 1
    assert check_overlap(train[1:], held_out) == 0


def test_merge_deduplicated_drops_questions_of_earlier_sets() -> None:
    one = [
        ReasoningExample("a", "Two and two?", (), "4"),
        ReasoningExample("b", "Two, and two?", (), "4"),
        ReasoningExample("c", "Three?", (), "3"),
    ]
    other = [ReasoningExample("d", "two and TWO", (), "4"), ReasoningExample("e", "Four?", (), "4")]
    rows, notes = merge_deduplicated(("x", "y"), (one, other))
    assert [row.id for row in rows] == ["a", "b", "c", "e"]  # what a set repeats within itself stays
    assert notes == ["y: 1 rows dropped because their questions are in an earlier set"]
    with pytest.raises(InputError, match=r"^id 'a' is in both x and z"):
        merge_deduplicated(("x", "z"), (one, [ReasoningExample("a", "Five?", (), "5")]))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name": "gsm8k/train.jsonl"}, r"500 rows are validation questions of GSM8K-Aug .* the other 6,973; remove"),
        ({"name": "aggregate/train.jsonl"}, r"108 rows are questions of MultiArith"),
        ({"name": "svamp/test.jsonl"}, r"is svamp:test: cannot train on test rows"),
        ({"valid": "gsm8k/test.jsonl"}, r"is gsm8k:test: test rows must not select"),
        ({"valid": "gsm8k-aug:valid", "test": "gsm8k:valid"}, r"^500 questions of data\.valid are also in data\.test"),
        ({"name": "aggregate", "valid": "aggregate:train"}, r"^1,384 training questions are also held out"),
    ],
)  # fmt: skip
def test_load_training_examples_refuses_contamination(shared: Path, more: dict[str, str], message: str) -> None:
    root = shared / "data"
    placed = {key: str(root / value) if value.endswith(".jsonl") else value for key, value in more.items()}
    with pytest.raises(InputError, match=message):
        load_training_examples(build_config(data_dir=str(root), **placed))


def test_load_training_examples_ignores_punctuation_in_overlap(shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Two, and TWO?", "answer": "4"}\n')
    other = tmp_path / "held.jsonl"
    other.write_text('{"question": "two and two", "answer": "4"}\n')
    with pytest.raises(InputError, match=r"1 training questions are also held out \(rows\.jsonl:1 = held"):
        load_training_examples(build_config(name=str(path), test=str(other)))
    allowed = build_config(name=str(path), test=str(other), allow_contamination=True)
    assert len(load_training_examples(allowed).examples) == 1


def test_check_overlap_and_merge_compare_the_document_too() -> None:
    about = [ReasoningExample(str(i), "How many?", (), "3", {}, f"Ann has {i} pears.") for i in range(3)]
    assert check_overlap(about[:2], about[2:]) == 0
    again = replace(about[0], id="again", document="ann has 0 pears")
    with pytest.raises(InputError, match="again = 0"):
        check_overlap([again], about)
    assert len(merge_deduplicated(["a", "b"], [about, [again]])[0]) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "one", "valid": "two"}, "^1 training questions are also held out"),
        ({"name": "other", "valid": "one", "test": "two"}, "^1 questions of data.valid are also in data.test"),
    ],
)
def test_load_training_examples_compares_documents_if_they_are_read(
    tmp_path: Path, keys: dict[str, str], message: str
) -> None:
    for name, question in (("one", "How many?"), ("two", "how many"), ("other", "Who?")):
        row = {"question": question, "answer": "4", "document": f"Text {name}."}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    config = build_config(**{key: str(tmp_path / f"{name}.jsonl") for key, name in keys.items()})
    assert len(load_training_examples(config, reads_documents=True).examples) == 1
    with pytest.raises(InputError, match=message):
        load_training_examples(config)


def test_check_overlap_and_merge_compare_all_messages_but_the_system_message() -> None:
    def talk(id: str, *texts: str, system: str = "") -> ReasoningExample:
        roles = ["system", *("user", "assistant") * len(texts)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, (system, *texts), strict=False)]
        return ReasoningExample(id, texts[-1], (), "So.", {"messages": messages})

    about_cats = ("Tell me about cats.", "They are pets.", "continue")
    cats, dogs = talk("cats", *about_cats), talk("dogs", "Tell me about dogs.", "They are pets.", "continue")
    assert len(merge_deduplicated("ab", ([cats], [dogs]))[0]) == 2
    assert check_overlap([cats], [dogs, talk("alone", "continue")]) == 0
    with pytest.raises(InputError, match=r"\(again = cats\)"):
        check_overlap([talk("again", *about_cats, system="Be brief.")], [cats])
    with pytest.raises(InputError, match=r"\(again = alone\)"):
        check_overlap([talk("again", "Continue?", system="Be brief.")], [talk("alone", "continue")])


def test_merge_deduplicated_ignores_documents_that_are_not_read() -> None:
    sets = [[ReasoningExample(name, "How many?", (), "3", {}, f"Text {name}.")] for name in ("a", "b")]
    assert len(merge_deduplicated("ab", sets, with_documents=True)[0]) == 2
    assert len(merge_deduplicated("ab", sets, with_documents=False)[0]) == 1
