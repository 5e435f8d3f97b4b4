"""Validation during training: which protocol judges it, what it refuses, and what ranks have of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.config.data import DataConfig
from laconic.config.load import load_recipe
from laconic.data.reasoning.answer_matching import COCONUT, CODI, DIGIT, TEXT
from laconic.errors import InputError
from laconic.evaluation.validation import build_validation
from laconic.experiment.build import build_experiment
from laconic.experiment.build_data import default_answer_matcher
from tests.conftest import TINY_RECIPE

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("keys", "judged"),
    [
        ({}, CODI),
        ({"format": "codi"}, CODI),
        ({"format": "coconut", "chain": "all"}, CODI),
        ({"answers": "text"}, TEXT),
        ({"answers": "text", "format": "codi"}, TEXT),
        ({"answers": "text", "format": "coconut", "chain": "all"}, COCONUT),  # a text behind ### is not the whole line
        ({"answers": "text", "format": "icot", "chain": "all"}, COCONUT),
        ({"kind": "maths", "path": None, "name": "mult-4", "format": "icot", "chain": "all"}, COCONUT),
        ({"kind": "digits", "path": None, "format": "digits"}, DIGIT),
    ],
)
def test_the_protocol_of_a_kind_of_data(keys: dict[str, Any], judged: object) -> None:
    assert default_answer_matcher(DataConfig(**{"path": "rows.jsonl", **keys})) is judged


def test_a_gold_answer_that_is_no_number_is_an_error_at_load(tmp_path: Path) -> None:
    row = '{"question": "3 + 4 =", "answer": "%s"}\n'
    (tmp_path / "rows.jsonl").write_text(row % 7)
    (tmp_path / "valid.jsonl").write_text(row.replace("4", "5") % "8" + row.replace("4", "6") % "3 4")
    digits = (
        'kind = "digits"\nformat = "digits"\nchain = "all"\ndigits = { operations = 2, rows = 200, valid_rows = 20 }'
    )
    file = 'path = "rows.jsonl"\nvalid = "valid.jsonl"\nprompt = "ans"'
    (tmp_path / "own.toml").write_text(TINY_RECIPE.replace(digits, file).replace("batch = 8", "batch = 1"))
    said = r"data\.valid: the answer of valid\.jsonl:2 is '3 4', protocol codi asks for a number; set data\.answers"
    with pytest.raises(InputError, match=said):
        build_experiment(load_recipe(tmp_path / "own.toml")[0], CPU)


def test_ranks_share_the_problems(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE.replace("rows = 4", "rows = 7\nbatch = 2"))
    made = build_experiment(load_recipe(tmp_path / "tiny.toml")[0], CPU)
    assert made.validate is not None
    alone = made.validate(0)
    asked: list[int] = []

    class Method(torch.nn.Module):
        def answer(self, questions: Any, told: Any, *, teacher: bool) -> Any:
            asked.extend(questions.index.tolist())
            return made.method.answer(questions, told, teacher=teacher)  # pyright: ignore

    def exchange(mine: list[bool]) -> list[list[bool]]:
        return [mine, [True] * 3]  # what the other rank says

    ranks: Any = SimpleNamespace(rank=0, world_size=2, all_gather=exchange)
    shared = build_validation(made.recipe, made.parts, Method(), CPU, ranks)
    assert shared is not None
    found = shared(0)
    assert asked == [0, 2, 4, 6] * 2
    assert found.keys() == alone.keys()
    assert all(share >= 3 / 7 for share in found.values())
