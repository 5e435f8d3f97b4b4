"""The model card of a run: its training data, and its results in order."""

import json
from pathlib import Path

import pytest

from laconic.config.recipe import Recipe
from laconic.evaluation.model_card import (
    build_model_card,
    describe_base,
    describe_data_licences,
    find_datasets,
    list_data_files,
    list_hub_names,
)
from tests.conftest import RunCli
from tests.runs import train_tiny_run

pytestmark = pytest.mark.usefixtures("unchecked")


def build_recipe(**data: object) -> Recipe:
    tables = {"method": "nocot", "model": {"name": "stories260k"}, "data": data, "train": {"steps": 1}}
    return Recipe.model_validate(tables, strict=False)


def test_find_datasets_looks_up_every_name() -> None:
    names = ["aggregate", "gsm8k-aug:train", "zen-E/GSM8k-Aug-NL", "folder/own.jsonl"]
    datasets = find_datasets(build_recipe(source="catalog", name=names))
    assert list(datasets) == ["aggregate", "gsm8k-aug:train", "zen-E/GSM8k-Aug-NL", "own.jsonl"]
    assert [info.name if info else None for info in datasets.values()] == [
        "aggregate",
        "gsm8k-aug",
        "zen-E/GSM8k-Aug-NL",
        None,
    ]
    hub_names = list_hub_names(datasets)
    assert "whynlp/gsm8k-aug" in hub_names
    assert len(hub_names) == len(set(hub_names)) == 2
    licences = describe_data_licences(datasets)
    assert licences.startswith("aggregate MIT, gsm8k-aug:train ")
    assert licences.endswith("own.jsonl not known to laconic")
    assert describe_data_licences(find_datasets(build_recipe(source="catalog", name="aggregate"))) == "MIT"
    assert "openai/gsm8k" in list_hub_names(find_datasets(build_recipe(source="catalog", name="gsm-union")))
    assert list(find_datasets(build_recipe(source="file", path="/home/me/rows.jsonl"))) == ["rows.jsonl"]


def test_describe_base_says_that_weights_were_rounded(tmp_path: Path) -> None:
    recipe = build_recipe(source="file", path="rows.jsonl")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(tmp_path / "base")})})
    (tmp_path / "base").mkdir()
    assert describe_base(recipe) == "base"
    source = {"file": "small.Q4_1.gguf", "quantization": {"Q4_1": 210, "F32": 61}}
    (tmp_path / "base" / "gguf_source.json").write_text(json.dumps(source))
    assert describe_base(recipe) == "base, converted from small.Q4_1.gguf (weights rounded to Q4_1)"


def test_list_data_files_are_beside_the_recipe() -> None:
    recipe = build_recipe(source="catalog", name=["/home/me/a.jsonl", "gsm8k-aug"], valid="own/b.jsonl", test="gsm8k")
    assert list_data_files(recipe) == ["`laconic/a.jsonl`", "`laconic/own/b.jsonl`"]


@pytest.mark.medium
def test_model_card_of_an_autocompressor_is_in_order_and_has_its_limit(tmp_path: Path, run_cli: RunCli) -> None:
    run = train_tiny_run("autocompressor", tmp_path)
    result = run_cli("evaluate", run, "--limit", 2, "--format", "json")
    assert result.code == 0, result.err
    evaluated = list(dict.fromkeys(result["dataset"] for result in json.loads(result.out)["results"]))
    card = build_model_card(run, "me/tiny")
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in card.splitlines() if line.startswith("| test")]
    assert list(dict.fromkeys(row[0] for row in rows)) == evaluated
    lengths = [int(name.rpartition("-")[2]) for name in evaluated]
    assert lengths == sorted(lengths)
    assert rows[0][2] == "none"
    assert {row[3] for row in rows} == {"2"}
    assert f"- measured with --limit 2: {', '.join(evaluated)}" in card
    assert "laconic train laconic/recipe.toml --out runs/reproduced" in card
