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
from laconic.evaluation.reasoning.question_sets import check_unique_titles, load_question_set, single_question
from laconic.experiment import build_model


@pytest.fixture
def run(shared: Path) -> Any:
    """What questions are read by: a tokenizer, positions, and a recipe of GSM8K, trained on without the last step."""

    def made(**data: Any) -> Any:
        data = {"kind": "maths", "name": ("gsm8k",), "root": str(shared / "data"), "too_long": "drop"} | data
        return SimpleNamespace(
            folder="run",
            recipe=Recipe.model_construct(data=DataConfig.model_validate(data), method="kava", latents=None),
            parts=SimpleNamespace(
                tokenizer=build_model.load_tokenizer(shared / "models" / "stories260k"),
                decoder=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=2000)),
            ),
        )

    return made


def chain(run: Any, source: Any) -> str:
    """The chain of the first row, without spaces."""
    batch: Any = source.batch([0], 0, 0)
    return run.parts.tokenizer.decode(batch.chain[0][batch.chain_mask[0]].tolist()).replace(" ", "")


def test_rows_come_with_their_chains_where_these_are_asked_for(run: Any, shared: Path) -> None:
    made = run()
    whole = load_question_set(made, "gsm8k", CODI, root=str(shared / "data"), limit=5, with_chains=True)
    plain = load_question_set(made, "gsm8k", CODI, limit=5)
    gold = load_examples("gsm8k", "test", made.recipe.data, 5).examples
    assert [each.answer for each in whole.examples] == [each.answer for each in plain.examples]
    assert [each.answer for each in whole.examples] == [each.answer for each in gold]
    assert chain(made, whole.source) == "".join(gold[0].steps[:-1])
    assert chain(made, plain.source) == ""
    assert (whole.max_question_tokens, list(whole.order), whole.has_text_answers) == (
        plain.max_question_tokens,
        list(plain.order),
        False,
    )
    with pytest.raises(InputError, match=r"valid: run names no data.valid; name a set or a file"):
        load_question_set(made, "valid", CODI)


def test_the_chain_of_its_own_rows_is_the_recipes_field(run: Any, tmp_path: Path) -> None:
    row = {"question": "1 + 2?", "answer": "3", "steps": ["<<1+2=3>>"], "rationale": "one and two"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    path = str(tmp_path / "own.jsonl")
    made = run(kind="jsonl", name=None, root=None, path=path, test=path, field="rationale", chain="all", split="whole")
    assert chain(made, load_question_set(made, "test", CODI, with_chains=True).source) == "oneandtwo"
    assert chain(made, load_question_set(made, path, CODI, with_chains=True).source) == "<<1+2=3>>"


def test_one_question_is_a_set_of_one(run: Any) -> None:
    made = run(max_tokens=4)
    found = single_question(made, " What is  1 + 2?", ("<<1+2=3>>",), None, CODI)
    assert (found.examples[0].question, found.has_text_answers, len(found.order)) == ("What is 1 + 2?", False, 1)
    assert single_question(made, "Who?", (), None, TEXT).has_text_answers
    made.parts.decoder.config.max_position_embeddings = 20
    with pytest.raises(InputError, match="more than the model's"):
        single_question(made, "Who? " * 9, (), None, CODI)


def test_two_places_of_one_name_are_refused(run: Any, tmp_path: Path) -> None:
    recipe = run(valid=str(tmp_path / "a/own.jsonl")).recipe
    check_unique_titles(
        recipe, ("gsm8k", "openai/gsm8k", "gsm8k:valid", "valid", f"{tmp_path}/a/../a/own.jsonl"), "run"
    )
    for names in (("valid", f"{tmp_path}/own.jsonl"), ("gsm8k", "gsm8k.jsonl"), ("gsm8k:valid", "gsm8k-valid.jsonl")):
        with pytest.raises(UsageError, match=r"are both called .*; rename one of the files"):
            check_unique_titles(recipe, names, "run")
