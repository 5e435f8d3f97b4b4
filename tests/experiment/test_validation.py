"""Validation on problems: which protocol judges the answers, invalid gold answers, and sharing among ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.data import DataConfig
from laconic.config.load import load_recipe
from laconic.data.reasoning.answer_matching import COCONUT, CODI, DIGIT, ICOT, TEXT
from laconic.errors import InputError
from laconic.evaluation.validation import build_validation
from laconic.experiment.from_recipe.build import build_experiment
from laconic.experiment.from_recipe.build_data import choose_default_protocol
from laconic.training.ranks import Ranks
from tests.tiny_recipes import TINY_RECIPE

CPU = torch.device("cpu")
DIGITS = """source = "digits"
format = "digits"
chain_steps = "all"
digits = { num_operations = 2, train_rows = 200, valid_rows = 20 }"""


@pytest.mark.parametrize(
    ("keys", "protocol"),
    [
        ({"format": "codi"}, CODI),
        ({"format": "chat", "chain_steps": "all"}, CODI),
        ({"format": "coconut", "chain_steps": "all"}, COCONUT),
        ({"answer_type": "text"}, TEXT),
        ({"answer_type": "text", "format": "codi"}, TEXT),
        ({"answer_type": "text", "format": "coconut", "chain_steps": "all"}, COCONUT),  # the text after ### only
        ({"answer_type": "text", "format": "icot", "chain_steps": "all"}, ICOT),
        ({"source": "catalog", "path": None, "name": "mult-4", "format": "icot", "chain_steps": "all"}, ICOT),
        ({"source": "digits", "path": None, "format": "digits"}, DIGIT),
    ],
)
def test_choose_default_protocol(keys: dict[str, Any], protocol: object) -> None:
    assert choose_default_protocol(DataConfig(**{"path": "rows.jsonl", **keys})) is protocol


def test_choose_default_protocol_of_pccot_reads_the_prompt_of_the_recipe() -> None:
    protocol = choose_default_protocol(DataConfig(path="rows.jsonl", answer_prompt="so:")).for_chain()
    assert (protocol.name, protocol.extract("1+1=2 so:2")) == ("pccot", "2")


def test_build_validation_gold_answer_without_a_number(tmp_path: Path) -> None:
    row = '{"question": "3 + 4 =", "steps": ["7", "7"], "answer": "%s"}\n'
    (tmp_path / "rows.jsonl").write_text(row % "7 7")
    (tmp_path / "valid.jsonl").write_text(row.replace("4", "5") % "8" + row.replace("4", "6") % "3 4")
    file = 'path = "rows.jsonl"\nvalid = "valid.jsonl"\nformat = "codi"\nanswer_prompt = "ans"'
    assert DIGITS in TINY_RECIPE
    text = TINY_RECIPE.replace(DIGITS, file).replace("batch_size = 8", "batch_size = 1")
    (tmp_path / "own.toml").write_text(text)
    recipe = load_recipe(tmp_path / "own.toml")[0]
    experiment = build_experiment(recipe, CPU)
    number = "1 row whose answer is not a number, such as '7 7' of rows.jsonl:1; held-out rows must have one"
    assert experiment.notes[-1] == number
    with pytest.raises(InputError, match=r"valid\.jsonl:2: .*data\.answer_type"):
        build_validation(recipe, experiment.parts, experiment.method, CPU)
    (tmp_path / "valid.jsonl").write_text(row.replace("4", "5") % "8")
    short = load_recipe(tmp_path / "own.toml", ["validation.max_tokens=3"])[0]
    validation = build_validation(short, experiment.parts, experiment.method, CPU)
    cut = "validation: validation.max_tokens 3 cuts the longest chain and answer of the held-out rows, 4 tokens, "
    assert validation is not None
    assert validation.notes == (f"{cut}which can lower teacher_accuracy; set 4 or more",)
    (tmp_path / "rows.jsonl").write_text(row.replace('"7", "7"', "") % "7")
    with pytest.raises(InputError, match=r"rows\.jsonl: no row has a chain, from which method kava learns; add"):
        build_experiment(recipe, CPU)
    (tmp_path / "rows.jsonl").write_text(row.replace('"7", "7"', '"7"') % "7")
    with pytest.raises(InputError, match=r'else data\.chain_steps = "all"'):
        build_experiment(recipe, CPU)


def test_validation_is_shared_by_ranks(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE.replace("max_rows = 4", "max_rows = 7\nbatch_size = 2"))
    experiment = build_experiment(load_recipe(tmp_path / "tiny.toml")[0], CPU)
    recipe, parts, method = experiment.recipe, experiment.parts, experiment.method
    validate_alone = build_validation(recipe, parts, method, CPU)
    assert validate_alone is not None
    alone = validate_alone(0)
    assert tuple(alone) == recipe.validation_metrics
    answered: list[int] = []

    class RecordingMethod(torch.nn.Module):
        def answer(self, questions: Any, decoding: Any, *, with_cot: bool) -> Any:
            answered.extend(questions.row_index.tolist())
            return method.answer(questions, decoding, with_cot=with_cot)  # pyright: ignore

    class FirstOfTwoRanks(Ranks):
        rank, world_size = 0, 2

        def all_gather(self, value: Any) -> list[Any]:
            return [value, [True] * 3]  # the second rank got everything right

    validate = build_validation(recipe, parts, RecordingMethod(), CPU, FirstOfTwoRanks())
    assert validate is not None
    metrics = validate(0)
    assert answered == [0, 2, 4, 6] * 2
    assert metrics.keys() == alone.keys()
    assert all(fraction >= 3 / 7 for fraction in metrics.values())
