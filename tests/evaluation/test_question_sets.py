"""Questions as a run reads them: with their chains or without, from its own rows or from files of others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.config.data import DataConfig
from laconic.config.recipe import Recipe
from laconic.data.reasoning.answer_matching import CODI, TEXT
from laconic.data.reasoning.load import load_examples
from laconic.errors import InputError, UsageError
from laconic.evaluation.reasoning.question_sets import check_tasks, load_question_set, single_question
from laconic.evaluation.reasoning.run import gold_hash
from laconic.experiment.from_recipe import build_model
from laconic.storage.manifest import hash_json


@pytest.fixture
def run(shared: Path) -> Any:
    """What questions are read by: a tokenizer, positions, and a recipe of GSM8K, trained on without the last step."""

    def built(**data: Any) -> Any:
        data = {
            "source": "catalog",
            "name": ("gsm8k",),
            "data_dir": str(shared / "data"),
            "on_too_long": "drop",
        } | data
        return SimpleNamespace(
            folder=Path("run"),
            recipe=Recipe.model_construct(data=DataConfig.model_validate(data), method="kava", latents=None),
            parts=SimpleNamespace(
                tokenizer=build_model.load_tokenizer(shared / "models" / "stories260k"),
                decoder=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=2000)),
            ),
        )

    return built


def chain(run: Any, source: Any) -> str:
    """The chain of the first row, without spaces."""
    batch: Any = source.batch([0], 0, 0)
    return run.parts.tokenizer.decode(batch.chain_ids[0][batch.chain_mask[0]].tolist()).replace(" ", "")


def test_load_question_set_with_and_without_chains(run: Any, shared: Path) -> None:
    built = run()
    whole = load_question_set(built, "gsm8k", CODI, root=str(shared / "data"), limit=5, with_chains=True)
    plain = load_question_set(built, "gsm8k", CODI, limit=5)
    gold = load_examples("gsm8k", "test", built.recipe.data, 5).examples
    assert [item.answer for item in whole.examples] == [item.answer for item in plain.examples]
    assert [item.answer for item in whole.examples] == [item.answer for item in gold]
    assert chain(built, whole.source) == "".join(gold[0].steps[:-1])
    assert chain(built, plain.source) == ""
    assert (whole.max_question_tokens, list(whole.order), whole.has_text_answers) == (
        plain.max_question_tokens,
        list(plain.order),
        False,
    )
    with pytest.raises(InputError, match=r"no data.valid"):
        load_question_set(built, "valid", CODI)


def test_load_question_set_takes_the_chain_field_for_its_own_rows(run: Any, tmp_path: Path) -> None:
    row = {"question": "1 + 2?", "answer": "3", "steps": ["<<1+2=3>>"], "rationale": "one and two"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    path = str(tmp_path / "own.jsonl")
    built = run(
        source="file",
        name=None,
        data_dir=None,
        path=path,
        test=path,
        chain_field="rationale",
        chain_steps="all",
        chain_split="whole",
    )
    assert chain(built, load_question_set(built, "test", CODI, with_chains=True).source) == "oneandtwo"
    assert chain(built, load_question_set(built, path, CODI, with_chains=True).source) == "<<1+2=3>>"


def test_single_question(run: Any) -> None:
    built = run(max_tokens=4)
    result = single_question(built, " What is  1 + 2?", ("<<1+2=3>>",), None, CODI)
    assert (result.examples[0].question, result.has_text_answers, len(result.order)) == ("What is 1 + 2?", False, 1)
    assert single_question(built, "Who?", (), None, TEXT).has_text_answers
    built.parts.decoder.config.max_position_embeddings = 20
    with pytest.raises(InputError, match="more than the model's"):
        single_question(built, "Who? " * 9, (), None, CODI)


def test_check_tasks_refuses_equal_titles(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for name in ("a/own.jsonl", "own.jsonl", "gsm8k.jsonl", "gsm8k-valid.jsonl"):
        (tmp_path / name).touch()
    recipe = run(valid=str(tmp_path / "a/own.jsonl")).recipe
    check_tasks(recipe, ("gsm8k", "openai/gsm8k", "gsm8k:valid", "valid", f"{tmp_path}/a/../a/own.jsonl"), "run")
    for names in (("valid", f"{tmp_path}/own.jsonl"), ("gsm8k", "gsm8k.jsonl"), ("gsm8k:valid", "gsm8k-valid.jsonl")):
        with pytest.raises(UsageError, match=r"are both called .*; rename one of the files"):
            check_tasks(recipe, names, "run")


def test_load_question_set_for_a_model_keeps_the_plain_questions(run: Any, tmp_path: Path) -> None:
    rows = [{"question": f" {n}  more? ", "answer": answer, "steps": []} for n, answer in enumerate(("3", "no"))]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checkpoint.json").write_text('{"style":"plain"}')
    built = run()
    built.folder = tmp_path
    questions = load_question_set(built, str(tmp_path / "own.jsonl"), TEXT)
    assert [example.question for example in questions.examples] == [" 0  more? ", " 1  more? "]
    batch: Any = questions.source.batch([0], 0, 0)
    assert "Question:  0  more? \nAnswer:" in built.parts.tokenizer.decode(batch.question_ids[0].tolist())
    assert questions.has_text_answers, "some answers are texts, not the first"


def test_gold_hash_for_a_model_is_that_of_earlier_versions(run: Any, tmp_path: Path) -> None:
    """Their question sets had the whole prompts; results that they stored are still read."""
    built = run()
    built.folder = tmp_path
    (tmp_path / "checkpoint.json").write_text('{"style":"plain"}')
    (tmp_path / "own.jsonl").write_text('{"id": "a", "question": "1+2?", "answer": "3"}\n')
    questions = load_question_set(built, str(tmp_path / "own.jsonl"), CODI)
    assert gold_hash(questions) == hash_json([["a", "Question: 1+2?\nAnswer:", "3"]])


def test_load_question_set_mentions_rows_left_out(run: Any, tmp_path: Path) -> None:
    rows = [{"question": "1 + 2? " * n, "answer": "3", "steps": []} for n in (1, 1, 9)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = run()
    built.parts.decoder.config.max_position_embeddings = 60
    file = tmp_path / "own.jsonl"
    notes = load_question_set(built, str(file), CODI).notes
    assert [note.partition(": ")[2] for note in notes] == ['1 of 3 rows left out: 1 too long (on_too_long = "drop")']
    file.write_text(json.dumps(rows[0] | {"document": "a text"}) + "\n")
    assert load_question_set(built, str(file), CODI).notes == (
        "own: run does not read the documents that questions are about",
    )
